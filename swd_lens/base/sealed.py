"""Sealed files: what is written and read again carries its hash, so that a changed file is refused and never read as if whole.

1. JSON: `write_sealed` puts a SHA-256 over all values into the file, under "sha256"; `read_sealed` checks it. `seal` and `unseal`
   do so to values that stand inside of a larger file.
2. Tensors: `write_tensors` puts a SHA-256 over names, dtypes, shapes, bytes and metadata into the metadata of a safetensors file;
   `read_tensors` checks it. Equal tensors and metadata are equal files, to the byte.
3. Whole files of a folder: `hashes_of` and `require_hashes`, for a finished folder that knows its result.
4. A file without a hash (written or edited by hand) is read with one UnsealedFileWarning.
5. Whatever a reader raises on a damaged file (not UTF-8, nested too deep, a number too long, ...) is one error, of the class that
   the caller's kind of file has, with the path and the reason.

The hash is of the values, not of their layout: a JSON file that an editor indented otherwise is the same.
"""

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swd_lens.base.errors import UnsealedFileWarning, legible, warn
from swd_lens.base.files import atomic, fault_of_name, plain, sha256, write_text

SEAL = "sha256"
_ATTEMPTS = 100  # to open a file that is exchanged all the time
_MARK = "swd_lens "  # begins every hash: that a file has one is seen also where the name that it stands under is damaged
_RESTORE = "Restore it from a copy, or make it again"


def seal(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values as JSON has them (NaN and infinities are null), and their hash under "sha256"."""
    values = plain({name: value for name, value in values.items() if name != SEAL})
    return {**values, SEAL: _MARK + _digest(values)}


def damaged(path: object, what: str, reason: object) -> str:
    """The message of a file that cannot be read as what it should be ("an allocation")."""
    return f"{legible(path)} is not {what}, or damaged ({legible(reason)}). {_RESTORE}"


def altered(path: object, what: str) -> str:
    """The message of a file whose content is not what its hash was made of."""
    return f"{legible(path)}: not what was written there as {what} (its hash is another). {_RESTORE}"


def unseal(values: Any, path: str | Path, what: str, raised_as: type[Exception] = ValueError) -> dict[str, Any]:
    """Check the hash of the values and take it off; a missing hash is warned of.

    Args:
        path: where they were read, for messages.
        what: the kind of file, with its article: "a circuit".
        raised_as: the class that damaged files of this kind have.

    Raises raised_as: no mapping, or other values than were written.
    """
    if not isinstance(values, Mapping):
        raise raised_as(damaged(path, what, type(values).__name__))
    rest = {name: value for name, value in values.items() if name != SEAL}
    if SEAL not in values and not marked(rest):
        warn_of_missing_seal(path)
    elif values.get(SEAL) != _MARK + _digest(rest):
        raise raised_as(altered(path, what))
    return rest


def write_sealed(path: Path, values: Mapping[str, Any]) -> None:
    """Write values and their hash as JSON, atomically."""
    write_text(path, json.dumps(seal(values), indent=1, allow_nan=False))


def read_sealed(path: Path, what: str, raised_as: type[Exception] = ValueError) -> dict[str, Any]:
    """Read what `write_sealed` wrote. Raises FileNotFoundError: there is no such file; raised_as: it is not JSON, or not what
    was written; see `unseal` for the arguments."""
    return unseal(read_json(path, what, raised_as), path, what, raised_as)


def read_json(path: Path, what: str, raised_as: type[Exception] = ValueError) -> Any:
    """The values of any JSON file, sealed or not; the seal is left in. Raises FileNotFoundError: there is no such file;
    raised_as: it is not JSON."""
    with readable(path, what, raised_as):
        return json.loads(Path(path).read_text(encoding="utf-8"))


@contextmanager
def readable(path: str | Path, what: str, raised_as: type[Exception] = ValueError) -> Iterator[None]:
    """Turn whatever is raised while a damaged file is read into one error; a missing file stays a FileNotFoundError.

    What `raised_as` and its subclasses say already (other than ValueError itself) is let through.
    """
    try:
        yield
    except (FileNotFoundError, KeyboardInterrupt):
        raise
    except Exception as cause:  # what a parser raises on bytes that nobody foresaw has no common class
        if isinstance(cause, raised_as) and raised_as is not ValueError:
            raise
        reason = str(cause) or type(cause).__name__
        raise raised_as(damaged(path, what, reason)) from cause


def warn_of_missing_seal(path: str | Path) -> None:
    """Say that a file carries no hash; Python shows it once for a file."""
    warn(
        f"{path} carries no hash (it was written or edited by hand): a change on the disk would not be noticed. Save it again",
        UnsealedFileWarning,
    )


def marked(values: Mapping[str, Any]) -> bool:
    """Whether some value is a hash of ours, whatever it is called."""
    return any(isinstance(v, str) and v.startswith(_MARK) and len(v) == len(_MARK) + 64 for v in values.values())


def _digest(values: Any) -> str:
    text = json.dumps(values, sort_keys=True, separators=(",", ":"))  # what was damaged may hold NaN
    return hashlib.sha256(text.encode()).hexdigest()


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file with its hash, atomically. Raises OSError: the disk is full, or the folder cannot be written;
    the path is named and nothing is left behind."""
    on_cpu = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic(path) as temporary:
        save_file(on_cpu, str(temporary), {**metadata, SEAL: _MARK + tensor_digest(on_cpu, metadata)})
        # Sort what safetensors writes in an order that it draws anew each time.
        with open(temporary, "r+b") as file:
            length = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(length))
            header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
            text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
            if len(text) <= length:
                file.seek(8)
                file.write(text.ljust(length))


def open_tensors(path: Path, what: str, raised_as: type[Exception] = ValueError) -> Any:
    """A safetensors file, mapped: what it holds can be read, with `read_tensors`, also when its name is gone. Raises
    FileNotFoundError: there is no such file; raised_as: it is not a safetensors file, or its name is not UTF-8."""
    if fault := fault_of_name(path):
        raise raised_as(f"{legible(path)} cannot be read under {fault}. Give it, and the folders above it, other names")
    for attempt in range(_ATTEMPTS):
        before = identity(path)
        try:
            with readable(path, what, raised_as):
                file = safe_open(str(path), "pt")
        except raised_as:
            if before == identity(path) or attempt + 1 == _ATTEMPTS:
                raise
            continue
        # safetensors opens the file twice, by its name: the header may be that of the one and the bytes those of the next.
        if before == identity(path):
            break
    return file


def identity(path: Path) -> tuple[int, int] | None:
    """Numbers that change when another file gets this name; None where there is none."""
    with suppress(OSError):
        state = path.stat()
        return state.st_ino, state.st_mtime_ns
    return None


def read_tensors(
    path: Path, what: str, raised_as: type[Exception] = ValueError, expected: str | None = None, file: Any = None
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors and metadata of what `write_tensors` wrote.

    Args:
        expected: the `tensor_digest` that it must have, where somebody knows it: a file that was exchanged is refused, too.
        file: of `open_tensors`, where it is open already.

    Raises:
        FileNotFoundError: there is no such file.
        raised_as: it is not a safetensors file, or not what was written; see `unseal` for the arguments.
    """
    file = open_tensors(path, what, raised_as) if file is None else file
    with readable(path, what, raised_as):
        metadata = dict(file.metadata() or {})
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
    sealed_as = metadata.pop(SEAL, None)
    known = {sealed_as, None if expected is None else _MARK + expected} - {None}
    if not known and not marked(metadata):
        warn_of_missing_seal(path)
    elif known != {_MARK + tensor_digest(tensors, metadata)}:
        raise raised_as(altered(path, what))
    return tensors, metadata


def tensor_digest(tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> str:
    """SHA-256 over tensors on the CPU (name, dtype, shape, bytes) and over metadata, whatever their order."""
    digest = hashlib.sha256(json.dumps(dict(metadata or {}), sort_keys=True).encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach()
        digest.update(f"\n{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.contiguous().flatten().view(torch.uint8).numpy().data)
    return digest.hexdigest()


def hashes_of(folder: Path, names: Iterable[str]) -> dict[str, str]:
    """Relative name -> SHA-256 of each file; of a folder among the names, of every file in it."""
    hashes: dict[str, str] = {}
    for name in names:
        path = folder / name
        files = sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]
        whole = [file for file in files if not file.name.startswith(".")]  # others stand there only while they are written
        hashes |= {file.relative_to(folder).as_posix(): sha256(file) for file in whole}
    return hashes


def require_hashes(folder: Path, hashes: Mapping[str, str], what: str, raised_as: type[Exception] = ValueError) -> None:
    """Require that the folder holds these files as they were written. Raises raised_as: one is missing, has other bytes, or
    its name leads out of the folder."""
    for name, expected in hashes.items():
        path = folder / name
        # By its name: a user may have put a part of the folder on another disk, with a link in its place.
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise raised_as(damaged(folder, what, f"it names a file outside of the folder, {name}"))
        if not path.is_file():
            raise raised_as(f"{legible(path)} is missing; {what} named it when it was finished. {_RESTORE}")
        if sha256(path) != expected:
            raise raised_as(altered(path, what))
