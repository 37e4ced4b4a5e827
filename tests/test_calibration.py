"""Grams and factorize: streamed second moments, execution order, and what happens to bad input."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.calibration import collect_grams
from swd_lens.hosts import find_sites, host_of
from swd_lens.inject import attach
from tests.micro import micro_model, random_tokens, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_grams_by_hand():
    # Micro model, mlp_out reads relu(x W_in): token 0 -> (1, 2), token 1 -> (3, 4).
    # mean of h^T h over the two tokens: [[1 + 9, 2 + 12], [2 + 12, 4 + 16]] / 2 = [[5, 7], [7, 10]].
    model = micro_model()
    site = find_sites(model, "blocks.0.mlp_out")
    grams = collect_grams(model, site, [[0, 1]])
    assert grams["blocks.0.mlp_out"].tolist() == [[5.0, 7.0], [7.0, 10.0]]
    assert grams.n_tokens == 2


def test_grams_are_those_of_the_cached_inputs(model):
    tokens = random_tokens(10, 9)
    grams = collect_grams(model, find_sites(model), tokens, batch_size=3)
    _, cache = model.run_with_cache(tokens)
    block = model.blocks[1]
    inputs = {
        "blocks.1.mlp_out": cache["post", 1],
        "blocks.1.attn_o": cache["z", 1].flatten(-2),
        "blocks.1.attn_qkv": block.ln1(cache["resid_pre", 1]),
        "blocks.1.mlp_in": block.ln2(cache["resid_mid", 1]),
    }
    for name, h in inputs.items():
        flat = h.detach().flatten(0, 1)
        torch.testing.assert_close(grams[name], flat.T @ flat / 90, rtol=1e-4, atol=1e-5)


def test_relmse_of_one_site_is_what_its_gram_predicts(model):
    """The solver's error measure and the host's: equal when measured on the calibration tokens themselves (bias left out)."""
    tokens, site = random_tokens(10, 9), "blocks.1.mlp_out"
    factors = swd.factorize(model, site, sparsity=0.4, tokens=tokens, outer_iterations=4, progress=False)
    with torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        h, weight, f = cache["post", 1].double(), model.blocks[1].mlp.W_out.double(), factors[site]
        error = (h @ (weight - f.read.double() @ f.write.double())).square().sum() / (h @ weight).square().sum()
    assert f.provenance["relmse"] == pytest.approx(float(error), rel=1e-4)
    assert f.provenance["tokens"] == 90 and f.provenance["calibration"] == "sequential"


def test_sequential_calibration_reads_behind_the_replaced_sites(model):
    tokens = random_tokens(12, 9)
    sequential = swd.factorize(model, "mlp_out", sparsity=0.6, tokens=tokens, outer_iterations=4, progress=False)
    dense = swd.factorize(
        model, "mlp_out", sparsity=0.6, tokens=tokens, calibration="dense", outer_iterations=4, progress=False
    )
    first, second = "blocks.0.mlp_out", "blocks.1.mlp_out"
    assert torch.equal(sequential[first].read, dense[first].read)
    assert not torch.equal(sequential[second].read, dense[second].read)
    # The second site's own fit, by hand: its Gram with the first one attached.
    with attach(model, sequential[first]):
        gram = collect_grams(model, find_sites(model, second), tokens)[second]
    by_hand = swd.solve(model.blocks[1].mlp.W_out.detach(), gram, 0.6, tokens=tokens.numel(), outer_iterations=4)
    assert torch.equal(by_hand.read, sequential[second].read) and torch.equal(by_hand.write, sequential[second].write)


def test_factorize_is_reproducible_and_leaves_the_host_alone(model):
    tokens = random_tokens(12, 9)
    logits = model(tokens)
    first, second = (
        swd.factorize(model, "all", sparsity=0.5, tokens=tokens, outer_iterations=4, progress=False) for _ in range(2)
    )
    assert all(
        torch.equal(first[s].read, second[s].read) and torch.equal(first[s].write, second[s].write) for s in first
    )
    assert list(first) == [site.name for site in find_sites(model)]
    assert torch.equal(model(tokens), logits)
    assert first.provenance["tokens"] == 108 and first.provenance["model"] == model.cfg.model_name


def test_bad_input(model):
    with pytest.raises(swd.UnknownSiteError, match=r"Nearest: blocks\.1\.mlp_out"):
        swd.factorize(model, "blocks.1.mlp_outs")
    for sparsity in (0.0, 1.0, -0.5, 1.5, float("nan")):
        with pytest.raises(ValueError, match=r"blocks\.0\.mlp_out .*sparsity"):
            swd.factorize(model, "blocks.0.mlp_out", sparsity=sparsity, progress=False)
    with pytest.raises(swd.TokenError, match="outside the vocabulary"):
        swd.factorize(model, "mlp_out", tokens=[[1, 2, 99]], progress=False)
    with pytest.raises(ValueError, match="calibration must be 'sequential' or 'dense'"):
        swd.factorize(model, "mlp_out", calibration="both", progress=False)
    with pytest.warns(UserWarning, match=r"12 calibration tokens for blocks\.0\.mlp_out, which reads 32 inputs"):
        swd.factorize(model, "blocks.0.mlp_out", tokens=random_tokens(2, 6), outer_iterations=4, progress=False)


def test_a_site_that_no_forward_reads_or_that_is_read_twice_is_an_error(model, monkeypatch):
    run_blocks = type(host_of(model)).run_blocks
    tokens, sites = random_tokens(4, 6), find_sites(model, ["blocks.0.mlp_in", "blocks.1.mlp_out", "blocks.1.attn_o"])
    monkeypatch.setattr(type(host_of(model)), "run_blocks", lambda self, rows, n: run_blocks(self, rows, n - 1))
    with pytest.raises(
        swd.UnsupportedHostError, match=r"the input of blocks\.1\.attn_o, blocks\.1\.mlp_out: it goes by"
    ):
        collect_grams(model, sites, tokens)

    def twice(self, *how):
        run_blocks(self, *how)
        run_blocks(self, *how)

    monkeypatch.setattr(type(host_of(model)), "run_blocks", twice)
    with pytest.raises(swd.UnsupportedHostError, match=r"blocks\.0\.mlp_in read 48 vectors on 24 tokens"):
        collect_grams(model, sites, tokens)


def test_controls_know_their_sites(model):
    factors = baselines.random_b(model, "mlp_out", seed=3)
    assert list(factors) == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    again, other = baselines.random_b(model, "mlp_out", seed=3), baselines.random_b(model, "mlp_out", seed=4)
    for site in factors:
        assert torch.equal(factors[site].write, again[site].write)
        assert not torch.equal(factors[site].write, other[site].write)
    assert not torch.equal(factors["blocks.0.mlp_out"].write, factors["blocks.1.mlp_out"].write)
