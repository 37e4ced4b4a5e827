"""Graphs for the viewer's tests: a large one made up, and a small true one with everything that a page can show."""

import json
import random
import re
from typing import Any

import pandas as pd

from swd_lens.analysis.graph.data import EDGES, NODES, table
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.analysis.graph.viewer.page import GraphPage
from tests.analysis.graph_checks import FROZEN, drawn

POSITIONS, LAYERS = 15, 30


def large_graph(n_units: int = 380, n_edges: int = 4_000) -> UnitGraph:
    """About 400 nodes of a deep model at 15 positions, and this many links, strengths falling off as in real graphs."""
    generator = random.Random(0)
    rows: list[dict[str, Any]] = [
        {"node": f"token@{p}", "kind": "token", "layer": -1, "position": p, "token": p, "label": f"·word{p}"}
        for p in range(POSITIONS)
    ]
    units = set()
    while len(units) < n_units:
        position = generator.choice([POSITIONS - 1] * 5 + list(range(POSITIONS)))
        units.add((generator.randrange(LAYERS), generator.choice(("attn_o", "mlp_out")), position, generator.randrange(600)))
    for layer, kind, position, unit in sorted(units):
        site = f"blocks.{layer}.{kind}"
        rows.append(
            {"node": f"{site}/{unit}@{position}", "kind": "unit", "layer": layer, "site": site, "unit": unit}
            | {"position": position, "label": generator.choice(("", "", "a name that came before", "past tense"))}
        )
    for i in range(5):
        rows.append(
            {"node": f"logit {i}", "kind": "logit", "layer": LAYERS, "position": POSITIONS - 1, "token": i}
            | {"label": f"·answer{i}", "probability": 0.5 / (i + 1)}
        )
    for row in rows:
        row["activation"] = 1.0 if row["kind"] == "token" else generator.gauss(0, 3)
    pairs = set()
    while len(pairs) < n_edges:
        i, j = sorted(generator.sample(range(len(rows)), 2))
        if rows[i]["layer"] < rows[j]["layer"] and rows[i]["position"] <= rows[j]["position"]:
            pairs.add((i, j))
    edges = []
    for i, j in pairs:
        weight = generator.gauss(0, 1) * 10 ** generator.uniform(-2, 0.5)
        across = rows[i]["position"] != rows[j]["position"]
        edges.append(
            {"source": rows[i]["node"], "target": rows[j]["node"], "kind": "attention" if across else "residual"}
            | {"weight": weight, "contribution": weight * rows[i]["activation"], "strength": abs(weight) / 10}
        )
    into: dict[str, float] = {}
    for edge in edges:
        into[edge["target"]] = into.get(edge["target"], 0.0) + edge["contribution"]
    for row in rows:
        row["rest"] = 0.0 if row["kind"] == "token" else row["activation"] - into.get(row["node"], 0.0)
        row["influence"] = generator.random() ** 4
    frame = table(edges, EDGES).sort_values("strength", ascending=False, ignore_index=True)
    words = [f" word{p}" for p in range(POSITIONS)]
    settings = {"model": "made up", "n_layers": LAYERS, "prompt": "".join(words), "tokens": words, "attention": "frozen"}
    settings |= {"token_ids": list(range(POSITIONS)), "answers": list(range(5)), "factors": {}, "edges_possible": len(edges)}
    return UnitGraph(table(rows, NODES), frame, settings)


class Paths:
    """What `attention_paths` gives, made by hand: two heads per attention edge, and the parts of their scores."""

    def __init__(self, graph: UnitGraph):
        position = dict(zip(graph.nodes["node"], graph.nodes["position"], strict=True))
        heads, scores = [], []
        for row in graph.edges[graph.edges["kind"] == "attention"].itertuples():
            place = {"layer": int(str(row.target).split(".")[1]), "dest": position[row.target], "src": position[row.source]}
            for head, share in ((0, 0.75), (1, 0.25)):
                where = {**place, "head": head}
                heads.append(
                    {"source": row.source, "target": row.target, **where, "pattern": share}
                    | {"contribution": share * float(row.contribution)}  # pyright: ignore[reportArgumentType]
                )
                q, k = f"blocks.{place['layer']}.attn_q/3", f"blocks.{place['layer']}.attn_k/1"
                scores.append({**where, "part": "pair", "q unit": q, "k unit": k, "contribution": 2.0})
                scores.append({**where, "part": "other pairs", "q unit": None, "k unit": None, "contribution": -0.5})
        columns = ["source", "target", "layer", "head", "dest", "src", "pattern", "contribution"]
        self.heads = pd.DataFrame(heads, columns=columns)
        columns = ["layer", "head", "dest", "src", "part", "q unit", "k unit", "contribution"]
        self.scores = pd.DataFrame(scores, columns=columns).drop_duplicates(
            ["layer", "head", "dest", "src", "part"], ignore_index=True
        )


def page_data(page: GraphPage) -> Any:
    """The data that a page carries."""
    found = re.search(r'<script id="data" type="application/json">(.*?)</script>', page.html, flags=re.DOTALL)
    assert found
    return json.loads(found[1])


def small_graph() -> tuple[Any, Any, Any]:
    """A toy model, random factors, and the graph of all of their units on one prompt."""
    return drawn(("attn_v", "attn_o", "mlp_in", "mlp_out"), answers=3, isolated=True, **FROZEN)
