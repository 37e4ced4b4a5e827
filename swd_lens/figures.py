"""The house style of figures: one palette that colour-blind readers can tell apart, one way to make SVG.

Figures are matplotlib `Figure` objects made without pyplot, so that no global state or window is touched; notebooks show
them as SVG.
"""

import io

from matplotlib.figure import Figure

# Okabe and Ito's palette, darkest first; curves also differ in line style, so that print in grey still reads.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
LINE_STYLES = ("-", "--", "-.", ":", (0, (5, 1)), (0, (3, 1, 1, 1)), (0, (1, 1)))
INK, GRID = "#222222", "#dddddd"


class NotebookFigure(Figure):
    """A Figure that shows itself in notebooks; plain ones do so only after pyplot has been imported."""

    def _repr_svg_(self) -> str:
        return svg(self)


def new_figure(rows: int = 1, columns: int = 1, *, width: float = 4.2, height: float = 3.1):
    """A figure of rows x columns panels, each width x height inches, and its axes as a 2-D array."""
    figure = NotebookFigure(figsize=(width * columns, height * rows), layout="constrained")
    axes = figure.subplots(rows, columns, squeeze=False)
    for ax in axes.flat:
        ax.grid(True, color=GRID, linewidth=0.6)
        ax.spines[["top", "right"]].set_visible(False)
        ax.tick_params(colors=INK, labelsize=8)
        ax.set_axisbelow(True)
    return figure, axes


def style(index: int) -> dict:
    """Colour and line style of the index-th curve."""
    # The second round of colours gets other line styles: the first 49 curves all look different.
    line = index + index // len(PALETTE)
    return {"color": PALETTE[index % len(PALETTE)], "linestyle": LINE_STYLES[line % len(LINE_STYLES)]}


def svg(figure: Figure) -> str:
    """The figure as an <svg> element; text stays text, so that it can be read aloud and searched."""
    from matplotlib import rc_context

    buffer = io.StringIO()
    # A fixed salt and no date: the same figure gives the same bytes.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "swd-lens"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]
