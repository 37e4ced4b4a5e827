"""What the frontends do with a graph file before they draw it, as they were read in 2026: circuit-tracer's wheel 0.5.0
(util-cg.js, init-cg-link-graph.js, index.html) and Neuronpedia's webapp (graph/utils.ts, link-graph.tsx, save-to-db)."""

import math
import re
from collections import Counter
from typing import Any

ERROR = "mlp reconstruction error"


def unpaired(feature: int) -> tuple[int, int]:
    """(layer, index) of a feature number, in the floating point that both frontends use."""
    w = math.floor((math.sqrt(8 * feature + 1) - 1) / 2)
    index = feature - (w * w + w) // 2
    return w - index, index


def largest_layer(nodes: list[dict[str, Any]]) -> int:
    """Of nodes that are no answers; "E" is no number."""
    layers = [int(n["layer"]) for n in nodes if n["feature_type"] != "logit" and n["layer"] != "E"]
    return max(layers, default=0)


def circuit_tracer_row(graph: dict[str, Any], node: dict[str, Any]) -> int:
    """0 is the row of the embeddings."""
    if node["feature_type"] == "logit":
        return largest_layer(graph["nodes"]) + 2
    return 0 if node["layer"] == "E" else int(node["layer"]) + 1


def neuronpedia_row(graph: dict[str, Any], node: dict[str, Any]) -> int:
    """0 is the row of the embeddings; of gpt2-small's graphs layers are counted from 1."""
    shift = 0 if graph["metadata"]["scan"] == "gpt2-small" else 1
    if node["feature_type"] == "logit":
        return largest_layer(graph["nodes"]) + 1 + shift
    return 0 if node["layer"] == "E" else int(node["layer"]) + shift


def check_drawn(graph: dict[str, Any]) -> None:
    """Rules that both frontends have: every node is placed, none is dropped, links and groups lead to nodes."""
    nodes, tokens = graph["nodes"], graph["metadata"]["prompt_tokens"]
    ids = [node["node_id"] for node in nodes]
    assert len(set(ids)) == len(ids)
    # Dropped: what stands on more than 2/3 of the tokens. A node counts by layer, feature and token; errors, too.
    of_feature = Counter((node["layer"], node["feature"], node["ctx_idx"]) for node in nodes)
    assert max(of_feature.values()) <= len(tokens) * 2 / 3 and len(tokens) >= 2
    # Columns before the first one with nodes have no width; the first one's is never asked for.
    assert any(node["ctx_idx"] > 0 for node in nodes)
    assert all(0 <= node["ctx_idx"] < len(tokens) for node in nodes)
    for node in nodes:
        if node["feature_type"] == "logit":
            assert re.fullmatch(r'Output "[^"]*" \(p=[01]\.\d+\)', node["clerp"])
    for link in graph["links"]:
        assert link["source"] in ids and link["target"] in ids and math.isfinite(link["weight"])
    pinned = graph["qParams"]["pinnedIds"]
    assert set(pinned) <= set(ids) and len(pinned) <= 200
    for _, *members in graph["qParams"]["supernodes"]:
        assert set(members) <= set(pinned)  # groups are made of pinned nodes
    for node in nodes:
        assert node["influence"] is None or node["influence"] <= graph["metadata"]["node_threshold"]


def check_neuronpedia(graph: dict[str, Any], n_layers: int) -> None:
    """What an upload is refused for, and rows that are not there."""
    check_drawn(graph)
    for name in ("scan", "slug"):
        assert not re.search(r"[^a-zA-Z0-9_.-]", graph["metadata"][name])
    assert largest_layer(graph["nodes"]) > 0  # else "No layer found"
    for node in graph["nodes"]:
        assert (0 if node["layer"] == "E" else 1) <= neuronpedia_row(graph, node) <= n_layers + 1


def entering(graph: dict[str, Any]) -> dict[str, float]:
    """node_id -> sum of its links."""
    sums = dict.fromkeys((node["node_id"] for node in graph["nodes"]), 0.0)
    for link in graph["links"]:
        sums[link["target"]] += link["weight"]
    return sums
