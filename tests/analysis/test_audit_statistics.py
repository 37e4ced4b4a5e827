"""Moments, histograms and co-activation of a pass, against the whole of z."""

import numpy as np
import pytest
import torch

from swd_lens.analysis.audit.statistics import DENSE, SIDE, Statistics


def some_z(tokens: int = 3000, units: int = 7) -> torch.Tensor:
    """Units of very different scales; the last one never moves, the one before is constant."""
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(tokens, units, generator=generator) ** 3 * 10.0 ** torch.arange(-4, units - 4)
    z[:, 1] = z[:, 0] * -0.5e3 + z[:, 1] * 0.1
    z[:, -2], z[:, -1] = 2.5, 0.0
    return z


def summed(z: torch.Tensor, sizes: tuple[int, ...] = (1, 17, 900), chosen: torch.Tensor | None = None) -> Statistics:
    statistics, start = Statistics(torch.arange(z.shape[1]) if chosen is None else chosen), 0
    for size in (*sizes, len(z) - sum(sizes)):
        statistics.add(z[start : start + size])
        start += size
    return statistics


def test_moments_and_limits():
    z, s = some_z(), summed(some_z())
    double = z.double()
    assert torch.allclose(s.mean, double.mean(0)) and torch.allclose(s.sd, double.std(0, correction=0), atol=1e-12)
    assert torch.equal(s.smallest, z.amin(0)) and torch.equal(s.largest, z.amax(0))
    assert s.sd[-2] == 0 and s.sd[-1] == 0


def test_histograms_are_those_of_a_second_pass_with_the_final_bins():
    z, s = some_z(), summed(some_z())
    for unit in range(z.shape[1]):
        h = s.histogram(unit)
        counts, _ = np.histogram(z[:, unit].double().numpy(), bins=h.edges.numpy())
        assert h.counts.tolist() == counts.tolist() and int(h.counts.sum()) == len(z)
        peak = float(z[:, unit].abs().max())
        if peak:  # fine enough: the peak lies in the outer half of the bins
            assert SIDE / 2 * h.width <= peak < SIDE * h.width


def test_batches_do_not_matter():
    for s in (summed(some_z(), sizes) for sizes in ((), (1, 1, 1), (2500,))):
        once = summed(some_z())
        assert all(torch.equal(getattr(once, name), getattr(s, name)) for name in ("counts", "exponent", "density"))


def test_a_peak_at_a_power_of_two_lies_inside_the_bins():
    for peak in (1.0, -1.0, 64.0, -64.0, 2.0**-20, 1e-45, -3e38):
        s = summed(torch.tensor([[0.0], [peak], [peak / 2]]), ())
        assert int(s.counts.sum()) == 3


def test_silence_asks_for_no_room():
    """A unit of small z that is 0 throughout some batch keeps its fine bins: frexp(0) has the exponent of 1/2."""
    z = some_z()[:, :1] * 1e-4
    silent = torch.zeros(2500, 1)
    for parts in ((silent, z), (z, silent)):
        s = Statistics(torch.arange(1))
        for part in parts:
            s.add(part)
        h, peak = s.histogram(0), float(z.abs().max())
        assert SIDE / 2 * h.width <= peak < SIDE * h.width
        exact = float((z.abs() > DENSE * peak).sum()) / 5500
        assert 0 < float(s.density[0]) <= exact


def test_density_is_the_share_beyond_a_tenth_of_the_peak():
    z = some_z()
    peak = z.abs().amax(0)
    exact = (z.abs() > DENSE * peak).double().mean(0)
    wider = (z.abs() > (DENSE + 1 / 32) * peak).double().mean(0)  # a bin is at most a 32nd of the peak
    density = summed(z).density
    assert bool((density <= exact).all()) and bool((density >= wider).all())
    assert density[-1] == 0 and density[-2] == 1


def test_co_activation_is_the_correlation_over_tokens():
    z = some_z()
    expected = torch.corrcoef(z[:, :5].double().T)
    others, values = summed(z).coactive(3)
    for unit in range(5):
        order = [i for i in expected[unit].abs().sort(descending=True).indices.tolist() if i != unit][:3]
        assert others[unit].tolist() == order
        assert values[unit].tolist() == pytest.approx(expected[unit, order].tolist(), abs=1e-6)
    assert others[0, 0] == 1 and values[0, 0] < -0.9
    assert values[-2:].abs().max() == 0  # what never moves goes with nothing


def test_chosen_units_are_compared_with_all():
    z, chosen = some_z(), torch.tensor([1, 4])
    part, whole = summed(z, chosen=chosen), summed(z)
    for a, b in zip(part.coactive(3), whole.coactive(3), strict=True):
        assert torch.allclose(a.double(), b[chosen].double(), atol=1e-7)
    assert torch.equal(part.mean, whole.mean[chosen]) and torch.equal(part.counts, whole.counts[chosen])
