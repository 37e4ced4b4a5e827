"""Budgets: how many entries each factor may keep (method.md §5.2 step 1; counts checked in §0.3 and §0.4).

1. n = min(d_in, d_out). The square factor is the one on the short side: the read factor when d_in <= d_out, else the
   write factor. With n units it is (n, n), the other (n, max(d_in, d_out)).
2. `plan_budget` is the paper's: the square factor gets a fixed density, the other the rest of K.
3. `plan_shares` is the annealed solver's, for any number of units: the square factor gets a share of K that depends on
   K / n^2, and every unit can have an entry in both factors.
4. rounding="reference" (the paper's solver only) then keeps entries strictly above a threshold, whose index is rounded in
   floating point as the reference code does it: usually one entry less than the budget, sometimes (184,320 of 442,368)
   none.
"""

import math
from dataclasses import dataclass

from swd_lens.base.errors import BudgetError
from swd_lens.solver.automatic import NAMED_SIDE_SHARE
from swd_lens.solver.spec import AnnealSpec, DsfSpec


@dataclass(frozen=True)
class Budget:
    """Entries to keep: `square` in the factor on the side that units start on, `other` in the other one."""

    square: int
    other: int

    @property
    def total(self) -> int:
        """K."""
        return self.square + self.other


def plan_budget(d_in: int, d_out: int, sparsity: float | int, spec: DsfSpec) -> Budget:
    """Split K = (1 - s) numel(W) between the factors. Raises BudgetError: the other factor would get less than one entry per
    unit; names the largest feasible sparsity."""
    n, numel = min(d_in, d_out), d_in * d_out
    # At least one entry per unit: only matters below n = 7, where the density alone gives less (ours, not the paper's).
    square = max(int(n**2 * spec.square_density(d_in, d_out)), n)
    reference = spec.rounding == "reference"
    other = int(numel * (1 - sparsity) - square) if reference else edges(d_in, d_out, sparsity) - square
    if other < n:
        largest = int((1 - (square + n) / numel) * 10_000 - 1e-6) / 10_000  # rounded down, so that it is really feasible
        advice = "no sparsity is feasible: the matrix is too small for two sparse factors"
        if largest > 0:
            advice = f"the largest feasible sparsity is {largest:.4f}, or lower square_density_square/_rectangular"
        raise BudgetError(
            f"sparsity={sparsity:g} leaves K={edges(d_in, d_out, sparsity):,} edges of {numel:,} for a ({d_in}, {d_out}) "
            f"matrix, but the square factor takes {square:,} and the other needs {n:,}, one per unit; {advice}"
        )
    return Budget(square, other)


def edges(d_in: int, d_out: int, sparsity: float | int) -> int:
    """K = (1 - s) numel(W). 1 - s is inexact: 1000 * (1 - 0.9) = 99.99999999999997 is meant as 100."""
    return int(round(d_in * d_out * (1 - sparsity), 6))


def plan_shares(d_in: int, d_out: int, sparsity: float | int, units: int, spec: AnnealSpec) -> Budget:
    """Split K, or all that the units can hold, between the factors: at least one entry per unit and factor. Raises
    BudgetError: K < 2 units; names the largest feasible sparsity and number of units."""
    n, total = spec.coordinates(d_in, d_out), edges_for(units, d_in, d_out, sparsity)
    automatic = n**2 / (2 * (n**2 + total)) if spec.basis == "paper" else NAMED_SIDE_SHARE
    share = automatic if isinstance(spec.square_share, str) else float(spec.square_share)
    wanted = min(max(int(total * share), units), n * units)
    total = min(total, units * (d_in + d_out))  # few units cannot hold more
    square = min(max(wanted, total - units * (d_in + d_out - n)), total - units)
    return Budget(square, total - square)


def edges_for(units: int, d_in: int, d_out: int, sparsity: float | int) -> int:
    """K, of a matrix with at least so many units. Raises BudgetError where it has no read and write edge for each of them."""
    numel, total = d_in * d_out, edges(d_in, d_out, sparsity)
    if total >= 2 * units:
        return total
    feasible = math.floor((1 - 2 * units / numel) * 10_000) / 10_000
    advice = f"the largest feasible sparsity is {feasible:.4f}" if feasible > 0 else "no sparsity is feasible"
    alternative = f", or give units={total // 2}" if total >= 2 else ""
    raise BudgetError(
        f"sparsity={sparsity:g} leaves K={total:,} edges of {numel:,} for a ({d_in}, {d_out}) matrix, but {units:,} units "
        f"need {2 * units:,}: one read and one write edge each; {advice}{alternative}"
    )


def strict_rank(numel: int, budget: float | int, cap: float | int) -> int:
    """k such that the reference code keeps the entries strictly above the k-th largest magnitude.

    Its threshold is sorted_ascending[int(numel * min(cap, 1 - budget / numel))]. The floating-point expression is kept
    as it is: its rounding decides whether budget or budget - 1 entries survive. Never below 2, which would keep none.
    """
    index = int(numel * min(cap, 1 - budget / numel))
    return max(numel - index, 2)


def realised(numel: int, budget: int, spec: DsfSpec) -> int:
    """Entries a factor really keeps when no magnitudes tie."""
    if spec.rounding == "exact":
        return budget
    return min(strict_rank(numel, budget, spec.sparsity_cap) - 1, numel)
