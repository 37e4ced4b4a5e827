"""Measures by hand, and whether intervals hold what they should, simulated: the margins of many prompts are a population."""

import math

import pytest
import scipy.stats
import torch

import swd_lens as swd
from swd_lens.circuits.measure import (
    Carried,
    Margins,
    Threshold,
    by_content,
    mean_interval,
    measured,
    part_of,
    ratio_interval,
    surface_name,
)
from swd_lens.hosts.embedded import load_default_model
from tests.benchmarks.calibration import coverage, population

SITE = "blocks.3.mlp_out"


def whole_of(task_name: str, n: int):
    """Margins of n test prompts under exact neurons, which need no solving, and the edges of each prefix."""
    model = load_default_model()
    factors = swd.baselines.neurons(model, SITE)
    task = swd.load_task(task_name, model, n_train=200, n_validation=20, n_test=n)
    curve = swd.evaluate(model, factors, task.test, swd.attribute(model, factors, task), random_sets=0)
    assert curve.carries
    return population(curve)


@pytest.mark.slow
@pytest.mark.parametrize("task", ["gendered_pronoun", "greater_than"])
def test_intervals_hold_as_often_as_they_say(task):
    found = coverage(*whole_of(task, 1200), n=100, draws=600)
    means = found.groupby(found["of"].str.split(" at ").str[0])["coverage"].mean()
    assert means.between(0.925, 0.98).all(), means


def test_of_normal_values_they_are_students_and_fiellers():
    generator = torch.Generator().manual_seed(0)
    values = 2.0 + torch.randn(400, 60, dtype=torch.float64, generator=generator)  # 400 studies of 60 prompts, mean 2
    low, high = mean_interval(values)
    inside = float(((low < 2.0) & (high > 2.0)).double().mean())
    assert 0.92 < inside < 0.985  # 95 % of 400, give or take 2 * 1.1 %
    student = scipy.stats.ttest_1samp(values[0].numpy(), 0.0).confidence_interval(0.95)
    assert low[0] <= student.low + 1e-9 and high[0] >= student.high - 1e-9
    assert float(high[0] - low[0]) < 1.15 * (student.high - student.low)
    # A ratio to a whole that hardly varies is a mean.
    whole = torch.full((60,), 4.0, dtype=torch.float64)
    of_ratio = ratio_interval(values, whole)
    torch.testing.assert_close(of_ratio[0], low / 4, rtol=1e-6, atol=1e-9)
    torch.testing.assert_close(of_ratio[1], high / 4, rtol=1e-6, atol=1e-9)


def test_a_denominator_that_could_be_zero_gives_no_interval():
    generator = torch.Generator().manual_seed(1)
    part, whole = (torch.randn(3, 40, dtype=torch.float64, generator=generator), torch.randn(40, generator=generator).double())
    low, high = ratio_interval(part, whole - whole.mean() + 0.01)
    assert low.isnan().all() and high.isnan().all()
    one = torch.ones(2, 1, dtype=torch.float64)
    assert mean_interval(one)[0].isnan().all() and ratio_interval(one, one[0])[1].isnan().all()


def test_measures_of_two_circuits_by_hand():
    keep, ablate = torch.tensor([[1.0, 3.0], [4.0, 8.0]]), torch.tensor([[10.0, 6.0], [2.0, 2.0]])
    margins = Margins(keep, ablate, full=torch.tensor([8.0, 8.0]), empty=torch.tensor([2.0, 2.0]), dense=torch.tensor([6.0, 8.0]))
    carried = Carried.of(margins.full, margins.empty, 7.0)
    assert carried == Carried(6.0, 0.0, 7.0) and carried.enough
    rows = measured(margins, carried, "t")
    assert rows["recovered"].tolist() == pytest.approx([0.0, 4 / 6]) and rows["sufficiency"].tolist() == [0.25, 0.75]
    assert rows["recovered of dense"].tolist() == pytest.approx([0.0, 4 / 5]) and rows["drop"].tolist() == [0.0, 6.0]
    for how, value in (("recovered", 4 / 6), ("sufficiency", 0.75), ("necessity", 1.0), ("drop", 6.0)):
        threshold = Threshold.given(**{how: value - 1e-6})
        assert threshold.reached(rows).tolist() == (threshold.contrast(margins).mean(1) >= 0).tolist() == [False, True]
    assert not Carried(1.0, 0.6, 7.0).enough and not Carried(0.3, 0.0, 7.0).enough and Carried(1.0, math.nan, 7.0).enough


def test_margins_of_contents_and_sites_in_a_sentence():
    values = torch.tensor([[1.0, 2.0, 6.0], [0.0, 0.0, 3.0]])
    # Prompts 0 and 2 are about one name: their deviations from the mean of 3 add up, times 2 contents of 3 prompts.
    assert by_content(values, ["a", "b", "a"]).tolist() == [pytest.approx([3 + 2 / 3, 3 - 2 / 3]), pytest.approx([5 / 3, 1 / 3])]
    assert by_content(values, ["a", "b", "c"]) is values
    assert surface_name(["blocks.0.mlp_out"]) == "blocks.0.mlp_out" and surface_name([]) == "the surface"
    assert surface_name(["a", "b", "c"]) == "the surface of a and 2 more"
    assert [part_of(sites) for sites in (["blocks.0.attn_o"], ["blocks.0.mlp_out"], ["blocks.0.attn_o", "blocks.0.mlp_out"])] == [
        "attention",
        "MLP",
        "both",
    ]
