"""The house style of figures: one palette that colour-blind readers can tell apart, one rule of colours, one way to make SVG.

1. Blue is negative, orange positive; attention, and whatever else has no sign, is green. Every drawing, panel and style sheet
   takes these three from here.
2. Figures are matplotlib `Figure` objects made without pyplot, so that no global state or window is touched; notebooks show
   them as SVG.
3. An SVG has no ground, and draws in the text colour of the page that it stands in, light or dark. As a picture of its own (a
   file, an <img>) it brings both colours along.
"""

import io
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap, Normalize, TwoSlopeNorm
from matplotlib.figure import Figure

from swd_lens.base.errors import visible_lines

# Okabe and Ito's palette, darkest first; curves also differ in line style, so that print in grey still reads.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
MARKERS = "os^Dv*X"
NEGATIVE, POSITIVE, ATTENTION = PALETTE[:3]


# The three for style sheets, which lay them out at several strengths: rgba(var(--plus), .3).
def _sign_style(plus: str, minus: str, unsigned: str) -> str:
    colours = {"plus": plus, "minus": minus, "unsigned": unsigned}
    return "; ".join(f"--{name}: {', '.join(str(int(c[i : i + 2], 16)) for i in (1, 3, 5))}" for name, c in colours.items())


SIGN_STYLE = _sign_style(POSITIVE, NEGATIVE, ATTENTION)
# On a dark ground, where the blue and the green of above are too dark for thin lines: the hues, lighter.
SIGN_STYLE_DARK = _sign_style("#ff9a52", "#6bbcf5", "#3fd6a8")
INK, GRID = "#222222", "#88888855"  # INK becomes the page's text colour in SVG
INK_ON_FILL = "#1b1f24"  # of text on a filled box, which has the same colour on every page
# What has no sign, and what has one. Zero is transparent, so that it is the page's own ground; both keep their order in grey.
SEQUENTIAL = LinearSegmentedColormap.from_list("swd_sequential", (f"{ATTENTION}00", ATTENTION))
_SIGNS = ((0.0, NEGATIVE), (0.5, f"{NEGATIVE}00"), (0.5, f"{POSITIVE}00"), (1.0, POSITIVE))
DIVERGING = LinearSegmentedColormap.from_list("swd_diverging", _SIGNS)
UNDEFINED = "#88888840"  # of a map's entries that are masked or not defined
# Of an <svg> that is the whole document: in a page `svg:root` is nothing, and the page's own colours hold.
STANDALONE = (
    f"<style>svg:root {{ color: {INK}; background: #ffffff; }} "
    "@media (prefers-color-scheme: dark) { svg:root { color: #e6e8eb; background: #14171b; } }</style>"
)


_PAGE_INK = re.compile(rf"{INK}|#000000(?=[;\"])")
_MATPLOTLIB_STYLE = re.compile(r'<style type="text/css">\*.*?</style>')


class NotebookFigure(Figure):
    """A Figure that shows itself in notebooks; plain ones do so only after pyplot has been imported."""

    def _repr_svg_(self) -> str:
        return svg(self).replace("<svg ", '<svg style="max-width: 100%; height: auto" ', 1)


def new_figure(rows: int = 1, columns: int = 1, *, width: float | int = 4.2, height: float | int = 3.1):
    """A figure of rows x columns panels, each width x height inches, and its axes as a 2-D array."""
    figure = NotebookFigure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.grid(True, color=GRID, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=INK, labelsize=8)
        for axis in (ax.xaxis, ax.yaxis):
            axis.label.set(size=9, color=INK)
        ax.set_axisbelow(True)
    return figure, axes


def style(index: int) -> dict:
    """Colour and line style of the index-th curve."""
    # The second round of colours gets other line styles: the first 49 curves all look different.
    line = index + index // len(PALETTE)
    return {"color": PALETTE[index % len(PALETTE)], "linestyle": LINE_STYLES[line % len(LINE_STYLES)]}


def family_style(family: int, member: int = 0) -> dict:
    """Colour of a family of curves and line style of one of its members: what differs in a number alone keeps its colour."""
    # A second round of colours begins with other line styles.
    line = member + 3 * (family // len(PALETTE))
    return {"color": PALETTE[family % len(PALETTE)], "linestyle": LINE_STYLES[line % len(LINE_STYLES)]}


def line_figure(table: Any, x: str, y: str, *, title: str = "") -> Figure:
    """The columns of a table of numbers as curves over its index, with a line at zero where they have both signs. table: a
    pandas DataFrame; its columns' names are the legend; x, y: what its index and its values are."""
    figure, axes = new_figure(width=7.4)
    ax = axes[0, 0]
    for i, name in enumerate(table.columns):
        ax.plot(table.index, table[name], marker=MARKERS[i % len(MARKERS)], markersize=3, label=literal(str(name)), **style(i))
    if float(table.min().min()) < 0 < float(table.max().max()):
        ax.axhline(0, color=UNDEFINED[:7], linewidth=0.8)
    ax.set(xlabel=x, ylabel=y, title=title)
    ax.legend(frameon=False, fontsize=8, loc="center left", bbox_to_anchor=(1, 0.5))
    return figure


def svg(figure: Figure) -> str:
    """The figure as an <svg> element in the page's text colour; text stays text, so that it can be read aloud and searched."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    # A fixed salt and no date: the same figure gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "swd-lens"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None}, transparent=True)
    text = buffer.getvalue()
    text = _PAGE_INK.sub("currentColor", text[text.index("<svg") :])
    # What matplotlib sets by a style sheet would reach every other picture of the page.
    text = _MATPLOTLIB_STYLE.sub("", text, count=1)
    head, _, rest = text.partition(">")
    return f'{head} fill="currentColor" stroke-linejoin="round" stroke-linecap="butt">{STANDALONE}{rest}'


def heatmap(
    ax: Any,
    values: Any,
    *,
    label: str,
    signed: bool = False,
    largest: float | int | None = None,
    rows: Sequence[str] | None = None,
    columns: Sequence[str] | None = None,
    bar: bool = True,
) -> Any:
    """A matrix as a picture on `ax`, with a labelled colour bar; entries that are NaN (masked, undefined) stay grey.

    Args:
        values: (row, column) numbers.
        label: what a colour means, with its unit; written at the bar.
        signed: blue for negative, orange for positive, the page's ground for zero; else that ground (0) to green.
        largest: the value of the full colour; None = the largest |value|.
        rows, columns: tick labels (plain text); None = numbers.
        bar: draw the colour bar.

    Returns: The image, for a bar shared by several panels.
    """
    array = np.asarray(values, dtype=float)
    top = float(np.nanmax(np.abs(array), initial=0.0)) if largest is None else float(largest)
    top = top or 1.0
    colours = (DIVERGING if signed else SEQUENTIAL).with_extremes(bad=UNDEFINED)
    norm = TwoSlopeNorm(0.0, -top, top) if signed else Normalize(0.0, top)
    image = ax.imshow(array, cmap=colours, norm=norm, aspect="auto", interpolation="nearest")
    ax.grid(False)
    for axis, names in ((ax.yaxis, rows), (ax.xaxis, columns)):
        if names is not None:
            axis.set_ticks(range(len(names)), [literal(name) for name in names])
    if columns is not None and max(map(len, columns), default=0) > 2:
        ax.tick_params(axis="x", labelrotation=90)
    if bar:
        colorbar = ax.figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
        colorbar.set_label(label, fontsize=8, color=INK)
        colorbar.ax.tick_params(labelsize=7, colors=INK)
        colorbar.outline.set_visible(False)
    return image


def literal(text: Any) -> str:
    """Text in which matplotlib finds no formula, and a reader everything that is in it."""
    return visible_lines(str(text)).replace("$", r"\$")
