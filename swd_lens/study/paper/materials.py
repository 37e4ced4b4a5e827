"""Materials: what the items of one folder share, each made once: host, text, tasks, replacements, and what is measured of them.

1. Text: the first rows are held out, those behind them are fitted on; a smaller request is the beginning of a larger one. Behind
   all that is fitted on lies validation text.
2. Tasks: those of the profile; and those whose circuits are sought on a surface, where a profile says which, without those that
   the dense host hardly does.
3. What can stand in a surface's place: factors, exact controls, trained baselines. Factors and trained baselines lie in folders
   named by what they are, and a hash of everything that decides them; a call that was interrupted goes on there. Activations that
   baselines are trained on lie in a folder, too: the host is run once for all baselines of a site. A method's name stands for one
   replacement of a surface in the whole folder.
4. Scores, curves, fidelities and random circuits are parts of the folder (base/step_cache.py), which know what they were made of:
   what one item has measured of a method on a surface no other measures again.
5. In memory: what the dense host gives on the tasks' prompts.
"""

import hashlib
import itertools
import json
import re
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.files import plain
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.record import checked
from swd_lens.base.step_cache import StepCache
from swd_lens.circuits import Comparison, CostCurve, attribute
from swd_lens.circuits.compare import comparison_over_hosts, several
from swd_lens.circuits.dense_cache import DenseCache, kept_scores
from swd_lens.circuits.fidelity import Fidelity, fidelities, fidelity
from swd_lens.circuits.null import CircuitNull, circuit_null, has_others
from swd_lens.circuits.protocol import Protocol
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.screen import WELL_DONE, skill
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import text_tokens
from swd_lens.hosts.recording import standing_hooks
from swd_lens.study.controls import PRUNED, control_options
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.tasks import load_task, load_text
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.task import Task
from swd_lens.tasks.text import stream_rows
from swd_lens.train import baselines
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import FactorSet

EMBEDDED = "embedded"
# Text of more tokens than this is read anew in each pass.
_KEPT_TOKENS = 8_388_608
_TRAINERS = {"transcoder": baselines.transcoder, "vpd_recon": baselines.vpd_recon, "vpd_kl": baselines.vpd_kl}
# From so many matrices on, starting processes costs less than it gains; each holds a solver's memory.
_MANY, _MOST_WORKERS = 16, 4
_LOCAL = ("transcoder", "vpd_recon")  # trained on activations, not inside the host
# Label -> how W is factorized at a sparsity: the paper's solver, our default, and ours from where the paper's units start.
SOLVERS: Mapping[str, Mapping[str, Any]] = {
    "SWD (paper)": {"preset": "paper"},
    "SWD": {},
    "SWD from the short side": {"basis": "paper"},
}


class Materials:
    """The materials that the items of a folder work on; see the module's docstring.

    Attributes:
        roles: method -> its role in comparisons, of every method that was asked for.
        dense: the dense host's values on prompts.

    Args:
        model: the dense host.
        settings: of any item: those that all items share are taken.
        folder: of all items; held by the caller (`swd_lens.base.writer.writing`).
        text: a source for `load_text`, in place of the profile's.
        on_step: called with a line of text before each step; progress: bars within them.

    Raises:
        ResumeError: (of `parts`) the folder holds what was made of another host, text, profile or version.
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
        self.model, self.settings, self.folder = model, settings, folder
        self.on_step, self.progress = on_step, progress
        self.source = settings["text"] if text is None else text
        self.roles: dict[str, str] = {}
        self.dense = DenseCache()
        self._calibration: dict[int, CalibrationText] = {}

    # ------------------------------------------------------------------ text and tasks

    @property
    def context(self) -> int:
        """Tokens in a row of text."""
        return min(int(self.model.cfg.n_ctx), self.settings["context"])

    @cached_property
    def heldout(self) -> Int[Tensor, "rows pos"]:
        """Rows that nothing is fitted on."""
        return self._text("test", self._whole_rows(self.settings["heldout_tokens"]), 0)

    def fitted_on(self, n_tokens: int) -> Int[Tensor, "rows pos"] | TokenStream:
        """The first so many tokens that are not held out, in whole rows; a stream where they are many."""
        n_tokens = self._whole_rows(n_tokens)
        if self.source == EMBEDDED or n_tokens <= _KEPT_TOKENS:
            return self._text("train", n_tokens, self.heldout.numel())
        rows = partial(stream_rows, self.source, self.model, **self._rows(self.heldout.numel()))
        return TokenStream(rows, n_tokens // self.context, row_length=self.context)

    @cached_property
    def validation(self) -> Int[Tensor, "rows pos"]:
        """As many rows as are held out, behind all that is trained on: settings of baselines are chosen on them."""
        n_tokens = self.heldout.numel()
        return self._text("validation", n_tokens, n_tokens + self._whole_rows(self.settings["training_tokens"]))

    def _text(self, split: str, n_tokens: int, behind: int) -> Int[Tensor, "rows pos"]:
        """Read a split of the embedded model's text, or another text, whose first `behind` tokens are skipped."""
        if self.source == EMBEDDED:
            return text_tokens(n_tokens, split=split)
        return load_text(self.source, self.model, n_tokens, **self._rows(behind))

    def _whole_rows(self, n_tokens: int) -> int:
        return -(-n_tokens // self.context) * self.context

    def _rows(self, behind: int) -> dict[str, Any]:
        """How another text is cut into rows."""
        separator = "eos" if self.model.tokenizer.eos_token_id is not None else None
        return {"context": self.context, "separator": separator, "skip_tokens": behind}

    def calibration(self, n_tokens: int) -> CalibrationText:
        """Give `fitted_on` as text that remembers its Grams."""
        if n_tokens not in self._calibration:
            self._calibration[n_tokens] = CalibrationText(self.fitted_on(n_tokens), self.model)
        return self._calibration[n_tokens]

    @cached_property
    def tasks(self) -> list[Task]:
        """The profile's tasks, tokenized for the host."""
        of_profile = self.settings["tasks"].items()
        return [load_task(name, self.model, n_train=train, n_test=test) for name, (train, test) in of_profile]

    def task(self, name: str) -> Task:
        """Find one of the tasks."""
        return next(task for task in self.tasks if task.name == name)

    def judged(self, surface: str) -> list[Task]:
        """The tasks whose circuits are sought on a surface, without those that the dense host hardly does. surface: what is
        replaced; behind a comma what tells it from others of the same."""
        asked = self.settings["judged"].get(surface.split(",")[0])
        least = self.settings["least_accuracy"]
        return [task for task in self.tasks if (asked is None or task.name in asked) and self.accuracy[task.name] >= least]

    @cached_property
    def accuracy(self) -> dict[str, float]:
        """Task -> share of its test prompts that the dense host does."""

        def measured() -> dict[str, Any]:
            self.on_step("what the dense model does of each task")
            return {row["task"]: float(row["right"]) for row in skill(self.model, self.tasks).to_dict("records")}

        names = {task.name: float for task in self.tasks}
        return self.parts.values(("dense", "accuracy"), measured, lambda values: checked("accuracy", values, names))

    def left_out_in_words(self) -> list[str]:
        """Say in sentences which tasks are left out, or are no fair test; none where the dense host does all of them."""
        least, sentences = self.settings["least_accuracy"], []
        weak = {name: right for name, right in self.accuracy.items() if right < max(least, WELL_DONE)}
        for what, names in (
            (f"Left out, as the dense model does less than {least:.0%}", [n for n in weak if weak[n] < least]),
            (f"Below {WELL_DONE:.0%}, and so no fair test of circuits", [n for n in weak if weak[n] >= least]),
        ):
            if names:
                sentences.append(f"{what}: {', '.join(f'{name} ({weak[name]:.0%} right)' for name in names)}.")
        return sentences

    # ------------------------------------------------------------------ the folder

    def provenance(self) -> dict[str, Any]:
        """Model, fingerprints of weights and text, version: what stands in every result."""
        return {
            "swd_lens": __version__,
            "model": str(self.model.cfg.model_name),
            "host_sha256": self._hashes[0],
            "text": str(self.source),
            "heldout_sha256": self._hashes[1],
            **as_stream(self.heldout, self.model).about(self.model),
            **standing_hooks(self.model),
        }

    @cached_property
    def _hashes(self) -> tuple[str, str]:
        """Fingerprints of the host and of the held-out text."""
        return host_fingerprint(self.model), as_stream(self.heldout, self.model).fingerprint()

    @cached_property
    def parts(self) -> StepCache:
        """The finished parts of the folder."""
        asked = {"swd_lens": __version__, "profile": self.settings.profile, **standing_hooks(self.model)}
        asked |= dict(zip(("the host", "held-out tokens"), self._hashes, strict=True))
        asked |= {"text": str(self.source), "tasks": {task.name: splits_fingerprint(task.splits) for task in self.tasks}}
        shared = ("calibration_tokens", "outer_iterations", "context")
        return StepCache(self.folder, asked | {name: self.settings[name] for name in shared})

    # ------------------------------------------------------------------ replacements

    def as_role(self, role: str, methods: Mapping[str, Any]) -> dict[str, Any]:
        """These methods, from now on known in this role ("swd", "control", "paper" or "trained")."""
        self.roles.update(dict.fromkeys(methods, role))
        return dict(methods)

    @property
    def workers(self) -> int:
        """Matrices that are solved at a time where there are many of them; last bits depend on the threads that each has then."""
        on_cpu = next(self.model.parameters()).device.type == "cpu"
        return min(_MOST_WORKERS, torch.get_num_threads()) if on_cpu else 1

    def solver(self, label: str) -> dict[str, Any]:
        """Arguments of `factorize` that a label of SOLVERS stands for."""
        how = dict(SOLVERS[label])
        if how.get("preset") == "paper":
            how["outer_iterations"] = self.settings["outer_iterations"]
        return how

    def swd(self, sites: Any, sparsity: float | int, solver: str = "SWD", *, tokens: int | None = None, **how: Any) -> FactorSet:
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

    def solved(self, sites: Any, sparsities: Sequence[float], tokens: Mapping[float, int] | None = None) -> dict[str, Any]:
        """Method -> what makes its factors: every solver at every sparsity. tokens: sparsity -> calibration tokens, where they
        are not the profile's."""
        usual = self.settings["calibration_tokens"]
        fitted_on = {s: (tokens or {}).get(s, usual) for s in sparsities}
        # Fitted to other text it is another replacement, and needs another name.
        more = {s: f", {n:,} tokens" if n != usual else "" for s, n in fitted_on.items()}
        methods: dict[str, Any] = {}
        for s, (solver, how) in itertools.product(sparsities, SOLVERS.items()):
            made = {f"{solver} s={s:g}{more[s]}": partial(self.swd, sites, s, solver, tokens=fitted_on[s])}
            methods |= self.as_role("paper" if how.get("preset") == "paper" else "swd", made)
        return methods

    def exact(self, sites: Any) -> dict[str, Any]:
        """Method -> what makes exact factors of W: its neurons, and its singular vectors."""
        made = {"Neurons": partial(baselines.neurons, self.model, sites), "SVD": partial(baselines.svd, self.model, sites)}
        return self.as_role("control", made)

    def pruned(self, sites: Any, sparsities: Sequence[float], presets: Sequence[str] = tuple(PRUNED)) -> dict[str, Any]:
        """Name what makes factors of pruned neurons and singular vectors, with as many edges as SWD's."""
        made = {
            f"{PRUNED[preset]} s={s:g}": partial(self.swd, sites, s, **control_options(preset, {}))
            for s in sparsities
            for preset in presets
        }
        return self.as_role("control", made)

    def trained_methods(self, site: str, specs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Method -> what trains it, see `trained`."""
        return self.as_role("trained", {spec["label"]: partial(self.trained, site, spec) for spec in specs})

    def trained(self, site: str, spec: Mapping[str, Any], keep: Sequence[int] | None = None) -> LearnedUnits:
        """Train a baseline on the profile's text, now or earlier.

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
        rows = self.fitted_on(min(how["n_tokens"], self.settings["training_tokens"]))
        n_rows = as_stream(rows, self.model).n_rows
        shared = {"activations": self.folder / "activations"} if spec["method"] in _LOCAL else {}
        return _TRAINERS[spec["method"]](
            self.model,
            site,
            rows,
            preset="paper",
            keep=keep,
            out=self._place("trained", spec["label"], site=site, keep=keep, tokens=n_rows, **how),
            progress=self.progress,
            **how,
            **shared,
        )

    def _sparsest(self, site: str, label: str, trained: Mapping[float, LearnedUnits]) -> float:
        """The largest penalty whose CE delta on validation text is within the tolerance of the least."""

        def measured() -> dict[str, Any]:
            self.on_step(f"choose the penalty of {label} on validation text")
            sources = {str(l1): units for l1, units in trained.items()}
            return {l1: each.ce_delta for l1, each in fidelities(self.model, sources, self.validation).items()}

        key = (site, "penalty", label, *map(str, trained))
        deltas = self.parts.values(key, measured, lambda values: checked("penalties", values, dict.fromkeys(values, float)))
        allowed = min(deltas.values()) + self.settings["tolerance"]
        return max(l1 for l1 in trained if deltas[str(l1)] <= allowed)

    def _place(self, kind: str, label: str, **decided_by: Any) -> Path:
        """The folder of something that these values decide."""
        digest = hashlib.sha256(json.dumps(plain(decided_by), sort_keys=True, default=str).encode()).hexdigest()
        return self.folder / kind / f"{re.sub(r'[^A-Za-z0-9.=]+', '_', label)}-{digest[:12]}"

    # ------------------------------------------------------------------ what is measured

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
        """Random circuits of the edges of a curve's cheapest circuit at the threshold; None where it has none, but the empty
        one or one of all units. make: the method's units, or what makes them."""
        threshold = {"recovered": self.settings["recovered"]}
        if not curve.carries or not curve.cost_at(**threshold):
            return None
        assert curve.scores is not None
        scores, task, circuit = curve.scores, self.task(curve.task), curve.circuit_at(**threshold)
        if not has_others(circuit):
            return None

        def drawn() -> dict[str, Any]:
            self.on_step(f"random circuits beside that of {method} on {task.name}")
            units = make() if callable(make) else make
            n = self.settings["random_circuits"]
            return circuit_null(self.model, units, task, scores, circuit=circuit, n=n, dense=self.dense).as_dict()

        asked = (f"{self.settings['recovered']:g}", str(self.settings["random_circuits"]))
        return self.parts.values((surface, "null", method, task.name, *asked), drawn, CircuitNull.from_dict)

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
        roles = {method: self.roles[method] for method in methods if method in self.roles}
        how = {"reference": reference, "tolerance": self.settings["tolerance"], "roles": roles}
        return comparison_over_hosts(protocol, methods, hosts, **how)
