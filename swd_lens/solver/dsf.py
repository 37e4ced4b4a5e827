"""The paper's solver, Double Sparse Factorization (paper, app. swd-optimization; method.md §5.2).

W (d_in, d_out) ≈ A B with A = read (d_in, m), B = write (m, d_out), m = min(d_in, d_out), G = gram (d_in, d_in).

1. Budgets: the square factor gets a fixed density, the other the rest of K (budget.py).
2. Rescale: multiply the input dimension by v = sqrt(diag G). From here to step 5 the loss is a plain Frobenius loss;
   of G only the diagonal is seen.
3. Start: square factor = identity, other factor = the rescaled target pruned to half its budget, duals zero.
4. Alternate T times, square factor first. One block update, for a known factor D and an unknown Y (both stored with one
   row per unit), target M ≈ D^T Y:
     a. D's rows are scaled to unit norm. N = D D^T plus a ridge; R = D M; Z and U of the last update are scaled alike.
     b. Y = (N + rho I)^-1 (R + rho (Z - U)); Z = Y + U on the support, zero off it; U <- U + Y - Z. Five times; the
        support is chosen anew as the largest magnitudes of Y + U in the first two, and the first rho is smaller.
     c. Undo the scaling. The new factor is Z; the dual U stays for the next update of this factor.
5. Undo the rescaling of the input dimension: A / v.
6. Finalise: refit B on the full G by 20 more such steps without ridge; A and both supports are held.

The known factor may be either: both are kept unit-major, so one function updates them.

Why the arithmetic looks as it does. Choosing a support amplifies rounding: relative changes of 1e-7 flip near-ties, the
iterates part within ten iterations, and the error at the end moves by 1 % (up to 9 % on small square matrices). With
arithmetic="reference" the operations and memory layouts are therefore those whose bits the reference code gets, on the
same machine and threads; what it wastes is left out where the bits allow it (sorts become selections, the second and
later steps share an inverse, the solve after the last step is skipped). arithmetic="clean" takes Cholesky factors and
scale-free floors instead: faster, invariant to powers of two in W and G to the bit, equally good on average.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import WeightError
from swd_lens.solver.budget import Budget, strict_rank
from swd_lens.solver.metric import correlations, power_of_two, require_positive
from swd_lens.solver.shapes import Dense, InputGram, Write
from swd_lens.solver.spec import DsfSpec, OnIteration, Step
from swd_lens.solver.support import keep_above, keep_exactly
from swd_lens.solver.workspace import Workspace

# The reference's floor on norms (1e-8) is absolute. While the largest entries lie in this range it is below or near
# float32 rounding and harmless; outside, W and G are brought inside even under arithmetic="reference".
HARMLESS_RANGE = (2.0**-16, 2.0**16)


@dataclass
class Block:
    """One factor while it is being solved for: Z = factor, U = dual, unit-major, and how many entries Z may keep."""

    factor: Float[Tensor, "unit feature"]
    dual: Float[Tensor, "unit feature"]
    budget: int


def factorize(
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None,
    budget: Budget,
    spec: DsfSpec,
    on_iteration: OnIteration | None = None,
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Read and write factor of a validated float32 weight; gram None means G = I. Raises GramError: G is not positive
    semi-definite; WeightError: so many entries of W tie that a factor became empty."""
    scale = _scale(weight, spec)
    target = weight if scale == 1.0 else weight / scale
    if gram is not None and (gram_scale := _scale(gram.diagonal(), spec)) != 1.0:
        gram = gram / gram_scale
    if gram is not None:  # the solver itself sees the diagonal, and notices the rest in few cases
        require_positive(correlations(gram)[0])
    # v = sqrt(diag G), floored so that a dead input (G_jj = 0) can be divided by it.
    norm = target.new_ones(target.shape[0], 1) if gram is None else gram.diagonal().sqrt().unsqueeze(1) + spec.norm_floor
    read, write = alternate(target * norm, budget, spec, on_iteration)
    read = read / norm.T
    write = finalise(read, write, target, gram, spec)
    return read.T.contiguous(), write * scale


def _scale(values: Float[Tensor, "*shape"], spec: DsfSpec) -> float:
    """The number to divide W or diag G by before solving: 1, while the reference's absolute floors are harmless."""
    largest = float(values.abs().max())
    if spec.arithmetic == "reference" and HARMLESS_RANGE[0] <= largest <= HARMLESS_RANGE[1]:
        return 1.0
    return power_of_two(values)


def alternate(
    target: Dense, budget: Budget, spec: DsfSpec, on_iteration: OnIteration | None = None
) -> tuple[Float[Tensor, "unit d_in"], Write]:
    """Steps 3 and 4: sparse factors of the rescaled target under the Frobenius loss, both unit-major."""
    tall = target.shape[0] > target.shape[1]
    by_output = target.T.contiguous()  # the reference's layout, and so its bits
    short_long = by_output if tall else by_output.T  # the square factor belongs to the short side
    eye = torch.eye(short_long.shape[0], dtype=target.dtype, device=target.device)
    del target  # a weight-size buffer
    pruned = torch.empty_like(short_long)
    _support(short_long, budget.other * spec.start_share, spec, cap=1.0, out=pruned).mul_(short_long)
    square = Block(eye, torch.zeros_like(eye), budget.square)
    # The factor's own strides, which it has from the first update on: sums of two layouts take a tenth of the time of a wide W.
    other = Block(pruned, torch.zeros_like(pruned, memory_format=torch.contiguous_format), budget.other)
    del eye, pruned
    work = Workspace.of(square.factor, other.factor, buffers=4)

    def error() -> float:  # as far as the alternation sees it: under the Gram's diagonal
        return float((short_long - square.factor.T @ other.factor).square().sum() / short_long.square().sum())

    for t in range(spec.outer_iterations):
        rho_start = spec.rho_start(t)
        update(square, other.factor, short_long.T, rho_start, spec, work)
        update(other, square.factor, short_long, rho_start, spec, work)
        if on_iteration is not None:
            on_iteration(Step(t + 1, spec.outer_iterations, error))
    return (other.factor, square.factor) if tall else (square.factor, other.factor)


def _support(
    values: Float[Tensor, "unit feature"],
    budget: float | int,
    spec: DsfSpec,
    cap: float | int,
    out: Float[Tensor, "unit feature"],
) -> Float[Tensor, "unit feature"]:
    """1 on the largest magnitudes, counted as spec.rounding says; `cap` is the sparsity the reference rounding stops at."""
    magnitude = torch.abs(values, out=out)
    if spec.rounding == "exact":
        return out.copy_(keep_exactly(magnitude, max(int(budget), 1)))
    return keep_above(magnitude, strict_rank(values.numel(), budget, cap), out=out)


def update(
    block: Block,
    design: Float[Tensor, "unit known"],
    target: Float[Tensor, "known feature"],
    rho_start: float,
    spec: DsfSpec,
    work: Workspace,
) -> None:
    """Step 4's block update, in place: block.factor becomes Y in target ≈ design^T Y."""
    norm = _norm(design @ design.T, spec)
    design = torch.div(design, norm, out=work.shaped(1, design))
    normal = design @ design.T
    normal.diagonal().add_(normal.diagonal().mean() * spec.ridge)
    rhs = torch.mm(design, target, out=work.shaped(0, block.dual))
    rho = float(spec.rho)
    inverse = _inverse(normal, rho, spec)
    first_inverse = inverse if rho_start == rho else _inverse(normal, rho_start, spec)
    factor, dual = block.factor.mul_(norm), block.dual.mul_(norm)
    if not factor.is_contiguous():  # a wide W's is a transposed view at first
        block.factor = torch.empty_like(rhs)
    mask, out = work.shaped(3, rhs), work.shaped(2, rhs)
    for step in range(spec.inner_iterations):
        first = step == 0
        right = torch.sub(factor, dual, out=work.shaped(1, factor))
        solution = _solve(first_inverse if first else inverse, rhs, right, rho_start if first else rho, out)
        candidate = torch.add(solution, dual, out=work.shaped(1, rhs))
        if step < spec.support_iterations:
            _support(candidate, block.budget, spec, spec.sparsity_cap, out=mask)
        factor = torch.mul(candidate, mask, out=block.factor)
        dual += solution.sub_(factor)
    block.factor.div_(norm)
    block.dual.div_(norm)


def finalise(read: Float[Tensor, "unit d_in"], write: Write, target: Dense, gram: InputGram | None, spec: DsfSpec) -> Write:
    """Step 6: the write factor refitted to the full Gram's loss on its own support; read (unit-major) is held."""
    if spec.final_iterations == 0:
        return write
    weighted = read if gram is None else read @ gram
    normal, rhs = weighted @ read.T, weighted @ target.T.contiguous().T  # by output, as in `alternate`
    norm = _norm(normal, spec)
    normal, rhs = normal / norm.T / norm, rhs / norm
    rho = float(spec.final_rho)
    inverse = _inverse(normal, rho, spec)
    mask = (write != 0).to(write.dtype)
    factor, dual = write * norm, torch.zeros_like(write)
    for _ in range(spec.final_iterations - 1):  # the first of the reference's iterations only copies the start
        solution = _solve(inverse, rhs, factor - dual, rho)
        factor = (solution + dual).mul_(mask)
        dual += solution.sub_(factor)
    return factor / norm


def _norm(normal: Float[Tensor, "unit unit"], spec: DsfSpec) -> Float[Tensor, "unit 1"]:
    """Norms of the rows whose Gram this is; the floor lets an empty unit be divided by its norm."""
    return normal.diagonal().clamp_min(0).sqrt().unsqueeze(1) + spec.norm_floor


def _solve(
    inverse: Float[Tensor, "unit unit"],
    rhs: Float[Tensor, "unit feature"],
    right: Float[Tensor, "unit feature"],
    rho: float,
    out: Float[Tensor, "unit feature"] | None = None,
) -> Float[Tensor, "unit feature"]:
    """Y = (N + rho I)^-1 (R + rho (Z - U)), in `out` if there is one; `right` is Z - U, and is used up."""
    if rho != 1.0:
        right *= rho
    return torch.mm(inverse, right.add_(rhs), out=out)


def _inverse(normal: Float[Tensor, "unit unit"], rho: float, spec: DsfSpec) -> Float[Tensor, "unit unit"]:
    """(N + rho I)^-1, by LU (the reference's bits) or Cholesky. Raises WeightError: N is zero (rho may be tiny): the support
    of the other factor is empty."""
    shifted = normal.clone()
    shifted.diagonal().add_(rho)
    if spec.arithmetic != "reference":
        triangle, info = torch.linalg.cholesky_ex(shifted)
        if int(info) == 0:
            return torch.cholesky_inverse(triangle)
        # Beside a large N of low rank, rho may be lost to rounding: Cholesky fails, LU need not.
    inverse, info = torch.linalg.inv_ex(shifted)
    if int(info) != 0:
        raise WeightError(
            "so many of the weight's entries have one magnitude that a factor became empty: the paper's solver keeps "
            'what lies strictly above a threshold; give preset="best" or rounding="exact"'
        )
    return inverse
