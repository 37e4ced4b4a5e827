"""The canonical form of a pair of factors: A S and S^-1 B are the same product for any diagonal S, so a rule is needed.

1. Scale: each unit's read and write vector have the same Euclidean norm.
2. Sign: the entry of largest magnitude in each write vector is positive (of those that tie the first, see threshold.py).
3. Order: the solver's own. Unit i started as coordinate i of the matrix's short side (anneal.py, dsf.py); it keeps that
   place, so that units of two runs on the same matrix can be compared by index.

A unit that is empty on either side is left as it is.
"""

from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.threshold import first_largest


def canonical(
    read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"]
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """The same product and supports, in canonical scale and sign."""
    read_norm, write_norm = _norm(read, 0), _norm(write, 1)
    valid = (read_norm > 0) & (write_norm > 0)
    largest = write.gather(1, first_largest(write.abs(), 1)).squeeze(1)
    scale = (write_norm.sqrt() / read_norm.sqrt()).where(valid, 1.0) * (1 - 2 * (largest < 0).to(write.dtype))
    return read * scale, write / scale[:, None]


def _norm(factor: Float[Tensor, "rows columns"], dim: int) -> Float[Tensor, " unit"]:
    """Euclidean norms whose squares neither overflow nor vanish (weights of 1e25 and 1e-25 are float32, too)."""
    largest = factor.abs().amax(dim, keepdim=True)
    return (factor / largest.where(largest > 0, 1.0)).norm(dim=dim) * largest.squeeze(dim)
