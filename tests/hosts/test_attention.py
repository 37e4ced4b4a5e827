"""Heads and rotations: with them, queries and keys by hand are the scores that the host shows."""

import pytest
import torch

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import host_of
from swd_lens.hosts.attention import heads_of, rotations
from swd_lens.hosts.recording import record
from tests import families

TOKENS = families.some_tokens(1, 9)
HOSTS = [("hooked", name) for name in families.HOOKED]
HOSTS += [("bridge", name) for name in ("gpt2", "pythia", "llama", "qwen3", "gemma2")]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(("kind", "family"), HOSTS)
@torch.no_grad()
def test_scores_by_hand_are_those_that_the_host_shows(kind, family):
    host = host_of(getattr(families, kind)(family))
    heads = heads_of(host, 1)
    q_hook, k_hook = (f"blocks.1.attn.hook_{part}" for part in "qk")
    seen = record(host, TOKENS, hooks=[q_hook, k_hook, heads.scores_hook]).hooks
    q, k = (seen[name].reshape(9, -1, heads.d_head).transpose(0, 1) for name in (q_hook, k_hook))
    for norm in (heads.query_norm, heads.key_norm):
        assert (norm is None) == (family != "qwen3")
    if heads.query_norm is not None and heads.key_norm is not None:
        q, k = (x * norm.inverse_rms(x) * norm.weight for x, norm in ((q, heads.query_norm), (k, heads.key_norm)))
    rotation = rotations(host, [heads], 9)[1]
    assert (rotation is None) == (family == "gpt2") == (heads.positions == "learned")
    if rotation is not None:
        torch.testing.assert_close(rotation.at(3, q[:, 3]), rotation.apply(q)[:, 3])
        q, k = rotation.apply(q), rotation.apply(k)
    causal = torch.ones(9, 9, dtype=torch.bool).tril()
    for head in range(heads.n_heads):
        scores = q[head] @ k[heads.key_head(head)].T * heads.scale
        scores = scores if heads.soft_cap is None else heads.soft_cap * (scores / heads.soft_cap).tanh()
        torch.testing.assert_close(scores[causal], seen[heads.scores_hook][0, head][causal], rtol=1e-4, atol=1e-4)


def test_more_positions_than_the_context_are_refused():
    host = host_of(families.bridge("llama"))
    with pytest.raises(ValueError, match="65 positions do not fit the host's context of 64"):
        rotations(host, [heads_of(host, 0)], 65)


@pytest.mark.parametrize(("family", "message"), [("bert", "attends both ways"), ("qwen3_5", "no softmax attention")])
def test_other_attention_is_refused(family, message):
    with pytest.raises(UnsupportedHostError, match=message):
        heads_of(host_of(families.bridge(family)), 0)
