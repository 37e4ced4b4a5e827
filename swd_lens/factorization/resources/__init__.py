"""What a factorization will need, before it starts: memory and time, from shapes.

1. shapes.py: what is to be factorized, sites of a host or matrices known by their shapes only, and the checked arguments.
2. counting.py: `forecast` makes one row per matrix: the solver's operations and working memory (`swd_lens.solver.cost`),
   the operations of its calibration, and what is held meanwhile (Grams, finished factors).
3. table.py: `Estimate`, the rows with their totals and as a printed table; `require_fit` refuses, with the numbers, what
   cannot fit.
4. `estimate` puts the rows beside what the machine has and does (machine.py): free memory, speed of float32 products.

Bytes are those beyond what is in use before the call (the host among it). They are upper bounds by design where exact
counts would need a run: activations of a calibration batch, and a kept copy of every weight.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from swd_lens.base.machine import available_bytes, product_speed
from swd_lens.factorization.resources.counting import forecast, residual_bytes
from swd_lens.factorization.resources.shapes import (
    check_calibration,
    check_passes,
    gram_dtype_for,
    matrices_of,
    naming,
    refuse_whole_mlps,
    shape_of,
    sparsity_of_each,
    token_shape,
)
from swd_lens.factorization.resources.table import DoesNotFitError, Estimate, SiteEstimate
from swd_lens.hosts import find_sites
from swd_lens.hosts.sites import Pattern
from swd_lens.solver import DEFAULT_PRESET

__all__ = [
    "DoesNotFitError",
    "Estimate",
    "SiteEstimate",
    "check_calibration",
    "check_passes",
    "estimate",
    "forecast",
    "gram_dtype_for",
    "naming",
    "refuse_whole_mlps",
    "shape_of",
    "sparsity_of_each",
]


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
        calibration, preset, units, batch_size, gram_dtype, options: as for `factorize`.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ValueError: bad shapes, sparsity or solver options; the site is named.
    """
    check_calibration(calibration)
    check_passes(batch_size, gram_dtype)
    shapes_only = isinstance(model, Mapping | Sequence)
    host = None if shapes_only else model
    chosen = matrices_of(model, sites) if shapes_only else find_sites(model, sites)
    refuse_whole_mlps(chosen)
    shape = token_shape(tokens, host)
    rows = forecast(
        host,
        chosen,
        shape,
        sparsities=sparsity_of_each(chosen, sparsity),
        calibration=calibration,
        preset=preset,
        units=units,
        batch_size=batch_size,
        options=options,
        gram_dtype=gram_dtype_for(gram_dtype, chosen, preset, options),
    )
    device = torch.empty(0).device if shapes_only else next(model.parameters()).device
    kind = "zero-data" if shape is None else calibration
    disk = residual_bytes(host, chosen, shape, calibration)
    return Estimate(rows, available_bytes(device), product_speed(device), kind, not shapes_only, disk)
