"""cost: how many operations and bytes a call of `solve` takes, from the shapes and settings alone.

1. Operations: the matrix products of every step, 2 a b c for an (a, b) by (b, c) product; eigenvalues, inverses and selections
   are counted in equivalent operations, measured against products (eigenvalues run at a few percent of a product's speed, so
   that their 9 n^3 count as 60 n^3). In float64 an operation counts as two, and an entry has eight bytes. What is done to small
   matrices alone (pieces.py, span.py, rotate.py) is not counted: how long that is depends on the numbers.
2. Bytes: the buffers alive at the worst moment, beyond the float32 weight and Gram. The counts are of the algorithm as written in
   anneal.py, refine.py and dsf.py; tests/solver/test_cost.py compares the bytes with what torch really allocates.
"""

from dataclasses import dataclass
from typing import Any

from swd_lens.solver.births import STARTS, STEPS
from swd_lens.solver.outputs import REFIT_ROUNDS, REFIT_STEPS
from swd_lens.solver.prune import REFIT_ROUNDS as SWAP_REFIT_ROUNDS
from swd_lens.solver.spec import DEFAULT_PRESET, AnnealSpec, DsfSpec, PruneSpec, SvdPruneSpec, resolve
from swd_lens.solver.swaps import STEPS as SWAP_STEPS
from swd_lens.solver.validate import check_sparsity, resolve_units

EIGEN = 60.0  # x n^3
INVERSE = 6.0  # x n^3
BORN_SHARE = 0.1  # of the units, each time: none at s = .5, up to a fifth at .9 (matrices of the embedded model)
PER_ENTRY = 400.0  # an entry of a factor, per block update: about ten passes over memory, and the threshold

Counts = tuple[float, float]  # operations, and entries in memory


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
    """Cost of solve(weight (d_in, d_out), gram if calibrated, sparsity, output_gram if outputs_weighed, ...); the sparsity
    itself hardly matters. Raises SpecError, SparsityError, UnitsError: as `solve`."""
    spec = resolve(preset, overrides)
    check_sparsity(sparsity)
    width = resolve_units(units, d_in, d_out, spec)
    spec = spec.for_matrix(d_in, d_out, width, calibrated=calibrated)
    if isinstance(spec, AnnealSpec):
        # Counts of anneal.py with m units, refinement included.
        steps = spec.inner_iterations
        products = 2 * width * width * (d_in + d_out) + 2 * 2 * d_in * d_out * width  # normal matrices, right-hand sides
        solves = 2 * width * width * (d_in + d_out) * steps + 2 * INVERSE * width**3
        plain = products + solves + PER_ENTRY * width * (d_in + d_out)
        rank = min(width, d_out)  # of what the read factor is solved against (wide.py)
        in_gram = 2 * d_in * d_in * rank * (1 + 2 * steps) + 2 * width * rank * d_in * steps + EIGEN * rank**3
        with_gram = sum(spec.gram_blend(t / (spec.alternations - 1)) > 0 for t in range(spec.alternations))
        refining = spec.refine_rounds * (
            4 * d_in * d_out * width + spec.refine_steps * 2 * width * (width * (d_in + d_out) + calibrated * d_in * d_in)
        )
        # Residual and what units are used for; then the pieces of those that are born.
        use = 3 * 2 * d_in * d_out * width + calibrated * 2 * d_in * d_in * (width + d_out)
        born = BORN_SHARE * width * STARTS * STEPS * 2 * 2 * d_in * d_out
        once = EIGEN * d_in**3 * (with_gram > 0) + 2 * d_in * d_in * d_out
        flops = spec.alternations * plain + spec.births * (use + born) + refining + calibrated * (with_gram * in_gram + once)

        weights, factors, largest = d_in * d_out, (d_in + d_out) * width, max(d_in, d_out) * width
        # Target (and C M, C_g M); both factors and duals; the workspace's three, three temporaries, births' three.
        alternation = weights * (3 if calibrated else 1) + 2 * factors + (9 if spec.births else 6) * largest + 3 * width * width
        # Target; both factors and supports; conjugate gradients' seven.
        refinement = weights + 2 * factors + 7 * largest + 2 * width * width
        gram = 4 * d_in * d_in * calibrated  # scaled Gram, C, eigenvectors, workspace
        entries = 1.1 * (max(alternation, refinement) + gram)
    elif isinstance(spec, DsfSpec):
        flops, entries = _dsf(d_in, d_out, calibrated, spec)
    elif isinstance(spec, PruneSpec):
        flops, entries = _pruning(d_in, d_out, calibrated, spec)
    else:
        flops, entries = _svd_pruning(d_in, d_out, calibrated, spec)
    if outputs_weighed:
        refitting, refitting_entries = _refitting(d_in, d_out, width, calibrated)
        flops, entries = flops + refitting, max(entries, refitting_entries)
    if spec.precision_for(d_in, d_out) == "float64":
        copies = d_in * d_out + calibrated * d_in**2 + outputs_weighed * d_out**2  # of weight and Grams
        return Cost(2 * flops, int(8 * (entries + copies)))
    return Cost(flops, int(4 * entries))


def _refitting(d_in: int, d_out: int, m: int, calibrated: bool) -> Counts:
    """Counts of outputs.py with m units."""
    # A step of the write factor is weighed on both sides, one of the read factor by C alone: H is in its normal matrix.
    per_step = 2.0 * m * (m * (d_in + d_out) + d_out * d_out + calibrated * d_in * d_in)
    per_round = 2 * m * (2 * d_in * d_out + (m + d_out) * d_out + m * d_in + 2 * calibrated * d_in * d_in)
    # Target; given and refined factors, and supports; conjugate gradients' seven; H, scaled and as correlations.
    factors = 5 * (d_in + d_out) * m + 7 * max(d_in, d_out) * m + 2 * m * m
    entries = 2 * d_in * d_out + factors + 3 * d_out * d_out + 3 * d_in * d_in * calibrated
    return REFIT_ROUNDS * (REFIT_STEPS * per_step + per_round), 1.1 * entries


def _dsf(d_in: int, d_out: int, calibrated: bool, spec: DsfSpec) -> Counts:
    """Counts of the paper's solver (dsf.py)."""
    n, long = min(d_in, d_out), max(d_in, d_out)
    per_side = 2 * 2 * n * n + 2 * n * n * (1 + spec.inner_iterations)  # per column: norms, normal matrix, solves
    update = per_side * (n + long) + 2 * 2 * n * n * long + 4 * INVERSE * n**3 + 2 * PER_ENTRY * n * (n + long)
    final = 2 * d_in * d_in * n * calibrated + 2 * n * d_in * d_out + spec.final_iterations * 2 * n * n * d_out
    checking = 3 * d_in * d_in * calibrated  # whether the Gram is positive, before anything else
    entries = max(12 * d_in * d_out + 10 * n * n + d_in * n * calibrated, checking)
    return spec.outer_iterations * update + final, entries


def _pruning(d_in: int, d_out: int, calibrated: bool, spec: PruneSpec) -> Counts:
    """Counts of prune.py, swaps included."""
    weights, grams = d_in * d_out, 4 * d_in * d_in * calibrated
    flops = PER_ENTRY * weights + calibrated * (spec.refine_steps + 2) * 2 * d_in * d_in * d_out
    if spec.swaps == 0:
        # Target, magnitudes, their order and unit (eight bytes each), support, pruned; conjugate gradients' seven; both factors.
        return flops, (9 + 7 * calibrated) * weights + max(d_in, d_out) ** 2 + grams
    n = spec.coordinates(d_in, d_out)
    # What the entries that are missing would be worth; then two orders of all entries.
    choosing = 3 * 2 * d_in * d_out * n + calibrated * 2 * d_in * d_in * (n + d_out) + 2 * PER_ENTRY * n * (d_in + d_out)
    refitting = _round_of_refining(d_in, d_out, n, calibrated, SWAP_STEPS)
    flops += (spec.swaps + 1) * (choosing + refitting) + SWAP_REFIT_ROUNDS * refitting
    # What each entry is worth, its order, place and mark; or supports and conjugate gradients' seven.
    factors = n * (d_in + d_out)
    swapping = max(10 * factors, 2 * factors + 8 * max(d_in, d_out) * n + 2 * n * n)
    # Target; the pruned factors, the best ones and those of this turn.
    return flops, 3 * weights + 4 * factors + swapping + grams


def _svd_pruning(d_in: int, d_out: int, calibrated: bool, spec: SvdPruneSpec) -> Counts:
    """Counts of svd_prune.py."""
    n, weights = min(d_in, d_out), d_in * d_out
    # As many operations as the eigenvalues of n x n, and the products with the long side; then an order of all entries.
    decomposed = EIGEN * n**3 + 2 * 2 * n * d_in * d_out + PER_ENTRY * n * (d_in + d_out)
    flops = decomposed + spec.refine_rounds * _round_of_refining(d_in, d_out, n, calibrated, spec.refine_steps)
    factors = n * (d_in + d_out)
    # Scaled weight and target, the decomposition and its workspace; or both factors, what each entry is worth, its order, unit,
    # place and cost (eight bytes each), marks; or both factors and supports, and conjugate gradients' seven.
    choosing = 2 * factors + 15 * factors
    refining = 4 * factors + 8 * max(d_in, d_out) * n + 2 * n * n
    entries = 2 * weights + max(2 * factors + 4 * n * n + weights, choosing, refining) + 4 * d_in * d_in * calibrated
    return flops, entries


def _round_of_refining(d_in: int, d_out: int, n: int, calibrated: bool, steps: int) -> float:
    """Operations of a round of refine.py with n units."""
    per_step = 2 * n * (n * (d_in + d_out) + calibrated * d_in * d_in)
    return 4 * d_in * d_out * n + 2 * n * n * (d_in + d_out) + calibrated * 2 * 2 * d_in * d_in * n + steps * per_step
