"""Run: what a study found, as plain data that the command line prints, `report` draws and a folder keeps.

1. A `Replacement` is one surface replaced by one method. Sparse factors go to a folder of their own; of exact ones, which are
   dense and made in a moment, the file keeps a `FactorsRecord`: sizes, counts and provenance.
2. A `Run` has a replacement for each surface and method, one comparison per surface, cards and attention patterns as they are
   shown. `save` writes factors first, then run.json with their hashes; `Run.load` reads both, without a model.
3. run.json names its format, and keeps everything the report shows. A later format is refused. The file is sealed, and "files"
   has the hash of every folder's index, which has those of its tensors: what was changed since, or belongs to another run, is
   refused.
4. JSON knows no NaN: undefined and infinite numbers are null there, and NaN when read. Scores, means and prompts' margins are
   tensors and stay out; curves that were loaded price circuits, but cannot make them.
"""

import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.errors import FactorFileError, legible
from swd_lens.base.files import plain, sha256
from swd_lens.base.record import PlainRecord, Record, checked, require_format
from swd_lens.base.sealed import hashes_of, read_json, readable, require_hashes, unseal, write_sealed
from swd_lens.base.writer import read_beside_writer, writing
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.comparison import ROLES, TaskComparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.circuits.screen import Screen
from swd_lens.hosts.sites import split_name
from swd_lens.study.section import AttentionView, ReportSection
from swd_lens.study.views import TaskUnit
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.index import INDEX, clear_remains, open_folder

FORMAT = 1
NAME, WHAT = "run.json", "a run"
# What folders of factors end in while a run is saved over another one. `folders_named` gives no name with this sign.
STAGED = "~new"
_CURVE = {"units", "edges", "recovered", "sufficiency", "drop"}  # columns of a curve that every report draws


@dataclass(frozen=True)
class _Task(PlainRecord):
    """The sizes of a task in a run's settings, where it comes from, and a prompt."""

    train: int
    validation: int
    test: int
    source: str
    example: str


@dataclass(frozen=True)
class _Site(PlainRecord):
    """The settings and provenance of a site's exact factors."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)


# What tables and reports read, where it is there.
_SETTINGS: Mapping[str, Any] = {
    **dict.fromkeys(("model", "host", "shape", "swd_lens", "calibration", "calibration dtype"), str),
    **dict.fromkeys(("calibration tokens", "held-out tokens"), int),
    **dict.fromkeys(("solver", "solver spec"), Mapping[str, Any]),
    "surfaces": Mapping[str, list[str]],
    "tasks": Mapping[str, _Task],
    "sparsities": list[float],
}
_ROW = {"surface": str, "method": str, "role": str, "edges": int, "units": int, "sparsity": float, "seconds": float}
_COMPARISON = {
    **{"tasks": list[str], "groups": Mapping[str, list[str]], "reference": str, "tolerance": float},
    "roles": Mapping[str, str],
}


@dataclass(frozen=True)
class FactorsRecord(Mapping[str, Mapping[str, Any]]):
    """A record of factors that were not saved: site -> {"d_in", "d_out", "units", "edges", "settings", "provenance"}. edges,
    n_units, sparsity: of all sites together, as a FactorSet has them."""

    sites: Mapping[str, Mapping[str, Any]]
    edges: int
    n_units: int
    sparsity: float
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def __getitem__(self, site: str) -> Mapping[str, Any]:
        return self.sites[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    def summary(self) -> Mapping[str, Mapping[str, Any]]:
        """See `FactorSet.summary`."""
        return self.sites


@dataclass(frozen=True)
class Replacement:
    """One surface replaced by one method."""

    surface: str
    method: str
    factors: FactorSet | FactorsRecord  # of exact ones a loaded run has a record only, they are not saved
    fidelity: Fidelity
    seconds: float  # that the factors took
    role: str = "swd"  # "swd", "control", or "paper": SWD by the paper's solver, beside that of the study
    # every matrix is written as a product without an error; a control that is not has as few edges as SWD has
    exact: bool = False

    @property
    def control(self) -> bool:
        """Say whether it stands beside what the run is about."""
        return self.role != "swd"

    def as_dict(self, folder: str) -> dict[str, Any]:
        """Plain values; sparse factors are in `folder`."""
        f = self.factors
        row = {"surface": self.surface, "method": self.method, "role": self.role, "edges": f.edges, "units": f.n_units}
        row |= {"sparsity": f.sparsity, "seconds": self.seconds, **self.fidelity.as_dict()}
        described = {"sites": dict(f.summary()), "provenance": dict(f.provenance)}
        return row | ({"factors": described} if self.exact else {"folder": folder})

    @classmethod
    def from_dict(cls, row: Mapping[str, Any]) -> "Replacement":
        """Read the replacement in a row of "fidelity"; of sparse factors with a record until `with_factors` reads them. Raises
        KeyError, TypeError, ValueError: it is something else."""
        row = checked("Replacement", row, _ROW)
        one_of("role", row["role"], ROLES)
        measured, exact = Fidelity.from_dict(row), "factors" in row
        described = row["factors"] if exact else {"sites": {site: {} for site in measured.relmse}, "provenance": {}}
        described = checked("factors", described, {"sites": Mapping[str, Mapping[str, Any]], "provenance": Mapping[str, Any]})
        for site, known in described["sites"].items():
            split_name(site)
            _Site.from_dict(known)
        record = FactorsRecord(described["sites"], row["edges"], row["units"], row["sparsity"], described["provenance"])
        return cls(row["surface"], row["method"], record, measured, row["seconds"], row["role"], exact)


@dataclass(frozen=True, repr=False)
class Run(Record):
    """Everything a study found, with every setting that it depends on.

    Attributes:
        settings: plain JSON values.
        comparisons: surface -> its comparison. In a loaded run curves carry their numbers, but no scores.
        cards: the best units of each task.
        seconds: of the whole study.
        attention: patterns to be shown, one prompt per task.
        extras: further sections of the report.
        screen: what the tasks need of the dense host, where that was asked before.
    """

    settings: Mapping[str, Any]
    replacements: Sequence[Replacement]
    comparisons: Mapping[str, Comparison]
    cards: Sequence[TaskUnit]
    seconds: float
    attention: Sequence[AttentionView] = ()
    extras: Sequence[ReportSection] = ()
    screen: Screen | None = None

    def sparsest(self, surface: str) -> Replacement:
        """The sparsest replacement of a surface, controls aside.

        Raises:
            ValueError: there is none.
        """
        return max((r for r in self.replacements if r.surface == surface and not r.control), key=lambda r: r.factors.sparsity)

    def fidelity_table(self) -> pd.DataFrame:
        """One row per surface and method."""
        rows = []
        for r in self.replacements:
            head = {"surface": r.surface, "method": r.method, "matrices": len(r.factors), "units": r.factors.n_units}
            head |= {"edges": r.factors.edges, "s": r.factors.sparsity, "seconds": r.seconds}
            rows.append({**head, **r.fidelity.table().iloc[0].to_dict()})
        return pd.DataFrame(rows)

    def circuit_table(self, recovered: float | int = 0.9, necessity: float | int = 0.5) -> pd.DataFrame:
        """One row per surface, task and method: least cost at a share recovered and at a fraction of the drop, and whether
        the method's CE is matched to that of the surface's first (see `Comparison.table`); with positions and ablation
        where there are several."""
        head = ["surface", *(["positions", "ablation"] if any(c.others for c in self.comparisons.values()) else [])]
        tables = [
            each.table(recovered, necessity).assign(surface=surface, positions=positions, ablation=ablation)
            for surface, comparison in self.comparisons.items()
            for (positions, ablation), each in comparison.under_each().items()
        ]
        table = pd.concat(tables, ignore_index=True)
        rest = (column for column in table.columns if column not in ("surface", "positions", "ablation"))
        return pd.DataFrame(table, columns=[*head, *rest])

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values; everything that the report shows."""
        folders = folders_of(self.replacements)
        return {
            "format": FORMAT,
            "swd_lens": __version__,
            "settings": dict(self.settings),
            "seconds": self.seconds,
            "fidelity": [r.as_dict(folder) for r, folder in zip(self.replacements, folders, strict=True)],
            "comparisons": {surface: comparison_to_dict(each) for surface, each in self.comparisons.items()},
            "circuits": [
                {"surface": surface, "method": method, **curve.as_dict()}
                for surface, comparison in self.comparisons.items()
                for by_method in comparison.values()
                for method, curve in by_method.curves.items()
            ],
            "units": [card.as_dict() for card in self.cards],
            "attention": [view.as_dict() for view in self.attention],
            "extras": [section.as_dict() for section in self.extras],
            **({} if self.screen is None else {"screen": self.screen.as_dict()}),
        }

    def save(self, folder: str | Path) -> None:
        """Write the factors of every sparse replacement, then run.json with their hashes and its own, each atomically.

        Raises:
            FolderInUseError: another call writes the folder.
            OSError: it cannot be written.
        """
        with writing(folder, "Run.save") as folder:
            named = zip(self.replacements, folders_of(self.replacements), strict=True)
            factors = {name: r.factors for r, name in named if isinstance(r.factors, FactorSet) and not r.exact}
            # Over another run: its factors stay until run.json names the new ones, which are read beside them until then.
            # What lies there already, as it does where `run_study` wrote it, is left alone.
            new = {name: each for name, each in factors.items() if not holds(folder / name, each)}
            for name in factors.keys() - new.keys():
                clear_remains(folder / name, "Run.save")
            over = (folder / NAME).exists()
            places = {name: f"{name}{STAGED}" if over and name in new else name for name in factors}
            for name, each in new.items():
                each.save(folder / places[name])
            hashes = hashes_of(folder, [f"{place}/{INDEX}" for place in places.values()])
            files = {f"{name}/{INDEX}": hashes[f"{place}/{INDEX}"] for name, place in places.items()}
            write_sealed(folder / NAME, {**self.as_dict(), "files": files})
            for name, place in places.items():
                if place != name:
                    new[name].save(folder / name)
                shutil.rmtree(folder / f"{name}{STAGED}", ignore_errors=True)

    @classmethod
    def load(cls, folder: str | Path) -> "Run":
        """Read what `save` wrote; no model is needed. The factors are memory-mapped, see `FactorSet.load`.

        Of exact factors it holds counts only, of curves no scores; its report is that of the run that was saved.

        Raises:
            FileNotFoundError: no run.json, or a folder of factors that it names is missing.
            ValueError: run.json is broken, not a run's, of a later format, or of other factors than those beside it; or it, or
                they, are not what was written.
        """
        folder = Path(folder)
        return read_beside_writer(folder, lambda: cls._read(folder))

    @classmethod
    def _read(cls, folder: Path) -> "Run":
        path = folder / NAME
        if not path.is_file():
            raise FileNotFoundError(
                f"there is no {legible(NAME)} in {legible(folder)}; give the folder that `swd-lens demo`, `swd-lens circuit` or "
                "Run.save wrote"
            )
        values = read_json(path, WHAT)
        # First the format: a later one may be sealed in another way.
        require_format(path, values.get("format") if isinstance(values, dict) else None, FORMAT, WHAT)
        values = unseal(values, path, WHAT)
        with readable(path, WHAT):
            checked("settings", values["settings"], _SETTINGS, optional=True)
            own = checked("Run", values, {"seconds": float, "files": Mapping[str, str]})
            run = cls(
                values["settings"],
                [Replacement.from_dict(row) for row in values["fidelity"]],
                comparisons_of(values),
                [TaskUnit.from_dict(card) for card in values["units"]],
                own["seconds"],
                [AttentionView.from_dict(view) for view in values["attention"]],
                [ReportSection.from_dict(section) for section in values["extras"]],
                Screen.from_dict(values["screen"]) if "screen" in values else None,
            )
        return replace(run, replacements=with_factors(folder, run.replacements, own["files"]))

    def __repr__(self) -> str:
        tasks = list(dict.fromkeys(task for comparison in self.comparisons.values() for task in comparison))
        surfaces = list(dict.fromkeys(r.surface for r in self.replacements))
        return (
            f"Run({self.settings.get('model', 'a model')}: {len(self.replacements)} replacements of {', '.join(surfaces)}; "
            f"tasks {', '.join(tasks) or 'none'}; {self.seconds:.0f} s)"
        )

    def parts(self) -> tuple[Any, ...]:
        if not self.replacements:
            return ()
        shown = ["surface", "method", "edges", "s", "CE delta", "CE delta se", "KL", "top-1 agreement"]
        shown += ["max relMSE"]
        fidelity = self.fidelity_table()
        circuits = self.circuit_table() if any(self.comparisons.values()) else None
        hint = 'The whole report: swd_lens.report.write_report(run, "report.html").'
        return fidelity[[name for name in shown if name in fidelity]], circuits, hint


# ---------------------------------------------------------------------------------------------- folders of factors


def folders_of(replacements: Sequence[Replacement]) -> list[str]:
    """Name the folders of their factors."""
    return folders_named([(r.surface, r.method) for r in replacements])


def folders_named(labels: Sequence[tuple[str, str]]) -> list[str]:
    """Name folders for (surface, method); names that differ in signs that a folder cannot have, or in case, get numbers."""
    names: list[str] = []
    taken: set[str] = set()
    for label in labels:
        surface, method = ("".join(c if c.isalnum() or c in ".=" else "_" for c in s) for s in label)
        plain = f"factors/{surface}-{method}"
        tries = (plain if n == 1 else f"{plain}-{n}" for n in count(1))
        names.append(next(name for name in tries if name.casefold() not in taken))
        taken.add(names[-1].casefold())
    return names


def holds(folder: Path, factors: FactorSet) -> bool:
    """Say whether a folder has exactly these factors already."""
    try:
        provenance, stored = open_folder(folder)
        if list(stored) != list(factors) or provenance != json.loads(json.dumps(plain(factors.provenance))):
            return False
        for site, new in factors.items():
            old = Factors(**stored[site].parts())
            about = [json.dumps(plain([f.settings, f.provenance]), sort_keys=True) for f in (old, new)]
            if about[0] != about[1] or not torch.equal(old.read, new.read.cpu()) or not torch.equal(old.write, new.write.cpu()):
                return False
        return True
    except (FactorFileError, FileNotFoundError):
        return False


def with_factors(folder: Path, replacements: Sequence[Replacement], hashes: Mapping[str, str]) -> list[Replacement]:
    """Complete the replacements of a run.json with the sparse factors that lie beside it, memory-mapped. hashes: of indexes,
    as run.json has them; a folder that is not among them is taken as it is. Raises FileNotFoundError: a folder of factors is
    missing; ValueError: it holds other factors."""
    completed = []
    # The folders are never what the file says: a name that leads elsewhere would be followed.
    for r, name in zip(replacements, folders_of(replacements), strict=True):
        if r.exact:
            completed.append(r)
            continue
        index, staged = f"{name}/{INDEX}", f"{name}{STAGED}/{INDEX}"
        place, expected = name, {index: hashes[index]} if index in hashes else {}
        if expected and (folder / staged).is_file() and sha256(folder / staged) == hashes[index]:
            place, expected = f"{name}{STAGED}", {staged: hashes[index]}  # a save was killed at its end
        elif not (folder / index).is_file():
            raise FileNotFoundError(
                f"{legible(folder / NAME)} goes with the factors in {legible(name)}, which are not in {legible(folder)}; copy "
                "the whole folder"
            )
        require_hashes(folder, expected, WHAT)
        factors, edges = FactorSet.load(folder / place), r.factors.edges
        require_hashes(folder, expected, WHAT)  # another writer may have come meanwhile
        if factors.edges != edges or set(factors) != set(r.factors):
            raise ValueError(
                f"{legible(folder / NAME)} is of other factors than those in {legible(folder / name)}: {edges:,} edges there, "
                f"{factors.edges:,} here; run the study again"
            )
        completed.append(replace(r, factors=factors))
    return completed


# ---------------------------------------------------------------------------------------------- run.json


def comparison_to_dict(comparison: Comparison) -> dict[str, Any]:
    """Give all of a comparison but its curves, which stand in a list of their own; those of further interventions stand here."""
    others = [
        [{"method": name, **curve.as_dict()} for of_task in other.values() for name, curve in of_task.curves.items()]
        for other in comparison.others
    ]
    return {
        "tasks": list(comparison),
        "groups": {name: list(names) for name, names in comparison.groups.items()},
        "reference": comparison.reference,
        "tolerance": comparison.tolerance,
        "roles": dict(comparison.roles),
        "fidelities": {name: measured.as_dict() for name, measured in comparison.fidelities.items()},
        **({"others": others} if others else {}),
    }


def comparisons_of(values: Mapping[str, Any]) -> dict[str, Comparison]:
    """Read surface -> comparison, from the curves of all surfaces. Raises KeyError, TypeError, ValueError: the values are
    something else."""
    curves: dict[str, list[Mapping[str, Any]]] = {}
    for row in values["circuits"]:
        curves.setdefault(checked("CostCurve", row, {"surface": str})["surface"], []).append(row)
    comparisons = {}
    for surface, described in values["comparisons"].items():
        own = checked("Comparison", described, _COMPARISON)
        first = Comparison(
            _tasks(own["tasks"], curves.get(surface, [])),
            {name: tuple(names) for name, names in own["groups"].items()},
            {name: Fidelity.from_dict(measured) for name, measured in own["fidelities"].items()},
            own["reference"],
            own["tolerance"],
            own["roles"],
        )
        others = checked("Comparison", described, {"others": list[list[Mapping[str, Any]]]}, optional=True)
        others = [replace(first, tasks=_tasks(own["tasks"], rows)) for rows in others.get("others", ())]
        comparisons[surface] = replace(first, others=tuple(others))
    return comparisons


def _tasks(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> dict[str, TaskComparison]:
    """Read task -> its curves, from the rows of all tasks."""
    curves: dict[str, dict[str, CostCurve]] = {}
    for row in rows:
        curve = CostCurve.from_dict(row)
        if missing := _CURVE - set(curve.rows):
            reason = f"no columns {', '.join(sorted(missing))}"
            raise ValueError(f"not the values of a CostCurve: {legible(reason)}")
        curves.setdefault(curve.task, {})[checked("CostCurve", row, {"method": str})["method"]] = curve
    return {task: TaskComparison(task, curves.get(task, {}), {}) for task in names}
