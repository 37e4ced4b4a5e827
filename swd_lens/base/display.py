"""How an object shows itself in a notebook: a title, then its parts one below the other.

1. A part is a figure (as SVG), a table (pandas; its first 20 rows), names with values, something `Folded` away, a panel (its own
   HTML) or a line of text; text is escaped here, and what is invisible in it shown.
2. A card has no ground and no text colour of its own, so that it fits notebooks light and dark; what is softer is more
   transparent. Its rules reach nothing outside it, and win against those that notebooks have for tables.
3. In a table text stands left and numbers right. A long text that is that of the row above is not said again.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from numbers import Integral, Real
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from swd_lens.base.errors import visible, visible_lines
from swd_lens.base.figures import svg

_ROWS = 20  # of a table
_LONGEST = 160  # characters of a cell
_LONG = 24  # a text of more characters may wrap, and is not said twice in a row
_READABLE = 0.7  # of a figure's own size: it shrinks with the notebook down to here, then it scrolls
_FACTS, _MOST_VALUES = 60, 8  # of a mapping, and of a list in it

STYLE = """
.swd-card { max-width: 100%; line-height: 1.45; color: inherit; }
.swd-card p { margin: .35em 0; max-width: 80ch; overflow-wrap: anywhere; }
.swd-card .swd-title { font-weight: 600; }
.swd-card .swd-scroll { overflow-x: auto; max-width: 100%; margin: .4em 0; }
.swd-card .swd-figure svg { max-width: 100%; height: auto; }
.swd-card table.swd-table { border-collapse: collapse; border: 0; margin: 0; table-layout: auto; font-size: .92em;
  color: inherit; background: none; font-variant-numeric: tabular-nums; }
.swd-card table.swd-table tr, .swd-card table.swd-table tbody tr:nth-child(n) { background: none; }
.swd-card table.swd-table th, .swd-card table.swd-table td { border: 0; border-top: 1px solid rgba(128, 128, 128, .3);
  padding: .25em .6em; text-align: right; vertical-align: baseline; white-space: nowrap; color: inherit;
  background: none; max-width: none; line-height: 1.4; }
.swd-card table.swd-table thead th { border-top: 0; font-weight: 600; white-space: normal; vertical-align: bottom; }
.swd-card table.swd-table .w { text-align: left; }
.swd-card table.swd-table td.l { white-space: normal; overflow-wrap: anywhere; min-width: 11em; max-width: 60ch; }
.swd-card table.swd-facts th { font-weight: 500; text-align: left; white-space: nowrap; }
.swd-card table.swd-facts td { text-align: left; white-space: normal; overflow-wrap: anywhere; }
.swd-card .swd-soft, .swd-card summary { opacity: .8; }
.swd-card details { margin: .35em 0; }
.swd-card summary { cursor: pointer; }
"""


@dataclass(frozen=True)
class Folded:
    """A part of a card that shows itself on a click: settings, provenance, whatever is looked up and not read."""

    summary: str  # what there is to unfold
    part: Any  # whatever a card takes


def card(title: str, *parts: Any) -> str:
    """HTML for `_repr_html_`; parts that are None, or folded and empty, are left out."""
    body = "".join(_part(part, title) for part in parts if part is not None)
    heading = f'<p class="swd-title">{escape(visible_lines(title))}</p>'
    return f'<div class="swd-card"><style>{STYLE}</style>{heading}{body}</div>'


def folded_settings(settings: Mapping[str, Any], summary: str = "settings") -> Folded | None:
    """Settings, folded; None where there are none."""
    return Folded(summary, settings) if settings else None


def _part(part: Any, title: str) -> str:
    if isinstance(part, Figure):
        least = f"min-width:{_READABLE * part.get_figwidth():.1f}in"
        about = f'role="img" aria-label="{escape(visible(title))}" style="{least}"'
        return f'<div class="swd-scroll swd-figure">{svg(part).replace("<svg ", f"<svg {about} ", 1)}</div>'
    if isinstance(part, pd.DataFrame):
        return _table(part)
    if isinstance(part, Folded):
        return f"<details><summary>{escape(visible(part.summary))}</summary>{_part(part.part, title)}</details>"
    if hasattr(part, "_repr_html_"):
        return part._repr_html_()
    if isinstance(part, Mapping):
        # Names and values, one row each; those of a mapping within are named after it.
        facts = _flat(part)
        rows = "".join(
            f'<tr><th scope="row">{escape(visible(name))}</th><td>{escape(text)}</td></tr>' for name, text in facts[:_FACTS]
        )
        more = len(facts) - _FACTS
        rest = f'<p class="swd-soft">and {more:,} more</p>' if more > 0 else ""
        return f'<div class="swd-scroll"><table class="swd-table swd-facts"><tbody>{rows}</tbody></table></div>{rest}'
    return f"<p>{escape(visible_lines(str(part)))}</p>"


def _table(frame: pd.DataFrame) -> str:
    shown = frame.head(_ROWS)
    numeric: list[bool] = []  # per column, whether it is set right: numbers, or numbers among missing values
    for i in range(shown.shape[1]):
        column = shown.iloc[:, i]
        values = [value for value in column if not _is_missing(value)]
        numbers = all(isinstance(value, Real) and not isinstance(value, bool) for value in values)
        numbers = numbers if values else pd.api.types.is_numeric_dtype(column)
        numeric.append(numbers and not pd.api.types.is_bool_dtype(column))
    head = "".join(
        f'<th scope="col"{"" if number else " class=w"}>{escape(visible(str(name)))}</th>'
        for name, number in zip(shown.columns, numeric, strict=True)
    )
    above: Sequence[Any] = [None] * len(numeric)
    body = []
    for row in shown.itertuples(index=False, name=None):
        cells = []
        for value, number, value_above in zip(row, numeric, above, strict=True):
            text = _text(value)
            if number:
                cells.append(f"<td>{escape(text)}</td>")
            elif len(text) <= _LONG:
                cells.append(f'<td class="w">{escape(text)}</td>')
            elif isinstance(value_above, str) and value == value_above:
                cells.append('<td class="w swd-soft" title="as above">″</td>')
            else:
                cells.append(f'<td class="w l">{escape(text)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
        above = row
    more = len(frame) - _ROWS
    rest = f'<p class="swd-soft">and {more:,} more row{"s" * (more > 1)}</p>' if more > 0 else ""
    return (
        f'<div class="swd-scroll"><table class="swd-table"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>{rest}"
    )


def _text(value: Any) -> str:
    """A cell's value as it is read; what is missing is a dash."""
    if _is_missing(value):
        return "–"
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, Real) and not isinstance(value, Integral):
        return f"{float(value):.4g}"
    text = visible(str(value))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 1]}…"


def _is_missing(value: Any) -> bool:
    return value is None or value is pd.NA or value is pd.NaT or (isinstance(value, float) and math.isnan(value))


def _flat(values: Mapping[str, Any], above: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for key, value in values.items():
        name = f"{above}{key}"
        if isinstance(value, Mapping):
            rows += _flat(value, f"{name}.")
        elif isinstance(value, list | tuple):
            rest = f", … ({len(value):,} values)" if len(value) > _MOST_VALUES else ""
            rows.append((name, ", ".join(_text(each) for each in value[:_MOST_VALUES]) + rest))
        else:
            rows.append((name, _text(value)))
    return rows
