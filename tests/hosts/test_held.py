"""Held norms: changes go through them as through the norm itself, its scale held."""

import pytest
import torch

from swd_lens.hosts import host_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import HeldNorm, held_behind, inverse_scale, norms_behind
from tests import families

TOKENS = families.some_tokens(1, 7)


@pytest.mark.parametrize("centred", [False, True])
def test_changes_go_forwards_and_gradients_backwards(centred):
    x, change, vector, weight = torch.randn(4, 5, 8, generator=torch.Generator().manual_seed(0)).unbind()
    norm = HeldNorm(centred, weight[0], torch.rand(5) + 0.5)
    made = norm.push(x + change) - norm.push(x)
    torch.testing.assert_close(made, norm.push(change))
    # What is multiplied with h, pulled back, is multiplied with x; the scale is not in it.
    expected = (norm.pull(vector) * change).sum(-1) * norm.inverse
    torch.testing.assert_close((vector * made).sum(-1), expected)


@torch.no_grad()
def test_the_norm_behind_a_site_makes_of_what_it_is_given_what_it_made_in_the_run():
    host = host_of(families.bridge("gemma2"))
    sites = [site for site in host.sites() if site.kind in ("attn_o", "mlp_out")]
    with norms_behind(host, sites) as seen:
        host.run(TOKENS)
    assert seen.keys() == {site.name for site in sites}
    for site in sites:
        given, made = seen[site.name]
        norm = held_behind(host, site, given)
        assert norm is not None
        torch.testing.assert_close(norm.push(given), made, rtol=1e-4, atol=1e-5)
    plain = host_of(families.bridge("llama"))
    assert held_behind(plain, plain.sites()[0], torch.ones(1, 7, 16)) is None


def test_the_scale_is_that_of_the_hosts_norm():
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(0))
    for family in ("gpt2", "llama"):
        facts = facts_of(families.bridge(family))
        y = x - x.mean(-1, keepdim=True) if family == "gpt2" else x
        torch.testing.assert_close(inverse_scale(facts, x), (y.square().mean(-1) + facts.eps).rsqrt())
