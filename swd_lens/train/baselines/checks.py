"""Checks of settings that the learned baselines share: a wrong name or value is a TrainError that says what to give."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

import numpy as np


class TrainError(ValueError):
    """A baseline cannot be trained like this, or its training failed; the message says why and what to do."""


def check_names(spec: Any, overrides: Mapping[str, Any]) -> Any:
    """A settings dataclass with some settings changed.

    Raises:
        TrainError: a setting that it does not have (the nearest is named), or a value out of range.
    """
    known = [field.name for field in fields(spec)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TrainError(
                f"{type(spec).__name__} has no setting {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
                f"Settings: {', '.join(known)}"
            )
    return replace(spec, **{name: plain_number(value) for name, value in overrides.items()})


def plain_number(value: Any) -> Any:
    """A number of NumPy, as a sweep gives it, as Python's own; everything else as it is."""
    return value.item() if isinstance(value, np.integer | np.floating) else value


def whole(name: str, value: Any, least: int) -> None:
    """Raises TrainError unless the value is a whole number of at least this."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TrainError(f"{name}={value!r}: give a whole number, {least} or more")


def number(name: str, value: Any, most: float, *, zero: bool = True, below: bool = False) -> None:
    """Raises TrainError unless the value is finite, not negative, and at most `most` (below: less)."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (value == 0 and not zero) or value > most or (below and value == most):
        bound = "" if math.isinf(most) else f" and {'below' if below else 'at most'} {most:g}"
        raise TrainError(f"{name}={value!r}: give a finite number {'of 0 or more' if zero else 'above 0'}{bound}")


def one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    """Raises TrainError unless the value is one of the choices."""
    if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
        raise TrainError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
