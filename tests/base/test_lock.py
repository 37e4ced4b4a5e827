"""Locks: free when their process dies; what happens where a file system has none."""

import errno
import fcntl
import json
import os
import signal
import subprocess
import sys
import warnings

import pytest

from swd_lens.base.errors import FolderInUseError
from swd_lens.base.writer import HOLDER, LOCK, writing, writing_file
from tests.base.test_files import failing
from tests.forks import run

FORK = """
import os, signal, sys
from swd_lens.base.writer import writing
with writing(sys.argv[1], "factorize"):
    forked, told = os.pipe()
    if not os.fork():
        os.write(told, b"x")
        sys.stdin.read()
        os._exit(0)
    os.read(forked, 1)
    os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_forked_child_does_not_hold_its_parents_folder_and_leaves_it_held(tmp_path):
    def child():
        with pytest.raises(FolderInUseError, match=rf"factorize \(process {os.getppid()} on "), writing(tmp_path, "save"):
            pass
        held.__exit__(None, None, None)  # it leaves the block of its parent, too

    held = writing(tmp_path, "factorize")
    held.__enter__()
    run(child)
    assert {path.name for path in tmp_path.iterdir()} == {HOLDER, LOCK}
    with pytest.raises(FolderInUseError), writing(tmp_path, "save", alone=True):
        pass
    held.__exit__(None, None, None)
    with writing(tmp_path, "save"):
        pass
    assert not list(tmp_path.iterdir())


def test_the_lock_of_a_killed_process_is_free_while_a_child_of_it_lives(tmp_path):
    command = [sys.executable, "-c", FORK, str(tmp_path)]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as parent:
        assert parent.wait() == -signal.SIGKILL
        assert (tmp_path / HOLDER).exists()
        with writing(tmp_path, "save"):
            pass


@pytest.fixture(params=[errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, errno.ENOSYS])
def no_locks(request, monkeypatch):
    """Every flock fails; the reason, in words."""

    monkeypatch.setattr(fcntl, "flock", failing(request.param))
    return os.strerror(request.param)


def test_a_folder_that_cannot_be_locked_is_refused_before_anything_is_made(tmp_path, no_locks, monkeypatch):
    told = rf"out cannot be locked \({no_locks}\).*Give a folder on a local disk; or, .* set SWD_LENS_LOCK=0"
    for hold in (lambda: writing(tmp_path / "out", "x"), lambda: writing_file(tmp_path / "out" / "x.json", "x")):
        with pytest.raises(OSError, match=told) as refusal, hold():
            pass
        assert refusal.value.errno and os.strerror(refusal.value.errno) == no_locks
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("swd_lens.base.writer.require_writable", lambda *_: None)  # it fails only when it is held
    with pytest.raises(OSError, match=rf"out cannot be locked \({no_locks}\)"), writing(tmp_path / "out", "x"):
        pass


def test_without_locks_a_user_may_say_that_nobody_else_writes(tmp_path, no_locks, monkeypatch):
    monkeypatch.setenv("SWD_LENS_LOCK", "0")
    with pytest.warns(UserWarning, match=r"out is written without a lock \(SWD_LENS_LOCK=0\)"):
        held = writing(tmp_path / "out", "factorize")
        folder = held.__enter__()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with writing(folder, "save"):  # within: it is held already
            (folder / "x").touch()
    assert json.loads((folder / HOLDER).read_text())["call"] == "factorize"
    held.__exit__(None, None, None)
    assert [path.name for path in folder.iterdir()] == ["x"]
