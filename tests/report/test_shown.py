"""Results in a notebook: each shows its numbers as a small card, whatever its tokens and names say."""

from dataclasses import replace
from html.parser import HTMLParser
from typing import Any

import pandas as pd
import pytest
import torch

from swd_lens.circuits import Fidelity, Refinement, UnitScores
from swd_lens.factorization.allocation import Allocation, LossCurve, SiteBudget
from swd_lens.study import ModelReplacement, Run, Samples, Sweep, SweepPoint
from swd_lens.study.generate import Continuation, Sample
from swd_lens.units.factors import Factors, FactorSet
from tests.report.conftest import HOSTILE, HOSTILE_SURFACE, HOSTILE_TASK

BAD = "<script>alert(1)</script> $\\bad$"


class Tags(HTMLParser):
    def __init__(self, html: str):
        super().__init__()
        self.seen: set[str] = set()
        self.text = ""
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen |= {tag, *(name for name, _ in attrs if name.startswith("on"))}

    def handle_data(self, data: str) -> None:
        self.text += data


def _shown(result: Any) -> Tags:
    html = result._repr_html_()
    tags = Tags(html)
    assert not tags.seen & {"script", "i", "img", "onload"}
    assert len(html) < 300_000 and tags.text.strip()
    return tags


def _factors(sites: int = 1) -> FactorSet:
    read, write = torch.eye(4, 6), torch.eye(6, 4)
    one = Factors(read, write, {"preset": BAD, "sparsity": 0.5}, {"site": BAD, "weights": "x" * 5000})
    return FactorSet({f"blocks.{i}.mlp_out": one for i in range(sites)}, {"model": BAD})


def _fidelity(sites: int = 2) -> Fidelity:
    return Fidelity(1.0, 1.25, 0.125, 0.75, {f"{BAD}{i}": 0.01 * i for i in range(sites)}, 1000)


def test_run_comparison_curve_and_scores(run: Run) -> None:
    shown = _shown(run)
    for r in run.replacements:
        assert r.surface in shown.text and r.method in shown.text
    assert HOSTILE_TASK in shown.text and "tiny <model>" in repr(run) and len(repr(run)) < 400
    comparison = run.comparisons[HOSTILE_SURFACE]
    both = _shown(comparison)
    assert "SWD s=0.75" in both.text and comparison.matching() in both.text and {"svg", "table"} <= both.seen
    its = comparison[HOSTILE_TASK]
    curve, scores = its.curves["SWD s=0.5"], its.scores["SWD s=0.5"]
    assert {"svg", "table"} <= _shown(curve).seen
    ranked = _shown(scores)
    assert "svg" in ranked.seen and scores.top(1)["unit"][0] in ranked.text


def test_run_without_anything() -> None:
    assert "0 replacements" in _shown(Run({}, [], {}, [], 0.0)).text


def test_circuit_and_refinement(run: Run) -> None:
    curve = run.comparisons["attention"]["other_way"].curves["SWD s=0.5"]
    whole, part = curve.circuit(30), curve.circuit(3)
    assert "and 10 more rows" in _shown(whole).text and part.names[0].split("/")[0] in _shown(part).text
    found = Refinement(whole, part, *[{"prefix": 1.0, "refined": 0.9}] * 2, pd.DataFrame(), 0.9)
    assert "other_way" in _shown(found).text and f"{1 - part.n_edges / whole.n_edges:.0%} fewer" in _shown(found).text


def test_factors_say_shapes_units_edges_and_settings() -> None:
    shown = _shown(_factors()["blocks.0.mlp_out"])
    for part in ("(4, 6)", "(6, 4)", "8 edges", "s=0.5000", "4 of 6 units", f"preset{BAD}"):
        assert part in shown.text
    many = _shown(_factors(30))
    assert "30 sites, 180 units, 240 edges" in many.text and "and 10 more rows" in many.text
    assert "blocks.19.mlp_out" in many.text and "blocks.20.mlp_out" not in many.text
    assert "0 sites" in _shown(FactorSet({})).text


def test_a_loaded_set_is_shown_without_making_its_factors(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    clean = {site: replace(f, provenance={"site": site}) for site, f in _factors(2).items()}
    FactorSet(clean).save(tmp_path)
    loaded = FactorSet.load(tmp_path)

    def refused(self: Any) -> Any:
        raise AssertionError("a card made dense factors")

    monkeypatch.setattr("swd_lens.units.storage.StoredSite.parts", refused)
    assert "8" in _shown(loaded).text and loaded.table()["edges"].tolist() == [8, 8]


def test_fidelity_lists_the_worst_sites_first() -> None:
    shown = _shown(_fidelity(30))
    assert "+0.2500 nats" in shown.text and f"{BAD}29" in shown.text and f"{BAD}5" not in shown.text.replace("$5", "")
    assert "and 10 more rows" in shown.text


def test_studies(run: Run) -> None:
    curve = replace(run.comparisons["attention"]["other_way"].curves["SWD s=0.5"], task=BAD)
    points = [SweepPoint(s, z, 10, 4, 0.5, _fidelity(), {BAD: curve}) for s in (0.25, 0.5) for z in (True, False)]
    assert "4 points" in _shown(Sweep(points, (0.9,), (0.5,), 0.001, {})).text
    budget = SiteBudget(20, 10, 10, LossCurve((5, 10), (0.5, 0.1)))
    spent = Allocation(0.5, "kl", {}, {f"blocks.{i}.mlp_out": budget for i in range(25)})
    assert "250 edges over 25 matrices" in _shown(spent).text and "and 5 more rows" in _shown(spent).text
    one = Continuation((1, 2), "".join(HOSTILE) * 200, "length", None)
    other = replace(one, text=BAD, departs=0)
    by_host = {"dense": one, BAD: other}
    samples = Samples((Sample(BAD, (1,), by_host),), {"temperature": 0.0, "seed": 0})
    shown = _shown(samples)
    assert BAD in shown.text and "departs at 0" in shown.text and "…" in shown.text
    made = ModelReplacement(_factors(2), None, _fidelity(), None, spent, samples, {})
    assert "ModelReplacement: 2 matrices" in _shown(made).text and "250 edges" in _shown(made).text


def test_scores_of_nothing_and_of_many() -> None:
    assert "0 units" in _shown(UnitScores({}, {}, {})).text
    many = torch.linspace(-1, 1, 50_000)
    shown = _shown(UnitScores({"blocks.0.mlp_out": many}, {"blocks.0.mlp_out": many}, {"task": BAD}))
    assert "50,000 units" in shown.text and "blocks.0.mlp_out/49999" in shown.text
