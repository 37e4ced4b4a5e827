"""Figures: colours mean what the bar says; text stays text."""

import numpy as np
import pandas as pd
import pytest

from swd_lens.base.figures import DIVERGING, SEQUENTIAL, heatmap, line_figure, new_figure, svg


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
    nothing = heatmap(axes[0, 0], np.full((2, 2), np.nan), label="none")
    assert nothing.get_clim() == (0.0, 1.0)


def test_the_columns_of_a_table_become_curves_over_its_index():
    table = pd.DataFrame({"a_$b": [1.0, -2.0, 3.0], "c": [0.5, 0.5, 0.5]}, index=[0, 4, 9])
    [ax] = line_figure(table, "units", "logits").axes
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert drawn[:2] == [([0, 4, 9], [1.0, -2.0, 3.0]), ([0, 4, 9], [0.5, 0.5, 0.5])]
    assert len(drawn) == 3 and list(ax.lines[2].get_ydata()) == [0, 0]  # both signs: a line at zero
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("units", "logits") and len(ax.get_legend().get_texts()) == 2
    assert len(line_figure(table[["c"]], "x", "y").axes[0].lines) == 1
