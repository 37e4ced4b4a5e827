"""run.json: what a `Run` writes beside its factors, and how it is read again without a model.

1. A `Replacement` is one surface replaced by one method. Sparse factors go to a folder of their own; of exact ones, which are
   dense and made in a moment, the file keeps a `FactorsRecord`: sizes, counts and provenance.
2. The file names its format, and keeps everything the report shows. A later format is refused.
3. The file is sealed, and "files" has the hash of every folder's index, which has those of its tensors: what was changed since,
   or belongs to another run, is refused.
4. JSON knows no NaN: undefined and infinite numbers are null there, and NaN when read. Scores, means and prompts' margins are
   tensors and stay out; curves that were loaded price circuits, but cannot make them.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any

import torch

from swd_lens.base.checks import one_of
from swd_lens.base.errors import FactorFileError, legible
from swd_lens.base.files import plain, sha256
from swd_lens.base.record import PlainRecord, checked
from swd_lens.base.sealed import require_hashes
from swd_lens.circuits import Comparison, CostCurve
from swd_lens.circuits.comparison import ROLES, TaskComparison
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts.sites import split_name
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.index import INDEX, open_folder

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
SETTINGS: Mapping[str, Any] = {
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
