"""The probe: tokens that must give the stored z on every host that a loaded set is attached to."""

import copy
import pickle

import pytest
import torch

import swd_lens as swd
from swd_lens.inject import AttachError
from tests import families
from tests.micro import random_tokens, toy_model

SITES = ["blocks.1.mlp_in", "blocks.1.mlp_out"]


def factorized(model, tokens=None):
    return swd.factorize(model, SITES, sparsity=0.4, tokens=tokens, outer_iterations=3, progress=False)


@pytest.fixture
def model():
    return toy_model()


@pytest.mark.parametrize("tokens", [None, random_tokens(4, 12)], ids=["zero-data", "calibrated"])
def test_a_loaded_set_runs_its_probe_once_per_host(model, tokens, tmp_path):
    factorized(model, tokens).save(tmp_path)
    loaded = swd.FactorSet.load(tmp_path)
    assert model not in loaded.probed
    swd.attach(model, loaded).detach()
    assert model in loaded.probed
    other = copy.deepcopy(model)
    assert other not in loaded.probed
    with torch.no_grad():
        other.blocks[0].mlp.W_in.mul_(3.0)  # the factorized matrices are the same, what enters them is not
    hooks = list(other.hook_dict)
    with pytest.raises(AttachError, match=r"the probe of blocks\.1\.mlp_in fails: .* off by .* of its size"):
        swd.attach(other, loaded)
    assert list(other.hook_dict) == hooks and other not in loaded.probed


def test_a_part_of_a_set_has_no_probe_to_run(model, tmp_path):
    factorized(model).save(tmp_path)
    loaded = swd.FactorSet.load(tmp_path)
    swd.attach(model, {SITES[0]: loaded[SITES[0]]}).detach()
    assert model not in loaded.probed


def test_copies_of_a_set_take_no_host_along(model):
    factors = factorized(model)
    swd.attach(model, factors).detach()
    for twin in (copy.deepcopy(factors), pickle.loads(pickle.dumps(factors))):
        assert len(twin.probed) == 0 and list(twin) == list(factors)
        assert torch.equal(twin[SITES[0]].read, factors[SITES[0]].read)
        swd.attach(model, twin).detach()
        assert model in twin.probed


def test_dropout_is_no_reason_to_refuse():
    bridge = families.bridge("gpt2")  # Hugging Face's GPT-2 drops out a tenth in train mode
    factors = factorized(bridge)
    bridge.train()
    swd.attach(bridge, factors).detach()
    assert bridge not in factors.probed
    assert all(f.probe is None for f in factorized(bridge).values())
    bridge.eval()
    swd.attach(bridge, factors).detach()
    assert bridge in factors.probed
