"""The folder of factorize: one call at a time, refused before any work, nothing of others deleted."""

import os
import shutil
from pathlib import Path

import pytest

import swd_lens as swd
import swd_lens.solver
from swd_lens.base.errors import FolderInUseError
from swd_lens.base.writer import HOLDER, LOCK, writing
from swd_lens.units.factors import FactorSet
from swd_lens.units.storage import UNNAMED
from tests.base.test_surroundings import in_a_thread
from tests.factorization.test_factorize import QUICK, assert_same, count_solves
from tests.forks import run_forked
from tests.micro import random_tokens, toy_model
from tests.remains import left_by_a_killed_process

TOKENS = random_tokens(12, 9)


@pytest.mark.parametrize("second", [{"sparsity": 0.25}, {"overwrite": True}], ids="-".join)
def test_the_second_of_two_calls_is_refused_and_nothing_is_lost(model, tmp_path, monkeypatch, second):
    """While the first solves its second matrix, another one starts."""
    other, solve, calls, refusals = toy_model(), swd_lens.solver.solve, [], []

    def beside(*arguments, **named):
        calls.append(0)
        if len(calls) == 2:
            refusals.append(in_a_thread(lambda: swd.factorize(other, "mlp_out", **{**QUICK, **second}, out=tmp_path)))
        return solve(*arguments, **named)

    monkeypatch.setattr(swd_lens.solver, "solve", beside)
    made = swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    assert len(calls) == 2 and isinstance(refusals[0], FolderInUseError)
    assert f"is written by factorize (process {os.getpid()} on " in str(refusals[0])
    assert_same(FactorSet.load(tmp_path), made)
    assert len(list(tmp_path.iterdir())) == 3


@pytest.mark.parametrize("how", ["a file", "below a file", "a full disk", "read-only"])
@pytest.mark.parametrize(("shard", "preset"), [(None, "quick"), ("1/2", "paper")], ids=["basis by text", "shard"])
def test_an_impossible_folder_is_refused_before_any_work(model, tmp_path, monkeypatch, how, shard, preset):
    (tmp_path / "file").touch()
    out = {"a file": tmp_path / "file", "below a file": tmp_path / "file" / "out", "read-only": Path("/proc/out")}
    if how == "a full disk":
        monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, 100))
    calls = count_solves(monkeypatch)
    monkeypatch.setattr("swd_lens.factorization.job.host_fingerprint", lambda *_: pytest.fail("work was done"))
    monkeypatch.setattr("swd_lens.factorization.stages.collect_grams", lambda *_, **__: pytest.fail("work was done"))
    monkeypatch.setattr("swd_lens.factorization.basis.chosen", lambda *_: pytest.fail("work was done"))
    named = {**QUICK, "preset": preset, "tokens": TOKENS, "calibration": "dense", "shard": shard}
    with pytest.raises(OSError, match=r"nothing was done"):
        swd.factorize(model, "mlp_out", **named, out=out.get(how, tmp_path / "new"))
    assert not calls and [path.name for path in tmp_path.iterdir()] == ["file"]


def test_what_a_call_left_that_was_killed_at_its_very_end_goes(model, tmp_path):
    made = swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    kept = {path.name for path in tmp_path.iterdir()}
    left_by_a_killed_process(tmp_path / "factors.json")
    for name in (HOLDER, LOCK, UNNAMED):
        (tmp_path / name).touch()
    assert_same(swd.factorize(model, "mlp_out", **QUICK, out=tmp_path), made)
    assert {path.name for path in tmp_path.iterdir()} == kept
    with writing(tmp_path, "save"):  # beside a living writer
        assert len(in_a_thread(lambda: swd.factorize(toy_model(), "mlp_out", **QUICK, out=tmp_path))) == 2
        assert (tmp_path / HOLDER).exists()


READ_ONLY = """
import sys
from tests.factorization.test_folder import QUICK
from tests.micro import toy_model
import swd_lens as swd
out, model = sys.argv[1], toy_model()

def forbid(event, arguments):
    changes = event in ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod")
    opened = event == "open" and (arguments[2] or 0) & 3
    if (changes or opened) and str(arguments[0]).startswith(out):
        raise PermissionError(f"{event} {arguments}")

sys.addaudithook(forbid)
with swd.attach(model, swd.FactorSet.load(out)):
    pass
swd.factorize(model, "mlp_out", **QUICK, out=out)
print("nothing was written")
"""


def test_a_read_only_disk_is_enough_to_read(model, tmp_path):
    swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)
    done = run_forked(READ_ONLY, tmp_path)
    assert "nothing was written" in done.stdout, done.stderr


def test_only_the_matrices_that_are_missing_need_room(model, tmp_path, monkeypatch):
    swd.factorize(model, "blocks.0.mlp_out", **QUICK, out=tmp_path)
    one = (tmp_path / next(path.name for path in tmp_path.glob("*.safetensors"))).stat().st_size
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**9, 10**9, int(1.5 * one) + 2000))
    assert len(swd.factorize(model, "mlp_out", **QUICK, out=tmp_path)) == 2


DENSE = {**QUICK, "tokens": TOKENS, "calibration": "dense"}


def test_starting_again_deletes_nothing_else_of_the_shards(model, tmp_path):
    swd.factorize(model, "mlp_out", **{**DENSE, "sparsity": 0.25}, out=tmp_path, shard="1/2")
    swd.factorize(model, "mlp_out", **{**DENSE, "sparsity": 0.25}, out=tmp_path, shard="2/2")
    thesis = tmp_path / "shards" / "1-of-2" / "thesis.tex"
    thesis.touch()
    made = swd.factorize(model, "mlp_out", **DENSE, out=tmp_path, overwrite=True)
    assert [path for path in (tmp_path / "shards").rglob("*") if path.is_file()] == [thesis]
    assert_same(swd.factorize(model, "mlp_out", **DENSE, out=tmp_path), made)


def test_starting_again_is_refused_while_a_shard_is_made(model, tmp_path, monkeypatch):
    made = swd.factorize(model, "mlp_out", **{**DENSE, "sparsity": 0.25}, out=tmp_path, shard="1/2")
    swd.factorize(model, "mlp_out", **DENSE, out=tmp_path / "whole")
    shard, calls = tmp_path / "shards" / "1-of-2", count_solves(monkeypatch)
    with writing(shard, "factorize"):
        refusal = in_a_thread(lambda: swd.factorize(toy_model(), "mlp_out", **DENSE, out=tmp_path, overwrite=True))
        again = in_a_thread(lambda: swd.factorize(toy_model(), "mlp_out", **DENSE, out=tmp_path, shard="1/2", overwrite=True))
    for error in (refusal, again):
        assert isinstance(error, FolderInUseError) and str(error).startswith(str(shard))
    assert not calls and not (tmp_path / "factors.json").exists()
    assert_same(FactorSet.load(shard), made)
