"""Nodes and links of a unit graph as viewers draw them; see export.py for what their frontends ask for.

1. `placed`: every node's identifier, row (layer) and column (token).
2. `viewer_graph`: the nodes, the drawn edges as links, and error nodes with one link to every node whose drawn edges do not add
   up to its activation: what is left is its `rest` and its pruned edges.
   Columns are called by their embeddings' nodes, so tokens between others have one, too, where no edge of theirs was kept.
"""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pandas as pd

from swd_lens.analysis.graph.features import FeatureNumbers
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name

if TYPE_CHECKING:
    from swd_lens.analysis.audit import Audit
    from swd_lens.analysis.graph.result import UnitGraph

# Viewers know these types; a unit of another one would not be drawn as a feature by all of them.
_UNIT_TYPE, _ERROR_TYPE = "cross layer transcoder", "mlp reconstruction error"
_READS_AND_WRITES = ("reads the residual stream", "writes to it")  # columns of a graph without a prompt
_MOST_PINNED = 200  # viewers show no more in their panel of pinned nodes
_READABLE = (
    40  # nodes in that panel: a circuit's units have one each, the most influential of their positions have more
)
_STRONGEST = 30  # edges that stand for a graph that is of no circuit


@dataclass(frozen=True)
class NodePlacement:
    """Where a node stands in a viewer: its identifier, the row as text ("E": embeddings), the column, the feature number."""

    node_id: str
    layer: str
    column: int
    feature: int


@dataclass(frozen=True)
class Places(Mapping[str, NodePlacement]):
    """Node -> NodePlacement, and what the columns are called."""

    of_node: Mapping[str, NodePlacement]
    tokens: list[str]
    rows_up: int

    def __getitem__(self, node: str) -> NodePlacement:
        return self.of_node[node]

    def __iter__(self):
        return iter(self.of_node)

    def __len__(self) -> int:
        return len(self.of_node)


def is_measured(graph: "UnitGraph") -> bool:
    """Whether nodes have activations, so that edges are contributions and can be added up."""
    return bool(graph.nodes["activation"].notna().any())


def placed(graph: "UnitGraph", rows_up: int = 0) -> Places:
    """Where every node stands.

    Args:
        rows_up: added to the block's number; features keep the true one.
    """
    numbers, n_layers = FeatureNumbers.of(graph), int(graph.settings["n_layers"])
    tokens, shift = _columns(graph)
    places: dict[str, NodePlacement] = {}
    for row in _rows(graph.nodes):
        column = _static_column(row) if row["position"] is None else int(row["position"]) + shift
        if row["kind"] == "token":
            layer, index, feature = "E", row["token"], column
        elif row["kind"] == "logit":
            layer, index, feature = str(n_layers + 1 + rows_up), row["token"], row["token"]
        else:
            layer, index = str(int(row["layer"]) + rows_up), numbers.index(row["site"], int(row["unit"]))
            feature = numbers.number(row["site"], int(row["unit"]))
        places[row["node"]] = NodePlacement(f"{layer}_{index}_{column}", layer, column, int(feature))
    return Places(places, tokens, rows_up)


def _columns(graph: "UnitGraph") -> tuple[list[str], int]:
    """Names of the columns, at least two, and by how many the positions are moved to the right."""
    positions = graph.nodes["position"].dropna()
    if not len(positions):
        return list(_READS_AND_WRITES), 0
    names = [str(token) for token in graph.settings["tokens"] or ()]
    names += [str(position) for position in range(len(names), int(positions.max()) + 1)]
    return (["", *names], 1) if len(names) == 1 else (names, 0)


def _static_column(row: Mapping[str, Any]) -> int:
    return int(row["kind"] != "unit" or split_name(row["site"])[1] in WRITES_RESIDUAL)


def _rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    from swd_lens.analysis.graph.result import records  # which writes graphs by way of this module

    return records(frame)


# ---------------------------------------------------------------------------------------------- nodes and links


def viewer_graph(
    graph: "UnitGraph", places: Places, audit: "Audit | None", html: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Nodes and links in the viewers' schema: the graph's own first, then tokens without edges, error nodes and their links.

    Args:
        html: see `shown_text`.
    """
    weight, rows = "contribution" if is_measured(graph) else "weight", _rows(graph.nodes)
    links = [
        {"source": places[edge["source"]].node_id, "target": places[edge["target"]].node_id, "weight": edge[weight]}
        for edge in _rows(graph.edges)
    ]
    influence = dict(zip([places[row["node"]].node_id for row in rows], _influence(graph), strict=True))
    nodes = [_node(row, places[row["node"]], graph.settings["answers"] or [], audit) for row in rows]
    tokens = _tokens_between(graph, places)
    influence |= dict.fromkeys((token["node_id"] for token in tokens), 0.0)
    errors, left_out = _left_out(graph, places, rows, links)
    links += left_out
    entering: defaultdict[str, float] = defaultdict(float)
    for link in links:
        entering[link["target"]] += abs(link["weight"])
    for link in left_out:
        share = abs(link["weight"]) / entering[link["target"]]
        influence[link["source"]] = influence.get(link["source"], 0.0) + share * influence[link["target"]]
    cumulative = _cumulative(influence)
    for node in [*nodes, *tokens, *errors]:
        node["influence"] = cumulative[node["node_id"]]
        node["clerp"] = shown_text(node["clerp"], html)
    return [*nodes, *tokens, *errors], links


def shown_text(text: str, html: bool) -> str:
    """The text, for a page that takes it as HTML (`html`) without tags."""
    return text.replace("<", "‹").replace(">", "›") if html else text


def _node(row: Mapping[str, Any], place: NodePlacement, answers: list[int], audit: "Audit | None") -> dict[str, Any]:
    own = place.node_id.split("_")[1]
    node = {
        "node_id": place.node_id,
        "feature": place.feature,
        "layer": place.layer,
        "ctx_idx": place.column,
        "jsNodeId": f"{place.layer}_{own}-0",
        "reverse_ctx_idx": 0,
        "run_idx": 0,
        "token_prob": 0.0,
        "is_target_logit": False,
        "activation": row["activation"],
    }
    if row["kind"] == "token":
        node |= {"feature_type": "embedding", "jsNodeId": f"E_{own}-{place.column}"}
        node["clerp"] = f'Emb: "{row["label"]}"'
    elif row["kind"] == "logit":
        p, token = row["probability"] or 0.0, row["label"].replace('"', "”").replace("(p=", "(p =")
        node |= {"feature_type": "logit", "jsNodeId": f"L_{own}-{place.column}", "token_prob": p}
        node |= {"is_target_logit": row["token"] == answers[0], "clerp": f'Output "{token}" (p={p:.3f})'}
    else:
        name = f"{row['site']}/{row['unit']}"
        label = row["label"] or ("" if audit is None else audit.labels.text(name))
        node |= {"feature_type": _UNIT_TYPE, "clerp": f"{label} ({name})" if label else name}
    return node


def _tokens_between(graph: "UnitGraph", places: Places) -> list[dict[str, Any]]:
    """Nodes of a prompt's tokens that have no edge in the graph, from the first column with nodes on."""
    ids = graph.settings["token_ids"] or []
    shift = len(places.tokens) - len(ids)  # 1 where a token stands alone
    drawn = {int(position) for position in graph.nodes["position"][graph.nodes["kind"] == "token"]}
    first = graph.nodes["position"].min() if ids else 0
    nodes = []
    for position in range(int(first), len(ids)):
        if position not in drawn:
            token, column = ids[position], position + shift
            row = {"kind": "token", "label": places.tokens[column], "activation": 1.0}
            nodes.append(_node(row, NodePlacement(f"E_{token}_{column}", "E", column, column), [], None))
    return nodes


def _left_out(
    graph: "UnitGraph", places: Places, rows: list[dict[str, Any]], links: list[dict[str, Any]]
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Error nodes, one per layer and column and one for the answers, and a link to each node that edges do not explain."""
    drawn: defaultdict[str, float] = defaultdict(float)
    for link in links:
        drawn[link["target"]] += link["weight"]
    errors: dict[str, dict[str, Any]] = {}
    left_out = []
    for row in rows:
        place = places[row["node"]]
        left = 0.0 if row["activation"] is None else row["activation"] - drawn[place.node_id]
        if row["kind"] == "token" or left == 0.0:
            continue
        answers = row["kind"] == "logit"
        # The answers' stands in the last block, so that they are drawn above all blocks.
        layer = str(int(graph.settings["n_layers"]) - 1 + places.rows_up) if answers else place.layer
        source = f"{layer}_{'answers' if answers else 'error'}_{place.column}"
        errors[source] = {
            "node_id": source,
            "feature": -2 if answers else -1,
            "layer": layer,
            "ctx_idx": place.column,
            "jsNodeId": f"{source}-0",
            "reverse_ctx_idx": 0,
            "run_idx": 0,
            "token_prob": 0.0,
            "is_target_logit": False,
            "activation": None,
            "feature_type": _ERROR_TYPE,
            "clerp": "Left out of the answers" if answers else f"Left out of layer {row['layer']}",
        }
        left_out.append({"source": source, "target": place.node_id, "weight": left})
    return list(errors.values()), left_out


# ---------------------------------------------------------------------------------------------- influence


def _influence(graph: "UnitGraph") -> list[float]:
    """Per node the share of the answers that goes through it; without a prompt the |weights| at it, as nothing else is known."""
    if is_measured(graph):
        return [float(value) for value in graph.nodes["influence"].fillna(0.0)]
    size: defaultdict[str, float] = defaultdict(float)
    for end in ("source", "target"):
        for node, strength in zip(graph.edges[end], graph.edges["strength"], strict=True):
            size[node] += strength
    return [size[node] for node in graph.nodes["node"]]


def _cumulative(influence: Mapping[str, float]) -> dict[str, float | None]:
    """Strongest first: what share of all influence lies with a node and those before it."""
    total, reached = sum(influence.values()), 0.0
    if total == 0:
        return dict.fromkeys(influence)
    cumulative: dict[str, float | None] = {}
    for node in sorted(influence, key=lambda node: -influence[node]):
        reached += influence[node]
        cumulative[node] = min(reached / total, 1.0)
    return cumulative
