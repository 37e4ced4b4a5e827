"""stability_card: what a stability study found, criterion by criterion, and its verdict in one sentence.

1. `CRITERIA` are fixed beforehand: what each is, and the value at which it is met.
2. `judged` takes the rows of runs to one value per criterion; `Stability.table` sets them beside thresholds and beside the
   same numbers of null runs.
3. `verdict` says in one sentence whether all are met, and if not which are not, and along which axis units agree least.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pandas as pd

from swd_lens.base.errors import legible
from swd_lens.base.figures import new_figure, style
from swd_lens.base.record import SavedRecord
from swd_lens.study.variations import AXES


@dataclass(frozen=True)
class Criterion:
    """One criterion.

    Attributes:
        name: as tables call it.
        about: as sentences call it.
        threshold: at which it is met.
        at_least: whether it is met above the threshold; else below.
    """

    name: str
    about: str
    threshold: float
    at_least: bool = True

    def met(self, value: float) -> bool:
        """Whether a value meets it; NaN does not."""
        return bool(value >= self.threshold if self.at_least else value <= self.threshold)

    @property
    def bound(self) -> str:
        return f"{'at least' if self.at_least else 'at most'} {self.threshold:g}"


CRITERIA = (
    Criterion("edges shared", "the share of edges that circuits have in common (Jaccard)", 0.8),
    Criterion("claims recurring", "the share of claims that recur", 0.8),
    Criterion("CV of recovered", "the coefficient of variation of what the claimed units recover", 0.25, at_least=False),
    Criterion("over random units", "what they recover over what random units of as many edges recover", 3.0),
    Criterion("over a re-paired task", "their effect on the task over that on answers dealt to other prompts", 1.5),
)
# What a run or a null run is measured by, in the order of a table's columns; see `Stability`.
MEASURES = (
    "similarity",
    "similarity of claimed",
    "similarity by number",
    "contribution",
    "edges shared",
    "claims recurring",
    "edges",
    "recovered",
    "random recovered",
    "drop",
    "re-paired drop",
)
OF_NULLS = ("similarity of atoms", "similarity across starts")


def judged(runs: pd.DataFrame) -> dict[str, float]:
    """Criterion -> its value over runs: means, and ratios of means, in which every axis counts the same.

    NaN where there is nothing to say: a CV of fewer than two runs, or around a mean that is not positive. A ratio to nothing (or
    to less) is infinite where there is something.
    """
    values = {name: runs[name].to_numpy(dtype=float) for name in MEASURES}
    axis, names = pd.factorize(runs["axis"])
    shares = 1.0 / (np.bincount(axis)[axis] * max(1, len(names)))

    def mean(of_runs: np.ndarray) -> float:
        known = ~np.isnan(of_runs)
        return float((of_runs * shares)[known].sum() / shares[known].sum()) if known.any() else math.nan

    means = {name: mean(of_runs) for name, of_runs in values.items()}
    recovered = values["recovered"]
    known = ~np.isnan(recovered)
    spread = math.nan
    if known.sum() > 1 and means["recovered"] > 0:
        weights = shares[known] / shares[known].sum()
        squares = float((weights * (recovered[known] - means["recovered"]) ** 2).sum())
        spread = math.sqrt(squares / (1 - float((weights**2).sum()))) / means["recovered"]
    return {
        "edges shared": means["edges shared"],
        "claims recurring": means["claims recurring"],
        "CV of recovered": spread,
        "over random units": _ratio(means["recovered"], means["random recovered"]),
        "over a re-paired task": _ratio(means["drop"], means["re-paired drop"]),
    }


def _ratio(part: float, whole: float) -> float:
    if math.isnan(part) or math.isnan(whole):
        return math.nan
    if whole > 0:
        return part / whole
    return math.inf if part > 0 else math.nan


@dataclass(frozen=True, repr=False, eq=False)
class Stability(SavedRecord):
    """A stability card: how far a task's units stay the same when everything that should not matter is changed.

    Attributes:
        task, site: of the circuit.
        claimed: the base's circuit, chosen on validation prompts: the claim is that these units carry the task.
        base: what the base run found, by measure: "edges", "units", "recovered", "drop", ...
        runs: a row per run: "axis" and "value" of what was changed; "carries": whether the surface carries the task in it;
            "similarity" of its units to the base's, matched one to one (mean over all), "similarity of claimed" units alone,
            "similarity by number" of units that have the same number; "contribution": cosine of what both circuits write on
            test prompts (their summed contribution, centred); "edges shared": Jaccard of both circuits' edges; "claims
            recurring": share of claimed units whose counterpart is in the run's own circuit; "edges" of that; "recovered" and
            "drop" (logits) of the counterparts of the claimed units on test prompts; "random recovered": of random units of as
            many edges, mean;
            "re-paired drop": |drop| with answers dealt to other prompts, mean.
        nulls: a row per null run, of the same columns: units of a matrix of W's singular values and random singular vectors
            in place of the run's, random units of as many edges in place of the circuit. Also "similarity of atoms", of the
            base's units to random atoms of equal nonzeros, and "similarity across starts", of that matrix's units to those that
            it has from a rotated start: how alike units are that no weights ask for.
        left_out: axis -> why it was not varied.
        settings: everything that was used; plain JSON values.
    """

    WHAT: ClassVar[str] = "a stability card"
    derived: ClassVar[tuple[str, ...]] = ("stable", "verdict")

    task: str
    site: str
    claimed: list[int]
    base: dict[str, float]
    runs: pd.DataFrame
    nulls: pd.DataFrame
    left_out: dict[str, str]
    settings: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name in ("runs", "nulls"):  # of a file, in which NaN is null
            table = getattr(self, name)
            numbers = {each: pd.to_numeric(table[each]) for each in (*MEASURES, *OF_NULLS) if each in table}
            object.__setattr__(self, name, table.assign(**numbers))

    def criteria(self) -> dict[str, float]:
        """Criterion -> its value over all runs."""
        return judged(self.runs)

    @property
    def stable(self) -> bool:
        """Say whether every criterion is met."""
        values = self.criteria()
        return all(each.met(values[each.name]) for each in CRITERIA)

    def table(self) -> pd.DataFrame:
        """One row per criterion: its value over the runs, its threshold, whether it is met, and its value over null runs."""
        values = self.criteria()
        nulls = judged(self.nulls) if len(self.nulls) else {}
        rows = [
            {
                "criterion": each.name,
                "value": values[each.name],
                "threshold": each.bound,
                "met": each.met(values[each.name]),
                "null": nulls.get(each.name, math.nan),
            }
            for each in CRITERIA
        ]
        return pd.DataFrame(rows)

    def by_axis(self) -> pd.DataFrame:
        """One row per axis, then the nulls: number of runs, and the means of similarity, contribution, edges shared, claims
        recurring and recovered.
        """
        shown = ["similarity", "similarity of claimed", "contribution", "edges shared", "claims recurring", "recovered"]
        rows = [
            {"axis": axis, "runs": len(of_axis)} | {name: float(of_axis[name].mean()) for name in shown}
            for axis, of_axis in self.runs.groupby("axis", sort=False)
        ]
        if len(self.nulls):
            rows.append({"axis": "null", "runs": len(self.nulls)} | {name: float(self.nulls[name].mean()) for name in shown})
        return pd.DataFrame(rows)

    @property
    def verdict(self) -> str:
        """The verdict in one sentence."""
        values, n, axes = self.criteria(), len(self.runs), self.runs["axis"].nunique()
        where = f"{len(self.claimed)} units of {self.site} for {self.task}, {n} runs along {axes} axes"
        failed = [each for each in CRITERIA if not each.met(values[each.name])]
        if not failed:
            return f"Stable ({where}): all {len(CRITERIA)} criteria are met."
        words = {name: f"{value:.2f}".replace("nan", "unknown") for name, value in values.items()}
        said = "; ".join(f"{each.name} {words[each.name]} ({each.bound} is asked)" for each in failed)
        least = self.by_axis().query("axis != 'null'").sort_values("edges shared").iloc[0]
        return (
            f"Not stable ({where}): {said}; circuits share fewest edges along {least['axis']} ({AXES[least['axis']]}): "
            f"{least['edges shared']:.2f}."
        )

    def notes(self) -> list[str]:
        """Everything that has to be known beside the verdict, in sentences."""
        said = [f"Not varied: {axis}: {reason}." for axis, reason in self.left_out.items()]
        lost = int((~self.runs["carries"].astype(bool)).sum())
        if lost:
            said.append(f"In {lost} of {len(self.runs)} runs the surface does not carry the task: no circuit, no claim recurs.")
        if len(self.nulls):
            means = {name: float(self.nulls[name].mean()) for name in ("similarity", *OF_NULLS)}
            said.append(
                f"Units are {self.runs['similarity'].mean():.2f} alike across runs, matched one to one, and "
                f"{self.runs['similarity by number'].mean():.2f} by their numbers. Those of a matrix that has only W's singular "
                f"values are {means['similarity']:.2f} alike to the base's, random atoms {means['similarity of atoms']:.2f}."
            )
            if not math.isnan(means["similarity across starts"]):
                alike = float(self.runs.loc[self.runs["axis"] == "start", "similarity"].mean())
                across = "" if math.isnan(alike) else f"; this matrix's are {alike:.2f} alike"
                said.append(
                    "From a rotated start the units of such a matrix, which no weights ask for, come out "
                    f"{means['similarity across starts']:.2f} alike{across}."
                )
        return said

    def figure(self):
        """Edges shared, claims recurring and recovered of every run by axis, thresholds dashed; a matplotlib Figure."""
        shown = ("similarity of claimed", "edges shared", "claims recurring", "recovered")
        limits = {each.name: each.threshold for each in CRITERIA}
        groups = [*self.runs.groupby("axis", sort=False), *([("null", self.nulls)] if len(self.nulls) else [])]
        figure, axes = new_figure(1, len(shown), width=2.3, height=0.9 + 0.24 * len(groups))
        for ax, name in zip(axes[0], shown, strict=True):
            for place, (axis, rows) in enumerate(groups):
                look = style(1 if axis == "null" else 0) | {"linestyle": ""}
                ax.plot(rows[name], [-place] * len(rows), marker="o", markersize=4, alpha=0.7, **look)
            if name in limits:
                ax.axvline(limits[name], color="#888888", linestyle="--", linewidth=1.0)
            ax.set_yticks([-place for place in range(len(groups))], [axis for axis, _ in groups] if ax is axes[0, 0] else [])
            ax.set_xlabel(name)
            ax.set_xlim(min(-0.02, float(ax.get_xlim()[0])), max(1.02, float(ax.get_xlim()[1])))
        return figure

    plot = figure

    def __repr__(self) -> str:
        return legible(f"Stability({self.verdict})")

    def title(self) -> str:
        return self.verdict

    def parts(self) -> tuple[Any, ...]:
        return (self.table(), self.figure(), self.by_axis(), *self.notes())
