"""Comparison: what several replacements of one host cost and do on several tasks, and how alike they behave.

1. `TaskComparison` holds the curves and scores of one task, `Comparison` those of all tasks.
2. Circuits are comparable only where the replacements behave alike (paper §protocol: CE within 0.001). A method is matched
   where neither its CE nor its KL is worse than the reference's by more than the tolerance, beyond two standard errors of the
   paired difference; tables and legends say by which of the two a method is out, and by how much.
3. Every method has a role: "swd" (the study is about it), "control", "paper" (the paper's solver), "trained".
4. Seeds of one method become a mean, a standard deviation, a minimum and a count (method.md §4.1).

compare.py runs what is in it.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd

from swd_lens.base.errors import legible
from swd_lens.base.record import Record
from swd_lens.circuits.curve import CostCurve
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.measure import RECOVERED, Threshold
from swd_lens.circuits.plots import plot_curves, plot_frontiers
from swd_lens.circuits.scores import UnitScores
from swd_lens.circuits.seeds import over_seeds

TOLERANCE = 0.001  # nats (paper §protocol)
ROLES = ("swd", "control", "paper", "trained")
_COSTS = ("units", "edges")  # in the order of a table's columns
_DIFFERENCES = ("CE difference", "CE difference se", "KL difference", "KL difference se")


def thresholds(
    recovered: float | int = RECOVERED,
    necessity: float | int = 0.5,
    drop: float | int | None = None,
    sufficiency: float | int | None = None,
) -> list[Threshold]:
    """In the order of a table's columns: recovered, sufficiency, necessity, drop; those that are None are left out."""
    asked = {"recovered": recovered, "sufficiency": sufficiency, "necessity": necessity, "drop": drop}
    return [Threshold.given(**{of: value}) for of, value in asked.items() if value is not None]


def priced(curve: CostCurve, threshold: Threshold, cost: str) -> int | None:
    """`CostCurve.cost_at` without its warning: a table says in words which surfaces do not carry a task."""
    row = curve.row_of(threshold, cost)
    return None if row is None else int(row[cost])


@dataclass(frozen=True)
class TaskComparison(Record):
    """Curves and scores per replacement, on one task."""

    task: str
    curves: Mapping[str, CostCurve]
    scores: Mapping[str, UnitScores]

    def table(
        self,
        recovered: float | int = RECOVERED,
        necessity: float | int = 0.5,
        drop: float | int | None = None,
        sufficiency: float | int | None = None,
    ) -> pd.DataFrame:
        """Least cost per replacement at each threshold, see `Comparison.table`; NA: never reached, or nothing is carried."""
        targets = thresholds(recovered, necessity, drop, sufficiency)
        table = Comparison({self.task: self})._table(targets, spread=False)
        return table.drop(columns=[*_DIFFERENCES, "out by", "matched"])

    def plot(self, cost: str = "edges"):
        """Draw what circuits of every replacement recover, and their drop, against cost; a matplotlib Figure."""
        return plot_curves(self.curves, cost=cost)


@dataclass(frozen=True, repr=False, eq=False)
class Comparison(Mapping[str, TaskComparison], Record):
    """task name -> TaskComparison, and how alike the replacements behave.

    Attributes:
        tasks: what this mapping holds.
        groups: a method of several seeds -> the names of its curves ("Random-B" -> "Random-B/0", ...).
        fidelities: curve -> its `Fidelity`; those that were not measured are not there.
        reference: the method whose CE and KL the others are matched to.
        tolerance: nats of CE, and of KL, that a matched method may be worse by.
        roles: method -> "swd", "control", "paper" or "trained"; those that are not there are not known.
        others: the same replacements and tasks under further interventions, where several were asked for.
    """

    tasks: Mapping[str, TaskComparison]
    groups: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    fidelities: Mapping[str, Fidelity] = field(default_factory=dict)
    reference: str = ""
    tolerance: float | int = TOLERANCE
    roles: Mapping[str, str] = field(default_factory=dict)
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
            raise ValueError(f"two curves are called {legible(', '.join(map(repr, twice)))}: rename a method")
        if list(self) != list(other) or list(self.under_each()) != list(other.under_each()):
            raise ValueError(
                f"one comparison is of {legible(', '.join(self))}, the other of {legible(', '.join(other))}, or they "
                "intervene otherwise: they cannot stand beside each other"
            )
        tasks = {
            name: TaskComparison(name, {**ours.curves, **other[name].curves}, {**ours.scores, **other[name].scores})
            for name, ours in self.items()
        }
        return replace(
            self,
            tasks=tasks,
            groups={**self.groups, **other.groups},
            fidelities={**self.fidelities, **other.fidelities},
            roles={**self.roles, **other.roles},
            others=tuple(ours.beside(theirs) for ours, theirs in zip(self.others, other.others, strict=True)),
        )

    def without(self, methods: Iterable[str]) -> "Comparison":
        """This comparison without some methods."""
        left_out = {name for method in methods for name in self.methods.get(method, ())}

        def kept(values: Mapping[str, Any]) -> dict[str, Any]:
            return {name: value for name, value in values.items() if name not in left_out}

        tasks = {name: TaskComparison(name, kept(of.curves), kept(of.scores)) for name, of in self.items()}
        groups = {method: names for method, names in self.groups.items() if not left_out & {*names}}
        others = tuple(each.without(methods) for each in self.others)
        return replace(self, tasks=tasks, groups=groups, fidelities=kept(self.fidelities), others=others)

    def in_role(self, *roles: str) -> list[str]:
        """The methods of these roles, in their order."""
        return [method for method in self.methods if self.roles.get(method) in roles]

    # ------------------------------------------------------------------------------------------ matched CE and KL

    def ce_difference(self, method: str) -> float | None:
        """CE of a method minus that of the reference, in nats; of several seeds the worst. None where either was not measured."""
        return self._difference(method, "CE")[0]

    def ce_difference_se(self, method: str) -> float | None:
        """Standard error of `ce_difference`, paired over the rows of the held-out text; None where rows were not kept, and of
        the reference itself.
        """
        return self._difference(method, "CE")[1]

    def kl_difference(self, method: str) -> float | None:
        """KL of a method minus that of the reference, in nats; as `ce_difference`."""
        return self._difference(method, "KL")[0]

    def kl_difference_se(self, method: str) -> float | None:
        """Standard error of `kl_difference`; as `ce_difference_se`."""
        return self._difference(method, "KL")[1]

    def out_by(self, method: str) -> tuple[str, ...] | None:
        """By which of CE and KL a method is worse than the reference: by more than the tolerance, beyond two standard errors.
        () is matched; None: not measured.
        """
        out = []
        for of in ("CE", "KL"):
            difference, se = self._difference(method, of)
            if difference is None:
                return None
            if difference - 2 * (se or 0.0) > self.tolerance:
                out.append(of)
        return tuple(out)

    def matched(self, method: str) -> bool | None:
        """Whether neither the method's CE nor its KL is worse than the reference's; None where they were not measured."""
        out = self.out_by(method)
        return None if out is None else not out

    def label(self, method: str) -> str:
        """The method's name for legends, with what it is out by."""
        out = self.out_by(method)
        return f"{method} ({', '.join(self._shown_difference(method, of) for of in out)})" if out else method

    def matching(self) -> str:
        """One sentence: which methods behave alike enough for their circuits to be compared."""
        matched = {method: self.matched(method) for method in self.methods}
        if unknown := [method for method, yes in matched.items() if yes is None]:
            return f"CE and KL were not matched: not measured for {', '.join(unknown)} (pass tokens=)."
        if off := [self.label(method) for method, yes in matched.items() if not yes]:
            worse = f"Worse than {self.reference} by more than {self.tolerance:g} nats"
            return f"{worse}, so not comparable with it: {', '.join(off)}."
        of_methods = {method: self.ce_difference(method) or 0.0 for method in self.methods}
        worst = max(of_methods, key=lambda method: of_methods[method])
        shown = ", ".join(self._shown_difference(worst, of) for of in ("CE", "KL"))
        return (
            f"Matched: no method's CE or KL is worse than that of {self.reference} by more than {self.tolerance:g} nats; the "
            f"worst CE is that of {worst}, {shown}."
        )

    def _shown_difference(self, method: str, of: str) -> str:
        """The difference, with its standard error where that is known."""
        difference, se = self._difference(method, of)
        return f"{of} {difference:+.4f}" + ("" if se is None else f" ± {se:.4f}")

    def _difference(self, method: str, of: str) -> tuple[float | None, float | None]:
        """The worst difference among a method's curves, and its standard error; None unless all were measured."""
        of_curves = [self._difference_of(name, of) for name in self.methods[method]]
        known = [(difference, se) for difference, se in of_curves if difference is not None]
        return max(known, key=lambda pair: pair[0]) if len(known) == len(of_curves) else (None, None)

    def _difference_of(self, name: str, of: str) -> tuple[float | None, float | None]:
        """One curve's difference from the mean over the reference's seeds, and its standard error."""
        references = self.methods.get(self.reference, ())
        if not references or not {name, *references} <= set(self.fidelities):
            return None, None
        of_curve = self.fidelities
        known = {each: of_curve[each].ce if of == "CE" else of_curve[each].kl for each in (name, *references)}
        difference = known[name] - sum(known[each] for each in references) / len(references)
        if name in references:
            return difference, None
        return difference, self.fidelities[name].difference_se(*(self.fidelities[n] for n in references), of=of)

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

    def table(
        self,
        recovered: float | int = RECOVERED,
        necessity: float | int = 0.5,
        drop: float | int | None = None,
        sufficiency: float | int | None = None,
    ) -> pd.DataFrame:
        """Least cost per task and method at each threshold; empty: never reached, or the surface does not carry the task.

        A drop in logits is the paper's (§protocol, NecDrop). A fraction of each method's own drop is ours: the
        whole is what ablating all of that method's units does, which differs from method to method, so that one whose whole drop
        is small is asked for less.

        Args:
            recovered: of columns "... at recovered 0.9".
            necessity: fraction of the method's own whole drop, of columns "... at necessity 0.5".
            drop: logits, of columns "... at drop 1"; None leaves these out.
            sufficiency: of columns "... at sufficiency 0.9"; None leaves these out.

        Columns "carried" and "carries" say what the units do for the task (measure.py); "out by" is by what a method is worse
        than the reference. Where some method has seeds, the costs are means over the seeds that reach the threshold; beside them
        stand their standard deviation (sd, n - 1) and least (min), and "reached ..." counts those seeds (method.md §4.1).
        "... of the smallest admissible": of `CostCurve.smallest_admissible`, where random sets were drawn
        (`compare(..., evaluation={"random_sets": 50})`).
        """
        return self._table(thresholds(recovered, necessity, drop, sufficiency), spread=bool(self.groups))

    def _table(self, targets: Iterable[Threshold], spread: bool) -> pd.DataFrame:
        """`table`; without the columns of the spread over seeds where that is not asked for."""
        rows: list[dict[str, Any]] = []
        types: dict[str, set[str]] = {"whole": {"seeds"}, "real": set(_DIFFERENCES)}
        for task, of_task in self.items():
            for method, names in self.methods.items():
                curves = [of_task.curves[name] for name in names]
                row = {"task": task, "method": method, **({"seeds": len(names)} if self.groups else {})}
                row["margin"] = sum(curve.q_full for curve in curves) / len(names)
                row["carried"] = sum(curve.carried.logits for curve in curves) / len(names)
                row["carries"] = all(curve.carries for curve in curves)
                for target in targets:
                    for cost in _COSTS:
                        column = f"{cost} at {target}"
                        costs = over_seeds([priced(curve, target, cost) for curve in curves])
                        row[column] = costs.mean
                        types["real" if self.groups else "whole"].add(column)
                        if spread:
                            row |= {f"{column} sd": costs.sd, f"{column} min": costs.least}
                            row[f"reached {target}"] = costs.reached  # the same for units and edges
                            types["real"].add(f"{column} sd")
                            types["whole"] |= {f"{column} min", f"reached {target}"}
                if any(curve.settings.get("random_sets") for curve in curves):
                    best = [curve.smallest_admissible() for curve in curves]
                    for cost in _COSTS:
                        column = f"{cost} of the smallest admissible"
                        row[column] = over_seeds([None if each is None else int(each[cost]) for each in best]).mean
                        types["real" if self.groups else "whole"].add(column)
                for of in ("CE", "KL"):
                    row[f"{of} difference"], row[f"{of} difference se"] = self._difference(method, of)
                out = self.out_by(method)
                row |= {"out by": None if out is None else ", ".join(out), "matched": self.matched(method)}
                rows.append(row)
        return typed(pd.DataFrame(rows), **types)

    def fidelity(self) -> pd.DataFrame:
        """One row per replacement: CE, CE delta (to the dense host), KL, and CE and KL less the reference's with standard errors;
        NA if not measured.
        """
        rows = []
        for method, seed, name in self._replacements():
            measured = self.fidelities.get(name)
            row = {"method": method, "seed": seed, "CE": measured and measured.ce}
            row |= {"CE delta": measured and measured.ce_delta, "KL": measured and measured.kl}
            for of in ("CE", "KL"):
                row[f"{of} difference"], row[f"{of} difference se"] = self._difference_of(name, of)
            rows.append(row)
        return typed(pd.DataFrame(rows), whole={"seed"}, real={"CE", "CE delta", "KL", *_DIFFERENCES})

    def _replacements(self) -> Iterator[tuple[str, int | None, str]]:
        """(method, seed, name of the curve); a method of one has no seed."""
        for method, names in self.methods.items():
            for seed, name in enumerate(names):
                yield method, seed if method in self.groups else None, name

    # ------------------------------------------------------------------------------------------ shown

    def plot(self, cost: str = "edges"):
        """The paper's figure: columns tasks, rows recovered and drop, least cost of every value; a matplotlib Figure.

        A method of several seeds is drawn as its mean over the seeds that reach a value, in a band of one standard deviation.
        Methods that are not matched say so in the legend.

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
        shown = self._table(thresholds(), spread=False)
        # Standard errors, and what other columns say ("out by" is empty where a method is matched), are in `table`.
        shown = shown.drop(columns=["CE difference se", "KL difference se", "matched", "carries"])
        shown = shown.round({"margin": 3, "carried": 3, **dict.fromkeys(_DIFFERENCES, 5)})
        return shown.drop(columns="task") if len(self) == 1 else shown  # which the title says


def typed(table: pd.DataFrame, whole: Iterable[str] = (), real: Iterable[str] = ()) -> pd.DataFrame:
    """Columns that hold NA where nothing was measured or reached, of the same type whether anything was or not: `whole` ones
    become Int64 (counts, costs), `real` ones Float64, as do others that hold real numbers."""
    # By name where a column may be all None; floats stay floats, even if they happen to be whole.
    types: dict[str, str] = dict.fromkeys((*table.select_dtypes("float"), *real), "Float64")
    types |= {**dict.fromkeys(whole, "Int64"), "matched": "boolean", "carries": "boolean", "out by": "string"}
    return table.convert_dtypes().astype({column: kind for column, kind in types.items() if column in table})
