"""What a forward shows is kept by name, of both hosts."""

from functools import cache
from typing import Any

import pytest
import torch

from swd_lens import baselines
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import Start, find_sites, host_of
from swd_lens.hosts.recording import record, recording
from swd_lens.units import attach
from tests import families

TOKENS = families.some_tokens()
KINDS = ("hooked", "bridge")


@cache
def model_of(kind: str) -> Any:
    return families.hooked("gpt2") if kind == "hooked" else families.bridge("gpt2")


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_behind_the_last_site_are_not_run(kind):
    host = host_of(model_of(kind))
    first = find_sites(host.model, "mlp_out")[0]
    seen = record(host, TOKENS, inputs=[first], outputs=[first], hooks=["blocks.0.attn.hook_pattern"])
    assert seen.logits is None and set(seen.inputs) == set(seen.outputs) == {first.name}
    assert seen.inputs[first.name].shape == (*TOKENS.shape, first.d_in)
    assert seen.outputs[first.name].shape == (*TOKENS.shape, first.d_out)
    assert seen.hooks["blocks.0.attn.hook_pattern"].shape[-1] == TOKENS.shape[1]
    assert seen.vectors == {first.name: TOKENS.numel()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_run_to_the_logits_gives_them(kind):
    host = host_of(model_of(kind))
    site = find_sites(host.model, "blocks.1.mlp_out")[0]
    whole = record(host, TOKENS, outputs=[site], run="whole", keep=lambda y: y[:, -1].double())
    assert torch.equal(whole.logits, host.run(TOKENS)) and whole.outputs[site.name].dtype == torch.float64
    start = Start(1, host.residual(TOKENS, 1).detach())
    last = record(host, TOKENS, outputs=[site], run="last", start=start, keep=lambda y: y[:, -1].double())
    torch.testing.assert_close(last.logits, whole.logits[:, -1], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(last.outputs[site.name], whole.outputs[site.name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_units_and_gradients(kind):
    model = model_of(kind)
    host, site = host_of(model), find_sites(model, "blocks.0.mlp_out")[0]
    with attach(model, baselines.svd(model, [site.name])):
        z = record(host, TOKENS, units=[site]).units[site.name]
        assert not z.requires_grad and z.shape[:2] == TOKENS.shape
        kept = record(host, TOKENS, units=[site], gradient=True).units[site.name]
        assert kept.requires_grad and torch.equal(kept, z)
        with torch.no_grad():
            assert not record(host, TOKENS, units=[site], gradient=True).units[site.name].requires_grad


@pytest.mark.parametrize("kind", KINDS)
def test_a_site_that_was_never_shown_is_named(kind):
    host = host_of(model_of(kind))
    sites = find_sites(host.model, "mlp_out")
    silent = pytest.raises(UnsupportedHostError, match=r"never showed the input of blocks\.1\.mlp_out:")
    with silent, recording(host, inputs=sites):
        host.run_blocks(TOKENS, 1)
    assert record(host, TOKENS, inputs=sites[:1], hooks=["blocks.0.no_such_hook"]).hooks == {}
