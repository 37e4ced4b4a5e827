"""What a factorization will need, before it starts: memory and time, from shapes.

1. `forecast` makes one row per site: the solver's operations and working memory (`swd_lens.solver.cost`), the operations
   of its calibration, and what is held meanwhile (Grams, finished factors). Totals are properties of the `Estimate`.
2. `estimate` puts that beside what the machine has and does (machine.py): free memory, speed of float32 products.
   It is for the user; `Estimate.require_fit` refuses, with the numbers, what cannot fit.

Bytes are those beyond what is in use before the call (the host among it). They are upper bounds by design where exact
counts would need a run: activations of a calibration batch, and a kept copy of every weight.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.hosts import find_sites, host_of
from swd_lens.machine import available_bytes, product_speed
from swd_lens.sites import Pattern, Site, select_sites
from swd_lens.solver import DEFAULT_PRESET, SparsityError, cost
from swd_lens.solver.validate import resolve_units
from swd_lens.tasks.text import TokenError, as_rows

_FLOAT, _DOUBLE = 4, 8

# An activation's entry costs passes over memory, not products: as many operations' time as this. Measured on one CPU
# thread: 250 to 400 with d_model = 128, 500 to 900 with d_model = 768.
_PER_ENTRY = 400.0


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
        calibration: "sequential", "dense" or "zero-data".
    """

    rows: tuple[SiteEstimate, ...]
    available_bytes: int | None
    flops_per_second: float | None
    calibration: str

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
        if self.calibration == "dense" and len(self.rows) > 1:
            ways.append('calibration="sequential" (one Gram at a time instead of all)')
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
        lines = [header, *(_line(row) for row in self.rows)]
        widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
        table = [
            "  "
            + "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
            for line in lines
        ]
        available = "unknown" if self.available_bytes is None else _bytes(self.available_bytes)
        memory = f"memory: {_bytes(self.peak_bytes)} at the worst moment, {available} available"
        if not self.fits:
            memory += " - does not fit"
        work = f"time: {_flops(self.flops)}"
        if self.seconds is not None and self.flops_per_second is not None:
            work += f", about {_seconds(self.seconds)} at the measured {_flops(self.flops_per_second)} per second"
        title = f"Estimate: {_matrices(len(self.rows))}, calibration {self.calibration}"
        return "\n".join([title, *table, memory, work])


def estimate(
    model: Any,
    sites: Pattern,
    *,
    sparsity: float | int | Mapping[str, float] = 0.5,
    tokens: Any = None,
    calibration: str = "sequential",
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    batch_size: int = 16,
    **options: Any,
) -> Estimate:
    """Memory and time that `factorize` with these arguments will take, without starting it.

    Args:
        tokens: as for `factorize`, or just their number.
        model, sites, sparsity, calibration, preset, units, batch_size, options: as for `factorize`.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ValueError: bad sparsity or solver options; the site is named.
    """
    chosen = find_sites(model, sites)
    shape = _token_shape(tokens, model)
    rows = forecast(
        model,
        chosen,
        shape,
        sparsities=sparsity_of_each(chosen, sparsity),
        calibration=check_calibration(calibration),
        preset=preset,
        units=units,
        batch_size=batch_size,
        options=options,
    )
    device = _device(model)
    kind = "zero-data" if shape is None else calibration
    return Estimate(rows, available_bytes(device), product_speed(device), kind)


def check_calibration(calibration: str) -> str:
    """The same word. Raises ValueError unless it is one of the two."""
    if calibration not in ("sequential", "dense"):
        raise ValueError(f"calibration must be 'sequential' or 'dense', got {calibration!r}")
    return calibration


def sparsity_of_each(sites: Sequence[Site], sparsity: float | int | Mapping[str, float]) -> dict[str, float]:
    """Site name -> s: one for all, or a mapping whose keys are patterns (see `swd_lens.sites.select_sites`).

    Raises:
        UnknownSiteError: a key matches none of the sites.
        SparsityError: a site without an s, or with two different ones.
    """
    if not isinstance(sparsity, Mapping):
        return {site.name: float(sparsity) for site in sites}
    given: dict[str, float] = {}
    for pattern, s in sparsity.items():
        for site in select_sites(sites, pattern):
            if given.setdefault(site.name, float(s)) != float(s):
                raise SparsityError(f"{site.name} is given two sparsities, {given[site.name]:g} and {float(s):g}")
    if missing := [site.name for site in sites if site.name not in given]:
        raise SparsityError(f"no sparsity is given for {', '.join(missing)}; name every site, or give one number for all")
    return given


@contextmanager
def naming(site: Site) -> Iterator[None]:
    """A solver's ValueError with the site in front (the same kind of error): a solver only ever sees a tensor."""
    try:
        yield
    except ValueError as error:
        raise type(error)(f"{site}: {error}") from error


def forecast(
    model: Any,
    chosen: Sequence[Site],
    token_shape: tuple[int, int] | None,
    *,
    sparsities: Mapping[str, float],
    calibration: str,
    preset: str,
    units: int | float | str | None,
    batch_size: int,
    options: dict[str, Any],
    finished: Collection[str] = (),
) -> tuple[SiteEstimate, ...]:
    """One row per site that is still to be done. `token_shape` is (rows, pos), None for zero-data."""
    todo = [site for site in chosen if site.name not in finished]
    width = {site.name: _width(site, units) for site in chosen}
    kept = {site.name: _FLOAT * (site.numel + width[site.name] * (site.d_in + site.d_out)) for site in chosen}
    held = sum(kept[name] for name in finished)
    grams = {site.name: _FLOAT * site.d_in**2 if token_shape else 0 for site in todo}
    dense = calibration == "dense" and token_shape is not None
    forwards = _forward_flops(model, todo, token_shape, dense)
    activations = _activation_bytes(model, token_shape, batch_size)
    rows: list[SiteEstimate] = []
    for place, site in enumerate(todo):
        with naming(site):
            solving = cost(
                site.d_in,
                site.d_out,
                sparsity=sparsities[site.name],
                units=units,
                preset=preset,
                calibrated=token_shape is not None,
                **options,
            )
        # Solving: weight, Gram, and the solver's own (or the float64 error measured after it).
        working = max(solving.peak_bytes, _error_bytes(site, width[site.name], token_shape is not None))
        peak = _FLOAT * site.numel + grams[site.name] + working
        other_grams = sum(grams[later.name] for later in todo[place + 1 :]) if dense else 0
        if token_shape and (not dense or place == 0):
            # Calibration: float64 sums, one product in float32 and again in float64, and a batch's activations.
            summed = todo if dense else [site]
            sums = sum(_DOUBLE * one.d_in**2 for one in summed) + (_FLOAT + _DOUBLE) * max(s.d_in for s in summed) ** 2
            peak = max(peak, sums + activations - other_grams)
        rows.append(
            SiteEstimate(
                site.name,
                site.d_in,
                site.d_out,
                width[site.name],
                solving.flops,
                forwards[place],
                peak,
                held + other_grams,
            )
        )
        held += kept[site.name]
    return tuple(rows)


def _width(site: Site, units: int | float | str | None) -> int:
    with naming(site):
        return resolve_units(units, site.d_in, site.d_out, any_width=True)


def _error_bytes(site: Site, units: int, calibrated: bool) -> int:
    """Of `Factors.relmse`: read factor and Gram in float64; W goes by in tiles."""
    return _DOUBLE * (site.d_in * units + calibrated * site.d_in**2)


def _forward_flops(
    model: Any, todo: Sequence[Site], token_shape: tuple[int, int] | None, dense: bool
) -> tuple[float, ...]:
    """Per site: h^T h, and the host's blocks up to the site's layer (once for all sites with dense calibration)."""
    if token_shape is None:
        return (0.0,) * len(todo)
    n_tokens, pos = token_shape[0] * token_shape[1], token_shape[1]
    # Blocks may differ (linear attention beside full attention); attention's own products are counted as if it were full.
    per_token = [4.0 * pos * model.cfg.n_heads * model.cfg.d_head + _PER_ENTRY * _activation_entries(model, pos)]
    per_token *= model.cfg.n_layers
    for site in host_of(model).sites():
        per_token[site.layer] += 2.0 * site.numel
    upto = [float(n_tokens) * total for total in accumulate(per_token)]  # blocks 0 .. layer
    last = max((site.layer for site in todo), default=0)
    forwards = (upto[last] / len(todo) if dense else upto[site.layer] for site in todo)
    return tuple(one + 2.0 * n_tokens * site.d_in**2 for one, site in zip(forwards, todo, strict=True))


def _activation_bytes(model: Any, token_shape: tuple[int, int] | None, batch_size: int) -> int:
    """Of one block's forward on one batch."""
    if token_shape is None:
        return 0
    rows, pos = token_shape
    entry = next(model.parameters()).element_size()
    return entry * min(rows, batch_size) * pos * _activation_entries(model, pos)


def _activation_entries(model: Any, pos: int) -> int:
    """Per token of a row of `pos`: residuals and their norms, q, k, v, z; pre and post; scores and pattern."""
    cfg = model.cfg
    return 10 * cfg.d_model + 3 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * pos


def _token_shape(tokens: Any, model: Any) -> tuple[int, int] | None:
    if tokens is None or (isinstance(tokens, int) and tokens == 0 and not isinstance(tokens, bool)):
        return None
    if isinstance(tokens, int) and not isinstance(tokens, bool):
        if tokens < 0:
            raise TokenError(f"tokens={tokens}: give how many there are, the (rows, pos) ids, or None for zero-data")
        pos = min(tokens, int(model.cfg.n_ctx))
        return -(-tokens // pos), pos
    return shape_of(as_rows(tokens, model))


def shape_of(rows: Int[Tensor, "rows pos"]) -> tuple[int, int]:
    return rows.shape[0], rows.shape[1]


def _device(model: Any) -> torch.device:
    return next(model.parameters()).device


# ---------------------------------------------------------------------------------------------- words


def _line(row: SiteEstimate) -> tuple[str, ...]:
    sizes = (f"{row.d_in:,}", f"{row.d_out:,}", f"{row.units:,}")
    return (row.site, *sizes, _flops(row.flops), _flops(row.calibration_flops), _bytes(row.held_bytes + row.peak_bytes))


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
