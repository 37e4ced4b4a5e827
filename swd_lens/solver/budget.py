"""What follows from the shapes alone: how many entries each factor may keep (method.md §5.2 step 1; counts checked in §0.3 and
§0.4), and what a call of `solve` will cost.

1. n = min(d_in, d_out). The square factor is the one on the short side: the read factor when d_in <= d_out, else the
   write factor. With n units it is (n, n), the other (n, max(d_in, d_out)).
2. `plan_budget` is the paper's: the square factor gets a fixed density, the other the rest of K.
3. `plan_shares` is the annealed solver's, for any number of units: the square factor gets a share of K that depends on
   K / n^2, and every unit can have an entry in both factors.
4. rounding="reference" (the paper's solver only) then keeps entries strictly above a threshold, whose index is rounded in
   floating point as the reference code does it: usually one entry less than the budget, sometimes (184,320 of 442,368)
   none.
5. `cost`, operations: the matrix products of every step, 2 a b c for an (a, b) by (b, c) product; eigenvalues, inverses and
   selections are counted in equivalent operations, measured against products (eigenvalues run at a few percent of a
   product's speed, so that their 9 n^3 count as 60 n^3). In float64 an operation counts as two, and an entry has eight bytes.
   What is done to small matrices alone (pieces.py, span.py, rotate.py) is not counted: how long that is depends on the numbers.
6. `cost`, bytes: the buffers alive at the worst moment, beyond the float32 weight and Gram. The counts are of the algorithm as
   written in anneal.py, refine.py and dsf.py; tests/solver/test_cost.py compares the bytes with what torch really allocates.
"""

import math
from dataclasses import dataclass
from typing import Any

from swd_lens.base.errors import BudgetError
from swd_lens.solver.automatic import NAMED_SIDE_SHARE
from swd_lens.solver.births import STARTS, STEPS
from swd_lens.solver.outputs import REFIT_ROUNDS, REFIT_STEPS
from swd_lens.solver.presets import DEFAULT_PRESET, resolve
from swd_lens.solver.prune import REFIT_ROUNDS as SWAP_REFIT_ROUNDS
from swd_lens.solver.spec import AnnealSpec, DsfSpec, PruneSpec, SvdPruneSpec
from swd_lens.solver.swaps import STEPS as SWAP_STEPS
from swd_lens.solver.validate import check_sparsity, resolve_units


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
    """Split K = (1 - s) numel(W) between the factors.

    Raises:
        BudgetError: the other factor would get less than one entry per unit; names the largest feasible sparsity.
    """
    n, numel = min(d_in, d_out), d_in * d_out
    # At least one entry per unit: only matters below n = 7, where the density alone gives less (ours, not the paper's).
    square = max(int(n**2 * spec.square_density(d_in, d_out)), n)
    reference = spec.rounding == "reference"
    other = int(numel * (1 - sparsity) - square) if reference else edges(d_in, d_out, sparsity) - square
    if other < n:
        raise _too_small(d_in, d_out, sparsity, square, n)
    return Budget(square, other)


def edges(d_in: int, d_out: int, sparsity: float | int) -> int:
    """K = (1 - s) numel(W). 1 - s is inexact: 1000 * (1 - 0.9) = 99.99999999999997 is meant as 100."""
    return int(round(d_in * d_out * (1 - sparsity), 6))


def plan_shares(d_in: int, d_out: int, sparsity: float | int, units: int, spec: AnnealSpec) -> Budget:
    """Split K, or all that the units can hold, between the factors: at least one entry per unit and factor.

    Raises:
        BudgetError: K < 2 units; names the largest feasible sparsity and number of units.
    """
    n, total = spec.coordinates(d_in, d_out), edges(d_in, d_out, sparsity)
    _require_edges_for(units, d_in, d_out, sparsity)
    automatic = n**2 / (2 * (n**2 + total)) if spec.basis == "paper" else NAMED_SIDE_SHARE
    share = automatic if isinstance(spec.square_share, str) else float(spec.square_share)
    wanted = min(max(int(total * share), units), n * units)
    total = min(total, units * (d_in + d_out))  # few units cannot hold more
    square = min(max(wanted, total - units * (d_in + d_out - n)), total - units)
    return Budget(square, total - square)


def plan_pruned(d_in: int, d_out: int, sparsity: float | int) -> int:
    """K of a matrix that is pruned, or whose singular vectors are.

    Raises:
        BudgetError: below 2, which no unit can live on.
    """
    _require_edges_for(1, d_in, d_out, sparsity)
    return edges(d_in, d_out, sparsity)


def _require_edges_for(units: int, d_in: int, d_out: int, sparsity: float | int) -> None:
    """Raise BudgetError where K has no read and write edge for each of so many units."""
    numel, total = d_in * d_out, edges(d_in, d_out, sparsity)
    if total >= 2 * units:
        return
    feasible = math.floor((1 - 2 * units / numel) * 10_000) / 10_000
    advice = f"the largest feasible sparsity is {feasible:.4f}" if feasible > 0 else "no sparsity is feasible"
    alternative = f", or give units={total // 2}" if total >= 2 else ""
    raise BudgetError(
        f"sparsity={sparsity:g} leaves K={total:,} edges of {numel:,} for a ({d_in}, {d_out}) matrix, but {units:,} units "
        f"need {2 * units:,}: one read and one write edge each; {advice}{alternative}"
    )


def _too_small(d_in: int, d_out: int, sparsity: float | int, square: int, n: int) -> Exception:
    numel = d_in * d_out
    largest = int((1 - (square + n) / numel) * 10_000 - 1e-6) / 10_000  # rounded down, so that it is really feasible
    if largest <= 0:
        return BudgetError(
            f"sparsity={sparsity:g} leaves K={edges(d_in, d_out, sparsity):,} edges of {numel:,} for a ({d_in}, {d_out}) "
            f"matrix, but the square factor takes {square:,} and the other needs {n:,}, one per unit; no sparsity is "
            "feasible: the matrix is too small for two sparse factors"
        )
    return BudgetError(
        f"sparsity={sparsity:g} leaves K={edges(d_in, d_out, sparsity):,} edges of {numel:,} for a ({d_in}, {d_out}) "
        f"matrix, but the square factor takes {square:,} and the other needs {n:,}, one per unit; the largest feasible "
        f"sparsity is {largest:.4f}, or lower square_density_square/_rectangular"
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


EIGEN = 60.0  # x n^3
INVERSE = 6.0  # x n^3
BORN_SHARE = 0.1  # of the units, each time: none at s = .5, up to a fifth at .9 (matrices of the embedded model)
PER_ENTRY = 400.0  # an entry of a factor, per block update: about ten passes over memory, and the threshold


@dataclass(frozen=True)
class Cost:
    """flops: floating-point operations, matrix-product equivalents. peak_bytes: memory beyond weight and Gram."""

    flops: float
    peak_bytes: int


def cost(
    d_in: int,
    d_out: int,
    *,
    sparsity: float | int = 0.5,
    units: int | float | str | None = None,
    preset: str = DEFAULT_PRESET,
    calibrated: bool = True,
    outputs_weighed: bool = False,
    **overrides: Any,
) -> Cost:
    """Cost of solve(weight (d_in, d_out), gram if calibrated, sparsity, output_gram if outputs_weighed, ...); the sparsity itself
    hardly matters.

    Raises:
        SpecError, SparsityError, UnitsError: as `solve`.
    """
    spec = resolve(preset, overrides)
    check_sparsity(sparsity)
    width = resolve_units(units, d_in, d_out, spec)
    spec = spec.for_matrix(d_in, d_out, width, calibrated=calibrated)
    if isinstance(spec, AnnealSpec):
        flops, entries = (
            _anneal_flops(d_in, d_out, width, calibrated, spec),
            _anneal_entries(d_in, d_out, width, calibrated, spec),
        )
    elif isinstance(spec, DsfSpec):
        flops, entries = _dsf_flops(d_in, d_out, calibrated, spec), _dsf_entries(d_in, d_out, calibrated)
    elif isinstance(spec, PruneSpec):
        flops, entries = _prune_flops(d_in, d_out, calibrated, spec), _prune_entries(d_in, d_out, calibrated, spec)
    else:
        flops, entries = _svd_prune_flops(d_in, d_out, calibrated, spec), _svd_prune_entries(d_in, d_out, calibrated)
    if outputs_weighed:
        flops += _refit_flops(d_in, d_out, width, calibrated)
        entries = max(entries, _refit_entries(d_in, d_out, width, calibrated))
    if spec.precision_for(d_in, d_out) == "float64":
        copies = d_in * d_out + calibrated * d_in**2 + outputs_weighed * d_out**2  # of weight and Grams
        return Cost(2 * flops, int(8 * (entries + copies)))
    return Cost(flops, int(4 * entries))


def _anneal_flops(d_in: int, d_out: int, m: int, calibrated: bool, spec: AnnealSpec) -> float:
    steps = spec.inner_iterations
    products = 2 * m * m * (d_in + d_out) + 2 * 2 * d_in * d_out * m  # normal matrices, right-hand sides
    solves = 2 * m * m * (d_in + d_out) * steps + 2 * INVERSE * m**3
    plain = products + solves + PER_ENTRY * m * (d_in + d_out)
    rank = min(m, d_out)  # of what the read factor is solved against (wide.py)
    in_gram = 2 * d_in * d_in * rank * (1 + 2 * steps) + 2 * m * rank * d_in * steps + EIGEN * rank**3
    with_gram = sum(spec.gram_blend(t / (spec.alternations - 1)) > 0 for t in range(spec.alternations))
    refining = spec.refine_rounds * (
        4 * d_in * d_out * m + spec.refine_steps * 2 * m * (m * (d_in + d_out) + calibrated * d_in * d_in)
    )
    # Residual and what units are used for; then the pieces of those that are born.
    use = 3 * 2 * d_in * d_out * m + calibrated * 2 * d_in * d_in * (m + d_out)
    pieces = BORN_SHARE * m * STARTS * STEPS * 2 * 2 * d_in * d_out
    once = EIGEN * d_in**3 * (with_gram > 0) + 2 * d_in * d_in * d_out
    return (
        spec.alternations * plain + spec.births * (use + pieces) + refining + calibrated * (with_gram * in_gram + once)
    )


def _anneal_entries(d_in: int, d_out: int, m: int, calibrated: bool, spec: AnnealSpec) -> float:
    weights, factors = d_in * d_out, (d_in + d_out) * m
    largest = max(d_in, d_out) * m
    # Target (and C M, C_g M); both factors and duals; the workspace's three, three temporaries, births' three.
    alternation = weights * (3 if calibrated else 1) + 2 * factors + (9 if spec.births else 6) * largest + 3 * m * m
    # Target; both factors and supports; conjugate gradients' seven.
    refinement = weights + 2 * factors + 7 * largest + 2 * m * m
    gram = 4 * d_in * d_in * calibrated  # scaled Gram, C, eigenvectors, workspace
    return 1.1 * (max(alternation, refinement) + gram)


def _refit_flops(d_in: int, d_out: int, m: int, calibrated: bool) -> float:
    # A step of the write factor is weighed on both sides, one of the read factor by C alone: H is in its normal matrix.
    per_step = 2.0 * m * (m * (d_in + d_out) + d_out * d_out + calibrated * d_in * d_in)
    per_round = 2 * m * (2 * d_in * d_out + (m + d_out) * d_out + m * d_in + 2 * calibrated * d_in * d_in)
    return REFIT_ROUNDS * (REFIT_STEPS * per_step + per_round)


def _refit_entries(d_in: int, d_out: int, m: int, calibrated: bool) -> float:
    # Target; given and refined factors, and supports; conjugate gradients' seven; H, scaled and as correlations.
    factors = 5 * (d_in + d_out) * m + 7 * max(d_in, d_out) * m + 2 * m * m
    return 1.1 * (2 * d_in * d_out + factors + 3 * d_out * d_out + 3 * d_in * d_in * calibrated)


def _dsf_flops(d_in: int, d_out: int, calibrated: bool, spec: DsfSpec) -> float:
    n, long = min(d_in, d_out), max(d_in, d_out)
    per_side = 2 * 2 * n * n + 2 * n * n * (1 + spec.inner_iterations)  # per column: norms, normal matrix, solves
    update = per_side * (n + long) + 2 * 2 * n * n * long + 4 * INVERSE * n**3 + 2 * PER_ENTRY * n * (n + long)
    final = 2 * d_in * d_in * n * calibrated + 2 * n * d_in * d_out + spec.final_iterations * 2 * n * n * d_out
    return spec.outer_iterations * update + final


def _dsf_entries(d_in: int, d_out: int, calibrated: bool) -> int:
    n, weights = min(d_in, d_out), d_in * d_out
    checking = 3 * d_in * d_in * calibrated  # whether the Gram is positive, before anything else
    return max(12 * weights + 10 * n * n + d_in * n * calibrated, checking)


def _prune_flops(d_in: int, d_out: int, calibrated: bool, spec: PruneSpec) -> float:
    pruned = PER_ENTRY * d_in * d_out + calibrated * (spec.refine_steps + 2) * 2 * d_in * d_in * d_out
    if spec.swaps == 0:
        return pruned
    n = spec.coordinates(d_in, d_out)
    # What the entries that are missing would be worth; then two orders of all entries.
    choosing = (
        3 * 2 * d_in * d_out * n + calibrated * 2 * d_in * d_in * (n + d_out) + 2 * PER_ENTRY * n * (d_in + d_out)
    )
    refitting = _refining_flops(d_in, d_out, n, calibrated, SWAP_STEPS)
    return pruned + (spec.swaps + 1) * (choosing + refitting) + SWAP_REFIT_ROUNDS * refitting


def _prune_entries(d_in: int, d_out: int, calibrated: bool, spec: PruneSpec) -> int:
    # Target, magnitudes, their order and unit (eight bytes each), support, pruned; conjugate gradients' seven; both factors.
    pruning = (9 + 7 * calibrated) * d_in * d_out + max(d_in, d_out) ** 2
    if spec.swaps == 0:
        return pruning + 4 * d_in * d_in * calibrated
    n, weights = spec.coordinates(d_in, d_out), d_in * d_out
    # Target; the pruned factors, the best ones and those of this turn.
    return 3 * weights + 4 * n * (d_in + d_out) + _swap_entries(d_in, d_out, n) + 4 * d_in * d_in * calibrated


def _swap_entries(d_in: int, d_out: int, n: int) -> int:
    factors = n * (d_in + d_out)
    # What each entry is worth, its order, place and mark; or supports and conjugate gradients' seven.
    return max(10 * factors, 2 * factors + 8 * max(d_in, d_out) * n + 2 * n * n)


def _refining_flops(d_in: int, d_out: int, n: int, calibrated: bool, steps: int) -> float:
    """Of a round of refine.py, of n units."""
    per_step = 2 * n * (n * (d_in + d_out) + calibrated * d_in * d_in)
    return 4 * d_in * d_out * n + 2 * n * n * (d_in + d_out) + calibrated * 2 * 2 * d_in * d_in * n + steps * per_step


def _svd_prune_flops(d_in: int, d_out: int, calibrated: bool, spec: SvdPruneSpec) -> float:
    n = min(d_in, d_out)
    # As many operations as the eigenvalues of n x n, and the products with the long side; then an order of all entries.
    decomposed = EIGEN * n**3 + 2 * 2 * n * d_in * d_out + PER_ENTRY * n * (d_in + d_out)
    return decomposed + spec.refine_rounds * _refining_flops(d_in, d_out, n, calibrated, spec.refine_steps)


def _svd_prune_entries(d_in: int, d_out: int, calibrated: bool) -> int:
    n, weights = min(d_in, d_out), d_in * d_out
    factors = n * (d_in + d_out)
    # Scaled weight and target, the decomposition and its workspace; or both factors, what each entry is worth, its order, unit,
    # place and cost (eight bytes each), marks; or both factors and supports, and conjugate gradients' seven.
    choosing = 2 * factors + 15 * factors
    refining = 4 * factors + 8 * max(d_in, d_out) * n + 2 * n * n
    return 2 * weights + max(2 * factors + 4 * n * n + weights, choosing, refining) + 4 * d_in * d_in * calibrated
