"""Settings: frozen dataclasses whose fields declare their bounds, checked in one place.

1. A field is declared with `setting(default, above=0, at_most=1)`. Its annotation says what it may be: `int` is a whole number,
   `float | int` a finite number, `bool` true or false; `| None` allows None, `| str` beside a number the word "auto".
2. `Settings.__post_init__` checks every field; a subclass that has to compare fields does so after `super().__post_init__()`.
3. `Settings.changed` gives the same settings with other values, `preset` looks one up in a table of them; a name that is not
   known is answered with the nearest ones.

Errors are of the class's own type (`error`) and name the field, the value and the bounds.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, ClassVar, TypeVar, get_args

import numpy as np

from swd_lens.base.errors import quoted

AnySettings = TypeVar("AnySettings", bound="Settings")
AUTO = "auto"  # for settings that depend on the matrix: decided by rule


@dataclass(frozen=True)
class Bounds:
    """The allowed values of a setting: numbers between bounds, or one of some choices. None: not bounded on that side."""

    above: float | int | None = None
    at_least: float | int | None = None
    below: float | int | None = None
    at_most: float | int | None = None
    one_of: tuple[Any, ...] | None = None

    def hold(self, value: float | int) -> bool:
        """Whether a number lies inside; NaN lies nowhere."""
        return (
            value == value
            and (self.above is None or value > self.above)
            and (self.at_least is None or value >= self.at_least)
            and (self.below is None or value < self.below)
            and (self.at_most is None or value <= self.at_most)
        )

    def __str__(self) -> str:
        low = f"above {self.above:g}" if self.above is not None else ""
        low = f"of at least {self.at_least:g}" if self.at_least is not None else low
        high = f"below {self.below:g}" if self.below is not None else ""
        high = f"at most {self.at_most:g}" if self.at_most is not None else high
        if self.at_least is not None and self.at_most is not None:
            return f"from {self.at_least:g} to {self.at_most:g}"
        return " and ".join(part for part in (low, high) if part)


def setting(default: Any, **bounds: Any) -> Any:
    """A field of `Settings` with its default and bounds, named as the fields of `Bounds`."""
    return field(default=default, metadata={"bounds": Bounds(**bounds)})


@dataclass(frozen=True)
class Settings:
    """Base of all settings; see the module. Raises the class's `error`: a value that its field does not allow."""

    error: ClassVar[type[Exception]] = ValueError

    def __post_init__(self) -> None:
        for each in fields(self):
            if "bounds" in each.metadata:
                self._check(each.name, getattr(self, each.name), each.metadata["bounds"], each.type)

    def _check(self, name: str, value: Any, bounds: Bounds, annotation: Any) -> None:
        kinds = set(get_args(annotation)) or {annotation}
        if value is None and type(None) in kinds:
            return
        if bounds.one_of is not None or bool in kinds:
            choices = (True, False) if bounds.one_of is None else bounds.one_of
            if not any(value is choice or (isinstance(value, str) and value == choice) for choice in choices):
                raise self.error(f"{name}={quoted(value)}: choose one of {', '.join(map(repr, choices))}")
            return
        if isinstance(value, str) and str in kinds:
            if value != AUTO:
                raise self.error(f'{name}={quoted(value)}: give a number, or "{AUTO}"')
            return
        allowed = int if float not in kinds else (int, float)
        number = isinstance(value, allowed) and not isinstance(value, bool) and math.isfinite(value)
        if not number or not bounds.hold(value):  # pyright: ignore[reportArgumentType]
            kind = "a whole number" if allowed is int else "a finite number"
            expected = f"{kind} {bounds}".rstrip()
            raise self.error(f"{name}={quoted(value)}: give {expected}")

    def changed(self: AnySettings, overrides: Mapping[str, Any]) -> AnySettings:
        """Copy the settings with other values; NumPy's numbers, as a sweep gives them, become Python's. Raises the class's
        `error`: a setting that this class does not have, or a value out of its bounds."""
        known = [each.name for each in fields(self)]
        for name in overrides:
            if name not in known:
                raise self.error(f"{type(self).__name__} has no setting {quoted(name)}; {nearest(name, known)}")
        numbers = (np.integer, np.floating)
        return replace(self, **{name: v.item() if isinstance(v, numbers) else v for name, v in overrides.items()})

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values."""
        return asdict(self)


def preset(presets: Mapping[str, AnySettings], name: str, raised_as: type[Exception]) -> AnySettings:
    """The settings of this name. Raises raised_as: there are none of this name; the nearest names are listed."""
    if name not in presets:
        raise raised_as(f"no preset {quoted(name)}; {nearest(name, presets)}")
    return presets[name]


def nearest(name: Any, known: Iterable[str]) -> str:
    """Suggest what may have been meant by a name that is not known, and list all names that are."""
    names = list(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}valid: {', '.join(names)}"
