"""The page of the paper's items: what a folder has finished, each item a section, in the paper's order.

1. The page begins with every item's findings in one list, and the settings that all of them share.
2. A section is an item's question, findings, pictures and tables (templates/extra.html.j2), as in a run's report.
"""

from collections.abc import Mapping
from pathlib import Path

from markupsafe import Markup

from swd_lens.base.files import write_text
from swd_lens.report.page import encodable, extra_sections, template
from swd_lens.study.paper import ItemResult, results_in
from swd_lens.study.paper.settings import PROFILES

PAGE = "paper.html"


def write_paper_report(folder: str | Path, path: str | Path | None = None) -> Path:
    """Write one page of a folder's finished items, atomically; returns its path.

    Args:
        folder: what `swd_lens.study.paper.run_items` wrote.
        path: of the page; None = paper.html in the folder.

    Raises:
        FileNotFoundError: the folder holds no finished item.
        ValueError: a result in it is damaged.
        OSError: the page cannot be written.
    """
    path = Path(folder) / PAGE if path is None else Path(path)
    write_text(path, render_paper_report(results_in(folder)))
    return path


def render_paper_report(results: Mapping[str, ItemResult]) -> str:
    """The page as HTML text, which loads nothing."""
    sections = list(extra_sections([result.section() for result in results.values()]))
    parts = [
        {"anchor": each.anchor, "title": each.title, "html": Markup(template("extra").render(each.values))} for each in sections
    ]
    first = next(iter(results.values()))
    outcomes = [
        {"anchor": each.anchor, "title": result.heading, "findings": result.findings}
        for each, result in zip(sections, results.values(), strict=True)
    ]
    page = template("paper").render(
        parts=parts,
        outcomes=outcomes,
        title=f"The paper's tables and figures on {first.provenance['model']}",
        profile=f"{first.profile}: {PROFILES.get(first.profile, '')}",
        provenance=first.provenance,
    )
    return encodable(page)
