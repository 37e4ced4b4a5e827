"""bootstrap against a plain loop of NumPy's; whether its intervals hold what they should; the same seed, the same numbers."""

import numpy as np
import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.curve import _AT_ONCE, interval, resampled
from tests.circuits.slow import able_split
from tests.contract import swd_zero_data
from tests.micro import random_split, toy_model


def drawn_indices(prompts, times, seed):
    """The draws that `resampled` makes, as it documents them: `times` rows of `prompts` places, from torch's generator."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [min(_AT_ONCE, times - start) for start in range(0, times, _AT_ONCE)]
    return np.concatenate([torch.randint(prompts, (n, prompts), generator=generator).numpy() for n in sizes])


@pytest.mark.parametrize("times", [1, 7, 300])
def test_resampled_means_are_those_of_a_loop(times):
    values = torch.randn(3, 11, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    slow = [[values.numpy()[run, index].mean() for run in range(3)] for index in drawn_indices(11, times, seed=4)]
    np.testing.assert_allclose(resampled(values, times, seed=4).numpy(), slow, rtol=1e-12, atol=1e-14)


def test_the_same_seed_gives_the_same_draws_and_another_gives_others():
    values = torch.arange(20.0, dtype=torch.float64)[None]
    assert torch.equal(resampled(values, 50, seed=1), resampled(values, 50, seed=1))
    assert not torch.equal(resampled(values, 50, seed=1), resampled(values, 50, seed=2))
    # Runs are resampled together: a run that is another plus one stays so in every draw.
    both = resampled(torch.cat([values, values + 1]), 50)
    torch.testing.assert_close(both[:, 1], both[:, 0] + 1)


def test_interval_is_numpys_percentile():
    samples = torch.randn(401, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    low, high = interval(samples, 0.9)
    np.testing.assert_allclose(low, np.percentile(samples.numpy(), 5, axis=0))
    np.testing.assert_allclose(high, np.percentile(samples.numpy(), 95, axis=0))
    samples[3, 1] = torch.nan
    assert interval(samples)[0].isnan().tolist() == [False, True, False]


def test_intervals_hold_the_true_mean_as_often_as_they_say():
    generator = torch.Generator().manual_seed(0)
    values = 2.0 + torch.randn(400, 60, dtype=torch.float64, generator=generator)  # 400 studies of 60 prompts, mean 2
    low, high = interval(resampled(values, 500))
    inside = float(((low < 2.0) & (high > 2.0)).double().mean())
    assert 0.90 < inside < 0.98  # 95 % of 400, give or take 2 * 1.1 %; a percentile interval is a little short at 60
    # Its width is that of the mean: 2 * 1.96 / sqrt(60).
    assert float((high - low).mean()) == pytest.approx(2 * 1.96 / 60**0.5, rel=0.05)


def test_intervals_of_a_curve_are_those_of_a_loop_over_draws():
    model, split = toy_model(), able_split(n=24, seed=6)
    factors = swd_zero_data(model, "blocks.1.mlp_out")
    scores = attribute(model, factors, random_split())
    curve = evaluate(model, factors, split, scores, grid=[2, 7], bootstrap=150, seed=3)
    keep, ablate, whole = (curve.margins[name].numpy() for name in ("keep", "ablate", "unpruned"))
    assert curve.q_full > 0
    draws = drawn_indices(24, 150, seed=3)
    for row in range(3):
        ratios = np.array([keep[row, i].mean() / whole[i].mean() if whole[i].mean() > 0 else np.nan for i in draws])
        drops = np.array([whole[i].mean() - ablate[row, i].mean() for i in draws])
        for name, samples in (("sufficiency", ratios), ("drop", drops)):
            found = [curve.rows[f"{name} {end}"][row] for end in ("low", "high")]
            np.testing.assert_allclose(found, np.percentile(samples, [2.5, 97.5]), rtol=1e-9, atol=1e-12)
    again = evaluate(model, factors, split, scores, grid=[2, 7], bootstrap=150, seed=3)
    assert again.rows.equals(curve.rows)
    none = evaluate(model, factors, split, scores, grid=[2, 7], bootstrap=0)
    assert not [name for name in none.rows if name.endswith((" low", " high"))]
    assert (none.settings["bootstrap"], curve.settings["bootstrap_seed"]) == (0, 3)
