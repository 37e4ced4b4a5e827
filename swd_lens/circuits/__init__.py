"""Circuits: score units on a task, keep or ablate the best of them, and see what that costs and does."""

from swd_lens.circuits.attribution import UnitScores, attribute
from swd_lens.circuits.compare import Comparison, compare
from swd_lens.circuits.frontier import CostCurve, evaluate, plot_curves, prefix_grid
from swd_lens.circuits.intervene import intervention_hooks

__all__ = [
    "Comparison",
    "CostCurve",
    "UnitScores",
    "attribute",
    "compare",
    "evaluate",
    "intervention_hooks",
    "plot_curves",
    "prefix_grid",
]
