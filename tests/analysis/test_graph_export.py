"""Graphs for other tools' viewers: their frontends' rules, folders and names."""

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from swd_lens.analysis.graph import UnitGraph
from tests.analysis.graph_checks import PROMPTS, TOKENS, exported_json, toy_graph
from tests.analysis.viewer_rules import check_drawn, check_neuronpedia, circuit_tracer_row, neuronpedia_row, unpaired
from tests.refusals import refuses


@pytest.mark.parametrize("settings", PROMPTS)
def test_frontends_drop_nothing_and_have_a_row_for_everything(settings: dict[str, Any], tmp_path: Path) -> None:
    graph = toy_graph(**settings)
    written = exported_json(graph, tmp_path / "tracer")
    check_drawn(written)
    rows = [circuit_tracer_row(written, node) for node in written["nodes"]]
    assert min(rows) >= 0 and max(rows) <= 2 + 1
    for scan in ("gemma-2-2b", "gpt2-small"):
        written = exported_json(graph, tmp_path / scan, target="neuronpedia", scan=scan)
        check_neuronpedia(written, n_layers=2)
        of_block_0 = [n for n in written["nodes"] if n["clerp"].startswith("blocks.0.")]
        # Not on the embeddings' row, which is where gpt2-small's block 0 once lay.
        assert {neuronpedia_row(written, node) for node in of_block_0} == {1}
        assert {unpaired(node["feature"])[0] for node in of_block_0} == {0}
        answers = [n for n in written["nodes"] if n["feature_type"] == "logit"]
        assert {neuronpedia_row(written, node) for node in answers} <= {3}


def test_a_folder_lists_its_graphs_and_keeps_what_others_wrote(tmp_path: Path) -> None:
    graph = toy_graph(prompt=TOKENS)
    for slug in ("one", "two", "one"):
        exported = graph.export(tmp_path, slug=slug)
        assert exported.path.name == f"{slug}.json" and json.loads(exported.path.read_text())["metadata"]["slug"] == slug
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["two", "one"]
    assert all(entry["node_threshold"] == 1 and "swd_lens" not in entry for entry in listed)
    # circuit-tracer loads ./data/features/... from the folder that it serves as ./data.
    scan = Path(listed[0]["scan"])
    units = [n for n in json.loads((tmp_path / "one.json").read_text())["nodes"] if n["feature_type"].startswith("cross")]
    for node in units:
        file = tmp_path / scan.relative_to("data") / f"{node['feature']}.json"
        assert json.loads(file.read_text())["index"] == unpaired(node["feature"])[1]
    pd.testing.assert_frame_equal(UnitGraph.load(tmp_path / "one.json").edges, graph.edges)
    (tmp_path / "graph-metadata.json").write_text("{")
    refuses(ValueError, r"graph-metadata\.json is not a list of graphs, or damaged", graph.export, tmp_path)


def test_names_that_frontends_refuse(tmp_path: Path) -> None:
    graph = toy_graph(prompt=TOKENS)
    refuses(ValueError, "slug='a b'", graph.export, tmp_path, slug="a b")
    refuses(ValueError, r"slug='\.\./x'", graph.to_json, tmp_path / "x.json", slug="../x")
    refuses(ValueError, "scan='org/model'", graph.export, tmp_path, target="neuronpedia", scan="org/model")
    refuses(ValueError, "target", graph.export, tmp_path, target="elsewhere")
    assert not list(tmp_path.iterdir())
    # A host's own name is made to fit.
    graph = UnitGraph(graph.nodes, graph.edges, {**graph.settings, "model": "HuggingFaceTB/SmolLM2-135M"})
    assert exported_json(graph, tmp_path, target="neuronpedia")["metadata"]["scan"] == "HuggingFaceTB-SmolLM2-135M"
    graph = UnitGraph(graph.nodes, graph.edges, {**graph.settings, "model": "gpt2"})
    assert exported_json(graph, tmp_path, target="neuronpedia")["metadata"]["scan"] == "gpt2-small"


@pytest.mark.parametrize("slug", ["graph-metadata", "Graph-Metadata", "run", ".hidden"])
def test_a_graph_takes_no_place_of_a_file_of_ours(slug: str, tmp_path: Path) -> None:
    graph = toy_graph(prompt=TOKENS)
    graph.export(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    refuses(ValueError, f"slug '{slug}'", graph.export, tmp_path, slug=slug)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_neuronpedia_is_warned_of_a_graph_of_block_0_alone(tmp_path: Path) -> None:
    graph = toy_graph(units=["blocks.0.attn_o", "blocks.0.mlp_in"])
    with pytest.warns(UserWarning, match="one row higher"):
        written = exported_json(graph, tmp_path, target="neuronpedia")
    check_neuronpedia(written, n_layers=2)
    assert {unpaired(node["feature"])[0] for node in written["nodes"]} == {0}


def test_thresholds_stand_where_each_frontend_reads_them(tmp_path: Path) -> None:
    graph = toy_graph(prompt=TOKENS)
    tracer, neuronpedia = (exported_json(graph, tmp_path, target=target) for target in ("circuit-tracer", "neuronpedia"))
    assert tracer["metadata"]["node_threshold"] == neuronpedia["metadata"]["node_threshold"] == 1
    # In circuit-tracer's page a threshold among the qParams wins over the slider.
    assert "pruningThreshold" not in tracer["qParams"] and neuronpedia["qParams"]["pruningThreshold"] == 1
    assert tracer["metadata"]["schema_version"] == neuronpedia["metadata"]["schema_version"] == 1
    # Influence is a cumulative share of all nodes, errors too; without a prompt it is of weights.
    for written in (tracer, exported_json(toy_graph(), tmp_path)):
        shown = sorted(node["influence"] for node in written["nodes"])
        assert shown[0] < 0.5 and shown[-1] == pytest.approx(1.0) and len(set(shown)) > len(shown) / 2
