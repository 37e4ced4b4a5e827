"""Triggers of the section "Files and folders" of swd_lens/ERRORS.md."""

import errno
import json
import os
import threading

from safetensors import SafetensorError

import swd_lens.base.sealed as sealed
from swd_lens.base.lock import NoLocks
from swd_lens.base.names import require_names
from swd_lens.base.sealed import hashes_of, read_sealed, read_tensors, require_hashes, write_sealed, write_tensors
from swd_lens.base.step_cache import StepCache
from swd_lens.base.writer import require_writable, require_writable_file, writing
from tests.errors.triggers import trigger


@trigger
def file_unreadable(folder, patch):
    (folder / "x.json").write_text("{")
    read_sealed(folder / "x.json", "a circuit")


@trigger
def file_changed(folder, patch):
    write_sealed(folder / "x.json", {"a": 1})
    values = json.loads((folder / "x.json").read_text())
    (folder / "x.json").write_text(json.dumps({**values, "a": 2}))
    read_sealed(folder / "x.json", "a circuit")


@trigger
def file_gone(folder, patch):
    (folder / "x").touch()
    hashes = hashes_of(folder, ["x"])
    (folder / "x").unlink()
    require_hashes(folder, hashes, "a run")


@trigger
def parts_of_another_call(folder, patch):
    StepCache(folder, {"host": "a"})
    StepCache(folder, {"host": "b"})


@trigger
def file_not_written(folder, patch):
    def full(*args):
        raise SafetensorError("No space left on device")

    patch.setattr(sealed, "save_file", full)
    write_tensors(folder / "x.safetensors", {}, {})


@trigger
def file_without_hash(folder, patch):
    (folder / "x.json").write_text("{}")
    read_sealed(folder / "x.json", "a circuit")


@trigger
def name_of_ours(folder, patch):
    require_names("task", ["factors"])


@trigger
def folder_in_use(folder, patch):
    refused = []

    def second():
        try:
            with writing(folder, "finetune"):
                pass
        except OSError as refusal:
            refused.append(refusal)

    with writing(folder, "factorize"):
        thread = threading.Thread(target=second)
        thread.start()
        thread.join()
    raise refused[0]


@trigger
def folder_without_locks(folder, patch):
    patch.setattr("swd_lens.base.writer.try_lock", _without)
    require_writable(folder)


@trigger
def folder_not_locked(folder, patch):
    patch.setenv("SWD_LENS_LOCK", "0")
    with writing(folder, "factorize"):
        pass


def _without(*_):
    raise NoLocks(errno.ENOLCK, os.strerror(errno.ENOLCK))


@trigger
def file_with_an_unreadable_name(folder, patch):
    read_tensors(folder / os.fsdecode(b"\xff"), "factors")


@trigger
def out_is_no_folder(folder, patch):
    (folder / "x").touch()
    require_writable(folder / "x")


@trigger
def out_is_a_folder(folder, patch):
    require_writable_file(folder)


@trigger
def out_not_writable(folder, patch):
    require_writable("/proc/out")


@trigger
def out_on_a_full_disk(folder, patch):
    require_writable(folder, 10**18)
