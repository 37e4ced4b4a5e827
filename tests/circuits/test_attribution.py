"""attribute, in every combination of its options, against whole prompts run one by one (slow.py); and what calculus says."""

from dataclasses import replace

import pytest
import torch

import swd_lens as swd
from swd_lens.circuits import attribute, contributions
from swd_lens.circuits.ablation import MEAN_OVER
from swd_lens.circuits.attribution import POSITIONS, SIGNS
from swd_lens.circuits.contributions import SCORES
from swd_lens.hosts import host_of
from swd_lens.units import attach
from tests.circuits.slow import activations, margin_of, slow_contributions, slow_means
from tests.micro import random_split, split_of, toy_model

MLP = ["blocks.0.mlp_out", "blocks.1.mlp_out"]
STEPS = 3
SPLIT = random_split(5, seed=0)
LENGTHS = {len(prompt) for prompt in SPLIT.tokens}


@pytest.fixture(scope="module")
def slow(model, few):
    """(score, positions, mean_over) -> what slow_contributions give for every prompt, computed once."""
    kept = {}
    with attach(model, few):
        seen = [activations(model, few, prompt) for prompt in SPLIT.tokens]

    def get(score, positions, mean_over):
        # First-order and direct contributions do not depend on the means.
        key = (score, positions, mean_over if score not in ("first_order", "direct_logit") else None)
        means = slow_means(seen, mean_over)
        if key not in kept:
            with attach(model, few):
                kept[key] = [slow_contributions(model, few, SPLIT, i, score, positions, means, STEPS) for i in range(len(SPLIT))]
        return kept[key], means

    return get


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("score", "positions", "mean_over"),  # every pair of values
    [(s, list(POSITIONS)[(i + j) % 2], m) for i, s in enumerate(SCORES) for j, m in enumerate(MEAN_OVER)],
)
def test_every_score_is_that_of_whole_prompts_one_by_one(model, few, slow, score, positions, mean_over):
    assert min(LENGTHS) == 1 and len(LENGTHS) > 3
    contributions, means = slow(score, positions, mean_over)
    reduce = {"positive": lambda c: c.clamp(min=0), "signed": lambda c: c, "absolute": lambda c: c.abs()}
    assert reduce.keys() == SIGNS.keys()
    for sign in SIGNS:
        how = {"score": score, "sign": sign, "positions": positions, "mean_over": mean_over}
        fast = attribute(model, few, SPLIT, **how, steps=STEPS, batch_size=2)
        for site in few:
            expected = torch.stack([reduce[sign](one[site].double()) for one in contributions]).mean(0).float()
            torch.testing.assert_close(fast.scores[site], expected, rtol=1e-4, atol=1e-5)
            found, mean = fast.means[site], means[site]
            if positions == "scoring" and mean_over == "per_position":
                mean = mean[-1:]  # the only row that is ever used
            torch.testing.assert_close(found, mean, rtol=1e-5, atol=1e-6)
        assert {key: fast.settings[key] for key in how} == how


@pytest.mark.parametrize("score", SCORES)
def test_no_site_is_treated_as_another_however_the_sites_are_given(model, few, score):
    how = {"score": score, "steps": 1, "positions": "all"}
    forward, backward = (attribute(model, given, SPLIT, **how) for given in (few, {site: few[site] for site in reversed(few)}))
    assert forward.ranking() == backward.ranking() and list(backward.scores) == list(few)  # ties go in execution order
    for site in few:
        assert torch.equal(forward.scores[site], backward.scores[site])
        assert torch.equal(forward.means[site], backward.means[site])


@pytest.mark.parametrize("score", ["integrated_gradients", "ablation"])
def test_batches_and_frozen_parameters_change_nothing(few, score):
    frozen = toy_model()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    how = {"score": score, "steps": 2, "positions": "all"}
    whole, single = (attribute(frozen, few, SPLIT, **how, batch_size=size) for size in (128, 1))
    for site in few:
        torch.testing.assert_close(whole.scores[site], single.scores[site], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(whole.means[site], single.means[site], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("score", SCORES)
def test_no_forward_holds_more_prompts_than_batch_size(model, few, score, monkeypatch):
    kind, rows, most = type(host_of(model)), [], []

    def count(name):
        plain = getattr(kind, name)

        def counted(self, tokens, *arguments, **options):
            rows.append(len(tokens.unique(dim=0)))  # prompts; ablation repeats each for many units
            most.append(len(tokens))
            return plain(self, tokens, *arguments, **options)

        monkeypatch.setattr(kind, name, counted)

    for name in ("run_blocks", "freeze_prefix", "residual"):
        count(name)
    long = split_of([[1, 2, i] for i in range(9)], [[1]] * 9, [[2]] * 9, 20)
    attribute(model, few, long, score=score, mean_over="all_tokens", steps=1, batch_size=2)
    assert max(rows) <= 4  # find_fast_forward tries four prompts, two ways at once
    assert max(most) <= (8 if score != "ablation" else contributions._TOKENS_PER_FORWARD // 3)


def test_a_metric_takes_the_margins_place(model, few):
    """A metric that is the margin gives the margin's scores; another one is differentiated as it is."""
    place = {example.prompt: i for i, example in enumerate(SPLIT.examples)}

    def same(logits, examples):
        return torch.stack([margin_of(row, SPLIT, place[e.prompt]) for row, e in zip(logits, examples, strict=True)])

    def squared(logits, examples):
        return same(logits, examples) ** 2

    for score in ("integrated_gradients", "ablation", "direct_logit"):
        plain, measured = (
            attribute(model, few, split, score=score, sign="signed", steps=2, batch_size=3)
            for split in (SPLIT, replace(SPLIT, metric=same))
        )
        for site in few:
            torch.testing.assert_close(measured.scores[site], plain.scores[site], rtol=1e-4, atol=1e-5)
    split = replace(SPLIT, metric=squared)
    found = attribute(model, few, split, sign="absolute")
    with attach(model, few):
        slow = [slow_contributions(model, few, split, i, "first_order", "scoring", found.means, 1) for i in range(5)]
    for site in few:
        expected = torch.stack([one[site].abs() for one in slow]).mean(0)
        torch.testing.assert_close(found.scores[site], expected, rtol=1e-4, atol=1e-4)


def test_settings_record_every_choice(model, few):
    settings = attribute(model, few, SPLIT).settings
    assert {k: v for k, v in settings.items() if k != "factors"} == {
        "score": "first_order",
        "sign": "positive",
        "ranking": "descending score over all sites; ties by (site, unit)",
        "positions": "scoring",
        "mean_over": "scoring",
        "split": "train",
        "n_examples": 5,
        "task": "by hand",
        "task_source": "",
        "prepend_bos": None,
        "units": {site: f.n_units for site, f in few.items()},
        "swd_lens": swd.__version__,
    }
    assert len(set(settings["factors"].values())) == len(few)
    assert attribute(model, few, SPLIT, positions="all").settings["mean_over"] == "all_tokens"
    assert attribute(model, few, SPLIT, score="integrated_gradients", steps=5).settings["steps"] == 5


def test_bad_options_are_refused_before_anything_is_attached(model, few, every):
    for name in ("score", "sign", "positions", "mean_over"):
        with pytest.raises(ValueError, match=f"{name} must be one of .*, got 'last'"):
            attribute(model, few, SPLIT, **{name: "last"})
    with pytest.raises(ValueError, match=r"write to the residual stream .*; blocks\.0\.attn_qkv does not"):
        attribute(model, every, SPLIT, score="direct_logit")
    assert not any(hasattr(block, "hook_mlp_out_unit") for block in model.blocks)


def test_units_that_no_hook_sees_are_an_error(model, every, monkeypatch):
    kind = type(host_of(model))
    last_logits = kind.last_logits
    monkeypatch.setattr(
        kind, "last_logits", lambda self, *how, **more: self.model.reset_hooks() or last_logits(self, *how, **more)
    )
    with pytest.raises(swd.UnsupportedHostError, match=r"the units of blocks\.0\.attn_qkv, blocks\.0\.attn_o, "):
        attribute(model, every, SPLIT)
