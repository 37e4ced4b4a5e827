"""Items end to end on the embedded model, as small as they can be: files, going on after an interruption, refusals, the page."""

import json

import pytest

import swd_lens as swd
from swd_lens.report.paper import write_paper_report
from swd_lens.study import paper
from swd_lens.study.paper import run
from tests.study.paper.conftest import SMALL


def test_a_finished_item_is_not_run_again(finished, model, monkeypatch):
    folder, result = finished
    monkeypatch.setitem(run.RUNS, "controls", lambda *_: pytest.fail("it was run again"))
    again = paper.run_item("controls", profile="tiny", model=model, out=folder, progress=False, random_b_seeds=1, **SMALL)
    assert again.as_dict() == result.as_dict()


def test_another_host_text_or_profile_is_refused(finished, model):
    folder, _ = finished
    how = {"model": model, "out": folder, "progress": False, "random_b_seeds": 1}
    with pytest.raises(swd.errors.ResumeError, match="held-out tokens"):
        paper.run_item("controls", profile="tiny", **how, **{**SMALL, "heldout_tokens": 256})
    other = swd.load_default_model()
    other.blocks[0].mlp.W_in.data[0, 0] += 1
    with pytest.raises(swd.errors.ResumeError, match="the host"):
        paper.run_item("controls", profile="tiny", **{**how, "model": other}, **SMALL)


def test_bad_settings_are_refused_before_any_work(tmp_path, model):
    with pytest.raises(ValueError, match="controls has no setting 'seeds'"):
        paper.run_item("controls", profile="tiny", model=model, out=tmp_path / "new", seeds=3)
    assert not (tmp_path / "new").exists()


def test_plan_is_plain_values():
    planned = paper.plan("all", "tiny")
    values = json.loads(json.dumps(planned.as_dict()))
    assert list(values) == list(paper.ITEMS)
    assert values["qk"]["settings"][0]["name"] == "model"
    assert list(planned.table()["item"]) == list(paper.ITEMS)


# Trained on hundreds of tokens the second host does no task: that is said, and part of the item.
@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_all_items_of_the_tiny_profile(finished, every):
    out, results, steps = every
    assert list(results) == list(paper.ITEMS)
    # The finished one is taken over.
    begun = [item for item in paper.ITEMS if any(step.startswith(f"{item} (") for step in steps)]
    assert begun == [item for item in paper.ITEMS if item != "controls"]
    assert results["controls"].as_dict() == finished[1].as_dict()
    for result in results.values():
        assert result.findings and result.tables and result.pictures
        assert (out / result.item / "result.json").is_file()
    page = write_paper_report(out).read_text()
    assert all(result.heading in page for result in results.values())
    with pytest.raises(FileNotFoundError, match="no finished item"):
        write_paper_report(out.parent)
