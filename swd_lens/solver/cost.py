"""What a call of `solve` will cost, from the shapes alone.

1. Operations: the matrix products of every step, 2 a b c for an (a, b) by (b, c) product; eigenvalues, inverses and
   selections are counted in equivalent operations, measured against products (eigenvalues run at a few percent of a
   product's speed, so that their 9 n^3 count as 60 n^3).
2. Bytes: the buffers alive at the worst moment, beyond the float32 weight and Gram.
3. In float64 an operation counts as two, and an entry has eight bytes.

The counts are of the algorithm as written in anneal.py, refine.py and dsf.py; tests/solver/test_cost.py compares the
bytes with what torch really allocates.
"""

from dataclasses import dataclass
from typing import Any

from swd_lens.solver.spec import DEFAULT_PRESET, AnnealSpec, DsfSpec, PruneSpec, resolve
from swd_lens.solver.validate import check_sparsity, resolve_units

EIGEN = 60.0  # x n^3
INVERSE = 6.0  # x n^3
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
    **overrides: Any,
) -> Cost:
    """Cost of solve(weight (d_in, d_out), gram if calibrated, sparsity, ...); the sparsity itself hardly matters.

    Raises:
        SpecError, SparsityError, UnitsError: as `solve`.
    """
    spec = resolve(preset, overrides)
    check_sparsity(sparsity)
    width = resolve_units(units, d_in, d_out, spec)
    if isinstance(spec, AnnealSpec):
        flops, entries = (
            _anneal_flops(d_in, d_out, width, calibrated, spec),
            _anneal_entries(d_in, d_out, width, calibrated),
        )
    elif isinstance(spec, DsfSpec):
        flops, entries = _dsf_flops(d_in, d_out, calibrated, spec), _dsf_entries(d_in, d_out, calibrated)
    else:
        flops, entries = _prune_flops(d_in, d_out, calibrated, spec), _prune_entries(d_in, d_out, calibrated)
    if spec.precision_for(d_in, d_out) == "float64":
        copies = d_in * d_out + calibrated * d_in**2  # of weight and Gram
        return Cost(2 * flops, int(8 * (entries + copies)))
    return Cost(flops, int(4 * entries))


def _anneal_flops(d_in: int, d_out: int, m: int, calibrated: bool, spec: AnnealSpec) -> float:
    steps = spec.inner_iterations
    products = 2 * m * m * (d_in + d_out) + 2 * 2 * d_in * d_out * m  # normal matrices, right-hand sides
    solves = 2 * m * m * (d_in + d_out) * steps + 2 * INVERSE * m**3
    plain = products + solves + PER_ENTRY * m * (d_in + d_out)
    in_gram = 2 * d_in * d_in * m * (1 + 2 * steps) + 2 * m * m * d_in * steps + EIGEN * m**3
    with_gram = sum(spec.gram_blend(t / (spec.outer_iterations - 1)) > 0 for t in range(spec.outer_iterations))
    refining = spec.refine_rounds * (
        4 * d_in * d_out * m + spec.refine_steps * 2 * m * (m * (d_in + d_out) + calibrated * d_in * d_in)
    )
    once = EIGEN * d_in**3 * (with_gram > 0) + 2 * d_in * d_in * d_out
    return spec.outer_iterations * plain + refining + calibrated * (with_gram * in_gram + once)


def _anneal_entries(d_in: int, d_out: int, m: int, calibrated: bool) -> float:
    weights, factors = d_in * d_out, (d_in + d_out) * m
    largest = max(d_in, d_out) * m
    # Target (and C M, C_g M); both factors and duals; right-hand side, dense solution, mask, three temporaries.
    alternation = weights * (3 if calibrated else 1) + 2 * factors + 6 * largest + 3 * m * m
    # Target; both factors and supports; conjugate gradients' seven.
    refinement = weights + 2 * factors + 7 * largest + 2 * m * m
    gram = 4 * d_in * d_in * calibrated  # scaled Gram, C, eigenvectors, workspace
    return 1.1 * (max(alternation, refinement) + gram)


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
    return PER_ENTRY * d_in * d_out + calibrated * (spec.refine_steps + 2) * 2 * d_in * d_in * d_out


def _prune_entries(d_in: int, d_out: int, calibrated: bool) -> int:
    # Target, magnitudes, their order and unit (eight bytes each), support, pruned; conjugate gradients' seven; both factors.
    return (9 + 7 * calibrated) * d_in * d_out + 4 * d_in * d_in * calibrated + max(d_in, d_out) ** 2
