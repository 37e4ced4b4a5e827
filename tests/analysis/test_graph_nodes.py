"""Nodes and links of viewers: sums at every node, texts, and query-key pairs of the places that a node's edges run through."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from swd_lens.analysis.graph.data import records
from tests.analysis.graph_checks import PROMPTS, TOKENS, exported_json, toy_graph
from tests.analysis.viewer_rules import ERROR, check_drawn, entering, unpaired


@pytest.mark.parametrize("settings", PROMPTS[1:])
def test_links_into_a_node_add_up_to_its_activation(settings: dict[str, Any], tmp_path: Path) -> None:
    for keep in (12, None):
        graph = toy_graph(**settings, keep=keep)
        written = exported_json(graph, tmp_path)
        sums = entering(written)
        nodes = {node["node_id"]: node for node in written["nodes"]}
        counted = 0
        for node, row in zip(written["nodes"], records(graph.nodes), strict=False):
            if row["kind"] != "token":
                assert sums[node["node_id"]] == pytest.approx(row["activation"], abs=1e-5)
                counted += 1
        assert counted > 5
        # Every edge kept: an error link is the graph's own `rest`.
        rests = {link["target"]: link["weight"] for link in written["links"] if nodes[link["source"]]["feature"] < 0}
        if keep is None:
            for node, row in zip(written["nodes"], records(graph.nodes), strict=False):
                assert rests.get(node["node_id"], 0.0) == pytest.approx(row["rest"], abs=1e-5)
        assert {nodes[link["source"]]["feature_type"] for link in written["links"] if link["target"] in rests} >= {ERROR}


def test_texts_that_would_be_tags_or_ends_of_an_answer(tmp_path: Path) -> None:
    graph = toy_graph(prompt=TOKENS, labels={"blocks.0.mlp_in/1": "<img src=x onerror=alert(1)>"})
    graph.nodes.loc[graph.nodes["kind"] == "logit", "label"] = 'a "(p=2)" <b>'
    written = exported_json(graph, tmp_path)
    check_drawn(written)
    assert not any("<" in node["clerp"] for node in written["nodes"])
    labelled = [n["clerp"] for n in exported_json(graph, tmp_path, target="neuronpedia")["nodes"]]
    assert "<img src=x onerror=alert(1)> (blocks.0.mlp_in/1)" in labelled


def _attention() -> SimpleNamespace:
    """Two heads carry an edge into blocks.1.attn_o/0@4; three quarters of it come through head 0."""
    target = {"target": "blocks.1.attn_o/0@4", "layer": 1, "dest": 4, "src": 2, "pattern": 0.5}
    heads = [
        {"source": "blocks.1.attn_v/1@2", **target, "head": 0, "contribution": 0.6},
        {"source": "blocks.1.attn_v/3@2", **target, "head": 0, "contribution": -0.3},
        {"source": "blocks.1.attn_v/1@2", **target, "head": 1, "contribution": 0.3},
        {"source": "token@0", **target, "target": "not drawn", "head": 1, "contribution": 9.0},
    ]
    parts = [
        (0, "pair", "blocks.1.attn_q/0", "blocks.1.attn_q/3", 2.0),
        (1, "pair", "blocks.1.attn_q/0", "blocks.1.attn_q/3", -4.0),
        (1, "pair", "blocks.1.attn_q/0", "blocks.0.mlp_in/4", 8.0),
        (0, "key bias", "blocks.1.attn_q/0", None, 1.0),
        (0, "query bias", None, "blocks.1.attn_q/3", 0.5),
        (0, "other pairs", None, None, 7.0),
    ]
    names = ("head", "part", "q unit", "k unit", "contribution")
    scores = [{"layer": 1, "dest": 4, "src": 2, **dict(zip(names, part, strict=True))} for part in parts]
    return SimpleNamespace(heads=pd.DataFrame(heads), scores=pd.DataFrame(scores))


def test_query_key_pairs_of_the_places_that_edges_run_through(tmp_path: Path) -> None:
    units = [("blocks.1.attn_o", 0), ("blocks.1.attn_v", 1), ("blocks.1.attn_v", 3), ("blocks.1.attn_q", 0)]
    graph = toy_graph(units=units, prompt=TOKENS, attention="frozen", isolated=True)
    for target, rows_up in (("circuit-tracer", 0), ("neuronpedia", 0)):
        written = exported_json(graph, tmp_path, attention=_attention(), target=target)
        traced = {n["node_id"]: n["qk_tracing_results"] for n in written["nodes"] if "qk_tracing_results" in n}
        # Five sites: attn_q is 0, attn_v 1, attn_o 2, mlp_in 3; index = unit * 5 + place.
        assert list(traced) == [f"{1 + rows_up}_2_4"]
        result = traced["1_2_4"]
        # 0.75 * 2 + 0.25 * -4, and 0.25 * 8
        assert result["pair_wise_contributors"] == [["1_0_4", "0_23_2", 2.0], ["1_0_4", "1_15_2", 0.5]]
        # 0.75 * (2 + 1) + 0.25 * (-4 + 8); 0.25 * 8 and 0.75 * (2 + 0.5) + 0.25 * -4
        assert result["top_q_marginal_contributors"] == [["1_0_4", 3.25]]
        assert result["top_k_marginal_contributors"] == [["0_23_2", 2.0], ["1_15_2", 0.875]]
        # attn_q/0@4 is drawn; the keys are not, so they are described beside the graph.
        ids = {node["node_id"] for node in written["nodes"]}
        assert "1_0_4" in ids and set(written["qk_only_nodes"]) == {"0_23_2", "1_15_2"}
        key = written["qk_only_nodes"]["1_15_2"]
        assert key["clerp"] == "blocks.1.attn_q/3" and key["ctx_idx"] == 2 and unpaired(key["feature"]) == (1, 15)
