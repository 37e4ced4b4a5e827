"""The table: its rows and words, what a folder keeps, and what is refused."""

import math

import pytest

from swd_lens.base.errors import ResumeError
from swd_lens.truth import run
from swd_lens.truth.compiled import compiled
from swd_lens.truth.planted import Plant
from swd_lens.truth.run import TruthTable, run_truth
from swd_lens.truth.toys import residual_mlp, superposition

FEW = {"methods": ["SWD", "neurons", "SVD"], "progress": False}


@pytest.fixture(scope="module")
def table():
    """Of a compiled host without noise, which is solved at once (test_compiled.py has the others), and of a few prompts."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "compiled", lambda **_: compiled(prompts=12))
        return run_truth(["planted", "compiled"], cases=["plain", "outputs rotated", "axes"], seeds=1, **FEW)


def test_rows_and_words(table):
    rows = table.table("planted").set_index(["case", "method"])
    assert len(rows) == 6 and "unit AUROC" not in rows and "ML2R" not in rows
    assert rows["F1"]["plain", "SWD"] > 0.95 > rows["F1"]["plain", "SVD"]
    assert rows["F1"]["outputs rotated", "SWD"] < 0.5  # where no axis is privileged
    assert rows["error"]["plain", "SWD"] < 0.01
    assert "planted, no noise: SWD F1" in table.in_words() and "compiled on the axes" in repr(table)
    compiled = table.table("compiled").set_index("method")
    assert compiled["unit AUROC"].between(0.4, 1).all() and compiled["edge AUROC"]["SWD"] > compiled["edge AUROC"]["SVD"]
    assert "F1" in table._repr_html_()


def test_a_folder_keeps_what_is_finished(tmp_path, monkeypatch):
    how = {"cases": ["4 + 4 entries"], "methods": ["neurons", "SVD"], "seeds": 1, "out": tmp_path, "progress": False}
    first = run_truth(["planted"], **how)
    monkeypatch.setattr(run, "answer", lambda *_: pytest.fail("made again"))
    again = run_truth(["planted"], **how)
    assert again.rows.equals(first.rows) and TruthTable.load(tmp_path / "truth.json").rows.equals(first.rows)
    monkeypatch.setattr(run, "__version__", "another")
    with pytest.raises(ResumeError, match="swd_lens"):
        run_truth(["planted"], **how)


def test_what_a_method_cannot_do_is_a_gap():
    """The paper's solver needs more edges than sixteen units of 6 + 6 entries have."""
    table = run_truth(["planted"], cases=["16 units"], methods=["SWD paper", "SVD"], seeds=1, progress=False)
    rows = table.table("planted").set_index("method")
    assert math.isnan(rows["F1"]["SWD paper"]) and rows["F1"]["SVD"] > 0


@pytest.mark.parametrize(
    ("call", "wrong"),
    [
        *((Plant, wrong) for wrong in ({"reads": 65}, {"units": 0}, {"noise": -1.0}, {"rotation": "inputs"}, {"kind": "odd"})),
        *((superposition, wrong) for wrong in ({"features": 0}, {"hidden": 0}, {"steps": 0})),
        (residual_mlp, {"neurons": 0}),
        (compiled, {"noise": -1.0}),
        (compiled, {"prompts": 3}),
        *((run_truth, wrong) for wrong in ({"parts": ["plants"]}, {"methods": ["PCA"]}, {"cases": ["odd"]})),
    ],
)
def test_refusals(call, wrong):
    """By the name of the argument (of a list: of one of it)."""
    with pytest.raises(ValueError, match=next(iter(wrong)).removesuffix("s") if call is run_truth else next(iter(wrong))):
        call(**wrong)
