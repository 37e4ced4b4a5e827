"""The bar of `factorize`: the share of all estimated operations that is done; beside it site, iteration and relMSE so far.

It counts operations, not matrices, so that its remaining time means something when the matrices differ in size.
"""

import time
from collections.abc import Sequence
from typing import Any

from tqdm.auto import tqdm

from swd_lens.factorization.resources import SiteEstimate
from swd_lens.hosts.sites import Site
from swd_lens.solver import Step

# The error so far costs a product of the factors; shown this often it costs nothing that matters.
_SECONDS_BETWEEN_ERRORS = 3.0


class Bar:
    """Args: sites: all of the call, for "3/4"; plan: what is still to be done; show: False says nothing, and measures nothing;
    calibrated: whether calibration goes on between the solves (dense calibration has a bar of its own)."""

    def __init__(
        self, sites: Sequence[Site], plan: Sequence[SiteEstimate], title: str, *, show: bool, calibrated: bool
    ):
        self.place = {site.name: number for number, site in enumerate(sites, 1)}
        self.rows = {row.site: row for row in plan}
        self.show, self.calibrating = show, calibrated
        self.at = 0.0  # operations done; tqdm keeps no count when it is disabled
        self.start = 0.0  # of the present matrix's solve
        self.present: str | None = None  # what is being solved in this process
        self.label, self.error, self.error_time = "", "", 0.0
        total = sum(row.flops + self._calibration(row) for row in plan)
        self.bar: Any = tqdm(total=total, desc=title, unit="FLOP", unit_scale=True, disable=not show, leave=False)

    def __enter__(self) -> "Bar":
        return self

    def __exit__(self, *error: Any) -> None:
        self.bar.close()

    def calibrated(self, sites: Sequence[Site]) -> None:
        """These sites' Grams are there."""
        self._to(self.at + sum(self._calibration(self.rows[site.name]) for site in sites))

    def begin(self, site: str) -> None:
        """A matrix is handed to the solver in this process."""
        self.present, self.label, self.error = site, f"{site} ({self.place[site]}/{len(self.place)})", ""
        self.start, self.error_time = self.at, time.monotonic()
        self._tell("")

    def iterated(self, step: Step) -> None:
        """After each iteration of a solve in this process."""
        if time.monotonic() - self.error_time >= _SECONDS_BETWEEN_ERRORS:
            self.error, self.error_time = f" relMSE {step.relmse():.3g}", time.monotonic()
        self._tell(f" {step.iteration}/{step.total}{self.error}")
        if self.present is not None:
            self._to(self.start + self.rows[self.present].flops * step.iteration / step.total)

    def finished(self, site: str, relmse: float) -> None:
        """A matrix is done: solved here, elsewhere, or taken over."""
        if site != self.present:
            self.label, self.start = f"{site} ({self.place[site]}/{len(self.place)})", self.at
        self.present = None
        self._to(self.start + self.rows[site].flops)
        self._tell(f" relMSE {relmse:.3g}")

    def _calibration(self, row: SiteEstimate) -> float:
        return row.calibration_flops if self.calibrating else 0.0

    def _tell(self, text: str) -> None:
        self.bar.set_postfix_str(self.label + text, refresh=False)

    def _to(self, operations: float) -> None:
        self.bar.update(operations - self.at)
        self.at = operations
