"""FastForward: each gives what whole runs give, find_fast_forward takes all that do, and a host that lies changes no number."""

import warnings

import pytest
import torch

from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits import fast_forward as fast_forward_module
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import FastForward, Runner, find_fast_forward
from swd_lens.hosts import Start, host_of
from swd_lens.units import attach
from tests.circuits.slow import able_split, last_logits, replacing
from tests.micro import random_tokens, split_of

FIRST, LAST = "blocks.0.mlp_out", "blocks.1.mlp_out"
SPLIT, TRAIN = able_split(), able_split(12, seed=3, name="train")


def some_masks(factors, circuits=5):
    generator = torch.Generator().manual_seed(0)
    masks = {site: torch.rand(circuits, f.n_units, generator=generator) < 0.5 for site, f in factors.items()}
    masks[next(iter(masks))][0] = False
    masks[next(iter(masks))][1] = True
    return masks


def slow_logits(model, tokens, masks, values, positions):
    rows = []
    with torch.no_grad():
        for circuit in range(len(next(iter(masks.values())))):
            for row, prompt in enumerate(tokens):
                at = {s: v.expand(len(tokens), tokens.shape[1], -1)[row] for s, v in values.items()}
                hooks = [replacing(s, mask[circuit], at[s], positions) for s, mask in masks.items()]
                rows.append(last_logits(model, prompt, hooks))
    return torch.stack(rows).unflatten(0, (-1, len(tokens)))


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    ("positions", "keeps", "layer", "known", "pos"),
    [  # every pair of values, and all that shortens at once in block 0, too
        ("scoring", True, 0, True, 6),
        ("scoring", True, 0, False, 1),
        ("scoring", True, 1, True, 6),
        ("scoring", False, 0, True, 6),
        ("scoring", False, 1, False, 1),
        ("all", False, 0, False, 6),
        ("all", False, 1, True, 1),
    ],
)
def test_every_road_gives_the_logits_of_whole_runs(model, every, positions, keeps, layer, known, pos):
    """Sites of block `layer` on, or the block's mlp_out alone and the sites of later blocks."""
    chosen = [s for s in every if int(s[7]) > layer or (s == f"blocks.{layer}.mlp_out" if known else int(s[7]) == layer)]
    factors, tokens = {site: every[site] for site in chosen}, random_tokens(3, pos)
    masks, generator = some_masks(factors), torch.Generator().manual_seed(1)
    shapes = ((1, 1), (1, pos), (3, 1), (3, pos))  # of values: one for all, one per position, one per prompt, one for each
    with attach(model, factors) as attachment:
        host, first = host_of(model), next(site for site in attachment.sites if site.layer == layer)
        fast_forward = FastForward(positions, layer + known, first if known else None, keeps)
        runner = Runner(host, attachment.factors, fast_forward)
        for batch, at in shapes:
            if positions == "all" and (batch, at) == (3, 1):
                continue
            values = {site: torch.randn(batch, at, f.n_units, generator=generator) for site, f in attachment.factors.items()}
            with torch.no_grad():
                found = runner.logits(runner.share(tokens), masks, values)
                ids = torch.tensor([7, 2, 11])
                some = runner.logits(runner.share(tokens), masks, values, ids)
            slow = slow_logits(model, tokens, masks, values, positions)
            assert float((found - slow).abs().max()) < 1e-5 * float(slow.abs().max())
            torch.testing.assert_close(some, found[..., ids], rtol=1e-5, atol=1e-5)


def test_what_interventions_share_is_left_as_it_was(model, every):
    """The same shared gives the same logits again, after any other intervention."""
    factors, tokens = {LAST: every[LAST], "blocks.1.attn_o": every["blocks.1.attn_o"]}, random_tokens(3, 6)
    with attach(model, factors) as attachment, torch.no_grad():
        runner = Runner(host_of(model), attachment.factors, FastForward("scoring", 1, None, True))
        shared, masks = runner.share(tokens), some_masks(factors)
        values = {site: torch.zeros(1, 1, f.n_units) for site, f in factors.items()}
        first = runner.logits(shared, masks, values)
        runner.logits(shared, {site: ~mask for site, mask in masks.items()}, values)
        assert torch.equal(runner.logits(shared, masks, values), first)


@pytest.mark.parametrize(
    ("sites", "layer", "known"),
    [
        ([FIRST], 1, FIRST),
        ([LAST], 2, LAST),
        ([FIRST, LAST], 1, FIRST),
        ([FIRST, "blocks.0.attn_o"], 0, None),
        (["blocks.1.attn_o", "blocks.1.mlp_in"], 1, None),
    ],
)
@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_the_shortest_road_is_taken(model, every, positions, sites, layer, known):
    with attach(model, {site: every[site] for site in sites}) as attachment, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        fast_forward = find_fast_forward(host_of(model), attachment.sites, attachment.factors, SPLIT, positions)
        plain = find_fast_forward(host_of(model), attachment.sites, attachment.factors, SPLIT, positions, known=False)
    assert (fast_forward.positions, fast_forward.layer, fast_forward.known and fast_forward.known.name) == (
        positions,
        layer,
        known,
    )
    assert fast_forward.keeps_prefix == plain.keeps_prefix == (positions == "scoring")
    assert (plain.layer, plain.known) == (min(int(site[7]) for site in sites), None)


def lie(monkeypatch, model, name):
    """A host that gives runs something else to take up from than it should: another residual stream, or another prefix."""
    kind = type(host_of(model))
    honest = kind.freeze_prefix

    def start(layer, residual):  # not a constant, which layer norm would take out
        return Start(layer, residual + 0.1 * torch.arange(residual.shape[-1]))

    if name == "residual":  # where it is taken up: the host's plain runs go through its own `residual`, too
        monkeypatch.setattr(fast_forward_module, "Start", start)
    else:
        monkeypatch.setattr(kind, name, lambda self, tokens, begun=None: honest(self, (tokens + 1) % 20))


def fail(monkeypatch, model, name, failure):
    """A host whose shortened runs fail."""

    def failing(*_, **__):
        raise failure

    if name == "residual":
        monkeypatch.setattr(fast_forward_module, "Start", failing)
    else:
        monkeypatch.setattr(type(host_of(model)), name, failing)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("site", "positions", "name"),  # every pair of values
    [
        (LAST, "scoring", "residual"),
        (LAST, "all", "freeze_prefix"),
        ("blocks.1.attn_o", "scoring", "freeze_prefix"),
        ("blocks.1.attn_o", "all", "residual"),
    ],
)
def test_a_host_that_lies_changes_no_number(model, every, monkeypatch, positions, site, name):
    factors = {site: every[site]}
    how = {"score": "ablation", "positions": positions, "sign": "signed"}
    scores = attribute(model, factors, TRAIN, **how)
    first = attribute(model, factors, TRAIN, positions=positions)
    curve = evaluate(model, factors, SPLIT, scores, grid=[5])
    lie(monkeypatch, model, name)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        again = attribute(model, factors, TRAIN, **how)
        second = attribute(model, factors, TRAIN, positions=positions)
        rows = evaluate(model, factors, SPLIT, scores, grid=[5]).rows
    torch.testing.assert_close(again.scores[site], scores.scores[site], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(second.scores[site], first.scores[site], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again.means[site], scores.means[site])
    assert rows["q keep"].tolist() == pytest.approx(curve.rows["q keep"].tolist(), abs=1e-5)
    assert rows["q ablate"].tolist() == pytest.approx(curve.rows["q ablate"].tolist(), abs=1e-5)


def test_a_joined_prefix_that_lies_is_not_used(model, every, monkeypatch):
    site, join = "blocks.1.attn_o", type(host_of(model)).join_prefixes
    scores = attribute(model, {site: every[site]}, TRAIN)
    curve = evaluate(model, {site: every[site]}, SPLIT, scores, grid=[5])

    def unmasked(self, prefixes):
        joined = join(self, prefixes)
        for entry in joined.entries:
            entry.padding = torch.zeros_like(entry.padding)
        return joined

    with attach(model, {site: every[site]}) as attachment:
        found = find_fast_forward(host_of(model), attachment.sites, attachment.factors, SPLIT, "scoring", dense=DenseCache())
        assert found.joins and found.shares
    monkeypatch.setattr(type(host_of(model)), "join_prefixes", unmasked)
    with pytest.warns(UserWarning, match="joins"):
        again = evaluate(model, {site: every[site]}, SPLIT, scores, grid=[5])
    assert again.rows["q keep"].tolist() == pytest.approx(curve.rows["q keep"].tolist(), abs=1e-5)


@pytest.mark.parametrize(("positions", "name"), [("scoring", "freeze_prefix"), ("all", "residual")])
def test_where_nothing_is_left_to_shorten_it_says_so(model, every, monkeypatch, positions, name):
    scores = attribute(model, {LAST: every[LAST]}, TRAIN, positions=positions)
    lie(monkeypatch, model, name)
    with pytest.warns(UserWarning, match="slower, but right"):
        evaluate(model, {LAST: every[LAST]}, SPLIT, scores)


@pytest.mark.parametrize(
    "failure",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate 8589934592 bytes"),
        RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    ],
    ids=["python", "cpu", "gpu"],
)
@pytest.mark.parametrize("name", ["freeze_prefix", "residual"])
def test_for_want_of_memory_no_other_road_is_taken(model, every, monkeypatch, name, failure):
    """Results would depend on what else the machine does, and the host would be blamed."""
    fail(monkeypatch, model, name, failure)
    with pytest.raises(type(failure)) as raised:
        attribute(model, {LAST: every[LAST]}, TRAIN, score="ablation")
    assert raised.value is failure


@pytest.mark.parametrize("name", ["freeze_prefix", "residual"])
def test_where_a_shortened_run_fails_it_says_of_what(model, every, monkeypatch, name):
    scores = attribute(model, {LAST: every[LAST]}, TRAIN, score="ablation")
    fail(monkeypatch, model, name, IndexError("position 3 of 1"))
    with pytest.warns(UserWarning, match="fails when it is shortened .*IndexError: position 3 of 1") as caught:
        again = attribute(model, {LAST: every[LAST]}, TRAIN, score="ablation")
    assert not any("gives other logits" in str(one.message) for one in caught)
    torch.testing.assert_close(again.scores[LAST], scores.scores[LAST], rtol=1e-4, atol=1e-5)


def test_one_token_prompts_have_shortcuts(model, every):
    factors = {LAST: every[LAST]}
    short = split_of([[1], [2], [3]], [[4]] * 3, [[5]] * 3, 20)
    scores = attribute(model, factors, short)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        curve = evaluate(model, factors, short, scores)
    assert curve.rows["q keep"].iloc[-1] == pytest.approx(curve.q_full, abs=1e-6)


@pytest.mark.parametrize("sites", [[FIRST], ["blocks.1.attn_o", "blocks.1.mlp_in", LAST], ["blocks.0.attn_qkv", LAST]])
def test_a_short_last_block_gives_the_logits_of_whole_runs(model, every, sites):
    factors, tokens = {site: every[site] for site in sites}, random_tokens(3, 6)
    masks, generator = some_masks(factors), torch.Generator().manual_seed(1)
    with attach(model, factors) as attachment, torch.no_grad():
        fast_forward = find_fast_forward(host_of(model), attachment.sites, attachment.factors, SPLIT, "all")
        assert fast_forward.short
        runner = Runner(host_of(model), attachment.factors, fast_forward)
        for batch, pos in ((1, 1), (1, 6), (3, 6)):
            values = {site: torch.randn(batch, pos, f.n_units, generator=generator) for site, f in factors.items()}
            found = runner.logits(runner.share(tokens), masks, values)
            slow = slow_logits(model, tokens, masks, values, "all")
            assert float((found - slow).abs().max()) < 1e-5 * float(slow.abs().max())
