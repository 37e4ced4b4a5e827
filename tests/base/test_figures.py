"""Figures: colours mean what the bar says; text stays text."""

import numpy as np
import pytest

from swd_lens.base.figures import DIVERGING, SEQUENTIAL, heatmap, literal, new_figure, svg


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
