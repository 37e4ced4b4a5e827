"""Stability cards: criteria by hand, verdicts, files; and how often chance meets the criteria (simulated)."""

import math

import numpy as np
import pandas as pd
import pytest
import torch

from swd_lens.study.stability import re_paired
from swd_lens.study.stability_card import CRITERIA, MEASURES, OF_NULLS, Stability, judged
from tests.micro import random_split


def rows_of(axes: list[str], **values) -> pd.DataFrame:
    usual = {name: 1.0 for name in MEASURES} | {"random recovered": 0.2, "re-paired drop": 0.5}
    columns = {name: values.get(name.replace(" ", "_").replace("-", "_"), value) for name, value in usual.items()}
    rows = pd.DataFrame({"axis": axes, "value": [str(i) for i in range(len(axes))], "carries": True})
    return rows.assign(**{name: np.broadcast_to(value, len(axes)).astype(float) for name, value in columns.items()})


def card_of(runs: pd.DataFrame, nulls: pd.DataFrame | None = None, **changed) -> Stability:
    nulls = runs.iloc[:0].assign(**{name: [] for name in OF_NULLS}) if nulls is None else nulls
    return Stability(
        "toy", "blocks.0.mlp_out", [3, 5], {"edges": 9.0}, runs, nulls, {"corpus": "no other text"}, {"n": 3} | changed
    )


def test_every_axis_counts_the_same():
    runs = rows_of(["start", "start", "start", "data"], edges_shared=[0.2, 0.4, 0.6, 1.0], drop=[1, 1, 1, 3])
    values = judged(runs)
    assert values["edges shared"] == pytest.approx((0.4 + 1.0) / 2)
    assert values["over a re-paired task"] == pytest.approx(2 / 0.5)
    assert values["over random units"] == pytest.approx(5)


def test_the_coefficient_of_variation_by_hand():
    """One axis: the usual sd (n - 1) over the mean; 1, 2, 3 have sd 1 and mean 2."""
    assert judged(rows_of(["data"] * 3, recovered=[1, 2, 3]))["CV of recovered"] == pytest.approx(0.5)
    assert math.isnan(judged(rows_of(["data"], recovered=[1]))["CV of recovered"])
    assert math.isnan(judged(rows_of(["data"] * 2, recovered=[-1, 0.5]))["CV of recovered"])
    unknown = judged(rows_of(["data"] * 3, recovered=[1, math.nan, 3]))
    assert unknown["CV of recovered"] == pytest.approx(2**0.5 / 2)


def test_ratios_to_nothing():
    assert judged(rows_of(["data"] * 2, random_recovered=[-0.1, 0.0]))["over random units"] == math.inf
    assert math.isnan(judged(rows_of(["data"] * 2, random_recovered=[-0.1, 0.0], recovered=[0, 0]))["over random units"])


def test_the_verdict_names_what_is_not_met_and_where():
    stable = card_of(rows_of(["start", "data"]))
    assert stable.stable and stable.verdict.startswith("Stable (2 units of blocks.0.mlp_out for toy, 2 runs along 2 axes)")
    assert stable.table()["met"].all() and list(stable.table()["criterion"]) == [each.name for each in CRITERIA]
    shaky = card_of(rows_of(["start", "data"], edges_shared=[0.3, 0.9], random_recovered=0.5))
    assert not shaky.stable
    assert "edges shared 0.60 (at least 0.8 is asked); over random units 2.00 (at least 3 is asked)" in shaky.verdict
    assert "fewest edges along start" in shaky.verdict and "0.30" in shaky.verdict
    assert "Not varied: corpus: no other text." in shaky.notes()
    unknown = card_of(rows_of(["start", "data"], recovered=math.nan))
    assert not unknown.stable and "over random units unknown" in unknown.verdict
    lost = rows_of(["start", "data"]).assign(carries=[True, False])
    assert "In 1 of 2 runs the surface does not carry the task" in " ".join(card_of(lost).notes())


def test_thresholds_are_those_fixed_beforehand():
    asked = {"edges shared": 0.8, "claims recurring": 0.8, "CV of recovered": 0.25, "over random units": 3}
    assert {each.name: each.threshold for each in CRITERIA} == asked | {"over a re-paired task": 1.5}
    for each in CRITERIA:
        step = 1e-9 if each.at_least else -1e-9
        assert each.met(each.threshold) and not each.met(each.threshold - step) and not each.met(math.nan)


def test_a_card_is_saved_and_shown(tmp_path):
    nulls = rows_of(["null"] * 2, similarity=0.1).assign(**{"similarity of atoms": 0.05, "similarity across starts": math.nan})
    card = card_of(rows_of(["start", "data"], recovered=[0.9, math.nan]), nulls)
    card.save(tmp_path / "card.json")
    again = Stability.load(tmp_path / "card.json")
    assert again.verdict == card.verdict and again.claimed == [3, 5] and again.left_out == card.left_out
    pd.testing.assert_frame_equal(again.table(), card.table())
    pd.testing.assert_frame_equal(again.runs, card.runs)
    assert "random atoms 0.05" in " ".join(card.notes()) and "rotated start" not in " ".join(card.notes())
    assert card.verdict.split("(")[0] in card._repr_html_() and len(card.figure().axes) == 4
    assert list(card.by_axis()["axis"]) == ["start", "data", "null"]


# ---------------------------------------------------------------------------------------------- what chance does


def test_a_re_paired_task_keeps_the_prompts_and_deals_the_answers():
    """Answers alternate between two tokens: an effect on each prompt's own answer is specific, one on the same token is not."""
    split = random_split(40)
    answers = tuple((i % 2,) for i in range(40))
    split = type(split)(split.name, split.examples, split.tokens, answers, tuple((1 - i % 2,) for i in range(40)), split.d_vocab)
    ids = split.token_ids.tolist()
    assert ids == [0, 1]
    own = torch.zeros(40, 2, dtype=torch.float64)
    own[torch.arange(40), torch.arange(40) % 2] = 1.0  # each prompt loses a logit of its own answer
    drop, dealt = re_paired(own, split, seed=0)
    assert drop == pytest.approx(1.0) and dealt < 0.4
    always = torch.tensor([[1.0, 0.0]], dtype=torch.float64).expand(40, 2)  # token 0 whatever the prompt
    drop, dealt = re_paired(always, split, seed=0)
    assert drop == pytest.approx(0.0, abs=1e-12) and dealt == pytest.approx(0.0, abs=1e-12)
    one_answer = type(split)(split.name, split.examples, split.tokens, ((0,),) * 40, ((1,),) * 40, split.d_vocab)
    drop, dealt = re_paired(always, one_answer, seed=0)
    assert drop == pytest.approx(dealt) == pytest.approx(1.0)  # the same answer everywhere: nothing is specific to a prompt


def test_effects_that_know_nothing_of_the_prompts_answers_are_seldom_specific():
    """Noise on every prompt's logits: over 24 runs the ratio is above 1.5 in far fewer than one card in twenty."""
    split, generator, cards = random_split(30), torch.Generator().manual_seed(0), []
    shape = 30, len(split.token_ids)
    for _ in range(60):
        effects = [torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in range(24)]
        runs = [re_paired(effect, split, seed=i) for i, effect in enumerate(effects)]
        drop, dealt = (sum(each) / len(runs) for each in zip(*runs, strict=True))
        cards.append(drop / dealt)
    assert sum(ratio >= 1.5 for ratio in cards) <= 1
