"""unit_overlap: do the units of one site add up to the output independently, or do pairs of them carry the same thing?

1. Attach the factors and go through the tokens once. Running float64 sums of z and of z z^T are all that is kept, so memory is
   (unit, unit) whatever the number of tokens. Both are taken of z minus its first value: covariances do not change by it,
   and a unit that never changes gets a variance of exactly zero.
2. Read correlation corr(z_i, z_j), write cosine cos(B_i, B_j), energy Var(z_i) |B_i|^2.
3. Contribution correlation: centre the contributions c_ti = (z_ti - mean z_i) B_i, flatten them over tokens t and coordinates,
   and take the cosine. It is the product of the two,

       sum_t sum_d c_ti[d] c_tj[d]   =  sum_t (z_ti - mean)(z_tj - mean)  x  sum_d B_i[d] B_j[d]
       |c_i| |c_j|                   =  sqrt(sum_t (z_ti - mean)^2 ...)   x  |B_i| |B_j|,

   since c_ti[d] factors into a part of t and a part of d. The paper does not print the formula (method.md §5.6); this one gives
   its signs: opposed reads and opposed writes correlate positively.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.interactions.results import UnitOverlap
from swd_lens.analysis.interactions.watching import (
    factors_at,
    one_site,
    provenance,
    require_batch_size,
    require_tokens,
    watch,
)
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.hosts.sites import Pattern
from swd_lens.tasks.streams import as_stream
from swd_lens.units import attach

# A standard deviation below this share of the RMS is float32 rounding of one value, not variation.
_CONSTANT = 1e-6


def unit_overlap(
    model: Any,
    factors: Any,
    site: Pattern,
    tokens: Any,
    *,
    shown: int = 96,
    batch_size: int = 16,
    progress: bool = True,
) -> UnitOverlap:
    """Read, write and contribution overlap of all pairs of a site's units (paper, app. "Interaction Patterns").

    Units without a read or a write edge, and units whose z is the same on all tokens, have no correlation: they are left out
    of every statistic, are NaN in the matrices, and are listed in `no_edges` and `constant`.

    Args:
        model: the host, with these sites not attached.
        factors: what is attached while the tokens run, see `swd_lens.attach`; the site's are among them.
        site: one site of any kind (the paper's case is mlp_out).
        tokens: (rows, pos) ids or a `TokenStream`; every position counts. Each row is run once; none are held.
        shown: how many units the matrix views show, those of largest energy; all of them where there are fewer.
        batch_size: rows per forward.
        progress: show a bar.

    Raises:
        ValueError: several sites, a site without factors, shown < 2, batch_size < 1, fewer than two units to pair (without edges
            and constant ones are counted), or units that are not finite.
        TokenError: a single token, and see `swd_lens.tasks.streams.as_stream`.
        AttachError, UnknownSiteError, UnsupportedHostError: see `swd_lens.attach`.
    """
    host = host_of(model)
    at = one_site(host, site)
    if isinstance(shown, bool) or not isinstance(shown, int) or shown < 2:
        raise ValueError(f"shown must be a whole number of 2 or more (a matrix of pairs), got {shown!r}")
    require_batch_size(batch_size)
    require_no_dropout(model)
    stream = as_stream(tokens, model)
    require_tokens(stream, 2, "a correlation needs")
    with attach(model, factors) as attachment:
        units = factors_at(attachment, at)
        sums = _Sums(units.n_units)
        label = "overlap" if progress else None
        watch(host, at, stream, sums.add, batch_size=batch_size, label=label)
        settings = provenance(host, attachment, at, stream, {"shown": shown, "batch_size": batch_size})
    covariance, constant = sums.covariance()
    valid = units.valid_units.cpu()
    defined = valid & ~constant
    if int(defined.sum()) < 2:
        raise ValueError(
            f"{at.name}: a pair needs two units that change, but of {units.n_units} units {int((~valid).sum())} have no edges "
            f"and {int((valid & constant).sum())} have the same z on all {stream.n_tokens} tokens; give more varied text"
        )
    variance = covariance.diagonal()
    write = units.write.detach().double().cpu()
    norm = write.norm(dim=1)
    blank = torch.where(defined, 1.0, torch.nan)
    return UnitOverlap(
        site=at.name,
        read_correlation=_cosines(covariance, variance.sqrt() * blank),
        write_cosine=_cosines(write @ write.T, norm * blank),
        variance=variance,
        write_norm=norm,
        no_edges=tuple((~valid).nonzero()[:, 0].tolist()),
        constant=tuple((valid & constant).nonzero()[:, 0].tolist()),
        shown=min(shown, int(defined.sum())),
        settings=settings,
    )


class _Sums:
    """Running sums of z - z_first and its products."""

    def __init__(self, n_units: int):
        self.n = 0
        self.first: Tensor | None = None
        self.sum = torch.zeros(n_units, dtype=torch.float64)
        self.products = torch.zeros(n_units, n_units, dtype=torch.float64)

    def add(self, seen: dict[str, Tensor]) -> None:
        z = seen["z"].double().cpu()
        if self.first is None:
            self.first = z[0].clone()
        z = z - self.first
        self.n += len(z)
        self.sum += z.sum(0)
        self.products.addmm_(z.T, z)

    def covariance(self) -> tuple[Float[Tensor, "unit unit"], Tensor]:
        """Mean over tokens of (z_i - mean)(z_j - mean), and which units are constant."""
        assert self.first is not None
        mean = self.sum / self.n
        covariance = (self.products / self.n).addr_(mean, mean, alpha=-1)
        covariance = (covariance + covariance.T) / 2
        variance = covariance.diagonal()
        square = variance + (mean + self.first).square()  # E[z^2]
        return covariance, variance <= _CONSTANT**2 * square


def _cosines(products: Float[Tensor, "unit unit"], length: Float[Tensor, " unit"]) -> Float[Tensor, "unit unit"]:
    """products / (length_i length_j), in [-1, 1]; NaN where a length is NaN."""
    return (products / length[:, None] / length).clamp(-1, 1)
