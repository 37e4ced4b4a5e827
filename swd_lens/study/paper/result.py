"""ItemResult: what an item of the paper found, as plain data: sentences, tables, pictures, numbers, settings, provenance.

1. The sentences are made of the numbers, by the item; nobody writes them afterwards.
2. `write` leaves result.json, a CSV of each table, an SVG of each picture, and findings.md, each atomically; result.json holds
   all of them, and no time, so that a run that was interrupted ends with the same bytes as one that was not.
3. `section` is the item as a section of a report.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from swd_lens.base.files import plain, write_text
from swd_lens.base.record import SavedRecord
from swd_lens.study.paper.materials import Materials
from swd_lens.study.paper.settings import ItemSettings
from swd_lens.study.section import Picture, ReportSection, SectionTable

RESULT = "result.json"


@dataclass(frozen=True, repr=False)
class ItemResult(SavedRecord):
    """The result of an item.

    Attributes:
        item, profile: which, and how large.
        title, question: what it asks.
        findings: paragraphs that state the outcome in numbers.
        numbers: every number behind them, by name; plain values.
        settings: name -> value. provenance: model, fingerprints, text, version.
    """

    WHAT: ClassVar[str] = "a result of the paper's items"

    item: str
    profile: str
    heading: str
    question: str
    findings: tuple[str, ...]
    tables: tuple[SectionTable, ...]
    pictures: tuple[Picture, ...]
    numbers: Mapping[str, Any]
    settings: Mapping[str, Any]
    provenance: Mapping[str, Any]

    def write(self, folder: Path) -> None:
        """Everything into a folder, result.json last: where it is, the item is finished."""
        for i, table in enumerate(self.tables, 1):
            frame = pd.DataFrame(table.rows, columns=list(table.columns))
            write_text(folder / f"table-{i}.csv", frame.to_csv(index=False))
        for i, picture in enumerate(self.pictures, 1):
            write_text(folder / f"figure-{i}.svg", picture.as_file())
        write_text(folder / "findings.md", "\n\n".join([f"# {self.heading}", self.question, *self.findings]) + "\n")
        self.save(folder / RESULT)

    def section(self) -> ReportSection:
        """The item as a section of a report."""
        return ReportSection(self.heading, (self.question, *self.findings), self.pictures, self.tables, self.heading)

    def title(self) -> str:
        return f"{self.item}: {self.heading}"

    def parts(self) -> tuple[Any, ...]:
        tables = (pd.DataFrame(table.rows, columns=list(table.columns)) for table in self.tables)
        return (*self.findings, *tables)

    def __repr__(self) -> str:
        return "\n".join([self.title(), *self.findings])


def result_of(
    settings: ItemSettings,
    materials: Materials,
    findings: Sequence[str],
    tables: Sequence[SectionTable],
    pictures: Sequence[Picture],
    numbers: Mapping[str, Any],
) -> ItemResult:
    """Put together a result, with its settings and where it comes from; numbers as result.json gives them back."""
    return ItemResult(
        settings.item,
        settings.profile,
        settings.title,
        settings.question,
        tuple(findings),
        tuple(tables),
        tuple(pictures),
        json.loads(json.dumps(plain(numbers))),
        json.loads(json.dumps(plain(dict(settings)))),
        materials.provenance(),
    )
