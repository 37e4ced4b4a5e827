"""estimate: what a factorization will need, before it starts: memory and time, from shapes.

1. `forecast` makes one row per matrix (forecast.py): the solver's operations and working memory (`swd_lens.solver.budget`), the
   operations of its calibration, and what is held meanwhile (Grams, finished factors).
2. `Estimate` holds the rows with their totals beside what the machine has and does (machine.py): free memory, speed of float32
   products. It prints as a table; `require_fit` refuses, with the numbers, what cannot fit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from swd_lens.base.errors import DoesNotFitError, TokenError
from swd_lens.base.machine import available_bytes, product_speed
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.forecast import SiteEstimate, forecast, residual_bytes
from swd_lens.factorization.job import Job
from swd_lens.hosts.sites import Pattern, base_kind, is_site_name, split_name
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks.streams import as_stream

_COLUMNS = ("site", "d_in", "d_out", "units", "solver", "calibration", "memory")
_MOST_LINES = 16  # above this, matrices of one kind and shape share a line

# A host that has every token and any context: for tokens of a model that is not loaded.
_ANY_HOST = SimpleNamespace(cfg=SimpleNamespace(d_vocab=float("inf"), n_ctx=float("inf")))


@dataclass(frozen=True, repr=False)
class Estimate(Record):
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
            f"{_bytes(self.available_bytes)} available. Largest: {worst.site} ({worst.d_in}, {worst.d_out}) with "
            f"{worst.units} units, {_bytes(worst.peak_bytes)}, while {_bytes(worst.held_bytes)} are held for other sites "
            f"(their Grams and factors). {self._advice(worst)}"
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

    def title(self) -> str:
        return f"Estimate: {_matrices(len(self.rows))}, calibration {self.calibration}"

    def parts(self) -> tuple[pd.DataFrame | str, ...]:
        return pd.DataFrame(self._lines(), columns=_COLUMNS), *self._totals()

    def __repr__(self) -> str:
        lines = [_COLUMNS, *self._lines()]
        widths = [max(len(line[column]) for line in lines) for column in range(len(_COLUMNS))]
        aligned = [[line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])] for line in lines]
        return "\n".join([self.title(), *("  " + "  ".join(line) for line in aligned), *self._totals()])

    def _lines(self) -> list[tuple[str, ...]]:
        """The table's lines, in order of their first rows."""
        together: dict[object, list[SiteEstimate]] = {}
        for row in self.rows:
            alike = (_kind(row.site), row.d_in, row.d_out, row.units) if len(self.rows) > _MOST_LINES else row.site
            together.setdefault(alike, []).append(row)
        return [_line(rows) for rows in together.values()]

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


@with_torch_defaults
def estimate(
    model: Any,
    sites: Pattern = "all",
    *,
    sparsity: float | int | Mapping[str, float] = 0.5,
    tokens: Any = None,
    calibration: str = "sequential",
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    batch_size: int = 16,
    gram_dtype: str = "auto",
    weigh_outputs: bool = False,
    **options: Any,
) -> Estimate:
    """Memory and time that `factorize` with these arguments will take, without starting it.

    Args:
        model: the host; or, where it is not loaded, the shapes of its matrices: name -> (d_in, d_out), or one (d_in, d_out).
            Names may be site names ("blocks.0.mlp_out", in execution order) or any labels. Of their calibration the Grams
            are counted, the forwards are not (`Estimate.forwards_counted`), nor are activations.
        sites: as for `factorize`; shapes are taken all.
        sparsity: as for `factorize`; with shapes a mapping's keys are their names, or globs.
        tokens: as for `factorize`, or just their number.
        calibration, preset, units, batch_size, gram_dtype, weigh_outputs, options: as for `factorize`; basis="auto", the
            default, counts as what it is without text.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ValueError: bad shapes, sparsity or solver options; the site is named.
    """
    shapes_only = isinstance(model, Mapping | Sequence)
    job = Job.of(
        model,
        sites,
        _token_shape(tokens, _ANY_HOST if shapes_only else model),
        sparsity=sparsity,
        calibration=calibration,
        preset=preset,
        units=units,
        batch_size=batch_size,
        gram_dtype=gram_dtype,
        weigh_outputs=weigh_outputs,
        options=options,
    )
    device = torch.empty(0).device if shapes_only else next(model.parameters()).device
    rows, speed = forecast(job), product_speed(device)
    return Estimate(rows, available_bytes(device), speed, job.kind, not shapes_only, residual_bytes(job))


def _token_shape(tokens: Any, host: Any) -> tuple[int, int] | None:
    """(rows, pos) of calibration tokens, or of a number of them; None for zero-data."""
    if tokens is None:
        return None
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        if tokens < 0:
            raise TokenError(f"tokens={tokens}: give how many there are, the (rows, pos) ids, or None for zero-data")
        pos = int(min(tokens, host.cfg.n_ctx))
        return (-(-tokens // pos), pos) if tokens else None
    stream = as_stream(tokens, host)
    return stream.n_rows, stream.row_length


# ---------------------------------------------------------------------------------------------- words


def _line(rows: Sequence[SiteEstimate]) -> tuple[str, ...]:
    """One line for one row, or for several of one shape: operations of all, memory at the worst moment."""
    row = rows[0]
    sizes = (f"{row.d_in:,}", f"{row.d_out:,}", f"{row.units:,}")
    solver, calibration = sum(row.flops for row in rows), sum(row.calibration_flops for row in rows)
    memory = max(row.held_bytes + row.peak_bytes for row in rows)
    kind = f"blocks.*.{_kind(row.site)}" if _kind(row.site) else "this shape"
    label = row.site if len(rows) == 1 else f"{len(rows)} x {kind}"
    return (label, *sizes, _flops(solver), _flops(calibration), _bytes(memory))


def _kind(name: str) -> str:
    """Of a site; "" of a matrix with another name."""
    return base_kind(split_name(name)[1]) if is_site_name(name) else ""


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
