"""Replacements: what can stand in a surface's place, each made once in a folder: factors, exact controls, trained baselines.

1. Factors and trained baselines lie in folders named by what they are, and a hash of everything that decides them; a call that
   was interrupted goes on there.
2. Activations that baselines are trained on lie in a folder, too: the host is run once for all baselines of a site.
3. A method's name stands for one replacement of a surface in the whole folder.
"""

import functools
import hashlib
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from swd_lens.base.files import plain
from swd_lens.base.record import checked
from swd_lens.circuits.fidelity import fidelities
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.study.controls import PRUNED, control_options
from swd_lens.study.paper.sources import Sources
from swd_lens.tasks.streams import as_stream
from swd_lens.train import baselines
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import FactorSet

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


class Replacements(Sources):
    """The methods of the items; arguments as for `Sources`. roles: method -> its role in comparisons, of every method that was
    asked for."""

    @functools.cached_property
    def roles(self) -> dict[str, str]:
        return {}

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
