"""compare: several replacements of one host on one task, through the same code, in one table and one figure.

For each named FactorSet: attribute on the train split, evaluate nested prefixes on the test split. Circuits are comparable
only where the unpruned replacements behave alike (paper §protocol): look at their `fidelity` first.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
from tqdm.auto import tqdm

from swd_lens.circuits.attribution import UnitScores, attribute
from swd_lens.circuits.frontier import CostCurve, evaluate, plot_curves
from swd_lens.tasks.task import Task


@dataclass(frozen=True)
class Comparison:
    """Curves and scores per method, on one task."""

    task: str
    curves: Mapping[str, CostCurve]
    scores: Mapping[str, UnitScores]

    def table(self, sufficiency: float | int = 0.9, necessity: float | int = 0.5) -> pd.DataFrame:
        """Least cost per method at a sufficiency and at a fraction of the whole necessity drop; empty where never reached."""
        rows = []
        for method, curve in self.curves.items():
            row: dict[str, Any] = {"task": self.task, "method": method, "margin": curve.q_unpruned}
            for what, threshold in (("sufficiency", sufficiency), ("necessity", necessity)):
                for cost in ("units", "edges"):
                    row[f"{cost} at {what} {threshold:g}"] = curve.cost_at(**{what: threshold}, cost=cost)
            rows.append(row)
        return pd.DataFrame(rows).convert_dtypes()

    def plot(self, cost: str = "edges"):
        """Sufficiency and necessity drop of every method; a matplotlib Figure."""
        return plot_curves(self.curves, cost=cost)


def compare(
    methods: Mapping[str, Any],
    model: Any,
    task: Task,
    *,
    positions: str = "scoring",
    ablation: str = "mean",
    progress: bool = False,
) -> Comparison:
    """Run the circuit protocol for several replacements (paper §3.2): same prompts, same scores, same prefixes.

    Raises:
        ValueError: no methods.
        AttachError: see `swd_lens.attach`.
    """
    if not methods:
        raise ValueError('nothing to compare: pass {"name": factors, ...}')
    scores: dict[str, UnitScores] = {}
    curves: dict[str, CostCurve] = {}
    for name, factors in tqdm(methods.items(), desc=f"compare on {task.name}", disable=not progress, leave=False):
        scores[name] = attribute(model, factors, task, positions=positions)
        curves[name] = evaluate(model, factors, task, scores[name], ablation=ablation)
    return Comparison(task.name, curves, scores)
