"""A goal in place of a sparsity: it is kept, nearly met, found with few trials, and found again after an interruption."""

import math
from functools import cache

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import BudgetError, ResumeError
from swd_lens.base.progress import tqdm
from swd_lens.factorization import goal
from swd_lens.factorization.goal import (
    CLOSE,
    DENSEST,
    FINEST,
    LOOKS,
    SPARSEST,
    STEPS,
    WIDE,
    Goal,
    GoalSearch,
    fitted_rows,
    next_sparsity,
    scaled,
)
from swd_lens.tasks.streams import as_stream

SITE = "blocks.2.attn_o"


@cache
def model():
    return swd.load_default_model()


@cache
def text():
    return swd.text_tokens(2_048, split="train")


@cache
def pruned():
    return factors_at(preset="pruned")


def factors_at(site: str | list[str] = SITE, **settings):
    return swd.factorize(model(), site, **{"tokens": text(), "kl": 1e-3, "progress": False} | settings)


def searched(log_of):
    """Points of a search over a known curve."""
    points = []
    while len(points) < STEPS and (s := next_sparsity(points, 0.5)) is not None:
        points.append((s, log_of(s)))
    return points


@pytest.mark.parametrize("slope", [3.0, 9.0, 30.0])
@pytest.mark.parametrize("end", [0.1, 0.5, 0.7, 0.95])
@pytest.mark.parametrize("bend", [0.0, 2.0])
def test_the_goal_is_met_on_known_curves(slope, end, bend):
    points = searched(lambda s: slope * (s - end) - bend * (s - end) ** 2)
    best = max(point for point in points if point[1] <= 0)
    finest = any(0 < s - best[0] <= FINEST for s, log in points if log > 0)
    assert math.log(CLOSE) <= best[1] or finest
    assert all(DENSEST <= s <= SPARSEST for s, _ in points)


def test_curves_that_never_meet_the_goal_and_sparsities_that_cannot_be_made():
    assert max(searched(lambda s: -20.0 + s))[0] == SPARSEST
    lost = searched(lambda s: 5.0 + 9 * s)
    assert min(lost)[0] == DENSEST and all(log > 0 for _, log in lost)
    points = searched(lambda s: math.inf if s > 0.8 else -8.0 + s)
    assert 0.75 < max(point for point in points if point[1] <= 0)[0] <= 0.8


def test_the_end_of_a_path_keeps_the_goal_on_text_that_it_was_not_fitted_on():
    before = {name: p.clone() for name, p in model().named_parameters()}
    factors = pruned()
    assert all(torch.equal(p, before[name]) for name, p in model().named_parameters())
    n = math.ceil(len(text()) / 4)
    judged = swd.fidelity(model(), factors, text()[-n:])
    tried = factors.tried
    taken = tried[tried["taken"]].iloc[0]
    assert taken["KL judged"] == pytest.approx(judged.kl, rel=1e-6) and CLOSE * 1e-3 <= taken["KL"] <= 1e-3
    assert int(taken["edges"]) == factors.edges and set(tried["method"]) == {"as given"}
    assert int(tried["taken"].sum()) == 1
    fitted = swd.factorize(model(), SITE, tokens=text()[:-n], sparsity=float(taken["s"]), preset="pruned", progress=False)
    assert torch.equal(fitted[SITE].read, factors[SITE].read) and fitted.tried.empty  # without a goal nothing is tried
    assert f"KL {taken['KL']:.3g}" in str(factors)


def test_the_end_of_a_path_is_measured_on_fitted_rows_too():
    """KL of all rows, that of fitted ones times how much larger the units' error is where nothing was fitted."""
    factors = pruned()
    taken, n = factors.provenance["goal"]["chosen"], math.ceil(len(text()) / 4)
    judged, fitted = (swd.fidelity(model(), factors, rows, local=True) for rows in (text()[-n:], text()[:-n]))
    flattered = judged.local_relmse[SITE] / fitted.local_relmse[SITE]
    assert taken["KL"] == pytest.approx((judged.kl * n + flattered * fitted.kl * (len(text()) - n)) / len(text()), rel=1e-5)
    assert 0 < taken["KL se"] < swd.fidelity(model(), factors, text()[-n:]).kl
    assert fitted_rows(*goal.divided(model(), text(), None)).n_rows == len(text()) - n
    long = as_stream(swd.text_tokens(4 * WIDE, split="train"), model())
    assert fitted_rows(*goal.divided(model(), long, None)) is None


@pytest.mark.parametrize("flattering", [0.4, 0.7, 1.0, 1.3, 2.5])
def test_what_more_text_says_counts(flattering, monkeypatch):
    """The judged rows say a share of the truth, the wider text says it: the search ends where the truth keeps the goal."""
    fitted, judged = goal.divided(model(), text(), None)
    search = GoalSearch(model(), Goal(kl=1.0), {"as given": {}}, fitted, judged, lambda *_: swd.FactorSet({}), wide=fitted)
    calls = []

    def true_kl(s):
        return math.exp(9 * (s - 0.62))

    def trial(self, path, s):
        row = {"s": s, "excess": flattering * true_kl(s) * (1 + 0.05 * math.sin(40 * s))}
        calls.append(s)
        return row, None

    def wide(self, path, row, factors):
        return {"excess judged": row["excess"], "excess": true_kl(row["s"])}

    monkeypatch.setattr(GoalSearch, "_trial", trial)
    monkeypatch.setattr(GoalSearch, "_wide_row", wide)
    end, _ = search._end_of("as given", 0.5, tqdm(disable=True), looks=search.wide is not None)
    assert 0.8 <= true_kl(end["s"]) <= 1.0 and len(calls) <= STEPS + LOOKS
    search.wide = None
    alone, _ = search._end_of("as given", 0.5, tqdm(disable=True), looks=search.wide is not None)
    assert flattering * true_kl(alone["s"]) <= 1.06


@pytest.mark.slow
def test_of_all_paths_the_one_whose_effects_take_the_fewest_edges():
    factors = factors_at()
    tried, sites = factors.tried, swd.find_sites(model(), SITE)
    assert set(tried["method"]) == set(goal.paths_of(sites, "best", None, {}))
    ends = tried.dropna(subset=["text edges"])
    assert len(ends) == len(set(ends["method"])) and (ends["KL"] <= 1e-3).all()
    assert ends["text edges"].idxmin() == tried["taken"].idxmax() and tried["taken"].sum() == 1


def test_a_goal_of_cross_entropy_and_one_of_both():
    factors = factors_at(kl=None, ce=2e-3, preset="pruned")
    taken = factors.provenance["goal"]["chosen"]
    assert taken["CE delta"] <= 2e-3 and factors.provenance["goal"]["kl"] is None
    both = Goal(kl=1e-3, ce=1e-2)
    assert both.excess({"KL": 5e-4, "CE delta": 5e-3}) == pytest.approx(0.5)
    assert both.excess({"KL": 5e-4, "CE delta": 2e-2}) == pytest.approx(2.0)
    assert str(both) == "KL at most 0.001 and CE delta at most 0.01"


def test_given_budgets_are_scaled_alike():
    given = {"blocks.1.attn_o": 0.5, "blocks.2.attn_o": 0.7}
    factors = factors_at(list(given), preset="pruned", sparsity=given, kl=2e-3)
    density = {name: 1 - factors[name].sparsity for name in given}
    assert density["blocks.1.attn_o"] / density["blocks.2.attn_o"] == pytest.approx(5 / 3, rel=0.01)
    assert factors.sparsity == pytest.approx(factors.provenance["goal"]["chosen"]["s"], abs=1e-3)
    sites = swd.find_sites(model(), list(given))
    assert scaled(sites, given, 0.1) == pytest.approx({"blocks.1.attn_o": DENSEST, "blocks.2.attn_o": 0.325})


def test_held_out_text_of_the_callers_and_positions_that_do_not_count():
    heldout = swd.text_tokens(2_048, split="validation")
    factors = factors_at(preset="pruned", heldout_tokens=heldout, exclude="special")
    said = factors.provenance["goal"]["chosen"]
    judged = swd.fidelity(model(), factors, heldout, exclude="special")
    assert said["KL"] == pytest.approx(judged.kl, rel=1e-6) and "KL judged" not in said
    assert judged.kl != pytest.approx(swd.fidelity(model(), factors, heldout).kl, rel=1e-6)
    assert factors.provenance["tokens"] < text().numel()


@pytest.mark.slow
def test_an_interrupted_search_goes_on_and_a_finished_one_is_there(tmp_path, monkeypatch):
    asked = {"out": tmp_path / "goal", "preset": "quick"}
    whole, calls, measure = factors_at(preset="quick"), [], goal.fidelity

    def interrupted(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return measure(*args, **kwargs)

    monkeypatch.setattr(goal, "fidelity", interrupted)
    with pytest.raises(KeyboardInterrupt):
        factors_at(**asked)
    found = factors_at(**asked)
    looked = int(whole.tried["KL judged"].notna().sum())  # ends, measured on both texts
    assert len(calls) == 1 + len(whole.tried) + 2 * looked  # the one that was interrupted was measured again, no other
    assert torch.equal(found[SITE].write, whole[SITE].write) and found.sparsity == whole.sparsity
    n = len(calls)
    again = factors_at(**asked)
    assert len(calls) == n and torch.equal(again[SITE].read, whole[SITE].read)
    loaded = swd.FactorSet.load(tmp_path / "goal")
    assert list(loaded.tried["s"]) == list(whole.tried["s"]) and not (tmp_path / "goal" / "trials").exists()
    with pytest.raises(ResumeError, match=r"KL at most 0\.002"):
        factors_at(**asked, kl=2e-3)
    monkeypatch.setattr(goal.GoalSearch, "saved", None)  # the next one is interrupted at its very end
    with pytest.raises(TypeError):
        factors_at(**asked, overwrite=True)
    monkeypatch.undo()
    again = factors_at(**asked)
    assert torch.equal(again[SITE].read, whole[SITE].read)
    anew = factors_at(**asked, kl=2e-3, overwrite=True)
    assert anew.sparsity > whole.sparsity and swd.FactorSet.load(tmp_path / "goal").sparsity == anew.sparsity


def test_a_matrix_of_too_few_edges_says_so():
    with pytest.raises(BudgetError):
        factors_at(preset="best", units=16_384)
