"""The audit on bridges: every family by its site names, and the numbers of a HookedTransformer of the same weights."""

import importlib.util

import pytest
import torch

from swd_lens.analysis.audit import audit
from swd_lens.hosts import host_of
from tests import families
from tests.analysis.audit_models import sparse_factors

TOKENS = families.some_tokens(rows=6, pos=11)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", families.FAMILIES)
def test_every_family_and_site(name):
    model = families.bridge(name)
    factors = sparse_factors(model, "all", units=5)
    before = model(TOKENS).clone()
    found = audit(model, factors, TOKENS, n=3, progress=False)
    assert len(found) == 5 * len(host_of(model).sites())
    for profile in found.profiles():
        if profile.index != 4:  # the dead one
            assert len(profile.contexts) == 3 and profile.peak > 0 and profile.reads.n
        write = factors[profile.site].write[profile.index]
        assert profile.writes.n == int((write != 0).sum())
        has_logits = name != "bert" and profile.site.endswith(("attn_o", "mlp_out"))
        assert (profile.logits is not None) == has_logits
        assert profile._repr_html_()
    assert torch.equal(model(TOKENS), before)


def test_heads_are_named_where_the_attention_has_them():
    model = families.bridge("llama")
    found = audit(model, sparse_factors(model, "blocks.0.attn_*", units=5), TOKENS, n=3, progress=False)
    names = {profile.site: profile.writes.strongest[0][0] for profile in found.profiles() if profile.index == 0}
    assert names["blocks.0.attn_q"].startswith("Q head ") and names["blocks.0.attn_v"].startswith("V head ")
    assert set(found.unit("blocks.0.attn_k/0").writes.heads) <= {"K head 0", "K head 1"}
    linear = families.bridge("qwen3_5")
    profile = audit(linear, sparse_factors(linear, "blocks.0.attn_o", units=5), TOKENS, progress=False).unit("blocks.0.attn_o/0")
    assert profile.reads.strongest[0][0].startswith("input ") and profile.reads.heads == {}


@pytest.mark.skipif(
    importlib.util.find_spec("transformer_lens.HookedTransformer") is None, reason="transformer_lens 4 has bridges only"
)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_both_hosts_find_the_same(name):
    found = []
    for model in (families.hooked(name), families.bridge(name)):
        found.append(audit(model, sparse_factors(model, "all", units=5), TOKENS, n=3, progress=False))
    assert found[0].units == found[1].units
    for one, other in zip(found[0].profiles(), found[1].profiles(), strict=True):
        assert [c.tokens for c in one.contexts] == [c.tokens for c in other.contexts]
        assert one.reads == other.reads and one.writes == other.writes
        assert (one.mean, one.peak) == pytest.approx((other.mean, other.peak), rel=1e-3, abs=1e-5)
