"""What an item leaves in its folder, and that it is read as it was written."""

from xml.etree import ElementTree

import pandas as pd

from swd_lens.study import paper
from tests.study.paper.conftest import SMALL


def test_an_item_leaves_numbers_tables_figures_and_words(finished):
    folder, result = finished
    assert paper.ItemResult.load(folder / "controls" / "result.json").as_dict() == result.as_dict()
    assert result.settings["tasks"] == SMALL["tasks"] and result.profile == "tiny"
    for i, table in enumerate(result.tables, 1):
        written = pd.read_csv(folder / "controls" / f"table-{i}.csv")
        assert list(written.columns) == list(table.columns) and len(written) == len(table.rows)
    # A browser draws a file of its own only where it says that it is SVG.
    figure = ElementTree.parse(folder / "controls" / "figure-1.svg").getroot()
    assert figure.tag == "{http://www.w3.org/2000/svg}svg"
    assert figure[0].text == result.pictures[0].title and "prefers-color-scheme" in (figure[1].text or "")
    words = (folder / "controls" / "findings.md").read_text()
    assert all(finding in words for finding in result.findings)
