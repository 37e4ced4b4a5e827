"""Seeds of one method (paper, app. exact-dense-controls): least costs over several curves of one task.

Per threshold every seed's least cost is taken; mean and standard deviation (of a sample, n - 1) are over the seeds that reach
it, the others are counted (method.md §4.1).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Protocol, runtime_checkable

import numpy as np
import pandas as pd


@runtime_checkable
class Curve(Protocol):
    """A cost curve as it is drawn and averaged: `swd_lens.circuits.CostCurve`."""

    @property
    def task(self) -> str: ...

    @property
    def rows(self) -> pd.DataFrame: ...

    def min_cost(self, of: str = ..., cost: str = ...) -> pd.DataFrame: ...


def mean_min_cost(curves: Sequence[Curve], of: str = "recovered", cost: str = "edges") -> pd.DataFrame:
    """The least cost of reaching each value that some seed's prefix reaches, over the seeds. curves: one per seed, of one
    task; of, cost: as for `CostCurve.min_cost`. Returns: columns `of` (ascending), mean, sd, reached (seeds that reach it)."""
    least = [curve.min_cost(of, cost) for curve in curves]
    values = np.unique(np.concatenate([table[of].to_numpy(dtype=float) for table in least]))
    costs: dict[int, np.ndarray] = {}
    for seed, table in enumerate(least):
        # The cost of the first row (the cheapest) that reaches a value, NaN where none does.
        places = np.searchsorted(table[of].to_numpy(dtype=float), values, side="left")
        costs[seed] = np.append(table[cost].to_numpy(dtype=float), np.nan)[places]
    of_seeds = pd.DataFrame(costs)
    spread = {"mean": of_seeds.mean(axis=1), "sd": of_seeds.std(axis=1), "reached": of_seeds.notna().sum(axis=1)}
    return pd.DataFrame({of: values, **spread})


@dataclass(frozen=True)
class SeedCosts:
    """Costs of several seeds' circuits at one threshold; None where no seed reaches it (sd: where fewer than two do). reached:
    seeds that reach it."""

    mean: float | None
    sd: float | None
    least: int | None
    reached: int


def over_seeds(costs: Sequence[int | None]) -> SeedCosts:
    """Mean, standard deviation and least cost over the seeds that reach a threshold (those with a cost)."""
    reached = [cost for cost in costs if cost is not None]
    if not reached:
        return SeedCosts(None, None, None, 0)
    return SeedCosts(fmean(reached), stdev(reached) if len(reached) > 1 else None, min(reached), len(reached))
