"""GraphPage: a unit graph as one HTML file that a browser opens without a network.

1. What the page shows comes as plain values (contents.py) and stands in the page as JSON, in an element that browsers do not run;
   every "<" in it is escaped.
2. viewer.html takes the data, the style sheet (viewer.css behind the house's colours of signs) and the scripts (scripts/, one
   after the other in one closed function).
3. The page's own security policy forbids whatever is not in the file: it lets this one script run, and loads nothing.
4. A notebook shows the page in a frame of its own, so that neither changes the other.

No library is bundled: nodes are SVG, edges a canvas, and what a layout by layer and position needs is a page of code.
"""

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from html import escape
from pathlib import Path
from string import Template
from typing import Any

from swd_lens.analysis.graph.data import GraphData
from swd_lens.analysis.graph.viewer.contents import contents
from swd_lens.base.errors import visible
from swd_lens.base.figures import SIGN_STYLE, SIGN_STYLE_DARK
from swd_lens.base.files import write_text
from swd_lens.base.surroundings import with_torch_defaults

_FOLDER = Path(__file__).parent
SCRIPTS = (*("data", "digest", "state", "layout", "shapes", "scene", "drag", "details", "attention", "clamp", "table"), "main")
_HEIGHT = 780  # pixels of a notebook's frame


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class GraphPage:
    """A graph to look into, see `UnitGraph.show`; a notebook shows it, `save` writes it.

    Attributes:
        html: the whole page.
        title: what it shows, in a line.
    """

    html: str
    title: str

    def save(self, path: str | Path) -> Path:
        """Write the page to a file, whole or not at all; returns its path.

        Raises:
            OSError: the file cannot be written.
        """
        path = Path(path)
        write_text(path, self.html)
        return path

    def _repr_html_(self) -> str:
        return (
            f'<iframe class="swd-graph-page" title="{escape(visible(self.title))}" srcdoc="{escape(self.html)}" '
            f'style="width:100%;height:{_HEIGHT}px;border:1px solid rgba(128,128,128,.4);border-radius:8px"></iframe>'
        )

    def __repr__(self) -> str:
        return f"GraphPage({visible(self.title)}, {len(self.html) / 1e6:.1f} MB; save(path) writes it)"


def show(
    graph: GraphData,
    *,
    audit: Any = None,
    replays: Any = None,
    attention: Any = None,
    groups: Mapping[str, Sequence[str]] | None = None,
    labels: Mapping[Any, Any] | None = None,
    beside: GraphData | None = None,
) -> GraphPage:
    """The graph as a page to look into: a notebook shows it, `.save("graph.html")` writes one file that needs no network.

    Args:
        audit: what the units do, shown on hover: an Audit, or cards of units (`Audit.profiles`, a study's cards).
        replays: of this graph (`swd_lens.graph.replays`); the live clamp then runs through all frozen paths, with true runs
            beside it. None: through the drawn edges.
        attention: of this graph (`swd_lens.graph.attention_paths`): heads and query-key pairs of its attention edges.
        groups: name -> nodes that begin as one box (`swd_lens.graph.groups`).
        labels: unit -> text, or UnitLabels; they win over those of the audit and of the graph.
        beside: a graph of the same units on another prompt, shown beside this one.

    Raises:
        ValueError: replays, attention paths or groups of another graph, or a name that is no unit's.
        TypeError: an audit, a label or a graph of another type.
    """
    if not isinstance(beside, GraphData | None):
        raise TypeError(f"beside must be a UnitGraph, got a {type(beside).__name__}")
    values = contents(graph, audit, replays, attention, groups or {}, labels or {}, beside)
    prompt = graph.settings.get("prompt")
    title = "Unit graph" if prompt is None else f"Unit graph of “{prompt}”"
    style, script, policy = _resources()
    page = Template((_FOLDER / "viewer.html").read_text(encoding="utf-8")).substitute(
        title=escape(visible(title)),
        policy=policy,
        style=style,
        data=json.dumps(values, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c"),
        script=script,
    )
    return GraphPage(page, title)


@cache
def _resources() -> tuple[str, str, str]:
    """Style sheet and script of every page, and its Content-Security-Policy: this script and nothing from anywhere."""
    dark = f"@media screen and (prefers-color-scheme: dark) {{ :root {{ {SIGN_STYLE_DARK}; }} }}"
    style = f":root {{ {SIGN_STYLE}; }}\n{dark}\n{(_FOLDER / 'viewer.css').read_text(encoding='utf-8')}"
    parts = [(_FOLDER / "scripts" / f"{name}.js").read_text(encoding="utf-8") for name in SCRIPTS]
    script = '"use strict";\n(() => {\n' + "\n".join(parts) + "\n})();\n"
    allowed = {
        "default-src": "'none'",
        "script-src": f"'sha256-{base64.b64encode(hashlib.sha256(script.encode('utf-8')).digest()).decode()}'",
        "style-src": "'unsafe-inline'",
        "img-src": "data: blob:",
        "base-uri": "'none'",
        "form-action": "'none'",
    }
    return style, script, "; ".join(f"{name} {sources}" for name, sources in allowed.items())
