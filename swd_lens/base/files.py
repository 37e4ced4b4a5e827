"""Files are written whole or not at all: `atomic` gives a path in a workplace beside the wanted one and renames it at the end.

1. A workplace is a folder with a lock and what is made; its process holds the lock (base/lock.py).
2. What a killed process left beside a file is removed by the next writer of that file; what a living one is writing is not
   touched. Where the file system has no locks, nobody can tell a workplace to be dead: there it stays after a kill.
"""

import glob
import hashlib
import json
import math
import os
import re
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from swd_lens.base.errors import legible
from swd_lens.base.lock import Lock, NoLocks, take

_LOCK, _MADE = "lock", "made"  # in a workplace


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success its file replaces `path`, on any exception (Ctrl-C too) it is removed.

    It lies in a folder of its own beside `path`, because libraries put temporary files beside what they write. The file gets the
    mode that the user's umask gives, whatever the library that writes it would choose. Where `path` is a link, it stays one: the
    file that it leads to is replaced.

    Raises OSError: the disk is full, or it cannot be written; the path is named, whoever said so.
    """
    if fault := fault_of_name(path):  # Python's own error would not name it
        raise _not_written(path, fault)
    path.parent.mkdir(parents=True, exist_ok=True)
    target = behind_link(path)
    remove_remains(target.parent, target.name)
    with workplace_beside(target) as folder:
        temporary = folder / target.name
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777
        with naming(path):
            yield temporary
        temporary.chmod(mode)
        os.replace(temporary, target)


def fault_of_name(path: str | Path) -> str | None:
    """Why a path is no name that files are written under; None of one that is."""
    if "\0" in str(path):
        return "a null character in its name"
    try:
        str(path).encode()
    except UnicodeEncodeError:  # safetensors writes such a file, and cannot read it
        return "a name that is not UTF-8"
    return None


def behind_link(path: Path) -> Path:
    """The file that is written under this name: where it is a link, what it leads to. Raises OSError: it leads into a folder
    that is not there, such as that of a disk which is not mounted."""
    if not path.is_symlink():
        return path
    target = Path(os.path.realpath(path))
    if not target.parent.is_dir() or fault_of_name(target):
        raise _not_written(path, f"it is a link to {target}, which cannot be written")
    return target


def _not_written(path: Path, reason: object) -> OSError:
    return OSError(f"{legible(path)} was not written ({legible(reason)}); what stood there before is unchanged")


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Turn a failed write whose error names no file, as that of a full disk, into an OSError that names this path."""
    try:
        yield
    except OSError as cause:
        if cause.filename is not None or cause.errno is None:
            raise
        refusal = _not_written(path, cause.strerror)
        refusal.errno = cause.errno
        raise refusal from cause
    except SafetensorError as cause:
        raise _not_written(path, cause) from cause


@contextmanager
def workplace_beside(path: Path, mode: int = 0o777) -> Iterator[Path]:
    """A folder beside `path` for as long as the block runs; once this process is dead, `remove_remains` removes it. mode: of
    what lies around it, before the umask."""
    with ExitStack() as ends:
        while True:
            place = path.with_name(f".{path.name}.{uuid.uuid4().hex[:16]}.part")
            ends.callback(_clear, place, lock := [])
            place.mkdir(mode)
            with suppress(FileNotFoundError, BlockingIOError):  # one who found no lock yet has removed it: another one
                try:
                    lock.append(take(place / _LOCK))
                except NoLocks:  # no file either, so that nobody takes it for the lock of one that has died
                    (place / _LOCK).unlink(missing_ok=True)
                    lock.append(Lock())
                (place / _MADE).mkdir()
                break
        yield place / _MADE


def remove_remains(folder: Path, name: str = "*") -> None:
    """Remove workplaces beside a file (or any file) of the folder whose process is dead: nobody holds their locks."""
    for place in folder.glob(f".{glob.escape(name) if name != '*' else name}.*.part"):
        if not re.search(r"\.[0-9a-f]{16}\.part$", place.name):
            continue
        try:
            _clear(place, [take(place / _LOCK, make=False)])
        except FileNotFoundError:
            # It died before it had a lock; or it will look for its workplace in a moment, and make another one.
            with suppress(OSError):
                place.rmdir()
        except OSError:
            continue


def _clear(place: Path, lock: list[Lock]) -> None:
    """Remove a workplace, its lock after what it has made: killed here, it is seen to be dead. A forked child removes nothing."""
    if lock and not lock[0].held:
        return
    shutil.rmtree(place / _MADE, ignore_errors=True)
    for each in lock:
        each.free()
    with suppress(OSError):
        if not lock:  # interrupted while it was taken
            (place / _LOCK).unlink(missing_ok=True)
        place.rmdir()


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, in UTF-8."""
    with atomic(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def sha256(path: Path) -> str:
    """SHA-256 of a file's bytes, read in blocks."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def write_json(path: Path, value: Any) -> None:
    """Write plain values as JSON, atomically; NaN and infinities become null, so that every JSON reader can read it."""
    write_text(path, json.dumps(plain(value), indent=1, allow_nan=False))


def plain(value: Any) -> Any:
    """Nested dicts and sequences with every non-finite float replaced by None."""
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
