"""Edges by name, neighbours and direct effects on the logits."""

import pytest
import torch

from swd_lens import baselines
from swd_lens.analysis.audit import logit_effect
from swd_lens.analysis.audit.vectors import edges_of
from swd_lens.hosts.sites import Ends, Span
from tests.analysis.audit_models import lettered
from tests.micro import random_tokens


def test_logit_effect_by_hand(model):
    factors = baselines.svd(model, "mlp_out")
    text = random_tokens(4, 8)
    effect = logit_effect(model, factors, ("blocks.0.mlp_out", 2), text, n=3)
    write = factors["blocks.0.mlp_out"].write[2]
    _, cache = model.run_with_cache(text)
    logits = ((write - write.mean()) * model.ln_final.w) @ model.W_U * (1 / cache["ln_final.hook_scale"]).mean()
    logits = (logits - logits.mean()).detach()
    order = logits.argsort(descending=True).tolist()
    assert [token for token, _ in effect.promoted] == [chr(ord("a") + i) for i in order[:3]]
    assert [token for token, _ in effect.suppressed] == [chr(ord("a") + i) for i in order[::-1][:3]]
    assert effect.promoted[0][1] == pytest.approx(float(logits.max()), rel=1e-4)
    with pytest.raises(ValueError, match="does not write to the residual stream"):
        logit_effect(model, baselines.svd(model, "mlp_in"), ("blocks.0.mlp_in", 0), text)


def test_an_rms_norm_does_not_take_the_mean_out():
    model = lettered(normalization_type="RMS")
    factors = baselines.svd(model, "attn_o")
    text = random_tokens(4, 8)
    effect = logit_effect(model, factors, ("blocks.1.attn_o", 1), text, n=20)
    _, cache = model.run_with_cache(text)
    inverse = (1 / cache["ln_final.hook_scale"]).mean()
    logits = ((factors["blocks.1.attn_o"].write[1] * model.ln_final.w) @ model.W_U * inverse).detach()
    by_letter = dict(effect.promoted)
    expected = {chr(ord("a") + i): value for i, value in enumerate((logits - logits.mean()).tolist())}
    assert by_letter == pytest.approx(expected, abs=1e-5)


def test_names_of_every_end():
    ends = Ends(n_heads=4, n_kv_heads=2, d_head=8, other_attention=frozenset({3}))
    spans = ends.written("blocks.0.attn_qkv", 64)
    assert [span.name for span in spans] == [
        *(f"Q head {i}" for i in range(4)), "K head 0", "K head 1", "V head 0", "V head 1"
    ]  # fmt: skip
    edges = edges_of(torch.eye(64)[43] * -2, spans)
    assert edges.strongest == (("K head 1 / dim 3", -2.0),) and edges.heads == {"K head 1": 1.0}
    assert [span.name for span in ends.written("blocks.0.attn_v", 16)] == ["V head 0", "V head 1"]
    assert ends.read("blocks.0.attn_qkv", 32) == [Span("residual", 0, 32)]
    assert ends.written("blocks.0.mlp_gate", 9) == [Span("neuron", 0, 9)]
    # Linear attention has heads of its own, and gated queries are twice as wide: no head is named there.
    assert ends.written("blocks.3.attn_qkv", 64) == [Span("output", 0, 64)]
    assert ends.written("blocks.0.attn_q", 64) == [Span("output", 0, 64)]
    assert ends.read("blocks.3.attn_o", 32) == [Span("input", 0, 32)]


def test_neighbours_by_write_cosine(found, factors):
    write = factors["blocks.0.mlp_out"].write
    cosine = torch.nn.functional.cosine_similarity(write[4][None], write)
    order = [i for i in cosine.abs().sort(descending=True, stable=True).indices.tolist() if i != 4][:6]
    expected = {f"blocks.0.mlp_out/{i}": float(cosine[i]) for i in order}
    similar = found.unit("blocks.0.mlp_out/4").similar
    assert [unit for unit, _ in similar] == list(expected) and dict(similar) == pytest.approx(expected)
    assert found.unit("blocks.0.mlp_out/11").coactive == ()  # a dead unit moves with nothing
