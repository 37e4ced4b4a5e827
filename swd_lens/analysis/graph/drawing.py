"""Drawing: a unit graph as SVG. Input at the bottom, answers at the top, one row per site, one column per position.

1. Rows: tokens, every site in execution order, answers. Columns: positions, where the graph has several.
2. Nodes of one row and column stand side by side, ordered by where their neighbours stand (fewer crossings).
3. Edges are drawn weakest first; width and opacity by strength, orange and solid for positive, blue and dashed for negative.
4. Every node and edge has a title (a tooltip, and what a screen reader reads); the strongest edges stand below in words.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from swd_lens.analysis.graph.data import GraphData
from swd_lens.base.errors import visible, visible_token
from swd_lens.base.figures import GRID, INK_ON_FILL, NEGATIVE, POSITIVE, STANDALONE
from swd_lens.base.files import write_text
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.sites import KINDS, execution_key

_FILL = {"token": "#f3f3f3", "unit": "#ffffff", "logit": "#fff3e8"}
_CHARACTER, _PADDING, _GAP, _BETWEEN = 6.6, 12.0, 8.0, 22.0  # pixels, at a font size of 11
_HEIGHT, _ROW, _LEFT, _TOP, _NARROWEST = 22.0, 80.0, 128.0, 16.0, 860.0
_LONGEST = 24
_READABLE = 0.65  # of its own size
_SWEEPS = 6
_IN_WORDS = 12

_Row = tuple[int, tuple[int, int, str]]  # `execution_key` of a site; tokens below all layers, answers above
_TOKENS, _ANSWERS = (-1, (0, -1, "")), (10**6, (0, -1, ""))
_Cell = tuple[_Row, int]  # (row, column)


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


@dataclass(frozen=True)
class _Node:
    """A node's row of the table, what is written in its box, and the box's cell."""

    row: Mapping[str, Any]
    label: str
    text: str
    cell: _Cell

    @property
    def width(self) -> float:
        return max(26.0, len(self.text) * _CHARACTER + _PADDING)


@dataclass(frozen=True)
class _Grid:
    """Where rows, columns and nodes stand, in pixels."""

    rows: Sequence[_Row]  # from the bottom to the top
    columns: Mapping[int, tuple[float, float]]  # position -> where its column begins and ends
    points: Mapping[str, tuple[float, float]]  # node -> the middle and the top of its box
    width: float

    def top(self, row: _Row) -> float:
        return _TOP + (len(self.rows) - 1 - self.rows.index(row)) * _ROW

    @property
    def bottom(self) -> float:
        return _TOP + (len(self.rows) - 1) * _ROW + _HEIGHT


@with_torch_defaults
def draw(graph: GraphData, labels: Mapping[str, str] | None = None) -> GraphDrawing:
    """Draw a graph; up to about 60 nodes and 200 edges it can be read, larger ones scroll.

    Args:
        labels: unit name ("blocks.2.mlp_out/17") -> what to write in its node; the graph's own labels otherwise.
    """
    values = graph.as_dict()
    last = max((int(row["position"] or 0) for row in values["nodes"] if row["kind"] != "logit"), default=0)
    nodes = {row["node"]: _node(row, labels or {}, last) for row in values["nodes"]}
    grid = _grid(nodes, _ordered(nodes, values["edges"]))
    height = grid.bottom + 46
    largest = max((row["strength"] for row in values["edges"]), default=1.0)
    shapes = [_grid_svg(grid, graph), *(_edge_svg(row, grid, largest, graph) for row in reversed(values["edges"]))]
    shapes += [_node_svg(node, grid, graph) for node in nodes.values()]
    value, size = ("contribution z·w", "share of influence") if graph.has_prompt else ("weight", "|weight|")
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
    shown = graph.shown_names() | {
        name: f"{name} ({node.label})" for name, node in nodes.items() if node.label and node.row["kind"] == "unit"
    }
    strongest = [
        _edge_in_words({**row, "source": shown[row["source"]], "target": shown[row["target"]]}, graph)
        for row in values["edges"][:_IN_WORDS]
    ]
    items = "".join(f"<li>{escape(visible(words))}</li>" for words in strongest)
    return GraphDrawing(svg, f"<ol>{items}</ol>" if items else "<p>No edges.</p>")


# ---------------------------------------------------------------------------------------------- places


def _node(row: Mapping[str, Any], labels: Mapping[str, str], last: int) -> _Node:
    """A node; answers stand above the last position."""
    is_unit = row["kind"] == "unit"
    label = visible(labels.get(f"{row['site']}/{row['unit']}" if is_unit else "", row["label"]) or "")
    text = f"{row['unit']} {label}".rstrip() if is_unit else label
    if row["probability"] is not None:
        text = f"{text} {row['probability']:.0%}"
    text = text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"
    if row["kind"] == "logit":
        return _Node(row, label, text, (_ANSWERS, last))
    line = execution_key(row["site"]) if is_unit else _TOKENS
    return _Node(row, label, text, (line, int(row["position"] or 0)))


def _ordered(nodes: Mapping[str, _Node], edges: Sequence[Mapping[str, Any]]) -> dict[_Cell, list[str]]:
    """Node names of every cell from left to right: sweeps that put each node at its neighbours' middle."""
    cells: dict[_Cell, list[str]] = {}
    for name, node in nodes.items():
        cells.setdefault(node.cell, []).append(name)
    neighbours: dict[str, list[tuple[str, float]]] = {name: [] for name in nodes}
    for edge in edges:
        neighbours[edge["source"]].append((edge["target"], edge["strength"]))
        neighbours[edge["target"]].append((edge["source"], edge["strength"]))

    def spread(cell: _Cell) -> dict[str, float]:
        return {name: cell[1] + (i + 0.5) / len(cells[cell]) for i, name in enumerate(cells[cell])}

    def middle(name: str) -> float:
        total = sum(strength for _, strength in neighbours[name])
        if total <= 0:
            return at[name]
        return sum(at[other] * strength for other, strength in neighbours[name]) / total

    at: dict[str, float] = {}
    for sweep in range(_SWEEPS):
        for cell in cells:
            at |= spread(cell)
        for cell in sorted(cells, reverse=bool(sweep % 2)):
            middles = {name: middle(name) for name in cells[cell]}
            cells[cell] = sorted(cells[cell], key=lambda name: middles[name])
            at |= spread(cell)
    return cells


def _grid(nodes: Mapping[str, _Node], cells: Mapping[_Cell, Sequence[str]]) -> _Grid:
    rows = sorted({row for row, _ in cells})
    columns, x = {}, _LEFT
    for column in sorted({column for _, column in cells}):
        widths = [sum(nodes[name].width + _GAP for name in names) for (_, c), names in cells.items() if c == column]
        columns[column] = (x, x + max(widths))
        x += max(widths) + _BETWEEN
    spare = _NARROWEST - x
    if columns and spare > 0:
        # A narrow graph gets room: edges between few nodes are told apart by their slopes.
        last, (begin, end) = max(columns.items())
        columns[last], x = (begin, end + spare), x + spare
    grid = _Grid(rows, columns, {}, x)
    points: dict[str, tuple[float, float]] = {}
    for (row, column), names in cells.items():
        begin, end = columns[column]
        gap = (end - begin - sum(nodes[name].width for name in names)) / len(names)
        left = begin + gap / 2
        for name in names:
            points[name] = (left + nodes[name].width / 2, grid.top(row))
            left += nodes[name].width + gap
    return _Grid(rows, columns, points, x)


# ---------------------------------------------------------------------------------------------- shapes


def _grid_svg(grid: _Grid, graph: GraphData) -> str:
    shapes = []
    for row in grid.rows:
        y = grid.top(row) + _HEIGHT / 2
        name = "tokens" if row == _TOKENS else "answers" if row == _ANSWERS else f"{row[0]} · {KINDS[row[1][0]]}"
        shapes.append(
            f'<line x1="{_LEFT - 8:.0f}" x2="{grid.width:.0f}" y1="{y:.1f}" y2="{y:.1f}" '
            f'stroke="{GRID}" stroke-width="0.7"/><text x="8" y="{y + 4:.1f}" font-weight="600">{name}</text>'
        )
    tokens = graph.settings["tokens"]
    drawn = set(graph.nodes.loc[graph.nodes["kind"] == "token", "position"].dropna().astype(int))
    for i, (column, (begin, end)) in enumerate(grid.columns.items() if len(grid.columns) > 1 else ()):
        if i:
            x = begin - _BETWEEN / 2
            shapes.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP:.0f}" y2="{grid.bottom:.0f}" stroke="{GRID}" stroke-dasharray="1 4"/>'
            )
        if tokens is not None and column not in drawn:
            shapes.append(
                f'<text x="{(begin + end) / 2:.1f}" y="{grid.bottom + 13:.1f}" text-anchor="middle">'
                f"{escape(visible_token(str(tokens[column])))}</text>"
            )
    return "".join(shapes)


def _edge_svg(row: Mapping[str, Any], grid: _Grid, largest: float, graph: GraphData) -> str:
    (x0, y0), (x1, top) = grid.points[row["source"]], grid.points[row["target"]]
    y1 = top + _HEIGHT
    bend = max(14.0, (y0 - y1) * 0.42)
    share = (float(row["strength"]) / (largest or 1.0)) ** 0.5
    positive = row["contribution" if graph.has_prompt else "weight"] >= 0
    dash = "" if positive else ' stroke-dasharray="5 3"'
    return (
        f'<path d="M{x0:.1f} {y0:.1f}C{x0:.1f} {y0 - bend:.1f} {x1:.1f} {y1 + bend:.1f} {x1:.1f} {y1:.1f}" fill="none" '
        f'stroke="{POSITIVE if positive else NEGATIVE}" stroke-width="{0.6 + 3.6 * share:.2f}" '
        f'stroke-opacity="{0.35 + 0.55 * share:.2f}"{dash}><title>{escape(visible(_edge_in_words(row, graph)))}</title></path>'
    )


def _edge_in_words(row: Mapping[str, Any], graph: GraphData) -> str:
    weight = f"weight {row['weight']:+.3g}"
    size = f"contribution {row['contribution']:+.3g} ({weight})" if graph.has_prompt else weight
    return f"{row['source']} → {row['target']}: {size}, {row['kind']}"


def _node_svg(node: _Node, grid: _Grid, graph: GraphData) -> str:
    row, (x, y) = node.row, grid.points[node.row["node"]]
    title = [row["node"], *([node.label] if node.label else [])]
    if graph.has_prompt:
        title.append(f"activation {row['activation']:+.3g}")
        if row["kind"] != "token":
            title.append(f"not explained by edges {row['rest']:+.3g}")
        title.append(f"influence {row['influence']:.1%}")
    if row["score"] is not None:
        title.append(f"score {row['score']:.3g}")
    dashed = ' stroke-dasharray="3 2"' if row["kind"] == "token" else ""
    return (
        f'<g><title>{escape(visible(", ".join(title)))}</title><rect x="{x - node.width / 2:.1f}" y="{y:.1f}" '
        f'width="{node.width:.1f}" height="{_HEIGHT:.0f}" rx="5" fill="{_FILL[row["kind"]]}" stroke="{INK_ON_FILL}" '
        f'stroke-width="{1.6 if node.label and row["kind"] == "unit" else 0.9}"{dashed}/>'
        f'<text x="{x:.1f}" y="{y + _HEIGHT / 2 + 4:.1f}" text-anchor="middle" fill="{INK_ON_FILL}">'
        f"{escape(node.text)}</text></g>"
    )
