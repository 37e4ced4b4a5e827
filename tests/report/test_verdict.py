"""The report's verdict: at most three sentences, whose winners are worked by hand."""

from dataclasses import replace
from typing import Any

import pytest

from swd_lens.circuits import Fidelity
from swd_lens.circuits.comparison import Comparison, TaskComparison
from swd_lens.report import verdict as module
from swd_lens.report.page import render_report
from swd_lens.report.verdict import verdict
from swd_lens.study import Run
from swd_lens.study.run import FactorsRecord, Replacement
from tests.circuits.worked import by_hand


def curve(edges: int, task: str, carried: float = 2.0):
    """A circuit of so many edges recovers all; `carried` of a margin of 2 logits."""
    made = by_hand([0, 1, 9], [0, edges, 1000], [0.0, 1.0, 1.0], [0.0, 1.0, 2.0], task=task)
    return replace(made, q_empty=2.0 - carried)


def run_of(monkeypatch, surfaces: dict[str, dict[str, dict[str, Any]]], kl: dict[str, float]) -> Run:
    """surface -> task -> method -> its curve; the subject is SWD, and all methods have a CE and a KL."""
    found = {method: Fidelity(1.0, 1.0 + of, of, 0.9, {}, 1, ce_delta_se=0.0005) for method, of in kl.items()}
    comparisons = {
        surface: Comparison({task: TaskComparison(task, curves, {}) for task, curves in by_task.items()}, fidelities=found)
        for surface, by_task in surfaces.items()
    }
    no_factors = FactorsRecord({}, 0, 0, 0.0)
    subject = Replacement(next(iter(surfaces)), "SWD", no_factors, found["SWD"], 0.0)
    monkeypatch.setattr(module, "main_replacement", lambda run: subject)
    return Run({}, [], comparisons, [], 0.0)


def test_the_winner_of_each_task_is_named_with_its_edges_and_the_next(monkeypatch):
    tasks = {"a_b": {"SWD": curve(40, "a_b"), "neurons": curve(90, "a_b"), "SVD": curve(300, "a_b")}}
    tasks["c"] = {"SWD": curve(50, "c"), "neurons": curve(20, "c")}
    first, second = verdict(run_of(monkeypatch, {"mlp": tasks}, {"SWD": 0.002, "neurons": 0.0, "SVD": 0.0}))
    assert first == (
        "Fewest active edges for a circuit that recovers 90%: SWD for a b (40 edges; next, neurons: 90). neurons for c (20 "
        "edges; next, SWD: 50)."
    )
    assert second == "SWD at mlp moves cross-entropy on held-out text by +0.0020 ± 0.0005 nats, KL 0.0020."


def test_a_method_that_moves_the_model_more_wins_nothing_and_is_named(monkeypatch):
    tasks = {"a": {"SWD": curve(40, "a"), "pruned": curve(10, "a")}}
    first, second = verdict(run_of(monkeypatch, {"mlp": tasks}, {"SWD": 0.002, "pruned": 0.05}))
    assert "SWD for a (40 edges)" in first and "pruned" not in first
    assert second.endswith("KL 0.0020; cheaper, but of worse CE or KL: pruned for a (10 edges).")


def test_of_several_surfaces_the_one_that_carries_most_is_taken_and_tasks_that_none_carries_are_named(monkeypatch):
    little = {"a": {"SWD": curve(5, "a", carried=0.5)}, "b": {"SWD": curve(5, "b", carried=0.0)}}
    most = {"a": {"SWD": curve(40, "a")}, "b": {"SWD": curve(5, "b", carried=0.05)}}
    sentences = verdict(run_of(monkeypatch, {"attention": little, "mlp": most}, {"SWD": 0.001}))
    assert "SWD for a (40 edges of mlp)" in sentences[0] and len(sentences) == 3
    assert sentences[2] == "No surface that was tried carries b, so that a circuit there means nothing."


def test_where_nothing_reaches_the_threshold_it_says_so(monkeypatch):
    never = by_hand([0, 1], [0, 5], [0.0, 0.5], [0.0, 1.0], task="a")
    sentences = verdict(run_of(monkeypatch, {"mlp": {"a": {"SWD": never}}}, {"SWD": 0.001}))
    assert sentences[0] == "No circuit of SWD, or of another method beside it, recovers 90% of a task."


def test_the_report_opens_with_it(run: Run):
    sentences = verdict(run)
    assert 1 <= len(sentences) <= 3 and "SWD s=0.75" in " ".join(sentences)
    page = render_report(run)
    assert page.index('<p class="verdict">') < page.index('<ul class="headline">') < page.index('id="what"')
    assert verdict(Run({}, [], {}, [], 0.0)) == []


@pytest.mark.parametrize("n", [5, 6])
def test_of_many_tasks_four_are_named(monkeypatch, n):
    tasks = {f"t{i}": {"SWD": curve(40 + i, f"t{i}")} for i in range(n)}
    first, _ = verdict(run_of(monkeypatch, {"mlp": tasks}, {"SWD": 0.001}))
    assert "t3 (43 edges) and" in first and f"{n - 4} more task" in first and "t4" not in first
