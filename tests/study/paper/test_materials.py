"""What the items of a folder share is made once: its tasks, trained baselines, what is measured of them."""

import shutil

import pytest

import swd_lens as swd
from swd_lens.study import paper
from swd_lens.study.paper import materials
from tests.study.paper.conftest import SMALL


def test_circuits_are_sought_where_a_task_is_judged_and_done(model, tmp_path):
    tasks = {"gendered_pronoun": [16, 12], "greater_than": [16, 12]}
    judged = {"blocks.2.mlp_out": ["greater_than"]}
    settings = paper.settings_of("controls", "tiny").changed(**{**SMALL, "tasks": tasks}, judged=judged)
    bench = materials.Materials(model, settings, tmp_path)
    assert [task.name for task in bench.judged("blocks.2.mlp_out, zero-data")] == ["greater_than"]
    assert [task.name for task in bench.judged("blocks.3.mlp_out")] == list(tasks)
    right = {name: float(swd.skill(model, bench.task(name))["right"].iloc[0]) for name in tasks}
    assert bench.accuracy == right
    bench.settings = settings.changed(least_accuracy=0.7)
    bench.accuracy = {"gendered_pronoun": 0.65, "greater_than": 0.75}
    assert [task.name for task in bench.judged("blocks.3.mlp_out")] == ["greater_than"]
    assert bench.left_out_in_words() == [
        "Left out, as the dense model does less than 70%: gendered_pronoun (65% right).",
        "Below 80%, and so no fair test of circuits: greater_than (75% right).",
    ]


def test_a_penalty_is_chosen_on_validation_text(model, tmp_path):
    spec = {"label": "TC", "method": "transcoder", "width": 8, "n_tokens": 512, "tokens_per_step": 128, "seed": 0}
    settings = paper.settings_of("single-matrix", "tiny").changed(**SMALL)
    bench = materials.Materials(model, settings, tmp_path)
    chosen = bench.trained("blocks.3.mlp_out", {**spec, "l1": [1e-5, 2e-5, 1e4]})
    deltas = {
        l1: swd.fidelity(model, bench.trained("blocks.3.mlp_out", {**spec, "l1": l1}), bench.validation).ce_delta
        for l1 in (1e-5, 2e-5, 1e4)
    }
    allowed = [l1 for l1, delta in deltas.items() if delta <= min(deltas.values()) + 0.001]
    assert chosen.provenance["settings"]["l1"] == max(allowed) < 1e4
    rows = {tuple(row) for row in bench.validation.tolist()}
    assert not rows & {tuple(row) for row in bench.heldout.tolist()}
    assert not rows & {tuple(row) for row in bench.fitted_on(512).tolist()}


@pytest.mark.slow
def test_items_of_a_folder_share_what_they_measure(finished, model, tmp_path):
    folder, _ = finished
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    steps = []
    trained = [{"label": "TC", "method": "transcoder", "width": 8, "n_tokens": 512, "tokens_per_step": 128, "seed": 0}]
    how = {"sparser_tokens": 512, "ablations": ["mean"], "trained": trained, "on_step": steps.append}
    result = paper.run_item("single-matrix", profile="tiny", model=model, out=copy, progress=False, **how, **SMALL)
    assert [step for step in steps if step.startswith("fidelity")] == ["fidelity of TC"]
    assert list(result.numbers["surfaces"]["blocks.3.mlp_out"]["fidelity"])[-1] == "TC"
    # A folder that was moved has all of it still.
    moved = copy.rename(tmp_path / "moved")
    [trained_at] = (moved / "trained").iterdir()
    before = (trained_at / "units.json").stat().st_mtime_ns
    again = paper.run_item(
        "single-matrix", profile="tiny", model=model, out=moved, progress=False, overwrite=True, **how, **SMALL
    )
    assert again.numbers == result.numbers
    assert [place for place in (moved / "trained").iterdir()] == [trained_at]
    assert (trained_at / "units.json").stat().st_mtime_ns == before
