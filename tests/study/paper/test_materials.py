"""What the items of a folder share is made once."""

import shutil

import pytest

from swd_lens.study import paper
from tests.study.paper.conftest import SMALL


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
