"""spend: a total number of edges over matrices whose losses are known at a few budgets, so that the summed loss is least.

1. A `LossCurve` holds one matrix's loss at a few budgets. Between them the logarithm of the loss is linear in K; outside them
   nothing is known, so a matrix never gets less than its first budget nor more than its last.
2. The curve is read on a lattice of budgets, and made convex there (the greatest convex function below it), so that every
   further edge saves at most what the one before it saved.
3. `spend` starts every matrix at its first budget and takes the steps of all matrices in the order of what they save per
   edge, until the total is spent. For convex curves that is the least summed loss. Steps that save the same are taken
   together, each to the same fraction: equal curves get equal budgets.
4. `round_to` makes whole numbers of them with exactly the total (largest remainders).
"""

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

# Steps per curve. With budgets from half to twice the uniform one a step is 2.3% of it.
_STEPS = 64

# Losses below this share of a curve's largest are rounding (a KL may come out as -1e-9).
_FLOOR = 1e-7


@dataclass(frozen=True)
class LossCurve:
    """Loss of one matrix at some budgets.

    Attributes:
        edges: budgets K, rising.
        losses: the loss at each, in any unit that can be added over matrices (nats of KL).

    Raises:
        ValueError: no budgets, budgets that do not rise, another number of losses, or losses that are not finite or have no
            positive one among them.
    """

    edges: tuple[int, ...]
    losses: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.edges or any(b <= a for a, b in itertools.pairwise(self.edges)):
            raise ValueError(f"the budgets of a loss curve must rise, got {self.edges}")
        if len(self.losses) != len(self.edges):
            raise ValueError(
                f"a loss curve needs one loss per budget: {len(self.edges)} budgets, {len(self.losses)} losses"
            )
        if not all(map(math.isfinite, self.losses)) or max(self.losses) <= 0:
            raise ValueError(f"a loss curve needs finite losses, a positive one among them, got {self.losses}")

    @cached_property
    def _lattice(self) -> tuple[np.ndarray, np.ndarray]:
        """Budgets and convex losses there."""
        losses = np.minimum.accumulate(np.maximum(self.losses, _FLOOR * max(self.losses)))  # more edges never hurt
        at = np.unique(np.concatenate([np.linspace(self.edges[0], self.edges[-1], _STEPS + 1), self.edges]))
        return at, lower_hull(at, np.exp(np.interp(at, self.edges, np.log(losses))))

    @property
    def steps(self) -> tuple[np.ndarray, np.ndarray]:
        """Edges of each step, and the loss that each of these edges saves; the savings fall from step to step."""
        at, losses = self._lattice
        widths = np.diff(at)
        # Along one side of the hull they are equal but for rounding, which must not put a later step first.
        return widths, np.minimum.accumulate(np.maximum(-np.diff(losses) / widths, 0.0))

    def at(self, edges: float | int) -> float:
        """The (convex) loss at a budget, the nearest known one's outside the curve."""
        return float(np.interp(edges, *self._lattice))


def lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The greatest convex function below the points, at the same x (rising)."""
    kept: list[int] = []
    for i in range(len(x)):
        # The last kept point goes while it lies on or above the line from the one before it to the new one.
        while len(kept) > 1 and _above(x, y, kept[-2], kept[-1], i):
            kept.pop()
        kept.append(i)
    return np.interp(x, x[kept], y[kept])


def _above(x: np.ndarray, y: np.ndarray, left: int, middle: int, right: int) -> bool:
    return bool((y[middle] - y[left]) * (x[right] - x[left]) >= (y[right] - y[left]) * (x[middle] - x[left]))


def spend(curves: Mapping[str, LossCurve], total: int) -> dict[str, int]:
    """Budgets of all matrices: sum exactly `total`, summed loss least.

    Raises:
        ValueError: the curves' first budgets add up to more than the total, or their last ones to less.
    """
    least, most = (sum(curve.edges[end] for curve in curves.values()) for end in (0, -1))
    if not least <= total <= most:
        raise ValueError(
            f"{total:,} edges cannot be spent: the loss curves reach from {least:,} to {most:,} edges together; give a total "
            "between these, or curves that reach further (grid=)"
        )
    steps = {name: curve.steps for name, curve in curves.items()}
    # Price: what the last edge that can still be paid saves.
    widths = np.concatenate([its[0] for its in steps.values()] or [np.zeros(0)])
    saved = np.concatenate([its[1] for its in steps.values()] or [np.zeros(0)])
    order = np.argsort(-saved, kind="stable")
    paid = np.cumsum(widths[order])
    last = min(int(np.searchsorted(paid, total - least)), len(order) - 1)
    price = saved[order[last]] if len(order) else 0.0
    left = total - least - widths[saved > price].sum()
    fraction = left / max(widths[saved == price].sum(), 1.0)
    wanted = {
        name: curve.edges[0] + float(w[s > price].sum() + fraction * w[s == price].sum())
        for (name, curve), (w, s) in zip(curves.items(), steps.values(), strict=True)
    }
    return round_to(wanted, total)


def round_to(wanted: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers that add up to `total`, each less than 1 from what is wanted (which adds up to it but for rounding)."""
    whole = {name: math.floor(value + 1e-6) for name, value in wanted.items()}
    missing = total - sum(whole.values())
    by_remainder = sorted(wanted, key=lambda name: whole[name] - wanted[name])  # stable: ties go to the first
    for name in by_remainder[:missing]:
        whole[name] += 1
    return whole
