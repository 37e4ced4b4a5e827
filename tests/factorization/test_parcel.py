"""Parcels (parcel.py), and the process that opens them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from swd_lens.factorization.workers import solve_task
from swd_lens.factorization.workers.parcel import BOOTSTRAP, pack_solved, pack_task, unpack_solved, unpack_task
from tests.factorization.tasks import assert_same_bits, task, tasks_of_many_kinds
from tests.forks import run_forked

HERE = Path(__file__).parent


def test_parcels_keep_every_bit():
    for one in tasks_of_many_kinds():
        back = unpack_task(pack_task(one))
        assert back.weight.dtype == one.weight.dtype and torch.equal(back.weight, one.weight)
        assert (back.gram is None) if one.gram is None else torch.equal(back.gram, one.gram)
        assert {**vars(back), "weight": 0, "gram": 0} == {**vars(one), "weight": 0, "gram": 0}
    solved = solve_task(task(preset="paper"))
    assert_same_bits(unpack_solved(pack_solved(solved)), solved)


@pytest.mark.slow
def test_a_worker_process_does_without_transformer_lens():
    program = BOOTSTRAP.replace("main(tasks, results, int(sys.argv[2]))", "results.write(' '.join(sys.modules).encode())")
    assert program != BOOTSTRAP
    where = json.dumps([sys.path, str(HERE.parents[1] / "swd_lens")])
    done = subprocess.run([sys.executable, "-c", program, where, "1"], capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "swd_lens.factorization.solve_task" in loaded and not {"transformer_lens", "transformers"} & loaded


KILLED = """
import os
import torch
from swd_lens.factorization.workers import SolveTask
from swd_lens.factorization.workers.parcel import main, pack_task, send

(tasks, to_tasks), (answers, results) = os.pipe(), os.pipe()
os.close(answers)
with os.fdopen(to_tasks, "wb") as to_worker, os.fdopen(tasks, "rb", 0) as read, os.fdopen(results, "wb") as write:
    send(to_worker, pack_task(SolveTask("m", torch.randn(8, 8), options={"outer_iterations": 2})))
    main(read, write, 1)
"""


def test_a_worker_whose_answer_nobody_reads_ends_without_a_word():
    ended = run_forked(KILLED)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")
