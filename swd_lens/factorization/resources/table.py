"""Estimate: the rows of a forecast with their totals, as a printed table, and as a refusal of what cannot fit."""

from collections.abc import Sequence
from dataclasses import dataclass

from swd_lens.hosts.sites import UnknownSiteError, split_name

_MOST_LINES = 16  # above this, matrices of one kind and shape share a line


class DoesNotFitError(MemoryError, ValueError):
    """A factorization needs more memory than there is; nothing was started."""


@dataclass(frozen=True)
class SiteEstimate:
    """One site's share. flops: the solver's; calibration_flops: of the forwards and products for its Gram; peak_bytes: its
    own working memory at the worst moment; held_bytes: what other sites hold meanwhile."""

    site: str
    d_in: int
    d_out: int
    units: int
    flops: float
    calibration_flops: float
    peak_bytes: int
    held_bytes: int


@dataclass(frozen=True, repr=False)
class Estimate:
    """Memory and time of a factorization; printing it gives the table.

    Attributes:
        rows: one per site, in execution order.
        available_bytes: free memory on the weights' device; None where it cannot be known.
        flops_per_second: this machine's measured speed of float32 products; None if it was not measured.
        calibration: "sequential", "corrected", "per_block", "dense" or "zero-data".
        forwards_counted: whether calibration_flops include the host's forwards; False for shapes alone.
        disk_bytes: what calibration in several stages keeps in the temporary folder meanwhile.
    """

    rows: tuple[SiteEstimate, ...]
    available_bytes: int | None
    flops_per_second: float | None
    calibration: str
    forwards_counted: bool = True
    disk_bytes: int = 0

    @property
    def flops(self) -> float:
        """All operations, calibration included."""
        return float(sum(row.flops + row.calibration_flops for row in self.rows))

    @property
    def peak_bytes(self) -> int:
        """The worst moment of all."""
        return max((row.held_bytes + row.peak_bytes for row in self.rows), default=0)

    @property
    def seconds(self) -> float | None:
        """flops over the measured speed; None without one. Small matrices, where calls cost more than products, take longer."""
        return None if self.flops_per_second is None else self.flops / self.flops_per_second

    @property
    def fits(self) -> bool:
        return self.available_bytes is None or self.peak_bytes <= self.available_bytes

    def require_fit(self) -> None:
        """Do nothing if it fits.

        Raises:
            DoesNotFitError: more memory is needed than available; says how much, where, and what would need less.
        """
        if self.fits:
            return
        worst = max(self.rows, key=lambda row: row.held_bytes + row.peak_bytes)
        raise DoesNotFitError(
            f"factorizing {_matrices(len(self.rows))} needs {_bytes(self.peak_bytes)} of memory, "
            f"{_bytes(self.available_bytes)} available. "
            f"Largest: {worst.site} ({worst.d_in}, {worst.d_out}) with {worst.units} units, {_bytes(worst.peak_bytes)}, while "
            f"{_bytes(worst.held_bytes)} are held for other sites (their Grams and factors). {self._advice(worst)}"
        )

    def _advice(self, worst: SiteEstimate) -> str:
        ways = []
        if self.calibration in ("dense", "per_block") and len(self.rows) > 1:
            ways.append('calibration="sequential" (one input\'s Gram at a time instead of several)')
        if self.calibration == "corrected" and len(self.rows) > 1:
            ways.append('calibration="sequential" (one sum for each input instead of two for each site, and no target)')
        if worst.held_bytes > 0:
            ways.append("fewer sites at once")
        if worst.units > min(worst.d_in, worst.d_out):
            ways.append("fewer units")
        if self.calibration != "zero-data":
            ways.append("a smaller batch_size")
        ways.append("a machine with more memory")
        return f"What helps: {'; '.join(ways)}."

    def __repr__(self) -> str:
        header = ("site", "d_in", "d_out", "units", "solver", "calibration", "memory")
        lines = [header, *(_line(rows) for rows in self._by_line())]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        title = f"Estimate: {_matrices(len(self.rows))}, calibration {self.calibration}"
        return "\n".join([title, *table, *self._totals()])

    def _by_line(self) -> list[list[SiteEstimate]]:
        """The rows of each printed line, in order of the first."""
        together: dict[object, list[SiteEstimate]] = {}
        for row in self.rows:
            alike = (_kind(row.site), row.d_in, row.d_out, row.units) if len(self.rows) > _MOST_LINES else row.site
            together.setdefault(alike, []).append(row)
        return list(together.values())

    def _totals(self) -> list[str]:
        available = "unknown" if self.available_bytes is None else _bytes(self.available_bytes)
        memory = f"memory: {_bytes(self.peak_bytes)} at the worst moment, {available} available"
        if not self.fits:
            memory += " - does not fit"
        work = f"time: {_flops(self.flops)}"
        if self.seconds is not None and self.flops_per_second is not None:
            work += f", about {_seconds(self.seconds)} at the measured {_flops(self.flops_per_second)} per second"
        lines = [memory, work]
        if self.disk_bytes:
            lines.insert(1, f"disk: {_bytes(self.disk_bytes)} in the temporary folder (what enters a block, kept)")
        if not self.forwards_counted and self.calibration != "zero-data":
            lines.append("not counted: the forwards of calibration and their memory (the model is not loaded)")
        return lines


# ---------------------------------------------------------------------------------------------- words


def _line(rows: Sequence[SiteEstimate]) -> tuple[str, ...]:
    """One line for one row, or for several of one shape: operations of all, memory at the worst moment."""
    row = rows[0]
    sizes = (f"{row.d_in:,}", f"{row.d_out:,}", f"{row.units:,}")
    solver, calibration = sum(row.flops for row in rows), sum(row.calibration_flops for row in rows)
    memory = max(row.held_bytes + row.peak_bytes for row in rows)
    return (_together(rows), *sizes, _flops(solver), _flops(calibration), _bytes(memory))


def _together(rows: Sequence[SiteEstimate]) -> str:
    if len(rows) == 1:
        return rows[0].site
    kind = _kind(rows[0].site)
    return f"{len(rows)} x {f'blocks.*.{kind}' if kind else 'this shape'}"


def _kind(name: str) -> str:
    """Of a site; "" of a matrix with another name."""
    try:
        return split_name(name)[1]
    except UnknownSiteError:
        return ""


def _matrices(n: int) -> str:
    return f"{n} matrix" if n == 1 else f"{n} matrices"


def _bytes(n: int | None) -> str:
    return f"{n or 0:,} B" if (n or 0) < 1000 else _scaled(float(n or 0), "B")


def _flops(n: float) -> str:
    return _scaled(n, "FLOP")


def _scaled(n: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {prefix}{unit}" if n < 999.5 * size else f"{n / size:,.0f} {prefix}{unit}"
    return f"{n:.3g} {unit}"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
