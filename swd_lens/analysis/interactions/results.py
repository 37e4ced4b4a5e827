"""What the two studies of interactions found: numbers, tables, and one call per figure."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.interactions import plots
from swd_lens.base.display import card

# R that the paper counts pairs above.
_THRESHOLDS = (0.10, 0.15, 0.20)


@dataclass(frozen=True, repr=False)
class UnitOverlap:
    """How far the contributions z_i B_i of one site's units overlap, pair by pair.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        read_correlation: (unit, unit) corr(z_i, z_j) over tokens; NaN where undefined. float64, as all tensors here.
        write_cosine: (unit, unit) cosine of the write vectors; NaN for the same units.
        variance: (unit,) variance of z over tokens.
        write_norm: (unit,) |B_i|.
        no_edges, constant: units that have no correlation: no read or no write edge; the same z on all tokens.
        shown: how many units the matrix views show.
        settings: model, weight, factors, tokens, version and every choice.
    """

    site: str
    read_correlation: Float[Tensor, "unit unit"]
    write_cosine: Float[Tensor, "unit unit"]
    variance: Float[Tensor, " unit"]
    write_norm: Float[Tensor, " unit"]
    no_edges: tuple[int, ...]
    constant: tuple[int, ...]
    shown: int
    settings: Mapping[str, Any]

    @cached_property
    def contribution_correlation(self) -> Float[Tensor, "unit unit"]:
        """(unit, unit) correlation of the centred contributions, flattened over tokens and coordinates."""
        return self.read_correlation * self.write_cosine

    @property
    def energy(self) -> Float[Tensor, " unit"]:
        """(unit,) Var(z_i) |B_i|^2."""
        return self.variance * self.write_norm.square()

    @property
    def defined(self) -> Bool[Tensor, " unit"]:
        """Units that have correlations."""
        return ~self.read_correlation.diagonal().isnan()

    @property
    def n_pairs(self) -> int:
        n = int(self.defined.sum())
        return n * (n - 1) // 2

    def top_units(self) -> Int[Tensor, " shown"]:
        """The `shown` units of largest energy, largest first."""
        energy = self.energy.where(self.defined, -1.0)
        return energy.argsort(descending=True, stable=True)[: self.shown]

    def measures(self) -> dict[str, Float[Tensor, "unit unit"]]:
        """The three matrices by the names that tables and figures use."""
        return {
            "read correlation": self.read_correlation,
            "write cosine": self.write_cosine,
            "contribution correlation": self.contribution_correlation,
        }

    def values(self, matrix: Float[Tensor, "unit unit"]) -> Float[np.ndarray, " pair"]:
        """Every unordered pair's entry once, undefined ones left out."""
        kept = matrix[self.defined][:, self.defined]
        above = torch.ones_like(kept, dtype=torch.bool).triu(1)
        return kept[above].numpy()

    def table(self) -> pd.DataFrame:
        """Of the absolute value of each measure over all pairs: median, 95th and 99th percentile, largest."""
        rows = []
        for name, matrix in self.measures().items():
            median, p95, p99, largest = np.percentile(np.abs(self.values(matrix)), (50, 95, 99, 100)).tolist()
            rows.append({"|measure|": name, "median": median, "95th": p95, "99th": p99, "max": largest})
        return pd.DataFrame(rows)

    def pairs(self, n: int = 30) -> pd.DataFrame:
        """The n pairs of largest absolute contribution correlation, with the read and write overlap it is made of."""
        order = _strongest(self.contribution_correlation, n)
        columns = {name: [float(matrix[i, j]) for i, j in order] for name, matrix in self.measures().items()}
        names = {"unit": [f"{self.site}/{i}" for i, _ in order], "other unit": [f"{self.site}/{j}" for _, j in order]}
        return pd.DataFrame({**names, **dict(reversed(columns.items()))})

    def plot(self) -> Figure:
        """Read variance against squared write norm, and the three matrices of the `shown` units (paper, fig. "selection and
        overlap structure")."""
        return plots.overlap_structure(self)

    def plot_tail(self, n: int = 30) -> Figure:
        """All pairs' distributions, and the n strongest pairs (paper, fig. "linear bottleneck-unit dependence")."""
        return plots.overlap_tail(self, n)

    def left_out(self) -> str:
        """How many units have no correlation, and why; empty where all have one."""
        parts = [f"{len(self.no_edges)} without edges"] if self.no_edges else []
        parts += [f"{len(self.constant)} constant on these tokens"] if self.constant else []
        return f"left out: {', '.join(parts)}" if parts else ""

    def __repr__(self) -> str:
        return f"UnitOverlap: {_said(self)}\n{self.table().to_string(index=False, float_format='{:.4g}'.format)}"

    def _repr_html_(self) -> str:
        return card(f"Unit overlap: {_said(self)}", self.table(), self.plot(), self.plot_tail())


@dataclass(frozen=True, repr=False)
class UnitInteractions:
    """How far pairs of units fail to add up through an activation, over their marginal effects.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        units: the units that were paired, by energy, largest first; the order of all tensors.
        energy: (top,) E[z^2] |B W_out|^2, the pre-activation downstream energy.
        interaction_rms: (top, top) RMS over tokens of |q_ij| in the residual stream; zero on the diagonal.
        marginal_rms: (top,) RMS over tokens of |m_i|, unit i's own effect in its context.
        settings: model, weight, factors, tokens, activation, version and every choice.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " top"]
    interaction_rms: Float[Tensor, "top top"]
    marginal_rms: Float[Tensor, " top"]
    settings: Mapping[str, Any]

    @cached_property
    def ratio(self) -> Float[Tensor, "top top"]:
        """(top, top) R_ij = interaction RMS / sqrt(marginal RMS of i x that of j).

        NaN on the diagonal, and for units without any effect on these tokens (`silent`).
        """
        scale = self.marginal_rms.sqrt()
        scale = scale.where(scale > 0, torch.nan)
        return (self.interaction_rms / scale[:, None] / scale).fill_diagonal_(torch.nan)

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token (a ReLU that never opens): R is undefined for their pairs."""
        return tuple(u for u, own in zip(self.units, self.marginal_rms.tolist(), strict=True) if own == 0)

    def values(self) -> Float[np.ndarray, " pair"]:
        """R of every unordered pair once, undefined ones left out."""
        values = self.ratio[torch.ones_like(self.ratio, dtype=torch.bool).triu(1)]
        return values[~values.isnan()].numpy()

    @property
    def n_pairs(self) -> int:
        return len(self.values())

    def table(self) -> pd.DataFrame:
        """One row: pairs, mean, median, 95th and 99th percentile and largest R, and how many pairs reach .10, .15, .20."""
        values = self.values()
        shown = np.percentile(values, (50, 95, 99, 100)).tolist() if len(values) else [float("nan")] * 4
        row: dict[str, Any] = {"pairs": len(values), "mean R": float(values.mean()) if len(values) else float("nan")}
        row |= dict(zip(("median", "95th", "99th", "max"), shown, strict=True))
        row |= {f"R >= {least:.2f}": int((values >= least).sum()) for least in _THRESHOLDS}
        return pd.DataFrame([row])

    def pairs(self, n: int = 30) -> pd.DataFrame:
        """The n pairs of largest R, with the RMS of their interaction and of each unit's own effect, in residual-stream units."""
        order = _strongest(self.ratio, n)
        rows = [
            {
                "unit": f"{self.site}/{self.units[i]}",
                "other unit": f"{self.site}/{self.units[j]}",
                "R": float(self.ratio[i, j]),
                "interaction RMS": float(self.interaction_rms[i, j]),
                "marginal RMS": float(self.marginal_rms[i]),
                "other's marginal RMS": float(self.marginal_rms[j]),
            }
            for i, j in order
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The distribution of R over all pairs, and its matrix by energy (paper, fig. "contextual GELU interactions")."""
        return plots.interaction_structure(self)

    def plot_pairs(self, n: int = 30) -> Figure:
        """The n strongest pairs as bars (paper, fig. "strongest contextual GELU-mediated pairs")."""
        return plots.interaction_pairs(self, n)

    def left_out(self) -> str:
        """How many of the paired units have no R, and why; empty where all have one."""
        return f"left out: {len(self.silent)} without any effect on these tokens" if self.silent else ""

    def __repr__(self) -> str:
        return f"UnitInteractions: {_said(self)}\n{self.table().to_string(index=False, float_format='{:.4g}'.format)}"

    def _repr_html_(self) -> str:
        return card(f"Unit interactions: {_said(self)}", self.table(), self.plot(), self.plot_pairs())


def _said(result: UnitOverlap | UnitInteractions) -> str:
    """Site, pairs, tokens, activation, and what was left out."""
    settings, left_out = result.settings, result.left_out()
    parts = [result.site, f"{result.n_pairs:,} pairs", f"{settings['tokens']:,} tokens"]
    parts += [settings["activation"]] if "activation" in settings else []
    return ", ".join(parts) + (f"; {left_out}" if left_out else "")


def _strongest(matrix: Float[Tensor, "unit unit"], n: int) -> list[tuple[int, int]]:
    """Index pairs (i, j), i < j, of the n largest absolute entries, largest first; NaN never."""
    rows, columns = torch.triu_indices(*matrix.shape, offset=1)
    size = matrix[rows, columns].abs().nan_to_num(nan=-1.0)
    best = size.topk(min(n, len(size)))
    picked = best.indices[best.values >= 0]
    return list(zip(rows[picked].tolist(), columns[picked].tolist(), strict=True))
