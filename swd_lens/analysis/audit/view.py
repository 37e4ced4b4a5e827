"""unit_html: a UnitProfile as HTML that needs no script, for notebooks and for dashboard pages alike.

1. Every class lies under .swd-unit, so that STYLE changes nothing else on a page. Colours are the report's: negative z blue
   with a dotted line, positive orange with a solid one; both keep their order in grey.
2. Within a unit all contexts share one colour scale, |z| over the largest |z| shown.
3. Whatever comes from tokens, labels and names is escaped; invisible characters are made visible.
"""

import math
from collections.abc import Callable, Sequence
from html import escape
from typing import Any

from swd_lens.analysis.audit.contexts import Context
from swd_lens.analysis.audit.edges import Edges
from swd_lens.analysis.audit.profile import UnitProfile
from swd_lens.analysis.audit.statistics import Histogram
from swd_lens.base.panels import visible
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name

Link = Callable[[str], "str | None"]  # unit -> where its page is, if there is one

FAINT = 0.08  # below this share of the largest |z| a colour could not be told from none
_WIDTH, _HEIGHT, _FOOT = 320, 84, 16

STYLE = """
.swd-unit { --plus: 213, 94, 0; --minus: 0, 114, 178; line-height: 1.5; max-width: 72rem; }
.swd-unit h2, .swd-unit h3, .swd-unit h4 { margin: 0; border: 0; padding: 0; overflow-wrap: anywhere;
  line-height: 1.3; }
.swd-unit h2 { font-size: 1.35rem; } .swd-unit h3 { font-size: .95rem; margin: 1.1rem 0 .3rem; }
.swd-unit h4 { font-size: .82rem; font-weight: 600; }
.swd-unit p { margin: .2rem 0 .5rem; max-width: 75ch; overflow-wrap: anywhere; }
.swd-unit .soft { opacity: .75; font-size: .86rem; }
.swd-unit .label { font-weight: 600; background: rgba(0, 158, 115, .18); border-radius: 4px; padding: .05em .45em; }
.swd-unit .parts { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(17rem, 100%), 1fr));
  gap: 0 2rem; }
.swd-unit .parts > * { min-width: 0; }
.swd-unit ol, .swd-unit ul { list-style: none; margin: 0; padding: 0; font-size: .84rem; }
.swd-unit li { max-width: none; margin: 0; }
.swd-unit svg { width: 100%; max-width: 26rem; height: auto; display: block; }
.swd-unit svg text { font: 11px system-ui, sans-serif; fill: currentColor; }
.swd-unit .two { display: grid; grid-template-columns: 1fr 1fr; gap: 0 1.2rem; }
.swd-unit .two > * { min-width: 0; }
.swd-unit .bars li { position: relative; display: flex; justify-content: space-between; gap: .5rem;
  padding: .08rem .3rem; margin: 2px 0; isolation: isolate; min-width: 0; }
.swd-unit .bars i { position: absolute; inset: 0 auto 0 0; z-index: -1; border-radius: 3px; }
.swd-unit i.p { background: rgba(var(--plus), .32); } .swd-unit i.n { background: rgba(var(--minus), .34); }
.swd-unit i.h { background: rgba(128, 128, 128, .25); }
.swd-unit .bars code, .swd-unit .bars a { overflow: hidden; text-overflow: ellipsis; white-space: pre; }
.swd-unit code { font: .95em ui-monospace, "SF Mono", Menlo, Consolas, monospace; background: none; padding: 0;
  color: inherit; }
.swd-unit .num { font-variant-numeric: tabular-nums; white-space: nowrap; }
.swd-unit .contexts li { display: grid; grid-template-columns: 3.6rem minmax(0, 1fr); gap: .6rem;
  padding: .28rem 0; border-top: 1px solid rgba(128, 128, 128, .3); }
.swd-unit .contexts .num { text-align: right; font-weight: 600; }
.swd-unit .words { white-space: pre-wrap; overflow-wrap: anywhere; line-height: 1.65; }
.swd-unit .words span, .swd-unit .words mark { unicode-bidi: isolate; border-radius: 2px; padding: .1em 0; --s: 0;
  color: inherit; background: none; }
.swd-unit .words .p { background: rgba(var(--plus), calc(var(--s) * .72));
  border-bottom: 2px solid rgba(var(--plus), var(--s)); }
.swd-unit .words .n { background: rgba(var(--minus), calc(var(--s) * .72));
  border-bottom: 2px dotted rgba(var(--minus), var(--s)); }
.swd-unit .words mark { outline: 1.5px solid currentColor; outline-offset: 1px; }
.swd-unit a { color: inherit; }
@media print { .swd-unit * { print-color-adjust: exact; -webkit-print-color-adjust: exact;
  } .swd-unit { break-inside: avoid-page; } }
"""


def unit_html(profile: UnitProfile, link: Link = lambda unit: None) -> str:
    """One unit as an <article>; `link` says where other units' pages are."""
    p = profile
    label = "" if p.label is None else f' <span class="label">{_plain(p.label.label)}</span>'
    said = (
        "" if p.label is None else " · ".join(filter(None, (p.label.note, p.label.author and f"by {p.label.author}")))
    )
    return "".join(
        [
            f'<article class="swd-unit"><h2><code>{escape(p.unit)}</code>{label}</h2>',
            f'<p class="soft">{_plain(said)}</p>' if said else "",
            f'<p class="soft">{_facts(p)}</p>',
            _tasks(p),
            '<div class="parts"><section>',
            f"<h3>How often it fires</h3>{histogram_svg(p)}",
            "</section><section>",
            _logits(p),
            "</section></div>",
            _contexts(p.contexts),
            '<div class="parts">',
            _edges("reads", p.reads),
            _edges("writes", p.writes),
            "</div>",
            _neighbours(p, link),
            "</article>",
        ]
    )


def running(token: str) -> tuple[str, str]:
    """A token within a text: (the space before a word, the word), with all else that is invisible shown."""
    return (" ", visible(token[1:])) if token[:1] == " " and token[1:].strip() else ("", visible(token))


def words_html(context: Context, largest: float, *, neighbourhood: int | None = None) -> str:
    """The tokens of a context coloured by z, the peak outlined; `neighbourhood` cuts it to so many tokens on either side."""
    pieces: list[str] = []
    start = 0 if neighbourhood is None else max(0, context.peak - neighbourhood)
    stop = len(context.tokens) if neighbourhood is None else context.peak + neighbourhood + 1
    for i, (token, z) in enumerate(zip(context.tokens[start:stop], context.z[start:stop], strict=True), start):
        lead, word = running(token)
        pieces.append(lead if i > start else "")
        strength = abs(z) / largest if largest > 0 else 0.0
        colour = "" if strength < FAINT else f' class="{"p" if z > 0 else "n"}" style="--s:{strength:.2f}"'
        tag = "mark" if i == context.peak else "span"
        shown = f' title="z = {number(z)}"' if colour else ""
        pieces.append(f"<{tag}{colour}{shown}>{escape(word)}</{tag}>" if colour or tag == "mark" else escape(word))
    return "".join(pieces)


def histogram_svg(profile: UnitProfile) -> str:
    """Tokens by z as bars, on a logarithmic scale; in words for those who hear it."""
    h, p = profile.histogram, profile
    words = (
        f"z on {p.n_tokens:,} tokens: from {number(p.smallest)} to {number(p.largest)}, mean {number(p.mean)}, standard "
        f"deviation {number(p.sd, signed=False)}; beyond a tenth of its largest on {p.density:.1%} of tokens"
    )
    if p.peak == 0:
        return '<p class="soft">z is 0 on every token.</p>'
    bars, low, high = _bars(h)
    scale = _WIDTH / (high - low)
    zero, foot = max(0.0, min(_WIDTH, -low * scale)), _HEIGHT - 3
    paths = "".join(
        f'<path fill="rgb({colour})" d="{"".join(_bar(i, low, scale, size) for i, size in bars if (i < 0) == negative)}"/>'
        for colour, negative in (("0,114,178", True), ("213,94,0", False))
    )
    left, right = number(low * h.width), number(high * h.width)
    middle = f'<text x="{zero:.1f}" y="{foot}" text-anchor="middle">0</text>' if 30 < zero < _WIDTH - 30 else ""
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(words)}">{paths}'
        f'<path stroke="currentColor" stroke-width=".8" d="M0 {_HEIGHT - _FOOT}H{_WIDTH}M{zero:.1f} 2V{_HEIGHT - _FOOT}"/>'
        f'<text x="0" y="{foot}">{left}</text>{middle}<text x="{_WIDTH}" y="{foot}" text-anchor="end">{right}</text></svg>'
        f'<p class="soft">Tokens by z; heights on a logarithmic scale. {escape(words)}.</p>'
    )


def number(value: float, *, signed: bool = True) -> str:
    """Three digits, a sign, and a true minus."""
    text = f"{value:+.3g}" if signed and value else f"{value:.3g}"
    return text.replace("-", "\u2212")


def _bars(h: Histogram) -> tuple[list[tuple[int, float]], int, int]:
    """(bin counted from zero, height from 0 to 1) of each that holds tokens, and the range of bins, zero included."""
    side, counts = len(h.counts) // 2, h.counts.tolist()
    most = math.log1p(max(counts)) or 1.0
    bars = [(i - side, math.log1p(count) / most) for i, count in enumerate(counts) if count]
    return bars, min(0, bars[0][0]), max(0, bars[-1][0] + 1)


def _bar(i: int, low: int, scale: float, size: float) -> str:
    base, height = _HEIGHT - _FOOT, size * (_HEIGHT - _FOOT - 4)
    return f"M{(i - low) * scale:.1f} {base}v{-height:.1f}h{scale:.2f}V{base}z"


def _facts(p: UnitProfile) -> str:
    parts = [f"{p.reads.n:,} read edges"] if p.reads else []
    parts += [f"{p.writes.n:,} write edges"] if p.writes else []
    return " · ".join([*parts, f"largest |z| {number(p.peak, signed=False)}", f"{p.n_tokens:,} tokens of text"])


def _tasks(p: UnitProfile) -> str:
    if not p.tasks:
        return ""
    items = "; ".join(
        f"<b>{_plain(task.replace('_', ' '))}</b> rank {t.rank:,} of {t.of:,}, score {number(t.score)} logits"
        for task, t in p.tasks.items()
    )
    return f"<p>{items}</p>"


def _contexts(contexts: Sequence[Context]) -> str:
    if not contexts:
        return "<h3>Fires most on</h3><p>It is 0 on every token of the text.</p>"
    largest = max(abs(z) for context in contexts for z in context.z)
    rows = "".join(
        f'<li><span class="num">{number(c.z[c.peak])}</span><span class="words">{words_html(c, largest)}</span></li>'
        for c in contexts
    )
    return (
        f'<h3>Fires most on</h3><p class="soft">Left, z at the outlined token. Orange with a solid line: positive. Blue with a '
        f"dotted line: negative. Full colour: |z| = {number(largest, signed=False)}.</p>"
        f'<ol class="contexts">{rows}</ol>'
    )


def _logits(p: UnitProfile) -> str:
    title, effect = "<h3>Direct effect on the logits</h3>", p.logits
    if effect is None:
        inside = split_name(p.site)[1] not in WRITES_RESIDUAL
        why = (
            "this site does not write to the residual stream" if inside else "this host or these units do not show one"
        )
        return f'{title}<p class="soft">None: {why}.</p>'
    largest = max((abs(v) for _, v in (*effect.promoted, *effect.suppressed)), default=0.0)
    sides = "".join(
        f"<div><h4>{name}</h4>{_list([(visible(t), v) for t, v in tokens], largest)}</div>"
        for name, tokens in (("promotes", effect.promoted), ("suppresses", effect.suppressed))
    )
    note = '<p class="soft">Centred logits per unit of z; where z is negative the sides swap.</p>'
    return f'{title}<div class="two">{sides}</div>{note}'


def _edges(verb: str, edges: Edges | None) -> str:
    if edges is None:
        return f"<section><h3>What it {verb}</h3><p class='soft'>This source of units does not show it.</p></section>"
    largest = max((abs(w) for _, w in edges.strongest), default=0.0)
    more = f", the strongest {len(edges.strongest)}" if edges.n > len(edges.strongest) else ""
    heads = list(edges.heads.items())[:8]
    shares = [(name, share) for name, share in heads]
    by_head = (
        f"<div><h4>share of squared norm</h4>{_list(shares, 1.0, form=lambda v: f'{v:.0%}', colour='h')}</div>"
        if heads
        else ""
    )
    body = f"<div><h4>{edges.n:,} edges{more}</h4>{_list(list(edges.strongest), largest)}</div>"
    return f"<section><h3>What it {verb}</h3>{f'<div class=two>{body}{by_head}</div>' if by_head else body}</section>"


def _neighbours(p: UnitProfile, link: Link) -> str:
    columns = []
    for title, found in (
        ("write vector alike (cosine)", p.similar),
        ("active together (correlation of z)", p.coactive),
    ):
        if found:
            columns.append(f"<div><h4>{title}</h4>{_list(list(found), 1.0, link=link)}</div>")
    return f'<h3>Neighbours in {escape(p.site)}</h3><div class="parts">{"".join(columns)}</div>' if columns else ""


def _list(
    rows: Sequence[tuple[str, float]],
    largest: float,
    *,
    form: Callable[[float], str] = number,
    colour: str = "",
    link: Any = None,
) -> str:
    """Names and numbers, a bar behind each."""
    items = []
    for name, value in rows:
        target = link(name) if link else None
        shown = f"<code>{escape(name)}</code>"
        shown = f'<a href="{escape(target)}">{shown}</a>' if target else shown
        width = 100 * min(1.0, abs(value) / largest) if largest > 0 else 0.0
        bar = f'<i class="{colour or ("p" if value > 0 else "n")}" style="width:{width:.0f}%"></i>'
        items.append(f'<li>{bar}{shown}<span class="num">{form(value)}</span></li>')
    return f'<ol class="bars">{"".join(items)}</ol>'


def printable(text: str) -> str:
    """Text of a user: nothing in it is invisible but its spaces, or turns what follows around. Not escaped."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def _plain(text: str) -> str:
    return escape(printable(text))
