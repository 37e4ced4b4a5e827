"""Circuits: score units on a task, keep or ablate the best of them, and see what that costs and does."""

from swd_lens.base.errors import NotCarriedWarning, UndefinedSufficiencyWarning
from swd_lens.circuits.ablation import intervention_hooks
from swd_lens.circuits.attribution import attribute
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.compare import compare
from swd_lens.circuits.comparison import Comparison, TaskComparison
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.evaluate import evaluate, evaluate_circuits, prefix_grid
from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.circuits.mib import MIBResult, mib
from swd_lens.circuits.per_token import PerTokenUse, per_token_use
from swd_lens.circuits.plots import plot_curves
from swd_lens.circuits.refine import Refinement, refine
from swd_lens.circuits.scores import UnitScores

__all__ = [
    "Circuit",
    "Comparison",
    "CostCurve",
    "Fidelity",
    "MIBResult",
    "NotCarriedWarning",
    "PerTokenUse",
    "Refinement",
    "TaskComparison",
    "UndefinedSufficiencyWarning",
    "UnitScores",
    "attribute",
    "compare",
    "evaluate",
    "evaluate_circuits",
    "fidelity",
    "intervention_hooks",
    "mib",
    "per_token_use",
    "plot_curves",
    "prefix_grid",
    "refine",
]
