"""Ctrl-C in Python: one line that says where the call was and how it goes on, and the caller's lines alone."""

import traceback
from typing import Any

import pytest

import swd_lens as swd
from swd_lens import solver
from swd_lens.base import surroundings
from swd_lens.base.interrupted import TRACEBACK, reached, says_when_interrupted
from swd_lens.study import paper
from swd_lens.train.folder import TrainingFolder
from tests.micro import random_tokens, toy_model

SITES = ["blocks.0.mlp_in", "blocks.0.mlp_out", "blocks.1.mlp_out"]


def stopped(call: Any) -> KeyboardInterrupt:
    with pytest.raises(KeyboardInterrupt) as raised:
        call()
    return raised.value


@says_when_interrupted
def inner(out: Any = None) -> None:
    reached(", 5 of 6 finished")
    raise KeyboardInterrupt


@says_when_interrupted
def outer(out: Any = None, overwrite: bool = False) -> None:
    reached(", 1 of 2 finished")
    inner(out)


@says_when_interrupted
def elsewhere() -> None:
    raise KeyboardInterrupt


@says_when_interrupted
def worded() -> None:
    raise KeyboardInterrupt("by hand")


def test_the_outermost_call_speaks():
    kept = "what is finished is kept in runs/a, and the same call"
    assert str(stopped(lambda: outer("runs/a"))) == f"outer was interrupted, 1 of 2 finished; {kept} goes on from there"
    assert str(stopped(lambda: outer(out="runs/a", overwrite=True))).endswith(f"{kept} without overwrite=True goes on from there")
    assert "; nothing of it is kept: with out=FOLDER the same call" in str(stopped(outer))
    assert str(stopped(elsewhere)) == "elsewhere was interrupted; nothing of it is kept"  # nor where an earlier call was
    assert "5 of 6" in str(stopped(inner))
    assert str(stopped(worded)) == "by hand"
    assert "␛" in str(stopped(lambda: inner("runs/\x1b[31m")))


def test_the_caller_s_lines_are_shown_alone_and_other_errors_are_left_alone(monkeypatch):
    shown = [frame.filename for frame in traceback.extract_tb(stopped(outer).__traceback__)]
    # Where it was called, and the mark.
    assert len([file for file in shown if not file.endswith("checked_types.py")]) == 2
    monkeypatch.setenv(TRACEBACK, "1")
    assert [frame.name for frame in traceback.extract_tb(stopped(outer).__traceback__)][-1] == "inner"

    @says_when_interrupted
    def fails() -> None:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match=r"^wrong$") as raised:
        fails()
    assert raised.traceback[-1].name == "fails"
    assert str(stopped(elsewhere)).startswith("elsewhere was interrupted;")


def test_factorize_says_what_is_finished(tmp_path, monkeypatch):
    solved, plain = [], solver.solve

    def solve(*args: Any, **how: Any) -> Any:
        solved.append(1)
        if len(solved) == 3:
            raise KeyboardInterrupt
        return plain(*args, **how)

    monkeypatch.setattr(solver, "solve", solve)
    how = {"sparsity": 0.5, "tokens": random_tokens(8, 20), "outer_iterations": 2, "progress": False, "out": tmp_path}
    stop = stopped(lambda: swd.factorize(toy_model(), SITES, **how))
    kept = f"what is finished is kept in {tmp_path}, and the same call goes on from there"
    assert str(stop) == f"factorize was interrupted, 2 of 3 matrices finished; {kept}"
    assert "solve" not in {frame.name for frame in traceback.extract_tb(stop.__traceback__)}


def test_a_training_says_the_step_of_its_checkpoint(tmp_path, monkeypatch):
    save = TrainingFolder.save

    def saving(self: Any, tensors: Any, state: Any) -> None:
        if state["step"] == 3:
            raise KeyboardInterrupt
        save(self, tensors, state)

    monkeypatch.setattr(TrainingFolder, "save", saving)
    how = {"n_tokens": 200, "tokens_per_step": 50, "progress": False, "checkpoint_every": 1, "out": tmp_path}
    stop = stopped(lambda: swd.baselines.transcoder(toy_model(), SITES[1], random_tokens(24, 10), **how))
    assert str(stop).startswith("transcoder was interrupted behind step 2 of 4; what is finished is kept in")


def test_every_long_call_is_marked(monkeypatch):
    """Whoever is interrupted at once, too: in the check of the arguments."""

    def interrupted(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(surroundings, "check_arguments", interrupted)
    names = ["factorize", "allocate", "finetune", "run_study", "replace_model", "data_efficiency", "sweep", "best_circuit"]
    calls = [getattr(swd, name) for name in names] + [paper.run_items]
    calls += [getattr(swd.baselines, name) for name in ("transcoder", "vpd_recon", "vpd_kl", "sparse_pretrain")]
    for call in calls:
        assert str(stopped(call)).startswith(f"{call.__name__} was interrupted; nothing of it is kept")
