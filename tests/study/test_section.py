"""Sections: tables and pictures as plain data."""

import pytest

from swd_lens.base.figures import STANDALONE, new_figure
from swd_lens.study.section import Picture, ReportSection


def test_a_picture_is_a_file_of_its_own() -> None:
    figure, axes = new_figure()
    axes[0, 0].imshow([[0, 1]])
    text = Picture.of(figure, "a <title>").as_file()
    assert "<image" in text and "><title>a &lt;title&gt;</title>" in text and STANDALONE in text and "xmlns=" in text


def test_a_table_is_as_wide_as_its_columns() -> None:
    section = {"title": "t", "intro": [], "pictures": [], "short": ""}
    table = {"caption": "c", "columns": ["a", "b"], "rows": [[1, 2], [3]]}
    with pytest.raises(ValueError, match="a table of 2 columns has rows of other lengths"):
        ReportSection.from_dict({**section, "tables": [table]})
