"""Files are written whole or not at all, and what a living process writes stays, whatever clocks and process numbers say."""

import errno
import fcntl
import os
import socket

import pytest
import torch

from swd_lens.base.errors import EditError
from swd_lens.base.files import atomic, remove_remains, workplace_beside, write_text
from swd_lens.base.sealed import read_sealed, read_tensors, write_sealed, write_tensors
from tests.forks import run
from tests.remains import left_by_a_killed_process


def test_what_a_killed_process_left_goes_and_what_a_living_one_writes_stays(tmp_path):
    with atomic(tmp_path / "x.json") as living:
        dead = left_by_a_killed_process(tmp_path / "x.json")
        unlocked = left_by_a_killed_process(tmp_path / "y.json")  # killed before it had a lock
        for path in sorted(unlocked.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        run(lambda: remove_remains(tmp_path))
        assert living.exists() and not dead.exists() and not unlocked.exists()
        living.write_text("{}")
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_writer_of_another_container_or_with_a_clock_that_is_stepped_lives(tmp_path, monkeypatch):
    """One folder, and process numbers and host names of its own: none of these numbers lives here."""
    with monkeypatch.context() as container:
        container.setattr(os, "getpid", lambda: 2**22 + 1)
        living = atomic(tmp_path / "x.json")
        temporary = living.__enter__()
    monkeypatch.setattr(socket, "gethostname", lambda: "another")
    remove_remains(tmp_path)
    assert temporary.exists()
    living.__exit__(None, None, None)
    assert [path.name for path in tmp_path.iterdir()] == ["x.json"]
    with atomic(tmp_path / "x.json") as temporary:
        for path in (temporary, *temporary.parents[:2]):
            os.utime(path, (1, 1))
        remove_remains(tmp_path)
        assert temporary.exists()


def test_a_workplace_that_was_removed_before_it_had_a_lock_is_made_again(tmp_path, monkeypatch):
    import swd_lens.base.files as files

    take, removed = files.take, []

    def late(path, *arguments, **named):
        if not removed:
            removed.append(path.parent)
            run(lambda: remove_remains(tmp_path))
        return take(path, *arguments, **named)

    monkeypatch.setattr(files, "take", late)
    write_text(tmp_path / "x.json", "{}")
    assert removed and [path.name for path in tmp_path.iterdir()] == ["x.json"]


def test_a_forked_child_that_leaves_the_block_removes_nothing_of_its_parent(tmp_path):
    for begun in (workplace_beside(tmp_path / "x.json"), atomic(tmp_path / "x.json")):
        place = begun.__enter__()
        run(lambda begun=begun: begun.__exit__(KeyboardInterrupt, KeyboardInterrupt(), None) and None)
        assert place.exists()
        begun.__exit__(None, None, None)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, errno.ENOSYS])
def test_without_locks_one_file_is_written_and_nobody_is_taken_for_dead(tmp_path, monkeypatch, code):
    dead = left_by_a_killed_process(tmp_path / "z.json")
    with monkeypatch.context() as disk, atomic(tmp_path / "x.json") as temporary:
        disk.setattr(fcntl, "flock", failing(code))
        with atomic(tmp_path / "y.json") as other:
            remove_remains(tmp_path)
            disk.undo()
            remove_remains(tmp_path)  # of a machine that has locks there: none of them says that it is dead
            assert other.exists() and temporary.exists() and not dead.exists()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x.json", "y.json"]


def failing(code):
    def flock(*_):
        raise OSError(code, os.strerror(code))

    return flock


def test_a_link_stays_and_the_file_that_it_leads_to_is_written(tmp_path):
    (tmp_path / "disk").mkdir()
    for target in ("there.json", "new.json"):
        link = tmp_path / f"link to {target}"
        link.symlink_to(tmp_path / "disk" / target)
        (tmp_path / "disk" / "there.json").write_text("old")
        write_sealed(link, {"a": 1})
        assert link.is_symlink() and read_sealed(tmp_path / "disk" / target, "a thing") == {"a": 1}
    (tmp_path / "unmounted").symlink_to(tmp_path / "nowhere" / "x.json")
    with pytest.raises(OSError, match=r"unmounted was not written \(it is a link to .*nowhere/x\.json"):
        write_text(tmp_path / "unmounted", "{}")
    assert not (tmp_path / "nowhere").exists()


def test_a_name_that_is_not_utf_8_is_refused_at_saving_and_not_called_damaged_at_loading(tmp_path):
    folder = tmp_path / os.fsdecode(b"n\xff")
    tensors = {"a": torch.ones(2)}
    for write in (lambda path: write_tensors(path, tensors, {}), lambda path: write_text(path, "{}")):
        with pytest.raises(OSError, match=r"n⟨U\+DCFF⟩/x was not written \(a name that is not UTF-8\)"):
            write(folder / "x")
    assert not folder.exists()
    write_tensors(tmp_path / "whole" / "x", tensors, {})
    (tmp_path / "whole").rename(folder)
    with pytest.raises(EditError, match=r"n⟨U\+DCFF⟩/x cannot be read under a name that is not UTF-8"):
        read_tensors(folder / "x", "an edit", EditError)
