"""Unit graphs as files and pictures: the JSON of circuit-graph viewers, the SVG, and the figure of high-attribution paths."""

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections import Counter

import pandas as pd
import pytest

from swd_lens.analysis.graph import UnitGraph, draw, plot_unit_paths, unit_graph
from swd_lens.analysis.graph.data import records
from swd_lens.base.errors import UnsealedFileWarning
from swd_lens.base.sealed import seal
from swd_lens.circuits import Circuit, attribute
from swd_lens.tasks import load_task
from swd_lens.train.baselines import svd
from tests.analysis.graph_checks import TOKENS, all_units, random_factors
from tests.micro import random_split, toy_model

# What Neuronpedia's graph-schema.json and circuit-tracer's graph_models.py require, and of what type.
METADATA = {"slug": str, "scan": str, "prompt_tokens": list, "prompt": str, "transcoder_list": list}
QPARAMS = {"pinnedIds": list, "supernodes": list, "linkType": str, "clickedId": str, "sg_pos": str}
NODE = {
    "node_id": str,
    "feature": int,
    "layer": str,
    "ctx_idx": int,
    "feature_type": str,
    "jsNodeId": str,
    "clerp": str,
}
NODE_OPTIONAL = {"influence": (float, type(None)), "activation": (float, type(None)), "token_prob": float}
LINK = {"source": str, "target": str, "weight": float}


def _graph(**settings) -> UnitGraph:
    model = toy_model()
    factors = random_factors(model, "attn_v", "attn_o", "mlp_in", "mlp_out")
    return unit_graph(model, factors, all_units(factors), **settings)


def _written(graph: UnitGraph, path) -> dict:
    graph.to_json(path, slug="by-hand")
    return json.loads(path.read_text())


@pytest.mark.parametrize("settings", [{}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}])
def test_json_is_what_viewers_read(settings, tmp_path):
    graph = _graph(**settings)
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
        assert layer == node["layer"] and int(position) == node["ctx_idx"] < len(written["metadata"]["prompt_tokens"])
        if node["feature_type"] == "logit":
            assert 0 <= float(node["clerp"].split("(p=")[1].split(")")[0]) <= 1
    ids = [node["node_id"] for node in nodes]
    assert len(set(ids)) == len(ids)
    # A unit is one feature whatever its position, and no two units of a layer share a number.
    features = {(node["layer"], node["feature"]) for node in nodes if node["feature_type"].startswith("cross")}
    units = {(row["site"], row["unit"]) for row in records(graph.nodes) if row["kind"] == "unit"}
    assert len(features) == len(units)
    for link in links:
        assert all(isinstance(link[key], kind) for key, kind in LINK.items())
        assert link["source"] in ids and link["target"] in ids
    assert links[0]["weight"] == graph.edges.iloc[0]["contribution" if settings else "weight"]
    if settings:
        shown = sorted((node["influence"] for node in nodes), reverse=True)
        assert shown[0] == pytest.approx(1.0)  # a cumulative share


def test_json_round_trip(tmp_path):
    for i, settings in enumerate(
        ({}, {"prompt": TOKENS, "attention": "frozen", "labels": {"blocks.0.mlp_in/1": "π <b>"}})
    ):
        graph = _graph(**settings)
        graph.to_json(tmp_path / f"{i}.json")
        loaded = UnitGraph.load(tmp_path / f"{i}.json")
        pd.testing.assert_frame_equal(loaded.nodes, graph.nodes)
        pd.testing.assert_frame_equal(loaded.edges, graph.edges)
        assert loaded.settings == graph.settings and repr(loaded) == repr(graph)
        assert loaded.plot().svg == graph.plot().svg


def test_files_that_are_no_graph(tmp_path):
    with pytest.raises(FileNotFoundError, match="no graph file"):
        UnitGraph.load(tmp_path / "nothing.json")
    (tmp_path / "other.json").write_text("{")
    with pytest.raises(ValueError, match=r"other\.json is not a unit graph, or damaged"):
        UnitGraph.load(tmp_path / "other.json")
    for text in ("{}", '{"metadata": {"slug": "of another tool"}}', "[]"):
        (tmp_path / "other.json").write_text(text)
        with pytest.raises(ValueError, match="not a graph that swd_lens wrote"):
            UnitGraph.load(tmp_path / "other.json")
    written = _written(_graph(), tmp_path / "later.json")
    written["metadata"]["swd_lens"]["version"] = 99
    (tmp_path / "later.json").write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"format 99.*update swd_lens"):
        UnitGraph.load(tmp_path / "later.json")


def test_what_viewers_change_is_theirs_and_the_graph_is_not(tmp_path):
    """A changed weight of the graph was once read as if it were its own."""
    path, graph = tmp_path / "graph.json", _graph(prompt=TOKENS)
    written = _written(graph, path)
    written["qParams"]["pinnedIds"] = ["x"]
    written["nodes"][0]["clerp"] = "named by a reader"
    path.write_text(json.dumps(written))
    pd.testing.assert_frame_equal(UnitGraph.load(path).edges, graph.edges)
    written["metadata"]["swd_lens"]["edges"][0]["weight"] *= 2
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"graph\.json: not what was written there as a unit graph"):
        UnitGraph.load(path)
    old = written["metadata"]["swd_lens"]
    del old["sha256"]  # as earlier versions wrote it
    path.write_text(json.dumps(written))
    with pytest.warns(UnsealedFileWarning, match=r"graph\.json carries no hash"):
        UnitGraph.load(path)


@pytest.mark.parametrize(
    "change",
    [
        lambda values: values["edges"][0].update(source="nowhere"),
        lambda values: values["nodes"].append(values["nodes"][0]),
        lambda values: values["nodes"][0].update(layer="x"),
        lambda values: values["settings"].pop("answers"),
        lambda values: values.update(nodes=3),
    ],
)
def test_other_values_are_no_graph(tmp_path, change):
    path = tmp_path / "graph.json"
    written = _written(_graph(prompt=TOKENS), path)
    change(written["metadata"]["swd_lens"])
    written["metadata"]["swd_lens"] = seal(written["metadata"]["swd_lens"])
    path.write_text(json.dumps(written))
    with pytest.raises(ValueError, match=r"graph\.json is not a unit graph, or damaged"):
        UnitGraph.load(path)


def test_odd_names_are_seen_in_the_drawing_and_in_its_words():
    graph = _graph(prompt=TOKENS)
    unit = graph.nodes[graph.nodes["kind"] == "unit"].iloc[0]
    page = draw(graph, {f"{unit['site']}/{unit['unit']}": "a\x1b\x00\u202e"})._repr_html_()
    assert "a␛␀⟨U+202E⟩" in page and not [c for c in page if not c.isprintable() and c != "\n"]


# ---------------------------------------------------------------------------------------------- pictures


def _elements(svg: str, tag: str) -> list:
    return ElementTree.fromstring(svg).findall(f".//{{http://www.w3.org/2000/svg}}{tag}")


@pytest.mark.parametrize("settings", [{}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}])
def test_the_drawing_shows_every_node_and_edge(settings, tmp_path):
    graph = _graph(**settings)
    drawing = draw(graph)
    boxes, paths = _elements(drawing.svg, "rect"), _elements(drawing.svg, "path")
    assert len(boxes) == len(graph.nodes) and len(paths) == len(graph.edges)
    signs = graph.edges["contribution" if settings else "weight"]
    assert sum("stroke-dasharray" in path.attrib for path in paths) == int((signs < 0).sum()) > 0
    width, height = (float(ElementTree.fromstring(drawing.svg).attrib[name]) for name in ("width", "height"))
    corners = [[float(box.attrib[name]) for name in ("x", "y", "width", "height")] for box in boxes]
    assert all(x >= 0 and y >= 0 and x + w <= width and y + h <= height for x, y, w, h in corners)
    # Boxes of one row do not overlap.
    for i, (x, y, w, _) in enumerate(corners):
        assert not any(y == v and x < u + wide and u < x + w for u, v, wide, _ in corners[i + 1 :])
    strongest = graph.edges.iloc[0]
    assert f"{strongest['source']} → {strongest['target']}" in drawing.words
    drawing.save(tmp_path / "graph.svg")
    assert (tmp_path / "graph.svg").read_text() == drawing.svg
    assert draw(graph).svg == drawing.svg


def test_labels_are_escaped():
    graph = _graph(prompt=TOKENS)
    unit = graph.nodes[graph.nodes["kind"] == "unit"].iloc[0]
    name = f"{unit['site']}/{unit['unit']}"
    drawing = draw(graph, {name: "<script>alert('x')</script>"})
    page = drawing._repr_html_()
    assert "<script" not in page and "&lt;script&gt;" in page
    assert "overflow-x:auto" in page and 'role="img"' in page and "<details>" in page
    assert "<script" not in graph._repr_html_()


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
    with pytest.raises(ValueError, match="attribute these factors first"):
        unit_graph(model, others, circuit)


def test_paths_of_the_best_units():
    model = toy_model()
    factors = random_factors(model, "mlp_out")
    scores = attribute(model, factors, random_split())
    best = scores.ranking()[0]
    figure = plot_unit_paths(model, factors, scores, labels={f"{best[0]}/{best[1]}": "cost in $ and $"})
    shown = [text.get_text() for text in figure.axes[0].texts]
    assert any(rf"$z_{{{best[1]}}}$  cost in \$ and \$" == text for text in shown)
    assert sum(text.startswith("rank 1 of 10") for text in shown) == 1
    assert sum(bool(re.match(r"rank \d+ of 10", text)) for text in shown) == 4  # two layers, two units each
    figure.savefig(io.BytesIO(), format="png")  # the formulas in it are ones
    only = plot_unit_paths(model, factors, scores, layers=[1], per_layer=3)
    assert sum(bool(re.match(r"rank \d+ of 10", t.get_text())) for t in only.axes[0].texts) == 3


def test_paths_that_cannot_be_drawn():
    model = toy_model()
    factors = random_factors(model, "mlp_out")
    scores = attribute(model, factors, random_split())
    for match, settings in {
        "no units of mlp_out in layer 7": {"layers": [7]},
        "layers is empty": {"layers": []},
        "per_layer=0": {"per_layer": 0},
        "do not write to the residual stream": {"kind": "mlp_in"},
        "none of these scores is of a site attn_o": {"kind": "attn_o"},
        "no such unit": {"labels": {"blocks.0.mlp_out/99": "x"}},
    }.items():
        with pytest.raises(ValueError, match=match):
            plot_unit_paths(model, factors, scores, **settings)
    with pytest.raises(ValueError, match="attribute these factors first"):
        plot_unit_paths(model, random_factors(model, "mlp_out", n_units=6), scores)


def test_the_embedded_model_in_one_call_each(default_model):
    factors = svd(default_model, "mlp_out")
    task = load_task("greater_than", default_model, n_train=8, n_test=8)
    scores = attribute(default_model, factors, task.train)
    assert len(plot_unit_paths(default_model, factors, scores).axes[0].texts) > 12
    graph = unit_graph(default_model, factors, scores.ranking()[:20], prompt=task.train.examples[0].prompt)
    assert set(graph.edges["kind"]) == {"residual", "mlp"}
    assert list(graph.nodes["kind"].tail(3)) == ["logit"] * 3
    last = graph.nodes.set_index("node").loc[f"token@{len(graph.settings['token_ids']) - 1}", "label"]
    assert last == graph.settings["tokens"][-1]
