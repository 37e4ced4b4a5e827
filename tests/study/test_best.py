"""best_circuit: the goal is kept, choice is apart from judgement, and what was tried is said."""

from dataclasses import replace
from functools import cache

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import ResumeError
from swd_lens.circuits import attribute
from swd_lens.circuits.evaluate import evaluate_circuits
from swd_lens.circuits.measure import contents_of
from swd_lens.study.best import BY_HEAD, FIRST, BestCircuit, _between, _part
from swd_lens.tasks.streams import as_stream
from swd_lens.units.factors import FactorSet
from tests.study.conftest import of_one_length

pytestmark = pytest.mark.usefixtures("few_alternations", "few_steps")
EXACT = ["neurons", "SVD", "SVD whitened", BY_HEAD.title]
SITE, TASK = "blocks.2.attn_o", "gendered_pronoun"


@pytest.fixture(scope="module")
def few_steps():
    """Of each path two sparsities, where a search takes up to seven (how near to the goal it ends is a matter of goal.py), and
    two rounds of a few prompts instead of three."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (("STEPS", 2), ("SHARES", (0.25, 1.0)), ("FEWEST", 12)):
            patch.setattr(f"swd_lens.study.best.{name}", value)
        yield


@cache
def model():
    return swd.load_default_model()


@cache
def task():
    return of_one_length(TASK, model(), 24, 20)


def best_again(**settings):
    text = swd.text_tokens(4_096, split="train")
    return swd.best_circuit(model(), task(), SITE, tokens=text, progress=False, **settings)


best_at_site = cache(best_again)


def test_the_winner_keeps_the_goal_and_needs_the_fewest_edges():
    before = {name: p.clone() for name, p in model().named_parameters()}
    best = best_at_site()
    assert all(torch.equal(p, before[name]) for name, p in model().named_parameters())
    tried = best.table()
    assert set(tried["outcome"]) >= {"the best"} and (tried["outcome"] != "").all()
    winner = tried[tried["outcome"] == "the best"].iloc[0]
    assert winner["method"] == best.method and winner["KL"] == best.fidelity.kl <= 1e-3
    whole = tried[tried["of"] == 1.0].dropna()
    assert int(winner["edges"]) == int(whole["edges"].astype(int).min())
    kept = ~tried["outcome"].eq("over the goal")
    assert (tried["KL"][kept] <= 1e-3).all()
    out = tried[~kept]
    assert all(kl > 1e-3 or ce > 1e-3 for kl, ce in zip(out["KL"], out["CE delta"], strict=True))
    exact = tried[tried["method"].isin(EXACT)]
    assert len(exact) == 4 and float(exact["KL"].abs().max()) < 1e-6


def test_what_is_said_of_the_circuit_is_what_it_does_on_test_prompts(tmp_path):
    best = best_at_site()
    again = evaluate_circuits(model(), best.factors, task().test, {"circuit": best.circuit})
    assert again["recovered"].iloc[0] == pytest.approx(best.test["recovered"].iloc[0], abs=1e-6)
    assert best.n_edges == best.circuit.n_edges == int(again["edges"].iloc[0])
    assert best.circuit.provenance["chosen_by"] == "best_circuit"
    words = best.in_words()
    assert f"{best.n_edges:,} edges" in words and best.method in words and "(goal 0.001)" in words
    assert ("no small circuit" in words) == (not best.is_small)
    fewer = best.tried.assign(edges=best.n_edges - 1)
    assert f"A prefix of {best.n_edges - 1:,} edges" in replace(best, tried=fewer).in_words()
    assert "A prefix of" not in replace(best, tried=fewer.assign(edges=best.n_edges)).in_words()
    back = BestCircuit.from_dict(best.as_dict())
    assert back.in_words() == words and back.circuit is None
    alone = replace(best, null=None)
    assert "It has all units, so that no random circuits" in BestCircuit.from_dict(alone.as_dict()).in_words()
    loaded = BestCircuit.load(best.save(tmp_path / "best"))
    assert loaded.circuit is not None and loaded.factors is not None
    assert loaded.in_words() == words and loaded.circuit.units == best.circuit.units
    assert torch.equal(loaded.factors[SITE].read, best.factors[SITE].read)


@pytest.mark.slow
def test_test_prompts_choose_nothing():
    """But for how many contents they have, which says how sure a circuit has to be that it holds there (refine.py)."""
    n = len(set(contents_of(task().test)))
    others = (of_one_length(TASK, model(), 24, 20, seed=s).test for s in range(1, 30))
    other = next(split for split in others if len(set(contents_of(split))) == n)
    assert other.examples != task().test.examples
    with_other_test = swd.best_circuit(
        model(), replace(task(), test=other), SITE, tokens=swd.text_tokens(4_096, split="train"), progress=False, minutes=1e-9
    )
    assert with_other_test.circuit.units == best_at_site(minutes=1e-9).circuit.units
    kept = [best.table().drop(columns="seconds") for best in (with_other_test, best_at_site(minutes=1e-9))]
    pd.testing.assert_frame_equal(*kept)


@pytest.mark.slow
def test_a_goal_that_only_exact_units_keep():
    best = best_at_site(kl=1e-9)
    assert best.method in EXACT
    tried = best.table()
    assert (tried["outcome"][4:] == "over the goal").all()
    assert {f"SWD s={FIRST:g}", "SWD s=0.25"} <= set(tried["method"])


def test_without_time_the_table_says_what_was_not_tried_and_the_winner_is_measured_on_all_of_the_text(monkeypatch):
    """But on nothing of it that is left out."""
    monkeypatch.setattr("swd_lens.study.best.JUDGED", 256)  # two of the eight rows that are held out
    text = as_stream(swd.text_tokens(4_096, split="train"), model(), exclude="special")
    best = swd.best_circuit(model(), task(), SITE, tokens=text, progress=False, minutes=1e-9)
    left = [f"{m} s=0.5" for m in ("Neurons pruned", "SVD pruned", "SWD", "SWD from neurons")]
    assert f"Not tried for want of time (minutes=1e-09): {', '.join(left)}, refining." in best.in_words()
    assert len(best.table()) == 4 and best.settings["not tried"] == [*left, "refining"]
    assert best.circuit.provenance["kind"] == "prefix" and (best.table()["outcome"] != "").all()
    assert best.fidelity.text["left_out"] > 0 and best.fidelity.text["exclude"] == "special"
    assert 2 * 127 < best.fidelity.n_predictions < 8 * 127
    over = replace(best, fidelity=replace(best.fidelity, kl=2e-3))
    assert "over the goal" in over.in_words() and "over the goal" not in best.in_words()


def _same(one, other):
    """Whether two searches found the same circuit in the same way."""
    assert one.circuit.units == other.circuit.units and one.in_words() == other.in_words()
    pd.testing.assert_frame_equal(one.table().drop(columns="seconds"), other.table().drop(columns="seconds"))
    pd.testing.assert_frame_equal(one.test, other.test)


@pytest.mark.slow
def test_an_interrupted_search_goes_on_where_it_was(tmp_path, monkeypatch):
    """Nothing that was finished is made again, and the result is that of a call that was never interrupted."""
    calls = []

    def third(*arguments, **named):
        calls.append(arguments)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return attribute(*arguments, **named)

    how = {"minutes": 1e-9, "out": tmp_path / "best"}
    with monkeypatch.context() as patch:
        patch.setattr("swd_lens.study.best.attribute", third)
        with pytest.raises(KeyboardInterrupt, match="best_circuit was interrupted"):
            best_again(**how)
    assert len(FactorSet.load(tmp_path / "best" / "candidates" / "SVD-whitened")) == 1
    saved, save = [], FactorSet.save
    with monkeypatch.context() as patch:
        patch.setattr(FactorSet, "save", lambda self, folder: saved.append(folder.name) or save(self, folder))
        patch.setattr("swd_lens.study.best.attribute", lambda *a, **n: calls.append(a) or attribute(*a, **n))
        found = best_again(**how)
    assert saved == ["factors"] and len(calls) > 3
    _same(found, best_at_site(minutes=1e-9))
    n = len(calls)
    held = best_again(**how)
    assert len(calls) == n and held.in_words() == found.in_words()
    with pytest.raises(ResumeError, match=r"kl 0.001 then, 0.01 now"):
        best_again(kl=0.01, **how)


@pytest.mark.slow
def test_what_was_overwritten_is_no_answer(tmp_path, monkeypatch):
    """A search that is interrupted after overwrite=True goes on as itself, not as the one whose best.json still lies there."""
    how = {"minutes": 1e-9, "out": tmp_path}
    best_again(**how)
    with monkeypatch.context() as patch:
        patch.setattr("swd_lens.study.best.evaluate", lambda *_, **__: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            best_again(kl=0.01, overwrite=True, **how)
    assert best_again(kl=0.01, **how).settings["kl"] == 0.01


@pytest.mark.slow
def test_with_more_time_it_looks_further(tmp_path):
    short = best_again(minutes=1e-9, out=tmp_path)
    assert short.settings["not tried"]
    _same(best_again(minutes=10.0, out=tmp_path), best_at_site())


@pytest.mark.slow
def test_without_a_site_the_one_that_the_task_needs_most():
    screened = swd.screen(model(), task(), sites=["attn_o", "mlp_out"], surfaces={})
    text = swd.text_tokens(4_096, split="train")
    best = swd.best_circuit(model(), task(), tokens=text, progress=False, minutes=1e-9)
    assert [best.settings["sites"]] == list(screened.choose().values())


def test_between():
    assert _between(8, 100) == [7, 8] and _between(1, 100) == [1] and _between(0, 100) == []
    assert _between(128, 512)[-1] == 128 and len(_between(128, 512)) == 8 and min(_between(128, 512)) > 96
    assert [len(_part(task().train, share)) for share in (0.25, 0.75, 1.0)] == [12, 18, 24]
