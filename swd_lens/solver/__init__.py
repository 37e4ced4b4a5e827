"""The sparse two-factor solver: tensors in, a `Solution` out.

1. spec.py, automatic.py, validate.py, budget.py: settings, arguments and budgets, checked.
2. anneal.py: the solver of presets best, quick, thorough and deep, with start.py, pieces.py, swaps.py, span.py, metric.py,
   support.py, births.py, refine.py and rotate.py; dsf.py: the paper's; prune.py, svd_prune.py: pruning alone.
3. solve.py: the call that goes through these.
4. cost.py: how many operations and bytes a call takes.
"""

from swd_lens.base.errors import BudgetError, GramError, SolveInputError, SparsityError, SpecError, UnitsError, WeightError
from swd_lens.solver.automatic import DOUBLE_UP_TO
from swd_lens.solver.budget import Budget, plan_budget, plan_shares, realised
from swd_lens.solver.cost import Cost, cost
from swd_lens.solver.solve import Solution, canonical, solve
from swd_lens.solver.spec import (
    BASES,
    DEFAULT_PRESET,
    PRESETS,
    AnnealSpec,
    AnySpec,
    DsfSpec,
    OnIteration,
    PruneSpec,
    SolveSpec,
    Step,
    SvdPruneSpec,
    resolve,
)

__all__ = [
    "BASES",
    "DEFAULT_PRESET",
    "DOUBLE_UP_TO",
    "PRESETS",
    "AnnealSpec",
    "AnySpec",
    "Budget",
    "BudgetError",
    "Cost",
    "DsfSpec",
    "GramError",
    "OnIteration",
    "PruneSpec",
    "Solution",
    "SolveInputError",
    "SolveSpec",
    "SparsityError",
    "SpecError",
    "Step",
    "SvdPruneSpec",
    "UnitsError",
    "WeightError",
    "canonical",
    "cost",
    "plan_budget",
    "plan_shares",
    "realised",
    "resolve",
    "solve",
]
