"""UnitInteractions, the result of `unit_interactions`: R of every pair, tables and figures."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.interactions.site import SMALL, PairResult, bars, strongest
from swd_lens.base.figures import INK, PALETTE, heatmap, new_figure, style
from swd_lens.base.record import PlainRecord

# R that the paper counts pairs above.
_THRESHOLDS = (0.10, 0.15, 0.20)


@dataclass(frozen=True)
class UpUnits(PlainRecord):
    """Units of a gated MLP's up branch that were paired with units of the gate.

    Attributes:
        site: the layer's mlp_in.
        units: by energy, largest first.
        energy: (up,) E[z^2] |B W_out|^2.
        marginal_rms: (up,) RMS over tokens of |f(gate) d_j W_out|, the unit's own effect in its context.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " up"]
    marginal_rms: Float[Tensor, " up"]

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token."""
        return _silent(self.units, self.marginal_rms)


@dataclass(frozen=True, repr=False)
class UnitInteractions(PairResult):
    """How far pairs of units fail to add up through an activation, over their marginal effects.

    Printed and in notebooks it shows itself: table and figures.

    Attributes:
        site: whose units.
        units: the units that were paired, by energy, largest first; the order of all tensors.
        energy: (top,) E[z^2] |B W_out|^2, the pre-activation downstream energy.
        interaction_rms: (top, other) RMS over tokens of |q_ij| in the residual stream. The others are the same units (zero on the
            diagonal), or those of `up`.
        marginal_rms: (top,) RMS over tokens of |m_i|, unit i's own effect in its context.
        settings: model, weight, factors, tokens, activation, version and every choice.
        up: gate x up: the units of the up branch that those of the gate were paired with. None: pairs within the site.
    """

    site: str
    units: tuple[int, ...]
    energy: Float[Tensor, " top"]
    interaction_rms: Float[Tensor, "top other"]
    marginal_rms: Float[Tensor, " top"]
    settings: Mapping[str, Any]
    up: UpUnits | None = None

    @cached_property
    def ratio(self) -> Float[Tensor, "top other"]:
        """(top, other) R_ij = interaction RMS / sqrt(marginal RMS of i x that of j).

        NaN for a unit with itself, and for units without any effect on these tokens (`silent`).
        """
        scale, others = (
            marginal.sqrt().where(marginal > 0, torch.nan) for marginal in (self.marginal_rms, self._others.marginal_rms)
        )
        ratio = self.interaction_rms / scale[:, None] / others
        return ratio.fill_diagonal_(torch.nan) if self.up is None else ratio

    @property
    def whose(self) -> str:
        return self.site if self.up is None else f"{self.site} x {self.up.site}"

    @property
    def _others(self) -> "UnitInteractions | UpUnits":
        """Whose units the columns are."""
        return self if self.up is None else self.up

    @property
    def silent(self) -> tuple[int, ...]:
        """Units whose effect is zero on every token (a ReLU that never opens): R is undefined for their pairs."""
        return _silent(self.units, self.marginal_rms)

    def values(self) -> Float[np.ndarray, " pair"]:
        """R of every pair once, undefined ones left out; within a site pairs are unordered."""
        each = torch.ones_like(self.ratio, dtype=torch.bool)
        values = self.ratio[each.triu(1) if self.up is None else each]
        return values[~values.isnan()].numpy()

    @property
    def n_pairs(self) -> int:
        return len(self.values())

    def table(self) -> pd.DataFrame:
        """One row: pairs, mean, median, 95th and 99th percentile and largest R, and how many pairs reach .10, .15, .20."""
        values = self.values()
        percentiles = np.percentile(values, (50, 95, 99, 100)).tolist() if len(values) else [float("nan")] * 4
        row: dict[str, Any] = {"pairs": len(values), "mean R": float(values.mean()) if len(values) else float("nan")}
        row |= dict(zip(("median", "95th", "99th", "max"), percentiles, strict=True))
        row |= {f"R >= {least:.2f}": int((values >= least).sum()) for least in _THRESHOLDS}
        return pd.DataFrame([row])

    def pairs(self, n: int = 30) -> pd.DataFrame:
        """The n pairs of largest R, with the RMS of their interaction and of each unit's own effect, in residual-stream units."""
        order, others = strongest(self.ratio, n, within=self.up is None), self._others
        rows = [
            {
                "unit": f"{self.site}/{self.units[i]}",
                "other unit": f"{others.site}/{others.units[j]}",
                "R": float(self.ratio[i, j]),
                "interaction RMS": float(self.interaction_rms[i, j]),
                "marginal RMS": float(self.marginal_rms[i]),
                "other's marginal RMS": float(others.marginal_rms[j]),
            }
            for i, j in order
        ]
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The distribution of R over all pairs, and its matrix by energy (paper, fig. "contextual GELU interactions")."""
        figure, axes = new_figure(1, 2, width=4.8, height=3.9)
        ax, values = axes[0, 0], self.values()
        ax.hist(values, bins=min(60, max(10, len(values) // 20)), color=PALETTE[0], linewidth=0)
        if len(values):
            marks = {"median": 50, "95th": 95, "99th": 99}
            for index, (name, value) in enumerate(zip(marks, np.percentile(values, list(marks.values())), strict=True)):
                line = style(index + 1)
                ax.axvline(value, linewidth=1.4, label=f"{name}  {value:.3f}", **line)
            ax.legend(fontsize=SMALL, frameon=False, loc="upper right", title="percentile", title_fontsize=SMALL)
        ax.set_xlim(left=0)
        ax.set(xlabel="interaction ratio R", ylabel=f"pairs (of {len(values):,})")
        ax.set_title("All pairs", fontsize=10, color=INK)
        heatmap(axes[0, 1], self.ratio.numpy(), label="interaction ratio R")
        axes[0, 1].set_title("Pairs by pre-activation energy", fontsize=10, color=INK)
        up, gate = ("", "") if self.up is None else ("up ", "gate ")
        axes[0, 1].set(xlabel=f"{up}unit, by energy rank", ylabel=f"{gate}unit, by energy rank")
        figure.suptitle(f"Interactions of {self.whose} units through {self.settings['activation']}", fontsize=11, color=INK)
        return figure

    def plot_pairs(self, n: int = 30) -> Figure:
        """The n strongest pairs as bars (paper, fig. "strongest contextual GELU-mediated pairs")."""
        figure, axes = new_figure(1, 1, width=5.6, height=max(2.4, 0.17 * n + 1.0))
        pairs = self.pairs(n)
        bars(axes[0, 0], pairs, "R", f"Strongest {len(pairs)} pairs of {self.whose} units", signed=False)
        axes[0, 0].set_xlabel("interaction ratio R")
        return figure

    def left_out(self) -> str:
        """How many of the paired units have no R, and why; empty where all have one."""
        n_silent = len(self.silent) + (len(self.up.silent) if self.up else 0)
        return f"left out: {n_silent} without any effect on these tokens" if n_silent else ""

    def title(self) -> str:
        return f"Unit interactions: {self.in_words()}"

    def parts(self) -> tuple[Any, ...]:
        return self.table(), self.plot(), self.plot_pairs()


def _silent(units: tuple[int, ...], marginal_rms: Float[Tensor, " unit"]) -> tuple[int, ...]:
    return tuple(unit for unit, own in zip(units, marginal_rms.tolist(), strict=True) if own == 0)
