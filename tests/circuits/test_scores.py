"""UnitScores: one ranking of all sites, ties in order; what is shown; values that are no numbers."""

import pytest
import torch

from swd_lens.circuits import attribute
from swd_lens.circuits.scores import UnitScores, require_finite
from tests.micro import random_split

SPLIT = random_split(5, seed=0)


def test_all_sites_share_one_ranking(model, every):
    scores = attribute(model, every, SPLIT)
    assert set(scores.scores) == set(every) and scores.n_units == sum(f.n_units for f in every.values())
    by_score = sorted(
        (-float(scores.scores[site][unit]), place, unit)
        for place, site in enumerate(scores.scores)
        for unit in range(every[site].n_units)
    )
    names = list(scores.scores)
    assert scores.ranking() == [(names[place], unit) for _, place, unit in by_score]
    assert len({site for site, _ in scores.ranking()[:20]}) > 2
    ranks = scores.ranks()
    assert all(int(ranks[site][unit]) == rank for rank, (site, unit) in enumerate(scores.ranking(), 1))


def test_ties_go_by_site_then_unit():
    tied = UnitScores({"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 1.0])}, {}, {})
    assert tied.ranking() == [("a", 1), ("b", 0), ("a", 0), ("b", 1)]


def test_the_best_units_are_shown(model, every):
    scores = attribute(model, every, SPLIT)
    top = scores.top(scores.n_units)  # among them units of sites with heads
    assert top["unit"].tolist() == [f"{site}/{unit}" for site, unit in scores.ranking()]
    assert scores.top(3)["unit"].tolist() == top["unit"].tolist()[:3]
    assert list(top) == ["unit", "head", "head share", "score", "mean z"] and top["score"].is_monotonic_decreasing
    (ax,) = scores.plot().axes
    assert float(ax.lines[1].get_ydata()[0]) == top["score"][0] and "top(n)" in scores._repr_html_()


def test_a_value_that_is_no_number_is_named():
    require_finite("the score", {"s": torch.zeros(2)})
    with pytest.raises(ValueError, match="the score of s/1 is nan: an activation or a gradient overflows"):
        require_finite("the score", {"s": torch.tensor([0.0, torch.nan])})
