"""SolveOptions: how matrices are factorized, the arguments that `factorize`, `allocate` and `estimate` share."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import legible, quoted
from swd_lens.base.settings import AUTO
from swd_lens.solver import DEFAULT_PRESET

CALIBRATIONS = ("sequential", "corrected", "per_block", "dense")


@dataclass(frozen=True)
class SolveOptions:
    """How matrices are factorized; see `swd_lens.factorize` for each.

    Raises:
        ValueError: a value that no factorization can be made with, or a device that is not there.
    """

    preset: str = DEFAULT_PRESET  # preset, units, basis: the solver's, for all matrices; a basis of None is the default
    units: int | float | str | None = None
    basis: Any = None
    calibration: str = "sequential"  # calibration, batch_size, gram_dtype, weigh_outputs: what each matrix is fitted to
    batch_size: int = 16
    gram_dtype: str = AUTO
    weigh_outputs: bool = False
    device: str | torch.device | None = None  # device, workers, threads: where matrices are solved
    workers: int | str = 1
    threads: int | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)  # further settings of the preset

    def __post_init__(self) -> None:
        one_of("calibration", self.calibration, CALIBRATIONS)
        bounded("batch_size", self.batch_size, 1)
        one_of("gram_dtype", self.gram_dtype, (AUTO, "float32", "float64"))
        if self.device is not None:  # before anything is calibrated, not after
            try:
                torch.empty(1, device=self.device)
            except (RuntimeError, AssertionError, NotImplementedError) as cause:
                why = (str(cause).splitlines() or [type(cause).__name__])[0]
                raise ValueError(
                    f"device={quoted(str(self.device))} cannot be used here: {legible(why)}. None solves where the host is"
                ) from cause

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of `factorize` that say the same."""
        named = {each.name: getattr(self, each.name) for each in fields(self) if each.name != "settings"}
        return {**named, **self.settings}

    @property
    def solver(self) -> dict[str, Any]:
        """The further settings, and the basis where one is given: what was asked of the solver beside preset and units."""
        return {**self.settings} if self.basis is None else {**self.settings, "basis": self.basis}
