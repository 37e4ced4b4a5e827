"""One writer per folder: the second is told who holds it, a dead one's lock is free, an impossible folder is refused at once."""

import json
import os
import subprocess
import sys
import threading

import pytest

from swd_lens.base.errors import FolderInUseError
from swd_lens.base.files import atomic
from swd_lens.base.writer import HOLDER, LOCK, require_writable, require_writable_file, writing, writing_file
from tests.base.test_surroundings import in_a_thread
from tests.remains import left_by_a_killed_process

HOLD = """
import sys, time
from swd_lens.base.writer import writing
with writing(sys.argv[1], "factorize"):
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_folder_is_made_held_and_left_without_a_trace(tmp_path):
    with writing(tmp_path / "a" / "b", "factorize") as folder:
        assert json.loads((folder / HOLDER).read_text())["process"] == os.getpid()
        with writing(folder, "save"):  # the same thread
            (folder / "x").touch()
        assert (folder / LOCK).exists()
    assert [path.name for path in folder.iterdir()] == ["x"]
    with pytest.raises(ZeroDivisionError), writing(tmp_path / "nothing" / "b", "factorize"):
        raise ZeroDivisionError
    assert not (tmp_path / "nothing").exists()


def test_another_thread_is_refused_and_a_file_behind_two_links_is_held_once(tmp_path):
    def second():
        with writing(tmp_path, "finetune"):
            pass

    with writing(tmp_path, "factorize"):
        refusal = in_a_thread(second)
    assert isinstance(refusal, FolderInUseError) and f"is written by factorize (process {os.getpid()} on " in str(refusal)
    second()
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "link").symlink_to(tmp_path / "x.json")

    def second():
        with writing_file(tmp_path / "b" / "link", "x"):
            pass

    with writing_file(tmp_path / "a" / "link", "data_efficiency"):
        assert isinstance(in_a_thread(second), FolderInUseError)


def test_another_process_is_refused_and_the_lock_of_a_killed_one_is_free(tmp_path):
    with subprocess.Popen([sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        with pytest.raises(FolderInUseError, match=rf"factorize \(process {holder.pid} on .*, since 20"), writing(tmp_path, "x"):
            pass
        threading.Timer(1, holder.kill).start()
        with writing(tmp_path, "x", wait=True):
            assert json.loads((tmp_path / HOLDER).read_text())["call"] == "x"
    assert not list(tmp_path.iterdir())


def test_an_impossible_folder_is_refused_before_anything_is_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"file is no folder"), writing(tmp_path / "file" / "out", "factorize"):
        pass
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    with pytest.raises(NotADirectoryError, match=r"link is no folder"), writing(tmp_path / "link", "factorize"):
        pass
    (tmp_path / "link").unlink()
    with pytest.raises(OSError, match=r"GB will be written"), writing(tmp_path / "out", "factorize", 10**18):
        pass
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    with pytest.raises(IsADirectoryError, match="give the name of a file in it"):
        require_writable_file(tmp_path)
    with pytest.raises(NotADirectoryError), writing_file(tmp_path / "file" / "x.json", "data_efficiency"):
        pass
    with pytest.raises(PermissionError, match=r"cannot be written \(a null character in its name\)"):
        require_writable(tmp_path / "a\0b")
    with pytest.raises(OSError, match="a null character in its name"), atomic(tmp_path / "a\0b" / "c"):
        pass
    with pytest.raises(PermissionError, match=r"n⟨U\+DCFF⟩ cannot be written \(a name that is not UTF-8\)"):
        require_writable(tmp_path / os.fsdecode(b"n\xff"))
    if os.path.isdir("/proc/self"):  # the folder that nobody can write
        with pytest.raises(PermissionError, match=r"/proc/out cannot be written"):
            require_writable("/proc/out")


def test_one_writer_per_file_others_beside_it_and_what_a_killed_one_left_goes(tmp_path):
    def write(name):
        with writing_file(tmp_path / "new" / name, "data_efficiency") as path:
            path.touch()

    with writing_file(tmp_path / "new" / "a.json", "data_efficiency"):
        refused, free = (in_a_thread(lambda name=name: write(name)) for name in ("a.json", "b.json"))
    assert isinstance(refused, FolderInUseError) and "a.json is written by data_efficiency (process" in str(refused)
    assert free is None
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["b.json"]
    left, others = (left_by_a_killed_process(tmp_path / name) for name in ("points.json", "other.json"))
    with writing_file(tmp_path / "points.json", "data_efficiency"):
        pass
    assert not left.exists() and others.exists()
