"""forecast: operations and bytes of every matrix that is still to be factorized, in the order in which it is done.

1. The matrices are cut into stages, each calibrated in one pass over the tokens (stages.py).
2. A pass costs a forward of the stage's own blocks, and, once per block, one that brings what is kept of the residual stream
   up to them; then h^T h for every input that is read. The first matrix's row bears what several need.
   Corrected calibration runs every pass twice, as the dense host and as the replaced one (targets.py).
3. Held meanwhile: the Grams that the rest of the stage waits for, and everything that is finished.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from swd_lens.factorization.resources.shapes import Matrix, naming
from swd_lens.factorization.resources.table import SiteEstimate
from swd_lens.factorization.stages import stages_of
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site
from swd_lens.solver import Cost, cost
from swd_lens.solver.validate import resolve_units

_FLOAT, _DOUBLE = 4, 8

# An activation's entry costs passes over memory, not products: as many operations' time as this. Measured on one CPU
# thread: 250 to 400 with d_model = 128, 500 to 900 with d_model = 768.
_PER_ENTRY = 400.0


def forecast(
    model: Any,
    chosen: Sequence[Matrix],
    token_shape: tuple[int, int] | None,
    *,
    sparsities: Mapping[str, float],
    calibration: str,
    preset: str,
    units: int | float | str | None,
    batch_size: int,
    options: dict[str, Any],
    finished: Collection[str] = (),
    gram_dtype: str = "float32",
) -> tuple[SiteEstimate, ...]:
    """One row per matrix that is still to be done.

    Args:
        model: the host; None where it is not loaded, and forwards and activations cannot be counted.
        token_shape: (rows, pos); None for zero-data.
        finished: names of matrices that are there already.

    Raises:
        ValueError: bad units or solver options; the matrix is named.
    """
    entry = _DOUBLE if gram_dtype == "float64" else _FLOAT
    plan = _Plan(model, token_shape, batch_size, entry, corrected=calibration == "corrected" and len(chosen) > 1)
    width, solving = {}, {}
    for site in chosen:
        with naming(site):
            width[site.name] = resolve_units(units, site.d_in, site.d_out, any_width=True)
            how = {"sparsity": sparsities[site.name], "units": units, "preset": preset, "calibrated": plan.calibrated}
            solving[site.name] = cost(site.d_in, site.d_out, **how, **options)
    kept = {site.name: plan.kept_bytes(site, width[site.name]) for site in chosen}
    held = sum(kept[name] for name in finished)
    open_ = [[site for site in stage if site.name not in finished] for stage in plan.stages(chosen, calibration)]
    stages = [stage for stage in open_ if stage]
    rows: list[SiteEstimate] = []
    for stage, forward in zip(stages, plan.forward_flops(stages), strict=True):
        for place, site in enumerate(stage):
            waiting = plan.waiting_bytes(stage, place)
            peak = plan.solving_bytes(site, width[site.name], solving[site.name])
            if plan.calibrated and place == 0:
                peak = max(peak, plan.collecting_bytes(stage) - waiting)
            calibrating = plan.product_flops(stage, place) + (forward if place == 0 else 0.0)
            sizes = (site.name, site.d_in, site.d_out, width[site.name])
            rows.append(SiteEstimate(*sizes, solving[site.name].flops, calibrating, peak, held + waiting))
            held += kept[site.name]
    return tuple(rows)


def residual_bytes(model: Any, chosen: Sequence[Matrix], token_shape: tuple[int, int] | None, calibration: str) -> int:
    """Of what is kept of the residual stream on disk: the old and the new file, while one is made of the other."""
    if model is None or token_shape is None or len(_Plan(model, token_shape).stages(chosen, calibration)) < 2:
        return 0
    made = len({site.layer for site in chosen if isinstance(site, Site)} - {0})
    hosts = 2 if calibration == "corrected" else 1
    return hosts * min(made, 2) * token_shape[0] * token_shape[1] * model.cfg.d_model * _entry_size(model)


@dataclass(frozen=True)
class _Plan:
    """What is the same for all matrices of a call: host (None: not loaded), tokens, bytes per entry of a Gram, and whether
    each matrix has a target of its own (then sites do not share what they read)."""

    model: Any
    token_shape: tuple[int, int] | None
    batch_size: int = 1
    gram_entry: int = _FLOAT
    corrected: bool = False

    @property
    def calibrated(self) -> bool:
        return self.token_shape is not None

    @property
    def n_tokens(self) -> int:
        return 0 if self.token_shape is None else self.token_shape[0] * self.token_shape[1]

    def stages(self, chosen: Sequence[Matrix], calibration: str) -> list[list[Matrix]]:
        """`stages_of`, where a matrix without a place in a model has an input and a block of its own."""
        placed = [s if isinstance(s, Site) else Site(-1 - i, "mlp_out", s.d_in, s.d_out) for i, s in enumerate(chosen)]
        original = dict(zip(placed, chosen, strict=True))
        kind = calibration if self.calibrated else "zero-data"
        return [[original[site] for site in stage] for stage in stages_of(placed, kind)]

    def inputs(self, stage: Sequence[Matrix]) -> dict[str, int]:
        """Site name -> number of the input that it reads. Sites of one input (q, k and v) share its Gram."""
        return {site.name: i for i, same in enumerate(self.stages(stage, "sequential")) for site in same}

    # ------------------------------------------------------------------ bytes

    def kept_bytes(self, site: Matrix, units: int) -> int:
        """Of finished factors: float32 read and write, and W, which those of a float32 host remember.

        Those of another host do not, and attached (for calibration behind them) they are there in its dtype, too.
        """
        entries, size = units * (site.d_in + site.d_out), _entry_size(self.model)
        return _FLOAT * (entries + site.numel) if size == _FLOAT else (_FLOAT + size) * entries

    def solving_bytes(self, site: Matrix, units: int, solving: Cost) -> int:
        """Weight, Gram (and a float64 one's float32 copy), and the solver's own, or `Factors.relmse` after it: read factor
        and Gram in float64, W by tiles."""
        error = _DOUBLE * (site.d_in * units + self.calibrated * site.d_in**2)
        gram = self.gram_entry + _FLOAT * (self.gram_entry != _FLOAT)
        return (
            _FLOAT * site.numel * (1 + self.corrected)
            + self.calibrated * gram * site.d_in**2
            + max(solving.peak_bytes, error)
        )

    def waiting_bytes(self, stage: Sequence[Matrix], place: int) -> int:
        """Of Grams, while the stage's site at this place is solved: those of the sites after it, but for its own."""
        if self.corrected:
            return sum(self.gram_entry * site.d_in**2 + _FLOAT * site.numel for site in stage[place + 1 :])
        inputs = self.inputs(stage)
        later = {inputs[site.name]: site.d_in**2 for site in stage[place + 1 :]}
        later.pop(inputs[stage[place].name], None)
        return self.gram_entry * sum(later.values()) * self.calibrated

    def collecting_bytes(self, stage: Sequence[Matrix]) -> int:
        """Of a pass: float64 sums, one product beside its float64 copy, and a block's activations on one batch."""
        inputs = self.inputs(stage)
        sums = sum({inputs[site.name]: site.d_in**2 for site in stage}.values())
        widest = max(site.d_in for site in stage)
        if self.corrected:
            # Two sums for each site; then, one site at a time, its Gram with the ridge, its factor, and T in float64.
            passing = (_FLOAT + _DOUBLE) * widest**2 + 2 * self._activation_bytes(widest)
            solving = _DOUBLE * (3 * widest**2 + 2 * max(site.numel for site in stage))
            return 2 * _DOUBLE * sum(site.d_in**2 for site in stage) + max(passing, solving)
        return _DOUBLE * sums + (_FLOAT + _DOUBLE) * widest**2 + self._activation_bytes(widest)

    def _activation_bytes(self, widest: int) -> int:
        if self.token_shape is None or self.model is None:
            return 0
        rows, pos = self.token_shape
        size = _entry_size(self.model)
        copied = self.gram_entry * widest if size != self.gram_entry else 0
        return min(rows, self.batch_size) * pos * (size * _activation_entries(self.model, pos) + copied)

    # ------------------------------------------------------------------ operations

    def product_flops(self, stage: Sequence[Matrix], place: int) -> float:
        """h^T h, once for the sites of one input; corrected: all that comes before the solve."""
        inputs, site = self.inputs(stage), stage[place]
        if self.corrected:  # h^T h and h^T g, and the target from them
            return 4.0 * self.n_tokens * site.d_in**2 + site.d_in**3 / 3 + 4.0 * site.d_in * site.numel
        again = inputs[site.name] in [inputs[earlier.name] for earlier in stage[:place]]
        return 0.0 if again else 2.0 * self.n_tokens * site.d_in**2

    def forward_flops(self, stages: Sequence[Sequence[Matrix]]) -> list[float]:
        """Per stage: from the block that is kept up to the stage's own, and those once."""
        if self.token_shape is None or self.model is None:
            return [0.0] * len(stages)
        block = [
            self.n_tokens * (1 + self.corrected) * flops for flops in _block_flops(self.model, self.token_shape[1])
        ]
        flops, kept = [], 0  # what enters this block is kept; at first what enters block 0, the tokens
        for stage in stages:
            layers = [site.layer for site in stage if isinstance(site, Site)]
            flops.append(sum(block[kept : max(layers) + 1]))
            kept = max(kept, min(layers))
        return flops


def _entry_size(model: Any) -> int:
    """Bytes of an entry of the host's weights and activations."""
    return _FLOAT if model is None else next(model.parameters()).element_size()


def _block_flops(model: Any, pos: int) -> list[float]:
    """Per token. Blocks may differ (linear attention beside full attention); attention's own products are counted as if it
    were full."""
    every = 4.0 * pos * model.cfg.n_heads * model.cfg.d_head + _PER_ENTRY * _activation_entries(model, pos)
    flops = [every] * model.cfg.n_layers
    for site in host_of(model).sites():
        flops[site.layer] += 2.0 * site.numel
    return flops


def _activation_entries(model: Any, pos: int) -> int:
    """Per token of a row of `pos`: residuals and their norms, q, k, v, z; pre and post; scores and pattern."""
    cfg = model.cfg
    return 10 * cfg.d_model + 3 * (cfg.d_mlp or 0) + 3 * cfg.n_heads * pos
