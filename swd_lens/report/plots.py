"""The report's figures: matplotlib figures, and how one becomes an <svg> element that is a good neighbour in a page.

1. `looks_of` says how a run's methods are drawn: a colour for each family, a line style and a marker for each of its members.
   Methods that differ in sparsity alone are a family: SWD, the paper's SWD, pruned neurons, pruned singular vectors. So are the
   seeds of one method. Everything else is a family of its own. Families get the colours in their order in the run, with SWD, the
   paper's SWD and what is pruned before what is exact.
2. `circuit_column` draws one column of the paper's grid: what circuits of a task recover above its drop, one curve per
   method, against active edges or units. The page puts the columns of a surface side by side, or below each other on a phone.
3. `relmse_dots` shows which matrices a replacement gets wrong: one row per site, one dot per method.
4. `pattern_grid` draws attention patterns side by side, for paper and wherever no script runs: a head is a picture of one pixel
   per (destination, source), enlarged without blur. By hand: matplotlib takes half a second for sixteen small axes, and a report
   has hundreds.
5. `inline_svg` takes a figure's SVG and makes its ids its own, its fonts the reader's, its size the page's, and gives it
   a title and a description for those who do not see it.
"""

import base64
import io
import math
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.image import imsave
from matplotlib.ticker import FuncFormatter, MaxNLocator

from swd_lens.base.errors import quoted, visible, visible_token
from swd_lens.base.figures import DIVERGING, INK, SEQUENTIAL, family_style, literal, new_figure, svg
from swd_lens.circuits import CostCurve
from swd_lens.circuits.plots import SHARES, cost_axis, draw_curves
from swd_lens.study import Run
from swd_lens.study.run import Replacement
from swd_lens.study.section import AttentionView

FONT_STACK = "system-ui, 'Helvetica Neue', Arial, 'Liberation Sans', sans-serif"
EXACT = 1e-9  # relMSE below this is float32 rounding of an exact factorization; on a log axis it would push the rest together
# Of `pattern_grid`: heads in a row; sizes in points; how many token labels there is room for, and of how many characters.
_ACROSS = 4
_SIDE, _GAP, _TITLE = 120.0, 12.0, 14.0
_LABELS, _LABELLED = 72.0, 24
_LONGEST = 12
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")


@dataclass(frozen=True)
class Look:
    """The look of one method.

    Attributes:
        family: the place of its family in the run, which gives the colour.
        member: its place in the family.
    """

    family: int
    member: int

    @property
    def line(self) -> dict[str, Any]:
        """Colour and line style."""
        return family_style(self.family, self.member)

    @property
    def marker(self) -> str:
        """The marker of dots: two neighbours in a family, and the first ones of two families, have different ones."""
        return _MARKERS[(2 * self.family + self.member) % len(_MARKERS)]


def looks_of(run: Run) -> dict[str, Look]:
    """Name of a curve or replacement -> how it is drawn, on every surface alike."""
    given = set(run.settings.get("factors", ()))
    families: dict[Hashable, list[str]] = {}
    for r in run.replacements:
        if r.exact or r.method in given:
            family = "method", r.method
        else:
            presets = (of_site.get("settings", {}).get("preset") for of_site in r.factors.summary().values())
            family = r.role, next(presets, None) if r.role == "control" else None
        families.setdefault(family, []).append(r.method)
    known = {r.method for r in run.replacements}
    for comparison in run.comparisons.values():
        for method, names in comparison.methods.items():
            families.setdefault(("method", method), []).extend(name for name in names if name not in known)
    members = [list(dict.fromkeys(names)) for names in families.values() if names]
    return {name: Look(family, member) for family, names in enumerate(members) for member, name in enumerate(names)}


def circuit_column(
    curves: Mapping[str, CostCurve], looks: Mapping[str, Look], threshold: float | int = 0.9, cost: str = "edges"
) -> Figure:
    """Draw what is recovered (above) and the drop (below) against active edges or units, for one task."""
    figure, axes = new_figure(2, 1, width=2.5, height=1.75)
    figure.set_layout_engine(None)  # the same margins in every column, so that columns align in the page
    figure.subplots_adjust(left=0.25, right=0.97, top=0.98, bottom=0.12, hspace=0.1)
    above, below = axes[:, 0]
    for ax, column in ((above, "recovered"), (below, "drop")):
        _draw(ax, curves, looks, column, cost)
        cost_axis(ax.xaxis, pd.concat([curve.rows[cost] for curve in curves.values()]))
    above.set_xlabel("")
    above.tick_params(labelbottom=False)
    if above.lines:
        above.axhline(threshold, color="#888888", linewidth=0.8, linestyle=":")
    below.axhline(0.0, color="#888888", linewidth=0.8)
    for ax in (above, below):
        ax.set_ylabel(ax.get_ylabel(), fontsize=9, color=INK, labelpad=3)
        ax.yaxis.set_label_coords(-0.265, 0.5)
    return figure


def _draw(ax: Axes, curves: Mapping[str, CostCurve], looks: Mapping[str, Look], column: str, cost: str) -> None:
    values = pd.concat([curve.rows[column] for curve in curves.values()]).dropna()
    if any((curve.rows[cost] > 0).any() for curve in curves.values()):
        draw_curves(ax, curves, column, cost, styles={name: looks[name].line for name in curves})
    if values.empty:
        ax.text(0.5, 0.5, "these units do not\ncarry the task", transform=ax.transAxes, ha="center", fontsize=8)
        ax.set_yticks([])
        for line in list(ax.lines):
            line.remove()
        return
    ax.yaxis.set_major_locator(MaxNLocator(5, steps=[1, 2, 5, 10]))
    if column == "recovered":
        low, high = SHARES
        ax.set_ylim(max(low, min(-0.05, values.min() - 0.05)), min(high, max(1.1, values.max() + 0.05)))


def relmse_dots(replacements: Sequence[Replacement], looks: Mapping[str, Look]) -> Figure | None:
    """Draw the relMSE of every site, one dot per method; None if there is a single site or all methods are exact.

    An error that is not finite has no place on the axis; the table says it.
    """
    sites = list(dict.fromkeys(site for r in replacements for site in r.fidelity.relmse))
    drawn = [{site: e for site, e in r.fidelity.relmse.items() if math.isfinite(e)} for r in replacements]
    named = zip((looks[r.method] for r in replacements), drawn, strict=True)
    shown = [(look, errors) for look, errors in named if max(errors.values(), default=0.0) > EXACT]
    if not shown or len(sites) < 2:
        return None
    figure, axes = new_figure(1, 1, width=4.8, height=0.62 + 0.24 * len(sites))
    ax = axes[0, 0]
    for look, its in shown:
        points = [(max(error, EXACT), sites.index(site)) for site, error in its.items()]
        ax.scatter(*zip(*points, strict=True), s=26, color=look.line["color"], marker=look.marker, zorder=3)
    ax.set_yticks(range(len(sites)), [literal(site) for site in sites])
    ax.set_ylim(len(sites) - 0.5, -0.5)
    errors = [max(error, EXACT) for _, its in shown for error in its.values()]
    # Whole decades, so that there are always two labelled ticks to read a log axis by.
    ax.set_xscale("log")
    ax.set_xlim(10.0 ** math.floor(math.log10(min(errors)) - 0.05), 10.0 ** math.ceil(math.log10(max(errors)) + 0.05))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    ax.xaxis.set_minor_formatter(FuncFormatter(lambda value, _: ""))
    ax.set_xlabel("relMSE (log scale; left is better)")
    return figure


def pattern_grid(view: AttentionView) -> str:
    """Draw all heads of a view, destinations down, sources across: an <svg> element without title, see `page_svg`."""
    values = view.tensor().numpy()
    largest = float(np.abs(values).max()) or 1.0
    labels = [visible_token(token) for token in view.tokens] if len(view.tokens) <= _LABELLED else []
    left = _LABELS if labels else 0.0
    across = min(_ACROSS, len(view.names))
    down = -(-len(view.names) // across)
    width, height = left + across * (_SIDE + _GAP), down * (_SIDE + _TITLE + _GAP)
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}">']
    for i, (name, head) in enumerate(zip(view.names, values / largest, strict=True)):
        colours = np.asarray(DIVERGING((head + 1) / 2) if view.signed else SEQUENTIAL(head))
        on_paper = colours[..., :3] * colours[..., 3:] + (1 - colours[..., 3:])
        file = io.BytesIO()
        imsave(file, (on_paper * 255).round().astype(np.uint8), format="png", metadata={"Software": ""})
        pixels = base64.b64encode(file.getvalue()).decode("ascii")
        x = left + (i % across) * (_SIDE + _GAP)
        y = (i // across) * (_SIDE + _TITLE + _GAP) + _TITLE
        parts.append(_text(name, x, y - 4, 9, "start"))
        parts.append(
            f'<image x="{x:g}" y="{y:g}" width="{_SIDE:g}" height="{_SIDE:g}" preserveAspectRatio="none" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{pixels}"/>'
            f'<rect x="{x:g}" y="{y:g}" width="{_SIDE:g}" height="{_SIDE:g}" fill="none" stroke="#999" stroke-width="0.5"/>'
        )
        if i % across == 0:
            step = _SIDE / max(1, len(labels))
            parts += [
                _text(label[:_LONGEST], left - 3, y + step * (k + 0.5) + 2, min(7, 0.9 * step), "end")
                for k, label in enumerate(labels)
            ]
    return "".join([*parts, "</svg>"])


def _text(text: str, x: float | int, y: float | int, size: float | int, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-size="{size:.1f}" '
        f'font-family="sans-serif">{escape(visible(text))}</text>'
    )


def swatch(look: Look, prefix: str, marker: bool = False) -> str:
    """Draw a small line (or marker, for dots) as a method is drawn, for legends in the page; ids as `inline_svg`."""
    figure, axes = new_figure(1, 1, width=0.42, height=0.16)
    ax = axes[0, 0]
    ax.axis("off")
    if marker:
        ax.scatter([0.5], [0.5], s=26, color=look.line["color"], marker=look.marker)
    else:
        ax.plot([0, 0.5, 1], [0, 0, 0], marker="o", markersize=3, markevery=[1], linewidth=1.6, **look.line)
    return _page_svg(svg(figure), prefix, 'aria-hidden="true" class="swatch"')


def inline_svg(figure: Figure, prefix: str, title: str, description: str) -> str:
    """The figure as an accessible <svg>, safe beside others of its kind.

    Args:
        prefix: starts every id in it; unique in the page, letters, digits and hyphens.
        title, description: plain text, escaped here.

    Raises:
        ValueError: a prefix that is no good as an id.
    """
    return page_svg(svg(figure), prefix, title, description)


def page_svg(text: str, prefix: str, title: str, description: str) -> str:
    """Give an SVG of our own as `inline_svg` gives a figure."""
    if not re.fullmatch(r"[A-Za-z][\w-]*", prefix):
        raise ValueError(f"an id prefix takes letters, digits and hyphens, got {quoted(prefix)}")
    described = f" {prefix}-desc" if description else ""
    attributes = f'role="img" aria-labelledby="{prefix}-title{described}"'
    inside = f'<title id="{prefix}-title">{escape(visible(title))}</title>'
    if description:
        inside += f'<desc id="{prefix}-desc">{escape(visible(description))}</desc>'
    return _page_svg(text, prefix, attributes, inside)


def _page_svg(text: str, prefix: str, attributes: str, inside: str = "") -> str:
    text = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>|<style.*?</style>", "", text, flags=re.DOTALL)
    # Ids are ours alone, and only those that something refers to remain: matplotlib names every group, in every figure alike.
    used = set(re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', text))
    names = {name for pair in used for name in pair if name}
    text = re.sub(r' id="([^"]+)"', lambda m: f' id="{prefix}-{m[1]}"' if m[1] in names else "", text)
    text = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", text)
    text = re.sub(r"(font:[^;\"]*?\d(?:\.\d+)?px) [^;\"]+", rf"\1 {FONT_STACK}", text)
    text = re.sub(r"font-family: [^;\"]+", f"font-family: {FONT_STACK}", text)
    # A hundredth of a point is finer than any screen; inside tags only, because labels are numbers too.
    text = re.sub(r"<[^>]*>", lambda m: re.sub(r"(\d\.\d{2})\d+", r"\1", m[0]), text).replace("xlink:href", "href")
    if (size := re.search(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', text)) is None:
        raise ValueError("matplotlib's SVG has no viewBox from 0 0; its size is not known")
    width, height = size.groups()
    # What matplotlib sets for every element by a style sheet, which in a page would reach every other picture.
    line_ends = "stroke-linejoin: round; stroke-linecap: butt"
    head = f'<svg viewBox="0 0 {width} {height}" width="{width}pt" height="{height}pt" style="{line_ends}" {attributes}>'
    return re.sub(r"\n\s*", "\n", head + inside + text[text.index(">") + 1 :].strip())
