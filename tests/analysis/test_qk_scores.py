"""Scores rebuilt from units are the host's, or the host is refused."""

import pytest
import torch

from swd_lens.analysis.qk import score_parts
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.units.factors import Factors
from tests.analysis.qk_checks import ROW, check_parts, random_factors
from tests.micro import toy_model


@pytest.mark.parametrize("packed", [True, False])
def test_offsets_of_transported_factors_act_like_biases(packed):
    model = toy_model()
    with_offsets, without = random_factors(model, packed, offsets=True), random_factors(model, packed)
    check_parts(model, with_offsets, ROW)
    parts = [score_parts(model, f, 0, 1, ROW) for f in (with_offsets, without)]
    assert not torch.allclose(parts[0].biases, parts[1].biases, atol=1e-3)


def test_scores_that_are_all_zero_are_summed_without_error():
    model = toy_model()
    factors = random_factors(model)
    for block in model.blocks:
        block.attn.b_Q.data.zero_()
    packed = factors["blocks.0.attn_qkv"]
    factors["blocks.0.attn_qkv"] = Factors(packed.read, packed.write.index_fill(1, torch.arange(16), 0))
    parts = score_parts(model, factors, 0, 1, ROW)
    assert parts.error == 0 and not parts.total.any() and "within 0.0e+00" in repr(parts)


def test_a_host_that_does_something_else_to_queries_is_refused():
    model = toy_model()
    model.add_hook("blocks.1.attn.hook_q", lambda tensor, hook: 2 * tensor)
    with pytest.raises(UnsupportedHostError, match="layer 1: queries and keys give scores that differ"):
        score_parts(model, random_factors(model), 1, 0, ROW)
    score_parts(model, random_factors(model), 0, 0, ROW)
