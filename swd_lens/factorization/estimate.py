"""estimate: what a factorization will need, before it starts: operations, memory and time, from shapes.

1. `forecast` makes one row per matrix that is still to be factorized, in the order in which it is done: the solver's operations
   and working memory (solver/cost.py), the operations of its calibration, and what is held meanwhile.
   a. The matrices are cut into stages, each calibrated in one pass over the tokens (stages.py).
   b. A pass costs a forward of the stage's own blocks, and, once per block, one that brings what is kept of the residual stream
      up to them; then h^T h for every input that is read. The first matrix's row bears what several need. Blocks are counted
      whole, though a pass from what is kept ends behind the last matrix that it is for.
      Corrected calibration runs every pass twice, as the dense host and as the replaced one (grams.py). Where outputs are
      weighed, a pass forward and back through the whole host comes before the first of the matrices that share it
      (gradients.py).
   c. Held meanwhile: the Grams that the rest of the stage waits for, and everything that is finished.
2. `Estimate` holds the rows with their totals beside what the machine has and does (machine.py): free memory, speed of float32
   products. It prints as a table; `require_fit` refuses, with the numbers, what cannot fit.

Bytes are those beyond what is in use before the call (the host among it). They are upper bounds by design where exact
counts would need a run: activations of a calibration batch, and a kept copy of every weight.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import SimpleNamespace
from typing import Any

import pandas as pd
import torch

from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.base.errors import DoesNotFitError, TokenError
from swd_lens.base.machine import available_bytes, product_speed
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.gradients import TOKENS
from swd_lens.factorization.job import Job, SolveOptions
from swd_lens.factorization.solve_task import naming
from swd_lens.factorization.stages import stages_of, with_room
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Pattern, Site, base_kind, is_site_name, split_name
from swd_lens.solver import DEFAULT_PRESET, cost
from swd_lens.tasks.streams import as_stream

_FLOAT, _DOUBLE = 4, 8

# An activation's entry costs passes over memory, not products: as many operations' time as this. Measured on one CPU
# thread: 250 to 400 with d_model = 128, 500 to 900 with d_model = 768.
_PER_ENTRY = 400.0

_COLUMNS = ("site", "d_in", "d_out", "units", "solver", "calibration", "memory")
_MOST_LINES = 16  # above this, matrices of one kind and shape share a line

# A host that has every token and any context: for tokens of a model that is not loaded.
_ANY_HOST = SimpleNamespace(cfg=SimpleNamespace(d_vocab=float("inf"), n_ctx=float("inf")))


@dataclass(frozen=True)
class SiteEstimate(Record):
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
        """Raise DoesNotFitError where more memory is needed than available; it says how much, where, and what would need less."""
        if self.fits:
            return
        worst = max(self.rows, key=lambda row: row.held_bytes + row.peak_bytes)
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
        raise DoesNotFitError(
            f"factorizing {_matrices(len(self.rows))} needs {_bytes(self.peak_bytes)} of memory, "
            f"{_bytes(self.available_bytes)} available. Largest: {worst.site} ({worst.d_in}, {worst.d_out}) with "
            f"{worst.units} units, {_bytes(worst.peak_bytes)}, while {_bytes(worst.held_bytes)} are held for other sites "
            f"(their Grams and factors). What helps: {'; '.join(ways)}."
        )

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
        """The table's lines, in order of their first rows: one for one row, or for several of one shape."""
        together: dict[object, list[SiteEstimate]] = {}
        for row in self.rows:
            alike = (_kind(row.site), row.d_in, row.d_out, row.units) if len(self.rows) > _MOST_LINES else row.site
            together.setdefault(alike, []).append(row)
        lines = []
        for rows in together.values():
            row = rows[0]
            sizes = (f"{row.d_in:,}", f"{row.d_out:,}", f"{row.units:,}")
            # Operations of all, memory at the worst moment.
            solver, calibration = sum(row.flops for row in rows), sum(row.calibration_flops for row in rows)
            memory = max(row.held_bytes + row.peak_bytes for row in rows)
            kind = f"blocks.*.{_kind(row.site)}" if _kind(row.site) else "this shape"
            label = row.site if len(rows) == 1 else f"{len(rows)} x {kind}"
            lines.append((label, *sizes, _scaled(solver, "FLOP"), _scaled(calibration, "FLOP"), _bytes(memory)))
        return lines

    def _totals(self) -> list[str]:
        available = "unknown" if self.available_bytes is None else _bytes(self.available_bytes)
        memory = f"memory: {_bytes(self.peak_bytes)} at the worst moment, {available} available"
        if not self.fits:
            memory += " - does not fit"
        work = f"time: {_scaled(self.flops, 'FLOP')}"
        if self.seconds is not None and self.flops_per_second is not None:
            work += f", about {_seconds(self.seconds)} at the measured {_scaled(self.flops_per_second, 'FLOP')} per second"
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
    basis: str | Mapping[str, str] | None = None,
    batch_size: int = 16,
    gram_dtype: str = "auto",
    weigh_outputs: bool = False,
    **options: Any,
) -> Estimate:
    """Memory and time that `factorize` with these arguments will take, without starting it (ours).

    Args:
        model: the host; or, where it is not loaded, the shapes of its matrices: name -> (d_in, d_out), or one (d_in, d_out).
            Names may be site names ("blocks.0.mlp_out", in execution order) or any labels. Of their calibration the Grams
            are counted, the forwards are not (`Estimate.forwards_counted`), nor are activations.
        sites: as for `factorize`; shapes are taken all.
        sparsity: as for `factorize`; with shapes a mapping's keys are their names, or globs.
        tokens: as for `factorize`, or just their number.
        calibration, preset, units, basis, batch_size, gram_dtype, weigh_outputs, options: as for `factorize`; a basis of "auto"
            counts as what it is without text.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ValueError: bad shapes, sparsity or solver options; the site is named.
    """
    shapes_only = isinstance(model, Mapping | Sequence)
    how = SolveOptions(
        preset=preset,
        units=units,
        basis=basis,
        calibration=calibration,
        batch_size=batch_size,
        gram_dtype=gram_dtype,
        weigh_outputs=weigh_outputs,
        settings=options,
    )
    job = Job.of(model, sites, _token_shape(tokens, _ANY_HOST if shapes_only else model), sparsity, how)
    device = torch.empty(0).device if shapes_only else next(model.parameters()).device
    rows, speed, disk = forecast(job), product_speed(device), 0
    if not shapes_only and job.tokens is not None and len(stages_of(job.sites, job.kind)) > 1:
        # What is kept of the residual stream: the old and the new file, while one is made of the other.
        files = min(len({site.layer for site in job.sites} - {0}), 2) * (2 if job.how.calibration == "corrected" else 1)
        disk = files * job.n_tokens * model.cfg.d_model * next(model.parameters()).element_size()
    return Estimate(rows, available_bytes(device), speed, job.kind, not shapes_only, disk)


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


# ---------------------------------------------------------------------------------------------- the forecast


def forecast(job: Job, finished: Collection[str] = ()) -> tuple[SiteEstimate, ...]:
    """One row per matrix that is still to be done; `finished` are the names of those that are there already. Raises
    ValueError: bad units or solver options; the matrix is named."""
    plan = _Plan(job)
    unfinished = [[site for site in stage if site.name not in finished] for stage in stages_of(job.sites, job.kind)]
    stages = [stage for stage in unfinished if stage]
    forwards = dict(zip((stage[0].name for stage in stages), plan.forward_flops(stages), strict=True))
    output_passes = plan.output_passes([site for stage in stages for site in stage])
    widths: dict[str, int] = {}
    costs = {}
    shared: dict[str, Any] = {"units": job.how.units, "preset": job.how.preset, "outputs_weighed": job.how.weigh_outputs}
    shared["calibrated"] = job.tokens is not None
    for site in job.sites:
        with naming(site):
            widths[site.name] = job.width(site)
            own = {"sparsity": job.sparsities[site.name], **job.settings_of(site)}
            costs[site.name] = cost(site.d_in, site.d_out, **shared, **own)
    # Finished factors: float32 read and write, and W, which those of a float32 host remember. Those of another host do not, and
    # attached (for calibration behind them) they are there in its dtype, too.
    entries = {site.name: widths[site.name] * (site.d_in + site.d_out) for site in job.sites}
    if plan.entry == _FLOAT:
        kept = {site.name: _FLOAT * (entries[site.name] + site.numel) for site in job.sites}
    else:
        kept = {name: (_FLOAT + plan.entry) * n for name, n in entries.items()}
    held = sum(kept[name] for name in finished)
    rows: list[SiteEstimate] = []
    for stage in stages:
        for i, site in enumerate(stage):
            units, solving, outputs = widths[site.name], costs[site.name], output_passes[site.name]
            waiting = plan.waiting_bytes(stage, i) + outputs.waiting_bytes
            peak = max(plan.solving_bytes(site, units, solving.peak_bytes), outputs.collecting_bytes - waiting)
            if job.tokens is not None and i == 0:
                peak = max(peak, plan.collecting_bytes(stage) - waiting)
            calibrating = plan.product_flops(stage, i) + forwards.get(site.name, 0.0) + outputs.flops
            sizes = (site.name, site.d_in, site.d_out, units)
            rows.append(SiteEstimate(*sizes, solving.flops, calibrating, peak, held + waiting))
            held += kept[site.name]
    return tuple(rows)


@dataclass(frozen=True)
class _OutputPass:
    """Cost of output Grams at one matrix: operations and bytes of the pass that begins with it (0 if none does), and bytes of the
    Grams that wait for later matrices while it is solved."""

    flops: float = 0.0
    collecting_bytes: int = 0
    waiting_bytes: int = 0


class _Plan:
    """Cost of the parts of a job."""

    def __init__(self, job: Job):
        self.job, self.model = job, job.model
        self.calibrated = job.tokens is not None
        # Each matrix then has a target of its own, and sites do not share what they read.
        self.corrected = job.how.calibration == "corrected" and len(job.sites) > 1
        self.gram_entry = _DOUBLE if job.gram_dtype == "float64" else _FLOAT
        # Of the host's weights and activations.
        self.entry = _FLOAT if job.model is None else next(job.model.parameters()).element_size()

    @cached_property
    def inputs(self) -> dict[str, int]:
        """Site name -> number of the input that it reads. Sites of one input (q, k and v) share its Gram."""
        return {site.name: i for i, same in enumerate(stages_of(self.job.sites, "sequential")) for site in same}

    def activations(self, pos: int) -> int:
        """Entries per token of a row of `pos`: residuals and their norms, q, k, v, z; pre and post; scores and pattern."""
        cfg = self.model.cfg
        return 10 * cfg.d_model + 3 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * pos

    def solving_bytes(self, site: Site, units: int, solver_bytes: int) -> int:
        """Weight, Gram (and a float64 one's float32 copy), and the solver's own, or `Factors.relmse` after it: read factor
        and Gram in float64, W by tiles."""
        error = _DOUBLE * (site.d_in * units + self.calibrated * site.d_in**2)
        gram = self.gram_entry + _FLOAT * (self.gram_entry != _FLOAT)
        weights = _FLOAT * (site.numel * (1 + self.corrected) + self.job.how.weigh_outputs * site.d_out**2)
        return weights + self.calibrated * gram * site.d_in**2 + max(solver_bytes, error)

    def waiting_bytes(self, stage: Sequence[Site], i: int) -> int:
        """Memory of Grams while the stage's i-th site is solved: those of the sites after it, but for its own."""
        if self.corrected:
            return sum(self.gram_entry * site.d_in**2 + _FLOAT * site.numel for site in stage[i + 1 :])
        later = {self.inputs[site.name]: site.d_in**2 for site in stage[i + 1 :]}
        later.pop(self.inputs[stage[i].name], None)
        return self.gram_entry * sum(later.values()) * self.calibrated

    def collecting_bytes(self, stage: Sequence[Site]) -> int:
        """Memory of a pass: float64 sums, one product beside its float64 copy, and a block's activations on one batch."""
        widest, activations = max(site.d_in for site in stage), 0
        if self.job.token_shape is not None and self.model is not None:
            rows, pos = self.job.token_shape
            copied = self.gram_entry * widest if self.entry != self.gram_entry else 0
            activations = min(rows, self.job.how.batch_size) * pos * (self.entry * self.activations(pos) + copied)
        if self.corrected:
            # Two sums for each site; then, one site at a time, its Gram with the ridge, its factor, and T in float64.
            passing = (_FLOAT + _DOUBLE) * widest**2 + 2 * activations
            solving = _DOUBLE * (3 * widest**2 + 2 * max(site.numel for site in stage))
            return 2 * _DOUBLE * sum(site.d_in**2 for site in stage) + max(passing, solving)
        sums = sum({self.inputs[site.name]: site.d_in**2 for site in stage}.values())
        return _DOUBLE * sums + (_FLOAT + _DOUBLE) * widest**2 + activations

    def output_passes(self, sites: Sequence[Site]) -> dict[str, _OutputPass]:
        """Site name -> cost of its output Gram; `sites` are all that will be solved, in order. A pass goes forward and back (two
        products for one) through the whole host; it holds sums, logits, and the activations of all blocks on a few rows."""
        if not self.job.how.weigh_outputs:
            return {site.name: _OutputPass() for site in sites}
        forward, holding = 0.0, 0
        if self.model is not None:
            cfg = self.model.cfg
            forward = sum(2.0 * site.numel for site in host_of(self.model).sites()) + 2.0 * cfg.d_model * cfg.d_vocab
            if self.job.token_shape is not None:
                pos = self.job.token_shape[1]
                kept = self.activations(pos) * cfg.n_layers
                holding = 4 * CHUNK_BYTES + max(TOKENS, pos) * self.entry * kept
        passes: dict[str, _OutputPass] = {}
        rest = list(sites)
        while rest:
            together = with_room(rest[:1], rest[1:])
            entries = [site.d_out**2 for site in together]
            flops = self.job.n_tokens * (3 * forward + sum(2.0 * n for n in entries))
            for i, site in enumerate(together):
                begins = (flops, _FLOAT * sum(entries) + holding) if i == 0 else (0.0, 0)
                passes[site.name] = _OutputPass(*begins, _FLOAT * sum(entries[i + 1 :]))
            rest = rest[len(together) :]
        return passes

    def product_flops(self, stage: Sequence[Site], i: int) -> float:
        """h^T h, once for the sites of one input; corrected: all that comes before the solve."""
        site = stage[i]
        if self.corrected:  # h^T h and h^T g, and the target from them
            return 4.0 * self.job.n_tokens * site.d_in**2 + site.d_in**3 / 3 + 4.0 * site.d_in * site.numel
        again = self.inputs[site.name] in [self.inputs[earlier.name] for earlier in stage[:i]]
        return 0.0 if again else 2.0 * self.job.n_tokens * site.d_in**2

    def forward_flops(self, stages: Sequence[Sequence[Site]]) -> list[float]:
        """Per stage: from the block that is kept up to the stage's own, and those once."""
        if self.job.token_shape is None or self.model is None:
            return [0.0] * len(stages)
        cfg, pos = self.model.cfg, self.job.token_shape[1]
        # Blocks may differ (linear attention beside full attention); attention's own products are counted as if it were full.
        blocks = [4.0 * pos * cfg.n_heads * cfg.d_head + _PER_ENTRY * self.activations(pos)] * cfg.n_layers
        for site in host_of(self.model).sites():
            blocks[site.layer] += 2.0 * site.numel
        blocks = [self.job.n_tokens * (1 + self.corrected) * flops for flops in blocks]
        flops, kept = [], 0  # what enters this block is kept; at first what enters block 0, the tokens
        for stage in stages:
            layers = [site.layer for site in stage]
            flops.append(sum(blocks[kept : max(layers) + 1]))
            kept = max(kept, min(layers))
        return flops


# ---------------------------------------------------------------------------------------------- words


def _kind(name: str) -> str:
    """Kind of a site; "" of a matrix with another name."""
    return base_kind(split_name(name)[1]) if is_site_name(name) else ""


def _matrices(n: int) -> str:
    return f"{n} matrix" if n == 1 else f"{n} matrices"


def _bytes(n: int | None) -> str:
    return f"{n or 0:,} B" if (n or 0) < 1000 else _scaled(float(n or 0), "B")


def _scaled(n: float, unit: str) -> str:
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if n >= size:
            return f"{n / size:.3g} {prefix}{unit}" if n < 999.5 * size else f"{n / size:,.0f} {prefix}{unit}"
    return f"{n:.3g} {unit}"


def _seconds(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.2g} s" if seconds < 10 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"
