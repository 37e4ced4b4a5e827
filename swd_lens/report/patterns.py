"""pattern_grid: attention patterns side by side as one SVG, for paper and wherever no script runs.

1. A head is a picture of one pixel per (destination, source), in the house's colours, enlarged without blur.
2. Heads stand in rows of four; where the tokens have room they are written beside the first of each row.

Drawn by hand: matplotlib takes half a second for sixteen small axes, and a report has hundreds.
"""

import base64
import io
from html import escape

import numpy as np
from matplotlib.image import imsave

from swd_lens.base.figures import DIVERGING, INK, SEQUENTIAL
from swd_lens.base.panels import visible
from swd_lens.study.section import AttentionView

_ACROSS = 4
_SIDE, _GAP, _TITLE = 120.0, 12.0, 14.0  # of one head, in points
_LABELS, _LABELLED = 72.0, 24  # room for token labels, and how many there may be
_LONGEST = 12  # characters of a label


def pattern_grid(view: AttentionView) -> str:
    """All heads of a view, destinations down, sources across: an <svg> element without title, see `plots.page_svg`."""
    values = view.tensor().numpy()
    largest = float(np.abs(values).max()) or 1.0
    labels = [visible(token) for token in view.tokens] if len(view.tokens) <= _LABELLED else []
    left = _LABELS if labels else 0.0
    across = min(_ACROSS, len(view.names))
    down = -(-len(view.names) // across)
    width, height = left + across * (_SIDE + _GAP), down * (_SIDE + _TITLE + _GAP)
    parts = [f'<svg viewBox="0 0 {width:g} {height:g}">']
    for place, (name, head) in enumerate(zip(view.names, values, strict=True)):
        x = left + (place % across) * (_SIDE + _GAP)
        y = (place // across) * (_SIDE + _TITLE + _GAP) + _TITLE
        parts.append(_text(name, x, y - 4, 9, "start"))
        parts.append(
            f'<image x="{x:g}" y="{y:g}" width="{_SIDE:g}" height="{_SIDE:g}" preserveAspectRatio="none" '
            f'style="image-rendering: pixelated" href="data:image/png;base64,{_pixels(head / largest, view.signed)}"/>'
            f'<rect x="{x:g}" y="{y:g}" width="{_SIDE:g}" height="{_SIDE:g}" fill="none" stroke="#999" stroke-width="0.5"/>'
        )
        if place % across == 0:
            step = _SIDE / max(1, len(labels))
            parts += [
                _text(label[:_LONGEST], left - 3, y + step * (i + 0.5) + 2, min(7, 0.9 * step), "end")
                for i, label in enumerate(labels)
            ]
    return "".join([*parts, "</svg>"])


def _text(text: str, x: float | int, y: float | int, size: float | int, anchor: str) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" fill="{INK}" text-anchor="{anchor}" font-size="{size:.1f}" '
        f'font-family="sans-serif">{escape(text)}</text>'
    )


def _pixels(values: np.ndarray, signed: bool) -> str:
    """Values in [-1, 1] (or [0, 1]) as a PNG in base64."""
    colours = DIVERGING((values + 1) / 2) if signed else SEQUENTIAL(values)
    file = io.BytesIO()
    pixels = (np.asarray(colours)[..., :3] * 255).round().astype(np.uint8)
    imsave(file, pixels, format="png", metadata={"Software": ""})
    return base64.b64encode(file.getvalue()).decode("ascii")
