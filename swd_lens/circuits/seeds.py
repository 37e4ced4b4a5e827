"""Seeds of one method: the mean, the spread and the smallest of what their circuits cost (paper, app. exact-dense-controls).

1. Per threshold, every seed's least cost among its prefixes that reach it.
2. Mean and standard deviation over the seeds that reach it; seeds that never do are left out and counted (method.md §4.1).

The standard deviation is that of a sample (n - 1); of a single seed it is not defined.
"""

from collections.abc import Sequence
from statistics import fmean, stdev

import numpy as np
import pandas as pd

from swd_lens.circuits.curve import CostCurve


def mean_min_cost(curves: Sequence[CostCurve], of: str = "sufficiency", cost: str = "edges") -> pd.DataFrame:
    """The least cost of reaching each value that some seed's prefix reaches, over the seeds.

    Args:
        curves: one per seed, of one task.
        of, cost: as for `CostCurve.min_cost`.

    Returns: columns `of` (ascending), mean, sd, reached (seeds that reach it).
    """
    least = [curve.min_cost(of, cost) for curve in curves]
    values = np.unique(np.concatenate([table[of].to_numpy(dtype=float) for table in least]))
    costs = pd.DataFrame({seed: _at(table, values, of, cost) for seed, table in enumerate(least)})
    spread = {"mean": costs.mean(axis=1), "sd": costs.std(axis=1), "reached": costs.notna().sum(axis=1)}
    return pd.DataFrame({of: values, **spread})


def _at(table: pd.DataFrame, values: np.ndarray, of: str, cost: str) -> np.ndarray:
    """The cost at each value: that of the first row (the cheapest) that reaches it, NaN where none does."""
    costs = np.append(table[cost].to_numpy(dtype=float), np.nan)
    return costs[np.searchsorted(table[of].to_numpy(dtype=float), values, side="left")]


def summary(costs: Sequence[int | None]) -> dict[str, float | int | None]:
    """mean, sd, min over the seeds that reach a threshold (those with a cost), and how many those are."""
    reached = [value for value in costs if value is not None]
    if not reached:
        return {"mean": None, "sd": None, "min": None, "reached": 0}
    spread = stdev(reached) if len(reached) > 1 else None
    return {"mean": fmean(reached), "sd": spread, "min": min(reached), "reached": len(reached)}
