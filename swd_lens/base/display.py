"""How an object shows itself in a notebook: a title, then its parts one below the other.

A part is a figure (as SVG), a table (pandas; its first 20 rows), a panel (its own HTML) or a line of text; text is escaped
here, and what is invisible in it shown.
"""

from html import escape
from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from swd_lens.base.figures import svg
from swd_lens.base.visible import visible, visible_lines

_ROWS = 20  # of a table
_LONGEST = 160  # characters of a cell


def card(title: str, *parts: Any) -> str:
    """HTML for `_repr_html_`; parts that are None are left out."""
    body = "".join(_part(part) for part in parts if part is not None)
    return f'<div class="swd-card"><p><b>{escape(visible_lines(title))}</b></p>{body}</div>'


def _part(part: Any) -> str:
    if isinstance(part, Figure):
        return f'<div style="overflow-x:auto">{svg(part)}</div>'
    if isinstance(part, pd.DataFrame):
        return _table(part)
    if hasattr(part, "_repr_html_"):
        return part._repr_html_()
    return f"<p>{escape(visible_lines(str(part)))}</p>"


def _seen(value: Any) -> Any:
    return visible(value) if isinstance(value, str) else value


def _seen_column(column: pd.Series) -> pd.Series:
    """The column as it is, but for its texts."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    return pd.Series([_seen(value) for value in column], index=column.index, dtype=column.dtype)


def _table(frame: pd.DataFrame) -> str:
    with pd.option_context("display.max_colwidth", _LONGEST):  # pandas cuts text at 50 characters
        shown = frame.head(_ROWS).rename(columns=_seen).apply(_seen_column)
        html = shown.to_html(index=False, border=0, escape=True, na_rep="–", float_format="{:.4g}".format)
    more = len(frame) - _ROWS
    rest = f"<p>and {more:,} more row{'s' * (more > 1)}</p>" if more > 0 else ""
    return f'<div style="overflow-x:auto">{html}</div>{rest}'
