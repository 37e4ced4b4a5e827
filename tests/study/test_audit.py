"""Contexts and logit effects, against looking at every position."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import host_of
from swd_lens.inject import attach
from swd_lens.study import logit_effect, top_contexts
from tests.micro import random_tokens, toy_model


class Letters:
    """A tokenizer whose token i is the i-th letter."""

    padding_side = "right"

    def decode(self, ids):
        return "".join(chr(ord("a") + i) for i in ids)


@pytest.fixture(scope="module")
def model():
    model = toy_model()
    model.tokenizer = Letters()
    return model


def test_the_top_contexts_are_the_largest_z_of_each_row(model):
    factors, tokens = baselines.svd(model, "mlp_out"), random_tokens(11, 9)
    units = [("blocks.1.mlp_out", 3), ("blocks.0.mlp_out", 5), ("blocks.1.mlp_out", 0)]
    found = top_contexts(model, factors, units, tokens, n=4, before=2, after=1, batch_size=3)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    assert list(found) == [("blocks.1.mlp_out", 3), ("blocks.1.mlp_out", 0), ("blocks.0.mlp_out", 5)] or set(
        found
    ) == set(units)
    for site, unit in units:
        z = cache[f"{site.replace('.mlp_out', '')}.hook_mlp_out_unit"][:, :, unit]
        best, position = z.abs().max(1)
        order = best.sort(descending=True, stable=True).indices[:4].tolist()
        assert len(found[site, unit]) == 4
        for context, row in zip(found[site, unit], order, strict=True):
            pos = int(position[row])
            start, stop = max(0, pos - 2), min(9, pos + 2)
            assert context.tokens == tuple(chr(ord("a") + token) for token in tokens[row, start:stop].tolist())
            assert context.peak == pos - start
            assert context.z == pytest.approx(z[row, start:stop].tolist(), abs=1e-5)


def test_logit_effect_by_hand(model):
    factors = baselines.svd(model, "mlp_out")
    effect = logit_effect(model, factors, ("blocks.0.mlp_out", 2), n=3)
    write = factors["blocks.0.mlp_out"].write[2]
    logits = ((write - write.mean()) * model.ln_final.w) @ model.W_U
    logits = (logits - logits.mean()).detach()
    order = logits.argsort(descending=True).tolist()
    assert [token for token, _ in effect.promoted] == [chr(ord("a") + i) for i in order[:3]]
    assert [token for token, _ in effect.suppressed] == [chr(ord("a") + i) for i in order[::-1][:3]]
    assert effect.promoted[0][1] == pytest.approx(float(logits.max()), rel=1e-4)
    with pytest.raises(ValueError, match="does not write to the residual stream"):
        logit_effect(model, baselines.svd(model, "mlp_in"), ("blocks.0.mlp_in", 0))


def test_an_rms_norm_does_not_take_the_mean_out():
    model = toy_model(normalization_type="RMS")
    model.tokenizer = Letters()
    factors = baselines.svd(model, "attn_o")
    effect = logit_effect(model, factors, ("blocks.1.attn_o", 1), n=20)
    logits = ((factors["blocks.1.attn_o"].write[1] * model.ln_final.w) @ model.W_U).detach()
    by_letter = dict(effect.promoted)
    expected = {chr(ord("a") + i): value for i, value in enumerate((logits - logits.mean()).tolist())}
    assert by_letter == pytest.approx(expected, abs=1e-5)


def test_units_that_no_hook_sees_are_an_error(model, monkeypatch):
    kind = type(host_of(model))
    run = kind.run
    monkeypatch.setattr(kind, "run", lambda self, rows: (self.model.reset_hooks(), run(self, rows))[1])
    with pytest.raises(swd.UnsupportedHostError, match=r"never showed the units of blocks\.1\.mlp_out"):
        top_contexts(model, baselines.svd(model, "mlp_out"), [("blocks.1.mlp_out", 0)], random_tokens(3, 8))
