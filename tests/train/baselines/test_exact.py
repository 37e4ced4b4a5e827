"""Exact and pruned baselines of a host; tests/units/test_exact.py has those of a single matrix."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.hosts import host_of
from swd_lens.units import attach
from swd_lens.units.exact import svd_factors
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model
from tests.units.test_exact import lost_by


def test_pruned_neurons_and_singular_vectors_of_a_host_are_attached_and_keep_the_budget():
    model, tokens = toy_model(), random_tokens(8, 9)
    how, dense = {"sparsity": 0.5, "tokens": tokens, "progress": False}, model(tokens)
    sparse = baselines.pruned(model, ["blocks.0.attn_o", "blocks.0.mlp_in", "blocks.0.mlp_out"], **how)
    for site, f in sparse.items():
        assert f.n_units == (f.d_out if "mlp_in" in site else f.d_in) and f.settings["preset"] == "pruned", site
        assert 0 <= f.d_in * f.d_out // 2 - f.edges <= 1
    sides = {site.split(".")[-1]: f.settings["basis"] for site, f in sparse.items()}
    assert sides == {"attn_o": "input", "mlp_in": "output", "mlp_out": "input"}
    assert baselines.pruned(model, "blocks.0.mlp_in", **how, basis="input")["blocks.0.mlp_in"].settings["basis"] == "input"
    with attach(model, sparse):
        assert float((model(tokens) - dense).abs().max()) > 1e-3
    with attach(model, baselines.neurons(model, "mlp_out")):
        torch.testing.assert_close(model(tokens), dense, rtol=1e-5, atol=1e-5)
    for site, f in baselines.svd_pruned(model, "mlp_out", **how).items():
        assert f.edges == f.d_in * f.d_out // 2 and f.settings["preset"] == "svd_pruned", site
        assert f.n_units == min(f.d_in, f.d_out)


def test_neurons_stand_where_the_mlp_has_them_and_a_metric_needs_text():
    model = toy_model()
    outputs = baselines.neurons(model, "blocks.0.mlp_in")["blocks.0.mlp_in"]
    assert outputs.n_units == model.cfg.d_mlp and torch.equal(outputs.write, torch.eye(model.cfg.d_mlp))
    behind = baselines.neurons(model, "blocks.0.mlp_out")["blocks.0.mlp_out"]
    assert behind.n_units == model.cfg.d_mlp and torch.equal(behind.read, torch.eye(model.cfg.d_mlp))
    inputs = baselines.neurons(model, "blocks.0.mlp_in", side="input")["blocks.0.mlp_in"]
    assert inputs.n_units == model.cfg.d_model
    heads = baselines.neurons(model, "blocks.0.attn_o")["blocks.0.attn_o"]
    assert torch.equal(heads.read, torch.eye(heads.d_in))
    model = toy_model()
    with pytest.raises(ValueError, match=r"svd\(whitened=True\): whitened and weigh_outputs take their metric from text"):
        baselines.svd(model, "mlp_out", whitened=True)
    with pytest.raises(ValueError, match=r"svd\(whitened=False\)"):
        baselines.svd(model, "mlp_out", tokens=random_tokens(2, 4))
    with (
        attach(model, baselines.neurons(model, "blocks.0.mlp_out")),
        pytest.raises(swd.errors.AttachError, match=r"baselines\.svd"),
    ):
        baselines.svd(model, "mlp_out", whitened=True, tokens=random_tokens(2, 4))
    for sites, how in (("mlp_in", {}), ("attn_o", {"weigh_outputs": True, "tokens": random_tokens(2, 4)})):
        with pytest.raises(ValueError, match="by_head=True"):
            baselines.svd(model, sites, by_head=True, **how)


def test_calibration_text_is_run_once_for_all_metrics_and_factorizations():
    model, site = toy_model(), "blocks.0.attn_o"
    text = CalibrationText(random_tokens(8, 9), model)
    first = baselines.svd(model, site, whitened=True, tokens=text)
    with block_runs(model) as runs:
        by_head = baselines.svd(model, site, whitened=True, by_head=True, tokens=text)
        swd.factorize(model, site, tokens=text, preset="svd_pruned", gram_dtype="float32")
    assert runs.rows <= 1  # no pass over the text: a look at one row is all
    plain = baselines.svd(model, site, whitened=True, tokens=random_tokens(8, 9))
    assert torch.equal(first[site].read, plain[site].read) and by_head[site].n_units == first[site].n_units


@pytest.mark.parametrize("how", [{"whitened": True}, {"weigh_outputs": True}])
def test_whitened_svd_of_a_host(how):
    model, tokens = toy_model(), random_tokens(8, 9)
    sites = ["blocks.0.attn_o", "blocks.1.mlp_in", "blocks.1.mlp_out"]
    made = baselines.svd(model, sites, tokens=tokens, **how)
    assert list(made) == sites and made.provenance["method"] == ("svd_whitened" if "whitened" in how else "svd_causal")
    dense = model(tokens)
    with attach(model, made):
        torch.testing.assert_close(model(tokens), dense, rtol=1e-4, atol=1e-4)
    found = swd.find_sites(model, sites)
    grams = swd.collect_grams(model, found, tokens)
    plain = baselines.svd(model, sites)
    if "whitened" in how:
        for site in sites:
            weight, size = plain[site].weight, plain[site].d_out
            lost = [lost_by(each[site], weight, 5, grams[site].double(), torch.eye(size).double()) for each in (made, plain)]
            assert lost[0] < lost[1], site
    expected = svd_factors(plain[sites[2]].weight, grams[sites[2]], tokens=72)
    if "whitened" in how:
        torch.testing.assert_close(made[sites[2]].write, expected.write, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("whitened", [False, True])
@pytest.mark.parametrize("kind", ["attn_o", "attn_q", "attn_qkv"])
def test_singular_vectors_of_each_head(kind, whitened):
    model, site = toy_model(), f"blocks.1.{kind}"
    text = {"whitened": True, "tokens": random_tokens(32, 16)} if whitened else {}
    f = baselines.svd(model, site, by_head=True, **text)[site]
    torch.testing.assert_close(f.product(), host_of(model).weight(swd.find_sites(model, site)[0]), atol=1e-5, rtol=0)
    d_head = model.cfg.d_head
    parts = f.read.T if kind == "attn_o" else f.write
    heads = (parts != 0).unflatten(1, (-1, d_head)).any(2)
    assert bool((heads.sum(1) == 1).all()) and int(f.edges_per_unit.max()) <= d_head + max(f.d_in, f.d_out)
    of_head = f.read[:d_head, :d_head] if kind == "attn_o" else f.read[:, :d_head]
    if not whitened:
        expected = torch.linalg.svdvals(f.product()[:d_head] if kind == "attn_o" else f.product()[:, :d_head])
        torch.testing.assert_close(of_head.norm(dim=0), expected, atol=1e-4, rtol=1e-4)
