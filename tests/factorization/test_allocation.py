"""Spending a total over loss curves (allocation.py), checked against optima known by hand."""

import itertools

import numpy as np
import pytest

from swd_lens.factorization.allocation import LossCurve, SiteBudget, lower_hull, round_to, spend


def exponential(scale: float, rate: float, low: int = 100, high: int = 400) -> LossCurve:
    """loss = scale * exp(-rate * K)."""
    at = tuple(range(low, high + 1, 50))
    return LossCurve(at, tuple(scale * float(np.exp(-rate * k)) for k in at))


def test_optima_known_by_hand():
    for total in (600, 601, 777, 1200):
        found = spend({name: exponential(1.0, 0.01) for name in "abc"}, total)
        assert sum(found.values()) == total
        assert max(found.values()) - min(found.values()) <= 1
    # scale_a exp(-r a) = scale_b exp(-r b) at the optimum: a - b = log(scale_a / scale_b) / r = log(e) / .01 = 100.
    curves = {"a": exponential(float(np.e), 0.01), "b": exponential(1.0, 0.01)}
    found = spend(curves, 500)
    assert sum(found.values()) == 500
    assert found["a"] == pytest.approx(300, abs=5)  # a step of the lattice: 300 / 64 edges
    curves = {"a": exponential(1e9, 0.001), "b": exponential(1.0, 0.001)}
    assert spend(curves, 500) == {"a": 400, "b": 100}
    assert spend(curves, 200) == {"a": 100, "b": 100} and spend(curves, 800) == {"a": 400, "b": 400}


def test_no_other_split_is_better():
    """Every split of 300 edges in steps of 10 over three convex curves of different shapes."""
    curves = {
        "steep": LossCurve((50, 100, 150, 200), (8.0, 2.0, 0.5, 0.1)),
        "flat": LossCurve((50, 100, 150, 200), (1.0, 0.9, 0.8, 0.75)),
        "late": LossCurve((50, 100, 150, 200), (3.0, 2.9, 1.0, 0.2)),  # not convex: nothing is saved before 100
    }
    found = spend(curves, 300)
    assert sum(found.values()) == 300
    splits = (s for s in itertools.product(range(50, 201, 10), repeat=3) if sum(s) == 300)
    best = min(sum(curve.at(k) for curve, k in zip(curves.values(), split, strict=True)) for split in splits)
    assert sum(curve.at(found[name]) for name, curve in curves.items()) <= best + 1e-9


@pytest.mark.parametrize("total", [199, 801])
def test_totals_out_of_reach(total):
    with pytest.raises(ValueError, match=f"{total} edges cannot be spent: the loss curves reach from 200 to 800"):
        spend({"a": exponential(1.0, 0.01), "b": exponential(2.0, 0.01)}, total)


def test_curves_hull_and_rounding_by_hand():
    curve = LossCurve((10, 20, 30, 40), (1.0, 0.9, 0.95, 0.001))  # a rise (noise), then a late fall
    widths, saved = curve.steps
    assert widths.sum() == pytest.approx(30) and (widths > 0).all()
    assert (saved >= 0).all() and (np.diff(saved) <= 0).all()
    assert curve.at(10) == pytest.approx(1.0) and curve.at(40) == pytest.approx(0.001)
    assert curve.at(30) < 0.9
    # (0, 4) (1, 3.5) (2, 1) (3, 1) (4, 0): the hull runs (0, 4) (2, 1) (4, 0), at 1 it is 2.5, at 3 it is .5.
    x = np.arange(5.0)
    assert lower_hull(x, np.array([4.0, 3.5, 1.0, 1.0, 0.0])) == pytest.approx([4.0, 2.5, 1.0, 0.5, 0.0])
    assert round_to({"a": 1.5, "b": 2.75, "c": 0.75}, 5) == {"a": 1, "b": 3, "c": 1}
    assert round_to({"a": 2.0, "b": 3.0 - 1e-9}, 5) == {"a": 2, "b": 3}


def test_impossible_curves_and_budgets():
    for at, losses, message in (
        ((), (), "must rise"),
        ((10, 10), (1.0, 0.5), "must rise"),
        ((-10, 10), (1.0, 0.5), "must rise, from 0 or more"),
        ((10, 20), (1.0,), "2 budgets, 1 losses"),
        ((10, 20), (1.0, float("nan")), "finite"),
        ((10, 20), (0.0, 0.0), "positive"),
    ):
        with pytest.raises(ValueError, match=message):
            LossCurve(at, losses)
    for numel, allocated in ((0, 0), (10, 0), (10, 10), (2**63, 10), (10, 10**30)):
        with pytest.raises(ValueError, match=f"{numel} entries cannot have a budget of {allocated} edges"):
            SiteBudget(numel, 5, allocated, exponential(1.0, 0.01))
