"""Buffers that an alternation writes to again and again: fresh memory costs more than most sums that go into it.

The kernel clears each page of a fresh buffer when it is first touched, and buffers of some megabytes are fresh each time. Where
every block update writes to the same buffers, four of SmolLM2's matrices take .82 of their time (two cores of an AMD EPYC), and
have the same bits.
"""

from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.refine import Matrix


@dataclass(frozen=True)
class Workspace:
    """Buffers, each as large as the larger of two factors."""

    buffers: tuple[Float[Tensor, " entry"], ...]

    @classmethod
    def of(cls, *factors: Float[Tensor, "_ _"], buffers: int) -> "Workspace":
        """Buffers of the factors' dtype, with anything in them."""
        size = max(factor.numel() for factor in factors)
        return cls(tuple(factors[0].new_empty(size) for _ in range(buffers)))

    def shaped(self, number: int, like: Matrix) -> Matrix:
        """A view of one buffer, of this factor's shape and strides; what was in the buffer is lost to whoever writes to it."""
        return self.buffers[number].as_strided(like.shape, like.stride())
