"""sweep on a toy model: budgets, both notions of fidelity, circuits, what it refuses before any work."""

import json
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

import swd_lens as swd
from swd_lens.base.files import plain
from swd_lens.circuits import fidelity
from swd_lens.circuits.measure import Threshold
from swd_lens.study.sweep import sweep
from swd_lens.tasks.task import Task
from tests.forwards import block_runs
from tests.micro import random_split, random_tokens, toy_model

SITES, SPARSITIES = "mlp_out", (0.25, 0.5, 0.75)
QUICK = {"preset": "quick", "outer_iterations": 4, "refine_rounds": 0}
OTHERS = [random_split(seed=seed, name=name) for name, seed in (("validation", 7), ("test", 6))]
TASK = Task("toy_task", random_split(), *OTHERS, "random", False)


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def text():
    return {"tokens": random_tokens(40, 24), "heldout": random_tokens(10, 24, seed=1)}


@pytest.fixture(scope="module")
def found(model, text):
    return sweep(model, SITES, TASK, sparsities=SPARSITIES, **text, **QUICK)


def test_one_row_per_sparsity_and_calibration(found):
    """Its edges are the budget; with more of them weights are closer."""
    table = found.table()
    assert table["s"].tolist() == [*SPARSITIES] * 2
    assert table["calibration"].tolist() == ["zero-data"] * 3 + ["calibrated"] * 3
    for cost in ("units", "edges"):
        for target in ("recovered 0.5", "recovered 0.9", "necessity 0.5"):
            assert f"toy_task: {cost} at {target}" in table
    assert all(point.edges == 2 * int((1 - point.sparsity) * 32 * 16) for point in found.points)
    for kind in ("zero-data", "calibrated"):
        norms = [point.relative_frobenius for point in found.points if point.calibration == kind]
        assert norms == sorted(norms) and norms[0] > 0
    saved = json.loads(json.dumps(plain(found.as_dict()), allow_nan=False))
    assert len(saved["points"]) == 6 and (saved["recovered"], saved["necessity"]) == ([0.5, 0.9], [0.5])
    assert "toy_task: units at recovered 0.5" in repr(found) and "<table" in found._repr_html_()
    measured = found.parts()[-1]
    assert "fidelity of every point" in str(vars(measured)) and "toy_task" not in str(vars(measured))


def test_the_dense_host_runs_once_for_all_points(model, text):
    """Rows that enter the first block, where the second is replaced: for further points the checks of their runs alone."""
    rows = []
    for sparsities in ((0.5,), (0.4, 0.5, 0.6)):
        with block_runs(model, 0) as runs:
            sweep(model, "blocks.1.mlp_out", TASK, sparsities=sparsities, zero_data=False, **text, **QUICK)
        rows.append(runs.rows)
    # Of each point a probe, four prompts eight times (test_compare.py), and one row of its fidelity's check.
    assert rows[0] >= 40 + 10 and rows[1] - rows[0] <= 2 * (1 + 4 * 8 + 1)


def test_a_point_is_what_the_parts_find_alone(model, text, found):
    point = found.points[-1]
    factors = swd.factorize(model, SITES, sparsity=0.75, tokens=text["tokens"], progress=False, **QUICK)
    assert point.fidelity == fidelity(model, factors, text["heldout"])
    error = sum(float((f.weight - f.product()).square().sum()) for f in factors.values())
    norm = sum(float(f.weight.square().sum()) for f in factors.values())
    assert point.relative_frobenius == pytest.approx((error / norm) ** 0.5, rel=1e-5)
    curve = swd.evaluate(model, factors, TASK, swd.attribute(model, factors, TASK))
    assert point.curves["toy_task"].rows.equals(curve.rows)
    row = found.table().iloc[-1]
    priced = curve.row_of(Threshold("necessity", 0.5), "edges")
    cost = row["toy_task: edges at necessity 0.5"]
    assert pd.isna(cost) if priced is None else cost == priced["edges"]
    assert row["CE delta"] == point.fidelity.ce_delta and row["max relMSE"] == max(point.fidelity.relmse.values())


def test_arrays_and_single_values(model, text):
    one = {"heldout": text["heldout"], "zero_data": True, **QUICK}
    found = sweep(model, SITES, TASK, sparsities=np.array([0.5, 0.75]), tolerance=0.0, **one)
    assert [(point.sparsity, point.zero_data) for point in found.points] == [(0.5, True), (0.75, True)]
    assert sweep(model, SITES, TASK, sparsities=0.5, tolerance=0.0, **one).table().equals(found.table().iloc[:1])
    # Which points are matched in CE.
    assert found.table()["CE matched"].tolist() == [False] * 2 and "above 0 nats" in found.plot()._suptitle.get_text()
    assert replace(found, tolerance=1e9).table()["CE matched"].tolist() == [True] * 2


def test_figure_shows_the_table(found):
    table, figure = found.table(), found.plot()
    figure.draw_without_rendering()
    columns = ("relative Frobenius", "CE delta", "toy_task: edges at recovered 0.9")
    for ax, column in zip(figure.axes, columns, strict=True):
        for line, kind in zip(ax.lines, ("zero-data", "calibrated"), strict=True):
            rows = table[(table["calibration"] == kind) & table[column].notna()]
            assert list(line.get_xdata()) == rows["s"].tolist() and list(line.get_ydata()) == rows[column].tolist()
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["zero-data", "calibrated"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sparsities": (0.5, 1.0)}, "sparsity"),
        ({"sparsities": (0.5, 0.5)}, "different sparsities"),
        ({"zero_data": ()}, "different zero_data"),
        ({"tokens": None}, "need tokens="),
        ({"tasks": []}, "no task"),
        ({"heldout": [[1, 200]]}, "outside the vocabulary"),
        ({"outer_iteration": 3}, "outer_iteration"),
        ({"evaluation": {"ablaton": "zero"}}, "evaluation= has no option 'ablaton'"),
    ],
)
def test_what_it_refuses_before_any_work(model, text, change, message):
    steps = []
    arguments = {"tasks": TASK, **text, "on_step": steps.append, **change}
    with pytest.raises((ValueError, TypeError), match=message):
        sweep(model, SITES, **arguments)
    assert steps == []
