"""Sparse factors on disk: a folder with one index, factors.json, and one safetensors file per matrix.

1. `write_site` writes the nonzeros of a read and a write factor as (index, value) pairs, 8 bytes an edge, with the small
   tensors that travel along (passport.py), and returns the index entry that describes them. The file's name carries its
   hash, so that no write ever touches another matrix's file, or an older version of its own.
2. `write_index` replaces factors.json by a rename, then deletes the files that only the former index named. That rename
   is the one moment at which the folder changes: a reader sees all of the old set or all of the new one, and whatever
   interrupts a writer leaves one of the two.
3. `read_index` checks the index and every file's hash, in blocks; `StoredPair` keeps a file memory-mapped and makes the
   dense factors when asked; `StoredSite` is one site's pair with its passport.
4. Passports must fit their factors, and probes be met, when written and when read: factors that would be refused when they
   are loaded are not saved.
5. Formats that were written once are read for ever. Format 1 kept the pairs of all sites in one file, factors.safetensors, as
   "<site>.read.index" and so on, and named its hash at the top of factors.json; format 2 knew no passport.

Index of an edge: row * columns + column in its (rows, columns) factor, ascending; int32 (int64 from 2^31 entries on).
"""

import json
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from swd_lens.base.errors import FactorFileError, error
from swd_lens.base.files import atomic, plain, sha256, write_text
from swd_lens.units.passport import Offsets, Origin, Probe, from_tensors, to_tensors

# Largest |computed - expected| / |expected| of a probe's z and y: float32, summed in float64: agreement is to 1e-7.
PROBE_TOLERANCE = 1e-4
FORMAT_VERSION = 3  # 1: one file for all sites; 2: one file per site; 3: a passport may be in it
INDEX = "factors.json"
_ENTRY = {"file": str, "sha256": str, "d_in": int, "units": int, "d_out": int, "settings": dict, "provenance": dict}


# ---------------------------------------------------------------------------------------------- write


def write_pair(
    folder: Path,
    site: str,
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    extras: Mapping[str, Tensor] | None = None,
) -> dict[str, Any]:
    """Write the nonzeros of one matrix's factors into the folder; returns its index entry (without settings).

    Args:
        extras: further tensors by name, written beside the pair as they are (on the CPU).

    Raises:
        FactorFileError: a factor is not finite (site, factor and entry named); nothing is written.
    """
    tensors = dict(extras or {})
    for part, matrix in (("read", read), ("write", write)):
        flat = matrix.detach().float().flatten()
        index = flat.nonzero().flatten()
        values = flat[index]
        if not bool(values.isfinite().all()):
            row, column = divmod(int(index[~values.isfinite()][0]), matrix.shape[1])
            raise error(
                "saved-not-finite", site=site, part=part, row=row, column=column, value=matrix[row, column].item()
            )
        tensors[f"{part}.index"] = index.to("cpu", torch.int32 if flat.numel() < 2**31 else torch.int64)
        tensors[f"{part}.value"] = values.cpu()
    unnamed = folder / f"{re.sub(r'[^A-Za-z0-9_.-]', '_', site)}.safetensors"
    with atomic(unnamed) as path:
        save_file(tensors, str(path))
        digest = sha256(path)
    named = unnamed.with_suffix(f".{digest[:12]}.safetensors")
    os.replace(unnamed, named)
    shape = {"d_in": read.shape[0], "units": read.shape[1], "d_out": write.shape[1]}
    return {"file": named.name, "sha256": digest, **shape}


def write_index(folder: Path, entries: Mapping[str, Mapping[str, Any]], provenance: Mapping[str, Any]) -> None:
    """Make the folder hold exactly these matrices, in this order.

    Args:
        entries: site -> what `write_pair` returned, with "settings" and "provenance".
        provenance: of the whole set. Numbers that are not finite become null.
    """
    # Made into text first: values that json cannot write must fail before anything is replaced.
    described = {"format": FORMAT_VERSION, "provenance": provenance, "sites": entries}
    text = json.dumps(plain(described), indent=1, allow_nan=False)
    former: set[str] = set()
    with suppress(FactorFileError, FileNotFoundError):  # a damaged folder can be saved over
        former = files_named_in(folder)
    write_text(folder / INDEX, text)
    for name in former - {entry["file"] for entry in entries.values()}:
        (folder / name).unlink(missing_ok=True)
    for pattern in (".*.safetensors.*.part", f".{INDEX}.*.part"):  # of a writer that was killed
        for left_over in folder.glob(pattern):
            left_over.unlink(missing_ok=True)


# ---------------------------------------------------------------------------------------------- read


def read_index(folder: Path) -> dict[str, Any]:
    """The checked index of a folder: {"provenance": ..., "sites": {site: entry}}; every file is there and has its hash.

    Raises:
        FileNotFoundError: no index there.
        FactorFileError: another format, a damaged index, or a file that is missing or is not the one it was written with.
    """
    described = _parse(folder)
    hashes: dict[Path, str] = {}  # sites of format 1 share a file: read once
    for site, entry in described["sites"].items():
        file = folder / entry["file"]
        if not file.is_file():
            raise error("missing-file", file=file, site=site)
        if file not in hashes:
            hashes[file] = sha256(file)
        if hashes[file] != entry["sha256"]:
            raise error("exchanged-file", file=file, index=INDEX)
    return described


def files_named_in(folder: Path) -> set[str]:
    """Names of the files that the folder's index asks for, whether they are there or not.

    Raises:
        FileNotFoundError: no index there.
        FactorFileError: another format, or a damaged index.
    """
    return {entry["file"] for entry in _parse(folder)["sites"].values()}


def _parse(folder: Path) -> dict[str, Any]:
    path = folder / INDEX
    if not path.is_file():
        raise error("no-factors-there", folder=folder, index=INDEX)
    try:
        described = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as cause:  # not JSON, or not UTF-8
        raise error("damaged-index", path=path, reason=cause) from cause
    version = described.get("format") if isinstance(described, dict) else None
    if type(version) is not int or not 1 <= version <= FORMAT_VERSION:  # True is no version
        newer = isinstance(version, int) and version > FORMAT_VERSION
        raise error(
            "unknown-format",
            folder=folder,
            version=version,
            known=FORMAT_VERSION,
            advice="update swd_lens" if newer else "factorize again",
        )
    if version == 1:
        described = _from_format_1(described)
    for key in ("provenance", "sites"):
        if not isinstance(described.get(key), dict):
            raise error("index-without-part", path=path, key=key)
    for site, entry in described["sites"].items():
        _check_entry(path, site, entry)
    return described


def _from_format_1(described: Mapping[str, Any]) -> dict[str, Any]:
    """The index with every site's "file" and "sha256" (of the file that all share) and the "prefix" of its tensors' names."""
    shared = {"file": "factors.safetensors", "sha256": described.get("tensors_sha256")}
    sites = described.get("sites")
    if isinstance(sites, dict):
        sites = {
            site: {**entry, **shared, "prefix": f"{site}."} if isinstance(entry, dict) else entry
            for site, entry in sites.items()
        }
    return {**described, "sites": sites}


def _check_entry(path: Path, site: str, entry: Any) -> None:
    for key, kind in _ENTRY.items():
        value = entry.get(key) if isinstance(entry, dict) else None
        if not isinstance(value, kind) or (isinstance(value, int) and value < 1):
            raise error("index-with-wrong-entry", path=path, key=key, site=site, value=value)
    if Path(entry["file"]).name != entry["file"]:
        raise error("file-elsewhere", path=path, site=site, file=entry["file"])


class StoredPair:
    """One matrix's factors in their file, memory-mapped: pages are read when `dense` asks for them.

    The map stays valid when the folder is saved over; it is closed with the last reference to this object.

    Raises:
        FactorFileError: not a safetensors file, or one without the four tensors of a pair (at construction).
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any]):
        self.path = path = folder / entry["file"]
        self.shapes = {"read": (entry["d_in"], entry["units"]), "write": (entry["units"], entry["d_out"])}
        self._prefix = entry.get("prefix", "")  # of the tensors' names; only format 1 has one
        try:
            self._file = safe_open(str(path), framework="pt")
            self.nonzeros = {part: self._count(part) for part in self.shapes}
        except SafetensorError as cause:
            raise error("unreadable-file", path=path, reason=cause) from cause

    def _count(self, part: str) -> int:
        (index,) = self._file.get_slice(f"{self._prefix}{part}.index").get_shape()
        (value,) = self._file.get_slice(f"{self._prefix}{part}.value").get_shape()
        if index != value:
            raise error("counts-differ", path=self.path, part=part, n_indices=index, n_values=value)
        return index

    def dense(self) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
        """The (d_in, unit) read and (unit, d_out) write factor, float32, on the CPU.

        Raises:
            FactorFileError: an index is outside its factor or not in order, or a value is not finite.
        """
        return self._dense("read"), self._dense("write")

    def extras(self) -> dict[str, Tensor]:
        """The tensors that `write_pair` was given beside the pair, by name; none in files before format 3."""
        if self._prefix:  # all other tensors of a shared file are other sites'
            return {}
        pair = {f"{part}.{what}" for part in self.shapes for what in ("index", "value")}
        return {name: self._file.get_tensor(name) for name in self._file.keys() if name not in pair}  # noqa: SIM118

    def _dense(self, part: str) -> Tensor:
        rows, columns = self.shapes[part]
        index, value = (self._file.get_tensor(f"{self._prefix}{part}.{what}") for what in ("index", "value"))
        if len(index):
            # Ascending, so that the first and the last say whether all are inside.
            outside = next((int(i) for i in (index[0], index[-1]) if not 0 <= i < rows * columns), None)
            if outside is not None:
                raise error("edge-outside", path=self.path, part=part, index=outside, rows=rows, columns=columns)
            if not bool((index[1:] > index[:-1]).all()):
                raise error("edges-not-ascending", path=self.path, part=part)
        if not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).nonzero()[0])
            row, column = divmod(int(index[bad]), columns)
            raise error("value-not-finite", path=self.path, part=part, row=row, column=column, value=value[bad].item())
        # index_add takes the int32 indices as they are mapped; indexing would make an int64 copy of them.
        return torch.zeros(rows * columns).index_add_(0, index, value).view(rows, columns)


# ---------------------------------------------------------------------------------------------- a site with its passport


def write_site(
    folder: Path,
    site: str,
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    origin: Origin | None,
    offsets: Offsets | None,
    probe: Probe | None,
) -> dict[str, Any]:
    """Write one site's file; returns its index entry, without settings and provenance.

    Raises:
        FactorFileError: a value is not finite, origin, offsets or probe do not fit the factors, or the probe does not find
            its z (read was changed after it was made); nothing is written.
    """
    extras = to_tensors(origin, offsets, probe)
    try:
        from_tensors(extras, read.shape[0], read.shape[1], write.shape[1])
    except ValueError as cause:
        raise error("saved-passport-misfit", site=site, reason=cause) from cause
    if difference := _difference(probe, read, write, offsets):
        raise error("saved-probe-differs", site=site, difference=difference)
    return write_pair(folder, site, read, write, extras)


class StoredSite:
    """A site's factors in a mapped file: the counts that a summary needs, and the factors when asked for."""

    def __init__(self, folder: Path, site: str, entry: Mapping[str, Any]):
        self.site, self.settings, self.provenance = site, entry["settings"], entry["provenance"]
        self.d_in, self.n_units, self.d_out = entry["d_in"], entry["units"], entry["d_out"]
        self.pair = StoredPair(folder, entry)

    @property
    def edges(self) -> int:
        if self.settings.get("edges") == "dense":  # as Factors.edges_per_unit counts
            return self.n_units * (self.d_in + self.d_out)
        return sum(self.pair.nonzeros.values())

    @property
    def sparsity(self) -> float:
        return 1.0 - self.edges / (self.d_in * self.d_out)

    def parts(self) -> dict[str, Any]:
        """What Factors are made of, by the names of their fields.

        Raises:
            FactorFileError: what `StoredPair.dense` raises, a passport that does not fit, or a probe that finds another z.
        """
        read, write = self.pair.dense()
        try:
            passport = from_tensors(self.pair.extras(), self.d_in, self.n_units, self.d_out)
        except ValueError as cause:
            raise error("loaded-passport-misfit", path=self.pair.path, reason=cause) from cause
        if difference := _difference(passport.get("probe"), read, write, passport.get("offsets")):
            raise error("loaded-probe-differs", site=self.site, difference=difference, path=self.pair.path)
        return {"read": read, "write": write, "settings": self.settings, "provenance": self.provenance, **passport}

    def __repr__(self) -> str:
        shape = f"({self.d_in}, {self.d_out}) -> {self.n_units} units"
        return f"Factors({self.site}: {shape}, {self.edges:,} edges, s={self.sparsity:.4f}, in its file)"


def _difference(
    probe: Probe | None,
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    offsets: Offsets | None,
) -> str:
    """Expected and computed z and y of every unit and output of the probe; "" where they agree (or there is no probe)."""
    if probe is None or probe.error(read, write, offsets) <= PROBE_TOLERANCE:
        return ""
    z, y = probe.computed(read, write, offsets)
    pairs = [("unit", probe.units, probe.z, z)]
    if probe.outputs is not None and probe.y is not None and y is not None:
        pairs.append(("output", probe.outputs, probe.y, y))
    each = (
        f"{what} {index} expected {expected:.6g}, found {value:.6g}"
        for what, *columns in pairs
        for index, expected, value in zip(*(column.tolist() for column in columns), strict=True)
    )
    return "its probe: " + ", ".join(each)
