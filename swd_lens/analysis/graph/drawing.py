"""Drawing: what the viewer's page shows of a graph (viewer/contents.py), as one SVG. Input at the bottom, answers at the top, one
row per site, one column per position.

1. Rows: tokens, every site in execution order, answers. Columns: positions, where the graph has several.
2. Nodes of one row and column stand side by side, ordered by where their neighbours stand (fewer crossings), as on the page.
3. Edges are drawn weakest first; width and opacity by strength, orange and solid for positive, blue and dashed for negative.
4. Every node and edge has a title (a tooltip, and what a screen reader reads); the strongest edges stand below in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

from swd_lens.analysis.graph.data import GraphData
from swd_lens.analysis.graph.viewer.contents import graph_values
from swd_lens.base.errors import visible
from swd_lens.base.figures import GRID, INK_ON_FILL, NEGATIVE, POSITIVE, STANDALONE
from swd_lens.base.files import write_text
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.sites import KINDS

_FILL = {"token": "#f3f3f3", "unit": "#ffffff", "logit": "#fff3e8"}
_CHARACTER, _PADDING, _GAP, _BETWEEN = 6.6, 12.0, 8.0, 22.0  # pixels, at a font size of 11
_HEIGHT, _ROW, _LEFT, _TOP, _NARROWEST = 22.0, 80.0, 128.0, 16.0, 860.0
_LONGEST = 24
_READABLE = 0.65  # of its own size
_SWEEPS = 6
_IN_WORDS = 12

_Values = dict[str, Any]  # a node or an edge, as the page has it


@with_torch_defaults
@dataclass(frozen=True)
class GraphDrawing:
    """An SVG picture and the same in words; shows itself in a notebook."""

    svg: str
    words: str

    def _repr_html_(self) -> str:
        # As wide as there is room, down to a size at which its words can be read: then it scrolls.
        width = float(self.svg.partition(' width="')[2].partition('"')[0])
        style = f"max-width:100%;min-width:{_READABLE * width:.0f}px;height:auto"
        fitting = self.svg.replace("<svg ", f'<svg style="{style}" ', 1)
        return (
            '<div class="swd-graph" style="overflow-x:auto" tabindex="0" role="group" aria-label="unit graph">'
            f"{fitting}</div>"
            f"<details><summary>The strongest edges, in words</summary>{self.words}</details>"
        )

    def save(self, path: str | Path) -> None:
        """Write the SVG file, whole or not at all."""
        write_text(Path(path), self.svg)


@with_torch_defaults
def draw(graph: GraphData, labels: Mapping[str, str] | None = None) -> GraphDrawing:
    """Draw a graph; up to about 60 nodes and 200 edges it can be read, larger ones scroll.

    Args:
        labels: unit name ("blocks.2.mlp_out/17") -> what to write in its node; the graph's own labels otherwise.
    """
    page = graph_values(graph)
    nodes, edges = (
        [dict(zip(page[what], values, strict=True)) for values in zip(*page[what].values(), strict=True)]
        for what in ("nodes", "edges")
    )
    rows = ["tokens", *(f"{layer} · {KINDS[kind]}" for layer, (kind, *_) in page["rows"]), "answers"]
    last = max((node["position"] or 0 for node in nodes if node["kind"] != "logit"), default=0)
    for node in nodes:
        is_unit = node["kind"] == "unit"
        node["label"] = visible((labels or {}).get(f"{node['site']}/{node['unit']}", node["text"]) or "")
        text = f"{node['unit']} {node['label']}".rstrip() if is_unit else node["label"]
        if node["probability"] is not None:
            text = f"{text} {node['probability']:.0%}"
        node["text"] = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
        node["width"] = max(26.0, len(node["text"]) * _CHARACTER + _PADDING)
        # Answers stand above the last position.
        row = {"token": 0, "unit": (node["row"] or 0) + 1, "logit": len(rows) - 1}[node["kind"]]
        node["cell"] = (row, last if node["kind"] == "logit" else node["position"] or 0)
    grid = _placed(nodes, edges)
    shapes = [_grid_svg(grid, rows, nodes, page)]
    largest = max((edge["strength"] for edge in edges), default=1.0) or 1.0
    shapes += [_edge_svg(edge, nodes, largest, page) for edge in reversed(edges)]
    shapes += [_node_svg(node, page["has_prompt"]) for node in nodes]
    height = grid.bottom + 46
    value, size = ("contribution z·w", "share of influence") if page["has_prompt"] else ("weight", "|weight|")
    low, line = height - 10, f'y1="{height - 14:.0f}" y2="{height - 14:.0f}" stroke-width="3"'
    shapes.append(
        f'<g><line x1="8" x2="32" {line} stroke="{POSITIVE}"/><text x="38" y="{low:.0f}">positive {value}</text>'
        f'<line x1="188" x2="212" {line} stroke="{NEGATIVE}" stroke-dasharray="5 3"/>'
        f'<text x="218" y="{low:.0f}">negative · width: {size}</text></g>'
    )
    title = escape(repr(graph))
    svg = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {grid.width:.0f} {height:.0f}" width="{grid.width:.0f}" '
        f'height="{height:.0f}" role="img" aria-label="{title}">{STANDALONE}<title>{title}</title>'
        # On a group, not on the root: a page that makes the root its own keeps what is drawn.
        f'<g font-family="system-ui, sans-serif" font-size="11" fill="currentColor">{"".join(shapes)}</g></svg>'
    )
    names = graph.shown_names().values()
    shown = [
        f"{node['node']} ({node['label']})" if node["label"] and node["kind"] == "unit" else name
        for node, name in zip(nodes, names, strict=True)
    ]
    words = [_edge_in_words(edge, shown, page["has_prompt"]) for edge in edges[:_IN_WORDS]]
    items = "".join(f"<li>{escape(visible(text))}</li>" for text in words)
    return GraphDrawing(svg, f"<ol>{items}</ol>" if items else "<p>No edges.</p>")


# ---------------------------------------------------------------------------------------------- places


class _Grid(NamedTuple):
    """Where rows and columns stand, in pixels."""

    tops: dict[int, float]  # row -> where its boxes begin, from the bottom of the picture to the top
    columns: dict[int, tuple[float, float]]  # position -> where its column begins and ends
    width: float
    bottom: float


def _placed(nodes: Sequence[_Values], edges: Sequence[_Values]) -> _Grid:
    """Put x (the middle of its box) and y (its top) on every node, cell by cell."""
    cells = _ordered(nodes, edges)
    wide = {cell: sum(nodes[i]["width"] for i in inside) for cell, inside in cells.items()}
    columns, x = {}, _LEFT
    for column in sorted({column for _, column in cells}):
        width = max(wide[cell] + _GAP * len(inside) for cell, inside in cells.items() if cell[1] == column)
        columns[column] = (x, x + width)
        x += width + _BETWEEN
    if columns and x < _NARROWEST:
        # A narrow graph gets room: edges between few nodes are told apart by their slopes.
        begin, end = columns[max(columns)]
        columns[max(columns)], x = (begin, end + _NARROWEST - x), _NARROWEST
    rows = sorted({row for row, _ in cells}, reverse=True)
    tops = {row: _TOP + _ROW * i for i, row in enumerate(rows)}
    for (row, column), inside in cells.items():
        begin, end = columns[column]
        gap = (end - begin - wide[row, column]) / len(inside)
        left = begin + gap / 2
        for node in (nodes[i] for i in inside):
            node["x"], node["y"] = left + node["width"] / 2, tops[row]
            left += node["width"] + gap
    return _Grid(tops, columns, x, _TOP + (len(rows) - 1) * _ROW + _HEIGHT)


def _ordered(nodes: Sequence[_Values], edges: Sequence[_Values]) -> dict[tuple[int, int], list[int]]:
    """Places of the nodes of every cell from left to right: sweeps that put each node at its neighbours' middle."""
    cells: dict[tuple[int, int], list[int]] = {}
    for i, node in enumerate(nodes):
        cells.setdefault(node["cell"], []).append(i)
    neighbours: list[list[tuple[int, float]]] = [[] for _ in nodes]
    for edge in edges:
        neighbours[edge["source"]].append((edge["target"], edge["strength"]))
        neighbours[edge["target"]].append((edge["source"], edge["strength"]))
    at = [0.0] * len(nodes)

    def spread(cell: tuple[int, int]) -> None:
        for i, node in enumerate(cells[cell]):
            at[node] = cell[1] + (i + 0.5) / len(cells[cell])

    def middle(node: int) -> float:
        total = sum(strength for _, strength in neighbours[node])
        return sum(at[other] * strength for other, strength in neighbours[node]) / total if total > 0 else at[node]

    for sweep in range(_SWEEPS):
        for cell in cells:
            spread(cell)
        for cell in sorted(cells, reverse=bool(sweep % 2)):
            cells[cell].sort(key=middle)
            spread(cell)
    return cells


# ---------------------------------------------------------------------------------------------- shapes


def _grid_svg(grid: _Grid, rows: Sequence[str], nodes: Sequence[_Values], page: Mapping[str, Any]) -> str:
    shapes = []
    for row, top in reversed(grid.tops.items()):
        y = top + _HEIGHT / 2
        shapes.append(
            f'<line x1="{_LEFT - 8:.0f}" x2="{grid.width:.0f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{GRID}" stroke-width="0.7"/><text x="8" y="{y + 4:.1f}" font-weight="600">{rows[row]}</text>'
        )
    drawn = {node["position"] for node in nodes if node["kind"] == "token"}
    for i, (column, (begin, end)) in enumerate(grid.columns.items() if len(grid.columns) > 1 else ()):
        if i:
            x = begin - _BETWEEN / 2
            shapes.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:.0f}" y2="{grid.bottom:.0f}" stroke="{GRID}" stroke-dasharray="1 4"/>'
            )
        if page["tokens"] and column not in drawn:
            shapes.append(
                f'<text x="{(begin + end) / 2:.1f}" y="{grid.bottom + 13:.1f}" text-anchor="middle">'
                f"{escape(page['tokens'][column])}</text>"
            )
    return "".join(shapes)


def _edge_svg(edge: _Values, nodes: Sequence[_Values], largest: float, page: Mapping[str, Any]) -> str:
    source, target = nodes[edge["source"]], nodes[edge["target"]]
    x0, y0, x1, y1 = source["x"], source["y"], target["x"], target["y"] + _HEIGHT
    bend = max(14.0, (y0 - y1) * 0.42)
    share = (edge["strength"] / largest) ** 0.5
    positive = edge["contribution" if page["has_prompt"] else "weight"] >= 0
    dash = "" if positive else ' stroke-dasharray="5 3"'
    words = _edge_in_words(edge, page["nodes"]["node"], page["has_prompt"])
    return (
        f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 - bend:.1f} {x1:.1f} {y1 + bend:.1f} {x1:.1f} {y1:.1f}" fill="none" '
        f'stroke="{POSITIVE if positive else NEGATIVE}" stroke-width="{0.6 + 3.6 * share:.2f}" '
        f'stroke-opacity="{0.35 + 0.55 * share:.2f}"{dash}><title>{escape(visible(words))}</title></path>'
    )


def _edge_in_words(edge: _Values, names: Sequence[str], has_prompt: bool) -> str:
    weight = f"weight {edge['weight']:+.3g}"
    size = f"contribution {edge['contribution']:+.3g} ({weight})" if has_prompt else weight
    return f"{names[edge['source']]} → {names[edge['target']]}: {size}, {edge['kind']}"


def _node_svg(node: _Values, has_prompt: bool) -> str:
    x, y, kind = node["x"], node["y"], node["kind"]
    title = [node["node"], *([node["label"]] if node["label"] else [])]
    if has_prompt:
        title.append(f"activation {node['activation']:+.3g}")
        if kind != "token":
            title.append(f"not explained by edges {node['rest']:+.3g}")
        title.append(f"influence {node['influence']:.1%}")
    if node["score"] is not None:
        title.append(f"score {node['score']:.3g}")
    dashed = ' stroke-dasharray="3 2"' if kind == "token" else ""
    return (
        f'<g><title>{escape(visible(", ".join(title)))}</title><rect x="{x - node["width"] / 2:.1f}" y="{y:.1f}" '
        f'width="{node["width"]:.1f}" height="{_HEIGHT:.0f}" rx="5" fill="{_FILL[kind]}" stroke="{INK_ON_FILL}" '
        f'stroke-width="{1.6 if node["label"] and kind == "unit" else 0.9}"{dashed}/>'
        f'<text x="{x:.1f}" y="{y + _HEIGHT / 2 + 4:.1f}" text-anchor="middle" fill="{INK_ON_FILL}">'
        f"{escape(node['text'])}</text></g>"
    )
