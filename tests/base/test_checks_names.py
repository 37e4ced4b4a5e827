"""Names beside ours: what is refused, and that the list has what the rooms look for."""

import pytest

from swd_lens.base.checks import OURS, require_names
from swd_lens.base.step_cache import CALL, FOLDER
from swd_lens.factorization import checkpoint, goal
from swd_lens.hosts import made
from swd_lens.report import paper
from swd_lens.study import best, replacement, run
from swd_lens.study.paper import result
from swd_lens.train import folder
from swd_lens.train.baselines import sparse_training, units
from swd_lens.units import index


@pytest.mark.parametrize("name", ["factors", "Factors", "parts", "", ".", "..", ".hidden", "a/b", "a\\b", "a\0"])
def test_a_folder_is_no_file_of_ours_and_leads_nowhere_else(name):
    with pytest.raises(ValueError, match=r"^task "):
        require_names("task", ["ioi", name])


def test_names_are_whole_and_differ_by_more_than_capitals_and_the_list_has_what_rooms_look_for():
    require_names("task", ["ioi", "run", "my words", "graph-metadata", "factors-2", "ioi.json"])
    with pytest.raises(ValueError, match=r"slug 'run': a file or folder 'run\.json' has a meaning"):
        require_names("slug", ["run"], ".json")
    with pytest.raises(ValueError, match="task 'IOI' and 'ioi' would be the same"):
        require_names("task", ["ioi", "IOI"])
    names = {FOLDER, CALL, checkpoint._SHARDS, goal._TRIALS, made.SOURCE, best.FILE, best.CANDIDATES, best.REFINED}
    names |= {replacement.FACTORS, replacement.FINETUNED, replacement.NUMBERS}
    names |= {replacement.SAMPLES, run.NAME, result.RESULT, folder.RUN, folder.LOG, folder.CHECKPOINT}
    names |= {sparse_training.MODEL, units.INDEX, units._WEIGHTS, index.INDEX, paper.PAGE}
    assert names <= OURS
