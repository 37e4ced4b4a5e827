"""What a viewer shows when it opens."""

from pathlib import Path

import pytest

from swd_lens.analysis.graph import unit_graph
from swd_lens.analysis.graph.pinned import pinned_nodes
from swd_lens.circuits import Circuit, attribute
from tests.analysis.graph_checks import TOKENS, exported_json, random_factors
from tests.micro import random_split, toy_model


def test_a_circuit_is_pinned_and_what_is_asked_for(tmp_path: Path) -> None:
    model = toy_model()
    factors = random_factors(model, "attn_v", "attn_o", "mlp_in", "mlp_out")
    scores = attribute(model, factors, random_split(), positions="all")
    circuit = Circuit.of(factors, scores, scores.ranking()[:9])
    graph = unit_graph(model, factors, circuit, prompt=TOKENS, attention="frozen", isolated=True)
    opened = pinned_nodes(graph)
    ends = {*graph.edges["source"], *graph.edges["target"]}
    drawn = {node.split("@")[0] for node in ends if node.startswith("blocks")}
    assert {name.split("@")[0] for name in opened if name.startswith("blocks")} == drawn
    assert {name for name in opened if not name.startswith("blocks")} == {
        node for node in graph.nodes["node"] if node.startswith("logit")
    }
    unit = circuit.names[0]
    at_all = [f"{unit}@{position}" for position in range(len(TOKENS))]
    assert pinned_nodes(graph, [unit]) == at_all and pinned_nodes(graph, [at_all[2], "token@0"]) == [at_all[2], "token@0"]
    assert set(pinned_nodes(graph, circuit)) == set(graph.nodes["node"][graph.nodes["kind"] == "unit"])
    written = exported_json(graph, tmp_path, pinned=[unit])
    assert len(written["qParams"]["pinnedIds"]) == len(TOKENS)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp_in/99 is pinned but not in the graph"):
        graph.export(tmp_path, pinned=["blocks.0.mlp_in/99"])
    with pytest.raises(ValueError, match="no node of this graph"):
        graph.export(tmp_path, groups={"mine": ["nowhere"]})
