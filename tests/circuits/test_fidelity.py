"""Fidelity against the same numbers computed the long way, and on models where they are known."""

import importlib
import json

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits import fidelity
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.hosts import host_of
from swd_lens.units.factors import Factors
from tests.contract import swd_zero_data
from tests.forwards import block_runs
from tests.micro import micro_model, random_tokens, toy_model

measure = importlib.import_module("swd_lens.circuits.fidelity")  # the function has its name


@pytest.fixture(scope="module")
def model():
    return toy_model()


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
    assert found.relmse["blocks.1.attn_qkv"] == pytest.approx(
        float((qkv - qkv_rep).square().sum() / qkv.square().sum()), rel=1e-4
    )
    assert found.table()["CE delta"].item() == found.ce_delta
    # Rows are the independent observations of a paired difference.
    of_rows = [
        F.cross_entropy(r[:, :-1].transpose(1, 2), tokens[:, 1:], reduction="none").mean(1) for r in (dense, replaced)
    ]
    se = float((of_rows[1] - of_rows[0]).double().std() / 3)
    assert found.ce_delta_se == pytest.approx(se, rel=1e-4) and found.table()["CE delta se"].item() == found.ce_delta_se
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


def test_exact_factors_change_nothing(model):
    found = fidelity(model, baselines.svd(model, "all"), random_tokens(9, 8))
    assert abs(found.ce_delta) < 1e-5 and abs(found.kl) < 1e-6 and found.top1_agreement == 1.0
    assert max(found.relmse.values()) < 1e-9


def test_batches_do_not_matter(model):
    factors, tokens = swd_zero_data(model, "mlp_out"), random_tokens(9, 8)
    one, many = fidelity(model, factors, tokens, batch_size=9), fidelity(model, factors, tokens, batch_size=2)
    assert one.kl == pytest.approx(many.kl, rel=1e-5)
    assert one.relmse == pytest.approx(many.relmse, rel=1e-5)


def test_what_enters_the_replaced_block_is_kept_from_one_replacement_to_the_next(model):
    tokens, dense = random_tokens(9, 8), DenseCache()
    for number, factors in enumerate((swd_zero_data(model, "blocks.1.*"), swd_zero_data(model, "blocks.1.mlp_out"))):
        with block_runs(model, 0) as runs:
            found = fidelity(model, factors, tokens, dense=dense)
        assert found == fidelity(model, factors, tokens)
        assert (runs.rows >= 9) == (number == 0)  # later only the rows that are compared with whole runs
    factors = baselines.svd(model, "mlp_out")
    with pytest.raises(swd.TokenError, match="at least two tokens"):
        fidelity(model, factors, [[1], [2]])
    with pytest.raises(swd.TokenError, match="outside the vocabulary"):
        fidelity(model, factors, [[1, 200]])


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
        "exact": baselines.svd(model, "blocks.1.mlp_out"),
    }
    together = fidelities(model, sets, tokens)
    assert together == {name: fidelity(model, factors, tokens) for name, factors in sets.items()}


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


def gram_form(model, cache, site, f):
    """tr(E^T G E) / tr(W^T G W) in float64, G over the dense model's inputs."""
    read_from = {"mlp_out": cache["post", 1], "attn_o": cache["z", 1].flatten(-2)}[site.split(".")[-1]]
    h = read_from.flatten(0, 1).double()
    of_site = next(s for s in host_of(model).sites() if s.name == site)
    gram, weight = h.T @ h, host_of(model).weight(of_site).double()
    error = weight - f.read.double() @ f.write.double()
    return float((error.T @ gram @ error).trace() / (weight.T @ gram @ weight).trace())


def test_the_local_error_is_the_grams_and_no_upstream_site_changes_it(model):
    factors, tokens = swd_zero_data(model, "all"), random_tokens(9, 8)
    found = fidelity(model, factors, tokens, batch_size=4, local=True)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
    for site in ("blocks.1.mlp_out", "blocks.1.attn_o"):
        assert found.local_relmse[site] == pytest.approx(gram_form(model, cache, site, factors[site]), rel=1e-4)
        alone = fidelity(model, {site: factors[site]}, tokens, batch_size=4, local=True)
        assert alone.local_relmse[site] == pytest.approx(found.local_relmse[site], rel=1e-6)
        # Alone in the model its input is the dense one: the same errors, over the norm with the bias in it.
        y = cache["mlp_out" if site.endswith("mlp_out") else "attn_out", 1].double()
        of_site = next(s for s in host_of(model).sites() if s.name == site)
        h = (cache["post", 1] if site.endswith("mlp_out") else cache["z", 1].flatten(-2)).double()
        product = h @ host_of(model).weight(of_site).double()
        norms = float(y.square().sum() / product.square().sum())
        assert alone.relmse[site] * norms == pytest.approx(alone.local_relmse[site], rel=1e-4)
        assert found.relmse[site] != pytest.approx(alone.relmse[site], rel=0.01)  # upstream drift
    assert list(found.local_relmse) == list(found.relmse)
    together = fidelities(
        model, {"all": factors, "exact": baselines.svd(model, "all")}, tokens, batch_size=4, local=True
    )
    assert together["all"] == found and max(together["exact"].local_relmse.values()) < 1e-9
    assert "local relMSE" in found.parts()[-1].columns


def test_a_local_error_computed_on_paper():
    """micro_model, mlp_out, tokens 0 and 1: h = relu((1, 2)) and relu((3, 4)).

    W = [[1, 2], [3, 4]]: h W = (7, 10) and (15, 22), squares 149 and 709. Without unit 1 (A = I, B = W): (1, 2) and (3, 6) are
    left, so (6, 8) and (12, 16) are lost: 100 + 400 of 858. A bias of (5, 5) changes neither.
    """
    model = micro_model()
    factors = Factors(torch.eye(2), torch.tensor([[1.0, 2.0], [0.0, 0.0]]))
    model.blocks[0].mlp.b_out.data.fill_(5.0)
    found = fidelity(model, {"blocks.0.mlp_out": factors}, [[0, 1]], local=True)
    assert found.local_relmse == {"blocks.0.mlp_out": pytest.approx(500 / 858)}
    # Bias included the squares are 12^2 + 15^2 + 20^2 + 27^2 = 1498.
    assert found.relmse == {"blocks.0.mlp_out": pytest.approx(500 / 1498)}
    assert Fidelity.from_dict(json.loads(json.dumps(found.as_dict()))) == found
    unmeasured = fidelity(model, {"blocks.0.mlp_out": factors}, [[0, 1]])
    assert "local_relmse" not in unmeasured.as_dict() and Fidelity.from_dict(unmeasured.as_dict()).local_relmse == {}


@pytest.mark.parametrize(("reads", "writes"), [("input", "output"), ("output", "output"), ("input", "input")])
def test_a_coders_local_error_is_that_of_its_output(reads, writes):
    """The coder gives half of what it reads: y / 2, or the output of h / 2. h W = (7, 10), (15, 22), b_out = (5, 5).

    Of (12, 15) and (20, 27) half is lost: 1498 / 4. From h / 2 half of h W is lost: 858 / 4. Reading h, writing y: the coder
    gives h / 2 = (.5, 1) and (1.5, 2) for (12, 15) and (20, 27).
    """

    class Half:
        def encode(self, x):
            return x / 2

        def decode(self, z):
            return z

    model = micro_model()
    model.blocks[0].mlp.b_out.data.fill_(5.0)
    coder = Half()
    coder.reads, coder.writes = reads, writes
    found = fidelity(model, {"blocks.0.mlp_out": coder}, [[0, 1]], local=True)
    lost = {
        ("output", "output"): 1498 / 4,
        ("input", "input"): 858 / 4,
        ("input", "output"): 11.5**2 + 14**2 + 18.5**2 + 25**2,
    }[reads, writes]
    assert found.local_relmse["blocks.0.mlp_out"] == pytest.approx(lost / 858)
