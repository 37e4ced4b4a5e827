"""pareto: the figure of `compare_edits`, what a margin change costs elsewhere (paper, fig. component-edit-pareto)."""

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from swd_lens.analysis.edit.target import Target
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.panels import visible

_NAMES = {"oracle": "oracle (dense, rank one)", "lora": "LoRA, rank 4"}
_MARKERS = {"unit": "o", "random": "s", "oracle": "D", "lora": "^"}
_X = {
    "KL other prompts": "mean KL of the next token on {n} other prompts (nats)",
    "largest KL": "largest KL of {n} prompts (nats)",
}


def plot_pareto(rows: pd.DataFrame, target: Target, n_prompts: int, of: str = "KL other prompts"):
    """Realised margin change against mean KL; one line per method, left and far from 0 is better. A matplotlib Figure.

    Args:
        rows: of an EditComparison.
        target: the edited prompt, for the axis' words.
        n_prompts: how many other prompts there were.
        of: which column is the cost.
    """
    figure, axes = new_figure(1, 1, width=6.2, height=4.2)
    ax = axes[0, 0]
    ax.axhline(0.0, color=INK, linewidth=0.6)
    for index, (method, some) in enumerate(rows.groupby("method", sort=False)):
        line = some.sort_values("requested shift", kind="stable")
        ax.plot(
            line[of],
            line["margin change"],
            label=literal(_label(str(method), str(line["unit"].iloc[0]))),
            marker=_MARKERS.get(str(method), "o"),
            markersize=4.5,
            linewidth=1.4,
            **style(index),
        )
        _label_ends(ax, line, of, style(index)["color"])
    _kl_axis(ax, rows[of])
    ax.margins(y=0.12)
    answer, foil = visible(target.answer), visible(target.foil)
    ax.set_xlabel(_X.get(of, "mean KL per token of text (nats)").format(n=n_prompts), fontsize=9, color=INK)
    ax.set_ylabel(literal(f"change of the margin {answer} − {foil} (logits)"), fontsize=9, color=INK)
    ax.set_title("numbers at the ends: requested shift (logits)", fontsize=8, color=INK, loc="right")
    figure.legend(loc="outside lower center", ncols=2, fontsize=8, frameon=False)
    return figure


def _label(method: str, unit: str) -> str:
    return {"unit": f"unit {unit}", "random": f"random unit {unit}"}.get(method, _NAMES.get(method, method))


def _label_ends(ax: Any, line: pd.DataFrame, of: str, color: str) -> None:
    """The requested shift beside the outermost points; those in between follow by counting."""
    shifts = line["requested shift"]
    for place in {shifts.idxmin(), shifts.idxmax()}:
        if shifts[place] == 0:
            continue
        ax.annotate(
            f"{shifts[place]:+g}",
            (line[of][place], line["margin change"][place]),
            xytext=(6, 0),
            textcoords="offset points",
            fontsize=7,
            va="center",
            color=color,
        )


def _kl_axis(ax: Any, values: Sequence[float] | pd.Series) -> None:
    """A log axis with 0 on it: ticks at 0 and at powers of ten."""
    positive = [float(value) for value in values if value > 0]
    if not positive:
        return
    low, high = math.floor(math.log10(min(positive))), math.ceil(math.log10(max(positive)))
    ax.set_xscale("symlog", linthresh=10.0**low, linscale=0.5)
    step = max(1, math.ceil((high - low) / 6))
    ticks = [10.0**power for power in range(high, low - 1, -step)]
    ax.xaxis.set_major_locator(FixedLocator([0.0, *reversed(ticks)]))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "0" if value == 0 else f"$10^{{{round(math.log10(value))}}}$")
    )
    ax.set_xlim(-0.12 * 10.0**low, 10.0**high * 1.6)
