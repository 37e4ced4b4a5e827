"""Folders of trainings, whatever is trained: nothing of another run is gone on from or returned, nothing lost or left behind.

Four kinds of run stand for all: finetune, a transcoder, VPD-KL with everything that it can keep, sparse pretraining. Changed
bits, kills, full disks and several writers are the matter of tests/fuzz, for every kind of file.
"""

import os
import shutil
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from swd_lens import baselines
from swd_lens.base.errors import ResumeError, TrainError
from swd_lens.base.sealed import read_sealed, read_tensors, write_sealed, write_tensors
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.train import folder as module
from swd_lens.train.baselines import LearnedUnits
from swd_lens.train.finetune import finetune
from tests import families
from tests.micro import toy_model
from tests.remains import left_by_a_killed_process
from tests.train.baselines.test_methods import SAME, SITE, TOKENS
from tests.train.conftest import HELD, ROWS, factorized, interrupt
from tests.train.conftest import bits_of_units as bits

CONFIG = {"n_layer": 1, "n_embd": 8, "n_head": 2, "n_positions": 64, "vocab_size": families.D_VOCAB}
KINDS = ("finetune", "transcoder", "sparse")


def train(kind, out, **more):
    """A short run; its result as bytes that can be compared."""
    if kind == "finetune":
        quick = {"steps": 7, "batch_size": 5, "learning_rate": 3e-3, "checkpoint_every": 3, "progress": False}
        tuned = finetune(*factorized("hooked"), ROWS, out=out, heldout=HELD, **{**quick, **more})
        return {site: (f.read.numpy().tobytes(), f.write.numpy().tobytes()) for site, f in tuned.items()}
    if kind == "sparse":
        quick = {"updates": 7, "tokens_per_update": 96, "checkpoint_every": 3, "progress": False, "end_density": 0.3}
        text = families.some_tokens(48, 12)
        made = baselines.sparse_pretrain(CONFIG, text, out=out, tokenizer=load_tokenizer(WEIGHTS), **{**quick, **more})
        return (made.folder / "model.safetensors").read_bytes()
    kept = {"adversarial": 0.5, "adversary": "persistent", "width": 12} if kind == "vpd_kl" else {"width": 12}
    units = getattr(baselines, kind)(toy_model(), SITE, TOKENS, out=out, **{**SAME, **kept, **more})
    return bits(units)


def files(folder):
    return {path.relative_to(folder).as_posix(): path for path in sorted(folder.rglob("*")) if path.is_file()}


def interrupted(kind, out, after=5, **more):
    """A folder as Ctrl-C leaves it after some steps."""
    with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt):
        interrupt(patch, after)
        train(kind, out, **more)


@cache
def original(kind, state):
    """(folder, result, log) of a run left alone, finished or interrupted; not to be changed."""
    base = Path(os.environ["SWD_TEST_FOLDERS"]) / f"{kind} {state}"
    if state == "finished":
        result = train(kind, base)
    else:
        interrupted(kind, base)
        _, result, log = original(kind, "finished")
        return base, result, log
    return base, result, (base / "log.jsonl").read_bytes()


@pytest.fixture(autouse=True, scope="module")
def folders(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SWD_TEST_FOLDERS", str(tmp_path_factory.mktemp("folders")))
        yield
    original.cache_clear()


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_run_made_is_not_returned_as_the_result(kind, tmp_path):
    folder, _, _ = original(kind, "finished")
    shutil.copytree(folder, tmp_path / "run")
    if kind == "finetune":  # whole, and of the same sites
        factorized("hooked")[1].save(tmp_path / "run" / "factors")
    else:
        train(kind, tmp_path / "other", seed=7)
        part = "model" if kind == "sparse" else "weights"
        shutil.rmtree(tmp_path / "run" / part)
        shutil.copytree(tmp_path / "other" / part, tmp_path / "run" / part)
        for name in {"units.json"} & set(files(folder)):
            shutil.copy(tmp_path / "other" / name, tmp_path / "run" / name)
    with pytest.raises(ResumeError, match=r"not what was written there as a training run|is missing; a training run"):
        train(kind, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / {"finetune": "factors", "sparse": "model"}.get(kind, "weights"))
    with pytest.raises((ResumeError, TrainError)):
        train(kind, tmp_path / "run")


def test_a_checkpoint_or_a_log_of_another_run_is_refused(tmp_path):
    folder, _, _ = original("transcoder", "interrupted")
    interrupted("transcoder", tmp_path / "other", seed=7)
    for name in ("checkpoint.safetensors", "log.jsonl"):
        out = tmp_path / name
        shutil.copytree(folder, out)
        shutil.copy(tmp_path / "other" / name, out / name)
        with pytest.raises(ResumeError, match=rf"{name}(: not what was written there| is not a training run, .*another call)"):
            train("transcoder", out)


@pytest.mark.parametrize("text", ["[" * 100_000, '{"step": 1e999}', "\xff", "{}", "[1]", '"step"'])
def test_lines_that_are_no_lines_are_where_the_log_ends(tmp_path, text):
    folder, result, log = original("transcoder", "interrupted")
    shutil.copytree(folder, tmp_path / "run")
    lines = (folder / "log.jsonl").read_bytes().splitlines()
    (tmp_path / "run" / "log.jsonl").write_bytes(b"\n".join([*lines[:3], text.encode("latin-1"), *lines[4:]]))
    assert train("transcoder", tmp_path / "run") == result  # the checkpoint is of step 3
    assert (tmp_path / "run" / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("kind", KINDS)
def test_an_impossible_folder_is_refused_before_any_work(kind, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("mine")
    monkeypatch.setattr("swd_lens.train.rows.Rows.__init__", lambda *_: pytest.fail("worked"))
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        with pytest.raises(NotADirectoryError, match=r"file is no folder"):
            train(kind, out)
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("kind", KINDS)
def test_a_finished_run_is_read_where_nobody_may_write(kind, monkeypatch):
    folder, result, _ = original(kind, "finished")
    monkeypatch.setattr(module, "writing", lambda *_, **__: pytest.fail("written"))
    monkeypatch.setattr(module, "require_writable", lambda *_: pytest.fail("written"))
    assert train(kind, folder) == result
    if kind == "finetune":  # the dense weights are remembered, too
        tuned = finetune(*factorized("hooked"), ROWS, out=folder, heldout=HELD, steps=7, batch_size=5, learning_rate=3e-3)
        assert all(f.weight is factorized("hooked")[1][site].weight for site, f in tuned.items())


@pytest.mark.parametrize("kind", ["finetune", "vpd_kl", "sparse"])
def test_what_a_kill_left_goes_modes_are_the_umasks_and_files_of_others_stay(kind, tmp_path):
    folder, result, _ = original(kind, "interrupted")
    part = {"finetune": "factors", "sparse": "model"}.get(kind, "weights")
    before = os.umask(0o027)
    try:
        shutil.copytree(folder, tmp_path / "run")
        (tmp_path / "run" / part).mkdir(exist_ok=True)
        (tmp_path / "run" / part / "mine.txt").write_text("mine")
        for place in (tmp_path / "run", tmp_path / "run" / part):
            if part != "factors" or place == tmp_path / "run":
                left_by_a_killed_process(place / "x")
        assert train(kind, tmp_path / "run") == result
        assert not [name for name in files(tmp_path / "run") if "/." in f"/{name}"]
        train(kind, tmp_path / "run", seed=3, overwrite=True)
    finally:
        os.umask(before)
    written = files(tmp_path / "run")
    assert written.pop(f"{part}/mine.txt").read_text() == "mine"
    assert {path.stat().st_mode & 0o777 for path in written.values()} == {0o640}


LAUNCHED = """
import sys, time
from pathlib import Path
from swd_lens.train.engine import Engine
from tests.train.test_folder import train

advance = Engine.advance
def counting(self, rows):
    print("step", flush=True)
    time.sleep(0.2)
    return advance(self, rows)
Engine.advance = counting
print(hash(str(train("transcoder", Path(sys.argv[1])))))
"""


@pytest.mark.slow
def test_of_two_launched_processes_one_trains_and_both_have_the_result(tmp_path):
    fixed = {**os.environ, "PYTHONPATH": str(Path.cwd()), "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0", "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", LAUNCHED, str(tmp_path / "run")]
    both = [subprocess.Popen(command, env={**fixed, "RANK": rank}, stdout=subprocess.PIPE, text=True) for rank in "01"]
    printed = [each.communicate()[0].split() for each in both]
    assert [each.returncode for each in both] == [0, 0]
    assert sorted(len(words) for words in printed) == [1, 1 + 7] and printed[0][-1] == printed[1][-1]


def test_weights_that_differ_in_their_last_bits_only_and_unknown_settings_are_refused(tmp_path):
    """Runs that keep other points have the same provenance; their weights pass every test but that of the index."""
    one, other = (LearnedUnits.load(original("transcoder", "finished")[0]) for _ in range(2))
    one.save(tmp_path)
    (path,) = (tmp_path / "weights").glob("000000000000350.*")
    tensors, header = read_tensors(path, "weights")
    write_tensors(path, {name: t + 1e-6 for name, t in tensors.items()}, header)
    with pytest.raises(TrainError, match=rf"{path.name}: not what was written there"):
        LearnedUnits.load(tmp_path).at(350)
    assert bits(other) == original("transcoder", "finished")[1]
    LearnedUnits.load(original("transcoder", "finished")[0]).save(tmp_path)
    index = read_sealed(tmp_path / "units.json", "an index")
    for changes in ({"l1": -1.0}, {"beta2": [None]}, {"tied": True}):
        provenance = {**index["provenance"], "settings": {**index["provenance"]["settings"], **changes}}
        write_sealed(tmp_path / "units.json", {**index, "provenance": provenance})
        with pytest.raises(TrainError, match=rf"{tmp_path}: settings that this swd_lens does not know \("):
            LearnedUnits.load(tmp_path)
