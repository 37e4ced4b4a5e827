"""Materials: what the items of one folder share, each made once: host, text, tasks, factors, trained baselines, dense runs.

1. Text and tasks: see sources.py. Tasks that the dense host hardly does are left out of the comparison of circuits.
2. Factors and trained baselines lie in folders named by what they are, and a hash of everything that decides them; a call that
   was interrupted goes on there.
3. Scores, curves and fidelities are parts of the folder (base/parts.py). A method's name stands for one replacement of a surface
   in the whole folder, so that what one item has measured of it no other measures again.
4. Activations that baselines are trained on lie in a folder, too: the host is run once for all baselines of a site.
5. In memory: Grams of the calibration text, and what the dense host gives on the tasks' prompts.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from swd_lens.base import __version__
from swd_lens.base.files import plain
from swd_lens.base.parts import Parts
from swd_lens.base.record import checked
from swd_lens.circuits import Comparison, CostCurve, attribute
from swd_lens.circuits.compare import comparison_over_hosts, several
from swd_lens.circuits.fidelity import Fidelity, fidelities, fidelity
from swd_lens.circuits.kept import DenseRuns, kept_scores
from swd_lens.circuits.null import CircuitNull, circuit_null
from swd_lens.circuits.protocol import Protocol
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.screen import WELL_DONE, skill
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.hosts.recording import standing_hooks
from swd_lens.study.asked import task_fingerprint
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.paper.sources import Sources
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.task import Task
from swd_lens.train import baselines
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import FactorSet

_TRAINERS = {
    "transcoder": baselines.transcoder,
    "vpd_recon": baselines.vpd_recon,
    "vpd_kl": baselines.vpd_kl,
}
# From so many matrices on, starting processes costs less than it gains; each holds a solver's memory.
_MANY, _MOST_WORKERS = 16, 4
_LOCAL = ("transcoder", "vpd_recon")  # trained on activations, not inside the host
# Label -> how W is factorized at a sparsity: the paper's solver, our default, and units that start as the neurons.
SOLVERS: Mapping[str, Mapping[str, Any]] = {
    "SWD (paper)": {"preset": "paper"},
    "SWD": {},
    "SWD from neurons": {"basis": "auto"},
}


class Materials(Sources):
    """What the items of a folder work on.

    Args:
        model: the dense host, with nothing attached.
        settings: of any item: those that all items share are taken.
        folder: of all items; held by the caller (`swd_lens.base.writer.writing`).
        text: a source for `load_text`, in place of the profile's.
        on_step: called with a line of text before each step; progress: bars within them.

    Raises:
        ResumeError: the folder holds what was made of another host, text, profile or version.
    """

    def __init__(
        self,
        model: Any,
        settings: ItemSettings,
        folder: Path,
        *,
        text: Any = None,
        on_step: Callable[[str], None] = lambda text: None,
        progress: bool = False,
    ):
        super().__init__(model, settings, text)
        self.folder, self.on_step, self.progress = folder, on_step, progress
        self.dense = DenseRuns()

    # ------------------------------------------------------------------------------------------ tasks

    def judged(self, surface: str) -> list[Task]:
        """The tasks whose circuits are sought on a surface, without those that the dense host hardly does.

        Args:
            surface: what is replaced; behind a comma what tells it from others of the same.
        """
        asked = self.settings["judged"].get(surface.split(",")[0])
        least = self.settings["least_accuracy"]
        return [
            task for task in self.tasks if (asked is None or task.name in asked) and self.accuracy[task.name] >= least
        ]

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Task -> share of its test prompts that the dense host does."""

        def measured() -> dict[str, Any]:
            self.on_step("what the dense model does of each task")
            return {row["task"]: float(row["right"]) for row in skill(self.model, self.tasks).to_dict("records")}

        names = {task.name: float for task in self.tasks}
        return self.parts.values(("dense", "accuracy"), measured, lambda values: checked("accuracy", values, names))

    def left_out_in_words(self) -> list[str]:
        """A sentence on tasks that are left out, or are no fair test; none where the dense host does all of them."""
        least, sentences = self.settings["least_accuracy"], []
        weak = {name: right for name, right in self.accuracy.items() if right < max(least, WELL_DONE)}
        for what, names in (
            (f"Left out, as the dense model does less than {least:.0%}", [n for n in weak if weak[n] < least]),
            (f"Below {WELL_DONE:.0%}, and so no fair test of circuits", [n for n in weak if weak[n] >= least]),
        ):
            if names:
                sentences.append(f"{what}: {', '.join(f'{name} ({weak[name]:.0%} right)' for name in names)}.")
        return sentences

    # ------------------------------------------------------------------------------------------ replacements

    @property
    def workers(self) -> int:
        """Matrices that are solved at a time where there are many of them: no bit depends on it."""
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return min(_MOST_WORKERS, torch.get_num_threads()) if on_cpu else 1

    def solver(self, label: str) -> dict[str, Any]:
        """Arguments of `factorize` that a label of SOLVERS stands for."""
        how = dict(SOLVERS[label])
        if how.get("preset") == "paper":
            how["outer_iterations"] = self.settings["outer_iterations"]
        return how

    def swd(
        self, sites: Any, sparsity: float | int, solver: str = "SWD", *, tokens: int | None = None, **how: Any
    ) -> FactorSet:
        """Factors of these sites, solved now or finished earlier.

        Args:
            solver: a label of SOLVERS.
            tokens: to calibrate on; None = the profile's, 0 = zero-data.
            how: further arguments of `factorize`.
        """
        n_tokens = self.settings["calibration_tokens"] if tokens is None else tokens
        how = {**self.solver(solver), **how}
        names = [site.name for site in find_sites(self.model, sites)]
        if not n_tokens:
            how |= {"calibration": "zero-data"}
        return factorize(
            self.model,
            names,
            sparsity=sparsity,
            tokens=self.calibration(n_tokens) if n_tokens else None,
            out=self._place("factors", solver, sites=names, sparsity=sparsity, tokens=n_tokens, **how),
            workers=self.workers if len(names) > _MANY else 1,
            progress=self.progress,
            **how,
        )

    def solved(
        self, sites: Any, sparsities: Sequence[float], tokens: Mapping[float, int] | None = None
    ) -> dict[str, Any]:
        """Method -> what makes its factors: every solver at every sparsity.

        Args:
            tokens: sparsity -> calibration tokens, where they are not the profile's.
        """
        usual = self.settings["calibration_tokens"]
        fitted_on = {s: (tokens or {}).get(s, usual) for s in sparsities}
        # Fitted to other text it is another replacement, and needs another name.
        more = {s: f", {n:,} tokens" if n != usual else "" for s, n in fitted_on.items()}
        return {
            f"{solver} s={s:g}{more[s]}": partial(self.swd, sites, s, solver, tokens=fitted_on[s])
            for s in sparsities
            for solver in SOLVERS
        }

    def exact(self, sites: Any) -> dict[str, Any]:
        """Method -> what makes exact factors of W: its neurons, and its singular vectors."""
        return {
            "Neurons": partial(baselines.neurons, self.model, sites),
            "SVD": partial(baselines.svd, self.model, sites),
        }

    def pruned(self, sites: Any, sparsities: Sequence[float]) -> dict[str, Any]:
        """Method -> what makes factors of those pruned to the same number of edges."""
        presets = {"Neurons pruned": "pruned", "SVD pruned": "svd_pruned"}
        return {
            f"{label} s={s:g}": partial(self._pruned, sites, s, preset)
            for s in sparsities
            for label, preset in presets.items()
        }

    def _pruned(self, sites: Any, sparsity: float | int, preset: str) -> FactorSet:
        return self.swd(sites, sparsity, preset=preset)

    def trained(self, site: str, spec: Mapping[str, Any], keep: Sequence[int] | None = None) -> LearnedUnits:
        """A baseline trained on the profile's text, now or earlier.

        Args:
            spec: "label", "method" (a key of _TRAINERS), and settings of the method's recipe; of several `l1` the largest whose
                CE delta on validation text is within the tolerance of the least is chosen: the sparsest that costs nothing.
            keep: token counts whose checkpoints are kept; None = the trainer's.
        """
        if isinstance(spec.get("l1"), list):
            each = {l1: self.trained(site, {**spec, "l1": l1}, keep) for l1 in sorted(spec["l1"])}
            return each[self._sparsest(site, str(spec["label"]), each)]
        how = {name: value for name, value in spec.items() if name not in ("label", "method")}
        self.on_step(f"train {spec['label']} at {site}")
        if spec["method"] in _LOCAL:
            how["activations"] = self.folder / "activations"
        rows = self.fitted_on(min(how["n_tokens"], self.settings["training_tokens"]))
        return _TRAINERS[spec["method"]](
            self.model,
            site,
            rows,
            preset="paper",
            keep=keep,
            out=self._place(
                "trained", spec["label"], site=site, keep=keep, tokens=as_stream(rows, self.model).n_rows, **how
            ),
            progress=self.progress,
            **how,
        )

    def _sparsest(self, site: str, label: str, trained: Mapping[float, LearnedUnits]) -> float:
        """The largest penalty whose CE delta on validation text is within the tolerance of the least."""

        def measured() -> dict[str, Any]:
            self.on_step(f"choose the penalty of {label} on validation text")
            sources = {str(l1): units for l1, units in trained.items()}
            return {l1: each.ce_delta for l1, each in fidelities(self.model, sources, self.validation).items()}

        key = (site, "penalty", label, *map(str, trained))
        deltas = self.parts.values(
            key, measured, lambda values: checked("penalties", values, dict.fromkeys(values, float))
        )
        allowed = min(deltas.values()) + self.settings["tolerance"]
        return max(l1 for l1 in trained if deltas[str(l1)] <= allowed)

    def _place(self, kind: str, label: str, **decided_by: Any) -> Path:
        """The folder of something that these values decide."""
        digest = hashlib.sha256(json.dumps(plain(decided_by), sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / kind / f"{re.sub(r'[^A-Za-z0-9.=]+', '_', label)}-{digest[:12]}"

    # ------------------------------------------------------------------------------------------ measured

    def provenance(self) -> dict[str, Any]:
        """Model, fingerprints of weights and text, version: what stands in every result."""
        return {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "host_sha256": self._host,
            "text": str(self.source),
            "heldout_sha256": self._heldout,
            **standing_hooks(self.model),
        }

    @cached_property
    def _host(self) -> str:
        return host_fingerprint(self.model, self.model.cfg)

    @cached_property
    def _heldout(self) -> str:
        return as_stream(self.heldout, self.model).fingerprint()

    @cached_property
    def parts(self) -> Parts:
        """What the folder has finished."""
        asked = {"swd_lens": __version__, "profile": self.settings.profile, **standing_hooks(self.model)}
        asked |= {"the host": self._host, "held-out tokens": self._heldout}
        asked |= {"text": str(self.source), "tasks": {task.name: task_fingerprint(task) for task in self.tasks}}
        shared = ("calibration_tokens", "outer_iterations", "context")
        return Parts(self.folder, asked | {name: self.settings[name] for name in shared})

    def local_fidelity(self, surface: str, method: str, units: Any) -> Fidelity:
        """Fidelity of a replacement on the held-out text with each site's local error, measured now or earlier."""

        def measured() -> dict[str, Any]:
            self.on_step(f"fidelity of {method} at {surface}")
            return fidelity(self.model, units, self.heldout, local=True, progress=self.progress).as_dict()

        return self.parts.values((surface, "local fidelity", method), measured, Fidelity.from_dict)

    def scores(self, surface: str, method: str, units: Any, task: Task) -> UnitScores:
        """Attribution of a replacement's units on a task, made now or earlier."""

        def scored() -> UnitScores:
            self.on_step(f"score the units of {method} at {surface} on {task.name}")
            how = {"positions": self.settings["positions"], "dense": self.dense, "progress": self.progress}
            return attribute(self.model, units, task, **how)

        return kept_scores(self.parts, (surface, "scores", method, task.name, self.settings["positions"]), scored)

    def null(self, surface: str, method: str, make: Any, curve: CostCurve) -> CircuitNull | None:
        """Random circuits of the edges of a curve's cheapest sufficient circuit; None where it has none but the empty one.

        Args:
            make: the method's units, or what makes them.
        """
        if not curve.cost_at(sufficiency=self.settings["sufficiency"]):
            return None
        assert curve.scores is not None
        scores, task = curve.scores, self.task(curve.task)

        def drawn() -> dict[str, Any]:
            self.on_step(f"random circuits beside that of {method} on {task.name}")
            circuit = curve.circuit_at(sufficiency=self.settings["sufficiency"])
            units = make() if callable(make) else make
            n = self.settings["random_circuits"]
            return circuit_null(self.model, units, task, scores, circuit=circuit, n=n, dense=self.dense).as_dict()

        return self.parts.values((surface, "null", method, task.name), drawn, CircuitNull.from_dict)

    def compare(
        self,
        surface: str,
        methods: Mapping[str, Any],
        *,
        ablations: str | Sequence[str] = "mean",
        hosts: Mapping[str, Any] = MappingProxyType({}),
    ) -> Comparison:
        """`swd_lens.compare` of these methods on the tasks judged at the surface; the first is the one that CE is matched to.

        Args:
            surface: what is replaced: the name under which its parts are kept.
            hosts: method -> its host, where that is another one with the same tokens.
        """
        protocol = Protocol(
            self.model,
            self.judged(surface),
            self.heldout,
            positions=several(self.settings["positions"], "positions"),
            ablations=several(ablations, "ablation"),
            progress=self.progress,
            parts=self.parts,
            key=(surface,),
            on_step=self.on_step,
            dense=self.dense,
        )
        reference = next(iter(methods))
        return comparison_over_hosts(
            protocol, methods, hosts, reference=reference, tolerance=self.settings["tolerance"]
        )
