"""The probe: tokens that must give the stored z on every host that a loaded set is attached to."""

import copy
from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import AttachError
from tests import families
from tests.micro import random_tokens, toy_model

SITES = ["blocks.1.mlp_in", "blocks.1.mlp_out"]


def factorized(model, tokens=None):
    return swd.factorize(model, SITES, sparsity=0.4, tokens=tokens, outer_iterations=3, progress=False)


@pytest.mark.parametrize("tokens", [None, random_tokens(4, 12)], ids=["zero-data", "calibrated"])
def test_a_whole_set_runs_its_probe_wherever_it_is_attached(model, tokens, tmp_path):
    factorized(model, tokens).save(tmp_path)
    loaded = swd.FactorSet.load(tmp_path)
    swd.attach(model, loaded).detach()
    other = copy.deepcopy(model)
    for host in (other, model):  # another host, and the same one after a change
        with torch.no_grad():
            host.blocks[0].mlp.W_in.mul_(3.0)  # the factorized matrices are the same, what enters them is not
        hooks = list(host.hook_dict)
        with pytest.raises(AttachError, match=r"the probe of blocks\.1\.mlp_in fails: .* off by .* of its size"):
            swd.attach(host, loaded)
        assert list(host.hook_dict) == hooks


def test_the_probe_of_an_attached_set_covers_write(model):
    factors = factorized(model)
    changed = dict(factors)
    f = changed[SITES[1]]
    changed[SITES[1]] = replace(f, probe=replace(f.probe, y=f.probe.y * 1.01))
    with pytest.raises(AttachError, match=r"the probe of blocks\.1\.mlp_out fails: .* give a y that is off by 0\.0"):
        swd.attach(model, swd.FactorSet(changed, factors.provenance))
    assert list(model.hook_dict) == list(toy_model().hook_dict)


def test_where_something_else_changes_what_enters_a_site_no_probe_is_asked(model):
    factors, early = factorized(model), swd.factorize(model, "blocks.0.mlp_in", sparsity=0.9, progress=False)
    part = swd.FactorSet({SITES[1]: factors[SITES[1]]}, factors.provenance)
    for fits in (part, early | factors, factors | early):
        swd.attach(model, fits).detach()
    with swd.attach(model, early):
        swd.attach(model, factors).detach()  # nested
    model.blocks[0].hook_resid_pre.add_hook(lambda x, hook: x * 2)
    swd.attach(model, factors).detach()
    model.reset_hooks()
    swd.attach(model, factors).detach()


def test_a_short_context_has_a_short_probe():
    model = toy_model(n_ctx=8)
    factors = factorized(model)
    assert len(factors.provenance["probe_tokens"]) == 8
    swd.attach(model, factors).detach()


def test_dropout_is_no_reason_to_refuse_but_nothing_is_measured_under_it():
    bridge = families.bridge("gpt2")  # Hugging Face's GPT-2 drops out a tenth in train mode
    factors, tokens = factorized(bridge), families.some_tokens(8, 16)
    bridge.train()
    swd.attach(bridge, factors).detach()
    assert all(f.probe is None for f in factorized(bridge).values())
    for measure in (lambda: factorized(bridge, tokens), lambda: swd.fidelity(bridge, factors, tokens)):
        with pytest.raises(ValueError, match=r"drops activations out: .* Call model\.eval\(\)"):
            measure()
    bridge.eval()
    swd.attach(bridge, factors).detach()
