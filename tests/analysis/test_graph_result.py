"""Unit graphs as files: the JSON of circuit-graph viewers, and the graph in it."""

import json
from collections import Counter

import pandas as pd
import pytest

from swd_lens.analysis.graph import UnitGraph, unit_graph
from swd_lens.analysis.graph.data import records
from swd_lens.circuits import Circuit, attribute
from tests.analysis.graph_checks import TOKENS, random_factors, toy_graph
from tests.analysis.viewer_rules import check_drawn
from tests.micro import random_split, toy_model
from tests.refusals import refuses

# What Neuronpedia's graph-schema.json and circuit-tracer's graph_models.py require, and of what type.
METADATA = {"slug": str, "scan": str, "prompt_tokens": list, "prompt": str, "transcoder_list": list}
QPARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {"node_id": str, "feature": int, "layer": str, "ctx_idx": int, "feature_type": str, "jsNodeId": str, "clerp": str}
NODE_OPTIONAL = {"influence": (float, type(None)), "activation": (float, type(None)), "token_prob": float}
LINK = {"source": str, "target": str, "weight": float}


def _written(graph: UnitGraph, path) -> dict:
    graph.to_json(path, slug="by-hand")
    return json.loads(path.read_text())


@pytest.mark.parametrize("settings", [{}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}])
def test_json_is_what_viewers_read(settings, tmp_path):
    graph = toy_graph(**settings)
    written = _written(graph, tmp_path / "graph.json")
    for part, keys in (("metadata", METADATA), ("qParams", QPARAMS)):
        assert all(isinstance(written[part][key], kind) for key, kind in keys.items())
    nodes, links = written["nodes"], written["links"]
    errors = [node["node_id"] for node in nodes if node["feature_type"] == "mlp reconstruction error"]
    left_out = [link for link in links if link["source"] in errors]
    counts = Counter(node["feature_type"] for node in nodes)
    drawn = graph.nodes["kind"].value_counts()
    assert counts["cross layer transcoder"] == drawn["unit"] and counts["logit"] == drawn.get("logit", 0)
    # All tokens between the first and the last: viewers call columns by them.
    assert counts["embedding"] == (len(TOKENS) if settings.get("attention") else drawn.get("token", 0))
    assert len(links) - len(left_out) == len(graph.edges) > 0
    assert bool(errors) == bool(left_out) == bool(settings)
    for node in nodes:
        assert all(isinstance(node[key], kind) for key, kind in (NODE | NODE_OPTIONAL).items())
        assert node["feature_type"] in ("cross layer transcoder", "embedding", "logit", "mlp reconstruction error")
        # Viewers split identifiers: layer_feature_position, with the layer repeated.
        layer, _, position = node["node_id"].split("_")
        assert layer == node["layer"] and int(position) == node["ctx_idx"]
    check_drawn(written)
    # A unit is one feature whatever its position, and no two units of a layer share a number.
    features = {(node["layer"], node["feature"]) for node in nodes if node["feature_type"].startswith("cross")}
    units = {(row["site"], row["unit"]) for row in records(graph.nodes) if row["kind"] == "unit"}
    assert len(features) == len(units)
    assert all(isinstance(link[key], kind) for key, kind in LINK.items() for link in links)
    assert links[0]["weight"] == graph.edges.iloc[0]["contribution" if settings else "weight"]


def test_json_round_trip(tmp_path):
    for i, settings in enumerate(({}, {"prompt": TOKENS, "attention": "frozen", "labels": {"blocks.0.mlp_in/1": "π <b>"}})):
        graph = toy_graph(**settings)
        graph.to_json(tmp_path / f"{i}.json")
        loaded = UnitGraph.load(tmp_path / f"{i}.json")
        pd.testing.assert_frame_equal(loaded.nodes, graph.nodes)
        pd.testing.assert_frame_equal(loaded.edges, graph.edges)
        assert loaded.settings == graph.settings and repr(loaded) == repr(graph)
        assert loaded.plot().svg == graph.plot().svg


def test_files_that_are_no_graph(tmp_path):
    refuses(FileNotFoundError, "no graph file", UnitGraph.load, tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text('{"metadata": {"slug": "of another tool"}}')
    refuses(ValueError, "not a graph that swd_lens wrote", UnitGraph.load, tmp_path / "other.json")
    written = _written(toy_graph(), tmp_path / "later.json")
    written["metadata"]["swd_lens"]["version"] = 99
    (tmp_path / "later.json").write_text(json.dumps(written))
    refuses(ValueError, r"format 99.*newer than this swd_lens; update it", UnitGraph.load, tmp_path / "later.json")


def test_what_viewers_change_is_theirs_and_the_graph_is_not(tmp_path):
    """A changed weight of the graph was once read as if it were its own."""
    path, graph = tmp_path / "graph.json", toy_graph(prompt=TOKENS)
    written = _written(graph, path)
    written["qParams"]["pinnedIds"] = ["x"]
    written["nodes"][0]["clerp"] = "named by a reader"
    path.write_text(json.dumps(written))
    pd.testing.assert_frame_equal(UnitGraph.load(path).edges, graph.edges)
    written["metadata"]["swd_lens"]["edges"][0]["weight"] *= 2
    path.write_text(json.dumps(written))
    refuses(ValueError, r"graph\.json: not what was written there as a unit graph", UnitGraph.load, path)


def test_a_circuit_brings_its_scores():
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_in")
    scores = attribute(model, factors, random_split(), positions="all")
    circuit = Circuit.of(factors, scores, scores.ranking()[:12])
    graph = unit_graph(model, factors, circuit, isolated=True)
    assert len(graph.nodes) == 12 and graph.settings["task"] == "by hand"
    best = graph.nodes.set_index("node").loc[circuit.names[0]]
    assert best["rank"] == 1 and best["score"] == pytest.approx(float(scores.top(1)["score"].iloc[0]))
    others = random_factors(model, "attn_o", "mlp_in", n_units=6)
    refuses(ValueError, "attribute these factors first", unit_graph, model, others, circuit)
