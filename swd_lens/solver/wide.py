"""Block updates where units outnumber the coordinates of the other side: those of a named long side (`basis`).

m units start as the coordinates of the long side, so that the factor between them and these is (m, m) and nearly the identity,
with a few percent of K. anneal.py's updates would then invert and decompose (m, m) matrices in every alternation. Here n is the
number of the short side's coordinates, n < m, and the equations are anneal.py's:

1. Read factor against B (m, n): B B^T has rank n. With L = (B^T B + c I)^-1 B^T the solution of X (B B^T + c I) = M B^T + R is
   X = (M - R B / c) L + R / c, in which M B^T, as large as X, is never made. With the metric the part of M B^T + R in B's column
   space is solved in eigenvectors of C and of B^T B; the rest of R is divided by c.
2. Write factor against A (n, m): A^T C_g A = Y^T Y with Y = C_g^(1/2) A (n, m), and the same identity from the left.
3. Against the nearly diagonal factor (m, m) itself normal matrices are products with a sparse matrix, and right sides are
   solved by their Cholesky factor, not by an inverse as large as they are.

The ridge stands beside rho in c, where the metric would weigh it, too: beyond B's column space it only calms the solve.
"""

from collections.abc import Callable

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import Matrix

# Takes a right side (R alone, rho (Z - D), where the solver has the goal M already) and a free buffer; gives the solution, and
# the buffer that is free then. Both may be written to.
Solve = Callable[[Matrix, Matrix], tuple[Matrix, Matrix]]

SPARSE = 0.05  # a factor with at most this share of its entries is multiplied as a sparse one
_LEAST_ROOT = 1e-9  # of C_g's eigenvalues, that is divided by; the largest is at least 1
_NO_DIRECTION = 1e-6  # of the largest eigenvalue: below it B has no direction that float32 knows


def is_wide(units: int, coordinates: int) -> bool:
    """Whether units outnumber the coordinates that they are solved against."""
    return units > coordinates


def right_solver(unit: Float[Tensor, "unit d_out"], goal: Float[Tensor, "d_in d_out"], c: float) -> Solve:
    """Solves X (B B^T + c I) = M B^T + R; goal: M."""
    inner = unit.T @ unit
    inner.diagonal().add_(c)
    lifted = torch.cholesky_solve(unit.T.contiguous(), torch.linalg.cholesky(inner))

    def solve(right: Matrix, out: Matrix) -> tuple[Matrix, Matrix]:
        inside = torch.addmm(goal, right, unit, alpha=-1 / c)
        return torch.addmm(right, inside, lifted, beta=1 / c, out=out), right

    return solve


def kronecker_solver(
    metric: Metric, unit: Float[Tensor, "unit d_out"], goal: Float[Tensor, "d_in d_out"], blend: float, ridge: float, rho: float
) -> Solve:
    """Solves C_g X (B B^T + ridge) + rho X = M B^T + R within B's column space, and X (ridge + rho) = R beyond it; goal: M."""
    left_values, left = metric.eigen
    values, inner = torch.linalg.eigh(unit.T @ unit)
    known, c = values > _NO_DIRECTION * values[-1], ridge + rho
    values, inner = values[known], inner[:, known]
    basis = (unit @ inner) / values.sqrt()
    shrink = torch.outer((1 - blend) + blend * left_values, values + ridge).add_(rho).reciprocal_()
    of_goal = (left.T @ (goal @ (inner * values.sqrt()))).mul_(shrink)
    correction = shrink.sub_(1 / c)

    def solve(right: Matrix, out: Matrix) -> tuple[Matrix, Matrix]:
        inside = left @ (left.T @ (right @ basis)).mul_(correction).add_(of_goal)
        return torch.addmm(right, inside, basis.T, beta=1 / c, out=out), right

    return solve


def left_solver(
    metric: Metric, read: Float[Tensor, "d_in unit"], goal: Float[Tensor, "d_in d_out"], blend: float, c: float
) -> Solve:
    """Solves (A^T C_g A + c I) X = A^T M + R; goal: M."""
    root = read
    if metric.matrix is not None and blend > 0:
        values, vectors = metric.eigen
        scale = ((1 - blend) + blend * values).sqrt().clamp_min(_LEAST_ROOT)[:, None]
        root, goal = scale * (vectors.T @ read), (vectors.T @ goal) / scale
    inner = root @ root.T
    inner.diagonal().add_(c)
    lifted = torch.cholesky_solve(root, torch.linalg.cholesky(inner)).T

    def solve(right: Matrix, out: Matrix) -> tuple[Matrix, Matrix]:
        inside = torch.addmm(goal, root, right, alpha=-1 / c)
        return torch.addmm(right, lifted, inside, beta=1 / c, out=out), right

    return solve


def cholesky_solver(normal: Float[Tensor, "unit unit"], rho: float) -> Solve:
    """Solves (N + rho I) X = R of few columns: cheaper than the inverse, which is as large as N."""
    factor = shifted_factor(normal, rho)
    return lambda rhs, out: (torch.cholesky_solve(rhs, factor, out=out), rhs)


def cholesky_right_solver(normal: Float[Tensor, "unit unit"], rho: float) -> Solve:
    """Solves X (N + rho I) = R of few rows."""
    factor = shifted_factor(normal, rho)
    return lambda rhs, out: (out.copy_(torch.cholesky_solve(rhs.T, factor).T), rhs)


def shifted_factor(normal: Float[Tensor, "unit unit"], rho: float) -> Float[Tensor, "unit unit"]:
    """The Cholesky factor of N + rho I; N is overwritten.

    N is a product with its transpose, but where a Gram has few directions a unit may see nothing of it but rounding, whose
    correlations are above 1. Then eigenvalues below rho, which no such sum has, are put at rho.
    """
    normal.diagonal().add_(rho)
    factor, info = torch.linalg.cholesky_ex(normal)
    if int(info) == 0:
        return factor
    values, vectors = torch.linalg.eigh(normal)
    return torch.linalg.cholesky((vectors * values.clamp_min(rho)) @ vectors.T)


def as_sparse(matrix: Matrix) -> Tensor | None:
    """A factor of few entries as a sparse one, on the CPU; None of any other."""
    if matrix.device.type != "cpu" or int(matrix.count_nonzero()) > SPARSE * matrix.numel():
        return None
    return matrix.to_sparse()


def sparse_normal(
    rows: Tensor, columns: Float[Tensor, "coordinate unit"], metric: Metric | None = None, blend: float = 0.0
) -> Float[Tensor, "unit unit"]:
    """S S^T of a sparse S (unit, coordinate); with a metric S C_g S^T. rows, columns: S as a sparse matrix, and S^T as a dense
    one."""
    # A product of a sparse matrix and a transposed one takes ten times as long; torch warns of two sparse ones.
    plain = rows @ columns.contiguous()
    if metric is None or metric.matrix is None or blend == 0:
        return plain
    return plain.lerp_(rows @ (rows @ metric.matrix).T.contiguous(), blend)
