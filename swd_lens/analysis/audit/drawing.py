"""How units are drawn: one of them as HTML, and a task's best ones as a figure.

1. `unit_html` draws a `UnitCard` or `UnitProfile`, which it knows by their attributes, as HTML that needs no script, for
   notebooks, dashboards and reports alike (style: unit.css). Within a unit all contexts share one colour scale, |z| over the
   largest |z| shown. Whatever comes from tokens, labels and names is escaped; invisible characters are made visible.
2. `draw_paths` draws units layer by layer, between what they read and the residual stream they write to: of an audit the best
   ones of a task, and the counterpart of the paper's figure of high-attribution paths (graph/paths.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.vectors import Edges
from swd_lens.base.errors import visible, visible_token
from swd_lens.base.figures import INK, INK_ON_FILL, NEGATIVE, POSITIVE, SIGN_STYLE, literal, new_figure
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name

Link = Callable[[str], "str | None"]  # unit -> where its page is, if there is one

FAINT = 0.08  # below this share of the largest |z| a colour could not be told from none
_WIDTH, _HEIGHT, _FOOT = 320, 84, 16  # of the histogram, in pixels
_INPUT_X, _UNIT_X, _STREAM_X = 0.6, 3.1, 6.55  # inches, of `draw_paths`
_UNIT_WIDTH, _UNIT_STEP = 2.5, 0.78
_LONGEST = 24  # characters of a label
_CENTRED: Mapping[str, str] = {"ha": "center", "va": "center"}


# ------------------------------------------------------------------ one unit


@cache
def unit_style() -> str:
    """The style sheet of `unit_html`, for a page to hold once; the colours of signs are the page's, too."""
    return f":root, .swd-unit {{ {SIGN_STYLE}; }}\n{Path(__file__).with_name('unit.css').read_text(encoding='utf-8')}"


def unit_html(unit: Any, link: Link = lambda unit: None, *, level: int = 2, legends: bool = True) -> str:
    """One unit as an <article>: a card's facts, and of a profile all the rest.

    Args:
        unit: a UnitCard or UnitProfile.
        link: says where other units' pages are.
        level: of the unit's heading among those of the page, 1 to 4.
        legends: whether colours and columns are explained; a page that has explained them for all its units leaves it out.
    """
    profile = unit if hasattr(unit, "histogram") else None
    label = profile and profile.label
    heading = f"<code>{_plain(unit.unit)}</code>"
    heading += f' <span class="label">{_plain(label.label)}</span>' if label else ""
    remark = " · ".join(filter(None, (label.note, label.author and f"by {label.author}"))) if label else ""
    facts = [f"{edges.n:,} {verb} edges" for verb, edges in (("read", unit.reads), ("write", unit.writes)) if edges]
    if profile is not None:
        facts += [f"largest |z| {number(unit.peak, signed=False)}", f"{unit.n_tokens:,} tokens of text"]
    items = []
    for task, rank in unit.tasks.items():
        score = f"score {number(rank.score)} logits" if rank.score else "score 0: it contributes nothing to this margin"
        of = "" if rank.of is None else f" of {rank.of:,}"
        items.append(f"<b>{_plain(task.replace('_', ' '))}</b> rank {rank.rank:,}{of}, {score}")
    pieces = [
        _heading(level, "name", heading),
        f'<p class="soft">{_plain(remark)}</p>' if remark else "",
        f'<p class="soft">{" · ".join(facts)}</p>',
        f"<p>{'; '.join(items)}</p>" if items else "",
    ]
    effect = _logits(unit, level + 1, legends)
    if profile is None:
        pieces += [effect, _contexts(unit.contexts, level + 1, legends)]
    else:
        histogram = _heading(level + 1, "part", "How often it fires") + histogram_svg(profile)
        pieces += [
            f'<div class="parts"><section>{histogram}</section><section>{effect}</section></div>',
            _contexts(unit.contexts, level + 1, legends),
            f'<div class="parts">{_edges("reads", unit.reads, level + 1)}{_edges("writes", unit.writes, level + 1)}</div>',
        ]
        neighbours = "".join(
            f"<div>{_heading(level + 2, 'side', title)}{_bars(units, 1.0, link=link)}</div>"
            for title, units in (
                ("write vector alike (cosine)", profile.similar),
                ("active together (correlation of z)", profile.coactive),
            )
            if units
        )
        if neighbours:
            heading = _heading(level + 1, "part", f"Neighbours in {_plain(profile.site)}")
            pieces.append(f'{heading}<div class="parts">{neighbours}</div>')
    return f'<article class="swd-unit">{"".join(pieces)}</article>'


def words_html(context: Context, largest: float) -> str:
    """The tokens of a context coloured by z over the largest |z|, the peak outlined."""
    pieces: list[str] = []
    for i, (token, z) in enumerate(zip(context.tokens, context.z, strict=True)):
        lead, word = running_token(token)
        pieces.append(lead if i else "")
        strength = abs(z) / largest if largest > 0 else 0.0
        colour = "" if strength < FAINT else f' class="{"p" if z > 0 else "n"}" style="--s:{strength:.2f}"'
        tag = "mark" if i == context.peak else "span"
        title = f' title="z = {number(z)}"' if colour else ""
        pieces.append(f"<{tag}{colour}{title}>{escape(word)}</{tag}>" if colour or tag == "mark" else escape(word))
    return "".join(pieces)


def running_token(token: str) -> tuple[str, str]:
    """A token within a text: (the space before a word, the word), with all else that is invisible shown."""
    return (" ", visible_token(token[1:])) if token[:1] == " " and token[1:].strip() else ("", visible_token(token))


def histogram_svg(profile: Any) -> str:
    """Tokens by z as bars, on a logarithmic scale; in words for those who hear it."""
    p = profile
    words = (
        f"z on {p.n_tokens:,} tokens: from {number(p.smallest)} to {number(p.largest)}, mean {number(p.mean)}, standard "
        f"deviation {number(p.sd, signed=False)}; beyond a tenth of its largest on {p.density:.1%} of tokens"
    )
    if p.peak == 0:
        return '<p class="soft">z is 0 on every token.</p>'
    side, counts = len(p.histogram.counts) // 2, p.histogram.counts.tolist()
    most = math.log1p(max(counts))
    # (bin counted from zero, height from 0 to 1) of each that holds tokens; the range of bins has zero in it.
    bars = [(i - side, math.log1p(count) / most) for i, count in enumerate(counts) if count]
    low, high = min(0, bars[0][0]), max(0, bars[-1][0] + 1)
    scale, base, foot = _WIDTH / (high - low), _HEIGHT - _FOOT, _HEIGHT - 3
    paths = ""
    for colour, negative in ((NEGATIVE, True), (POSITIVE, False)):
        path = "".join(
            f"M{(i - low) * scale:.1f} {base}v{-size * (base - 4):.1f}h{scale:.2f}V{base}z"
            for i, size in bars
            if (i < 0) == negative
        )
        paths += f'<path fill="{colour}" d="{path}"/>'
    zero = max(0.0, min(_WIDTH, -low * scale))
    left, right = number(low * p.histogram.width), number(high * p.histogram.width)
    middle = f'<text x="{zero:.1f}" y="{foot}" text-anchor="middle">0</text>' if 30 < zero < _WIDTH - 30 else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(words)}">{paths}'
        f'<path stroke="currentColor" stroke-width=".8" d="M0 {base}H{_WIDTH}M{zero:.1f} 2V{base}"/>'
        f'<text x="0" y="{foot}">{left}</text>{middle}<text x="{_WIDTH}" y="{foot}" text-anchor="end">{right}</text></svg>'
        f'<p class="soft">Tokens by z; heights on a logarithmic scale. {escape(words)}.</p>'
    )


def number(value: float, *, signed: bool = True) -> str:
    """Three digits, a sign, and a true minus; a dash for what is undefined."""
    if not math.isfinite(value):
        return "–"
    text = f"{value:+.3g}" if signed and value else f"{value:.3g}"
    return text.replace("-", "\u2212")


def _plain(text: str) -> str:
    """Text of a user or of names, in HTML."""
    return escape(visible(text))


def _heading(level: int, kind: str, html: str) -> str:
    return f'<h{level} class="{kind}">{html}</h{level}>'


def _contexts(contexts: Sequence[Context], level: int, legend: bool) -> str:
    heading = _heading(level, "part", "Fires most on")
    if not contexts:
        return f"{heading}<p>It is 0 on every token of the text.</p>"
    largest = max(abs(z) for context in contexts for z in context.z)
    scale = f"Full colour: |z| = {number(largest, signed=False)}."
    if legend:
        colours = "Orange with a solid line: positive. Blue with a dotted line: negative."
        scale = f"Left, z at the outlined token. {colours} {scale}"
    rows = "".join(
        f'<li><span class="num">{number(c.z[c.peak])}</span><span class="words">{words_html(c, largest)}</span></li>'
        for c in contexts
    )
    return f'{heading}<p class="soft">{scale}</p><ol class="contexts">{rows}</ol>'


def _logits(unit: Any, level: int, legend: bool) -> str:
    heading = _heading(level, "part", "Direct effect on the logits, at the final norm's mean scale")
    effect = unit.logits
    if effect is None:
        inside = split_name(unit.site)[1] not in WRITES_RESIDUAL
        why = "this site does not write to the residual stream" if inside else "this host or these units do not show one"
        return f'{heading}<p class="soft">None: {why}.</p>'
    largest = max((abs(v) for _, v in (*effect.promoted, *effect.suppressed)), default=0.0)
    sides = "".join(
        f"<div>{_heading(level + 1, 'side', name)}{_bars([(visible_token(t), v) for t, v in tokens], largest)}</div>"
        for name, tokens in (("promotes", effect.promoted), ("suppresses", effect.suppressed))
    )
    note = '<p class="soft">Centred logits per unit of z; where z is negative the sides swap.</p>' if legend else ""
    return f'{heading}<div class="two">{sides}</div>{note}'


def _edges(verb: str, edges: Edges | None, level: int) -> str:
    heading = _heading(level, "part", f"What it {verb}")
    if edges is None:
        return f"<section>{heading}<p class='soft'>This source of units does not show it.</p></section>"
    largest = max((abs(w) for _, w in edges.strongest), default=0.0)
    more = f", the strongest {len(edges.strongest)}" if edges.n > len(edges.strongest) else ""
    body = f"<div>{_heading(level + 1, 'side', f'{edges.n:,} edges{more}')}{_bars(edges.strongest, largest)}</div>"
    if edges.heads:
        shares = _bars(list(edges.heads.items())[:8], 1.0, form=lambda share: f"{share:.0%}", colour="h")
        by_head = f"<div>{_heading(level + 1, 'side', 'share of squared norm')}{shares}</div>"
        body = f"<div class=two>{body}{by_head}</div>"
    return f"<section>{heading}{body}</section>"


def _bars(
    rows: Sequence[tuple[str, float]],
    largest: float,
    *,
    form: Callable[[float], str] = number,
    colour: str = "",
    link: Link = lambda unit: None,
) -> str:
    """Names and numbers, a bar behind each."""
    items = []
    for name, value in rows:
        target, text = link(name), f"<code>{_plain(name)}</code>"
        text = f'<a href="{escape(target)}">{text}</a>' if target else text
        width = 100 * min(1.0, abs(value) / largest) if largest > 0 else 0.0
        bar = f'<i class="{colour or ("p" if value > 0 else "n")}" style="width:{width:.0f}%"></i>'
        items.append(f'<li>{bar}{text}<span class="num">{form(value)}</span></li>')
    return f'<ol class="bars">{"".join(items)}</ol>'


# ------------------------------------------------------------------ a task's best units


@dataclass(frozen=True)
class DrawnUnit:
    """A unit's box in `draw_paths`: plain text or formulas of matplotlib, escaped by whoever makes it."""

    name: str  # in the box
    under: str  # below the name
    fill: Any = "white"
    looks: Mapping[str, str] = field(default_factory=dict)  # of the name's letters
    reads: str = ""  # beside the arrow in, and the arrow out
    writes: str = ""
    into_stream: bool = True  # whether it writes to the residual stream


def draw_paths(layers: Mapping[int, tuple[str, Sequence[DrawnUnit]]], title: str, words: str) -> Figure:
    """Draw units as they compute: a layer's input is read, and what they write adds up in the residual stream.

    Args:
        layers: layer -> the words below its input, and its units from the top; the first layer stands at the bottom.
        words: what boxes and arrows mean, below the figure.
    """
    band = max(2, *(len(units) for _, units in layers.values())) * _UNIT_STEP + 0.42 if layers else 2 * _UNIT_STEP
    height = band * max(1, len(layers)) + 0.95
    figure, axes = new_figure(width=7.4, height=height + 1.0)
    ax = axes[0, 0]
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, 7.4)
    ax.set_ylim(-0.95, height - 0.4)
    if any(unit.into_stream for _, units in layers.values() for unit in units):
        ax.plot([_STREAM_X, _STREAM_X], [-0.35, height - 0.55], color=INK, linewidth=3.2, solid_capstyle="round", zorder=1)
        _arrow(ax, (_STREAM_X, height - 0.8), (_STREAM_X, height - 0.42), 3.2, head=16)
        ax.text(_STREAM_X + 0.16, -0.3, "residual\nstream", fontsize=8, color=INK, va="bottom")
    ax.text(0.17, -0.62, words, fontsize=7, color=INK, va="top")
    left, right = _UNIT_X - _UNIT_WIDTH / 2, _UNIT_X + _UNIT_WIDTH / 2
    for row, (layer, (inputs, units)) in enumerate(layers.items()):
        # The layer's input, its units, and the sum of what they write, around a height.
        middle = row * band + band / 2
        _box(ax, (_INPUT_X, middle), 0.86, 0.62, "#eef4fa")
        ax.text(_INPUT_X, middle, f"$h_{{{layer}}}$", fontsize=12, color=INK_ON_FILL, zorder=5, **_CENTRED)
        ax.text(_INPUT_X, middle - 0.42, inputs, fontsize=7, ha="center", va="top", color=INK)
        if any(unit.into_stream for unit in units):
            ax.add_patch(Circle((_STREAM_X, middle), 0.17, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=4))
            ax.text(_STREAM_X, middle, "+", fontsize=12, color=INK_ON_FILL, zorder=5, **_CENTRED)
        for i, unit in enumerate(units):
            y = middle + _UNIT_STEP * ((len(units) - 1) / 2 - i)
            above = y >= middle
            _arrow(ax, (_INPUT_X + 0.45, middle), (left, y), 1.6)
            if unit.into_stream:
                _arrow(ax, (right, y), (_STREAM_X - 0.19, middle), 1.6)
            _box(ax, (_UNIT_X, y), _UNIT_WIDTH, 0.58, unit.fill)
            ax.text(_UNIT_X, y + 0.11, unit.name, fontsize=9, color=INK_ON_FILL, zorder=5, **_CENTRED, **unit.looks)
            ax.text(_UNIT_X, y - 0.15, unit.under, fontsize=6.5, color=INK_ON_FILL, zorder=5, **_CENTRED)
            ax.text(right + 0.14, y + (0.13 if above else -0.15), unit.writes, fontsize=7, color=INK, va="center")
            ax.text(left - 0.1, y + (0.2 if above else -0.2), unit.reads, fontsize=7, color=INK, va="center", ha="right")
    ax.set_title(literal(title), fontsize=10, color=INK, loc="left")
    return figure


def _box(ax: Any, middle: tuple[float, float], width: float, height: float, fill: Any) -> None:
    corner, style = (middle[0] - width / 2, middle[1] - height / 2), "round,pad=0,rounding_size=0.1"
    box = FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor=INK, linewidth=1.0, zorder=3)
    ax.add_patch(box)


def _arrow(ax: Any, start: tuple[float, float], end: tuple[float, float], width: float, head: int = 10) -> None:
    looks: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": head, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=INK, linewidth=width, zorder=2, **looks))


def shortened(label: str) -> str:
    """A label as far as there is room for it in a box."""
    return literal(label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…")
