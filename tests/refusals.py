"""A call that is refused, in a line."""

from collections.abc import Callable
from typing import Any

import pytest


def refuses(error: type[BaseException], said: str, call: Callable[..., Any], *given: Any, **how: Any) -> None:
    """Make a call that has to raise this error, with words that match this pattern."""
    __tracebackhide__ = True
    with pytest.raises(error, match=said):
        call(*given, **how)
