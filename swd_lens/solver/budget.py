"""How many entries each factor may keep (method.md §5.2 step 1; counts checked in §0.3 and §0.4).

1. n = min(d_in, d_out). The square factor (n x n) gets a fixed density, the other (n x max) the rest of K.
2. The square factor is the read factor when d_in <= d_out, else the write factor.
3. rounding="reference" then keeps entries strictly above a threshold, whose index is rounded in floating point as the
   reference code does it: usually one entry less than the budget, sometimes (184,320 of 442,368) none.
"""

from dataclasses import dataclass

from .spec import SolveSpec
from .validate import BudgetError


@dataclass(frozen=True)
class Budget:
    """Entries to keep: `square` in the (n, n) factor, `other` in the (n, max(d_in, d_out)) factor."""

    square: int
    other: int

    @property
    def total(self) -> int:
        """K."""
        return self.square + self.other


def plan_budget(d_in: int, d_out: int, sparsity: float | int, spec: SolveSpec) -> Budget:
    """Split K = (1 - s) numel(W) between the factors.

    Raises:
        BudgetError: the other factor would get less than one entry per unit; names the largest feasible sparsity.
    """
    n, numel = min(d_in, d_out), d_in * d_out
    # At least one entry per unit: only matters below n = 7, where the density alone gives less (ours, not the paper's).
    square = max(int(n**2 * spec.square_density(d_in, d_out)), n)
    if spec.rounding == "reference":
        other = int(numel * (1 - sparsity) - square)
    else:
        # 1 - s is inexact: 1000 * (1 - 0.9) = 99.99999999999997 is meant as 100.
        other = int(round(numel * (1 - sparsity), 6)) - square
    if other < n:
        raise BudgetError(_too_small(d_in, d_out, sparsity, square, n))
    return Budget(square, other)


def _too_small(d_in: int, d_out: int, sparsity: float | int, square: int, n: int) -> str:
    numel = d_in * d_out
    start = (
        f"sparsity={sparsity:g} leaves K={int(round(numel * (1 - sparsity), 6)):,} edges of {numel:,} for a "
        f"({d_in}, {d_out}) matrix, but the square factor takes {square:,} and the other needs {n:,}, one per unit; "
    )
    largest = int((1 - (square + n) / numel) * 10_000 - 1e-6) / 10_000  # rounded down, so that it is really feasible
    if largest <= 0:
        return start + "no sparsity is feasible: the matrix is too small for two sparse factors"
    return start + f"the largest feasible sparsity is {largest:.4f}, or lower square_density_square/_rectangular"


def strict_rank(numel: int, budget: float | int, cap: float | int) -> int:
    """k such that the reference code keeps the entries strictly above the k-th largest magnitude.

    Its threshold is sorted_ascending[int(numel * min(cap, 1 - budget / numel))]. The floating-point expression is kept
    as it is: its rounding decides whether budget or budget - 1 entries survive. Never below 2, which would keep none.
    """
    index = int(numel * min(cap, 1 - budget / numel))
    return max(numel - index, 2)


def realised(numel: int, budget: int, spec: SolveSpec) -> int:
    """Entries a factor really keeps when no magnitudes tie."""
    if spec.rounding == "exact":
        return budget
    return min(strict_rank(numel, budget, spec.sparsity_cap) - 1, numel)
