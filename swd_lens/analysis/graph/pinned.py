"""The nodes that a viewer shows when it opens, instead of a cloud of dots, and where circuit-tracer's panel shows each of them.

`pinned_nodes`: what is asked for; else the answers, and of a circuit its units, of any other graph both ends of its strongest
edges.

`positions`: left to itself the panel lays them out with dagre 0.8.5, whose network simplex fails on weights that are no whole
numbers: where rounding makes a zero negative it reads a property of undefined, and the panel stays as it was (7 of 64 graphs
that we tried). Given positions (qParams.sg_pos) it does not ask dagre. They are a list in the panel's own order, so we have to
know it:

1. A box is a pinned node in no group, or a group. Nodes come by layer, embeddings last, then groups; these are sorted by the
   characters of their feature numbers, which are sorted themselves, as text.
2. Boxes stand in rows by layer, inputs at the bottom, and from left to right by column, as far apart as they are wide.
3. More positions follow, for nodes that a reader pins later.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pandas as pd

from swd_lens.analysis.graph.data import GraphData
from swd_lens.base.errors import legible
from swd_lens.units.keys import read_unit, single_units

_MOST = 200  # viewers show no more in their panel of pinned nodes
_READABLE = 40  # nodes there: a circuit's units have one each, and as far as there is room one for other positions
_STRONGEST = 30  # edges that stand for a graph that is of no circuit
_WIDE, _HIGH = 880.0, 860.0  # of the panel's 1000: the left upper corner of the last box
_IN_A_ROW = 7  # boxes, so that names beside each other can be read


def pinned_nodes(graph: GraphData, pinned: Any = None) -> list[str]:
    """Names of the nodes that are pinned. pinned: names of nodes or units, a circuit, a table of units; a unit stands for its
    nodes at all positions. None: the answers, and of a circuit its units (each where it has most influence, at further
    positions as far as there is room), else both ends of the strongest edges. Raises ValueError: no node of the graph."""
    nodes, names = graph.nodes, set(graph.nodes["node"])
    if pinned is not None:
        found: list[str] = []
        for each in single_units(pinned):
            if isinstance(each, str) and each in names:
                found.append(each)
                continue
            site, unit = read_unit(each, {site for site in nodes["site"] if isinstance(site, str)})
            of_unit = nodes["node"][(nodes["site"] == site) & (nodes["unit"] == unit)].tolist()
            if not of_unit:
                its_unit = f"{site}/{unit}"
                raise ValueError(f"{legible(its_unit)} is pinned but not in the graph; pin units or nodes that graph.nodes has")
            found += of_unit
        return list(dict.fromkeys(found))
    answers = nodes["node"][nodes["kind"] == "logit"].tolist()
    ends = {*graph.edges["source"], *graph.edges["target"]}
    ranked = pd.DataFrame(nodes[nodes["rank"].notna() & nodes["node"].isin(ends)])
    if len(ranked):
        ranked = ranked.sort_values("influence", ascending=False, kind="stable")
        again = ranked.duplicated(["site", "unit"])
        once = ranked["node"][~again].tolist()
        chosen = [*once, *ranked["node"][again].tolist()[: max(_READABLE - len(once), 0)]]
    else:
        strongest = graph.edges.head(_STRONGEST)
        chosen = [node for ends in zip(strongest["source"], strongest["target"], strict=True) for node in ends]
    return list(dict.fromkeys([*answers, *chosen]))[:_MOST]


class _Box(NamedTuple):
    order: str
    row: float
    column: float


def positions(nodes: Sequence[Mapping[str, Any]], pinned: Sequence[str], supernodes: Sequence[Sequence[str]]) -> str:
    """Give x and y of every box, in thousandths of the panel, in its order.

    Args:
        nodes: of the viewer's file, in its order.
        pinned: their node_ids.
        supernodes: [name, node_id, ...] of each group.
    """
    boxes = sorted(_boxes(nodes, set(pinned[:_MOST]), supernodes), key=lambda box: box.order)
    # Positions of the boxes, in their order.
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
        # Ascending places, moved as little to the right, then to the left, as it takes to be a box apart.
        gap, moved = _WIDE / _IN_A_ROW, [boxes[i].column / last * _WIDE for i in row]
        for i in range(1, len(moved)):
            moved[i] = max(moved[i], moved[i - 1] + gap)
        limit = _WIDE
        for i in reversed(range(len(moved))):
            moved[i] = min(moved[i], limit)
            limit = moved[i] - gap
        xs = moved
        places |= {i: (x, y) for i, x in zip(row, xs, strict=True)}
    placed = [places[i] for i in range(len(boxes))]
    spare = [(i % _IN_A_ROW * _WIDE / _IN_A_ROW, 1000.0) for i in range(_MOST - len(boxes))]
    return " ".join(f"{x:.0f} {y:.0f}" for x, y in [*placed, *spare])


def _boxes(nodes: Sequence[Mapping[str, Any]], pinned: set[str], supernodes: Sequence[Sequence[str]]) -> list[_Box]:
    blocks = (node for node in nodes if node["feature_type"] != "logit" and node["layer"] != "E")
    largest = max((int(node["layer"]) for node in blocks), default=0)

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
