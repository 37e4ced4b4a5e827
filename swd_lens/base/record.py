"""Record: a result as a frozen dataclass that goes to plain JSON values and back by its type hints, and shows itself.

1. `as_dict` gives the fields as plain values (nested records, tensors and tables included), then the properties named in
   `derived`, which readers of the JSON want and `from_dict` passes over. Fields named in `in_memory` stay out.
2. `from_dict` builds the record again (cattrs): what is missing or of another kind is a ValueError that says where. JSON has null
   for NaN; where a number is due, null is NaN again. Tensors come back as float32, int64 or bool.
3. `SavedRecord` adds a file of its own: format number, version, hash (sealed.py), and clear errors for files of others.
4. `title` and `parts` are what a notebook shows (`_repr_html_`).
"""

import types
from collections.abc import Mapping
from dataclasses import fields
from functools import wraps
from pathlib import Path
from typing import Any, ClassVar, TypeVar, Union, get_args, get_origin

import cattrs
import pandas as pd
import torch
from cattrs.gen import make_dict_structure_fn
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import brief, legible, quoted, seen
from swd_lens.base.sealed import damaged, read_sealed, readable, write_sealed
from swd_lens.base.surroundings import with_torch_defaults

AnyRecord = TypeVar("AnyRecord", bound="PlainRecord")
AnySaved = TypeVar("AnySaved", bound="SavedRecord")

_PLAIN = (bool, int, float, str, type(None))


@with_torch_defaults
class PlainRecord:
    """Values that go to JSON and back, and have no card of their own (so that a field may be called title)."""

    derived: ClassVar[tuple[str, ...]] = ()
    in_memory: ClassVar[tuple[str, ...]] = ()

    def __init_subclass__(cls, **how: Any) -> None:
        super().__init_subclass__(**how)
        with_torch_defaults(cls)  # what results compute depends on the caller's settings as little as they do

    def as_dict(self) -> dict[str, Any]:
        """Plain values, `from_dict` takes them back; NaN stays NaN here and becomes null in files."""
        written = [each.name for each in fields(self) if each.name not in self.in_memory]  # pyright: ignore[reportArgumentType]
        own = {name: _CONVERTER.unstructure(getattr(self, name)) for name in written}
        return own | {name: _CONVERTER.unstructure(getattr(self, name)) for name in self.derived}

    @classmethod
    def from_dict(cls: type[AnyRecord], values: Any) -> AnyRecord:
        """Build the record that `as_dict` gave, also after JSON. Raises ValueError: a field is missing or of another kind; the
        message names it."""
        if not isinstance(values, Mapping):
            raise ValueError(f"not the values of a {cls.__name__}: {type(values).__name__} in place of named fields")
        return _structured(cls.__name__, values, cls, "$")


class Record(PlainRecord):
    """Base of results; subclasses are frozen dataclasses. Their own `__repr__` shows what is invisible in names (errors.py),
    and is what `print` shows; by itself an interpreter shows its first lines."""

    def __init_subclass__(cls, **named: Any) -> None:
        super().__init_subclass__(**named)
        if "__repr__" in vars(cls):
            whole = seen(cls.__repr__)

            @wraps(whole)
            def first_lines(self: Any) -> str:
                return brief(whole(self))

            cls.__str__ = whole  # pyright: ignore[reportAttributeAccessIssue]
            cls.__repr__ = first_lines  # pyright: ignore[reportAttributeAccessIssue]

    def title(self) -> str:
        """The card's first line."""
        return repr(self)

    def parts(self) -> tuple[Any, ...]:
        """The card below its title: figures, tables, panels, lines of text (see `swd_lens.base.display.card`)."""
        table = getattr(self, "table", None)
        return () if table is None else (table(),)

    def _repr_html_(self) -> str:
        """The card, its settings folded."""
        settings = {**(getattr(self, "settings", None) or {}), **(getattr(self, "provenance", None) or {})}
        return card(self.title(), *self.parts(), folded_settings(settings))


class SavedRecord(Record):
    """A record with a JSON file of its own.

    Class attributes:
        FORMAT: number of the file's format; a later one is refused.
        WHAT: what such a file is called in messages, "an allocation".
        ERROR: the class of the errors on files that cannot be read.
    """

    FORMAT: ClassVar[int] = 1
    WHAT: ClassVar[str] = "a result"
    ERROR: ClassVar[type[Exception]] = ValueError

    def save(self, path: str | Path) -> None:
        """Write everything to a JSON file, whole or not at all."""
        write_sealed(Path(path), {"format": self.FORMAT, "swd_lens": __version__, **self.as_dict()})

    @classmethod
    def load(cls: type[AnySaved], path: str | Path) -> AnySaved:
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no such file.
            ERROR: it is not such a file, damaged, or of a later format.
        """
        values = read_sealed(Path(path), cls.WHAT, cls.ERROR)
        require_format(path, values.get("format"), cls.FORMAT, cls.WHAT, cls.ERROR)
        with readable(path, cls.WHAT, cls.ERROR):
            return cls.from_dict(values)


def require_format(path: object, version: Any, newest: int, what: str, raised_as: type[Exception] = ValueError) -> None:
    """Refuse a file of a later format, or of none. Raises `raised_as`; what: as in messages, "an allocation"."""
    if type(version) is not int:  # True is no version
        raise raised_as(damaged(path, what, "no format"))
    if version > newest:
        raise raised_as(f"{legible(path)} has format {version}, newer than this swd_lens; update it")


def checked(record: str, values: Any, kinds: Mapping[str, Any], *, optional: bool = False) -> dict[str, Any]:
    """Convert the values of a result that is read by hand: those named in `kinds` (name -> a type hint, as of a record's field)
    become these types. record: what it is called in messages; optional: names may be missing. Raises ValueError: one is missing
    or of another kind; the message names it."""
    if not isinstance(values, Mapping):
        raise ValueError(f"not the values of a {record}: {type(values).__name__} in place of named fields")
    own = dict(values)
    for name, kind in kinds.items():
        if name not in own and optional:
            continue
        if name not in own:
            raise ValueError(f"not the values of a {record}: {legible(name)} is missing")
        own[name] = _structured(record, own[name], kind, name)
    return own


def require_equal(record: str, name: str, value: Any, expected: Any) -> None:
    """Raise ValueError where a value of a record that was read differs from what others say of it."""
    if value != expected:
        raise ValueError(f"not the values of a {record}: {legible(f'{name} {value} instead of {expected}')}")


def _structured(record: str, value: Any, kind: Any, at: str) -> Any:
    """Make a value of its type. Raises ValueError: what is wrong, and where; a record's own checks are quoted word for word."""

    def described(error: BaseException, kind: Any) -> str:
        return str(error) if kind is None and isinstance(error, ValueError) else cattrs.v.format_exception(error, kind)

    try:
        return _CONVERTER.structure(value, kind)
    except Exception as cause:
        reason = "; ".join(cattrs.transform_error(cause, at, described))
        raise ValueError(f"not the values of a {record}: {legible(reason)}") from cause


def column(name: str) -> str:
    """A field's name as the column of a table: words with spaces, "drop" for drop and "removed KL" for removed_kl."""
    return " ".join("KL" if word == "kl" else word for word in name.split("_"))


def _with_nan(value: Any) -> Any:
    """Nested lists with NaN in place of None."""
    if isinstance(value, list | tuple):
        return [_with_nan(item) for item in value]
    return float("nan") if value is None else value


def _converter() -> cattrs.Converter:
    converter = cattrs.Converter()

    def exactly(value: Any, kind: Any) -> Any:
        if isinstance(value, kind) and not (kind is int and isinstance(value, bool)):
            return value
        raise TypeError(f"{quoted(value)} is not of type {kind.__name__}")

    def number(value: Any, _: Any) -> float:
        if value is None:
            return float("nan")
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise TypeError(f"{quoted(value)} is not a number")
        return float(value)

    def one_of_plain(value: Any, kind: Any) -> Any:
        kinds = get_args(kind)
        if value is None and type(None) not in kinds and float in kinds:
            return float("nan")
        if isinstance(value, kinds):
            return value
        raise TypeError(f"{quoted(value)} is not one of {kind}")

    def tensor(value: Any, _: Any) -> Tensor:
        read = torch.tensor(_with_nan(value))
        return read.float() if read.is_floating_point() else read

    def is_record(kind: Any) -> bool:
        return isinstance(kind, type) and issubclass(kind, PlainRecord)

    for kind in (int, str, bool):
        converter.register_structure_hook(kind, exactly)
    converter.register_structure_hook(float, number)
    unions = (Union, types.UnionType)
    converter.register_structure_hook_func(lambda k: get_origin(k) in unions and set(get_args(k)) <= set(_PLAIN), one_of_plain)
    # Also a tensor annotated with its shape by jaxtyping.
    converter.register_structure_hook_func(lambda k: k is Tensor or getattr(k, "array_type", None) is Tensor, tensor)
    converter.register_structure_hook(pd.DataFrame, lambda rows, _: pd.DataFrame(rows))
    converter.register_structure_hook_factory(is_record, lambda kind: make_dict_structure_fn(kind, converter))
    converter.register_unstructure_hook_func(lambda kind: isinstance(kind, type) and issubclass(kind, Tensor), Tensor.tolist)
    converter.register_unstructure_hook(pd.DataFrame, lambda table: table.to_dict("records"))
    converter.register_unstructure_hook_func(is_record, lambda record: record.as_dict())
    return converter


_CONVERTER = _converter()
