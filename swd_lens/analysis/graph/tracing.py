"""Query-key pairs in the schema that Neuronpedia reads: `qk_tracing_results` of every node that attention writes to.

1. The drawn attention edges into a node run through places (head, dest, src); `AttentionPaths.heads` says how much of them goes
   through each.
2. A place's score is a sum over pairs of q and k units, `AttentionPaths.scores`. A node's result is the mean over its places of
   these parts, each place with its share of the |contributions| into the node; so it has the unit of a score.
3. A marginal is a unit's sum over all parts it stands in, the one with the other side's bias included. What has no unit (other
   pairs, biases, positions) has no name in the schema and is left out.
4. Units that are in the graph are named by their nodes; the others are described in `qk_only_nodes`.
"""

from collections import defaultdict
from typing import Any

from swd_lens.analysis.graph.data import GraphData
from swd_lens.analysis.graph.features import FeatureNumbers
from swd_lens.analysis.graph.nodes import Places
from swd_lens.hosts.sites import parse_unit, split_name

_MOST = 20  # of a node's pairs, and of either marginal
_PAIR = "pair"


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
            "feature_type": "cross layer transcoder",
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
