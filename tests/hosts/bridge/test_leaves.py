"""Swapping on a bridge: units compute in place of the matrix, undoing leaves no trace, what would be wrong is refused."""

import pytest
import torch

from swd_lens.base.errors import UnsupportedHostError
from tests.hosts.bridge.conftest import TOKENS, close, fresh, sites_with, snapshot, swap_dense


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("packed", [True, False])
def test_units_of_the_dense_matrix_compute_the_dense_model_and_undoing_leaves_no_trace(host, packed):
    model, sites = host.model, sites_with(host, packed)
    with torch.no_grad():
        dense = host.run(TOKENS)
        before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
        weights = {site: host.weight(site) for site in sites}
        undo = swap_dense(host, sites)
        assert all(host.is_swapped(site) for site in sites)
        assert close(host.run(TOKENS), dense)
        assert list(model.state_dict()) == list(state)
        assert [id(p) for p in model.parameters()] == [i for _, i in before["parameters"]]
        assert all(torch.equal(host.weight(site), weights[site]) for site in sites)
        undo()
        undo()
        assert not any(host.is_swapped(site) for site in sites)
        assert snapshot(model) == before
        assert torch.equal(host.run(TOKENS), dense)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


@pytest.mark.quick_cases(2)
def test_every_unit_hook_sees_and_changes_what_the_site_computes(host):
    """Zeroing z leaves the site with its bias; every site of every family takes part in the forward."""
    h, y = {}, {}
    for site in host.sites() + host.alternatives():
        undo = swap_dense(host, [site])
        with torch.no_grad(), host.inputs([site], h.__setitem__), host.outputs([site], y.__setitem__):
            _, cache = host.model.run_with_cache(TOKENS, names_filter=[site.hook_name])
            expected = y[site] if site.kind == "mlp" else h[site] @ host.weight(site)
            assert torch.allclose(cache[site.hook_name], expected)
            host.model.run_with_hooks(TOKENS, fwd_hooks=[(site.hook_name, lambda z, hook: z * 0)])
        bias = y[site][0, 0]
        assert torch.equal(y[site], bias.expand_as(y[site])), site
        undo()


@pytest.mark.parametrize(("part", "whole"), [("attn_k", "attn_qkv"), ("mlp_gate", "mlp")])
def test_overlapping_sites_are_not_swapped_together(part, whole):
    host = fresh("llama")
    sites = {site.kind: site for site in host.sites() + host.alternatives() if site.layer == 1}
    for first, second in ((part, whole), (whole, part)):
        undo = swap_dense(host, [sites[first]])
        before = snapshot(host.model)
        with pytest.raises(RuntimeError, match=rf"blocks\.1\.{first} is attached already"):
            swap_dense(host, [sites[second]])
        assert snapshot(host.model) == before and not host.is_swapped(sites[second])
        undo()


@pytest.mark.quick_cases(3)
def test_a_whole_mlp_is_swapped_as_one(host):
    """Nothing else changes, and a unit of it that is added to adds to what the block writes."""
    sites = [site for site in host.alternatives() if site.kind == "mlp"]
    assert bool(sites) == (type(host.model.adapter).__name__ != "BertArchitectureAdapter")
    if not sites:
        return
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.mlp is a whole MLP.*mlp_in"):
        host.weight(sites[0])
    with torch.no_grad():
        dense, before = host.run(TOKENS), snapshot(host.model)
        undo = swap_dense(host, sites)
        assert torch.equal(host.run(TOKENS), dense)
        seen = {}
        hooks = [(site.hook_name, lambda y, hook: y + 1) for site in sites]
        hooks += [("blocks.0.mlp.hook_out", lambda y, hook: seen.update(changed=y))]
        plain = host.model.run_with_hooks(TOKENS, fwd_hooks=[("blocks.0.mlp.hook_out", lambda y, hook: seen.update(y=y))])
        assert torch.equal(plain, dense)
        host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        assert close(seen["changed"], seen["y"] + 1)
        undo()
        assert snapshot(host.model) == before


def test_undoing_an_older_swap_spares_the_newer_one():
    host = fresh("gpt2")
    site = host.sites()[0]
    old = swap_dense(host, [site])
    old()
    new = swap_dense(host, [site])
    old()
    assert host.is_swapped(site) and site.hook_name in host.model.hook_dict
    new()


def test_the_bias_is_read_when_the_model_runs():
    host = fresh("gpt2")
    site = next(site for site in host.sites() if site.name == "blocks.1.mlp_out")
    undo = swap_dense(host, [site])
    bias = host.model.blocks[1].mlp.out.bias
    with torch.no_grad():
        bias += 1
        edited = host.run(TOKENS)
        undo()
        assert close(edited, host.run(TOKENS))


@pytest.mark.quick_cases(3)
def test_the_weight_of_a_swapped_site_cannot_be_read(host):
    for site in host.sites():
        undo = swap_dense(host, [site])
        leaves = host._leaves(site)
        for leaf in leaves:
            with pytest.raises(AttributeError, match=f"{site.name} is attached"):
                leaf.weight  # noqa: B018
            assert leaf.bias is None or leaf.bias.shape == (host.weight(site).shape[1] // len(leaves),)
            assert leaf._parameters["weight"] is not None
        undo()
        assert leaves[0].weight is leaves[0]._parameters["weight"]


FLAGS = [
    ("use_attn_result", ["attn_o"]),
    ("use_split_qkv_input", ["attn_q", "attn_k", "attn_v", "attn_qkv"]),
    ("use_attn_in", ["attn_q", "attn_k", "attn_v", "attn_qkv"]),
]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("flag", "kinds"), FLAGS)
def test_head_by_head_switches(name, flag, kinds):
    host = fresh(name)
    switch = getattr(host.model, f"set_{flag}")
    sites = [site for site in host.sites() + host.alternatives() if site.layer == 1 and site.kind in kinds]
    assert sites
    switch(True)
    for site in sites:
        with pytest.raises(UnsupportedHostError, match=rf"cfg\.{flag} is on.*model\.set_{flag}\(False\)"):
            swap_dense(host, [site])
    switch(False)
    for site in sites:
        undo = swap_dense(host, [site])
        switch(True)
        with pytest.raises(AttributeError, match=f"{site.name} is attached: its dense weight is not in use"):
            host.run(TOKENS)
        switch(False)
        host.run(TOKENS)
        undo()
    others = [site for site in host.sites() if site.kind.startswith("mlp")]
    dense = host.run(TOKENS)
    undo = swap_dense(host, others)
    switch(True)
    assert close(host.run(TOKENS), dense)
    switch(False)
    undo()


def test_an_input_that_differs_between_the_parts_of_a_packed_site_is_an_error():
    host = fresh("llama")
    site = next(site for site in host.alternatives() if site.layer == 0)
    undo = swap_dense(host, [site])
    hooks = [("blocks.0.attn.k.hook_in", lambda h, hook: h * 2)]
    with torch.no_grad():
        dense = host.run(TOKENS)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.attn_qkv is attached.*but k got another input"):
            host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        same = [(f"blocks.0.attn.{part}.hook_in", lambda h, hook: h * 2) for part in "qkv"]
        assert not close(host.model.run_with_hooks(TOKENS, fwd_hooks=same), dense)
        assert torch.equal(host.run(TOKENS), dense)  # nothing is left of the forward that failed

        def stop(h, hook):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):  # after q was served
            host.model.run_with_hooks(TOKENS + 1, fwd_hooks=[("blocks.0.attn.k.hook_in", stop)])
        host.model.reset_hooks()
        assert torch.equal(host.run(TOKENS), dense)
    undo()
