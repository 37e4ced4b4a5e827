"""One unit: what is known of it, and how it is drawn.

1. A `UnitCard` is a unit in brief, as a study keeps a task's best units: contexts, edges, direct logit effect, ranks. A
   `UnitProfile` adds what an audit knows: statistics of z, edges by name, neighbours, a label.
2. `unit_html` draws either as HTML that needs no script, for notebooks, dashboards and reports alike (style: unit.css). Within a
   unit all contexts share one colour scale, |z| over the largest |z| shown.
3. Whatever comes from tokens, labels and names is escaped; invisible characters are made visible.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.edges import Edges
from swd_lens.analysis.audit.labels import UnitLabel
from swd_lens.analysis.audit.logits import LogitEffect
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.base.figures import INK, PALETTE, literal, new_figure
from swd_lens.base.panels import visible
from swd_lens.hosts.sites import WRITES_RESIDUAL, parse_unit, split_name

Link = Callable[[str], "str | None"]  # unit -> where its page is, if there is one

FAINT = 0.08  # below this share of the largest |z| a colour could not be told from none
_WIDTH, _HEIGHT, _FOOT = 320, 84, 16  # of the histogram, in pixels


@dataclass(frozen=True)
class TaskRank:
    """What a unit is worth to a task: score in logits of margin, rank among all scored units (1 is the best of `of`).

    `of` is None where it was not kept.
    """

    score: float
    rank: int
    of: int | None = None


@dataclass(frozen=True, repr=False, kw_only=True)
class UnitCard:
    """A unit in brief.

    Attributes:
        unit: its name, "blocks.2.mlp_out/5".
        contexts: the places of largest |z|, largest first.
        reads, writes: its edges; None where the unit source shows none.
        logits: direct effect of the write vector; None where the site does not write to the residual stream
            (or the host has no next-token logits).
        tasks: task -> score and rank.
    """

    unit: str
    contexts: tuple[Context, ...]
    reads: Edges | None
    writes: Edges | None
    logits: LogitEffect | None
    tasks: Mapping[str, TaskRank]

    @property
    def site(self) -> str:
        return parse_unit(self.unit)[0]

    @property
    def index(self) -> int:
        return parse_unit(self.unit)[1]

    def table(self) -> pd.DataFrame:
        """The contexts: z at the peak, and the text with the peak marked."""
        rows = [{"z": c.z[c.peak], "context": c.text(("<<", ">>"))} for c in self.contexts]
        return pd.DataFrame(rows, columns=["z", "context"])

    def __repr__(self) -> str:
        tasks = "".join(f", {task} #{rank.rank}" for task, rank in self.tasks.items())
        first = f"; fires most on {self.contexts[0].text(('<<', '>>'))!r}" if self.contexts else "; never fires"
        return f"{type(self).__name__}({self.unit}{self._in_brief()}{tasks}{first})"

    def _in_brief(self) -> str:
        return "" if self.reads is None or self.writes is None else f", {self.reads.n} + {self.writes.n} edges"

    def _repr_html_(self) -> str:
        return f"<style>{unit_style()}</style>{unit_html(self)}"


@dataclass(frozen=True, repr=False, eq=False, kw_only=True)
class UnitProfile(UnitCard):
    """One unit, looked at from all sides.

    Attributes:
        unit, contexts, reads, writes, logits, tasks: see `UnitCard`.
        n_tokens: tokens that the statistics are over.
        mean, sd, smallest, largest: of z.
        density: share of tokens with |z| beyond a tenth of its largest.
        histogram: tokens by z.
        similar: (unit, cosine) of the nearest write vectors of its site.
        coactive: (unit, correlation of z over the text), strongest first, of its site.
        label: what somebody called it.
        settings: what all this depends on.
    """

    n_tokens: int
    mean: float
    sd: float
    smallest: float
    largest: float
    density: float
    histogram: Histogram
    similar: tuple[tuple[str, float], ...]
    coactive: tuple[tuple[str, float], ...]
    label: UnitLabel | None
    settings: Mapping[str, Any]

    @property
    def peak(self) -> float:
        """The largest |z|."""
        return max(abs(self.smallest), abs(self.largest))

    def plot(self):
        """The histogram of z, tokens on a logarithmic scale; a matplotlib Figure."""
        figure, axes = new_figure(width=5.0, height=2.6)
        ax, counts = axes[0, 0], self.histogram.counts
        edges = self.histogram.edges
        used = counts.nonzero()[:, 0]
        low, high = (int(used[0]), int(used[-1])) if len(used) else (0, len(counts) - 1)
        for sign, colour in ((-1, PALETTE[0]), (1, PALETTE[1])):
            bins = [i for i in range(low, high + 1) if (i < len(counts) // 2) == (sign < 0)]
            ax.bar(edges[bins], counts[bins], width=self.histogram.width, align="edge", color=colour, linewidth=0)
        ax.axvline(0.0, color=INK, linewidth=0.6)
        ax.set_yscale("log")
        ax.set_ylim(bottom=0.7)
        ax.set_xlabel("z", fontsize=8)
        ax.set_ylabel("tokens (log scale)", fontsize=8)
        title = self.unit if self.label is None else f"{self.unit}: {self.label.label}"
        ax.set_title(literal(title), fontsize=9, color=INK)
        return figure

    def _in_brief(self) -> str:
        label = "" if self.label is None else f" {self.label.label!r}"
        return f"{label}{super()._in_brief()}, z {self.smallest:.3g} to {self.largest:.3g}"


# ------------------------------------------------------------------ drawing


@cache
def unit_style() -> str:
    """The style sheet of `unit_html`, for a page to hold once."""
    return Path(__file__).with_name("unit.css").read_text(encoding="utf-8")


def unit_html(unit: UnitCard, link: Link = lambda unit: None, *, level: int = 2, legends: bool = True) -> str:
    """One unit as an <article>: a card's facts, and of a profile all the rest.

    Args:
        link: says where other units' pages are.
        level: of the unit's heading among those of the page, 1 to 4.
        legends: whether colours and columns are explained; a page that has explained them for all its units leaves it out.
    """
    profile = unit if isinstance(unit, UnitProfile) else None
    label = profile and profile.label
    heading = f"<code>{escape(unit.unit)}</code>"
    heading += f' <span class="label">{_plain(label.label)}</span>' if label else ""
    remark = " · ".join(filter(None, (label.note, label.author and f"by {label.author}"))) if label else ""
    pieces = [
        _heading(level, "name", heading),
        f'<p class="soft">{_plain(remark)}</p>' if remark else "",
        f'<p class="soft">{_facts(unit)}</p>',
        _tasks(unit),
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
            _neighbours(profile, link, level + 1),
        ]
    return f'<article class="swd-unit">{"".join(pieces)}</article>'


def words_html(context: Context, largest: float, *, neighbourhood: int | None = None) -> str:
    """The tokens of a context coloured by z, the peak outlined; `neighbourhood` cuts it to so many tokens on either side."""
    pieces: list[str] = []
    start = 0 if neighbourhood is None else max(0, context.peak - neighbourhood)
    stop = len(context.tokens) if neighbourhood is None else context.peak + neighbourhood + 1
    for i, (token, z) in enumerate(zip(context.tokens[start:stop], context.z[start:stop], strict=True), start):
        lead, word = running_token(token)
        pieces.append(lead if i > start else "")
        strength = abs(z) / largest if largest > 0 else 0.0
        colour = "" if strength < FAINT else f' class="{"p" if z > 0 else "n"}" style="--s:{strength:.2f}"'
        tag = "mark" if i == context.peak else "span"
        title = f' title="z = {number(z)}"' if colour else ""
        pieces.append(f"<{tag}{colour}{title}>{escape(word)}</{tag}>" if colour or tag == "mark" else escape(word))
    return "".join(pieces)


def running_token(token: str) -> tuple[str, str]:
    """A token within a text: (the space before a word, the word), with all else that is invisible shown."""
    return (" ", visible(token[1:])) if token[:1] == " " and token[1:].strip() else ("", visible(token))


def histogram_svg(profile: UnitProfile) -> str:
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
    for colour, negative in (("0,114,178", True), ("213,94,0", False)):
        path = "".join(
            f"M{(i - low) * scale:.1f} {base}v{-size * (base - 4):.1f}h{scale:.2f}V{base}z"
            for i, size in bars
            if (i < 0) == negative
        )
        paths += f'<path fill="rgb({colour})" d="{path}"/>'
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


def printable(text: str) -> str:
    """Text of a user: nothing in it is invisible but its spaces, or turns what follows around. Not escaped."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _plain(text: str) -> str:
    return escape(printable(text))


def _heading(level: int, kind: str, html: str) -> str:
    return f'<h{level} class="{kind}">{html}</h{level}>'


def _facts(unit: UnitCard) -> str:
    facts = [f"{unit.reads.n:,} read edges"] if unit.reads else []
    facts += [f"{unit.writes.n:,} write edges"] if unit.writes else []
    if isinstance(unit, UnitProfile):
        facts += [f"largest |z| {number(unit.peak, signed=False)}", f"{unit.n_tokens:,} tokens of text"]
    return " · ".join(facts)


def _tasks(unit: UnitCard) -> str:
    items = []
    for task, rank in unit.tasks.items():
        score = f"score {number(rank.score)} logits" if rank.score else "score 0: it contributes nothing to this margin"
        of = "" if rank.of is None else f" of {rank.of:,}"
        items.append(f"<b>{_plain(task.replace('_', ' '))}</b> rank {rank.rank:,}{of}, {score}")
    return f"<p>{'; '.join(items)}</p>" if items else ""


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


def _logits(unit: UnitCard, level: int, legend: bool) -> str:
    heading, effect = _heading(level, "part", "Direct effect on the logits"), unit.logits
    if effect is None:
        inside = split_name(unit.site)[1] not in WRITES_RESIDUAL
        why = (
            "this site does not write to the residual stream" if inside else "this host or these units do not show one"
        )
        return f'{heading}<p class="soft">None: {why}.</p>'
    largest = max((abs(v) for _, v in (*effect.promoted, *effect.suppressed)), default=0.0)
    sides = "".join(
        f"<div>{_heading(level + 1, 'side', name)}{_bars([(visible(t), v) for t, v in tokens], largest)}</div>"
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


def _neighbours(profile: UnitProfile, link: Link, level: int) -> str:
    columns = [
        f"<div>{_heading(level + 1, 'side', title)}{_bars(units, 1.0, link=link)}</div>"
        for title, units in (
            ("write vector alike (cosine)", profile.similar),
            ("active together (correlation of z)", profile.coactive),
        )
        if units
    ]
    heading = _heading(level, "part", f"Neighbours in {escape(profile.site)}")
    return f'{heading}<div class="parts">{"".join(columns)}</div>' if columns else ""


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
        target, shown = link(name), f"<code>{escape(name)}</code>"
        shown = f'<a href="{escape(target)}">{shown}</a>' if target else shown
        width = 100 * min(1.0, abs(value) / largest) if largest > 0 else 0.0
        bar = f'<i class="{colour or ("p" if value > 0 else "n")}" style="width:{width:.0f}%"></i>'
        items.append(f'<li>{bar}{shown}<span class="num">{form(value)}</span></li>')
    return f'<ol class="bars">{"".join(items)}</ol>'
