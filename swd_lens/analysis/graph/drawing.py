"""drawing: a unit graph as SVG. Input at the bottom, answers at the top, one row per site, one column per position.

1. Rows: tokens, every site in execution order, answers. Columns: positions, where the graph has several.
2. Nodes of one row and column stand side by side, ordered by where their neighbours stand (fewer crossings).
3. Edges are drawn weakest first; width and opacity by strength, orange and solid for positive, blue and dashed for negative.
4. Every node and edge has a title (a tooltip, and what a screen reader reads); the strongest edges stand below in words.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

from swd_lens.analysis.graph.tables import records
from swd_lens.base.figures import GRID, INK, PALETTE
from swd_lens.base.files import write_text
from swd_lens.base.panels import visible
from swd_lens.hosts.sites import KINDS, execution_key

if TYPE_CHECKING:
    from swd_lens.analysis.graph.result import UnitGraph

POSITIVE, NEGATIVE = PALETTE[1], PALETTE[0]
_FILL = {"token": "#f3f3f3", "unit": "#ffffff", "logit": "#fff3e8"}
_CHARACTER, _PADDING, _GAP, _BETWEEN = 6.6, 12.0, 8.0, 22.0  # pixels, at a font size of 11
_HEIGHT, _ROW, _LEFT, _TOP, _NARROWEST = 22.0, 80.0, 128.0, 16.0, 860.0
_LONGEST = 24
_SWEEPS = 6
_IN_WORDS = 12


@dataclass(frozen=True)
class GraphDrawing:
    """An SVG picture and the same in words; shows itself in a notebook."""

    svg: str
    words: str

    def _repr_html_(self) -> str:
        return (
            f'<div class="swd-graph" style="overflow-x:auto" tabindex="0" role="group" aria-label="unit graph">{self.svg}</div>'
            f"<details><summary>The strongest edges, in words</summary>{self.words}</details>"
        )

    def save(self, path: str | Path) -> None:
        """Write the SVG file, whole or not at all."""
        write_text(Path(path), self.svg)


@dataclass(frozen=True)
class _Placed:
    x: float  # the middle
    y: float
    width: float
    text: str


def draw(graph: "UnitGraph", labels: Mapping[str, str] | None = None) -> GraphDrawing:
    """Draw a graph; up to about 60 nodes and 200 edges it can be read, larger ones scroll.

    Args:
        labels: unit name ("blocks.2.mlp_out/17") -> what to write in its node; the graph's own labels otherwise.
    """
    nodes = [_with_label(row, labels or {}) for row in records(graph.nodes)]
    rows = _rows(nodes)
    columns = sorted({row["column"] for row in nodes})
    order = _ordered(nodes, rows, graph)
    places, starts, width = _places(nodes, rows, columns, order)
    height = _TOP + (len(rows) - 1) * _ROW + _HEIGHT + 46
    largest = float(graph.edges["strength"].max()) if len(graph.edges) else 1.0
    body = [_grid(rows, starts, columns, graph, width, height)]
    body += [_edge(row, places, largest, graph) for row in records(graph.edges.iloc[::-1])]
    body += [_node(row, places[row["node"]], graph) for row in nodes]
    body.append(_legend(graph, height))
    title = escape(repr(graph))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{title}"><title>{title}</title>'
        # On a group, not on the root: a page that makes the root its own keeps what is drawn.
        f'<g font-family="system-ui, sans-serif" font-size="11" fill="{INK}">{"".join(body)}</g></svg>'
    )
    return GraphDrawing(svg, _words(graph, {row["node"]: row for row in nodes}))


# ---------------------------------------------------------------------------------------------- places


def _with_label(row: dict[str, Any], labels: Mapping[str, str]) -> dict[str, Any]:
    name = f"{row['site']}/{row['unit']}" if row["kind"] == "unit" else ""
    label = labels.get(name, row["label"]) or ""
    text = label if label or row["kind"] != "unit" else str(row["unit"])
    if label and row["kind"] == "unit":
        text = f"{row['unit']} {label}"
    if row["probability"] is not None:
        text = f"{text} {row['probability']:.0%}"
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    column = int(row["position"] or 0) if row["kind"] != "logit" else 0
    return {**row, "text": text, "label": label, "column": column, "name": name}


def _row_of(row: Mapping[str, Any]) -> tuple[int, int]:
    if row["kind"] == "token":
        return -1, 0
    if row["kind"] == "logit":
        return 10**6, 0
    return execution_key(row["site"])


def _rows(nodes: list[dict[str, Any]]) -> list[tuple[int, int]]:
    last = max((row["column"] for row in nodes), default=0)
    for row in nodes:
        if row["kind"] == "logit":
            row["column"] = last  # answers stand above the last position
    return sorted({_row_of(row) for row in nodes})


def _ordered(
    nodes: list[dict[str, Any]], rows: list[tuple[int, int]], graph: "UnitGraph"
) -> dict[tuple[tuple[int, int], int], list[str]]:
    """Node names of every cell (row, column) from left to right: sweeps that put each node at its neighbours' middle."""
    cells: dict[tuple[tuple[int, int], int], list[str]] = {}
    for row in nodes:
        cells.setdefault((_row_of(row), row["column"]), []).append(row["node"])
    near: dict[str, list[tuple[str, float]]] = {row["node"]: [] for row in nodes}
    for source, target, strength in graph.edges[["source", "target", "strength"]].itertuples(index=False):
        near[source].append((target, strength))
        near[target].append((source, strength))
    for sweep in range(_SWEEPS):
        at = {
            name: column + (i + 0.5) / len(names)
            for (_, column), names in cells.items()
            for i, name in enumerate(names)
        }
        for key in sorted(cells, reverse=bool(sweep % 2)):
            middle = {name: _middle(near[name], at, at[name]) for name in cells[key]}
            cells[key] = sorted(cells[key], key=lambda name: middle[name])
            at |= {name: key[1] + (i + 0.5) / len(cells[key]) for i, name in enumerate(cells[key])}
    return cells


def _middle(near: list[tuple[str, float]], at: Mapping[str, float], alone: float) -> float:
    total = sum(weight for _, weight in near)
    return sum(at[name] * weight for name, weight in near) / total if total > 0 else alone


def _places(
    nodes: list[dict[str, Any]],
    rows: list[tuple[int, int]],
    columns: list[int],
    order: Mapping[tuple[tuple[int, int], int], list[str]],
) -> tuple[dict[str, _Placed], dict[int, tuple[float, float]], float]:
    """Where every node stands, where every column begins and ends, and the width of all."""
    texts = {row["node"]: row["text"] for row in nodes}
    widths = {name: max(26.0, len(text) * _CHARACTER + _PADDING) for name, text in texts.items()}
    needs = {
        column: max(
            (sum(widths[name] + _GAP for name in order[row, column]) for row in rows if (row, column) in order),
            default=0.0,
        )
        for column in columns
    }
    starts, x = {}, _LEFT
    for column in columns:
        starts[column] = (x, x + needs[column])
        x += needs[column] + _BETWEEN
    # A narrow graph gets room: edges between few nodes are told apart by their slopes.
    spare = max(0.0, _NARROWEST - x)
    if spare and columns:
        begin, end = starts[columns[-1]]
        starts[columns[-1]], x = (begin, end + spare), x + spare
    places: dict[str, _Placed] = {}
    for (row, column), names in order.items():
        begin, end = starts[column]
        gap = (end - begin - sum(widths[name] for name in names)) / len(names)
        at = begin + gap / 2
        y = _TOP + (len(rows) - 1 - rows.index(row)) * _ROW
        for name in names:
            places[name] = _Placed(at + widths[name] / 2, y, widths[name], texts[name])
            at += widths[name] + gap
    return places, starts, x


# ---------------------------------------------------------------------------------------------- parts


def _grid(
    rows: list[tuple[int, int]],
    starts: Mapping[int, tuple[float, float]],
    columns: list[int],
    graph: "UnitGraph",
    width: float,
    height: float,
) -> str:
    parts = []
    for i, (layer, kind) in enumerate(rows):
        y = _TOP + (len(rows) - 1 - i) * _ROW
        name = "tokens" if layer < 0 else "answers" if layer == 10**6 else f"{layer} · {KINDS[kind]}"
        parts.append(
            f'<line x1="{_LEFT - 8:.0f}" x2="{width:.0f}" y1="{y + _HEIGHT / 2:.1f}" y2="{y + _HEIGHT / 2:.1f}" '
            f'stroke="{GRID}" stroke-width="0.7"/><text x="8" y="{y + _HEIGHT / 2 + 4:.1f}" font-weight="600">{name}</text>'
        )
    tokens = graph.settings["tokens"]
    shown = {row for row in graph.nodes.loc[graph.nodes["kind"] == "token", "position"].dropna().astype(int)}
    bottom = _TOP + (len(rows) - 1) * _ROW + _HEIGHT
    for column in columns if len(columns) > 1 else []:
        begin, end = starts[column]
        if column != columns[0]:
            x = begin - _BETWEEN / 2
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:.0f}" y2="{bottom:.0f}" stroke="{GRID}" stroke-dasharray="1 4"/>'
            )
        if tokens is not None and column not in shown:
            parts.append(
                f'<text x="{(begin + end) / 2:.1f}" y="{bottom + 13:.1f}" text-anchor="middle" fill="#666666">'
                f"{escape(visible(str(tokens[column])))}</text>"
            )
    return "".join(parts)


def _sign(row: Mapping[str, Any], graph: "UnitGraph") -> float:
    return float(row["contribution"] if graph.has_prompt else row["weight"])


def _edge(row: Mapping[str, Any], places: Mapping[str, _Placed], largest: float, graph: "UnitGraph") -> str:
    a, b = places[row["source"]], places[row["target"]]
    y0, y1 = a.y, b.y + _HEIGHT
    bend = max(14.0, (y0 - y1) * 0.42)
    part = (float(row["strength"]) / (largest or 1.0)) ** 0.5
    positive = _sign(row, graph) >= 0
    dash = "" if positive else ' stroke-dasharray="5 3"'
    return (
        f'<path d="M{a.x:.1f} {y0:.1f}C{a.x:.1f} {y0 - bend:.1f} {b.x:.1f} {y1 + bend:.1f} {b.x:.1f} {y1:.1f}" fill="none" '
        f'stroke="{POSITIVE if positive else NEGATIVE}" stroke-width="{0.6 + 3.6 * part:.2f}" '
        f'stroke-opacity="{0.22 + 0.63 * part:.2f}"{dash}><title>{escape(_told(row, graph))}</title></path>'
    )


def _told(row: Mapping[str, Any], graph: "UnitGraph") -> str:
    says = f"{row['source']} → {row['target']}: "
    if graph.has_prompt:
        says += f"contribution {row['contribution']:+.3g} (weight {row['weight']:+.3g})"
    else:
        says += f"weight {row['weight']:+.3g}"
    return f"{says}, {row['kind']}"


def _node(row: Mapping[str, Any], place: _Placed, graph: "UnitGraph") -> str:
    about = [row["node"]]
    if row["label"]:
        about.append(str(row["label"]))
    if graph.has_prompt:
        about.append(f"activation {row['activation']:+.3g}")
        if row["kind"] != "token":
            about.append(f"not explained by edges {row['rest']:+.3g}")
        about.append(f"influence {row['influence']:.1%}")
    if row["score"] is not None:
        about.append(f"score {row['score']:.3g}")
    dashed = ' stroke-dasharray="3 2"' if row["kind"] == "token" else ""
    return (
        f'<g><title>{escape(", ".join(about))}</title><rect x="{place.x - place.width / 2:.1f}" y="{place.y:.1f}" '
        f'width="{place.width:.1f}" height="{_HEIGHT:.0f}" rx="5" fill="{_FILL[row["kind"]]}" stroke="{INK}" '
        f'stroke-width="{1.6 if row["label"] and row["kind"] == "unit" else 0.9}"{dashed}/>'
        f'<text x="{place.x:.1f}" y="{place.y + _HEIGHT / 2 + 4:.1f}" text-anchor="middle">{escape(place.text)}</text></g>'
    )


def _legend(graph: "UnitGraph", height: float) -> str:
    what = "contribution z·w" if graph.has_prompt else "weight"
    by = "share of influence" if graph.has_prompt else "|weight|"
    y = height - 10
    return (
        f'<g fill="#444444"><line x1="8" x2="32" y1="{y - 4:.0f}" y2="{y - 4:.0f}" stroke="{POSITIVE}" stroke-width="3"/>'
        f'<text x="38" y="{y:.0f}">positive {what}</text>'
        f'<line x1="188" x2="212" y1="{y - 4:.0f}" y2="{y - 4:.0f}" stroke="{NEGATIVE}" stroke-width="3" stroke-dasharray="5 3"/>'
        f'<text x="218" y="{y:.0f}">negative · width: {by}</text></g>'
    )


def _words(graph: "UnitGraph", nodes: Mapping[str, Mapping[str, Any]]) -> str:
    def named(name: str) -> str:
        label = nodes[name]["label"]
        return f"{name} ({label})" if label else name

    rows = records(graph.edges.head(_IN_WORDS))
    told = [{**row, "source": named(row["source"]), "target": named(row["target"])} for row in rows]
    items = "".join(f"<li>{escape(_told(row, graph))}</li>" for row in told)
    return f"<ol>{items}</ol>" if items else "<p>No edges.</p>"
