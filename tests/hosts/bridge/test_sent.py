"""An attached bridge is not pickled; it is copied."""

import copy
import io
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch

from swd_lens import baselines
from swd_lens.base.errors import AttachError
from swd_lens.units import attach
from tests import families

TOKENS = families.some_tokens(2, 7)


def by_torch(model):
    torch.save(model, io.BytesIO())


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("send", [pickle.dumps, lambda model: pickle.dumps(model, 0), by_torch, ForkingPickler.dumps])
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_an_attached_bridge_is_not_pickled_and_says_what_to_do(family, send):
    bridge = families.bridge(family)
    with (
        attach(bridge, baselines.svd(bridge, "mlp_out")),
        torch.no_grad(),
    ):  # a bridge cannot be copied after a forward with gradients
        attached, twin = bridge(TOKENS), copy.deepcopy(bridge)
        for host in (bridge, twin):
            with pytest.raises(AttachError, match=r"Save the factors .* and attach there"):
                send(host)
        assert torch.equal(twin(TOKENS), attached) and twin.__dict__["__reduce_ex__"].owner is twin
    assert "__reduce_ex__" not in bridge.__dict__
