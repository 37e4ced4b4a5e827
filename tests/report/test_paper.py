"""The page of the paper's items: each a section with its findings, tables and pictures."""

from pathlib import Path

import pytest

from swd_lens.base.figures import new_figure
from swd_lens.report.paper import render_paper_report, write_paper_report
from swd_lens.study.paper import ItemResult
from swd_lens.study.section import Picture, SectionTable


def test_the_page_shows_every_finished_item(tmp_path: Path) -> None:
    picture = Picture.of(new_figure()[0], "a <picture>")
    for item in ("audit", "edit"):
        shown = (SectionTable(f"table of {item}", ("n",), ((1,),)),), (picture, picture)
        made = ItemResult(item, "tiny", f"<{item}>", "why?", ("Found.",), *shown, {}, {}, {"model": "m"})
        made.write(tmp_path / item)
    page = write_paper_report(tmp_path).read_text()
    assert page.count("<img") == 4 and "<script" not in page and "<picture>" not in page
    for text in ("&lt;audit&gt;", "&lt;edit&gt;", "why?", "Found.", "table of audit", "table of edit"):
        assert text in page
    assert page.index('href="#extra-0"') < page.index('href="#extra-1"')
    assert render_paper_report({"audit": ItemResult.load(tmp_path / "audit" / "result.json")}).count("<img") == 2
    with pytest.raises(FileNotFoundError, match="no finished item"):
        write_paper_report(tmp_path / "audit")
