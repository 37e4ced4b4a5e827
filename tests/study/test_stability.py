"""stability on the embedded model: known answers, nulls, what is kept and taken over, what it refuses."""

from dataclasses import replace
from functools import cache
from importlib import import_module

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import ResumeError, TaskError
from swd_lens.study import stability_card
from swd_lens.study.variations import Base
from swd_lens.units.similarity import match_units
from tests.refusals import refuses

SITE, TASK = "blocks.2.attn_o", "gendered_pronoun"
VARY = tuple(axis for axis in stability_card.AXES if axis != "preset")  # with as few alternations only the slowest would differ
HOW = {"preset": "quick", "outer_iterations": 8, "progress": False}


@cache
def model():
    return swd.load_default_model()


@cache
def task():
    return swd.load_task(TASK, model(), n_train=40, n_validation=30, n_test=30)


@cache
def text():
    return swd.text_tokens(2_048, split="train")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("stability") / "card"


@pytest.fixture(scope="module")
def card(folder):
    corpora = {"held out": swd.text_tokens(1_024, split="test")}
    return swd.stability(model(), SITE, task(), tokens=text(), vary=VARY, n=8, nulls=2, corpora=corpora, out=folder, **HOW)


@pytest.mark.slow
def test_a_card_of_eight_axes(card):
    before = {name: p.clone() for name, p in swd.load_default_model().named_parameters()}
    assert all(torch.equal(p, before[name]) for name, p in model().named_parameters())
    assert list(card.runs["axis"]) == list(VARY) and not card.left_out
    shares = card.runs[["similarity", "edges shared", "claims recurring"]]
    assert ((shares >= 0) & (shares <= 1)).all().all()
    of_axis = card.runs.set_index("axis")
    # Prompts change the circuit and no unit.
    same = of_axis.loc[["prompts", "templates"], ["similarity", "similarity by number"]]
    assert same.to_numpy() == pytest.approx(1)
    assert (of_axis.loc[["start", "data", "sparsity", "units"], "similarity"] < 0.999).all()
    assert card.settings["basis"] == "input" and card.settings["preset"] == "quick"
    # The base beside itself.
    for name in ("similarity", "similarity of claimed", "contribution", "edges shared", "claims recurring"):
        assert card.base[name] == pytest.approx(1), name
    assert card.base["recovered"] > card.base["random recovered"] and card.base["units"] == len(card.claimed)


@pytest.mark.slow
def test_null_runs_score_at_chance(card):
    """Units of another matrix are no more alike than random atoms are; and claims do not recur."""
    nulls, runs = card.nulls, card.runs
    assert (nulls["similarity"] < 2 * nulls["similarity of atoms"].mean() + 0.05).all()
    assert nulls["similarity"].max() < 0.5 * runs["similarity"].min()
    assert (nulls["claims recurring"] < 0.2).all() and (nulls["edges shared"] < 0.2).all()
    assert abs(nulls["contribution"]).max() < 0.5
    # Of a matrix that nothing asks for, units come out alike from two starts all the same: similarity alone says little.
    assert (nulls["similarity across starts"] > 3 * nulls["similarity"]).all()
    assert not any(each.met(card.table()["null"].iloc[i]) for i, each in enumerate(stability_card.CRITERIA[:2]))


@pytest.mark.slow
def test_the_same_call_takes_everything_over_and_a_longer_one_adds(card, folder, monkeypatch):
    module = import_module("swd_lens.study.stability")  # the package has the function under this name
    corpora = {"held out": swd.text_tokens(1_024, split="test")}
    how = {"tokens": text(), "vary": VARY, "corpora": corpora, "out": folder, **HOW}
    measured = []
    run = module._Measured.run

    def counted(self, variation):
        measured.append(variation.axis)
        return run(self, variation)

    monkeypatch.setattr(module._Measured, "run", counted)
    again = swd.stability(model(), SITE, task(), n=8, nulls=2, **how)
    assert measured == [] and again.verdict == card.verdict
    pd.testing.assert_frame_equal(again.runs, card.runs)
    pd.testing.assert_frame_equal(stability_card.Stability.load(folder / "stability.json").nulls, card.nulls)
    longer = swd.stability(model(), SITE, task(), n=9, nulls=2, **how)
    assert measured == ["start"] and longer.runs["value"].tolist()[-1] == "2"
    refuses(ResumeError, "recovered", swd.stability, model(), SITE, task(), n=8, nulls=2, recovered=0.8, **how)


def test_two_runs_that_differ_in_nothing_are_the_same():
    """The base's own setting once more, with the basis that it was told said aloud."""
    rows = Base(text(), task().train, {"sparsity": 0.75, "preset": "quick"}, 0, {}, 0).drawn(0)
    how = {"sparsity": 0.75, "tokens": rows, **HOW}
    plain, told = (swd.factorize(model(), SITE, **how, **more)[SITE] for more in ({}, {"basis": "input"}))
    match = match_units(plain, told)
    assert match.similarity.min() == pytest.approx(1) and match.partner.tolist() == list(range(128))


def test_what_it_refuses():
    call = {"tokens": text(), **HOW}
    refuses(ValueError, "n, the number of runs", swd.stability, model(), SITE, task(), n=1, **call)
    refuses(ValueError, "vary must be one of 'start'", swd.stability, model(), SITE, task(), vary=("seed",), **call)
    refuses(ValueError, "names 4 sites", swd.stability, model(), "mlp_out", task(), **call)
    refuses(ValueError, "does not carry gendered_pronoun", swd.stability, model(), "blocks.3.attn_o", task(), **call)
    with pytest.raises(ValueError, match=r"fewer than two runs .*corpus: no other text"):
        swd.stability(model(), SITE, task(), vary=("corpus",), **call)
    metric = replace(task(), test=replace(task().test, metric=lambda logits, examples: logits[:, 0]))
    refuses(TaskError, "metric in the margin's place", swd.stability, model(), SITE, metric, **call)
