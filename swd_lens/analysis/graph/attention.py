"""attention_paths: the attention edges of a graph, split by head, and the scores of their patterns, split by pairs of units.

1. The run of the graph once more, all its factors attached, for the attention patterns. What flows through an edge of kind
   "attention" is a sum over heads (`head_paths` in edges.py): pattern[head, dest, src] times what the source hands to the head.
2. Where queries and keys have units (attn_q and attn_k, or attn_qkv), one more run shows their z and the scores of all heads and
   layers (qk/scores.py). Each score that a head's pattern has at an edge is taken apart (qk/parts.py): the strongest pairs of
   units by name, all other pairs, and what biases and ALiBi add.

Both sums are exact: an edge's heads add up to its contribution, a score's parts to the score before the cap.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from swd_lens.analysis.graph.build import activations_of, frozen_run, units_of_run
from swd_lens.analysis.graph.data import records, table
from swd_lens.analysis.graph.edges import ATTENTION, TOKEN, HeadPaths, Layout, head_paths, layout_of
from swd_lens.analysis.graph.edges import KINDS as EDGE_KINDS
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.analysis.qk.parts import ScoreParts, parts_of
from swd_lens.analysis.qk.scores import provenance, run_layers, sides_of
from swd_lens.base.checks import bounded
from swd_lens.base.record import Record, checked
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import require_no_dropout
from swd_lens.hosts.sites import Site
from swd_lens.units import attach

HEADS = {
    **dict.fromkeys(("source", "target"), "object"),
    **dict.fromkeys(("layer", "head", "dest", "src"), "int64"),
    **dict.fromkeys(("pattern", "contribution"), "float64"),
}
SCORES = {
    **dict.fromkeys(("layer", "head", "dest", "src"), "int64"),
    **dict.fromkeys(("part", "q unit", "k unit"), "object"),
    "contribution": "float64",
}
_PLACE = ["layer", "head", "dest", "src"]
PAIR, OTHERS = "pair", "other pairs"
# Parts without pairs -> the field of ScoreParts.
CONSTANTS = {"query bias": "query_bias", "key bias": "key_bias", "biases": "biases", "position": "position"}


@dataclass(frozen=True, repr=False, eq=False)
class AttentionPaths(Record):
    """The heads' shares of a graph's attention edges, and the scores that make them look there.

    Attributes:
        heads: one row per attention edge and head, in the order of the graph's edges: source, target (names of nodes), layer,
            head, dest, src (positions), pattern (probability), contribution. An edge's rows add up to its contribution.
        scores: the parts of the score of every (layer, head, dest, src) in `heads` whose layer has units of queries and keys:
            part ("pair", "other pairs", and, where they are not 0, "query bias", "key bias", "biases", "position"), q unit and
            k unit (names, of a pair), contribution. The rows of one place add up to the head's score before the cap.
        settings: model, fingerprints of the factors, the prompt, how queries and keys are made.
    """

    heads: pd.DataFrame
    scores: pd.DataFrame
    settings: Mapping[str, Any]

    def table(self, n: int | None = None) -> pd.DataFrame:
        """The n rows of `heads` with the largest contributions (None: all), with the score there and its strongest pair."""
        shown = self.heads.sort_values("contribution", key=lambda c: -c.abs(), kind="stable", ignore_index=True)
        shown = shown.head(len(shown) if n is None else n)
        if self.scores.empty:
            return shown
        sums = pd.DataFrame(self.scores.groupby(_PLACE)["contribution"].sum()).rename(columns={"contribution": "score"})
        pairs = pd.DataFrame(self.scores[self.scores["part"] == PAIR]).drop_duplicates(_PLACE).set_index(_PLACE)
        pairs = pairs.drop(columns="part").rename(columns={"contribution": "of the pair"})
        return shown.join(sums, on=_PLACE).join(pairs, on=_PLACE)

    def parts(self) -> tuple[Any, ...]:
        return (self.table(20), "table() gives all; .heads and .scores are the whole split.")

    @classmethod
    def from_dict(cls, values: Any) -> "AttentionPaths":
        """Make it of what `as_dict` gave, also after JSON.

        Raises:
            ValueError: it is something else.
        """
        rows = list[Mapping[str, Any]]
        values = checked("AttentionPaths", values, {"heads": rows, "scores": rows, "settings": dict[str, Any]})
        return cls(table(values["heads"], HEADS), table(values["scores"], SCORES), values["settings"])

    def __repr__(self) -> str:
        edges = len(self.heads[["source", "target"]].drop_duplicates())
        places = len(self.scores[_PLACE].drop_duplicates())
        return f"AttentionPaths({edges} edges by head, {places} scores by pairs of units)"


@with_torch_defaults
def attention_paths(model: Any, factors: Any, graph: UnitGraph, *, pairs: int = 8) -> AttentionPaths:
    """Split the attention edges of a graph by head, and the scores behind them by pairs of query and key units (ours).

        graph = swd.unit_graph(model, factors, circuit, prompt=prompt, attention="frozen")
        paths = swd.graph.attention_paths(model, factors, graph)

    Args:
        model: the host, with these sites not attached; left as it was.
        factors: those of the graph, all of them.
        graph: of one prompt, with attention="frozen".
        pairs: how many pairs of units stand by themselves, the strongest of each score; the others are summed.

    Raises:
        ValueError: a graph without frozen attention or of several prompts, other factors than the graph's, fewer than one pair.
        UnsupportedHostError: scores of queries and keys that are not made as we know it, see `swd_lens.qk`.
        AttachError: see `swd_lens.attach`.
    """
    if not graph.has_prompt or graph.settings["attention"] != "frozen":
        raise ValueError(
            'attention paths are of a graph of a prompt with attention="frozen", whose edges cross positions; this one has none'
        )
    if graph.settings.get("task_prompts"):
        raise ValueError(
            f"this graph is the mean of {graph.settings['task_prompts']} prompts, each with attention patterns of its "
            "own; give the unit_graph of one prompt"
        )
    bounded("pairs", pairs, 1)
    units, settings = units_of_run(model, factors, graph)
    require_no_dropout(model)
    ids = list(graph.settings["token_ids"])
    with torch.no_grad():
        # The graph's own units on its prompt. Where values have units, an edge that it drew begins at one of them, so that
        # they are among its nodes; so the paths are those that the graph followed.
        drawn: dict[Site, list[int]] = {}
        by_name = {site.name: site for site in units.sites}
        for site, unit in graph.nodes[graph.nodes["kind"] == "unit"].groupby("site")["unit"]:
            drawn[by_name[str(site)]] = sorted(set(unit.tolist()))
        drawn = {site: drawn[site] for site in units.sites if site in drawn}
        with attach(model, units):
            run = frozen_run(units, drawn, ids, drawn, ())
        heads = table(_head_rows(layout_of(units, drawn, run, answers=(), static=False, bounded=False), graph), HEADS)
        layers = sides_of(units, set(heads["layer"].tolist()))
        runs = run_layers(units, layers, torch.tensor([ids])) if layers else {}
        made_of = provenance(units, layers) if layers else {}
        tokens = tuple(map(str, graph.settings["tokens"]))
        by_head = {
            (layer, head): parts_of(runs[layer], head, tokens, made_of)
            for layer, head in dict.fromkeys(zip(heads["layer"].tolist(), heads["head"].tolist(), strict=True))
            if layer in runs
        }
        scores = table(_score_rows(by_head, heads, pairs), SCORES)
    return AttentionPaths(heads, scores, {**made_of, **settings, "pairs": pairs})


def _head_rows(layout: Layout, graph: UnitGraph) -> Iterator[dict[str, Any]]:
    """Every attention edge of the graph, head by head."""
    nodes = {row["node"]: row for row in records(graph.nodes)}
    paths: dict[str, dict[str, HeadPaths]] = {}
    for edge in records(graph.edges):
        if edge["kind"] != EDGE_KINDS[ATTENTION]:
            continue
        source, target = nodes[edge["source"]], nodes[edge["target"]]
        group = layout.group(target["layer"], "attn_o")
        assert group is not None and group.site is not None and group.read is not None
        if group.site.name not in paths:
            paths[group.site.name] = {
                TOKEN if path.source.site is None else path.source.site.name: path
                for path in head_paths(layout, group.site, group.read)
            }
        through = paths[group.site.name][source["site"] or TOKEN]
        items = through.source.items
        item = 0 if source["kind"] == TOKEN else items.index(source["unit"])
        dest, src = target["position"], source["position"]
        pattern = layout.run.patterns[target["layer"]]
        weights = through.through_each(pattern, src, item, dest, group.items.index(target["unit"]))
        z = float(activations_of(layout, through.source)[src * len(items) + item])
        for head, weight in enumerate(weights.tolist()):
            yield {
                "source": edge["source"],
                "target": edge["target"],
                "layer": target["layer"],
                "head": head,
                "dest": dest,
                "src": src,
                "pattern": float(pattern[head, dest, src]),
                "contribution": z * weight,
            }


def _score_rows(by_head: Mapping[tuple[int, int], ScoreParts], heads: pd.DataFrame, pairs: int) -> Iterator[dict[str, Any]]:
    """The parts of the scores at these places, each place once."""
    places = pd.DataFrame(heads[_PLACE]).drop_duplicates()
    for place in records(places):
        parts = by_head.get((place["layer"], place["head"]))
        if parts is None:
            continue
        dest, src = place["dest"], place["src"]
        q_site, k_site = parts.run.units.q.site.name, parts.run.units.k.site.name
        strongest = parts.strongest(dest, src, pairs)
        for row in records(strongest):
            names = {"q unit": f"{q_site}/{row['q unit']}", "k unit": f"{k_site}/{row['k unit']}"}
            yield {**place, "part": PAIR, **names, "contribution": row["contribution"]}
        others = float(parts.pairs[dest, src]) - float(strongest["contribution"].sum())
        yield {**place, "part": OTHERS, "contribution": others}
        for part, name in CONSTANTS.items():
            if contribution := float(getattr(parts, name)[dest, src]):
                yield {**place, "part": part, "contribution": contribution}
