"""Allocation: how many edges each matrix gets, and why; what `allocate` gives and `factorize(..., sparsity=...)` takes.

1. A `LossCurve` holds one matrix's loss at a few budgets. Between them the logarithm of the loss is linear in K; outside them
   nothing is known, so a matrix never gets less than its first budget nor more than its last. The curve is read on a lattice of
   budgets, and made convex there (the greatest convex function below it), so that every further edge saves at most what the one
   before it saved.
2. `spend` shares out a total so that the summed loss is least. Every matrix starts at its first budget; the steps of all
   matrices are taken in the order of what they save per edge, until the total is spent. Steps that save the same are taken
   together, each to the same fraction: equal curves get equal budgets. `round_to` makes whole numbers of them with exactly the
   total (largest remainders). `fewest_edges` is the smallest total whose summed loss keeps a goal.
3. An `Allocation` is a mapping site name -> s, with the budgets and the loss curves behind them. It prints as a table, and is
   saved as JSON.
"""

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd

from swd_lens.base.record import Record, SavedRecord
from swd_lens.hosts.sites import split_name

# Steps per curve. With budgets from half to twice the uniform one a step is 2.3% of it.
_STEPS = 64

# Losses below this share of a curve's largest are rounding (a KL may come out as -1e-9).
_FLOOR = 1e-7


@dataclass(frozen=True)
class LossCurve(Record):
    """Loss of one matrix at some budgets. Raises ValueError: no budgets, budgets that do not rise from 0 on (or pass 64 bits),
    another number of losses, or losses that are not finite or have no positive one among them."""

    edges: tuple[int, ...]  # budgets K, rising
    losses: tuple[float, ...]  # the loss at each, in any unit that can be added over matrices (nats of KL)

    def __post_init__(self) -> None:
        rising = all(a < b for a, b in itertools.pairwise(self.edges))
        if not self.edges or not rising or self.edges[0] < 0 or self.edges[-1] >= 2**63:
            raise ValueError(f"the budgets of a loss curve must rise, from 0 or more, got {self.edges}")
        if len(self.losses) != len(self.edges):
            raise ValueError(f"a loss curve needs one loss per budget: {len(self.edges)} budgets, {len(self.losses)} losses")
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


@dataclass(frozen=True)
class SiteBudget(Record):
    """Budget of one matrix. Raises ValueError: its sparsity is not inside (0, 1)."""

    derived = ("s",)

    numel: int  # entries of the matrix
    uniform: int  # K at the uniform s
    allocated: int  # K given
    curve: LossCurve  # its loss at the budgets tried; nats per token for "kl", relMSE for "error"

    def __post_init__(self) -> None:
        if self.numel < 1 or not 0 < self.s < 1:
            raise ValueError(
                f"a matrix of {self.numel} entries cannot have a budget of {self.allocated} edges: it must leave a "
                "sparsity inside (0, 1)"
            )

    @property
    def s(self) -> float:
        return 1.0 - self.allocated / self.numel


@dataclass(frozen=True, repr=False, eq=False)
class Allocation(SavedRecord, Mapping[str, float]):
    """Sparsity per site: a mapping site name -> s in execution order, with the reasons.

    Attributes:
        sparsity: the uniform s whose total is spent.
        by: what was measured, "kl" or "error".
        settings: everything else that was used; plain JSON values.
        sites: site name -> its budget.
    """

    derived = ("edges", "predicted")
    WHAT = "an allocation"

    sparsity: float
    by: str
    settings: Mapping[str, Any]
    sites: Mapping[str, SiteBudget]

    def __post_init__(self) -> None:
        for site in self.sites:
            split_name(site)

    def __getitem__(self, site: str) -> float:
        return self.sites[site].s

    def __iter__(self) -> Iterator[str]:
        return iter(self.sites)

    def __len__(self) -> int:
        return len(self.sites)

    @property
    def uniform(self) -> dict[str, int]:
        """Site -> K at the uniform s."""
        return {name: site.uniform for name, site in self.sites.items()}

    @property
    def allocated(self) -> dict[str, int]:
        """Site -> K given."""
        return {name: site.allocated for name, site in self.sites.items()}

    @property
    def curves(self) -> dict[str, LossCurve]:
        """Site -> its loss at the budgets tried."""
        return {name: site.curve for name, site in self.sites.items()}

    @property
    def edges(self) -> int:
        """Total K: that of the uniform sparsity, exactly; of a goal to rounding."""
        return sum(self.allocated.values())

    @property
    def predicted(self) -> dict[str, float]:
        """Summed loss of single replacements, "uniform" and "allocated". Not the loss of replacing all of them together."""
        sites = self.sites.values()
        return {
            "uniform": sum(site.curve.at(site.uniform) for site in sites),
            "allocated": sum(site.curve.at(site.allocated) for site in sites),
        }

    def table(self) -> pd.DataFrame:
        """One row per site: entries, K uniform and allocated, s, its measured loss at both, its share of the summed loss."""
        sums, loss = self.predicted, self._loss
        rows = []
        for name, site in self.sites.items():
            uniform, allocated = site.curve.at(site.uniform), site.curve.at(site.allocated)
            row = {"site": name, "numel": site.numel, "K uniform": site.uniform, "K allocated": site.allocated, "s": site.s}
            row |= {f"{loss} uniform": uniform, f"{loss} allocated": allocated}
            rows.append(row | {"share uniform": uniform / sums["uniform"], "share allocated": allocated / sums["allocated"]})
        return pd.DataFrame(rows)

    @property
    def _loss(self) -> str:
        return "KL" if self.by == "kl" else "relMSE"

    def title(self) -> str:
        loss, predicted = self._loss, self.predicted
        return (
            f"Allocation by {loss}: {self.edges:,} edges over {len(self)} matrices, the total of s = {self.sparsity:g} for each. "
            f"Summed {loss} of single replacements: {predicted['uniform']:.4g} uniform, {predicted['allocated']:.4g} allocated."
        )

    def parts(self) -> tuple[pd.DataFrame]:
        formats = {"site": "{}", "numel": "{:,}", "K uniform": "{:,}", "K allocated": "{:,}", "s": "{:.3f}"}
        formats |= {f"{self._loss} uniform": "{:.3g}", f"{self._loss} allocated": "{:.3g}"}
        formats |= {"share uniform": "{:.1%}", "share allocated": "{:.1%}"}
        table = self.table()
        return (pd.DataFrame({name: table[name].map(form.format) for name, form in formats.items()}),)

    def __repr__(self) -> str:
        return f"{self.title()}\n{self.parts()[0].to_string(index=False)}"


# ---------------------------------------------------------------------------------------------- spending


def lower_hull(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """The greatest convex function below the points, at the same x (rising)."""
    kept: list[int] = []
    for i in range(len(x)):
        # The last kept point goes while it lies on or above the line from the one before it to the new one.
        while len(kept) > 1:
            left, middle = kept[-2:]
            if (y[middle] - y[left]) * (x[i] - x[left]) < (y[i] - y[left]) * (x[middle] - x[left]):
                break
            kept.pop()
        kept.append(i)
    return np.interp(x, x[kept], y[kept])


def spend(curves: Mapping[str, LossCurve], total: int) -> dict[str, int]:
    """Budgets of all matrices: sum exactly `total`, summed loss least. Raises ValueError: the curves' first budgets add up to
    more than the total, or their last ones to less."""
    least, most = (sum(curve.edges[end] for curve in curves.values()) for end in (0, -1))
    if not least <= total <= most:
        raise ValueError(
            f"{total:,} edges cannot be spent: the loss curves reach from {least:,} to {most:,} edges together; give a "
            "total between these, or curves that reach further (grid=)"
        )
    steps = {name: curve.steps for name, curve in curves.items()}
    # Price: what the last edge that can still be paid saves.
    widths = np.concatenate([w for w, _ in steps.values()] or [np.zeros(0)])
    saved = np.concatenate([s for _, s in steps.values()] or [np.zeros(0)])
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


def fewest_edges(curves: Mapping[str, LossCurve], loss: float) -> int:
    """The smallest total of which `spend` makes a summed loss of at most this. Raises ValueError: not even the curves' last
    budgets have so little of it, or already their first ones."""

    def summed(total: int) -> float:
        return sum(curves[name].at(k) for name, k in spend(curves, total).items())

    least, most = (sum(curve.edges[end] for curve in curves.values()) for end in (0, -1))
    if not summed(most) <= loss <= summed(least):
        raise ValueError(
            f"kl={loss:g} lies beyond the budgets that were tried: their ends have a summed KL of {summed(most):.3g} "
            f"(most edges) and {summed(least):.3g} (fewest); give another sparsity=, around which the grid lies, or a "
            "longer grid="
        )
    while most - least > 1:
        middle = (least + most) // 2
        least, most = (least, middle) if summed(middle) <= loss else (middle, most)
    return most


def round_to(wanted: Mapping[str, float], total: int) -> dict[str, int]:
    """Whole numbers that add up to `total`, each less than 1 from what is wanted (which adds up to it but for rounding)."""
    whole = {name: math.floor(value + 1e-6) for name, value in wanted.items()}
    missing = total - sum(whole.values())
    by_remainder = sorted(wanted, key=lambda name: whole[name] - wanted[name])  # stable: ties go to the first
    for name in by_remainder[:missing]:
        whole[name] += 1
    return whole
