"""Run: what a study found, as plain data that the command line prints, `report` draws and a folder keeps.

1. One row per replacement, one comparison per surface, cards and attention patterns as they are shown.
2. `save` writes factors first, then run.json with their hashes; `Run.load` reads both, without a model (run_file.py).
"""

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base import __version__
from swd_lens.base.errors import legible
from swd_lens.base.record import Record, checked, require_format
from swd_lens.base.sealed import hashes_of, read_sealed, readable, write_sealed
from swd_lens.base.writer import read_beside_writer, writing
from swd_lens.circuits import Comparison
from swd_lens.circuits.screen import Screen
from swd_lens.study.run_file import (
    FORMAT,
    NAME,
    SETTINGS,
    STAGED,
    WHAT,
    Replacement,
    comparison_to_dict,
    comparisons_of,
    folders_of,
    holds,
    with_factors,
)
from swd_lens.study.section import AttentionView, ReportSection
from swd_lens.study.views import TaskUnit
from swd_lens.units.factors import FactorSet
from swd_lens.units.index import INDEX, clear_remains


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
        values = read_sealed(path, WHAT)
        require_format(path, values.get("format"), FORMAT, WHAT)
        with readable(path, WHAT):
            checked("settings", values["settings"], SETTINGS, optional=True)
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
