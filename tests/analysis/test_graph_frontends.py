"""circuit-tracer's own frontend as the judge of an export; Neuronpedia's schema where it is at hand.

The page of circuit-tracer's wheel is served on loopback and opened in headless Chromium, which has no network: every node is
drawn, the slider prunes, a unit that is hovered shows its examples, and nothing complains. See frontends.py for what is needed.
"""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import swd_lens as swd
from swd_lens.analysis.graph import UnitGraph, unit_graph
from swd_lens.train.baselines import svd
from tests.analysis import frontends
from tests.analysis.viewer_rules import entering

pytestmark = pytest.mark.slow
MISSING = frontends.missing()
LACKS = pytest.mark.skipif(MISSING is not None, reason=str(MISSING))


@pytest.fixture(scope="module")
def drawn(default_model: Any) -> tuple[UnitGraph, UnitGraph, Any]:
    """A circuit of the embedded model on a prompt and without one, and its audit."""
    factors = svd(default_model, ["attn_v", "attn_o", "mlp_in", "mlp_out"])
    task = swd.load_task("ioi", default_model, n_train=8, n_test=8)
    scores = swd.attribute(default_model, factors, task.train)
    best: dict[str, list[Any]] = {}
    for unit in scores.ranking():
        best.setdefault(unit[0], []).append(unit)
    circuit = swd.Circuit.of(factors, scores, [unit for units in best.values() for unit in units[:3]])
    audit = swd.audit(default_model, factors, swd.text_tokens(2048, split="train"), units=circuit.names)
    example = task.train.examples[0]
    on_prompt = unit_graph(
        default_model,
        factors,
        circuit,
        prompt=example.prompt,
        attention="frozen",
        answers=[example.answers[0], example.distractors[0]],
        labels={circuit.names[0]: "first & <b>best</b>", circuit.names[1]: "first & <b>best</b>"},
    )
    return on_prompt, unit_graph(default_model, factors, circuit), audit


@LACKS
@pytest.mark.parametrize("which", ["a prompt", "no prompt"])
def test_circuit_tracers_page_draws_prunes_and_shows_examples(drawn: Any, which: str, tmp_path: Path) -> None:
    graph, audit = drawn[which == "no prompt"], drawn[2]
    units = graph.nodes["node"][graph.nodes["kind"] == "unit"].tolist()
    groups = {} if which == "no prompt" else swd.graph.groups(graph)
    exported = graph.export(tmp_path / "graphs", audit=audit, pinned=units[:5], groups=groups)
    drawn[1].export(tmp_path / "graphs", slug="another")
    written = json.loads(exported.path.read_text(encoding="utf-8"))
    found = frontends.opened(tmp_path / "graphs", exported.query, tmp_path)
    assert found["complaints"] == [] and found["shouted"] == []
    assert found["listed"] == ["unit-graph", "another"]
    # Every node is drawn, at a place; blocks in rows of their own, answers above them.
    assert sorted(found["ids"]) == sorted(node["node_id"] for node in written["nodes"])
    assert found["placed"] == len(written["nodes"])
    layers = {node["node_id"]: node["layer"] for node in written["nodes"]}
    for node in written["nodes"]:
        own = 5 if node["feature_type"] == "logit" else 0 if node["layer"] == "E" else int(node["layer"]) + 1
        assert found["rows"][node["node_id"]] == own, layers[node["node_id"]]
    # The links of the page's own tables add up to what ours do.
    sums = entering(written)
    assert all(total == pytest.approx(sums[node], abs=1e-5) for node, total in found["sums"].items())
    members = {member for _, *group in written["qParams"]["supernodes"] for member in group}
    assert found["pinned"] == len({*written["qParams"]["pinnedIds"], *members})
    if which == "a prompt":
        assert found["supernodes"] == ["first & ‹b›best‹/b›"]
    # Rows of the panel are layers, whatever order it has: lower ones stand lower, and no box hides another.
    boxes = found["boxes"]
    assert len(boxes) >= 5
    for one in boxes:
        for other in boxes:
            assert round(one["row"]) >= round(other["row"]) or one["y"] > other["y"], (one, other)
            assert one is other or abs(one["y"] - other["y"]) > 1 or abs(one["x"] - other["x"]) > 50, (one, other)
    # Hover and click.
    unit = found["hovered"]["cross layer transcoder"]
    assert unit["examples"] > 0 and set(unit["groups"]) <= {"Largest z", "Most negative z, sign turned"}
    assert unit["title"].startswith("Feature") and "blocks." in unit["tooltip"]
    assert found["clicked"]["inputs"] == found["clicked"]["sources"] > 0
    if which == "a prompt":
        assert found["hovered"]["mlp reconstruction error"]["title"].startswith("Left out of")
        assert "(p=" in found["hovered"]["logit"]["title"]
    # The slider: below its end only what has influence (and what is pinned) is left, at its end everything.
    assert found["sliders"] == 1
    assert len(written["nodes"]) == found["pruned"]["1"] > found["pruned"]["0.3"] >= 5
    # What the page saves is its own: the graph is still what was written.
    assert found["saved"] == "Saved!"
    assert json.loads(exported.path.read_text(encoding="utf-8"))["qParams"] != written["qParams"]
    pd.testing.assert_frame_equal(UnitGraph.load(exported.path).edges, graph.edges)


@LACKS
def test_a_threshold_among_the_qparams_would_stop_circuit_tracers_slider(drawn: Any, tmp_path: Path) -> None:
    """Why the file for circuit-tracer has none."""
    graph = drawn[0]
    exported = graph.export(tmp_path / "graphs", pinned=graph.edges["source"].tolist()[:1])
    written = json.loads(exported.path.read_text(encoding="utf-8"))
    written["qParams"]["pruningThreshold"] = 1.0
    exported.path.write_text(json.dumps(written), encoding="utf-8")
    found = frontends.opened(tmp_path / "graphs", exported.query, tmp_path)
    assert found["pruned"]["0.3"] == found["pruned"]["1"]
    # Nor does a unit without an audit make the page look for its examples in vain.
    assert found["complaints"] == [] and found["hovered"]["cross layer transcoder"]["title"].startswith("Feature")


@LACKS
@pytest.mark.parametrize("which", [0, 1])
def test_circuit_tracers_own_models_read_the_file(drawn: Any, which: int, tmp_path: Path) -> None:
    pytest.importorskip("pydantic", reason="needs pydantic")
    source = frontends.WHEEL / "frontend" / "graph_models.py"
    spec = importlib.util.spec_from_file_location("graph_models", source)
    assert spec is not None and spec.loader is not None
    models = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(models)
    written = json.loads(drawn[which].export(tmp_path).path.read_text(encoding="utf-8"))
    read = models.Model(**written)
    assert [node.model_dump() for node in read.nodes] == [
        {key: node[key] for key in read.nodes[0].model_dump()} for node in written["nodes"]
    ]
    # Features are numbered as theirs are.
    for node in (node for node in read.nodes if node.feature_type == "cross layer transcoder"):
        layer, index, position = map(int, node.node_id.split("_"))
        assert node.feature == models.Node.feature_node(layer, position, index).feature


@pytest.mark.parametrize("which", [0, 1])
def test_neuronpedias_schema(drawn: Any, which: int, tmp_path: Path) -> None:
    schema = frontends.FOLDER / "graph-schema.json"
    jsonschema = pytest.importorskip("jsonschema", reason="needs jsonschema")
    if not schema.is_file():
        pytest.skip(f"needs Neuronpedia's graph-schema.json in {frontends.FOLDER}; the repository has no copy of it")
    exported = drawn[which].export(tmp_path, target="neuronpedia", scan="gpt2-small", audit=drawn[2])
    jsonschema.validate(json.loads(exported.path.read_text(encoding="utf-8")), json.loads(schema.read_text()))
    details = frontends.FOLDER / "feature-details-schema.json"
    for file in sorted((tmp_path / "features").rglob("*.json")):
        jsonschema.validate(json.loads(file.read_text(encoding="utf-8")), json.loads(details.read_text()))
