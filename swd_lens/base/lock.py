"""Locks of files tell who is alive: the system keeps them, and frees them when their process dies, however it dies.

Host names, process numbers and times do not: containers share them, clocks are stepped, and a file server has a clock of its own.

1. `take` locks a file that it makes, `Lock.free` removes the file and frees the lock; `try_lock` locks a file that is open.
2. A lock belongs to one process. A forked child closes its copies of the files, which would keep the locks of a parent that has
   died, and holds nothing.
3. A file system may have no locks (NoLocks); `wanted` is what the user says of that.
"""

import errno
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from weakref import WeakSet

VARIABLE = "SWD_LENS_LOCK"
_HELD = (errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES)  # what systems say of a lock that another holds
_PAUSE = 0.02  # seconds between two attempts


class NoLocks(OSError):
    """The file system has no locks, or its server does not answer; `strerror` is the system's reason."""


class Lock:
    """A lock that this process holds until `free`; without a file, one that nobody else sees. held: False once it is free, and
    in every forked child."""

    def __init__(self, path: Path | None = None, file: IO[Any] | None = None):
        self.held = True
        self._path, self._file = path, file
        _locks.add(self)

    def free(self) -> None:
        """Remove the file and free the lock; does nothing if the lock is no longer held."""
        if not self.held:
            return
        # Removed before it is free, so that the next holder's file never is; Windows removes no file that is open.
        if sys.platform != "win32":
            self._remove()
        self.forget(unlock=True)
        if sys.platform == "win32":
            self._remove()

    def forget(self, unlock: bool = False) -> None:
        """Close the file. The lock stays with other processes that have it open, unless it is unlocked."""
        self.held = False
        if self._file is not None:
            if unlock:
                with suppress(OSError):
                    _lock(self._file, free=True)
            self._file.close()

    def _remove(self) -> None:
        if self._path is not None:
            with suppress(OSError):
                self._path.unlink()


_locks: WeakSet[Lock] = WeakSet()


def wanted() -> bool:
    """Whether folders are to be locked; SWD_LENS_LOCK=0 in the environment says no."""
    return os.environ.get(VARIABLE) != "0"


def take(path: Path, patience: float = 0.0, *, make: bool = True) -> Lock:
    """Lock a file.

    Args:
        patience: seconds to wait while another holds it.
        make: the file where it is not there; else a FileNotFoundError.

    Raises:
        BlockingIOError: another holds it, be it another thread of this process.
        NoLocks: the file system has no locks.
        OSError: the file cannot be opened for writing.
    """
    end = time.monotonic() + patience
    while True:
        lock = Lock(path, file := open(path, "ab" if make else "r+b", buffering=0))  # noqa: SIM115 - the lock closes it
        try:
            locked = try_lock(file)
        except NoLocks:
            lock.forget()
            raise
        stands = locked and sys.platform == "win32"  # where no file is removed that is open
        if locked and not stands:
            with suppress(FileNotFoundError):
                stands = os.path.samestat(os.fstat(file.fileno()), path.stat())
        if stands:
            return lock
        lock.forget()
        if locked:  # the holder before has removed the file meanwhile: another one may stand there
            continue
        if time.monotonic() >= end:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(path))
        time.sleep(_PAUSE)


def try_lock(file: IO[Any]) -> bool:
    """Lock an open file until it is closed; False: another holds it. Raises NoLocks: the file system has no locks."""
    try:
        _lock(file)
    except OSError as cause:
        if cause.errno in _HELD:
            return False
        raise NoLocks(cause.errno, cause.strerror) from cause
    return True


if sys.platform == "win32":
    import msvcrt

    def _lock(file: IO[Any], free: bool = False) -> None:
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK if free else msvcrt.LK_NBLCK, 1)

else:
    import fcntl

    def _lock(file: IO[Any], free: bool = False) -> None:
        fcntl.flock(file, fcntl.LOCK_UN if free else fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _forget_all() -> None:
        for lock in list(_locks):
            lock.forget()

    os.register_at_fork(after_in_child=_forget_all)
