"""Checks of single arguments that many calls share; each raises with the value and what would be right.

1. `one_of`: a name that must be among some.
2. `bounded`: a number within bounds, whole or not.
"""

import math
from collections.abc import Iterable
from numbers import Integral, Real
from typing import Any

from swd_lens.base.errors import quoted


def one_of(name: str, value: Any, choices: Iterable[Any], error: type[Exception] = ValueError) -> None:
    """Require that a value is among the choices. Raises error: it is not; the message lists them."""
    choices = list(choices)
    if value not in choices:
        raise error(f"{name} must be one of {', '.join(map(repr, choices))}, got {quoted(value)}")


def bounded(
    name: str,
    value: Any,
    least: float = -math.inf,
    most: float = math.inf,
    *,
    whole: bool = True,
    error: type[Exception] = ValueError,
) -> None:
    """Require a number from `least` to `most`, both allowed; NaN and True are no numbers. whole: only whole numbers (NumPy's,
    too). Raises error: it is none; the message says the bounds."""
    kind: Any = Integral if whole else Real
    if isinstance(value, kind) and not isinstance(value, bool) and least <= value <= most:  # NaN fails this, too
        return
    number = "a whole number" if whole else "a number"
    low = f" of at least {least:g}" if least > -math.inf else ""
    high = f" of at most {most:g}" if most < math.inf else ""
    between = f" from {least:g} to {most:g}" if low and high else low + high
    raise error(f"{name} must be {number}{between}, got {quoted(value)}")
