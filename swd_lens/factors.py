"""Factors: what a dense projection became. W (d_in, d_out) is replaced by read (d_in, unit) @ write (unit, d_out).

The flow through this module:

1. `Factors` holds the two factors of one matrix with how they were made; counts (edges, valid units) and errors
   (relmse, relative Frobenius) are derived, never stored.
2. `FactorSet` maps site names to Factors in execution order and carries the provenance of the whole replacement.
3. `FactorSet.save` / `FactorSet.load` write a folder: factors.safetensors (indices and values of the nonzeros) and
   factors.json (format version, settings, provenance). Both files are written beside their place and renamed, so a
   reader never sees half of one.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swd_lens.files import atomic, sha256, write_text

FORMAT_VERSION = 1


@dataclass(frozen=True, repr=False)
class Factors:
    """Two sparse factors of one matrix, W ≈ read @ write.

    Attributes:
        read: (d_in, unit) float32; column i is the read vector of unit i. z_i = h @ read[:, i].
        write: (unit, d_out) float32; row i is the write vector of unit i.
        settings: how they were made (preset, sparsity, iterations, ...); plain JSON values.
        provenance: of what (site, weight fingerprint, tokens, version, seed); plain JSON values.
        weight: (d_in, d_out) the dense matrix, kept in memory for `relmse`; it is never saved.
    """

    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]
    settings: Mapping[str, Any] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)
    weight: Float[Tensor, "d_in d_out"] | None = None

    # ------------------------------------------------------------------ sizes and counts

    @property
    def d_in(self) -> int:
        return self.read.shape[0]

    @property
    def n_units(self) -> int:
        return self.read.shape[1]

    @property
    def d_out(self) -> int:
        return self.write.shape[1]

    @property
    def edges_per_unit(self) -> Int[Tensor, " unit"]:
        """Active edges of each unit: nonzeros of its read vector plus nonzeros of its write vector (paper, app. A.2).

        Exact controls (settings["edges"] == "dense") count d_in + d_out, whatever zeros they hold (method.md §4.1).
        """
        if self.settings.get("edges") == "dense":
            return torch.full((self.n_units,), self.d_in + self.d_out)
        return (self.read != 0).sum(0) + (self.write != 0).sum(1)

    @property
    def valid_units(self) -> Bool[Tensor, " unit"]:
        """Units with at least one read and one write edge; the others contribute nothing."""
        return (self.read != 0).any(0) & (self.write != 0).any(1)

    @property
    def edges(self) -> int:
        """nnz(read) + nnz(write): the K that was really used."""
        return int(self.edges_per_unit.sum())

    @property
    def sparsity(self) -> float:
        """s = 1 - K / numel(W)."""
        return 1.0 - self.edges / (self.d_in * self.d_out)

    # ------------------------------------------------------------------ errors

    def product(self) -> Float[Tensor, "d_in d_out"]:
        """read @ write, dense."""
        return self.read @ self.write

    def relmse(
        self, gram: Float[Tensor, "d_in d_in"] | None = None, weight: Float[Tensor, "d_in d_out"] | None = None
    ) -> float:
        """tr((W-AB)^T G (W-AB)) / tr(W^T G W); gram None means G = I. Computed in float64.

        Raises:
            ValueError: no weight given and none remembered (factors that were loaded from a file).
        """
        dense = self._dense(weight)
        error = dense - self.read.double() @ self.write.double()
        if gram is None:
            return float(error.square().sum() / dense.square().sum())
        g = gram.double()
        return float((error * (g @ error)).sum() / (dense * (g @ dense)).sum())

    def relative_frobenius(self, weight: Float[Tensor, "d_in d_out"] | None = None) -> float:
        """||W - AB||_F / ||W||_F."""
        return self.relmse(None, weight) ** 0.5

    def _dense(self, weight: Float[Tensor, "d_in d_out"] | None) -> Float[Tensor, "d_in d_out"]:
        dense = self.weight if weight is None else weight
        if dense is None:
            raise ValueError(
                "these Factors do not remember their dense weight (factors loaded from a file never do); "
                "pass it: factors.relmse(gram, weight=site.weight(model))"
            )
        return dense.double()

    # ------------------------------------------------------------------ other

    def to(self, device: torch.device | str) -> "Factors":
        weight = None if self.weight is None else self.weight.to(device)
        return replace(self, read=self.read.to(device), write=self.write.to(device), weight=weight)

    def __repr__(self) -> str:
        name = self.provenance.get("site", "matrix")
        return (
            f"Factors({name}: ({self.d_in}, {self.d_out}) -> {self.n_units} units, "
            f"{int(self.valid_units.sum())} valid, {self.edges:,} edges, s={self.sparsity:.4f})"
        )


# ---------------------------------------------------------------------------------------------- many matrices


class FactorSet(Mapping[str, Factors]):
    """Site name -> Factors, in execution order, with the provenance of the whole replacement.

    Iterating gives site names; `set[name]` the Factors. Printing it lists one line per site.
    """

    def __init__(self, factors: Mapping[str, Factors], provenance: Mapping[str, Any] | None = None):
        self._factors = dict(factors)
        self.provenance: dict[str, Any] = dict(provenance or {})

    def __getitem__(self, site: str) -> Factors:
        if site not in self._factors:
            raise KeyError(f"no factors for site {site!r}; this set holds {', '.join(self._factors) or 'nothing'}")
        return self._factors[site]

    def __iter__(self) -> Iterator[str]:
        return iter(self._factors)

    def __len__(self) -> int:
        return len(self._factors)

    @property
    def edges(self) -> int:
        """Nonzeros of all factors together."""
        return sum(f.edges for f in self.values())

    @property
    def n_units(self) -> int:
        return sum(f.n_units for f in self.values())

    @property
    def sparsity(self) -> float:
        """1 - (all edges) / (all dense weights)."""
        return 1.0 - self.edges / sum(f.d_in * f.d_out for f in self.values())

    def __or__(self, other: "FactorSet") -> "FactorSet":
        """Both sets together. Raises ValueError where a site is in both."""
        twice = set(self) & set(other)
        if twice:
            raise ValueError(f"both sets hold factors for {', '.join(sorted(twice))}; drop one of them first")
        return FactorSet({**self._factors, **other._factors}, {**other.provenance, **self.provenance})

    def __repr__(self) -> str:
        lines = [f"FactorSet: {len(self)} sites, {self.n_units:,} units, {self.edges:,} edges, s={self.sparsity:.4f}"]
        return "\n  ".join(lines + [repr(f) for f in self.values()])

    # ------------------------------------------------------------------ files

    def save(self, folder: str | Path) -> Path:
        """Write factors.safetensors and factors.json into the folder (made if need be); 8 bytes per edge.

        Each file is written beside its place and renamed. The json names the tensors file's hash, so that a mixture of
        two saves is noticed at load.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for site, f in self.items():
            for part, matrix in (("read", f.read), ("write", f.write)):
                index = matrix.flatten().nonzero().flatten()
                tensors[f"{site}.{part}.index"] = index.to(torch.int32 if matrix.numel() < 2**31 else torch.int64)
                tensors[f"{site}.{part}.value"] = matrix.flatten()[index].float().contiguous()
        with atomic(folder / "factors.safetensors") as path:
            save_file(tensors, str(path))
            digest = sha256(path)
        described = {
            "format": FORMAT_VERSION,
            "tensors_sha256": digest,
            "provenance": self.provenance,
            "sites": {
                site: {
                    "d_in": f.d_in,
                    "units": f.n_units,
                    "d_out": f.d_out,
                    "settings": dict(f.settings),
                    "provenance": dict(f.provenance),
                }
                for site, f in self.items()
            },
        }
        write_text(folder / "factors.json", json.dumps(described, indent=1))
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "FactorSet":
        """Read a folder that `save` wrote.

        Raises:
            FileNotFoundError: no factors.json or factors.safetensors there.
            ValueError: written by a newer format, or the two files do not belong together.
        """
        folder = Path(folder)
        if not (folder / "factors.json").is_file():
            raise FileNotFoundError(
                f"{folder} holds no factors.json; FactorSet.load takes the folder that FactorSet.save wrote"
            )
        described = json.loads((folder / "factors.json").read_text())
        if described.get("format") != FORMAT_VERSION:
            raise ValueError(
                f"{folder} is of factor format {described.get('format')}, this swd_lens reads {FORMAT_VERSION}; "
                "update swd_lens or factorize again"
            )
        tensors_file = folder / "factors.safetensors"
        if not tensors_file.is_file() or sha256(tensors_file) != described["tensors_sha256"]:
            raise ValueError(
                f"{tensors_file} is missing or is not the file that factors.json was written with; save again"
            )
        factors = {}
        with safe_open(str(tensors_file), framework="pt") as tensors:
            for site, d in described["sites"].items():
                read = _from_edges(tensors, f"{site}.read", d["d_in"], d["units"])
                write = _from_edges(tensors, f"{site}.write", d["units"], d["d_out"])
                factors[site] = Factors(read, write, d["settings"], d["provenance"])
        return cls(factors, described["provenance"])


def fingerprint(weight: Float[Tensor, "d_in d_out"]) -> str:
    """SHA-256 over shape and float32 values of a matrix: factors carry that of the matrix they were made from."""
    data = weight.detach().float().cpu().contiguous()
    digest = hashlib.sha256(str(tuple(data.shape)).encode())
    digest.update(data.numpy().tobytes())
    return digest.hexdigest()


def _from_edges(tensors: Any, name: str, rows: int, columns: int) -> Float[Tensor, "rows columns"]:
    matrix = torch.zeros(rows * columns)
    matrix[tensors.get_tensor(f"{name}.index").long()] = tensors.get_tensor(f"{name}.value")
    return matrix.view(rows, columns)
