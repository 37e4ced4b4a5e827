"""Comparison: what several replacements of one host cost and do on several tasks, and how alike they behave.

1. A `Target` is what a circuit has to reach: a sufficiency, a fraction of the method's own whole necessity drop, or a necessity
   drop in logits.
2. `TaskComparison` holds the curves and scores of one task, `Comparison` those of all tasks and how alike the replacements
   behave: circuits are comparable only where the unpruned replacements behave alike (paper §protocol: CE within 0.001), so
   whatever is further off than the tolerance carries its difference in legends and tables.
3. Seeds of one method become a mean, a standard deviation, a minimum and a count (method.md §4.1).

compare.py runs what is in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from swd_lens.base.errors import error
from swd_lens.base.record import Record
from swd_lens.circuits.curve import CostCurve, over_seeds
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.plots import plot_curves, plot_frontiers
from swd_lens.circuits.scores import UnitScores

TOLERANCE = 0.001  # nats (paper §protocol)
_COSTS = ("units", "edges")  # in the order of a table's columns


@dataclass(frozen=True)
class Target:
    """What a circuit has to reach.

    Attributes:
        of: "sufficiency", "necessity" (as a fraction of the whole necessity drop), or "drop" (a necessity drop in logits).
        value: how much of it.
    """

    of: str
    value: float | int

    def cost(self, curve: CostCurve, cost: str) -> int | None:
        """The least cost of a curve's prefixes that reach it; None where none does."""
        return curve.cost_at(**{self.of: self.value}, cost=cost)

    def __str__(self) -> str:
        return f"{self.of} {self.value:g}"


def _targets(sufficiency: float | int, necessity: float | int, drop: float | int | None) -> list[Target]:
    """In the order of a table's columns."""
    targets = [Target("sufficiency", sufficiency), Target("necessity", necessity)]
    return targets if drop is None else [*targets, Target("drop", drop)]


@dataclass(frozen=True)
class TaskComparison(Record):
    """Curves and scores per replacement, on one task."""

    task: str
    curves: Mapping[str, CostCurve]
    scores: Mapping[str, UnitScores]

    def table(
        self, sufficiency: float | int = 0.9, necessity: float | int = 0.5, drop: float | int | None = None
    ) -> pd.DataFrame:
        """Least cost per replacement at each threshold, see `Comparison.table`; NA: never reached."""
        targets = _targets(sufficiency, necessity, drop)
        rows = [
            {"task": self.task, "method": name, "margin": curve.q_unpruned}
            | {f"{cost} at {target}": target.cost(curve, cost) for target in targets for cost in _COSTS}
            for name, curve in self.curves.items()
        ]
        return typed(pd.DataFrame(rows), whole=[f"{cost} at {target}" for target in targets for cost in _COSTS])

    def plot(self, cost: str = "edges"):
        """Sufficiency and necessity drop of every replacement against cost; a matplotlib Figure."""
        return plot_curves(self.curves, cost=cost)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Mapping[str, TaskComparison], Record):
    """task name -> TaskComparison, and how alike the replacements behave.

    Attributes:
        tasks: what this mapping holds.
        groups: a method of several seeds -> the names of its curves ("Random-B" -> "Random-B/0", ...).
        fidelities: curve -> its `Fidelity`; those that were not measured are not there.
        reference: the method whose CE the others are matched to.
        tolerance: nats of CE within which two replacements count as matched.
        others: the same replacements and tasks under further interventions, where several were asked for.
    """

    tasks: Mapping[str, TaskComparison]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fidelities: Mapping[str, Fidelity] = field(default_factory=dict)
    reference: str = ""
    tolerance: float | int = TOLERANCE
    others: tuple["Comparison", ...] = ()

    def __getitem__(self, task: str) -> TaskComparison:
        return self.tasks[task]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tasks)

    def __len__(self) -> int:
        return len(self.tasks)

    @property
    def methods(self) -> dict[str, tuple[str, ...]]:
        """Method -> the names of its curves: one, or one per seed."""
        of_seed = {name: (method, names) for method, names in self.groups.items() for name in names}
        curves = dict.fromkeys(name for of_task in self.values() for name in of_task.curves)
        return dict(of_seed.get(name, (name, (name,))) for name in curves)

    @property
    def intervention(self) -> tuple[str, str]:
        """(positions, ablation) of its curves."""
        curve = next((curve for of_task in self.values() for curve in of_task.curves.values()), None)
        settings = {} if curve is None else curve.settings
        return settings.get("positions", "scoring"), settings.get("ablation", "mean")

    def under_each(self) -> dict[tuple[str, str], "Comparison"]:
        """(positions, ablation) -> comparison: this one first, then `others`."""
        return {each.intervention: each for each in (self, *self.others)}

    def beside(self, other: "Comparison") -> "Comparison":
        """With the methods of another comparison of the same tasks and interventions, on another host, say.

        Raises:
            ValueError: a method that stands in both, or other tasks or interventions.
        """
        if twice := sorted(set(self.methods) & set(other.methods)):
            raise error("comparison-curve-twice", names=", ".join(map(repr, twice)))
        if list(self) != list(other) or list(self.under_each()) != list(other.under_each()):
            raise error("comparisons-of-other-tasks", tasks=", ".join(self), others=", ".join(other))
        tasks = {
            name: TaskComparison(name, {**ours.curves, **other[name].curves}, {**ours.scores, **other[name].scores})
            for name, ours in self.items()
        }
        return replace(
            self,
            tasks=tasks,
            groups={**self.groups, **other.groups},
            fidelities={**self.fidelities, **other.fidelities},
            others=tuple(ours.beside(theirs) for ours, theirs in zip(self.others, other.others, strict=True)),
        )

    def without(self, methods: Iterable[str]) -> "Comparison":
        """The same without some methods."""
        left_out = {name for method in methods for name in self.methods.get(method, ())}

        def kept(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in left_out}

        tasks = {name: TaskComparison(name, kept(of.curves), kept(of.scores)) for name, of in self.items()}
        groups = {method: names for method, names in self.groups.items() if not left_out & {*names}}
        others = tuple(each.without(methods) for each in self.others)
        return replace(self, tasks=tasks, groups=groups, fidelities=kept(self.fidelities), others=others)

    # ------------------------------------------------------------------------------------------ matched CE

    def ce_difference(self, method: str) -> float | None:
        """CE of a method minus that of the reference, in nats; of several seeds the difference furthest from 0.

        None where either was not measured.
        """
        name = self._furthest(method)
        return None if name is None else self._difference(name)

    def ce_difference_se(self, method: str) -> float | None:
        """Standard error of `ce_difference`, paired over the rows of the held-out text; None where rows were not kept, and of
        the reference itself.
        """
        name = self._furthest(method)
        return None if name is None else self._difference_se(name)

    def matched(self, method: str) -> bool | None:
        """Whether the method's CE is within the tolerance of the reference's; None where CE was not measured."""
        return self._within(self.ce_difference(method))

    def label(self, method: str) -> str:
        """The method's name for legends, with its CE difference if that is not within the tolerance."""
        return method if self.matched(method) is not False else f"{method} (CE {self._shown_difference(method)})"

    def matching(self) -> str:
        """One sentence: which methods behave alike enough for their circuits to be compared."""
        matched = {method: self.matched(method) for method in self.methods}
        if unknown := [method for method, yes in matched.items() if yes is None]:
            return f"CE was not matched: not measured for {', '.join(unknown)} (pass tokens=)."
        within = f"{self.tolerance:g} nats of {self.reference}"
        if off := [self.label(method) for method, yes in matched.items() if not yes]:
            return f"Further than {within}, so not comparable with it: {', '.join(off)}."
        furthest = max(self.methods, key=lambda method: abs(self.ce_difference(method) or 0.0))
        if self.ce_difference_se(furthest) is None:
            return f"CE is matched, all within {within}."
        return f"CE is matched, all within {within}; furthest is {furthest}, {self._shown_difference(furthest)}."

    def _shown_difference(self, method: str) -> str:
        """The CE difference, with its standard error where that is known."""
        se = self.ce_difference_se(method)
        return f"{self.ce_difference(method):+.4f}" + ("" if se is None else f" ± {se:.4f}")

    def _furthest(self, method: str) -> str | None:
        """Of a method's curves that whose CE differs most; None unless all were measured."""
        differences = {name: self._difference(name) for name in self.methods[method]}
        known = {name: abs(difference) for name, difference in differences.items() if difference is not None}
        return max(known, key=lambda name: known[name]) if known and len(known) == len(differences) else None

    def _difference(self, name: str) -> float | None:
        """Of one curve's replacement, against the mean over the reference's seeds."""
        references = self.methods.get(self.reference, ())
        if not references or not {name, *references} <= set(self.fidelities):
            return None
        return self.fidelities[name].ce - sum(self.fidelities[other].ce for other in references) / len(references)

    def _difference_se(self, name: str) -> float | None:
        references = self.methods.get(self.reference, ())
        if name in references or not references or not {name, *references} <= set(self.fidelities):
            return None
        return self.fidelities[name].difference_se(*(self.fidelities[other] for other in references))

    def _within(self, difference: float | None) -> bool | None:
        return None if difference is None else abs(difference) <= self.tolerance

    # ------------------------------------------------------------------------------------------ tables

    def prefixes(self) -> pd.DataFrame:
        """Every prefix of every curve: task, method, seed (its place among the method's seeds), then the curve's columns."""
        parts = []
        for task, of_task in self.items():
            for method, seed, name in self._replacements():
                rows = of_task.curves[name].rows
                head = pd.DataFrame({"task": task, "method": method, "seed": seed}, index=rows.index)
                parts.append(pd.concat([head.astype({"seed": "Int64"}), rows], axis=1))
        return pd.concat(parts, ignore_index=True)

    frame = prefixes  # its former name

    def table(
        self, sufficiency: float | int = 0.9, necessity: float | int = 0.5, drop: float | int | None = None
    ) -> pd.DataFrame:
        """Least cost per task and method at a sufficiency and at a necessity drop; empty: never reached.

        A drop in logits is the paper's (§protocol, NecDrop). A fraction of each method's own drop is ours: the
        whole is what ablating all of that method's units does, which differs from method to method, so that one whose whole drop
        is small is asked for less.

        Args:
            sufficiency: of columns "... at sufficiency 0.9".
            necessity: fraction of the method's own whole necessity drop, of columns "... at necessity 0.5".
            drop: logits, of columns "... at drop 1"; None leaves these out.

        Where some method has seeds, the costs are means over the seeds that reach the threshold; beside them stand their
        standard deviation (sd, n - 1) and least (min), and "reached ..." counts those seeds (method.md §4.1).
        """
        return self._table(_targets(sufficiency, necessity, drop), spread=bool(self.groups))

    def _table(self, targets: Iterable[Target], spread: bool) -> pd.DataFrame:
        """`table`; without the columns of the spread over seeds where that is not asked for."""
        rows: list[dict[str, Any]] = []
        types = {"whole": {"seeds"}, "real": {"CE difference", "CE difference se"}}
        for task, of_task in self.items():
            for method, names in self.methods.items():
                curves = [of_task.curves[name] for name in names]
                row = {"task": task, "method": method, **({"seeds": len(names)} if self.groups else {})}
                row["margin"] = sum(curve.q_unpruned for curve in curves) / len(names)
                for target in targets:
                    for cost in _COSTS:
                        column, costs = (
                            f"{cost} at {target}",
                            over_seeds([target.cost(curve, cost) for curve in curves]),
                        )
                        row[column] = costs.mean
                        types["real" if self.groups else "whole"].add(column)
                        if spread:
                            row |= {f"{column} sd": costs.sd, f"{column} min": costs.least}
                            row[f"reached {target}"] = costs.reached  # the same for units and edges
                            types["real"].add(f"{column} sd")
                            types["whole"] |= {f"{column} min", f"reached {target}"}
                row |= {"CE difference": self.ce_difference(method), "CE difference se": self.ce_difference_se(method)}
                row["CE matched"] = self.matched(method)
                rows.append(row)
        return typed(pd.DataFrame(rows), **types)

    def fidelity(self) -> pd.DataFrame:
        """One row per replacement: CE, CE delta (to the dense host), CE difference (to the reference), KL; NA if not measured."""
        rows = []
        for method, seed, name in self._replacements():
            measured, difference = self.fidelities.get(name), self._difference(name)
            row = {"method": method, "seed": seed, "CE": measured and measured.ce}
            row |= {"CE delta": measured and measured.ce_delta, "KL": measured and measured.kl}
            row |= {"CE difference": difference, "CE difference se": self._difference_se(name)}
            rows.append(row | {"CE matched": self._within(difference)})
        real = {"CE", "CE delta", "CE difference", "CE difference se", "KL"}
        return typed(pd.DataFrame(rows), whole={"seed"}, real=real)

    def _replacements(self) -> Iterator[tuple[str, int | None, str]]:
        """(method, seed, name of the curve); a method of one has no seed."""
        for method, names in self.methods.items():
            for seed, name in enumerate(names):
                yield method, seed if method in self.groups else None, name

    # ------------------------------------------------------------------------------------------ shown

    def plot(self, cost: str = "edges"):
        """The paper's figure: columns tasks, rows sufficiency and necessity drop, least cost of every value; a matplotlib Figure.

        A method of several seeds is drawn as its mean over the seeds that reach a value, in a band of one standard deviation.
        Methods whose CE is not matched say so in the legend.

        Args:
            cost: "edges" or "units".
        """
        panels = {
            task: {self.label(m): [of_task.curves[name] for name in names] for m, names in self.methods.items()}
            for task, of_task in self.items()
        }
        return plot_frontiers(panels, cost=cost, note=self.matching())

    def __repr__(self) -> str:
        return f"{self._shown().to_string(index=False, na_rep='')}\n{self.matching()}"

    def title(self) -> str:
        return f"Comparison of {', '.join(self.methods)} on {', '.join(self)}" if self else "Comparison of nothing"

    def parts(self) -> tuple[Any, ...]:
        return (self.plot(), self._shown(), self.matching()) if self else ()

    def _shown(self) -> pd.DataFrame:
        """The table without the spread over seeds, in digits that one can read."""
        shown = self._table(_targets(0.9, 0.5, None), spread=False)
        shown = shown.round({"margin": 3, "CE difference": 5, "CE difference se": 5})
        return shown.drop(columns="task") if len(self) == 1 else shown  # which the title says


def typed(table: pd.DataFrame, whole: Iterable[str] = (), real: Iterable[str] = ()) -> pd.DataFrame:
    """Columns that hold NA where nothing was measured or reached, of the same type whether anything was or not.

    Args:
        whole: columns of whole numbers, which become Int64 (counts, costs).
        real: columns of real numbers, which become Float64; others that hold any are found by themselves.
    """
    # By name where a column may be all None; floats stay floats, even if they happen to be whole.
    types: dict[str, str] = dict.fromkeys((*table.select_dtypes("float"), *real), "Float64")
    types |= {**dict.fromkeys(whole, "Int64"), "CE matched": "boolean"}
    return table.convert_dtypes().astype({column: kind for column, kind in types.items() if column in table})
