"""The settings of the paper's items: data in items/*.toml, one file per item, and one for what all of them share.

1. A file says what its item asks, where in the paper it stands, and its settings: each with its meaning, the paper's value, the
   section that states it, and what other profiles have instead.
2. `settings_of` gives an item's settings for a profile: the profile's own value where there is one, else the paper's. Those of
   common.toml come first, so that items of one folder share texts, tasks and factors.
3. Values have the paper's type: a list stays a list, a number a number.
"""

import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.errors import legible, quoted
from swd_lens.base.record import PlainRecord
from swd_lens.base.settings import nearest

# Profile -> what it is for.
PROFILES = {
    "paper": "the paper's own hyper-parameters for GPT-2 small",
    "qwen2.5-0.5b": "the paper's for Qwen2.5-0.5B",
    "qwen2.5-1.5b": "the paper's for Qwen2.5-1.5B",
    "qwen2.5-3b": "the paper's for Qwen2.5-3B",
    "qwen3.5-27b": "the paper's for Qwen3.5-27B",
    "small": "SmolLM2-135M on two cores",
    "tiny": "the embedded model, seconds to a minute for each item",
}
_COMMON = "common"
_FOLDER = Path(__file__).parent / "items"
# The order of the paper.
ITEMS = ("data-efficiency", "single-matrix", "full-model", "controls", "zero-data", "mlp", "audit", "edit", "qk", "interactions")


@dataclass(frozen=True)
class Setting(PlainRecord):
    """One setting of an item in a profile."""

    name: str
    value: Any  # what the profile has; paper: what the paper has, None where it says nothing of it
    paper: Any
    source: str  # the paper's section; "" where the setting is ours
    about: str  # what it is, in a line


@dataclass(frozen=True)
class ItemSettings(Mapping[str, Any]):
    """An item's settings in a profile: name -> value, and what they are."""

    item: str
    profile: str
    title: str
    section: str  # of the paper; question: what the item asks
    question: str
    entries: Mapping[str, Setting]  # name -> setting, those that all items share first

    def __getitem__(self, name: str) -> Any:
        return self.entries[name].value

    def __iter__(self) -> Iterator[str]:
        return iter(self.entries)

    def __len__(self) -> int:
        return len(self.entries)

    def changed(self, **values: Any) -> "ItemSettings":
        """Change some values. Raises ValueError: a setting that the item does not have, or a value of another type."""
        entries = dict(self.entries)
        for name, value in values.items():
            if name not in entries:
                raise ValueError(f"{legible(self.item)} has no setting {quoted(name)}; {legible(nearest(name, entries))}")
            now = entries[name].value
            # True is no number here, and a whole number may stand for another one.
            kinds = type(now) if isinstance(now, bool) or not isinstance(now, int | float) else (int, float)
            if not isinstance(value, kinds) or isinstance(value, bool) != isinstance(now, bool):
                raise ValueError(
                    f"{legible(self.item)}: {legible(name)}={quoted(value)} is of another type than {quoted(self[name])}"
                )
            entries[name] = replace(entries[name], value=value)
        return replace(self, entries=entries)

    def table(self) -> pd.DataFrame:
        """One row per setting: value, the paper's value where it differs, the paper's section, meaning."""
        rows = [
            {
                "setting": each.name,
                "value": _in_words(each.value),
                "paper": "" if each.value == each.paper or each.paper is None else _in_words(each.paper),
                "source": each.source,
                "about": each.about,
            }
            for each in self.entries.values()
        ]
        return pd.DataFrame(rows)


def settings_of(item: str, profile: str = "small") -> ItemSettings:
    """The settings of an item in a profile. Raises ValueError: no such item or profile, or one that the item does not have
    (the paper's Qwen models have two items)."""
    if item not in ITEMS:
        raise ValueError(f"{quoted(item)} is no item of the paper; {legible(nearest(item, ITEMS))}")
    if profile not in PROFILES:
        raise ValueError(f"there is no profile {quoted(profile)}; {legible(nearest(profile, PROFILES))}")
    file, common = _read(item), _read(_COMMON)
    if profile not in profiles_of(item):
        raise ValueError(f"{legible(item)} has no profile {quoted(profile)}; it has {legible(', '.join(profiles_of(item)))}")
    # A Qwen profile is the paper's, but for what is said of that model.
    entries = {
        name: Setting(
            name,
            values.get(profile, values["paper"]),
            values["paper"] if "from" in values else None,
            values.get("from", ""),
            values["about"],
        )
        for name, values in {**common["settings"], **file["settings"]}.items()
    }
    return ItemSettings(item, profile, file["title"], file["section"], file["question"], entries)


def profiles_of(item: str) -> tuple[str, ...]:
    """The profiles that an item has."""
    return tuple(_read(item).get("profiles", ("paper", "small", "tiny")))


@cache
def _read(name: str) -> Mapping[str, Any]:
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib  # pyright: ignore[reportMissingImports]
    return tomllib.loads((_FOLDER / f"{name}.toml").read_text(encoding="utf-8"))


def _in_words(value: Any) -> str:
    """Write a value on one line."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {_in_words(each)}" for name, each in value.items())
    if isinstance(value, list):
        separator = "; " if any(isinstance(each, Mapping) for each in value) else ", "
        return separator.join(map(_in_words, value))
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10_000:
        return f"{value:,}"
    return str(value)
