"""Results in a notebook: each shows its numbers as a small card, whatever its tokens and names say."""

from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.circuits import Fidelity, Refinement, UnitScores
from swd_lens.factorization.allocation import Allocation, LossCurve, SiteBudget
from swd_lens.hosts import host_of
from swd_lens.study import ModelReplacement, Run, Samples, Sweep, SweepPoint
from swd_lens.study.generate import Continuation, Sample
from swd_lens.tasks.split import TaskExample
from swd_lens.units.factors import Factors, FactorSet
from tests.report.conftest import HOSTILE, HOSTILE_SURFACE, HOSTILE_TASK, Page

BAD = "<script>alert(1)</script> $\\bad$"


class Shown(Page):
    """What a notebook shows, and its text."""

    def __init__(self, result: Any):
        super().__init__(html := result._repr_html_())
        self.words = "".join(self.text)
        assert not {"script", "i", "img"} & set(self.tags) and not self.handlers()
        assert len(html) < 300_000 and self.words.strip()


def _factors(sites: int = 1) -> FactorSet:
    read, write = torch.eye(4, 6), torch.eye(6, 4)
    one = Factors(read, write, {"preset": BAD, "sparsity": 0.5}, {"site": BAD, "weights": "x" * 5000})
    return FactorSet({f"blocks.{i}.mlp_out": one for i in range(sites)}, {"model": BAD})


def _fidelity(sites: int = 2) -> Fidelity:
    return Fidelity(1.0, 1.25, 0.125, 0.75, {f"{BAD}{i}": 0.01 * i for i in range(sites)}, 1000)


def test_run_comparison_curve_and_scores(run: Run) -> None:
    shown = Shown(run)
    for r in run.replacements:
        assert r.surface in shown.words and r.method in shown.words
    assert HOSTILE_TASK in shown.words and "tiny <model>" in repr(run) and len(repr(run)) < 400
    comparison = run.comparisons[HOSTILE_SURFACE]
    both = Shown(comparison)
    assert "SWD s=0.75" in both.words and comparison.matching() in both.words and {"svg", "table"} <= set(both.tags)
    its = comparison[HOSTILE_TASK]
    curve, scores = its.curves["SWD s=0.5"], its.scores["SWD s=0.5"]
    assert {"svg", "table"} <= set(Shown(curve).tags)
    ranked = Shown(scores)
    assert "svg" in ranked.tags and scores.top(1)["unit"][0] in ranked.words


def test_small_objects(host: Any) -> None:
    stream, example = swd.TokenStream(lambda: iter(()), 3), TaskExample(BAD, ("a",), ("b",), meta={"from": BAD})
    for small, said in (
        (host_of(host).sites()[0], "hook of its units"),
        (example, BAD),
        (stream, "3 rows of"),
        (swd.types.FinetuneSpec(), "learning_rate"),
        (swd.types.QKPair(1, 0, 2, 4), "L1H0 q2×k4"),
    ):
        assert said in Shown(small).words


def test_circuit_and_refinement(run: Run) -> None:
    curve = run.comparisons["attention"]["other_way"].curves["SWD s=0.5"]
    whole, part = curve.circuit(30), curve.circuit(3)
    assert "and 10 more rows" in Shown(whole).words and part.names[0].split("/")[0] in Shown(part).words
    found = Refinement(whole, part, *[{"prefix": 1.0, "refined": 0.9}] * 2, pd.DataFrame(), 0.9)
    assert "other_way" in Shown(found).words and f"{1 - part.n_edges / whole.n_edges:.0%} fewer" in Shown(found).words


def test_factors_say_shapes_units_edges_and_settings() -> None:
    shown = Shown(_factors()["blocks.0.mlp_out"])
    for part in ("(4, 6)", "(6, 4)", "8 edges", "s=0.5000", "4 of 6 units", f"preset{BAD}"):
        assert part in shown.words
    many = Shown(_factors(30))
    assert "30 sites, 180 units, 240 edges" in many.words and "and 10 more rows" in many.words
    assert "blocks.19.mlp_out" in many.words and "blocks.20.mlp_out" not in many.words
    # Nothing at all, and very much.
    assert "0 sites" in Shown(FactorSet({})).words and "0 units" in Shown(UnitScores({}, {}, {})).words
    assert "0 replacements" in Shown(Run({}, [], {}, [], 0.0)).words
    scores = {"blocks.0.mlp_out": torch.linspace(-1, 1, 50_000)}
    shown = Shown(UnitScores(scores, scores, {"task": BAD}))
    assert "50,000 units" in shown.words and "blocks.0.mlp_out/49999" in shown.words


def test_a_loaded_set_is_shown_without_making_its_factors(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {site: replace(f, provenance={"site": site}) for site, f in _factors(2).items()}
    FactorSet(clean).save(tmp_path)
    loaded = FactorSet.load(tmp_path)

    def refused(self: Any) -> Any:
        raise AssertionError("a card made dense factors")

    monkeypatch.setattr("swd_lens.units.storage.StoredSite.parts", refused)
    assert "8" in Shown(loaded).words and loaded.table()["edges"].tolist() == [8, 8]


def test_fidelity_lists_the_worst_sites_first() -> None:
    shown = Shown(_fidelity(30))
    assert "+0.2500 nats" in shown.words and f"{BAD}29" in shown.words and f"{BAD}5" not in shown.words.replace("$5", "")
    assert "and 10 more rows" in shown.words


def test_studies(run: Run) -> None:
    curve = replace(run.comparisons["attention"]["other_way"].curves["SWD s=0.5"], task=BAD)
    points = [SweepPoint(s, z, 10, 4, 0.5, _fidelity(), {BAD: curve}) for s in (0.25, 0.5) for z in (True, False)]
    assert "4 points" in Shown(Sweep(points, (0.9,), (0.5,), 0.001, {})).words
    budget = SiteBudget(20, 10, 10, LossCurve((5, 10), (0.5, 0.1)))
    spent = Allocation(0.5, "kl", {}, {f"blocks.{i}.mlp_out": budget for i in range(25)})
    assert "250 edges over 25 matrices" in Shown(spent).words and "and 5 more rows" in Shown(spent).words
    one = Continuation((1, 2), "".join(HOSTILE) * 200, "length", None)
    other = replace(one, text=BAD, departs=0)
    by_host = {"dense": one, BAD: other}
    samples = Samples((Sample(BAD, (1,), by_host),), {"temperature": 0.0, "seed": 0})
    shown = Shown(samples)
    assert BAD in shown.words and "departs at 0" in shown.words and "…" in shown.words
    made = ModelReplacement(_factors(2), None, _fidelity(), None, spent, samples, {})
    assert "ModelReplacement: 2 matrices" in Shown(made).words and "250 edges" in Shown(made).words
