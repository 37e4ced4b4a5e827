"""The README's drawing of what SWD does: the two of the report's section "What was done", as one SVG.

`python -m tests.report.readme_drawing` writes .github/readme/swd.svg; tests/report/test_cards.py compares it with the templates.
A picture has the colours of the report's style sheet, light or dark as its reader's system is, and a ground of its own, so
that it can be read on either.
"""

import re
from importlib.resources import files
from pathlib import Path
from xml.etree import ElementTree

from swd_lens.base.figures import SIGN_STYLE
from swd_lens.report.page import template

FILE = Path(__file__).resolve().parents[2] / ".github" / "readme" / "swd.svg"
_GAP, _MARGIN = 36.0, 14.0
_SYMBOL, _TEXT = "http://www.w3.org/2000/svg", "system-ui, 'Helvetica Neue', Arial, sans-serif"


def drawing() -> str:
    """The SVG's text."""
    ElementTree.register_namespace("", _SYMBOL)
    pieces, x, tallest = [], _MARGIN, 0.0
    for shapes in re.findall(r"<svg.*?</svg>", template("schematic").render(), flags=re.DOTALL):
        _, _, width, height = map(float, re.findall(r'viewBox="([^"]+)"', shapes)[0].split())
        inside = re.sub(r"<(title|desc).*?</\1>|\s*\n\s*", "", shapes[shapes.index(">") + 1 : -len("</svg>")], flags=re.DOTALL)
        pieces.append(f'<g class="drawing" transform="translate({x:g} {_MARGIN:g})">{inside}</g>')
        x, tallest = x + width + _GAP, max(tallest, height)
    width, height = x - _GAP + _MARGIN, tallest + 2 * _MARGIN
    text = (
        f'<svg xmlns="{_SYMBOL}" viewBox="0 0 {width:g} {height:g}" width="{width:g}" height="{height:g}" role="img" '
        f'font-family="{_TEXT}"><title>A weight matrix becomes sparse read and write factors with units between; circuits of '
        f"units are kept or ablated</title><style>{_style()}</style>{''.join(pieces)}</svg>\n"
    )
    ElementTree.fromstring(text)  # it is well-formed
    return text


def _style() -> str:
    """The rules of the report's style sheet for drawings, and its colours, light and dark."""
    sheet = (files("swd_lens.report") / "templates" / "report.css").read_text(encoding="utf-8")
    light, dark = (re.sub(r"\s+", " ", colours).strip() for colours in re.findall(r":root \{(.*?)\}", sheet, re.DOTALL)[:2])
    rules = " ".join(re.findall(r"^\.drawing .*$", sheet, flags=re.MULTILINE))
    return (
        f"svg {{ {SIGN_STYLE}; {light} background: var(--paper); }} "
        f"@media (prefers-color-scheme: dark) {{ svg {{ {dark} }} }} {rules}"
    )


if __name__ == "__main__":
    FILE.write_text(drawing(), encoding="utf-8")
    print(FILE)
