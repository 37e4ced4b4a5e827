"""Statistics: how a unit's z is distributed over a text, and which units move together, in one pass.

1. Mean, standard deviation, smallest and largest z: float64 sums.
2. A histogram whose bins are 2^e wide, from zero to either side, with one e per unit. When a larger |z| comes along, e grows
   and neighbouring bins are added up. So no range has to be known beforehand, and the counts are exactly those that a second
   pass with the final bins would find, whatever the batches were.
3. Co-activation: correlation of z over tokens, of the described units with all units of their site, from float64 sums of
   products.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit.contexts import TopPlaces
from swd_lens.analysis.audit.vectors import strongest_others

SIDE = 64  # bins on either side of zero; a unit's largest |z| lies in the outer half of them
_LEAST = -112  # of e: |z| below 2^-106 counts as zero, and float32 can hold z / 2^e
_TOKENS_AT_ONCE = 2048  # in float64
DENSE = 0.1  # share of the largest |z| above which a unit counts as active


@dataclass(frozen=True, eq=False)
class Histogram:
    """Tokens by z."""

    width: float  # of a bin, a power of two
    counts: Int[Tensor, " bins"]  # (bins,) tokens; bin i holds width * (i - bins / 2) <= z < width * (i + 1 - bins / 2)

    @property
    def edges(self) -> Float[Tensor, " edges"]:
        """(bins + 1,) limits of the bins."""
        side = len(self.counts) // 2
        return self.width * torch.arange(-side, side + 1, dtype=torch.float64)


@dataclass(frozen=True, repr=False, eq=False)
class SiteAudit:
    """The audited units of one site, column by column."""

    units: Int[Tensor, " unit"]  # (unit,) their indices in the site
    places: TopPlaces  # where each fires most
    special_peaks: Float[Tensor, " unit"]  # (unit,) share of these places that lie on special tokens
    mean: Float[Tensor, " unit"]  # mean, sd, smallest, largest, density: (unit,) of z, see `UnitProfile`
    sd: Float[Tensor, " unit"]
    smallest: Float[Tensor, " unit"]
    largest: Float[Tensor, " unit"]
    density: Float[Tensor, " unit"]
    histograms: tuple[Histogram, ...]  # one per unit
    coactive: Int[Tensor, "unit _neighbour"]  # coactive, correlation: (unit, neighbour) indices in the site and correlations of z
    correlation: Float[Tensor, "unit _neighbour"]

    @cached_property
    def column(self) -> dict[int, int]:
        """Index in the site -> column here."""
        return {unit: column for column, unit in enumerate(self.units.tolist())}


class Statistics:
    """Running sums over the tokens of a text.

    Args:
        units: (column,) the units that are described; co-activation compares them with all units of the site.
        coactivation: whether to keep the (column, unit) float64 sums of products.
    """

    def __init__(self, units: Int[Tensor, " column"], coactivation: bool = True):
        self.units, self.coactivation, self.n_tokens = units, coactivation, 0
        self.sums = self.squares = self.products = self.smallest = self.largest = torch.empty(0, dtype=torch.float32)
        self.exponent = self.bins_per_z = self.counts = torch.empty(0, dtype=torch.float32)

    def add(self, z: Float[Tensor, "tokens unit"]) -> None:
        """z of some tokens, of all units of the site."""
        if not self.n_tokens:
            device = "cpu" if z.device.type == "mps" else z.device  # which has no float64
            n_units, columns = z.shape[1], len(self.units)
            self.sums = torch.zeros(n_units, dtype=torch.float64, device=device)
            self.squares = self.sums.clone()
            if self.coactivation:
                self.products = torch.zeros(columns, n_units, dtype=torch.float64, device=device)
            self.smallest = torch.full((columns,), float("inf"), device=device, dtype=torch.float32)
            self.largest = -self.smallest
            self._set(torch.full((columns,), _LEAST, dtype=torch.int64, device=device))
            self.counts = torch.zeros(columns, 2 * SIDE, dtype=torch.int64, device=device)
        units = self.units.to(self.sums.device)
        for part in z.split(_TOKENS_AT_ONCE):
            double = part.to(self.sums.device).double()
            own = double if len(units) == z.shape[1] else double[:, units]
            self.sums += double.sum(0)
            self.squares += double.square().sum(0)
            if self.coactivation:
                self.products += own.T @ double
            self._count(own.float())
        self.n_tokens += len(z)

    @property
    def mean(self) -> Float[Tensor, " column"]:
        return (self.sums / self.n_tokens).cpu()[self.units]

    @property
    def sd(self) -> Float[Tensor, " column"]:
        return self._variance().sqrt().cpu()[self.units]

    @property
    def density(self) -> Float[Tensor, " column"]:
        """Share of tokens in bins beyond a tenth of the largest |z|: exact to a bin, which is at most a 32nd of it."""
        peak = torch.maximum(self.largest, -self.smallest).double()
        least = DENSE * peak * self.bins_per_z.double()
        inner = torch.arange(-SIDE, SIDE, device=peak.device)
        inner = torch.where(inner >= 0, inner, -inner - 1)  # the bin's end that is nearer to zero
        active = (inner[None, :] >= least[:, None].ceil()) & (peak[:, None] > 0)
        return ((self.counts * active).sum(1) / self.n_tokens).double().cpu()

    def histogram(self, column: int) -> Histogram:
        """The histogram of the unit in a column."""
        return Histogram(2.0 ** int(self.exponent[column]), self.counts[column].cpu())

    def coactive(self, k: int) -> tuple[Int[Tensor, "column _k"], Float[Tensor, "column _k"]]:
        """Per column the k other units of largest |correlation|, and the correlations; constant units have 0."""
        if not self.coactivation:
            none = torch.empty(len(self.units), 0, dtype=torch.float32)
            return none.long(), none
        mean, sd = self.sums / self.n_tokens, self._variance().sqrt()
        units = self.units.to(mean.device)
        covariance = self.products / self.n_tokens - mean[units, None] * mean
        scale = sd[units, None] * sd
        correlation = torch.where(scale > 0, covariance / scale, 0.0).clamp(-1.0, 1.0)
        others = strongest_others(correlation.float(), units, k)
        return others.cpu(), correlation.gather(1, others).float().cpu()

    def _variance(self) -> Float[Tensor, " unit"]:
        mean, square = self.sums / self.n_tokens, self.squares / self.n_tokens
        variance = square - mean.square()
        # A unit that is constant: what is left of the difference is rounding.
        return torch.where(variance > 1e-14 * square, variance, 0.0)

    def _count(self, z: Float[Tensor, "tokens column"]) -> None:
        self.smallest = torch.minimum(self.smallest, z.amin(0))
        self.largest = torch.maximum(self.largest, z.amax(0))
        # |z| < 2^e' by frexp, so e = e' - log2(SIDE) puts it inside the bins. Zeros ask for nothing (frexp says e' = 0).
        peak = z.abs().amax(0)
        needed = torch.frexp(peak).exponent.long() - (SIDE.bit_length() - 1)
        needed = torch.maximum(torch.where(peak > 0, needed, _LEAST).clamp_min(_LEAST), self.exponent)
        grown = (needed > self.exponent).nonzero()[:, 0]
        if len(grown):  # a wider bin holds the sum of those that lay in it
            steps = (needed - self.exponent)[grown, None].clamp_max(SIDE.bit_length())
            places = (torch.arange(-SIDE, SIDE, device=z.device)[None, :] >> steps) + SIDE
            self.counts[grown] = torch.zeros_like(self.counts[grown]).scatter_add_(1, places, self.counts[grown])
            self._set(needed)
        bins = (z * self.bins_per_z).floor_().long() + SIDE
        offsets = torch.arange(z.shape[1], device=z.device) * (2 * SIDE)
        counts = torch.bincount((bins + offsets).flatten(), minlength=self.counts.numel())
        self.counts += counts.view_as(self.counts)

    def _set(self, exponent: Int[Tensor, " column"]) -> None:
        self.exponent = exponent
        # By Python, whose powers of two are exact on every machine.
        self.bins_per_z = torch.tensor([2.0**-e for e in exponent.tolist()], device=exponent.device, dtype=torch.float32)
