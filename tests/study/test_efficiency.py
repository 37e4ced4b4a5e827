"""Points against tokens: the first count that suffices, the figure, the file."""

import dataclasses

import numpy as np
import pytest

import swd_lens as swd
from swd_lens.study.data_efficiency import DataEfficiency, Point

SITE = "blocks.1.mlp_out"


def points(method, *deltas):
    measured = [swd.Fidelity(0.0, d, d, 1.0, {SITE: d}, 1) for d in deltas]
    return [Point(method, 10 ** (i + 1), "checkpoint", 5, f, f.relmse[SITE]) for i, f in enumerate(measured)]


def test_tokens_to_reach():
    made = DataEfficiency([*points("a", 0.5, 0.1, 0.01), *points("b", 0.05, 0.5, 0.2), *points("c", 0.0, 0.3, 0.1)], {})
    assert made.tokens_to_reach(0.1) == {"a": 100, "b": None, "c": 1000}  # c was there by chance, and left again
    assert made.tokens_to_reach(0.01, "relMSE") == {"a": 1000, "b": None, "c": None}
    assert made.tokens_to_reach(0.1, lasting=False) == {"a": 100, "b": 10, "c": 10}
    fits = [dataclasses.replace(point, kind="independent fit") for point in points("c", 0.0, 0.3, 0.1)]
    assert DataEfficiency(fits, {}).tokens_to_reach(0.1) == {"c": 10}  # a worse fit to more text is another fit
    with pytest.raises(ValueError, match="metric='loss': choose one of 'CE delta', 'KL', 'relMSE'"):
        made.tokens_to_reach(0.1, "loss")


def test_what_is_zero_lies_on_the_lower_edge_of_a_log_axis():
    figure = DataEfficiency(points("a", 0.5, 0.02, 0.0), {"site": SITE, "model": "toy"}).plot("KL")
    (ax,) = figure.axes
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [0.5, 0.02, 0.01] and ax.get_ylim()[0] == 0.01


def test_a_training_that_diverged_reaches_nothing_and_hides_nothing(tmp_path):
    nan, about = float("nan"), {"site": SITE, "model": "toy"}
    for of_a, of_b in ((0.5, [0.5, 0.1]), (nan, [])):
        made = DataEfficiency([*points("a", of_a, nan, nan), *points("b", *of_b)], about)
        assert made.plot()._repr_svg_().startswith("<svg")
        made.save(tmp_path / "efficiency.json")
        for each in (made, DataEfficiency.load(tmp_path / "efficiency.json")):
            assert each.tokens_to_reach(0.2) == {"a": None} | ({"b": 100} if of_b else {})
