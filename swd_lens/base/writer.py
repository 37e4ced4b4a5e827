"""One writer per folder: `writing` holds a folder for one call, and says who holds it to every other.

1. `require_writable` looks, before any work, whether the folder can be made and written, and whether the disk has room.
2. `writing` takes a lock (base/lock.py: it is free when its process dies, however it dies), writes who holds the folder since
   when to `.writer`, and removes both at the end. The same thread may take a folder that it holds again: a study that
   saves factors into the folder of its own run. A forked child holds nothing of its parent's.
   `writing_file` does the same for one file that is written again and again.
3. Another call, of this process or another one, gets a FolderInUseError with the holder's name. Readers need no lock: what they
   read is replaced by renames.
4. A folder that cannot be locked is refused, unless the user says that nobody else writes there (SWD_LENS_LOCK=0): a warning.
"""

import json
import math
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from swd_lens.base.errors import FolderInUseError, legible, warn
from swd_lens.base.files import behind_link, fault_of_name, naming, remove_remains
from swd_lens.base.lock import VARIABLE, Lock, NoLocks, take, try_lock, wanted

LOCK, HOLDER = ".writer.lock", ".writer"
_PATIENCE = 0.3  # seconds: between the end of one holder and the lock of the next nobody is refused
_READING = 5.0  # seconds
Value = TypeVar("Value")
# What is held -> the thread that holds it, and the lock; entries are made and taken out by who has the lock.
_held: dict[Path, tuple[threading.Thread, Lock]] = {}


@contextmanager
def writing(folder: str | Path, call: str, n_bytes: int = 0, *, wait: bool = False, alone: bool = False) -> Iterator[Path]:
    """Hold a folder, which is made if it is not there, for as long as the block runs.

    Args:
        folder: what is written into.
        call: the function that writes, as others are told: "factorize".
        n_bytes: about how much it will write; refused where the disk has less.
        wait: until the folder is free, where another call holds it.
        alone: refused, too, where this thread holds the folder: a training within a training is a second one.

    Raises:
        FolderInUseError: another call holds the folder; who and since when is said.
        OSError: the folder cannot be made, written or locked, or its disk is too small; nothing was made.
    """
    folder = Path(folder)
    require_writable(folder, n_bytes)
    with _held_for(folder, "", call, folder, math.inf if wait else _PATIENCE, alone):
        yield folder


@contextmanager
def writing_file(path: str | Path, call: str, *, wait: bool = False) -> Iterator[Path]:
    """`writing` of a single file: others may write other files of the folder. A link is held as what it leads to. Raises
    FolderInUseError: another call writes this file; OSError: it cannot be written; see `require_writable_file`."""
    path = Path(path)
    require_writable_file(path)
    target = behind_link(path)
    with _held_for(target.parent, f".{target.name}", call, target, math.inf if wait else _PATIENCE):
        yield path


def require_writable_file(path: str | Path) -> None:
    """Require a file that can be written into its folder. Raises OSError: it is a folder, or its folder cannot be made,
    written or locked."""
    path = Path(path)
    if path.is_dir():
        raise IsADirectoryError(f"{legible(path)} is a folder; give the name of a file in it. Nothing was done")
    require_writable(behind_link(path).parent)


@contextmanager
def _held_for(folder: Path, prefix: str, call: str, target: Path, patience: float, alone: bool = False) -> Iterator[None]:
    """Make the folder, and hold the target (itself, or a file of it) for one thread of one process; locks of files begin with
    their names. patience: seconds."""
    made = [path for path in (folder, *folder.parents) if not path.exists()]  # the innermost first
    folder.mkdir(parents=True, exist_ok=True)
    target = target.resolve()
    try:
        thread, lock = _held.get(target, (None, None))
        if not alone and lock is not None and lock.held and thread is threading.current_thread():
            yield
            return
        lock_file, holder_file = folder / f"{prefix}{LOCK}", folder / f"{prefix}{HOLDER}"
        try:
            lock = take(lock_file, patience) if wanted() else Lock()
        except BlockingIOError:
            try:
                holder = json.loads(holder_file.read_text(encoding="utf-8"))
                who = f"{holder['call']} (process {holder['process']} on {holder['machine']}, since {holder['since']})"
            except (OSError, ValueError, KeyError, TypeError):  # it has not said so yet
                who = "another call"
            raise FolderInUseError(
                f"{target} is written by {who}. Wait for it, end it, or give another folder; the lock of a process that died "
                f"is free at once. Only if that process ran on another machine and is gone, remove {lock_file}"
            ) from None
        except NoLocks as cause:
            raise _without_locks(target, cause) from cause
        try:
            if not wanted():
                warn(f"{legible(target)} is written without a lock ({VARIABLE}=0): no other call must write there meanwhile")
            _held[target] = (threading.current_thread(), lock)
            now = datetime.now().astimezone().isoformat(sep=" ", timespec="seconds")
            holder = {"call": call, "process": os.getpid(), "machine": socket.gethostname(), "since": now}
            with naming(holder_file):
                holder_file.write_text(json.dumps(holder), encoding="utf-8")
            # What calls left that were killed: anywhere in a folder, and beside a file those of the file.
            remove_remains(target) if target.is_dir() else remove_remains(target.parent, target.name)
            yield
        finally:
            if lock.held:  # a forked child that leaves the block has nothing to give back
                _held.pop(target, None)
                with suppress(OSError):
                    holder_file.unlink()  # before the lock is free, so that it is never the next holder's
                lock.free()
    finally:
        for path in made:  # what nothing was written into goes again
            with suppress(OSError):
                path.rmdir()


def read_beside_writer(folder: Path, read: Callable[[], Value]) -> Value:
    """Read a folder by `read`; where that fails while a call writes the folder, so that files of two states lie there, read it
    again, for a few seconds. Raises what `read` raised last."""
    end = time.monotonic() + _READING
    while True:
        written = (folder / HOLDER).exists()
        try:
            return read()
        except (OSError, ValueError):
            if not (written or (folder / HOLDER).exists()) or time.monotonic() > end:
                raise
        time.sleep(0.02)


def require_writable(folder: str | Path, n_bytes: int = 0) -> None:
    """Require a folder that can be made, written and locked, on a disk with room for so many bytes. Raises OSError: it is a
    file, lies below one, cannot be written or locked, or the disk is too small."""
    folder = Path(folder)
    if fault := fault_of_name(folder):
        raise PermissionError(
            f"{legible(folder)} cannot be written ({legible(fault)}). Give a folder that you may write; nothing was done"
        )
    there = folder
    while not (there.exists() or there.is_symlink()) and there != there.parent:  # a link may lead nowhere
        there = there.parent
    if not there.is_dir():
        raise NotADirectoryError(
            f"{legible(folder)} cannot be written: {legible(there)} is no folder. Give another folder; nothing was done"
        )
    try:
        with tempfile.TemporaryFile(dir=there) as file:
            if wanted():
                try_lock(file)
    except NoLocks as cause:
        raise _without_locks(folder, cause) from cause
    except OSError as cause:
        raise PermissionError(
            f"{legible(folder)} cannot be written ({legible(cause.strerror or cause)}). Give a folder that you may write; "
            "nothing was done"
        ) from cause
    free = shutil.disk_usage(there).free
    if n_bytes > free:
        raise OSError(
            f"{legible(folder)}: about {n_bytes / 1e9:.2f} GB will be written and {free / 1e9:.2f} GB are "
            "free. Free some space, or give another disk; nothing was done"
        )


def _without_locks(folder: Path, cause: OSError) -> Exception:
    refusal: Any = OSError(
        f"{legible(folder)} cannot be locked ({legible(cause.strerror or cause)}): its file system has no locks, so that two "
        "calls could write it at once. Give a folder on a local disk; or, where nobody else writes there, set "
        f"{VARIABLE}=0 in the environment. Nothing was done"
    )
    refusal.errno = cause.errno
    return refusal
