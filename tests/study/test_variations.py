"""Variations of a base setting: each changes one thing, draws are reproducible, axes without anything to vary say why."""

from dataclasses import replace
from itertools import islice

import pytest
import torch

from swd_lens.study.variations import AXES, Base, Variation, planned, templates_of
from tests.micro import random_split, random_tokens


def with_templates(names: list[str]):
    split = random_split(len(names))
    examples = [replace(e, meta={"template": name}) for e, name in zip(split.examples, names, strict=True)]
    return replace(split, examples=tuple(examples))


@pytest.fixture
def base():
    options = {"sparsity": 0.5, "preset": "quick", "basis": "input"}
    corpora = {"another": random_tokens(6, 8, seed=9)}
    return Base(random_tokens(20, 8), with_templates(list("aabbccdd")), options, 32, corpora, 0)


def test_runs_go_round_the_axes(base):
    runs, left_out = planned(base, list(AXES), 20)
    assert not left_out and [run.axis for run in runs[:9]] == list(AXES)
    assert [run.axis for run in runs[9:17]] == [axis for axis in AXES if axis != "corpus"]  # one other text
    assert len({(run.axis, run.value) for run in runs}) == 20
    assert planned(base, list(AXES), 20)[0] == runs
    presets = [Variation("preset", name) for name in ("thorough", "best", "deep")]
    assert planned(base, ["corpus", "preset"], 50)[0] == [Variation("corpus", "another"), *presets]


@pytest.mark.parametrize("axis", AXES)
def test_each_changes_one_thing(base, axis):
    own = base.setting
    (run,), _ = planned(base, [axis], 1)
    setting = run.setting(base)
    changed = {
        "text": not torch.equal(setting.rows, own.rows),
        "prompts": setting.train is not own.train,
        "options": dict(setting.options) != dict(own.options),
    }
    expected = {"data": "text", "tokens": "text", "corpus": "text", "prompts": "prompts", "templates": "prompts"}.get(
        axis, "options"
    )
    assert [what for what, differs in changed.items() if differs] == [expected]
    assert setting.refits == (expected != "prompts")
    if expected == "options":
        differing = {key for key, value in setting.options.items() if own.options.get(key) != value}
        assert differing == ({"start", "seed"} if axis == "start" else {axis})


def test_draws_are_halves_and_differ(base):
    draws = [base.drawn(k) for k in range(3)]
    assert all(len(rows) == 10 for rows in draws) and torch.equal(draws[0], base.drawn(0))
    assert not torch.equal(draws[0], draws[1]) and not torch.equal(draws[1], draws[2])
    pool = [row.tolist() for row in base.pool]
    assert all(row.tolist() in pool for row in draws[2])
    assert len(base.half_of_prompts(1)) == 4
    half = base.half_of_templates(1)
    assert len(templates_of(half)) == 2 and len(half) == 4
    assert {e.meta["template"] for e in half.examples} != {e.meta["template"] for e in base.half_of_templates(3).examples}


def test_presets_that_the_options_make_the_same_are_no_variation(base):
    """Quick, best and thorough differ in their alternations alone."""
    base.options = {**base.options, "outer_iterations": 8}
    assert [run.value for run in planned(base, ["preset"], 9)[0]] == ["deep"]


def test_listed_axes_go_on_with_draws_between(base):
    runs, _ = planned(base, ["sparsity", "units"], 40)
    sparsities, widths = ([run.value for run in runs if run.axis == axis] for axis in ("sparsity", "units"))
    assert sparsities[:4] == [0.45, 0.55, 0.4, 0.6] and len(set(sparsities)) == len(sparsities) > 12
    assert all(0.4 <= s <= 0.6 and s != 0.5 for s in sparsities)
    # Of 32 units there are 15 widths from .8 to 1.25 times as many: the axis ends there.
    assert widths[:4] == [29, 35, 26, 40] and set(widths) <= set(range(26, 41)) - {32} and len(set(widths)) == len(widths)
    near = Base(base.pool, base.train, {**base.options, "sparsity": 0.98}, 32, {}, 0)
    assert all(0 < float(run.value) < 1 for run in planned(near, ["sparsity"], 9)[0])


def test_what_cannot_be_varied_is_left_out_and_says_why(base):
    bare = Base(base.pool[:3], random_split(8), {"sparsity": 0.5, "preset": "paper"}, 32, {}, 0)
    runs, left_out = planned(bare, list(AXES), 12)
    assert {run.axis for run in runs} == {"prompts", "sparsity"}
    assert "preset 'paper'" in left_out["start"] and "one template" in left_out["templates"]
    assert "corpora=" in left_out["corpus"] and "fewer than four rows" in left_out["data"]


def test_some_prompts_of_a_split():
    split = random_split(6)
    few = split.at([4, 1])
    assert len(few) == 2 and few.tokens == (split.tokens[4], split.tokens[1]) and few.answer_ids[0] == split.answer_ids[4]
    assert sum(len(bucket.index) for bucket in few.buckets()) == 2 and not few.corrupt
    assert list(islice((e.prompt for e in few.examples), 2)) == ["prompt 4", "prompt 1"]
