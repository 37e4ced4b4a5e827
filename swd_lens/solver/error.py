"""relmse_of: how much of a matrix two factors miss, on the inputs that a Gram stands for.

1. The matrix is gone through by columns, so that no second dense matrix of its size is made in float64.
2. tr(E^T G E) of the error E is divided by tr(W^T G W) of the matrix (paper, section 3: the solver's objective).
"""

import torch
from jaxtyping import Float
from torch import Tensor

_TILE = 2**21


def relmse_of(
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    dense: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None = None,
    *,
    without: Float[Tensor, "_vector d_in"] | None = None,
) -> float:
    """`Factors.relmse` of two factors and their dense matrix."""
    # Large Grams, and those of corrected calibration, lie on the CPU whatever the host's device.
    metric = None if gram is None else gram.to(dense.device, torch.float64)
    read = read.double()
    lost = total = left_lost = left_total = dense.new_zeros((), dtype=torch.float64)
    for columns in torch.arange(dense.shape[1], device=dense.device).split(max(1, _TILE // len(dense))):
        target = dense[:, columns].double()
        error = target - read @ write[:, columns].double()
        lost, total = lost + _energy(error, metric), total + _energy(target, metric)
        if without is not None:
            left_out = without.double().to(dense.device)
            left_lost = left_lost + (left_out @ error).square().sum()
            left_total = left_total + (left_out @ target).square().sum()
    if total - left_total > 1e-7 * total:  # else rounding is all that is left
        lost, total = (lost - left_lost).clamp(min=0), total - left_total
    return float(lost / total)


def _energy(matrix: Float[Tensor, "d_in some"], gram: Float[Tensor, "d_in d_in"] | None) -> Float[Tensor, ""]:
    """Compute tr(M^T G M)."""
    return matrix.square().sum() if gram is None else (matrix * (gram @ matrix)).sum()
