"""draw_layers: a task's best units, layer by layer, between what they read and the residual stream they write to."""

from typing import Any

import pandas as pd
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from swd_lens.base.figures import INK, PALETTE, NotebookFigure, literal
from swd_lens.hosts.sites import WRITES_RESIDUAL, parse_unit, split_name

_COLUMN, _BOX, _GAP = 3.1, 0.62, 0.24  # inches
_INPUTS = {"mlp_out": "MLP neurons", "attn_o": "head outputs"}


def draw_layers(ranked: pd.DataFrame, task: str):
    """The figure.

    Args:
        ranked: rows of `Audit.rank_table`.
        task: for the title.

    Returns:
        A matplotlib Figure: one column per layer, units as boxes from best (top) down; colour says how high a unit ranks.
    """
    rows = ranked.to_dict("records")
    layers = {layer: [row for row in rows if row["layer"] == layer] for layer in dict.fromkeys(ranked["layer"])}
    most = max(2, *map(len, layers.values())) if layers else 2
    width, height = _COLUMN * max(1, len(layers)) + 0.5, most * (_BOX + _GAP) + 1.6
    figure = NotebookFigure(figsize=(width, height))
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, width)
    ax.set_ylim(0, height)
    ax.axis("off")
    stream = 0.45  # the residual stream's height
    if any(_kind(row) in WRITES_RESIDUAL for row in rows):
        _arrow(ax, (0.15, stream), (width - 0.15, stream), PALETTE[2], 2.4)
        ax.text(width - 0.15, stream - 0.3, "residual stream", ha="right", va="bottom", fontsize=8, color=PALETTE[2])
    best = max((row["score"] for row in rows), default=1.0)
    for column, its in enumerate(layers.values()):
        _layer(ax, 0.35 + column * _COLUMN, height, stream, its, best)
    ax.text(0.15, height - 0.12, literal(f"Best units for {task.replace('_', ' ')}"), va="top", fontsize=11, color=INK)
    key = "unit · # rank among all units · score in logits; the darker, the higher the score"
    ax.text(0.15, stream - 0.3, key, va="bottom", fontsize=7.5, color=INK)
    return figure


def _layer(ax: Any, x: float, height: float, stream: float, rows: list[dict[Any, Any]], best: float) -> None:
    reads = " and ".join(dict.fromkeys(_INPUTS.get(_kind(row), "residual stream") for row in rows))
    top, box = height - 0.62, _COLUMN - 1.0
    ax.text(
        x + 0.3 + box / 2,
        top + 0.14,
        f"layer {rows[0]['layer']}",
        ha="center",
        fontsize=9,
        color=INK,
        weight="bold",
    )
    bottom = top - max(2, len(rows)) * (_BOX + _GAP) + _GAP  # its name needs the room of two
    ax.add_patch(_box(x - 0.14, bottom, 0.26, top - bottom, "#eeeeee"))
    ax.text(x - 0.01, (top + bottom) / 2, reads, rotation=90, ha="center", va="center", fontsize=7.5, color=INK)
    plus = (x + box + 0.68, stream)
    into = False
    for place, row in enumerate(rows):
        y, middle = top - _BOX - place * (_BOX + _GAP), top - _BOX / 2 - place * (_BOX + _GAP)
        share = max(0.0, min(1.0, row["score"] / best)) if best > 0 else 0.0
        ax.add_patch(_box(x + 0.38, y, box, _BOX, _tint(share)))
        slant = "normal" if row["label"] else "italic"
        label = literal(_short(row["label"] or "no label", 24))
        ax.text(x + 0.48, y + 0.41, label, va="center", fontsize=8.5, color=INK, style=slant)
        facts = f"{_kind(row)}/{parse_unit(row['unit'])[1]} · #{row['global rank']} · {row['score']:.3g}"
        ax.text(x + 0.48, y + 0.18, facts, va="center", fontsize=7.5, color=INK)
        _arrow(ax, (x + 0.12, middle), (x + 0.38, middle), INK, 1.0)
        if _kind(row) in WRITES_RESIDUAL:
            into = True
            ax.plot([x + 0.38 + box, plus[0]], [middle, middle], color=INK, linewidth=1.0)
            _arrow(ax, (plus[0], middle), (plus[0], stream + 0.11), INK, 1.0)
    if into:
        ax.add_patch(Circle(plus, 0.11, facecolor="white", edgecolor=INK, zorder=4))
        ax.text(*plus, "+", ha="center", va="center", fontsize=10, color=INK, zorder=5)


def _kind(row: dict[Any, Any]) -> str:
    return split_name(parse_unit(row["unit"])[0])[1]


def _box(x: float, y: float, width: float, height: float, colour: Any) -> FancyBboxPatch:
    return FancyBboxPatch(
        (x, y),
        width,
        height,
        boxstyle="round,pad=0,rounding_size=0.06",
        facecolor=colour,
        edgecolor="#777777",
        linewidth=0.8,
    )


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], colour: str, width: float) -> None:
    ax.add_patch(
        FancyArrowPatch(
            start, end, arrowstyle="-|>", mutation_scale=9, color=colour, linewidth=width, shrinkA=0, shrinkB=0
        )
    )


def _tint(share: float) -> tuple[float, float, float]:
    """White to a light orange: text on it stays readable."""
    full = (0.96, 0.72, 0.50)
    return tuple(1 - share * (1 - part) for part in full)  # type: ignore[return-value]


def _short(text: str, n: int) -> str:
    return text if len(text) <= n else text[: n - 1] + "…"
