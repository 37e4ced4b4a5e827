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


def test_a_training_that_diverged_reaches_nothing_and_hides_nothing():
    nan = float("nan")
    made = DataEfficiency([*points("a", 0.5, nan, nan), *points("b", 0.5, 0.1)], {"site": SITE, "model": "toy"})
    assert made.tokens_to_reach(0.2) == {"a": None, "b": 100}
    drawn(made)
    every = DataEfficiency(points("a", nan, nan), {"site": SITE, "model": "toy"})
    assert every.tokens_to_reach(0.2) == {"a": None}
    drawn(every)


def drawn(made):
    assert made.plot()._repr_svg_().startswith("<svg")


def test_what_is_zero_lies_on_the_lower_edge_of_a_log_axis():
    figure = DataEfficiency(points("a", 0.5, 0.02, 0.0), {"site": SITE, "model": "toy"}).plot("KL")
    (ax,) = figure.axes
    assert np.asarray(ax.lines[0].get_ydata()).tolist() == [0.5, 0.02, 0.01] and ax.get_ylim()[0] == 0.01


def test_files_that_are_none(tmp_path):
    path = tmp_path / "efficiency.json"
    nan = DataEfficiency(points("a", float("nan")), {"site": SITE})
    nan.save(path)
    assert DataEfficiency.load(path).tokens_to_reach(1.0) == {"a": None}
    for text, says in (("{", "is not a file of data_efficiency, or damaged"), ('{"format": 9, "settings": {}}', "format 9")):
        path.write_text(text)
        with pytest.raises(ValueError, match=says):
            DataEfficiency.load(path)
