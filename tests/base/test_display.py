"""Cards: every kind of part, text escaped. Heat maps: colours mean what the bar says."""

import numpy as np
import pandas as pd
import pytest

from swd_lens.base.display import card
from swd_lens.base.figures import DIVERGING, SEQUENTIAL, heatmap, literal, new_figure, svg


def test_card_holds_its_parts_in_order_and_escapes_text():
    figure, axes = new_figure()
    axes[0, 0].plot([0, 1])
    html = card("<title>", "a < b", None, pd.DataFrame({"<x>": ["<y>"], "n": [1.23456789]}), figure)
    assert "&lt;title&gt;" in html and "a &lt; b" in html and "&lt;x&gt;" in html and "&lt;y&gt;" in html
    assert "1.235" in html and "<y>" not in html
    assert html.index("a &lt; b") < html.index("<table") < html.index("<svg")


def test_long_tables_are_cut_and_say_so():
    html = card("t", pd.DataFrame({"n": range(23), "text": ["x" * 100] * 23}))
    assert html.count("<tr>") == 21 and "and 3 more rows" in html and "x" * 100 in html  # with the head's
    assert "and 1 more row<" in card("t", pd.DataFrame({"n": range(21)}))
    assert "more row" not in card("t", pd.DataFrame({"n": range(20)}))


@pytest.mark.parametrize("signed", [False, True])
def test_heatmap_colours(signed: bool):
    figure, axes = new_figure()
    values = np.array([[0.0, 2.0], [-2.0 if signed else 1.0, np.nan]])
    image = heatmap(axes[0, 0], values, label="logits", signed=signed, rows=["a", "$b$"], columns=["x", "y"])
    low = -2.0 if signed else 0.0
    assert image.get_clim() == (low, 2.0)
    drawn = image.cmap(image.norm(np.ma.masked_invalid(values)))
    assert drawn[0, 0][3] < 0.01  # zero is the page's own ground
    assert drawn[0, 1] == pytest.approx((DIVERGING if signed else SEQUENTIAL)(1.0))
    assert drawn[1, 1] == pytest.approx((0x88 / 255,) * 3 + (0x40 / 255,))  # undefined is grey
    text = svg(figure)
    assert "logits" in text and "$b$" in text  # no formula was made of it


def test_an_empty_map_has_a_scale():
    _, axes = new_figure()
    image = heatmap(axes[0, 0], np.full((2, 2), np.nan), label="none")
    assert image.get_clim() == (0.0, 1.0)


def test_literal():
    assert literal("$x$") == r"\$x\$"
