"""Fidelity against the same numbers computed the long way, and on models where they are known."""

import importlib
import json

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits import fidelity
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.hosts import host_of
from tests.contract import swd_zero_data
from tests.micro import random_tokens, toy_model

measure = importlib.import_module("swd_lens.circuits.fidelity")  # the function has its name


def test_the_long_way(model):
    factors, tokens = swd_zero_data(model, "all"), random_tokens(9, 8)
    found = fidelity(model, factors, tokens, batch_size=4)
    with torch.no_grad():
        dense, dense_cache = model.run_with_cache(tokens)
        with swd.attach(model, factors):
            replaced, cache = model.run_with_cache(tokens)
    p, q, targets = dense[:, :-1].flatten(0, 1), replaced[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()
    assert found.ce_dense == pytest.approx(float(F.cross_entropy(p, targets)), rel=1e-5)
    assert found.ce == pytest.approx(float(F.cross_entropy(q, targets)), rel=1e-5)
    assert found.ce_delta == pytest.approx(found.ce - found.ce_dense)
    kl = F.kl_div(q.log_softmax(-1), p.log_softmax(-1), log_target=True, reduction="batchmean")
    assert found.kl == pytest.approx(float(kl), rel=1e-4)
    assert found.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert found.n_predictions == 9 * 7
    for name, key in (("blocks.1.mlp_out", "mlp_out"), ("blocks.1.attn_o", "attn_out"), ("blocks.1.mlp_in", "pre")):
        y, y_rep = dense_cache[key, 1], cache[key, 1]
        assert found.relmse[name] == pytest.approx(float((y - y_rep).square().sum() / y.square().sum()), rel=1e-4)
    qkv, qkv_rep = (torch.cat([c[part, 1].flatten(-2) for part in "qkv"], -1) for c in (dense_cache, cache))
    of_qkv = float((qkv - qkv_rep).square().sum() / qkv.square().sum())
    assert found.relmse["blocks.1.attn_qkv"] == pytest.approx(of_qkv, rel=1e-4)
    assert found.table()["CE delta"].item() == found.ce_delta
    # Rows are the independent observations of a paired difference.
    of_rows = [F.cross_entropy(r[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1) for r in (dense, replaced)]
    se = float((of_rows[1] - of_rows[0]).double().std() / 3)
    assert found.ce_delta_se == pytest.approx(se, rel=1e-4) and found.table()["CE delta se"].item() == found.ce_delta_se
    shown = str(found)
    assert shown.startswith(f"Fidelity of {len(factors)} sites on 63 predictions: CE delta {found.ce_delta:+.4f} ± {se:.4f} nats")
    assert f"KL {found.kl:.3g} nats" in shown and shown.count("relMSE") == len(factors) and "kl_rows" not in repr(found)
    assert f"  blocks.1.mlp_out: relMSE {found.relmse['blocks.1.mlp_out']:.3g}" in shown.splitlines()
    assert fidelity(model, factors, tokens[:1]).ce_delta_se is None
    assert found.ce_delta_rows == pytest.approx((of_rows[1] - of_rows[0]).tolist(), rel=1e-3, abs=1e-6)


def test_two_replacements_are_compared_row_by_row():
    def measured(*rows):
        return Fidelity(1.0, 1.0 + sum(rows) / len(rows), 0.0, 1.0, {"x": 0.0}, 9, (), 0.1, rows)

    one, other = measured(0.1, 0.3, 0.2), measured(0.0, 0.1, 0.2)
    # Differences .1, .2, 0: their standard deviation is .1, of three rows.
    assert one.difference_se(other) == pytest.approx(0.1 / 3**0.5)
    # The mean of both others is .05, .2, .2: differences .05, .1, 0.
    assert one.difference_se(other, measured(0.1, 0.3, 0.2)) == pytest.approx(0.05 / 3**0.5)
    assert one.difference_se(measured(0.1, 0.2)) is None and one.difference_se() is None
    assert Fidelity.from_dict(json.loads(json.dumps(one.as_dict()))).difference_se(other) == one.difference_se(other)


def test_a_site_whose_output_is_never_shown_is_an_error(model, monkeypatch):
    kind = type(host_of(model))
    outputs = kind.outputs
    monkeypatch.setattr(kind, "outputs", lambda self, sites, use: outputs(self, sites[1:], use))
    with pytest.raises(swd.UnsupportedHostError, match=r"never showed the output of blocks\.0\.mlp_out: it goes by"):
        fidelity(model, baselines.svd(model, "mlp_out"), random_tokens(3, 8))


def test_several_at_once_are_each_alone(model):
    tokens = random_tokens(9, 8)
    sets = {
        "late": swd_zero_data(model, "blocks.1.mlp_out"),
        "all": swd_zero_data(model, "all"),
        "exact": baselines.svd(model, "all"),
    }
    together = fidelities(model, sets, tokens)
    assert together == {name: fidelity(model, factors, tokens) for name, factors in sets.items()}
    exact = together["exact"]
    assert (
        abs(exact.ce_delta) < 1e-5 and abs(exact.kl) < 1e-6 and exact.top1_agreement == 1.0 and max(exact.relmse.values()) < 1e-9
    )


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 113 * 9 * 3, 4 * 113 * 9 * 4])
def test_no_logits_are_larger_than_a_chunk_and_their_size_does_not_matter(model, monkeypatch, chunk_bytes):
    factors, tokens = swd_zero_data(model, "mlp_out"), random_tokens(9, 8)
    whole, sizes = fidelity(model, factors, tokens), []
    kind = type(host_of(model))
    unembed = kind.unembed

    def seen(self, batch, residual):
        logits = unembed(self, batch, residual)
        sizes.append(logits.numel())
        return logits

    monkeypatch.setattr(kind, "unembed", seen)
    monkeypatch.setattr(measure, "CHUNK_BYTES", chunk_bytes)
    chunked = fidelity(model, factors, tokens)
    # Two positions at least: one predicts the other.
    assert 4 * max(sizes) <= max(chunk_bytes, 4 * 2 * 9 * model.cfg.d_vocab)
    assert chunked.kl == pytest.approx(whole.kl, rel=1e-6) and chunked.top1_agreement == whole.top1_agreement
    assert chunked.n_predictions == 9 * 7 and chunked.ce == pytest.approx(whole.ce, rel=1e-6)


def test_a_host_that_cannot_run_in_stages_is_run_whole(model, monkeypatch):
    factors, tokens = swd_zero_data(model, "all"), random_tokens(9, 8)
    expected, kind = fidelity(model, factors, tokens), type(host_of(model))
    unembed = kind.unembed
    monkeypatch.setattr(kind, "unembed", lambda self, batch, residual: 1.01 * unembed(self, batch, residual))
    with pytest.warns(UserWarning, match="stages"):
        assert fidelity(model, factors, tokens).kl == pytest.approx(expected.kl, rel=1e-5)


def test_a_hook_of_the_users_may_want_a_position_far_behind():
    """Stages are tried on a few positions only where no such hook stands."""
    model, tokens = toy_model(n_ctx=64), random_tokens(3, 60)
    factors = swd_zero_data(model, "mlp_out")

    def silence(z, hook):
        z[:, 40] = 0
        return z

    def turn(x, hook):
        x[:, 40:] *= -2
        return x

    with model.hooks(fwd_hooks=[("blocks.0.hook_mlp_out", silence)]):
        assert fidelity(model, factors, tokens).kl > 0
    with model.hooks(fwd_hooks=[("ln_final.hook_normalized", turn)]), pytest.warns(UserWarning, match="gives other logits"):
        fidelity(model, factors, tokens)
