"""Files are written whole or not at all: `atomic` gives a path beside the wanted one and renames it at the end.

What a killed process left beside a file is removed by the next writer of that file; what a living one is writing is not touched.
"""

import glob
import hashlib
import json
import math
import os
import re
import shutil
import socket
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
from safetensors import SafetensorError

from swd_lens.base.errors import error

_HOST = re.sub(r"[^A-Za-z0-9-]", "-", socket.gethostname())


@contextmanager
def atomic(path: Path) -> Iterator[Path]:
    """Yield a temporary path; on success its file replaces `path`, on any exception (Ctrl-C too) it is removed.

    It lies in a folder of its own beside `path`, because libraries put temporary files beside what they write. The file gets the
    mode that the user's umask gives, whatever the library that writes it would choose.

    Raises:
        OSError: the disk is full, or it cannot be written; the path is named, whoever said so.
    """
    if "\0" in str(path):  # Python's own error would not name it
        raise error("file-not-written", path=path, reason="a null character in its name")
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_remains(path.parent, path.name)
    workplace = workplace_beside(path)
    try:
        workplace.mkdir()
        temporary = workplace / path.name
        temporary.touch()
        mode = temporary.stat().st_mode & 0o777
        with naming(path):
            yield temporary
        temporary.chmod(mode)
        os.replace(temporary, path)
    finally:
        shutil.rmtree(workplace, ignore_errors=True)


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A failed write whose error names no file, as that of a full disk, becomes an OSError that names this path."""
    try:
        yield
    except OSError as cause:
        if cause.filename is not None or cause.errno is None:
            raise
        refusal: Any = error("file-not-written", path=path, reason=cause.strerror)
        refusal.errno = cause.errno
        raise refusal from cause
    except SafetensorError as cause:
        raise error("file-not-written", path=path, reason=cause) from cause


def workplace_beside(path: Path) -> Path:
    """A name for a folder beside `path`, by which `remove_remains` knows it once this process is dead."""
    return path.with_name(f".{path.name}.{_HOST}.{os.getpid()}.{uuid.uuid4().hex[:8]}.part")


def remove_remains(folder: Path, name: str = "*") -> None:
    """Remove workplaces beside a file (or any file) of the folder that a process of this machine left which is dead."""
    for part in folder.glob(f".{glob.escape(name) if name != '*' else name}.*.part"):
        made_by = re.search(r"\.([^.]+)\.(\d+)\.[0-9a-f]{8}\.part$", part.name)
        if made_by and made_by[1] == _HOST and not _is_alive(int(made_by[2]), part):
            shutil.rmtree(part, ignore_errors=True)


def _is_alive(process: int, workplace: Path) -> bool:
    """Whether the process that made a workplace still runs; another one may have got its number since."""
    try:
        running = psutil.Process(process)
        # Starts are told to a hundredth of a second.
        is_maker = running.create_time() <= workplace.stat().st_mtime + 0.1
        return is_maker and running.status() != psutil.STATUS_ZOMBIE
    except (psutil.NoSuchProcess, OSError, OverflowError):
        return False


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
