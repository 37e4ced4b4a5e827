"""Contributions: what calculus says of them, and how a definition is added."""

import pytest
import torch

from swd_lens import baselines
from swd_lens.circuits import attribute, contributions
from swd_lens.circuits.attribution import POSITIONS
from swd_lens.hosts import find_sites
from swd_lens.units import attach
from tests.circuits.slow import margin_with, rows_for
from tests.micro import random_split, split_of, toy_model

MLP = ["blocks.0.mlp_out", "blocks.1.mlp_out"]
SPLIT = random_split(5, seed=0)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("positions", POSITIONS)
def test_integrated_gradients_of_a_site_add_up_to_what_the_site_gives(few, positions):
    """Completeness: sum over units = margin(z) - margin(site at mu), in float64; the midpoint error falls as 1 / steps^2."""
    model = toy_model(dtype=torch.float64)
    split = split_of([[1, 5, 7, 2], [3, 9]], [[3], [8]], [[4], [2]], 20)
    one = {steps: attribute(model, few, split, score="integrated_gradients", sign="signed", positions=positions,
                            steps=steps) for steps in (8, 32)}  # fmt: skip
    with attach(model, few):
        for site in few:
            given = 0.0
            for i, prompt in enumerate(split.tokens):
                values = {site: rows_for(one[8].means[site], len(prompt))}
                everything = {site: torch.ones(few[site].n_units, dtype=torch.bool)}
                nothing = {site: ~everything[site]}
                given += margin_with(model, split, i, nothing, values, positions)
                given -= margin_with(model, split, i, everything, values, positions)
            given /= len(split)
            error = {steps: abs(float(scores.scores[site].double().sum()) - given) for steps, scores in one.items()}
            assert error[32] < 8e-4 * max(1.0, abs(given))
            assert error[32] < max(0.1 * error[8], 2e-6)


def test_direct_logit_of_a_coder_is_that_of_the_same_factors(model):
    site = find_sites(model, "blocks.0.mlp_out")[0]
    factors = baselines.svd(model, site.name)[site.name]
    bias = model.blocks[0].mlp.b_out.detach()

    class Pair:
        def encode(self, x):
            return x @ factors.read

        def decode(self, z):
            return z @ factors.write + bias

    expected = attribute(model, {site.name: factors}, SPLIT, score="direct_logit").scores[site.name]
    coder = attribute(model, {site.name: Pair()}, SPLIT, score="direct_logit").scores[site.name]
    torch.testing.assert_close(coder, expected, atol=1e-6, rtol=1e-5)
    assert float(expected.abs().max()) > 1e-3


def test_a_definition_in_the_registry_is_a_score_of_attribute(model, few):
    """One record is all that a further score needs."""

    @contributions.score(gradients=False, note="by hand")
    def ones(training, bucket):
        """1, of every unit."""
        return {name: torch.ones(len(bucket.index), n, dtype=torch.float64) for name, n in training.units.sizes.items()}

    try:
        found = attribute(model, few, SPLIT, score="ones")
    finally:
        del contributions.SCORES["ones"]
    assert all(bool((of_site == 1).all()) for of_site in found.scores.values())
    assert found.settings["score"] == "ones" and found.settings["note"] == "by hand"
    with pytest.raises(ValueError, match="score must be one of 'first_order'"):
        attribute(model, few, SPLIT, score="ones")
    for name, each in contributions.SCORES.items():
        assert f'"{name}": {each.about.split()[0]}' in attribute.__doc__
