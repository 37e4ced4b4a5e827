"""Spending a total over loss curves, checked against optima known by hand, and allocate on a toy model."""

import json
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import swd_lens as swd
from swd_lens.base.sealed import seal
from swd_lens.factorization.allocate import allocate
from swd_lens.factorization.allocation import Allocation, spend
from swd_lens.factorization.solve import solve
from swd_lens.hosts import host_of
from swd_lens.solver.budget import edges
from swd_lens.tasks.streams import TokenStream, as_stream
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model

TOKENS = random_tokens(8, 16)

# A few iterations: what is tested here is not how good the factors are.
# From the short side, as `solve` does it.
SHORT: dict[str, Any] = {"outer_iterations": 6, "refine_rounds": 1, "refine_steps": 2, "basis": "paper"}


def shortly(model, sites="all", sparsity=0.6, tokens: Any = TOKENS, **given):
    return allocate(model, sites, sparsity, tokens, progress=False, **{**SHORT, **given})


@pytest.fixture(scope="module")
def by_kl(model):
    return shortly(model)


def test_the_total_is_that_of_the_uniform_sparsity(model, by_kl):
    sites = swd.find_sites(model)
    uniform = {site.name: edges(site.d_in, site.d_out, 0.6) for site in sites}
    assert by_kl.edges == sum(uniform.values()) and by_kl.uniform == uniform
    assert list(by_kl) == [site.name for site in sites] and len(by_kl) == len(sites)
    for site in sites:
        assert edges(site.d_in, site.d_out, by_kl[site.name]) == by_kl.allocated[site.name]
        assert round(uniform[site.name] / 2) <= by_kl.allocated[site.name] <= 2 * uniform[site.name]
    assert len(set(by_kl.values())) > 2
    assert by_kl.predicted["allocated"] < by_kl.predicted["uniform"]


def test_a_goal_spends_the_fewest_edges_that_keep_it(model, by_kl):
    goal = (by_kl.predicted["allocated"] + by_kl.predicted["uniform"]) / 4
    found = shortly(model, kl=goal)
    assert found.curves == by_kl.curves and found.settings["kl"] == goal
    assert found.predicted["allocated"] <= goal
    assert found.edges == pytest.approx(sum(found.uniform.values()), abs=len(found)) and found.edges > by_kl.edges
    fewer = spend(found.curves, found.edges - 1)
    assert sum(found.curves[name].at(k) for name, k in fewer.items()) > goal


def test_factorize_takes_it_and_it_explains_itself(model, by_kl):
    factors = swd.factorize(model, "all", sparsity=by_kl, tokens=TOKENS, progress=False, **SHORT)
    assert factors.edges == by_kl.edges
    assert {name: f.edges for name, f in factors.items()} == by_kl.allocated
    table = by_kl.table()
    assert table["K allocated"].sum() == table["K uniform"].sum() == by_kl.edges
    assert (table["share allocated"].sum(), table["KL uniform"].sum()) == pytest.approx((1, by_kl.predicted["uniform"]))
    assert "Allocation by KL" in repr(by_kl) and f"{by_kl.edges:,} edges" in repr(by_kl) and "<table" in by_kl._repr_html_()


def test_trials_shrink_a_gram_by_the_tokens_that_it_is_a_mean_over(model, monkeypatch):
    """Those that are left out do not count; `factorize` makes its factors with the same shrinkage."""
    asked = []
    monkeypatch.setattr(
        "swd_lens.factorization.allocate.solve", lambda *given, **how: asked.append(how["tokens"]) or solve(*given, **how)
    )
    left_out = [int(TOKENS[0, 0]), int(TOKENS[0, 1])]
    found = shortly(model, "blocks.0.mlp_out", tokens=as_stream(TOKENS, model, exclude=left_out), by="error")
    counted = int((~torch.isin(TOKENS, torch.tensor(left_out))).sum())
    assert set(asked) == {counted} == {found.settings["tokens"]} and counted < TOKENS.numel()


def test_kl_is_that_of_one_matrix_replaced(model, by_kl):
    """The long way: one solve on the dense Gram, one comparison of whole logits."""
    [site] = swd.find_sites(model, "blocks.1.mlp_in")
    gram = swd.collect_grams(model, [site], TOKENS)[site.name]
    curve = by_kl.curves[site.name]
    middle = curve.edges.index(by_kl.uniform[site.name])
    f = swd.solve(host_of(model).weight(site), gram, 0.6, preset="quick", tokens=TOKENS.numel(), **SHORT)
    with torch.no_grad():
        dense = model(TOKENS)[:, :-1].flatten(0, 1).log_softmax(-1)
        with swd.attach(model, {site.name: f}):
            replaced = model(TOKENS)[:, :-1].flatten(0, 1).log_softmax(-1)
    kl = F.kl_div(replaced, dense, log_target=True, reduction="batchmean")
    assert curve.losses[middle] == pytest.approx(float(kl), rel=1e-3)


def test_the_dense_host_runs_twice_for_all_matrices(model):
    grid = (0.5, 1, 2)
    how = {"grid": grid, "progress": False, **SHORT}
    with block_runs(model, 0) as first, block_runs(model, 1) as second:
        swd.allocate(model, "mlp_out", 0.5, TOKENS, **how)
    # Block 0: Grams, the dense host to its end, and to the second matrix; its check (whole, in stages); its own trials.
    assert first.tokens == TOKENS.numel() * (1 + 2 + len(grid)) + 2 * TOKENS.shape[1]
    # Block 1: the same without the second, and all trials.
    assert second.tokens == TOKENS.numel() * (1 + 1 + 2 * len(grid)) + 2 * TOKENS.shape[1]


def test_by_error_reads_relmse(model):
    site = swd.find_sites(model, "blocks.0.attn_o")[0]
    grams = swd.collect_grams(model, [site], TOKENS, dtype="float64")
    gram, first = grams[site.name], grams.first[site.name]
    found = shortly(model, "blocks.0.*", by="error", grid=(0.75, 1, 1.25))
    curve = found.curves[site.name]
    f = swd.solve(host_of(model).weight(site), gram, 0.6, preset="quick", tokens=TOKENS.numel(), **SHORT)
    assert curve.losses[1] == pytest.approx(f.relmse(gram, without=first), rel=1e-6)
    zero = shortly(model, "blocks.0.*", tokens=None, by="error", grid=(0.75, 1, 1.25))
    f = swd.solve(host_of(model).weight(site), None, 0.6, preset="quick", **SHORT)
    assert zero.curves[site.name].losses[1] == pytest.approx(f.relmse(None), rel=1e-6)


def test_few_gram_bytes_a_stream_and_a_host_that_cannot_run_in_stages(model, by_kl, monkeypatch):
    stream = TokenStream(lambda: iter(TOKENS), n_rows=len(TOKENS))
    assert shortly(model, tokens=stream, gram_bytes=1).as_dict() == by_kl.as_dict()
    monkeypatch.setattr("swd_lens.factorization.allocate.ends_in_whole_logits", lambda *_: False)
    whole = shortly(model)
    for site, curve in whole.curves.items():
        assert curve.losses == pytest.approx(by_kl.curves[site].losses, rel=1e-3)


def test_a_matrix_that_does_nothing_gets_least_and_one_alone_keeps_its_budget(model):
    quiet = toy_model()
    with torch.no_grad():
        quiet.blocks[1].mlp.W_out.mul_(1e-3)  # what it writes drowns in the residual stream
    found = shortly(quiet, "mlp_out")
    assert found.allocated["blocks.1.mlp_out"] == found.curves["blocks.1.mlp_out"].edges[0]
    assert found.allocated["blocks.0.mlp_out"] > found.uniform["blocks.0.mlp_out"]
    alone = shortly(model, "blocks.0.mlp_out", by="error", grid=(0.5, 1, 2))
    assert alone.allocated == alone.uniform


def test_the_papers_solver_can_make_every_budget(model):
    found = allocate(model, "attn_o", 0.6, TOKENS, by="error", preset="paper", outer_iterations=4, progress=False)
    factors = swd.factorize(model, "attn_o", sparsity=found, tokens=TOKENS, preset="paper", progress=False)
    assert 0 < factors.edges <= found.edges  # its rounding keeps a few less


def test_it_is_saved_and_read(by_kl, tmp_path):
    path = tmp_path / "allocation.json"
    by_kl.save(path)
    read = Allocation.load(path)
    assert dict(read) == dict(by_kl) and read.as_dict() == by_kl.as_dict()
    for values, reason in (({"a": 1}, r"\(no format\)"), ({"format": 1, "a": 1}, ".*sparsity")):
        path.write_text(json.dumps(seal(values)))
        with pytest.raises(ValueError, match=rf"allocation\.json is not an allocation, or damaged {reason}"):
            Allocation.load(path)


REFUSED = (
    ({"by": "loss"}, "by must be one of 'kl', 'error', got 'loss'"),
    ({"tokens": None}, 'by="kl" needs tokens='),
    ({"kl": 0.1, "by": "error"}, "a goal is a summed KL above 0"),
    ({"kl": 0.0}, "a goal is a summed KL above 0"),
    ({"kl": 1e6, "sites": "blocks.0.mlp_out", **SHORT}, "lies beyond the budgets that were tried"),
    ({"grid": (1.0,)}, "two or more rising"),
    ({"grid": (2.0, 1.0)}, "two or more rising"),
    ({"grid": (1.5, 2.0)}, "from at most 1 to at least 1"),
    ({"sparsity": 0.99}, r"blocks.0.attn_qkv .*leaves K="),
    ({"sparsity": 1.5}, "inside"),
    ({"outer_iteration": 3}, "outer_iterations"),
    ({"sites": "nothing"}, "no site matches"),
    ({"judge": torch.zeros(3, 1, dtype=torch.long)}, "at least two tokens"),
)


def test_refusals(model):
    for given, message in REFUSED:
        with pytest.raises(ValueError, match=message):
            allocate(model, **{"sites": "all", "sparsity": 0.6, "tokens": TOKENS, "progress": False, **given})
    factors = swd.baselines.svd(model, "blocks.0.mlp_out")
    with swd.attach(model, factors), pytest.raises(swd.AttachError, match="detach them first"):
        shortly(model, "blocks.0.mlp_out")
