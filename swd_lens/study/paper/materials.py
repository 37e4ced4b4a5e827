"""Materials: what the items of one folder share, each made once: host, text, tasks, replacements, and what is measured of them.

1. sources.py: text and tasks; replacements.py: factors, exact controls, trained baselines.
2. Scores, curves, fidelities and random circuits are parts of the folder (base/step_cache.py): what one item has measured of a
   method on a surface no other measures again.
3. In memory: what the dense host gives on the tasks' prompts.
"""

from collections.abc import Mapping, Sequence
from functools import cached_property
from types import MappingProxyType
from typing import Any

from swd_lens.circuits import Comparison, CostCurve, attribute
from swd_lens.circuits.compare import comparison_over_hosts, several
from swd_lens.circuits.dense_cache import DenseCache, kept_scores
from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.circuits.null import CircuitNull, circuit_null, has_others
from swd_lens.circuits.protocol import Protocol
from swd_lens.circuits.scores import UnitScores
from swd_lens.study.paper.replacements import Replacements
from swd_lens.tasks.task import Task


class Materials(Replacements):
    """The materials that the items of a folder work on; arguments as for `Sources`."""

    @cached_property
    def dense(self) -> DenseCache:
        """The dense host's values on prompts."""
        return DenseCache()

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
