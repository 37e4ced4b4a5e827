"""SiteAudit: the numbers of one site's audited units, as tensors; strings are made only for the units that are looked at."""

from dataclasses import dataclass
from functools import cached_property

from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit.contexts import TopPlaces
from swd_lens.analysis.audit.statistics import Histogram


@dataclass(frozen=True, repr=False, eq=False)
class SiteAudit:
    """The audited units of one site, column by column.

    Attributes:
        units: (unit,) their indices in the site.
        places: where each fires most.
        mean, sd, smallest, largest, density: (unit,) of z, see `UnitProfile`.
        histograms: one per unit.
        coactive, correlation: (unit, neighbour) indices in the site and correlations of z.
    """

    units: Int[Tensor, " unit"]
    places: TopPlaces
    mean: Float[Tensor, " unit"]
    sd: Float[Tensor, " unit"]
    smallest: Float[Tensor, " unit"]
    largest: Float[Tensor, " unit"]
    density: Float[Tensor, " unit"]
    histograms: tuple[Histogram, ...]
    coactive: Int[Tensor, "unit _neighbour"]
    correlation: Float[Tensor, "unit _neighbour"]

    @cached_property
    def column(self) -> dict[int, int]:
        """Index in the site -> column here."""
        return {unit: column for column, unit in enumerate(self.units.tolist())}
