"""The paper's four figures on interactions, in the house style (figures.py)."""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from swd_lens.base.figures import INK, PALETTE, heatmap, new_figure, style

if TYPE_CHECKING:
    from swd_lens.analysis.interactions.results import UnitInteractions, UnitOverlap

_SMALL = 8  # points


def overlap_structure(found: "UnitOverlap") -> Figure:
    """Variance against squared write norm on log axes, and three matrices of the shown units by energy."""
    figure, axes = new_figure(2, 2, width=4.6, height=3.9)
    top = found.top_units()
    _selection(axes[0, 0], found, top.numpy())
    shown = {name: matrix[top][:, top].clone().fill_diagonal_(torch.nan) for name, matrix in found.measures().items()}
    # One scale for the three, so that they can be compared; the few entries above it are drawn in its full colour.
    largest = _rounded(np.nanpercentile(np.abs(np.stack([m.numpy() for m in shown.values()])[:2]), 99))
    for ax, (name, matrix) in zip(axes.flat[1:], shown.items(), strict=True):
        heatmap(ax, matrix.numpy(), label=f"{name} (full colour: {largest:g} or more)", signed=True, largest=largest)
        ax.set_title(name[0].upper() + name[1:], fontsize=10, color=INK)
        ax.set_xlabel("unit, by energy rank", fontsize=_SMALL)
        ax.set_ylabel("unit, by energy rank", fontsize=_SMALL)
    figure.suptitle(f"Overlap of {found.site} units", fontsize=11, color=INK)
    return figure


def _selection(ax: Any, found: "UnitOverlap", top: np.ndarray) -> None:
    variance, norm = found.variance.numpy(), found.write_norm.square().numpy()
    others = np.setdiff1d(found.defined.nonzero()[:, 0].numpy(), top)
    ax.scatter(norm[others], variance[others], s=9, color="#999999", linewidths=0, label=f"other {len(others)} units")
    ax.scatter(norm[top], variance[top], s=14, color=PALETTE[1], marker="D", linewidths=0, label=f"{len(top)} shown")
    least = found.energy[torch.as_tensor(top)].min().item()
    line = np.array([norm[found.defined].min(), norm[found.defined].max()])
    ax.plot(line, least / line, color=INK, linewidth=0.8, linestyle="--", label=f"energy of number {len(top)}")
    ax.set(xscale="log", yscale="log")
    for axis in (ax.xaxis, ax.yaxis):
        # Often less than a decade: matplotlib's own minor labels run into each other.
        axis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter(NullFormatter())
    low, high = variance[found.defined].min(), variance[found.defined].max()
    ax.set_ylim(low / 1.5, high * 1.5)
    ax.set_xlabel("squared write norm |B|²", fontsize=_SMALL)
    ax.set_ylabel("read variance Var(z)", fontsize=_SMALL)
    ax.set_title("Selection by energy Var(z) |B|²", fontsize=10, color=INK)
    ax.legend(fontsize=7, frameon=False, loc="best")


def overlap_tail(found: "UnitOverlap", n: int) -> Figure:
    """Share of pairs above each value, and the strongest pairs."""
    figure, axes = new_figure(1, 2, width=4.8, height=max(3.2, 0.17 * n + 1.0))
    ax = axes[0, 0]
    for index, (name, matrix) in enumerate(found.measures().items()):
        size = np.sort(np.abs(found.values(matrix)))
        # Log-spaced ranks: enough points for every part of the curve, however many pairs there are.
        ranks = np.unique(np.geomspace(1, len(size), 300).astype(int))
        ax.plot(size[len(size) - ranks], ranks / len(size), label=name, **style(index))
    ax.set(xscale="log", yscale="log")
    ax.set_xlim(left=max(np.percentile(size, 5), 1e-7), right=1.1)  # of the last, the smallest, of the three
    ax.set_xlabel("|value|", fontsize=_SMALL)
    ax.set_ylabel(f"share of the {found.n_pairs:,} pairs with |value| or more", fontsize=_SMALL)
    ax.legend(fontsize=_SMALL, frameon=False, loc="lower left")
    ax.set_title("All pairs", fontsize=10, color=INK)
    table = found.pairs(n)
    _bars(axes[0, 1], table, "contribution correlation", f"Strongest {len(table)} pairs", signed=True)
    figure.suptitle(f"Overlap of {found.site} units", fontsize=11, color=INK)
    return figure


def interaction_structure(found: "UnitInteractions") -> Figure:
    """Histogram of R with its percentiles, and the matrix of R by energy."""
    figure, axes = new_figure(1, 2, width=4.8, height=3.9)
    ax, values = axes[0, 0], found.values()
    ax.hist(values, bins=min(60, max(10, len(values) // 20)), color=PALETTE[0], linewidth=0)
    if len(values):
        marks = {"median": 50, "95th": 95, "99th": 99}
        for index, (name, value) in enumerate(zip(marks, np.percentile(values, list(marks.values())), strict=True)):
            line = style(index + 1)
            ax.axvline(value, linewidth=1.4, label=f"{name}  {value:.3f}", **line)
        ax.legend(fontsize=_SMALL, frameon=False, loc="upper right", title="percentile", title_fontsize=_SMALL)
    ax.set_xlim(left=0)
    ax.set_xlabel("interaction ratio R", fontsize=_SMALL)
    ax.set_ylabel(f"pairs (of {len(values):,})", fontsize=_SMALL)
    ax.set_title("All pairs", fontsize=10, color=INK)
    heatmap(axes[0, 1], found.ratio.numpy(), label="interaction ratio R")
    axes[0, 1].set_title("Pairs by pre-activation energy", fontsize=10, color=INK)
    axes[0, 1].set_xlabel("unit, by energy rank", fontsize=_SMALL)
    axes[0, 1].set_ylabel("unit, by energy rank", fontsize=_SMALL)
    figure.suptitle(
        f"Interactions of {found.site} units through {found.settings['activation']}", fontsize=11, color=INK
    )
    return figure


def interaction_pairs(found: "UnitInteractions", n: int) -> Figure:
    """The strongest pairs as bars."""
    figure, axes = new_figure(1, 1, width=5.6, height=max(2.4, 0.17 * n + 1.0))
    table = found.pairs(n)
    _bars(axes[0, 0], table, "R", f"Strongest {len(table)} pairs of {found.site} units", signed=False)
    axes[0, 0].set_xlabel("interaction ratio R", fontsize=_SMALL)
    return figure


def _bars(ax: Any, table: Any, column: str, title: str, signed: bool) -> None:
    """Horizontal bars, the strongest on top, named by the two units."""
    values = table[column].tolist() if len(table) else []
    pairs = zip(table["unit"], table["other unit"], strict=True) if len(table) else []
    names = [f"{one.rpartition('/')[2]} – {other.rpartition('/')[2]}" for one, other in pairs]
    # Signs as in the heatmaps: orange is positive, blue negative. R has no sign.
    colours = [PALETTE[1] if signed and v >= 0 else PALETTE[0] for v in values]
    ax.barh(range(len(values)), values, height=0.72, color=colours)
    ax.set_yticks(range(len(names)), names, fontsize=7)
    ax.invert_yaxis()
    ax.set_ylim(len(values) - 0.4, -0.6)
    ax.grid(False, axis="y")
    ax.axvline(0, color=INK, linewidth=0.8)
    ax.set_xlabel(column, fontsize=_SMALL)
    ax.set_ylabel("units of the pair", fontsize=_SMALL)
    ax.set_title(title, fontsize=10, color=INK)


def _rounded(value: float) -> float:
    """To one digit, and never zero."""
    return float(f"{max(value, 1e-3):.1g}")
