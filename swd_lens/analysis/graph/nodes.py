"""Nodes and links of a unit graph as viewers draw them; see export.py for what their frontends ask for.

1. `placed`: every node's identifier, row (layer) and column (token).
2. `viewer_graph`: the nodes, the drawn edges as links, and error nodes with one link to every node whose drawn edges do not add
   up to its activation: what is left is its `rest` and its pruned edges.
   Columns are called by their embeddings' nodes, so tokens between others have one, too, where no edge of theirs was kept.
3. `traced`: query-key pairs in the schema that Neuronpedia reads, `qk_tracing_results` of every node that attention writes to.

   a. The drawn attention edges into a node run through places (head, dest, src); `AttentionPaths.heads` says how much of them
      goes through each.
   b. A place's score is a sum over pairs of q and k units, `AttentionPaths.scores`. A node's result is the mean over its places
      of these parts, each place with its share of the |contributions| into the node; so it has the unit of a score.
   c. A marginal is a unit's sum over all parts it stands in, the one with the other side's bias included. What has no unit (other
      pairs, biases, positions) has no name in the schema and is left out.
   d. Units that are in the graph are named by their nodes; the others are described in `qk_only_nodes`.
"""

from collections import defaultdict
from dataclasses import dataclass
from typing import Any

from swd_lens.analysis.audit import Audit
from swd_lens.analysis.graph.data import GraphData, records
from swd_lens.analysis.graph.features import FeatureNumbers
from swd_lens.hosts.sites import WRITES_RESIDUAL, parse_unit, split_name

# Viewers know these types; a unit of another one would not be drawn as a feature by all of them.
_UNIT_TYPE, _ERROR_TYPE = "cross layer transcoder", "mlp reconstruction error"
_MOST = 20  # of a node's pairs, and of either marginal
_PAIR = "pair"
_READS_AND_WRITES: tuple[str, ...] = ("reads the residual stream", "writes to it")  # columns of a graph without a prompt


@dataclass(frozen=True)
class NodePlacement:
    """Where a node stands in a viewer: its identifier, the row as text ("E": embeddings), the column, the feature number."""

    node_id: str
    layer: str
    column: int
    feature: int


class Places(dict[str, NodePlacement]):
    """Node -> NodePlacement, what the columns are called, and by how many rows blocks are moved up."""

    def __init__(self, tokens: list[str], rows_up: int):
        super().__init__()
        self.tokens, self.rows_up = tokens, rows_up


def is_measured(graph: GraphData) -> bool:
    """Whether nodes have activations, so that edges are contributions and can be added up."""
    return bool(graph.nodes["activation"].notna().any())


def placed(graph: GraphData, rows_up: int = 0) -> Places:
    """Where every node stands. rows_up: added to the block's number; features keep the true one."""
    numbers, n_layers = FeatureNumbers.of(graph), int(graph.settings["n_layers"])
    positions = graph.nodes["position"].dropna()
    # Names of the columns, at least two, and how far positions move to the right.
    tokens, shift = list(_READS_AND_WRITES), 0
    if len(positions):
        tokens = [str(token) for token in graph.settings["tokens"] or ()]
        tokens += [str(position) for position in range(len(tokens), int(positions.max()) + 1)]
        tokens, shift = (["", *tokens], 1) if len(tokens) == 1 else (tokens, 0)
    places = Places(tokens, rows_up)
    for row in records(graph.nodes):
        if row["position"] is None:
            column = int(row["kind"] != "unit" or split_name(row["site"])[1] in WRITES_RESIDUAL)
        else:
            column = int(row["position"]) + shift
        if row["kind"] == "token":
            layer, index, feature = "E", row["token"], column
        elif row["kind"] == "logit":
            layer, index, feature = str(n_layers + 1 + rows_up), row["token"], row["token"]
        else:
            layer, index = str(int(row["layer"]) + rows_up), numbers.index(row["site"], int(row["unit"]))
            feature = numbers.number(row["site"], int(row["unit"]))
        places[row["node"]] = NodePlacement(f"{layer}_{index}_{column}", layer, column, int(feature))
    return places


def viewer_graph(
    graph: GraphData, places: Places, audit: Audit | None, html: bool
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Nodes and links in the viewers' schema: the graph's own first, then tokens without edges, error nodes and their links.
    html: see `shown_text`."""
    weight, rows = "contribution" if is_measured(graph) else "weight", records(graph.nodes)
    links = [
        {"source": places[edge["source"]].node_id, "target": places[edge["target"]].node_id, "weight": edge[weight]}
        for edge in records(graph.edges)
    ]
    # Per node the share of the answers that goes through it; without a prompt the |weights| at it, as nothing else is known.
    influence = {places[row["node"]].node_id: row["influence"] or 0.0 for row in rows}
    for end in () if is_measured(graph) else ("source", "target"):
        for node, strength in zip(graph.edges[end], graph.edges["strength"], strict=True):
            influence[places[node].node_id] += strength
    nodes = [_drawn(row, places[row["node"]], graph.settings["answers"] or [], audit) for row in rows]
    # Nodes of a prompt's tokens that have no edge in the graph, from the first column with nodes on.
    ids = graph.settings["token_ids"] or []
    shift = len(places.tokens) - len(ids)  # 1 where a token stands alone
    drawn = {int(position) for position in graph.nodes["position"][graph.nodes["kind"] == "token"]}
    first = graph.nodes["position"].min() if ids else 0
    tokens = []
    for position in range(int(first), len(ids)):
        if position not in drawn:
            column = position + shift
            place = NodePlacement(f"E_{ids[position]}_{column}", "E", column, column)
            tokens.append(_node(place, "embedding", f'Emb: "{places.tokens[column]}"', 1.0))
    influence |= dict.fromkeys((token["node_id"] for token in tokens), 0.0)
    errors, left_out = _left_out(graph, places, rows, links)
    links += left_out
    entering: defaultdict[str, float] = defaultdict(float)
    for link in links:
        entering[link["target"]] += abs(link["weight"])
    for link in left_out:
        share = abs(link["weight"]) / entering[link["target"]]
        influence[link["source"]] = influence.get(link["source"], 0.0) + share * influence[link["target"]]
    shown, total, reached = [*nodes, *tokens, *errors], sum(influence.values()), 0.0
    cumulative: dict[str, float] = {}
    for node_id in sorted(influence, key=lambda node_id: -influence[node_id]) if total else ():
        reached += influence[node_id]
        cumulative[node_id] = min(reached / total, 1.0)
    for node in shown:
        node["influence"] = cumulative.get(node["node_id"])
        node["clerp"] = shown_text(node["clerp"], html)
    return shown, links


def shown_text(text: str, html: bool) -> str:
    """The text, for a page that takes it as HTML (`html`) without tags."""
    return text.replace("<", "‹").replace(">", "›") if html else text


def _node(place: NodePlacement, feature_type: str, clerp: str, activation: float | None) -> dict[str, Any]:
    layer, own, column = place.node_id.split("_")
    return {
        "node_id": place.node_id,
        "feature": place.feature,
        "layer": place.layer,
        "ctx_idx": place.column,
        "jsNodeId": {"embedding": f"E_{own}-{column}", "logit": f"L_{own}-{column}", _ERROR_TYPE: f"{place.node_id}-0"}.get(
            feature_type, f"{layer}_{own}-0"
        ),
        "reverse_ctx_idx": 0,
        "run_idx": 0,
        "token_prob": 0.0,
        "is_target_logit": False,
        "activation": activation,
        "feature_type": feature_type,
        "clerp": clerp,
    }


def _drawn(row: dict[str, Any], place: NodePlacement, answers: list[int], audit: Audit | None) -> dict[str, Any]:
    """A node of the graph's own."""
    if row["kind"] == "token":
        return _node(place, "embedding", f'Emb: "{row["label"]}"', row["activation"])
    if row["kind"] == "logit":
        p, token = row["probability"] or 0.0, row["label"].replace('"', "”").replace("(p=", "(p =")
        node = _node(place, "logit", f'Output "{token}" (p={p:.3f})', row["activation"])
        return node | {"token_prob": p, "is_target_logit": row["token"] == answers[0]}
    name = f"{row['site']}/{row['unit']}"
    label = row["label"] or ("" if audit is None else audit.labels.text(name))
    return _node(place, _UNIT_TYPE, f"{label} ({name})" if label else name, row["activation"])


def _left_out(
    graph: GraphData, places: Places, rows: list[dict[str, Any]], links: list[dict[str, Any]]
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
        layer, of, feature, words = place.layer, "error", -1, f"Left out of layer {row['layer']}"
        if row["kind"] == "logit":  # in the last block, so that answers are drawn above all blocks
            layer, of = str(int(graph.settings["n_layers"]) - 1 + places.rows_up), "answers"
            feature, words = -2, "Left out of the answers"
        source = f"{layer}_{of}_{place.column}"
        errors[source] = _node(NodePlacement(source, layer, place.column, feature), _ERROR_TYPE, words, None)
        left_out.append({"source": source, "target": place.node_id, "weight": left})
    return list(errors.values()), left_out


# ---------------------------------------------------------------------------------------------- query-key pairs


def traced(graph: GraphData, places: Places, attention: Any) -> tuple[dict[str, dict[str, Any]], dict[str, dict[str, Any]]]:
    """Results by node_id, and descriptions of units that are in none of the graph's nodes. attention: with the tables `heads`
    and `scores` of `swd_lens.graph.attention_paths`."""
    parts: defaultdict[tuple[int, int, int, int], list[Any]] = defaultdict(list)
    scores = attention.scores
    columns = ("layer", "head", "dest", "src", "part", "q unit", "k unit", "contribution")
    for layer, head, dest, src, *part in zip(*(scores[name].tolist() for name in columns), strict=True):
        parts[int(layer), int(head), int(dest), int(src)].append(part)
    numbers, described = FeatureNumbers.of(graph), {}

    def named(unit: str, position: int) -> str:
        node = f"{unit}@{position}"
        if node in places:
            return places[node].node_id
        site, index = parse_unit(unit)
        layer, own = str(split_name(site)[0] + places.rows_up), numbers.index(site, index)
        description = {
            "node_id": f"{layer}_{own}_{position}",
            "feature": numbers.number(site, index),
            "layer": layer,
            "ctx_idx": position,
            "feature_type": _UNIT_TYPE,
            "jsNodeId": f"{layer}_{own}-0",
            "clerp": unit,
            "activation": None,
        }
        described[description["node_id"]] = description
        return description["node_id"]

    results = {}
    for target, through in _places_of_nodes(attention, places).items():
        pairs: defaultdict[tuple[str, str], float] = defaultdict(float)
        marginals: tuple[defaultdict[str, float], ...] = (defaultdict(float), defaultdict(float))
        total = sum(through.values())
        for place, contribution in through.items():
            share = contribution / total
            for part, q_unit, k_unit, value in parts[place]:
                ends = [
                    named(unit, position) if isinstance(unit, str) else None
                    for unit, position in ((q_unit, place[2]), (k_unit, place[3]))
                ]
                if part == _PAIR:
                    pairs[str(ends[0]), str(ends[1])] += share * value
                for marginal, end in zip(marginals, ends, strict=True):
                    if end is not None:
                        marginal[end] += share * value
        results[target] = {
            "pair_wise_contributors": [[*ends, value] for ends, value in _strongest(pairs)],
            "top_q_marginal_contributors": [[end, value] for end, value in _strongest(marginals[0])],
            "top_k_marginal_contributors": [[end, value] for end, value in _strongest(marginals[1])],
        }
    shown = {end for result in results.values() for lists in result.values() for ends in lists for end in ends[:-1]}
    return results, {name: description for name, description in described.items() if name in shown}


def _places_of_nodes(attention: Any, places: Places) -> dict[str, dict[tuple[int, int, int, int], float]]:
    """node_id -> place (layer, head, dest, src) -> |contributions| of the edges into the node that run through it."""
    through: dict[str, dict[tuple[int, int, int, int], float]] = {}
    columns = ("target", "layer", "head", "dest", "src", "contribution")
    for target, *place, contribution in zip(*(attention.heads[name].tolist() for name in columns), strict=True):
        if target in places and contribution:
            of_node = through.setdefault(places[target].node_id, {})
            layer, head, dest, src = map(int, place)
            of_node[layer, head, dest, src] = of_node.get((layer, head, dest, src), 0.0) + abs(float(contribution))
    return through


def _strongest(values: dict[Any, float]) -> list[tuple[Any, float]]:
    return sorted(values.items(), key=lambda item: -abs(item[1]))[:_MOST]
