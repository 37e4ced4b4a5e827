"""Checkpoint folders that are made of other files once, and kept in the cache folder.

1. A folder is written under a lock, beside its name, and renamed when it is whole.
2. `source.json` in it says what it was made of, how the model is called, and carries the files' hashes. A folder whose files are
   not those any more is made again.
"""

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swd_lens.base import __version__
from swd_lens.base.errors import legible
from swd_lens.base.files import remove_remains, workplace_beside
from swd_lens.base.machine import is_out_of_memory
from swd_lens.base.sealed import hashes_of, read_sealed, require_hashes, write_sealed
from swd_lens.base.writer import writing_file

SOURCE = "source.json"


def cache_folder() -> Path:
    """Where swd_lens keeps what it made of files: $SWD_LENS_CACHE, else swd_lens below $XDG_CACHE_HOME or ~/.cache."""
    own = os.environ.get("SWD_LENS_CACHE")
    return Path(own) if own else Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "swd_lens"


def made_folder(place: str, what: str, source: Mapping[str, Any], make: Callable[[Path], str]) -> tuple[Path, str]:
    """The folder of this place below the cache folder, made where there is none yet, and the model's name.

    Args:
        what: the folder in an error's words ("a dequantized model").
        source: what it is made of, kept in it.
        make: writes the checkpoint into a folder and returns the model's name.

    Raises OSError: the cache folder cannot be written or locked.
    """
    folder = cache_folder() / place
    folder.parent.mkdir(parents=True, exist_ok=True)
    # Who comes second waits, and then reads what the first one wrote. A name beside the folder is held: itself is exchanged.
    with writing_file(folder.with_name(f"{folder.name}.making"), f"making {what}", wait=True):
        with suppress(FileNotFoundError, ValueError, KeyError):  # made already, and whole
            said = read_sealed(folder / SOURCE, what)
            require_hashes(folder, said["files"], what)
            return folder, str(said["model"])
        remove_remains(folder.parent, folder.name)
        with workplace_beside(folder) as workplace:
            label = make(workplace)
            files = hashes_of(workplace, sorted(path.name for path in workplace.iterdir()))
            write_sealed(workplace / SOURCE, {"model": label, **source, "swd_lens": __version__, "files": files})
            for path in workplace.iterdir():  # safetensors writes files that only their owner can read
                path.chmod((workplace / SOURCE).stat().st_mode)
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(workplace, folder)
        return folder, label


@contextmanager
def refused_as(message: str) -> Iterator[None]:
    """While open, whatever a library raises on a file that it cannot use becomes a ValueError; a lack of memory does not.
    message: begins the error; the library's own words end it."""
    try:
        yield
    except Exception as cause:
        if is_out_of_memory(cause):
            raise
        raise ValueError(f"{message}: {legible(str(cause) or type(cause).__name__)}") from cause
