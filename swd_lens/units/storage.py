"""One matrix's factors on disk: a safetensors file of nonzeros; the folder of many and its index are index.py's.

1. `write_site` writes the nonzeros of a read and a write factor as (index, value) pairs, 8 bytes an edge, with the small
   tensors that travel along (integrity.py), and returns the index entry that describes them. The file's name carries a hash
   of its tensors, so that no write ever touches another matrix's file, or an older version of its own.
2. `StoredSite` keeps a file memory-mapped and makes the dense factors when asked.
3. Origins and offsets must fit their factors, and probes be met, when written and when read: factors that would be refused
   when they are loaded are not saved.

Index of an edge: row * columns + column in its (rows, columns) factor, ascending; int32 (int64 from 2^31 entries on).
"""

import re
from collections.abc import Mapping
from copy import copy, deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import safetensors.torch
import torch
from jaxtyping import Float
from safetensors import safe_open
from torch import Tensor

from swd_lens.base.errors import FactorFileError, seen
from swd_lens.base.files import naming, sha256
from swd_lens.base.sealed import readable, tensor_digest, write_tensors
from swd_lens.units.integrity import Offsets, Origin, Probe, from_tensors, to_tensors

# Largest |computed - expected| / |expected| of a probe's z and y: float32, summed in float64: agreement is to 1e-7.
PROBE_TOLERANCE = 1e-4
OUR_NAME = re.compile(r"[^/\\]*\.([0-9a-f]{12})\.safetensors")
UNNAMED = ".factors.new"  # lists the files that are written and not in the index yet
WHAT = "a file of factors"


def write_site(
    folder: Path,
    site: str,
    read: Float[Tensor, "d_in unit"],
    write: Float[Tensor, "unit d_out"],
    origin: Origin | None,
    offsets: Offsets | None,
    probe: Probe | None,
) -> dict[str, Any]:
    """Write one site's file; returns its index entry, without settings and provenance. Raises FactorFileError: a value is not
    finite (site, factor and entry are named), origin, offsets or probe do not fit the factors, or the probe does not find its
    z or y (factors were changed after it was made); nothing is written; OSError: the file cannot be written."""
    tensors = to_tensors(origin, offsets, probe)
    try:
        from_tensors(tensors, read.shape[0], read.shape[1], write.shape[1])
    except ValueError as cause:
        raise FactorFileError(
            f"{site}: {cause}; nothing was saved. Factorize it again, or give origin, offsets or probe that fit"
        ) from cause
    if difference := _difference(probe, read, write, offsets):
        raise FactorFileError(
            f"{site}: the probe is of other factors ({difference}); nothing was saved. Make a new one, "
            "dataclasses.replace(factors, probe=Probe.of(h, factors.read, factors.write, factors.offsets)), or give "
            "probe=None"
        )
    for part, matrix in (("read", read), ("write", write)):
        flat = matrix.detach().float().flatten()
        index = flat.nonzero().flatten()
        values = flat[index]
        if not bool(values.isfinite().all()):
            row, column = divmod(int(index[~values.isfinite()][0]), matrix.shape[1])
            raise FactorFileError(
                f"{site}: {part}[{row}, {column}] is {matrix[row, column].item()}; nothing was saved. Factorize this site "
                "again, or leave it out"
            )
        tensors[f"{part}.index"] = index.to("cpu", torch.int32 if flat.numel() < 2**31 else torch.int64)
        tensors[f"{part}.value"] = values.cpu()
    name = f"{re.sub(r'[^A-Za-z0-9_.-]', '_', site)[:100]}.{tensor_digest(tensors)[:12]}.safetensors"
    with naming(folder / UNNAMED), open(folder / UNNAMED, "a", encoding="utf-8") as unnamed:
        unnamed.write(f"{name}\n")
    write_tensors(folder / name, tensors, {})
    shape = {"d_in": read.shape[0], "units": read.shape[1], "d_out": write.shape[1]}
    return {"file": name, "sha256": sha256(folder / name), **shape}


class StoredSite:
    """A site's factors in their file, memory-mapped: the counts that a summary needs, and the factors when asked for.

    Pages are read when `dense` asks for them. The map stays valid when the folder is saved over; it is closed with the last
    reference to this object. Sent to another process, the nonzeros go along (8 bytes an edge), so that neither needs the folder.

    Raises FactorFileError: not a safetensors file, or one without the four tensors of a pair (at construction).
    """

    def __init__(self, folder: Path, site: str, entry: Mapping[str, Any]):
        self.site, self.settings, self.provenance = site, entry["settings"], entry["provenance"]
        self.entry, self.path = entry, folder / entry["file"]
        self.d_in, self.n_units, self.d_out = entry["d_in"], entry["units"], entry["d_out"]
        with readable(self.path, WHAT, FactorFileError):
            file = safe_open(str(self.path), framework="pt")
            self._names = list(file.keys())
            self._tensors: Any = file  # anything with get_tensor
            self._nonzeros = 0
            for part in ("read", "write"):
                (index,), (value,) = (file.get_slice(f"{part}.{what}").get_shape() for what in ("index", "value"))
                if index != value:
                    raise FactorFileError(f"{self.path}: {part} has {index} indices for {value} values; factorize again")
                self._nonzeros += index

    def __getstate__(self) -> dict[str, Any]:
        # As bytes: shared memory, which tensors would travel in, is gone before a spawned worker opens it.
        tensors = {name: self._tensors.get_tensor(name) for name in self._names}
        return {**self.__dict__, "_tensors": safetensors.torch.save(tensors)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        tensors = safetensors.torch.load(state["_tensors"])  # in place of the open file
        self.__dict__.update(state, _tensors=SimpleNamespace(get_tensor=tensors.__getitem__))

    def __deepcopy__(self, memo: Any) -> "StoredSite":
        # Nothing changes the file; settings and provenance may be changed.
        other = copy(self)
        other.settings, other.provenance = deepcopy(self.settings, memo), deepcopy(self.provenance, memo)
        return other

    @property
    def edges(self) -> int:
        if self.settings.get("edges") == "dense":  # as Factors.edges_per_unit counts
            return self.n_units * (self.d_in + self.d_out)
        return self._nonzeros

    @property
    def sparsity(self) -> float:
        return 1.0 - self.edges / (self.d_in * self.d_out)

    def parts(self) -> dict[str, Any]:
        """The fields that make the site's Factors, by name. Raises FactorFileError: see `dense`; or origin, offsets or probe
        do not fit, or the probe finds another z or y."""
        pair = {f"{part}.{what}" for part in ("read", "write") for what in ("index", "value")}
        with readable(self.path, WHAT, FactorFileError):
            records = {name: self._tensors.get_tensor(name) for name in self._names if name not in pair}
        try:  # first: sizes that are wrong may be too large for factors
            records = from_tensors(records, self.d_in, self.n_units, self.d_out)
        except ValueError as cause:
            raise FactorFileError(f"{self.path}: {cause}; factorize again, or update swd_lens") from cause
        with readable(self.path, WHAT, FactorFileError):
            read, write = self.dense("read"), self.dense("write")
        if difference := _difference(records.get("probe"), read, write, records.get("offsets")):
            raise FactorFileError(
                f"{self.site}: the factors load, but do not compute what they computed when they were saved "
                f"({difference}); copy {self.path} again, or factorize again"
            )
        return {"read": read, "write": write, "settings": self.settings, "provenance": self.provenance, **records}

    def dense(self, part: str) -> Float[Tensor, "rows columns"]:
        """The "read" (d_in, unit) or "write" (unit, d_out) factor, float32, on the CPU. Raises FactorFileError: an index is
        outside its factor or not in order, or a value is not finite."""
        rows, columns = (self.d_in, self.n_units) if part == "read" else (self.n_units, self.d_out)
        index, value = (self._tensors.get_tensor(f"{part}.{what}") for what in ("index", "value"))
        if len(index):
            # Ascending, so that the first and the last say whether all are inside.
            outside = next((int(i) for i in (index[0], index[-1]) if not 0 <= i < rows * columns), None)
            if outside is not None:
                raise FactorFileError(
                    f"{self.path}: {part} has index {outside}, outside its {rows} x {columns} entries; factorize again"
                )
            if not bool((index[1:] > index[:-1]).all()):
                raise FactorFileError(f"{self.path}: the indices of {part} are not ascending; factorize again")
        if not bool(value.isfinite().all()):
            bad = int((~value.isfinite()).nonzero()[0])
            row, column = divmod(int(index[bad]), columns)
            raise FactorFileError(f"{self.path}: {part}[{row}, {column}] is {value[bad].item()}; factorize again")
        # index_add takes the int32 indices as they are mapped; indexing would make an int64 copy of them.
        zeros = torch.zeros(rows * columns, dtype=torch.float32, device="cpu")
        return zeros.index_add_(0, index, value).view(rows, columns)

    @seen
    def __repr__(self) -> str:
        shape = f"({self.d_in}, {self.d_out}) -> {self.n_units} units"
        return f"Factors({self.site}: {shape}, {self.edges:,} edges, s={self.sparsity:.4f}, in its file)"


def _difference(
    probe: Probe | None, read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"], offsets: Offsets | None
) -> str:
    """Expected and computed z and y of every unit and output of the probe; "" where they agree (or there is no probe)."""
    if probe is None or probe.error(read, write, offsets) <= PROBE_TOLERANCE:
        return ""
    z, y = probe.computed(read, write, offsets)
    each = (
        f"{what} {index} expected {expected:.6g}, found {value:.6g}"
        for what, *columns in (("unit", probe.units, probe.z, z), ("output", probe.outputs, probe.y, y))
        for index, expected, value in zip(*(column.tolist() for column in columns), strict=True)
    )
    return "its probe: " + ", ".join(each)
