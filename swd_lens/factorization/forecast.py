"""forecast: operations and bytes of every matrix that is still to be factorized, in the order in which it is done.

1. The matrices are cut into stages, each calibrated in one pass over the tokens (stages.py).
2. A pass costs a forward of the stage's own blocks, and, once per block, one that brings what is kept of the residual stream
   up to them; then h^T h for every input that is read. The first matrix's row bears what several need. Blocks are counted
   whole, though a pass from what is kept ends behind the last matrix that it is for.
   Corrected calibration runs every pass twice, as the dense host and as the replaced one (grams.py). Where outputs are weighed,
   a pass forward and back through the whole host comes before the first of the matrices that share it (output_grams.py).
3. Held meanwhile: the Grams that the rest of the stage waits for, and everything that is finished.

Bytes are those beyond what is in use before the call (the host among it). They are upper bounds by design where exact
counts would need a run: activations of a calibration batch, and a kept copy of every weight.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.base.record import Record
from swd_lens.factorization.gradients import TOKENS
from swd_lens.factorization.job import Job
from swd_lens.factorization.solve import naming
from swd_lens.factorization.stages import stages_of, with_room
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site
from swd_lens.solver import Cost, cost

_FLOAT, _DOUBLE = 4, 8

# An activation's entry costs passes over memory, not products: as many operations' time as this. Measured on one CPU
# thread: 250 to 400 with d_model = 128, 500 to 900 with d_model = 768.
_PER_ENTRY = 400.0


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


def forecast(job: Job, finished: Collection[str] = ()) -> tuple[SiteEstimate, ...]:
    """One row per matrix that is still to be done; `finished` are the names of those that are there already.

    Raises:
        ValueError: bad units or solver options; the matrix is named.
    """
    plan = _Plan(job)
    widths, costs = {}, {}
    for site in job.sites:
        with naming(site):
            widths[site.name] = job.width(site)
            costs[site.name] = cost(
                site.d_in,
                site.d_out,
                sparsity=job.sparsities[site.name],
                units=job.units,
                preset=job.preset,
                calibrated=plan.calibrated,
                outputs_weighed=job.weigh_outputs,
                **job.options_of(site),
            )
    kept = {site.name: plan.kept_bytes(site, widths[site.name]) for site in job.sites}
    held = sum(kept[name] for name in finished)
    unfinished = [[site for site in stage if site.name not in finished] for stage in stages_of(job.sites, job.kind)]
    stages = [stage for stage in unfinished if stage]
    output_passes = plan.output_passes([site for stage in stages for site in stage])
    rows: list[SiteEstimate] = []
    for stage, forward in zip(stages, plan.forward_flops(stages), strict=True):
        for i, site in enumerate(stage):
            outputs = output_passes[site.name]
            waiting = plan.waiting_bytes(stage, i) + outputs.waiting_bytes
            peak = plan.solving_bytes(site, widths[site.name], costs[site.name])
            if plan.calibrated and i == 0:
                peak = max(peak, plan.collecting_bytes(stage) - waiting)
            peak = max(peak, outputs.collecting_bytes - waiting)
            calibrating = plan.product_flops(stage, i) + (forward if i == 0 else 0.0) + outputs.flops
            sizes = (site.name, site.d_in, site.d_out, widths[site.name])
            rows.append(SiteEstimate(*sizes, costs[site.name].flops, calibrating, peak, held + waiting))
            held += kept[site.name]
    return tuple(rows)


def residual_bytes(job: Job) -> int:
    """Of what is kept of the residual stream on disk: the old and the new file, while one is made of the other."""
    if job.model is None or job.tokens is None or len(stages_of(job.sites, job.kind)) < 2:
        return 0
    files = min(len({site.layer for site in job.sites} - {0}), 2)
    hosts = 2 if job.calibration == "corrected" else 1
    return hosts * files * job.n_tokens * job.model.cfg.d_model * _entry_size(job.model)


@dataclass(frozen=True)
class _OutputPass:
    """What output Grams take at one matrix: operations and bytes of the pass that begins with it (0 if none does), and bytes of
    the Grams that wait for later matrices while it is solved."""

    flops: float = 0.0
    collecting_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True)
class _Plan:
    """What the parts of a job take; `corrected`: each matrix has a target of its own, and sites do not share what they read."""

    job: Job

    @property
    def calibrated(self) -> bool:
        return self.job.tokens is not None

    @property
    def corrected(self) -> bool:
        return self.job.calibration == "corrected" and len(self.job.sites) > 1

    @property
    def gram_entry(self) -> int:
        return _DOUBLE if self.job.gram_dtype == "float64" else _FLOAT

    @cached_property
    def inputs(self) -> dict[str, int]:
        """Site name -> number of the input that it reads. Sites of one input (q, k and v) share its Gram."""
        return {site.name: i for i, same in enumerate(stages_of(self.job.sites, "sequential")) for site in same}

    # ------------------------------------------------------------------ bytes

    def kept_bytes(self, site: Site, units: int) -> int:
        """Of finished factors: float32 read and write, and W, which those of a float32 host remember.

        Those of another host do not, and attached (for calibration behind them) they are there in its dtype, too.
        """
        entries, size = units * (site.d_in + site.d_out), _entry_size(self.job.model)
        return _FLOAT * (entries + site.numel) if size == _FLOAT else (_FLOAT + size) * entries

    def solving_bytes(self, site: Site, units: int, solving: Cost) -> int:
        """Weight, Gram (and a float64 one's float32 copy), and the solver's own, or `Factors.relmse` after it: read factor
        and Gram in float64, W by tiles."""
        error = _DOUBLE * (site.d_in * units + self.calibrated * site.d_in**2)
        gram = self.gram_entry + _FLOAT * (self.gram_entry != _FLOAT)
        weights = _FLOAT * (site.numel * (1 + self.corrected) + self.job.weigh_outputs * site.d_out**2)
        return weights + self.calibrated * gram * site.d_in**2 + max(solving.peak_bytes, error)

    def waiting_bytes(self, stage: Sequence[Site], i: int) -> int:
        """Of Grams, while the stage's i-th site is solved: those of the sites after it, but for its own."""
        if self.corrected:
            return sum(self.gram_entry * site.d_in**2 + _FLOAT * site.numel for site in stage[i + 1 :])
        later = {self.inputs[site.name]: site.d_in**2 for site in stage[i + 1 :]}
        later.pop(self.inputs[stage[i].name], None)
        return self.gram_entry * sum(later.values()) * self.calibrated

    def collecting_bytes(self, stage: Sequence[Site]) -> int:
        """Of a pass: float64 sums, one product beside its float64 copy, and a block's activations on one batch."""
        sums = sum({self.inputs[site.name]: site.d_in**2 for site in stage}.values())
        widest = max(site.d_in for site in stage)
        if self.corrected:
            # Two sums for each site; then, one site at a time, its Gram with the ridge, its factor, and T in float64.
            passing = (_FLOAT + _DOUBLE) * widest**2 + 2 * self._activation_bytes(widest)
            solving = _DOUBLE * (3 * widest**2 + 2 * max(site.numel for site in stage))
            return 2 * _DOUBLE * sum(site.d_in**2 for site in stage) + max(passing, solving)
        return _DOUBLE * sums + (_FLOAT + _DOUBLE) * widest**2 + self._activation_bytes(widest)

    def _activation_bytes(self, widest: int) -> int:
        if self.job.token_shape is None or self.job.model is None:
            return 0
        rows, pos = self.job.token_shape
        size = _entry_size(self.job.model)
        copied = self.gram_entry * widest if size != self.gram_entry else 0
        return min(rows, self.job.batch_size) * pos * (size * _activation_entries(self.job.model, pos) + copied)

    # ------------------------------------------------------------------ output Grams

    def output_passes(self, sites: Sequence[Site]) -> dict[str, _OutputPass]:
        """Site name -> what its output Gram takes; `sites` are all that will be solved, in order."""
        if not self.job.weigh_outputs:
            return {site.name: _OutputPass() for site in sites}
        passes: dict[str, _OutputPass] = {}
        rest = list(sites)
        while rest:
            together = with_room(rest[:1], rest[1:])
            for i, site in enumerate(together):
                waiting = sum(_FLOAT * later.d_out**2 for later in together[i + 1 :])
                begins = (self._way_back_flops(together), self._way_back_bytes(together)) if i == 0 else (0.0, 0)
                passes[site.name] = _OutputPass(*begins, waiting)
            rest = rest[len(together) :]
        return passes

    def _way_back_flops(self, sites: Sequence[Site]) -> float:
        """Forward and back through the whole host (back is two products for one), and g^T g."""
        forward, model = 0.0, self.job.model
        if model is not None:
            forward = (
                sum(2.0 * site.numel for site in host_of(model).sites()) + 2.0 * model.cfg.d_model * model.cfg.d_vocab
            )
        return self.job.n_tokens * (3 * forward + sum(2.0 * site.d_out**2 for site in sites))

    def _way_back_bytes(self, sites: Sequence[Site]) -> int:
        """Sums, logits, and the activations of all blocks on a few rows."""
        sums = _FLOAT * sum(site.d_out**2 for site in sites)
        if self.job.token_shape is None or self.job.model is None:
            return sums
        pos = self.job.token_shape[1]
        kept = _activation_entries(self.job.model, pos) * self.job.model.cfg.n_layers
        return sums + 4 * CHUNK_BYTES + max(TOKENS, pos) * _entry_size(self.job.model) * kept

    # ------------------------------------------------------------------ operations

    def product_flops(self, stage: Sequence[Site], i: int) -> float:
        """h^T h, once for the sites of one input; corrected: all that comes before the solve."""
        site = stage[i]
        if self.corrected:  # h^T h and h^T g, and the target from them
            return 4.0 * self.job.n_tokens * site.d_in**2 + site.d_in**3 / 3 + 4.0 * site.d_in * site.numel
        again = self.inputs[site.name] in [self.inputs[earlier.name] for earlier in stage[:i]]
        return 0.0 if again else 2.0 * self.job.n_tokens * site.d_in**2

    def forward_flops(self, stages: Sequence[Sequence[Site]]) -> list[float]:
        """Per stage: from the block that is kept up to the stage's own, and those once."""
        model = self.job.model
        if self.job.token_shape is None or model is None:
            return [0.0] * len(stages)
        pos = self.job.token_shape[1]
        # Blocks may differ (linear attention beside full attention); attention's own products are counted as if it were full.
        every = 4.0 * pos * model.cfg.n_heads * model.cfg.d_head + _PER_ENTRY * _activation_entries(model, pos)
        blocks = [every] * model.cfg.n_layers
        for site in host_of(model).sites():
            blocks[site.layer] += 2.0 * site.numel
        blocks = [self.job.n_tokens * (1 + self.corrected) * flops for flops in blocks]
        flops, kept = [], 0  # what enters this block is kept; at first what enters block 0, the tokens
        for stage in stages:
            layers = [site.layer for site in stage]
            flops.append(sum(blocks[kept : max(layers) + 1]))
            kept = max(kept, min(layers))
        return flops


def _entry_size(model: Any) -> int:
    """Bytes of an entry of the host's weights and activations."""
    return _FLOAT if model is None else next(model.parameters()).element_size()


def _activation_entries(model: Any, pos: int) -> int:
    """Per token of a row of `pos`: residuals and their norms, q, k, v, z; pre and post; scores and pattern."""
    cfg = model.cfg
    return 10 * cfg.d_model + 3 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * pos
