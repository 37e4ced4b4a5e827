"""One site's factors in a folder: the sparse pair (storage.py) together with its passport (passport.py).

1. `write_site` checks that the passport fits the factors, writes pair and passport into one file, and returns the site's
   index entry.
2. `StoredSite` is that file, memory-mapped: it knows the counts that a summary needs, and reads the factors when asked.
3. Both verify the probe: factors that would be refused when they are loaded are not saved.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from swd_lens.units.passport import Offsets, Origin, Probe, from_tensors, to_tensors
from swd_lens.units.storage import FactorFileError, StoredPair, write_pair

# Largest |z found - z expected| / |z expected| of a probe. z is float32 summed in float64: agreement is to 1e-7.
PROBE_TOLERANCE = 1e-4


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
    except ValueError as error:
        raise FactorFileError(
            f"{site}: {error}; nothing was saved. Factorize it again, or give origin, offsets or probe that fit"
        ) from error
    if difference := _difference(probe, read, offsets):
        raise FactorFileError(
            f"{site}: read or offsets were changed after the probe was made ({difference}); nothing was saved. Make a new "
            "one, dataclasses.replace(factors, probe=Probe.of(h, factors.read, factors.offsets)), or give probe=None"
        )
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

    def parts(self) -> dict[str, Any]:
        """What Factors are made of, by the names of their fields.

        Raises:
            FactorFileError: what `StoredPair.dense` raises, a passport that does not fit, or a probe that finds another z.
        """
        read, write = self.pair.dense()
        try:
            passport = from_tensors(self.pair.extras(), self.d_in, self.n_units, self.d_out)
        except ValueError as error:
            raise FactorFileError(f"{self.pair.path}: {error}; factorize again, or update swd_lens") from error
        if difference := _difference(passport.get("probe"), read, passport.get("offsets")):
            raise FactorFileError(
                f"{self.site}: the factors load, but do not compute what they computed when they were saved ({difference}); "
                f"copy {self.pair.path} again, or factorize again"
            )
        return {"read": read, "write": write, "settings": self.settings, "provenance": self.provenance, **passport}

    def __repr__(self) -> str:
        sparsity = 1.0 - self.edges / (self.d_in * self.d_out)
        shape = f"({self.d_in}, {self.d_out}) -> {self.n_units} units"
        return f"Factors({self.site}: {shape}, {self.edges:,} edges, s={sparsity:.4f}, in its file)"


def _difference(probe: Probe | None, read: Float[Tensor, "d_in unit"], offsets: Offsets | None) -> str:
    """Expected and found z of every unit of the probe; "" where they agree (or there is no probe)."""
    if probe is None or probe.error(read, offsets) <= PROBE_TOLERANCE:
        return ""
    each = zip(probe.units.tolist(), probe.z.tolist(), probe.found(read, offsets).tolist(), strict=True)
    return "z of its probe: " + ", ".join(f"unit {unit} expected {z:.6g}, found {found:.6g}" for unit, z, found in each)
