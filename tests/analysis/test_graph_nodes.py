"""Nodes and links of viewers: sums at every node, and texts."""

from pathlib import Path
from typing import Any

import pytest

from swd_lens.analysis.graph.data import records
from tests.analysis.graph_checks import PROMPTS, TOKENS, exported_json, toy_graph
from tests.analysis.viewer_rules import ERROR, check_drawn, entering


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
