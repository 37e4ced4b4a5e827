"""Run: what `run_study` found, as plain data that prints, draws its report, and goes to a folder and back.

1. A `Replacement` is one surface replaced by one method: its factors and their fidelity.
2. A `Run` holds them with the comparisons, the unit cards, attention patterns and further sections.
3. `Run.save` writes the sparse factors and run.json; `Run.load` reads them (run_file.py), without a model.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base._version import __version__
from swd_lens.base.display import card
from swd_lens.base.files import write_json
from swd_lens.circuits import Comparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.study.attention import AttentionView
from swd_lens.study.cards import UnitCard
from swd_lens.study.run_file import (
    FORMAT,
    NAME,
    FactorsRecord,
    card_of,
    comparison_to_dict,
    comparisons_of,
    fidelity_of,
    read_run,
    record_of,
)
from swd_lens.study.section import ReportSection
from swd_lens.units.factors import FactorSet

# The method that exact factors go by in a Run; they are the control, and are not saved.
CONTROL = "SVD"


@dataclass(frozen=True)
class Replacement:
    """One surface replaced by one method; of exact factors a loaded run has a record only, they are not saved."""

    surface: str
    method: str
    factors: FactorSet | FactorsRecord
    fidelity: Fidelity
    seconds: float

    @property
    def folder(self) -> str:
        """Where `Run.save` puts the factors, below its own folder (with a number behind it where that is taken)."""
        return f"factors/{_slug(self.surface)}-{_slug(self.method)}"

    @property
    def is_saved(self) -> bool:
        """Whether `Run.save` writes its factors: exact ones are dense and made in a moment; no need to ship them."""
        return self.method != CONTROL


@dataclass(frozen=True, repr=False)
class Run:
    """Everything a study found, with every setting that it depends on.

    Attributes:
        settings: plain JSON values.
        comparisons: surface -> its comparison. In a loaded run curves carry their numbers, but no scores.
        cards: the best units of each task.
        seconds: of the whole study.
        attention: patterns to be shown, one prompt per task.
        extras: further sections of the report.
    """

    settings: Mapping[str, Any]
    replacements: Sequence[Replacement]
    comparisons: Mapping[str, Comparison]
    cards: Sequence[UnitCard]
    seconds: float
    attention: Sequence[AttentionView] = ()
    extras: Sequence[ReportSection] = ()

    def fidelity_table(self) -> pd.DataFrame:
        """One row per surface and method."""
        rows = []
        for r in self.replacements:
            head = {"surface": r.surface, "method": r.method, "matrices": len(r.factors), "units": r.factors.n_units}
            head |= {"edges": r.factors.edges, "sparsity": r.factors.sparsity, "seconds": r.seconds}
            rows.append({**head, **r.fidelity.table().iloc[0].to_dict()})
        return pd.DataFrame(rows)

    def circuit_table(self, sufficiency: float | int = 0.9, necessity: float | int = 0.5) -> pd.DataFrame:
        """One row per surface, task and method: least cost at a sufficiency and at a fraction of the necessity drop, and whether
        the method's CE is matched to that of the surface's first (see `Comparison.table`)."""
        tables = [
            comparison.table(sufficiency, necessity).assign(surface=surface)
            for surface, comparison in self.comparisons.items()
        ]
        table = pd.concat(tables, ignore_index=True)
        return pd.DataFrame(table, columns=["surface", *(column for column in table.columns if column != "surface")])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; everything that the report shows."""
        return {
            "format": FORMAT,
            "swd_lens": __version__,
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "fidelity": [
                {"surface": r.surface, "method": r.method, "edges": r.factors.edges, "units": r.factors.n_units}
                | {"sparsity": r.factors.sparsity, "seconds": r.seconds, **r.fidelity.as_dict()}
                | ({"folder": place} if r.is_saved else {"factors": _record(r.factors)})
                for r, place in zip(self.replacements, folders_of(self.replacements), strict=True)
            ],
            "comparisons": {surface: comparison_to_dict(its) for surface, its in self.comparisons.items()},
            "circuits": [
                {"surface": surface, "method": method, **curve.as_dict()}
                for surface, comparison in self.comparisons.items()
                for its in comparison.values()
                for method, curve in its.curves.items()
            ],
            "units": [asdict(card) for card in self.cards],
            "attention": [asdict(view) for view in self.attention],
            "extras": [asdict(section) for section in self.extras],
        }

    def save(self, folder: str | Path) -> None:
        """Write the factors of every sparse replacement, then run.json, each atomically."""
        folder = Path(folder)
        for r, place in zip(self.replacements, folders_of(self.replacements), strict=True):
            if r.is_saved and isinstance(r.factors, FactorSet):
                r.factors.save(folder / place)
        write_json(folder / NAME, self.as_dict())

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Read what `save` wrote; no model is needed. The factors are memory-mapped, see `FactorSet.load`.

        Of exact factors it holds counts only, of curves no scores; its report is that of the run that was saved.

        Raises:
            FileNotFoundError: no run.json, or a folder of factors that it names is missing.
            ValueError: run.json is broken, not a run's, of a later format, or of other factors than those beside it.
        """
        folder = Path(folder)
        values = read_run(folder)
        try:
            return cls(
                values["settings"],
                _replacements(folder, values["fidelity"]),
                comparisons_of(values),
                [card_of(card) for card in values["units"]],
                values["seconds"],
                [AttentionView.from_dict(view) for view in values.get("attention", [])],
                [ReportSection.from_dict(section) for section in values.get("extras", [])],
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{folder / NAME} is not what Run.save writes ({error!r}); run the study again") from error

    def __repr__(self) -> str:
        tasks = list(dict.fromkeys(task for comparison in self.comparisons.values() for task in comparison))
        surfaces = list(dict.fromkeys(r.surface for r in self.replacements))
        return (
            f"Run({self.settings.get('model', 'a model')}: {len(self.replacements)} replacements of {', '.join(surfaces)}; "
            f"tasks {', '.join(tasks) or 'none'}; {self.seconds:.0f} s)"
        )

    def _repr_html_(self) -> str:
        if not self.replacements:
            return card(repr(self))
        shown = ["surface", "method", "edges", "sparsity", "CE delta", "KL", "top-1 agreement", "max relMSE"]
        circuits = self.circuit_table() if any(self.comparisons.values()) else None
        return card(
            repr(self),
            pd.DataFrame(self.fidelity_table(), columns=shown),
            circuits,
            'The whole report: swd_lens.report.write_report(run, "report.html").',
        )


def _record(factors: FactorSet | FactorsRecord) -> dict[str, Any]:
    return {"sites": dict(factors.summary()), "provenance": dict(factors.provenance)}


def folders_of(replacements: Sequence[Replacement]) -> list[str]:
    """Where the factors of each go; names that differ in signs that a folder cannot have, or in case, get numbers."""
    names: list[str] = []
    taken: set[str] = set()
    for r in replacements:
        tries = (r.folder if n == 1 else f"{r.folder}-{n}" for n in count(1))
        names.append(next(name for name in tries if name.casefold() not in taken))
        taken.add(names[-1].casefold())
    return names


def _replacements(folder: Path, rows: Sequence[Mapping[str, Any]]) -> list[Replacement]:
    """The replacements of a saved run, with their factors."""
    made = [Replacement(r["surface"], r["method"], record_of(r), fidelity_of(r), r["seconds"]) for r in rows]
    # The folders are never what the file says: a name that leads elsewhere would be followed.
    return [_with_factors(folder, *one) for one in zip(made, folders_of(made), rows, strict=True)]


def _with_factors(folder: Path, made: Replacement, name: str, row: Mapping[str, Any]) -> Replacement:
    if not made.is_saved:
        return made
    place = folder / name
    if not (place / "factors.json").is_file():
        raise FileNotFoundError(
            f"{folder / NAME} goes with the factors in {name}, which are not in {folder}; copy the whole folder"
        )
    factors = FactorSet.load(place)
    if factors.edges != row["edges"] or set(factors) != set(row["relmse"]):
        raise ValueError(
            f"{folder / NAME} is of other factors than those in {place}: {row['edges']:,} edges there, {factors.edges:,} here; "
            "run the study again"
        )
    return replace(made, factors=factors)


def _slug(text: str) -> str:
    return "".join(c if c.isalnum() or c in ".=" else "_" for c in text)
