"""variations: one base setting of a factorization and a task's circuit, and what is changed of it, one thing at a time.

1. `AXES` names what can be changed. Each axis gives its values one after the other: numbers of draws; sparsities, widths and
   amounts of text, a few round ones first, then drawn between the farthest of them; or a list that ends (presets, other texts).
2. `planned` goes round the axes: the first value of each, then the second, until there are enough runs. An axis that has nothing
   to change here (no second preset of this kind, prompts of one template) is left out, and says why.
3. `Variation.setting` is the base setting with that one thing changed: text, training prompts, and options of `factorize`.
   Validation and test prompts are the base's, so that all runs are judged on the same ones.

The base reads a random half of the text: other draws are other halves, as large.
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import quoted
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.solver.spec import PRESETS, AnnealSpec
from swd_lens.tasks.split import TaskSplit

# Axis -> what changes along it, as the card says it.
AXES: Mapping[str, str] = {
    "start": "the solver's start and seed: coordinates turned in random pairs",
    "data": "the draw of calibration text: another random half",
    "prompts": "the draw of training prompts: a random half",
    "templates": "the templates of training prompts: a random half",
    "sparsity": "the sparsity",
    "preset": "the solver's preset",
    "units": "the number of units",
    "tokens": "the amount of calibration text",
    "corpus": "the calibration text: another one",
}
SPARSITIES = (-0.05, 0.05, -0.1, 0.1)  # beside the base's
WIDTHS = (0.9, 1.1, 0.8, 1.25)  # times the base's units
AMOUNTS = (0.5, 0.75, 0.25)  # of the base's text
OTHER_PRESETS = ("quick", "thorough", "best", "deep")
_LEAST_TEMPLATES = 2
_TRIES = 64  # draws in a row without a new value, after which an axis ends


@dataclass(frozen=True)
class Setting:
    """Text, prompts and options that one run is made with."""

    rows: Int[Tensor, "rows pos"]  # (rows, pos) calibration ids
    train: TaskSplit  # training prompts, for scores and means
    options: Mapping[str, Any]  # of `swd_lens.factorize`: sparsity, preset, basis, ..
    refits: bool = True  # whether factors differ from the base's; else the base's are taken


@dataclass
class Base:
    """The base setting, and what variations draw from."""

    pool: Int[Tensor, "rows pos"]  # (rows, pos) all of the calibration text
    train: TaskSplit  # all training prompts
    options: Mapping[str, Any]  # of `swd_lens.factorize`, with the basis that the base run was told
    n_units: int  # of the base's factors
    corpora: Mapping[str, Int[Tensor, "_rows _pos"]]  # name -> (rows, pos) other texts
    seed: int  # of all draws
    _texts: dict[Any, CalibrationText] = field(default_factory=dict)

    @property
    def n_rows(self) -> int:
        """Rows of a draw: half of the text."""
        return max(1, len(self.pool) // 2)

    @property
    def setting(self) -> Setting:
        """The base's own: the first draw of text, all training prompts."""
        return Setting(self.drawn(0), self.train, self.options)

    def drawn(self, draw: int) -> Int[Tensor, "rows pos"]:
        """A random half of the text, in its order."""
        chosen = torch.randperm(len(self.pool), generator=self.generator("data", draw))[: self.n_rows]
        return self.pool[chosen.sort().values]

    def text(self, rows: Int[Tensor, "rows pos"], model: Any) -> CalibrationText:
        """These rows as text; the base's remembers its Grams for every run that reads it."""
        if torch.equal(rows, self.drawn(0)):
            if "base" not in self._texts:
                self._texts["base"] = CalibrationText(rows, model)
            return self._texts["base"]
        return CalibrationText(rows, model)

    def generator(self, axis: str, draw: int) -> torch.Generator:
        """The generator of one draw along an axis."""
        return torch.Generator().manual_seed(((self.seed * 7919 + draw) * 101 + list(AXES).index(axis)) % 2**63)

    def half_of_prompts(self, draw: int) -> TaskSplit:
        """A random half of the training prompts, in their order."""
        n = len(self.train)
        chosen = torch.randperm(n, generator=self.generator("prompts", draw))[: max(1, n // 2)]
        return self.train.at(chosen.sort().values.tolist())

    def half_of_templates(self, draw: int) -> TaskSplit:
        """The training prompts of a random half of their templates."""
        names = templates_of(self.train)
        chosen = torch.randperm(len(names), generator=self.generator("templates", draw))[: len(names) // 2].tolist()
        kept = {names[i] for i in chosen}
        return self.train.at([i for i, e in enumerate(self.train.examples) if e.meta.get("template") in kept])


@dataclass(frozen=True)
class Variation:
    """One thing that is changed of the base setting: an axis and its value."""

    axis: str
    value: float | int | str

    @property
    def key(self) -> tuple[str, str]:
        """Names it, as a step of the call."""
        return self.axis, str(self.value)

    def setting(self, base: Base) -> Setting:
        """The base setting with it changed."""
        own, value = base.setting, self.value
        match self.axis:
            case "start":
                return replace(own, options={**own.options, "start": "rotated", "seed": int(value)})
            case "data":
                return replace(own, rows=base.drawn(int(value)))
            case "prompts":
                return replace(own, train=base.half_of_prompts(int(value)), refits=False)
            case "templates":
                return replace(own, train=base.half_of_templates(int(value)), refits=False)
            case "tokens":
                return replace(own, rows=own.rows[: max(1, round(float(value) * len(own.rows)))])
            case "corpus":
                return replace(own, rows=base.corpora[str(value)])
            case _:  # sparsity, preset, units: options of that name
                return replace(own, options={**own.options, self.axis: value})


def planned(base: Base, axes: Sequence[str], n: int) -> tuple[list[Variation], dict[str, str]]:
    """The first n variations, going round the axes; and the axes that have none here, with the reason.

    Fewer than n where every axis ends.
    """
    left_out = {axis: reason for axis in axes if (reason := _nothing_to_vary(base, axis))}
    values = {axis: _values(base, axis) for axis in axes if axis not in left_out}
    runs: list[Variation] = []
    while values and len(runs) < n:
        for axis in list(values):
            value = next(values[axis], None)
            if value is None:
                del values[axis]
            elif len(runs) < n:
                runs.append(Variation(axis, value))
    return runs, left_out


def _values(base: Base, axis: str) -> Iterator[float | int | str]:
    """The values of an axis, one after the other: none twice, nor the base's own. Ends after _TRIES draws in a row
    without a new value, as where there are few units."""
    s, generator = float(base.options["sparsity"]), base.generator(axis, 0)
    named = {"preset": _other_presets(base), "corpus": list(base.corpora)}
    if axis in named:
        yield from named[axis]
        return
    between: dict[str, tuple[tuple[float, ...], Callable[[float], float | int]]] = {
        "sparsity": (SPARSITIES, lambda step: round(min(max(s + step, s / 2), (1 + s) / 2), 4)),
        "units": (WIDTHS, lambda share: max(1, round(share * base.n_units))),
        "tokens": (AMOUNTS, lambda share: round(share, 4)),
    }
    if axis not in between:
        yield from itertools.count(1)
        return
    firsts, value = between[axis]
    low, high = min(firsts), max(firsts)
    drawn = (low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64)) for _ in itertools.count())
    seen, missed = {{"sparsity": s, "units": base.n_units}.get(axis)}, 0
    for each in itertools.chain(firsts, drawn):
        proposed = value(each)
        missed = missed + 1 if proposed in seen else 0
        if missed == _TRIES:
            return
        if not missed:
            seen.add(proposed)
            yield proposed


def _nothing_to_vary(base: Base, axis: str) -> str:
    """Why an axis has nothing to change here; "" where it has."""
    preset = base.options["preset"]
    if axis in ("start", "preset", "units") and not isinstance(PRESETS.get(preset), AnnealSpec):
        return f"preset {quoted(preset)} has one start, one width and no faster or slower form"
    if axis == "templates" and len(templates_of(base.train)) < _LEAST_TEMPLATES:
        return "the training prompts are of one template, or do not name theirs"
    if axis == "corpus" and not base.corpora:
        return "no other text was given (corpora=)"
    if axis in ("data", "tokens") and len(base.pool) < 4:
        return "there are fewer than four rows of text to draw from"
    return ""


def _other_presets(base: Base) -> list[str]:
    """Presets that differ from the base's where the options leave them to."""

    def spec(name: str) -> Any:
        own = {each.name for each in fields(PRESETS[name])}
        return PRESETS[name].changed({key: value for key, value in base.options.items() if key in own})

    return [name for name in OTHER_PRESETS if spec(name) != spec(base.options["preset"])]


def templates_of(split: TaskSplit) -> list[str]:
    """The different templates that prompts name, in order of first use."""
    return list(dict.fromkeys(e.meta["template"] for e in split.examples if "template" in e.meta))
