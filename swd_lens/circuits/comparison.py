"""Comparison: what `compare` found, as curves, tables and the paper's figure.

1. `TaskComparison` holds the curves and scores of one task, `Comparison` those of all tasks and how alike the replacements
   behave.
2. Circuits are comparable only where the unpruned replacements behave alike (paper §protocol: CE within 0.001): whatever is
   further off than the tolerance carries its difference in legends and tables.
3. Seeds of one method become a mean, a standard deviation, a minimum and a count (method.md §4.1).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from swd_lens.base.display import card
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.plots import plot_curves, plot_frontiers
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.seeds import summary

TOLERANCE = 0.001  # nats (paper §protocol)


@dataclass(frozen=True)
class TaskComparison:
    """Curves and scores per replacement, on one task."""

    task: str
    curves: Mapping[str, CostCurve]
    scores: Mapping[str, UnitScores]

    def table(self, sufficiency: float | int = 0.9, necessity: float | int = 0.5) -> pd.DataFrame:
        """Least cost per replacement at a sufficiency and at a fraction of the whole necessity drop; NA: never reached."""
        rows = [
            {"task": self.task, "method": name, "margin": curve.q_unpruned, **_costs(curve, sufficiency, necessity)}
            for name, curve in self.curves.items()
        ]
        return typed(pd.DataFrame(rows))

    def plot(self, cost: str = "edges"):
        """Sufficiency and necessity drop of every replacement against cost; a matplotlib Figure."""
        return plot_curves(self.curves, cost=cost)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Mapping[str, TaskComparison]):
    """task name -> TaskComparison, and how alike the replacements behave.

    Attributes:
        tasks: what this mapping holds.
        groups: a method of several seeds -> the names of its curves ("Random-B" -> "Random-B/0", ...).
        fidelities: curve -> its `Fidelity`; those that were not measured are not there.
        reference: the method whose CE the others are matched to.
        tolerance: nats of CE within which two replacements count as matched.
    """

    tasks: Mapping[str, TaskComparison]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fidelities: Mapping[str, Any] = field(default_factory=dict)
    reference: str = ""
    tolerance: float | int = TOLERANCE

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
        curves = dict.fromkeys(name for its in self.values() for name in its.curves)
        return dict(of_seed.get(name, (name, (name,))) for name in curves)

    # ------------------------------------------------------------------------------------------ matched CE

    def ce_difference(self, method: str) -> float | None:
        """CE of a method minus that of the reference, in nats; of several seeds the difference furthest from 0.

        None where either was not measured.
        """
        differences = [self._difference(name) for name in self.methods[method]]
        known = [difference for difference in differences if difference is not None]
        return max(known, key=abs) if known and len(known) == len(differences) else None

    def matched(self, method: str) -> bool | None:
        """Whether the method's CE is within the tolerance of the reference's; None where CE was not measured."""
        return self._within(self.ce_difference(method))

    def label(self, method: str) -> str:
        """The method's name for legends, with its CE difference if that is not within the tolerance."""
        return method if self.matched(method) is not False else f"{method} (CE {self.ce_difference(method):+.4f})"

    def matching(self) -> str:
        """One sentence: which methods behave alike enough for their circuits to be compared."""
        matched = {method: self.matched(method) for method in self.methods}
        if unknown := [method for method, yes in matched.items() if yes is None]:
            return f"CE was not matched: not measured for {', '.join(unknown)} (pass tokens=)."
        within = f"{self.tolerance:g} nats of {self.reference}"
        if off := [self.label(method) for method, yes in matched.items() if not yes]:
            return f"Further than {within}, so not comparable with it: {', '.join(off)}."
        return f"CE is matched, all within {within}."

    def _difference(self, name: str) -> float | None:
        """Of one curve's replacement, against the mean over the reference's seeds."""
        references = self.methods.get(self.reference, ())
        if not references or not {name, *references} <= set(self.fidelities):
            return None
        return self.fidelities[name].ce - sum(self.fidelities[other].ce for other in references) / len(references)

    def _within(self, difference: float | None) -> bool | None:
        return None if difference is None else abs(difference) <= self.tolerance

    # ------------------------------------------------------------------------------------------ tables

    def frame(self) -> pd.DataFrame:
        """Every prefix of every curve: task, method, seed (its place among the method's seeds), then the curve's columns."""
        parts = []
        for task, its in self.items():
            for method, seed, name in self._replacements():
                rows = its.curves[name].rows
                head = pd.DataFrame({"task": task, "method": method, "seed": seed}, index=rows.index)
                parts.append(pd.concat([head.astype({"seed": "Int64"}), rows], axis=1))
        return pd.concat(parts, ignore_index=True)

    def table(self, sufficiency: float | int = 0.9, necessity: float | int = 0.5) -> pd.DataFrame:
        """Least cost per task and method at a sufficiency and at a fraction of the whole necessity drop; empty: never reached.

        Where some method has seeds, the costs are means over the seeds that reach the threshold; beside them stand their
        standard deviation (sd, n - 1) and least (min), and "reached ..." counts those seeds (method.md §4.1).
        """
        rows = [
            {
                "task": task,
                "method": method,
                **({"seeds": len(names)} if self.groups else {}),
                "margin": sum(its.curves[name].q_unpruned for name in names) / len(names),
                **self._over_seeds([_costs(its.curves[name], sufficiency, necessity) for name in names]),
                "CE difference": self.ce_difference(method),
                "CE matched": self.matched(method),
            }
            for task, its in self.items()
            for method, names in self.methods.items()
        ]
        return typed(pd.DataFrame(rows))

    def _over_seeds(self, found: Sequence[Mapping[str, int | None]]) -> dict[str, float | int | None]:
        row: dict[str, float | int | None] = {}
        for key in found[0]:
            over = summary([costs[key] for costs in found])
            row[key] = over["mean"]
            if self.groups:
                row |= {f"{key} sd": over["sd"], f"{key} min": over["min"]}
                row[f"reached {key.split(' at ')[1]}"] = over["reached"]  # the same for units and edges
        return row

    def fidelity(self) -> pd.DataFrame:
        """One row per replacement: CE, CE delta (to the dense host), CE difference (to the reference), KL; NA if not measured."""
        rows = []
        for method, seed, name in self._replacements():
            measured, difference = self.fidelities.get(name), self._difference(name)
            row = {key: None if measured is None else getattr(measured, key) for key in ("ce", "ce_delta", "kl")}
            row = {"CE": row["ce"], "CE delta": row["ce_delta"], "KL": row["kl"]}
            row |= {"CE difference": difference, "CE matched": self._within(difference)}
            rows.append({"method": method, "seed": seed, **row})
        return typed(pd.DataFrame(rows))

    def _replacements(self) -> Iterator[tuple[str, int | None, str]]:
        """(method, seed, name of the curve); a method of one has no seed."""
        for method, names in self.methods.items():
            for place, name in enumerate(names):
                yield method, place if method in self.groups else None, name

    # ------------------------------------------------------------------------------------------ shown

    def plot(self, cost: str = "edges"):
        """The paper's figure: columns tasks, rows sufficiency and necessity drop, least cost of every value; a matplotlib Figure.

        A method of several seeds is drawn as its mean over the seeds that reach a value, in a band of one standard deviation.
        Methods whose CE is not matched say so in the legend.

        Args:
            cost: "edges" or "units".
        """
        panels = {
            task: {self.label(m): [its.curves[name] for name in names] for m, names in self.methods.items()}
            for task, its in self.items()
        }
        return plot_frontiers(panels, cost=cost, note=self.matching())

    def __repr__(self) -> str:
        return f"{self._shown().to_string(index=False, na_rep='')}\n{self.matching()}"

    def _repr_html_(self) -> str:
        if not self:
            return card("Comparison of nothing")
        title = f"Comparison of {', '.join(self.methods)} on {', '.join(self)}"
        return card(title, self.plot(), self._shown(), self.matching())

    def _shown(self) -> pd.DataFrame:
        """The table without the spread over seeds, in digits that one can read."""
        table = self.table()
        wide = [column for column in table if column.endswith((" sd", " min")) or column.startswith("reached ")]
        return table.drop(columns=wide).round({"margin": 3, "CE difference": 5})


def _costs(curve: CostCurve, sufficiency: float | int, necessity: float | int) -> dict[str, int | None]:
    """Units and edges at both thresholds, by the name of their column."""
    return {
        f"{cost} at {what} {threshold:g}": curve.cost_at(**{what: threshold}, cost=cost)
        for what, threshold in (("sufficiency", sufficiency), ("necessity", necessity))
        for cost in ("units", "edges")
    }


def typed(table: pd.DataFrame) -> pd.DataFrame:
    """Columns that hold NA where nothing was measured or reached, of the same type whether anything was or not.

    Costs are Int64, means and standard deviations over seeds Float64.
    """
    # By name where a column may be all None; other floats stay floats, even if they happen to be whole.
    types = dict.fromkeys((*table.select_dtypes("float"), "CE", "CE delta", "CE difference", "KL"), "Float64")
    types |= {"seed": "Int64", "seeds": "Int64", "CE matched": "boolean"}
    for column in table:
        if " at sufficiency " in column or " at necessity " in column:
            mean = "seeds" in table and not column.endswith(" min")
            types[column] = "Float64" if mean else "Int64"
        elif column.startswith("reached "):
            types[column] = "Int64"
    return table.convert_dtypes().astype({column: kind for column, kind in types.items() if column in table})
