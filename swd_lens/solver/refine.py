"""Refinement: both factors refitted to the full metric, supports held.

The error tr((M - AB)^T C (M - AB)) is quadratic in each factor. In turns, some steps of conjugate gradients on one with
the other held:

1. write factor:  (A^T C A) B = A^T C M  on B's support;
2. read factor:   C A (B B^T) = C M B^T  on A's support.

With H, a metric of the outputs beside C, that of the inputs, the error is tr((M - AB)^T C (M - AB) H), and the same turns solve

1. write factor:  (A^T C A) B H = A^T C M H;
2. read factor:   C A (B H B^T) = C M H B^T.

The gradient is masked by the support; the preconditioner is the diagonal (Jacobi). Conjugate gradients descend at every
step, so that the error never rises. The alternation itself converges slowly: a few rounds give most of the gain
(solver.md, "Refinement on fixed supports").
"""

from collections.abc import Callable

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.solver.metric import Metric

Matrix = Float[Tensor, "rows columns"]

# Below this share of the largest diagonal entry a unit or input has no say, and its preconditioner no meaning.
TINY = 1e-12
# Below this share of a direction's length, in the norm of the operator's diagonal, its curvature is rounding.
NULL = 8 * torch.finfo(torch.float32).eps


def refine(
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    target: Float[Tensor, "d_in d_out"],
    metric: Metric,
    rounds: int,
    steps: int,
    outputs: Float[Tensor, "d_out d_out"] | None = None,
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Both factors after `rounds` turns of `steps` conjugate-gradient steps each; nonzeros stay where they were. outputs: H,
    positive semi-definite; None = the identity."""

    def weighed(rows: Matrix) -> Matrix:  # X H
        return rows if outputs is None else rows @ outputs

    read_support, write_support = read != 0, write != 0
    # What the operators write to, in every step (workspace.py says why).
    of_write, of_read = write.new_empty(write.shape), read.new_empty(read.shape)
    in_gram = None if metric.matrix is None else read.new_empty(read.shape)
    output_norms = 1.0 if outputs is None else outputs.diagonal()[None]
    for _ in range(rounds):
        weighted = metric.weigh(read)
        normal = read.T @ weighted
        write = conjugate_gradient(
            write,
            weighed(weighted.T @ target),
            write_support,
            lambda p, n=normal: weighed(torch.mm(n, p, out=of_write)),
            normal.diagonal()[:, None] * output_norms,
            steps,
        )
        of_outputs = weighed(write)
        # Where B H B^T has a smaller rank than size, its factors are cheaper.
        normal = None if len(write) > write.shape[1] else of_outputs @ write.T
        norms = (of_outputs * write).sum(1) if normal is None else normal.diagonal()

        def operator(p: Matrix, n: Matrix | None = normal, b: Matrix = write, bh: Matrix = of_outputs) -> Matrix:
            if n is None:
                return torch.mm(metric.weigh(p @ bh), b.T, out=of_read)
            return metric.weigh(torch.mm(p, n, out=of_read), out=in_gram)

        rhs = metric.weigh(target @ of_outputs.T)
        read = conjugate_gradient(read, rhs, read_support, operator, norms[None, :], steps)
    return read, write


def conjugate_gradient(
    start: Matrix,
    rhs: Matrix,
    support: Bool[Tensor, "rows columns"] | Matrix,
    operator: Callable[[Matrix], Matrix],
    diagonal: Tensor,
    steps: int,
) -> Matrix:
    """Steps towards the solution of operator(X) = rhs among the X on the support; `diagonal` is the operator's. The operator may
    return the same buffer each time; it is written to."""
    floored = diagonal.clamp_min(TINY * float(diagonal.max()) or 1.0)
    preconditioner = torch.ones_like(floored) / floored  # what it is applied to is masked already
    residual = (rhs - operator(start)).mul_(support)
    # A residual of rounding errors only: where units are parallel, stepping along it leads arbitrarily far away.
    product = (rhs * rhs).mul_(preconditioner).mul_(support)
    solved = (8 * torch.finfo(rhs.dtype).eps) ** 2 * float(torch.sum(product))
    del rhs  # a weight-size buffer, as is each below
    x = start.clone(memory_format=torch.contiguous_format)
    direction = residual * preconditioner
    norm = torch.sum(torch.mul(residual, direction, out=product))
    length = norm  # the direction's, squared, in the norm of the operator's diagonal
    for _ in range(steps):
        if float(norm) <= solved:
            break
        curved = operator(direction).mul_(support)
        curvature = torch.sum(torch.mul(direction, curved, out=product))
        # Nothing to solve, or a direction that only rounding tells from the operator's null space (a Gram of one token,
        # and a unit nearly orthogonal to it): what is divided by here would be noise.
        if not float(curvature) > NULL * float(length):
            break
        step = norm / curvature
        residual.sub_(curved.mul_(step))
        x.add_(torch.mul(direction, step, out=product))
        scaled = torch.mul(residual, preconditioner, out=curved)
        previous, norm = norm, torch.sum(torch.mul(residual, scaled, out=product))
        length = norm + (norm / previous) ** 2 * length  # the new residual is orthogonal to the old direction
        direction.mul_(norm / previous).add_(scaled)
    return x
