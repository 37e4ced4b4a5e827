"""Running the paper's items: one, or all, into a folder; and what they would do, without doing it.

1. `plan` gives settings and cost of items and touches nothing.
2. `run_item` and `run_items` load the host (or take one), hold the folder, and run each item on shared materials (materials.py).
   A finished item of the same settings and host is read, not run.
3. An item that was interrupted goes on from its finished parts, and its result.json has the same bytes.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.errors import legible
from swd_lens.base.files import plain
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.hosts.embedded import load_default_model
from swd_lens.hosts.load import load_host
from swd_lens.study.paper import circuit_items, inside_items, quality_items, whole_model
from swd_lens.study.paper.costs import SHAPES, Cost, Shape, cost_of
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.result import RESULT, ItemResult
from swd_lens.study.paper.settings import ITEMS, ItemSettings, profiles_of, settings_of

RUNS: dict[str, Callable[[Materials, ItemSettings], ItemResult]] = {
    "data-efficiency": quality_items.tokens_needed,
    "single-matrix": circuit_items.single_matrix,
    "full-model": whole_model.full_model,
    "controls": circuit_items.controls,
    "zero-data": quality_items.zero_data,
    "mlp": circuit_items.mlp,
    "audit": inside_items.semantic_audit,
    "edit": inside_items.edit,
    "qk": inside_items.query_key,
    "interactions": inside_items.interactions,
}
ALL = "all"


@dataclass(frozen=True, repr=False)
class Plan(Record):
    """The settings and costs of items, each alone, before they are run."""

    settings: tuple[ItemSettings, ...]
    costs: tuple[Cost, ...]

    def table(self) -> pd.DataFrame:
        """One row per item: minutes, memory and disk in GB."""
        rows = [
            {
                "item": settings.item,
                "asks": settings.title,
                "section": settings.section.split(",")[0],
                "minutes": cost.seconds / 60,
                "memory, GB": cost.memory_bytes / 1e9,
                "disk, GB": cost.disk_bytes / 1e9,
            }
            for settings, cost in zip(self.settings, self.costs, strict=True)
        ]
        return pd.DataFrame(rows)

    def as_dict(self) -> dict[str, Any]:
        """Settings and costs, as plain values."""
        return {
            settings.item: {"settings": [plain(each.as_dict()) for each in settings.entries.values()], "cost": cost.as_dict()}
            for settings, cost in zip(self.settings, self.costs, strict=True)
        }

    def title(self) -> str:
        return f"Plan of {len(self.settings)} items, profile {self.settings[0].profile}"

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.table().to_string(index=False)}"


def items_named(item: str, profile: str) -> tuple[str, ...]:
    """List one item, or "all" that a profile has."""
    return tuple(name for name in ITEMS if profile in profiles_of(name)) if item == ALL else (item,)


@with_torch_defaults
def plan(item: str = ALL, profile: str = "small", model: Any = None, **settings: Any) -> Plan:
    """Settings and costs of an item or of all of a profile; nothing is loaded or run.

    Args:
        item: see `items`, or "all".
        model: a loaded host, or the name of one of the profiles'; None = the profile's.
        settings: values in place of the profile's, of the items that have them.

    Raises ValueError: an unknown item, profile or setting, or a value of another type.
    """
    names = items_named(item, profile)
    asked = tuple(_changed(settings_of(name, profile), settings, names) for name in names)
    shape = None if model is None else SHAPES.get(model) if isinstance(model, str) else Shape.of(model)
    return Plan(asked, tuple(cost_of(each, shape) for each in asked))


@says_when_interrupted
@with_torch_defaults
def run_items(
    items: str | Sequence[str] = ALL,
    *,
    out: str | Path,
    profile: str = "small",
    model: Any = None,
    text: Any = None,
    overwrite: bool = False,
    on_step: Callable[[str], None] = lambda text: None,
    progress: bool = True,
    **settings: Any,
) -> dict[str, ItemResult]:
    """Items of the paper on a host, each into its folder of `out`.

    Args:
        items: "all", one (see `items`), or several.
        out: a folder. The same call after an interruption goes on there; items may be added.
        profile: a key of PROFILES.
        model: a host, or a name for `load_host`; None = the profile's.
        text: a source for `swd_lens.load_text` in place of the profile's.
        overwrite: run finished items again; what they share is taken over.
        on_step: called with a line of text before each step; progress: bars within them.
        settings: values in place of the profile's, of the items that have them.

    Returns: item -> its result.

    Raises:
        ValueError: an unknown item, profile or setting, a value of another type; and whatever the items raise.
        ResumeError: `out` holds what was made of another host, text or profile.
        OSError: (FolderInUseError) another call writes `out`; or it cannot be written.
    """
    names = items_named(items, profile) if isinstance(items, str) else tuple(items)
    asked = {name: _changed(settings_of(name, profile), settings, names) for name in names}
    folder = Path(out)
    with writing(folder, "paper"):
        first = next(iter(asked.values()))
        if model is None or isinstance(model, str):
            on_step(f"load {model or first['model']}")
            name = model or first["model"]
            model = load_default_model() if name == "default" else load_host(name)
        materials = Materials(model, first, folder, text=text, on_step=on_step, progress=progress)
        results: dict[str, ItemResult] = {}
        for name, each in asked.items():
            results[name] = _run(materials, each, overwrite)
            reached(f", {len(results)} of {len(asked)} items finished")
        return results


def run_item(item: str, **how: Any) -> ItemResult:
    """Run one item; arguments as for `run_items`."""
    return run_items([item], **how)[item]


def _changed(settings: ItemSettings, values: dict[str, Any], names: Sequence[str]) -> ItemSettings:
    """Set the values that the item has; each has to be some item's."""
    known = {name for item in names for name in settings_of(item, settings.profile)}
    own = {name: value for name, value in values.items() if name in settings or name not in known}
    return settings.changed(**own)


def _run(materials: Materials, settings: ItemSettings, overwrite: bool) -> ItemResult:
    """Take over a finished item of these very settings, or run it."""
    folder = materials.folder / settings.item
    assert materials.parts.folder is not None  # refuses a folder of another host before any work
    if (folder / RESULT).is_file() and not overwrite:
        result = ItemResult.load(folder / RESULT)
        asked = json.loads(json.dumps(plain(dict(settings))))
        if result.settings == asked and result.provenance == materials.provenance():
            return result
    materials.on_step(f"{settings.item} ({settings.title})")
    result = RUNS[settings.item](materials, settings)
    result.write(folder)
    return ItemResult.load(folder / RESULT)


def results_in(folder: str | Path) -> dict[str, ItemResult]:
    """The finished items of a folder, in the paper's order. Raises FileNotFoundError: there is none."""
    files = {name: Path(folder) / name / RESULT for name in ITEMS}
    finished = {name: ItemResult.load(path) for name, path in files.items() if path.is_file()}
    if not finished:
        raise FileNotFoundError(f"{legible(folder)} holds no finished item of the paper")
    return finished
