"""Powers of two to divide by: dividing is then exact, and a power of two in the input changes no bit of the result."""

import math

from jaxtyping import Float
from torch import Tensor


def power_of_two(values: Float[Tensor, "*shape"]) -> float:
    """2^e such that the largest magnitude, divided by it, lies in [1, 2); 1 for the identity.

    Bounded to 2^±100: its inverse must be a float32, too.
    """
    exponent = math.frexp(float(values.abs().max()))[1] - 1
    return 2.0 ** max(min(exponent, 100), -100)
