"""Figures of circuits.

1. `plot_curves`: every prefix of one task's curves, what it recovers and its drop against what it costs, each in the band of its
   95 % interval over test prompts.
2. `plot_frontiers`: the paper's figure, the least cost of every value: columns tasks, rows recovered and drop.
   Seeds of one method are drawn as their mean in a band of one standard deviation.

Costs stand on a log axis that still shows the empty circuit (cost 0).
"""

import math
from collections.abc import Mapping, Sequence
from textwrap import fill
from types import MappingProxyType
from typing import Any

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from swd_lens.base.checks import one_of
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.circuits.measure import COSTS, RECOVERED
from swd_lens.circuits.seeds import Curve, mean_min_cost

AXES = {"recovered": "recovered of what is carried", "drop": "drop (logits)"}
# A share outside this range says "not at all" or "overshoots" already; drawn whole it would flatten everything else.
SHARES = (-0.5, 1.6)
_GREY = "#888888"  # of lines that are no data
_LETTERS, _LINE = 15, 8  # of a legend: letters per inch at font size 8, and what a line of it takes
_INCHES_PER_LINE = 0.17  # of text at that size
_WIDE, _PANEL = 6.4, 2.7  # inches: of the whole figure at least, and of a task's panels


def plot_curves(curves: Mapping[str, Curve], cost: str = "edges"):
    """Draw what prefixes recover (left) and their drop (right) against cost, one line per named curve; a matplotlib Figure."""
    figure, axes = new_figure(1, 2)
    for ax, column in zip(axes[0], AXES, strict=True):
        draw_curves(ax, curves, column, cost, bands=True)
    axes[0, 0].axhline(RECOVERED, color=_GREY, linewidth=0.8, linestyle=":")
    if len(curves) > 1:
        axes[0, 0].legend(fontsize=8, frameon=False)
    task = next(iter(curves.values())).task
    figure.suptitle(literal(task.replace("_", " ")), fontsize=10)
    return figure


def draw_curves(
    ax: Any,
    curves: Mapping[str, Curve],
    column: str,
    cost: str,
    *,
    bands: bool = False,
    styles: Mapping[str, Mapping[str, Any]] = MappingProxyType({}),
) -> None:
    """One panel: a cost curve per method on a log axis that still shows the empty circuit (cost 0). bands: draw the interval of
    each value, where the curve has them; styles: label -> colour and line style, of those that are not there by their place."""
    for index, (label, curve) in enumerate(curves.items()):
        rows, look = curve.rows, styles.get(label, style(index))
        ax.plot(rows[cost], rows[column], label=label, marker="o", markersize=2.5, linewidth=1.4, **look)
        ends = [f"{column} low", f"{column} high"]
        if bands and set(ends) <= set(rows):
            low, high = (rows[end].astype(float) for end in ends)
            ax.fill_between(rows[cost], low, high, color=look["color"], alpha=0.2, linewidth=0)
    costs = pd.concat([curve.rows[cost] for curve in curves.values()])
    if (costs > 0).any():
        ax.set_xscale("symlog", linthresh=costs[costs > 0].min())
    ax.set_xlim(left=0)
    ax.set(xlabel="active edges" if cost == "edges" else "units", ylabel=AXES[column])
    if column == "recovered":
        ax.axhline(1.0, color=_GREY, linewidth=0.8)


def plot_frontiers(panels: Mapping[str, Mapping[str, Sequence[Curve]]], cost: str = "edges", note: str = ""):
    """The least cost ("edges" or "units") of recovering each share (above) and of each drop (below); one column per task. panels:
    task -> method, as the legend calls it -> its curve, or one per seed; note: written above the panels. Raises ValueError: an
    unknown cost."""
    one_of("cost", cost, COSTS)
    width = max(_PANEL, _WIDE / len(panels))
    figure, axes = new_figure(2, len(panels), width=width, height=2.3)
    drawn: dict[str, Any] = {}
    for column, (task, methods) in enumerate(panels.items()):
        for ax, of in zip(axes[:, column], AXES, strict=True):
            drawn = _draw_frontiers(ax, methods, of, cost) | drawn
        axes[0, column].set_title(literal(task.replace("_", " ")), fontsize=10, color=INK)
    # One cost axis for all panels, so that tasks can be compared; its numbers stand at the left only.
    costs = [curve.rows[cost] for methods in panels.values() for curves in methods.values() for curve in curves]
    for ax in axes.flat:
        cost_axis(ax.yaxis, pd.concat(costs))
        ax.tick_params(labelleft=ax.get_subplotspec().is_first_col())
    for ax in axes[:, 0]:
        ax.set_ylabel(f"least {'active edges' if cost == 'edges' else 'units'}")
    # Every method's line beside its name, below the panels; as many in a row as the names leave room for.
    methods, letters = next(iter(panels.values())), int(_LETTERS * width * len(panels))
    labels = [
        literal(label if len(curves) == 1 else f"{label}, mean ± sd of {len(curves)} seeds") for label, curves in methods.items()
    ]
    labels = [fill(label, letters - _LINE, break_long_words=True) for label in labels]
    longest = max(len(line) for label in labels for line in label.split("\n"))
    columns = max(1, min(len(labels), letters // (longest + _LINE)))
    handles = [drawn[label] for label in methods]
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, fontsize=8, frameon=False)
    lines = -(-len(labels) // columns) * max(1 + label.count("\n") for label in labels)
    if note:
        above = fill(note, letters)
        figure.suptitle(literal(above), fontsize=8, color=INK)
        lines += 1 + above.count("\n")
    # The words around the panels take no room from them.
    figure.set_figheight(figure.get_figheight() + _INCHES_PER_LINE * lines)
    return figure


def _draw_frontiers(ax: Any, methods: Mapping[str, Sequence[Curve]], of: str, cost: str) -> dict[str, Any]:
    """One panel; legend label -> the line drawn."""
    lines: dict[str, Any] = {}
    reached: list[float] = []
    for index, (label, curves) in enumerate(methods.items()):
        least = mean_min_cost(curves, of, cost)
        reached += least[of].tolist()
        # A cost holds from the next smaller value (which something cheaper reaches) up to its own: a step to the left.
        line_style = {"drawstyle": "steps-pre", "linewidth": 1.4, "markersize": 2.5, **style(index)}
        # A single curve's points are prefixes; a mean over seeds has none of its own.
        (lines[label],) = ax.plot(least[of], least["mean"], marker="o" if len(curves) == 1 else "", **line_style)
        if len(curves) > 1:
            sd, colour = least["sd"].fillna(0.0), lines[label].get_color()
            low = (least["mean"] - sd).clip(lower=0.0)
            ax.fill_between(least[of], low, least["mean"] + sd, step="pre", color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel(AXES[of])
    if not reached:
        text = "these units do not\ncarry the task"
        ax.text(0.5, 0.5, text, transform=ax.transAxes, ha="center", va="center", fontsize=8)
        ax.set_xticks([])
        return lines
    low, high = SHARES if of == "recovered" else (-math.inf, math.inf)
    left, right = max(low, min(0.0, *reached, 0.0)), min(high, max(reached))
    room = 0.04 * max(right - left, 1e-9)
    ax.set_xlim(left - room, right + room)
    return lines


def cost_axis(axis: Any, costs: pd.Series) -> None:
    """A log axis with 0 on it: ticks at 0 and the powers of ten, room for the empty circuit's marker."""
    if not (costs > 0).any():
        return
    smallest, largest = float(costs[costs > 0].min()), float(costs.max())
    ticks = [10.0**p for p in range(math.ceil(math.log10(smallest)), math.floor(math.log10(largest)) + 1)]
    getattr(axis.axes, f"set_{axis.axis_name}scale")("symlog", linthresh=smallest)
    axis.set_major_locator(FixedLocator([0, *(ticks or [smallest])]))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: compact(value)))
    getattr(axis.axes, f"set_{axis.axis_name}lim")(-smallest * 0.06, largest * 1.25)


def compact(value: float | int) -> str:
    """0, 500, 10k, 2M."""
    for size, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{unit}"
    return f"{value:g}"
