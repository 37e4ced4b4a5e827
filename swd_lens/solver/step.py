"""What a solver tells its caller after each outer iteration."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Step:
    """Outer iteration `iteration` (from 1) of `total` is done.

    Attributes:
        relmse: computes the relMSE reached so far, under the Gram the solver sees (a product of the factors: call it
            every few seconds, not every time). Valid during the callback only.
    """

    iteration: int
    total: int
    relmse: Callable[[], float]


OnIteration = Callable[[Step], None]
