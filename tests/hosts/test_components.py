"""model.W_Q ... model.W_out of both kinds of host while a matrix of theirs is attached."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from tests import families
from tests.hosts.test_families import HAS_HOOKED


@pytest.mark.parametrize("kind", ["bridge", "hooked"][: 1 + HAS_HOOKED])
@pytest.mark.parametrize("name", ("gpt2", "llama"))
def test_stacked_weights_are_refused_where_a_layer_is_attached(kind, name):
    """Upstream stacks the layers that are left, and says so in a log only."""
    model = getattr(families, kind)(name)
    dense = {which: getattr(model, which) for which in ("W_Q", "W_O", "W_in", "W_out", "b_out" if name == "gpt2" else "W_gate")}
    with swd.attach(model, baselines.svd(model, ["blocks.1.mlp_out", "blocks.0.attn_o"])):
        with pytest.raises(RuntimeError, match=r"model\.W_out was read while blocks\.1\.mlp_out is attached"):
            model.W_out  # noqa: B018
        with pytest.raises(RuntimeError, match=r"model\.W_O was read while blocks\.0\.attn_o is attached"):
            model.OV  # noqa: B018
        for which in set(dense) - {"W_out", "W_O"}:
            assert torch.equal(getattr(model, which), dense[which])
    assert torch.equal(model.W_out, dense["W_out"])
