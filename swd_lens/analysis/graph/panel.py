"""panel: where circuit-tracer's panel of pinned nodes shows each of them.

Left to itself the panel lays them out with dagre 0.8.5, whose network simplex fails on weights that are no whole numbers: where
rounding makes a zero negative it reads a property of undefined, and the panel stays as it was (7 of 64 graphs that we tried).
Given positions (qParams.sg_pos) it does not ask dagre. They are a list in the panel's own order, so we have to know it:

1. A box is a pinned node in no group, or a group. Nodes come by layer, embeddings last, then groups; these are sorted by the
   characters of their feature numbers, which are sorted themselves, as text.
2. Boxes stand in rows by layer, inputs at the bottom, and from left to right by column, as far apart as they are wide.
3. More positions follow, for nodes that a reader pins later.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

_WIDE, _HIGH = 880.0, 860.0  # of 1000: the left upper corner of the last box
_IN_A_ROW = 7  # so that names beside each other can be read
_MOST = 200  # boxes


class _Box(NamedTuple):
    order: str
    row: float
    column: float


def positions(nodes: Sequence[Mapping[str, Any]], pinned: Sequence[str], supernodes: Sequence[Sequence[str]]) -> str:
    """x and y of every box, in thousandths of the panel, in its order.

    Args:
        nodes: of the viewer's file, in its order.
        pinned: their node_ids.
        supernodes: [name, node_id, ...] of each group.
    """
    boxes = sorted(_boxes(nodes, set(pinned[:_MOST]), supernodes), key=lambda box: box.order)
    placed = _placed(boxes)
    spare = [(i % _IN_A_ROW * _WIDE / _IN_A_ROW, 1000.0) for i in range(_MOST - len(boxes))]
    return " ".join(f"{x:.0f} {y:.0f}" for x, y in [*placed, *spare])


def _boxes(nodes: Sequence[Mapping[str, Any]], pinned: set[str], supernodes: Sequence[Sequence[str]]) -> list[_Box]:
    largest = max((int(node["layer"]) for node in nodes if _is_block(node)), default=0)

    def row(node: Mapping[str, Any]) -> int:
        return largest + 2 if node["feature_type"] == "logit" else 0 if node["layer"] == "E" else int(node["layer"]) + 1

    # In the order of layers; embeddings have none.
    ordered = sorted(nodes, key=lambda node: (node["layer"] == "E", row(node)))
    shown = {node["node_id"]: node for node in ordered if node["node_id"] in pinned}
    groups = [[shown[member] for member in members if member in shown] for _, *members in supernodes]
    grouped = {node["node_id"] for members in groups for node in members}
    boxes = []
    for members in [*([node] for name, node in shown.items() if name not in grouped), *filter(None, groups)]:
        features = " ".join(str(node["feature"]) for node in members)
        rows, columns = ([value(node) for node in members] for value in (row, lambda node: node["ctx_idx"]))
        boxes.append(_Box(",".join(sorted(features)), sum(rows) / len(rows), sum(columns) / len(columns)))
    return boxes


def _is_block(node: Mapping[str, Any]) -> bool:
    return node["feature_type"] != "logit" and node["layer"] != "E"


def _placed(boxes: Sequence[_Box]) -> list[tuple[float, float]]:
    """Positions of the boxes, in their order."""
    rows: list[list[int]] = []
    for level in sorted({round(box.row) for box in boxes}):
        of_level = sorted((i for i, box in enumerate(boxes) if round(box.row) == level), key=lambda i: boxes[i].column)
        n_rows = -(-len(of_level) // _IN_A_ROW)
        # What does not fit into one row stands in several, each from left to right.
        rows += [of_level[part::n_rows] for part in range(n_rows)]
    last = max((box.column for box in boxes), default=0.0) or 1.0
    places: dict[int, tuple[float, float]] = {}
    for level, row in enumerate(rows):
        y = _HIGH * (1 - level / max(len(rows) - 1, 1))
        xs = _apart([boxes[i].column / last * _WIDE for i in row])
        places |= {i: (x, y) for i, x in zip(row, xs, strict=True)}
    return [places[i] for i in range(len(boxes))]


def _apart(xs: Sequence[float]) -> list[float]:
    """Ascending places, moved as little to the right, then to the left, as it takes to be a box apart."""
    gap, moved = _WIDE / _IN_A_ROW, list(xs)
    for i in range(1, len(moved)):
        moved[i] = max(moved[i], moved[i - 1] + gap)
    limit = _WIDE
    for i in reversed(range(len(moved))):
        moved[i] = min(moved[i], limit)
        limit = moved[i] - gap
    return moved
