"""Reading inputs and outputs of a bridge's sites, running parts of it, and prefixes that are kept."""

import pytest
import torch

from swd_lens.hosts import Host
from swd_lens.hosts.sites import Site
from tests import families
from tests.bridge.conftest import TOKENS, close, fresh, sites_with, swap_dense


@pytest.mark.quick_cases(12)
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_are_inputs_times_the_weight_plus_the_bias(host, packed, swapped):
    sites, h, y = sites_with(host, packed), {}, {}
    undo = swap_dense(host, sites) if swapped else lambda: None
    with torch.no_grad(), host.inputs(sites, h.__setitem__), host.outputs(sites, y.__setitem__):
        host.run(TOKENS)
    undo()
    assert h.keys() == y.keys() == set(sites)
    for site in sites:
        assert h[site].shape == (*TOKENS.shape, site.d_in) and y[site].shape == (*TOKENS.shape, site.d_out)
        bias = y[site] - h[site] @ host.weight(site)
        assert close(bias + 1, (bias[:1, :1] + 1).expand_as(bias)), site  # the same everywhere
    seen = len(h)
    host.run(TOKENS)
    assert len(h) == seen


def test_watching_survives_a_swap_inside():
    host = fresh("gpt2")
    site, seen = host.sites()[-1], []
    with torch.no_grad(), host.inputs([site], lambda _, h: seen.append(h)):
        host.run(TOKENS)
        undo = swap_dense(host, [site])
        host.run(TOKENS)
        undo()
        host.run(TOKENS)
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_run_blocks_runs_the_first_blocks(causal):
    for n in range(1, causal.model.cfg.n_layers + 1):
        seen = []
        with torch.no_grad(), causal.inputs(causal.sites(), lambda site, _, seen=seen: seen.append(site.layer)):
            causal.run_blocks(TOKENS, n)
        assert set(seen) == set(range(n))


def test_run_blocks_of_an_encoder_runs_at_least_the_first_blocks():
    host, seen = fresh("bert"), set()
    with torch.no_grad(), host.inputs(host.sites(), lambda site, _: seen.add(site.layer)):
        host.run_blocks(TOKENS, 1)
    assert 0 in seen


# ---------------------------------------------------------------------------------------------- prefixes


@pytest.mark.quick_cases(14)
@pytest.mark.parametrize("pos", [11, 2, 45])  # gemma2's window is 32 positions
@pytest.mark.parametrize("swapped", [True, False])
def test_a_prefix_gives_the_logits_of_the_whole_prompt(causal, pos, swapped):
    tokens = families.some_tokens(rows=3, pos=pos)
    undo = swap_dense(causal, sites_with(causal, packed=True)) if swapped else lambda: None
    with torch.no_grad():
        whole = causal.run(tokens)[:, -1]
        prefix = causal.freeze_prefix(tokens)
        assert prefix is not None
        first = causal.last_logits(tokens, prefix)
        assert close(first, whole) and close(causal.last_logits(tokens), whole)
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        other = tokens.clone()
        other[:, -1] = 77
        assert close(causal.last_logits(other, prefix), causal.run(other)[:, -1])
        twice = causal.last_logits(tokens.repeat(2, 1), causal.repeat_prefix(prefix, 2))
        assert close(twice, whole.repeat(2, 1))
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        assert torch.equal(causal.last_logits(tokens, causal.repeat_prefix(prefix, 1)), first)
    undo()


def test_one_token_and_encoders_have_no_prefix(host):
    assert host.freeze_prefix(TOKENS[:, :1]) is None
    if not host.model.adapter.supports_generation:
        assert host.freeze_prefix(TOKENS) is None
    assert host.repeat_prefix(None, 3) is None
    assert close(host.last_logits(TOKENS), host.run(TOKENS)[:, -1])


def _gradients(host: Host, sites: list[Site], prefix) -> dict[Site, torch.Tensor]:
    """d (a logit difference at the last position) / d (z at the last position)."""
    kept = {}

    def keep(site: Site):
        def hook(z, hook):
            kept[site] = z
            z.retain_grad()

        return hook

    for site in sites:
        host.model.add_hook(site.hook_name, keep(site))
    logits = host.last_logits(TOKENS, prefix)
    (logits[:, 5] - logits[:, 6]).sum().backward()
    host.model.reset_hooks()
    return {site: z.grad[:, -1] for site, z in kept.items()}


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_through_a_prefix_are_those_of_the_whole_prompt(causal, packed):
    sites = sites_with(causal, packed)
    undo = swap_dense(causal, sites)
    # In float32 Qwen3.5's recurrence alone is off by 8e-6 (AVX-512), 1.04e-5 (ATEN_CPU_CAPABILITY=default), backwards.
    causal.model.double()
    whole = _gradients(causal, sites, None)
    prefix = causal.freeze_prefix(TOKENS)
    for _ in range(2):
        got = _gradients(causal, sites, prefix)
        assert got.keys() == set(sites)
        assert all(close(got[site], whole[site]) for site in sites)
    undo()
