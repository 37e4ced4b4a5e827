"""Toy models of the decomposition papers: trained as well as their geometry allows, and what K beyond numel(W) finds in them."""

import math

import pytest
import torch

from swd_lens.solver import solve
from swd_lens.truth.scores import column_mmcs, mmcs
from swd_lens.truth.toys import residual_mlp, superposition


@pytest.fixture(scope="module")
def small():
    return superposition(5, 2, steps=1500, seed=1)


def test_five_in_two_is_a_pentagon(small):
    assert small.name == "TMS 5-2" and small.weight.shape == (5, 2) and small.truth.edges == 15 > small.weight.numel()
    assert small.loss < 1.05 * small.reference
    angles = torch.atan2(small.weight[:, 1], small.weight[:, 0]).sort().values.diff()
    torch.testing.assert_close(angles, torch.full((4,), 2 * math.pi / 5), atol=0.1, rtol=0)
    measured = small.inputs.T @ small.inputs / len(small.inputs)
    torch.testing.assert_close(measured, small.gram, atol=0.004, rtol=0)


def test_units_from_inputs_are_the_features(small):
    found = solve(small.weight, small.gram, edges=15, units=5, basis="input")
    assert column_mmcs(small.weight, found.read, found.write) == (pytest.approx(1), pytest.approx(1, abs=1e-3))
    assert mmcs(small.truth, found.read, found.write) == pytest.approx(1)
    fewer = solve(small.weight, small.gram, edges=9, units=4)  # what fits below numel(W) has not five units
    assert mmcs(small.truth, fewer.read, fewer.write) < 0.9


def test_the_residual_mlp_learns():
    before, after = (residual_mlp(20, 10, d_embed=100, steps=steps) for steps in (1, 300))
    assert after.loss < 0.7 * before.loss and after.weight.shape == (20, 10)
    torch.testing.assert_close(before.weight, residual_mlp(20, 10, d_embed=100, steps=1).weight)
