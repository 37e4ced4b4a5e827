"""A folder of factors: one index, factors.json, and one file per matrix (storage.py).

1. `writing_factors` is around all that a call writes: one writer at a time, and what an interrupted one had written goes.
2. `write_index` replaces factors.json by a rename, then deletes the files that only the former index named. That rename
   is the one moment at which the folder changes: a reader sees all of the old set or all of the new one, and whatever
   interrupts a writer leaves one of the two.
3. `open_folder` checks the index, which carries its own hash, and every file's, in blocks, and opens them. Where a writer
   replaced the index meanwhile, it starts again.
4. Nothing is deleted whose name and hash are not those that were written.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from swd_lens.base.errors import FactorFileError, legible, quoted
from swd_lens.base.files import sha256, write_text
from swd_lens.base.sealed import SEAL, altered, identity, read_json, read_tensors, readable, seal, tensor_digest, unseal
from swd_lens.base.writer import require_writable_file, writing
from swd_lens.units.storage import OUR_NAME, UNNAMED, StoredSite
from swd_lens.units.storage import WHAT as FILE

FORMAT_VERSION = 1
INDEX = "factors.json"
WHAT = "an index of factors"
_ENTRY = {"file": str, "sha256": str, "d_in": int, "units": int, "d_out": int, "settings": dict, "provenance": dict}
_ATTEMPTS = 100  # to read a folder in which the index is replaced all the time


@contextmanager
def writing_factors(folder: Path, call: str, n_bytes: int = 0) -> Iterator[None]:
    """Hold a folder for a call that writes factors there; files that it, or a killed one before it, leaves unnamed go. Raises
    FolderInUseError, OSError: see `swd_lens.base.writer.writing`."""
    require_writable_file(folder / INDEX)
    with writing(folder, call, n_bytes):
        _remove_unnamed(folder, _named_in(folder))
        try:
            yield
        finally:
            _remove_unnamed(folder, _named_in(folder))


def clear_remains(folder: Path, call: str) -> None:
    """Remove what the call that finished this set left when it was killed at its very end; nothing where one still writes."""
    if any(folder.glob(".*")):
        with suppress(OSError), writing_factors(folder, call):
            pass


def write_index(folder: Path, entries: Mapping[str, Mapping[str, Any]], provenance: Mapping[str, Any]) -> None:
    """Make the folder hold exactly these matrices, in this order. entries: site -> what `write_site` returned, with "settings"
    and "provenance"; provenance: of the whole set. Numbers that are not finite become null."""
    # Made into text first: values that json cannot write must fail before anything is replaced.
    text = json.dumps(seal({"format": FORMAT_VERSION, "provenance": provenance, "sites": entries}), indent=1)
    former = _named_in(folder)
    write_text(folder / INDEX, text)
    named = {entry["file"] for entry in entries.values()}
    _remove_unnamed(folder, named)
    _remove(folder, {name: digest for name, digest in (former or {}).items() if name not in named})


def remove_set(folder: Path) -> None:
    """Remove the index of a folder and the files that it names."""
    named = _named_in(folder)
    (folder / INDEX).unlink(missing_ok=True)
    _remove(folder, named or {})


def _named_in(folder: Path) -> dict[str, str] | None:
    """File -> SHA-256 in the folder's index; None where that is damaged, for then nobody knows what is ours."""
    try:
        sites = read_index(folder)["sites"]
    except FactorFileError:
        return None
    except FileNotFoundError:
        return {}
    return {entry["file"]: entry["sha256"] for entry in sites.values()}


def _remove(folder: Path, files: Mapping[str, str]) -> None:
    """Remove those files whose name and hash are ours; any other file that an index names belongs to somebody else."""
    for name, digest in files.items():
        path = folder / name
        if not OUR_NAME.fullmatch(name) or not path.is_file():
            continue
        with suppress(OSError):  # the folder is whole without
            if sha256(path) == digest:
                path.unlink()


def _remove_unnamed(folder: Path, named: Collection[str] | None) -> None:
    """Remove the files that a writer made and the index does not name; named: by the index, None: nobody knows."""
    listed = folder / UNNAMED
    if named is None or not listed.is_file():
        return
    for name in listed.read_text(encoding="utf-8", errors="replace").split():
        match = OUR_NAME.fullmatch(name)
        if name in named or match is None:
            continue
        with suppress(OSError, FactorFileError):
            if tensor_digest(read_tensors(folder / name, FILE, FactorFileError)[0])[:12] == match[1]:
                (folder / name).unlink()
    listed.unlink(missing_ok=True)


def open_folder(folder: Path) -> tuple[dict[str, Any], dict[str, StoredSite]]:
    """Provenance and sites of a folder, checked: every file is there, has its hash and is open. Raises FileNotFoundError: no
    index there; FactorFileError: another format, a damaged index, or a file that is missing or is not the one it was written
    with."""
    index, failed_with, attempt = folder / INDEX, None, 0
    while True:
        attempt, version = attempt + 1, identity(index)
        try:
            with readable(index, WHAT, FactorFileError):
                return _opened(folder, read_index(folder))
        except (FactorFileError, FileNotFoundError):
            # A writer may have replaced the index meanwhile. Twice the same index: the folder is damaged.
            if version is None or version == failed_with or attempt == _ATTEMPTS:
                raise
            failed_with = version


def _opened(folder: Path, described: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, StoredSite]]:
    sites: dict[str, StoredSite] = {}
    for site, entry in described["sites"].items():
        file = folder / entry["file"]
        if not file.is_file():
            raise FactorFileError(f"{file}, the factors of {site}, is missing; copy the folder again, or factorize again")
        if sha256(file) != entry["sha256"]:
            raise FactorFileError(
                f"{file} is not the file that {INDEX} was written with (cut short, damaged or exchanged); "
                "copy the folder again, or factorize again"
            )
        sites[site] = StoredSite(folder, site, entry)
    return described["provenance"], sites


def read_index(folder: Path) -> dict[str, Any]:
    """The checked index, {"provenance": ..., "sites": {site: entry}}, whether the files are there or not. Raises
    FileNotFoundError: no index there; FactorFileError: another format, or a damaged index."""
    path = folder / INDEX
    if not path.exists():
        raise FileNotFoundError(f"{legible(folder)} holds no {INDEX}; give the folder that FactorSet.save wrote")
    described = read_json(path, WHAT, FactorFileError)
    version = described.get("format") if isinstance(described, dict) else None
    if type(version) is not int or version != FORMAT_VERSION:  # True is no version
        advice = "update swd_lens" if isinstance(version, int) and version > FORMAT_VERSION else "factorize again"
        raise FactorFileError(f"{folder} is of factor format {version}, this swd_lens reads {FORMAT_VERSION}; {advice}")
    if SEAL not in described:
        raise FactorFileError(altered(path, WHAT))
    described = unseal(described, path, WHAT, FactorFileError)
    for key in ("provenance", "sites"):
        if not isinstance(described.get(key), dict):
            raise FactorFileError(f"{path} is damaged: it has no {quoted(key)}; copy the folder again, or factorize again")
    for site, entry in described["sites"].items():
        for key, kind in _ENTRY.items():
            value = entry.get(key) if isinstance(entry, dict) else None
            if type(value) is not kind or (isinstance(value, int) and value < 1):  # True is no number
                raise FactorFileError(
                    f"{path} is damaged: {quoted(key)} of {site} is {quoted(value)}; copy the folder again, or factorize again"
                )
        if Path(entry["file"]).name != entry["file"]:
            raise FactorFileError(
                f"{path} is damaged: the file of {site}, {quoted(entry['file'])}, is not in this folder; "
                "copy the folder again, or factorize again"
            )
    return described
