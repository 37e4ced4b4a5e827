"""Settings that are left to the matrix ("auto", automatic.py), by hand."""

import pytest
import torch

from swd_lens.base.errors import SpecError
from swd_lens.factorization.solve import solve
from swd_lens.solver import PRESETS, AnnealSpec
from swd_lens.solver.automatic import MOST_SHRINKAGE, automatic_rho_end
from swd_lens.solver.spec import resolve

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


def test_alternations_where_none_are_named():
    """In float64, which takes twice the time, fewer; a number that is given stays."""
    for shape, options, alternations in (
        ((256, 512), {}, 56),
        ((256, 513), {}, 64),
        ((8, 12), {"precision": "float32"}, 64),
        ((512, 512), {"precision": "float64"}, 56),
        ((8, 12), {"outer_iterations": 9}, 9),
    ):
        assert resolve("best", options).for_matrix(*shape, min(shape), calibrated=True).outer_iterations == alternations
        if not options:  # without a Gram more in float32
            blind = resolve("best", options).for_matrix(*shape, min(shape), calibrated=False).outer_iterations
            assert blind == {64: 84, 56: 56}[alternations]
    for precision, alternations in (("float32", 84), ("float64", 56)):
        assert solve(WEIGHT, precision=precision).settings["outer_iterations"] == alternations


def test_alternations_auto_are_those_that_are_not_named():
    assert resolve("quick", {"outer_iterations": "auto"}) == PRESETS["best"]
    with pytest.raises(SpecError, match=r'outer_iterations=.some.: give a number, or "auto"'):
        resolve("best", {"outer_iterations": "some"})


def test_budgets_of_about_square_matrices_move():
    for shape, units, options, balance in (
        ((600, 600), 600, {}, 0.1),
        ((600, 900), 600, {}, 0.1),
        ((900, 600), 600, {}, 0.1),
        ((600, 901), 600, {}, 0.0),  # too wide
        ((600, 600), 1200, {}, 0.0),  # units outnumber coordinates
        ((600, 600), 600, {"basis": "input"}, 0.0),  # units are to stay what they start as
        ((64, 64), 64, {}, 0.0),  # solved in float64
        ((64, 64), 64, {"precision": "float32"}, 0.1),
        ((600, 600), 600, {"balance": 0.0}, 0.0),
        ((600, 600), 600, {"square_share": 0.2}, 0.0),  # a share that was asked for stays
    ):
        assert resolve("best", options).for_matrix(*shape, units, calibrated=False).balance == balance


def test_a_named_long_side_is_relaxed():
    for shape, options, relaxation, alternations in (
        ((600, 300), {"basis": "input"}, 1.8, 40),
        ((300, 600), {"basis": "output"}, 1.8, 40),
        ((128, 512), {"basis": "output"}, 1.0, 56),  # solved in float64
        ((600, 300), {"basis": "output"}, 1.0, 64),  # the short side
        ((600, 600), {"basis": "input"}, 1.0, 64),
        ((600, 300), {}, 1.0, 64),
        ((600, 300), {"basis": "input", "square_share": 0.2}, 1.0, 64),  # units are free to leave their coordinates
        ((600, 300), {"basis": "input", "relaxation": 1.0}, 1.0, 64),
        ((600, 300), {"basis": "input", "outer_iterations": 9}, 1.8, 9),
    ):
        spec = resolve("best", options)
        spec = spec.for_matrix(*shape, spec.coordinates(*shape), calibrated=True)
        assert (spec.relaxation, spec.outer_iterations) == (relaxation, alternations)


@pytest.mark.parametrize(("precision", "start", "first"), [("float32", 0.7, 0.5), ("float64", 0.5, 0.0)])
def test_when_the_full_gram_begins_where_nothing_is_named(precision: str, start: float, first: float):
    """In float32, where matrices are large, later and at once; what is named stays."""
    settings = solve(WEIGHT, torch.eye(8), precision=precision).settings
    assert (settings["gram_from"], settings["gram_at_first"]) == (start, first)
    named = solve(WEIGHT, torch.eye(8), precision=precision, gram_from=0.3, gram_at_first=0.25).settings
    assert (named["gram_from"], named["gram_at_first"]) == (0.3, 0.25)


@pytest.mark.parametrize(("calibrated", "lower", "upper"), [(True, 0.4, 0.5), (False, 0.7, 0.8)])
def test_the_penaltys_end_by_hand(calibrated: bool, lower: float, upper: float):
    half = (lower + upper) / 2
    ends = {
        (0.1, 0.2, 0.0): lower,
        (0.5, 0.2, 0.0): lower,
        (0.625, 0.2, 0.0): half,
        (0.75, 0.2, 0.0): upper,
        (0.99, 0.2, 0.0): upper,
        (0.5, 0.2, 0.15): half if calibrated else lower,  # half of the most shrinkage
        (0.625, 0.2, 0.15): half,
        (0.5, 0.2, 1.0): upper if calibrated else lower,
        (0.5, 0.04, 0.0): upper,  # nearly all entries in one factor
    }
    for case, end in ends.items():
        assert automatic_rho_end(*case, calibrated=calibrated) == pytest.approx(end)
    assert automatic_rho_end(0.75, 0.2, 0.01, calibrated=calibrated) == upper


def test_shrinkage_by_hand():
    spec = AnnealSpec()
    # d_in / tokens, at most MOST_SHRINKAGE: an eighth at eight tokens per input.
    assert MOST_SHRINKAGE > 0.125 and spec.shrinkage_for(800, 100) == pytest.approx(0.125)
    assert spec.shrinkage_for(100, 100) == spec.shrinkage_for(10, 100) == MOST_SHRINKAGE
    assert spec.shrinkage_for(10_000, 100) == pytest.approx(0.01)
    assert spec.shrinkage_for(None, 100) == 0.0
    assert AnnealSpec(shrinkage=0.125).shrinkage_for(None, 100) == AnnealSpec(shrinkage=0.125).shrinkage_for(9, 3) == 0.125
    assert PRESETS["paper"].shrinkage_for(10, 100) == 0.0
