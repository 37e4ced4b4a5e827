"""Graphs for other tools' viewers: their frontends' rules, sums at every node, feature files, groups, query-key pairs."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import UnitGraph, groups, unit_graph
from swd_lens.analysis.graph.data import records
from swd_lens.analysis.graph.features import FeatureNumbers, cantor
from swd_lens.analysis.graph.pinned import pinned_nodes
from swd_lens.circuits import Circuit, attribute
from tests.analysis.audit_models import lettered, sparse_factors
from tests.analysis.graph_checks import TOKENS, all_units, random_factors
from tests.analysis.viewer_rules import (
    ERROR,
    check_drawn,
    check_neuronpedia,
    circuit_tracer_row,
    entering,
    neuronpedia_row,
    unpaired,
)
from tests.micro import random_split, toy_model

ALL = ("attn_q", "attn_v", "attn_o", "mlp_in", "mlp_out")
PROMPTS = ({}, {"prompt": TOKENS}, {"prompt": TOKENS, "attention": "frozen"}, {"prompt": TOKENS[:1]})


def _graph(kinds: tuple[str, ...] = ALL, *, units: Any = None, **settings: Any) -> UnitGraph:
    model = toy_model()
    factors = random_factors(model, *kinds)
    return unit_graph(model, factors, all_units(factors) if units is None else units, **settings)


def _json(graph: UnitGraph, folder: Path, **how: Any) -> dict[str, Any]:
    return json.loads(graph.export(folder, **how).path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("settings", PROMPTS)
def test_frontends_drop_nothing_and_have_a_row_for_everything(settings: dict[str, Any], tmp_path: Path) -> None:
    graph = _graph(**settings)
    written = _json(graph, tmp_path / "tracer")
    check_drawn(written)
    rows = [circuit_tracer_row(written, node) for node in written["nodes"]]
    assert min(rows) >= 0 and max(rows) <= 2 + 1
    for scan in ("gemma-2-2b", "gpt2-small"):
        written = _json(graph, tmp_path / scan, target="neuronpedia", scan=scan)
        check_neuronpedia(written, n_layers=2)
        of_block_0 = [n for n in written["nodes"] if n["clerp"].startswith("blocks.0.")]
        # Not on the embeddings' row, which is where gpt2-small's block 0 once lay.
        assert {neuronpedia_row(written, node) for node in of_block_0} == {1}
        assert {unpaired(node["feature"])[0] for node in of_block_0} == {0}
        answers = [n for n in written["nodes"] if n["feature_type"] == "logit"]
        assert {neuronpedia_row(written, node) for node in answers} <= {3}


@pytest.mark.parametrize("settings", PROMPTS[1:])
def test_links_into_a_node_add_up_to_its_activation(settings: dict[str, Any], tmp_path: Path) -> None:
    for keep in (12, None):
        graph = _graph(**settings, keep=keep)
        written = _json(graph, tmp_path)
        sums = entering(written)
        nodes = {node["node_id"]: node for node in written["nodes"]}
        counted = 0
        for node, row in zip(written["nodes"], records(graph.nodes), strict=False):
            if row["kind"] == "token":
                continue
            assert sums[node["node_id"]] == pytest.approx(row["activation"], abs=1e-5)
            counted += 1
        assert counted > 5
        # Every edge kept: an error link is the graph's own `rest`.
        rests = {link["target"]: link["weight"] for link in written["links"] if nodes[link["source"]]["feature"] < 0}
        if keep is None:
            for node, row in zip(written["nodes"], records(graph.nodes), strict=False):
                assert rests.get(node["node_id"], 0.0) == pytest.approx(row["rest"], abs=1e-5)
        assert {nodes[link["source"]]["feature_type"] for link in written["links"] if link["target"] in rests} >= {
            ERROR
        }


def test_units_of_several_sites_of_a_layer_have_numbers_of_their_own() -> None:
    graph = _graph(prompt=TOKENS)
    numbers = FeatureNumbers.of(graph)
    sites = [site for site in graph.settings["factors"] if site.startswith("blocks.1.")]
    indices = {numbers.index(site, unit) for site in sites for unit in range(5)}
    assert indices == set(range(5 * len(sites)))  # a layer's indices have no holes
    assert unpaired(numbers.number("blocks.1.mlp_in", 3)) == (1, 3 * 5 + 3)  # 5 sites, mlp_in the fourth
    assert unpaired(cantor(27, 300_000)) == (27, 300_000)
    # One site in a layer: the unit's own number; and another graph of the same factors has the same numbers.
    alone = _graph(("mlp_out",), prompt=TOKENS)
    assert FeatureNumbers.of(alone).index("blocks.1.mlp_out", 4) == 4
    assert FeatureNumbers.of(_graph(units="blocks.*.mlp_out", prompt=TOKENS)) == numbers
    assert FeatureNumbers.of(alone).name != numbers.name


def test_a_folder_lists_its_graphs_and_keeps_what_others_wrote(tmp_path: Path) -> None:
    graph = _graph(prompt=TOKENS)
    for slug in ("one", "two", "one"):
        exported = graph.export(tmp_path, slug=slug)
        assert (
            exported.path.name == f"{slug}.json" and json.loads(exported.path.read_text())["metadata"]["slug"] == slug
        )
    listed = json.loads((tmp_path / "graph-metadata.json").read_text())["graphs"]
    assert [entry["slug"] for entry in listed] == ["two", "one"]
    assert all(entry["node_threshold"] == 1 and "swd_lens" not in entry for entry in listed)
    # circuit-tracer loads ./data/features/... from the folder that it serves as ./data.
    scan = Path(listed[0]["scan"])
    units = [
        n for n in json.loads((tmp_path / "one.json").read_text())["nodes"] if n["feature_type"].startswith("cross")
    ]
    for node in units:
        file = tmp_path / scan.relative_to("data") / f"{node['feature']}.json"
        assert json.loads(file.read_text())["index"] == unpaired(node["feature"])[1]
    pd.testing.assert_frame_equal(UnitGraph.load(tmp_path / "one.json").edges, graph.edges)
    (tmp_path / "graph-metadata.json").write_text("{")
    with pytest.raises(ValueError, match=r"graph-metadata\.json is not a list of graphs, or damaged"):
        graph.export(tmp_path)


def test_names_that_frontends_refuse(tmp_path: Path) -> None:
    graph = _graph(prompt=TOKENS)
    with pytest.raises(ValueError, match="slug='a b'"):
        graph.export(tmp_path, slug="a b")
    with pytest.raises(ValueError, match=r"slug='\.\./x'"):
        graph.to_json(tmp_path / "x.json", slug="../x")
    with pytest.raises(ValueError, match="scan='org/model'"):
        graph.export(tmp_path, target="neuronpedia", scan="org/model")
    with pytest.raises(ValueError, match="target"):
        graph.export(tmp_path, target="elsewhere")
    assert not list(tmp_path.iterdir())
    # A host's own name is made to fit.
    graph = UnitGraph(graph.nodes, graph.edges, {**graph.settings, "model": "HuggingFaceTB/SmolLM2-135M"})
    assert _json(graph, tmp_path, target="neuronpedia")["metadata"]["scan"] == "HuggingFaceTB-SmolLM2-135M"
    graph = UnitGraph(graph.nodes, graph.edges, {**graph.settings, "model": "gpt2"})
    assert _json(graph, tmp_path, target="neuronpedia")["metadata"]["scan"] == "gpt2-small"


@pytest.mark.parametrize("slug", ["graph-metadata", "Graph-Metadata", "run", ".hidden"])
def test_a_graph_takes_no_place_of_a_file_of_ours(slug: str, tmp_path: Path) -> None:
    graph = _graph(prompt=TOKENS)
    graph.export(tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*.json")}
    with pytest.raises(ValueError, match=f"slug '{slug}'"):
        graph.export(tmp_path, slug=slug)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*.json")} == before


def test_neuronpedia_is_warned_of_a_graph_of_block_0_alone(tmp_path: Path) -> None:
    graph = _graph(units=["blocks.0.attn_o", "blocks.0.mlp_in"])
    with pytest.warns(UserWarning, match="one row higher"):
        written = _json(graph, tmp_path, target="neuronpedia")
    check_neuronpedia(written, n_layers=2)
    assert {unpaired(node["feature"])[0] for node in written["nodes"]} == {0}


def test_thresholds_stand_where_each_frontend_reads_them(tmp_path: Path) -> None:
    graph = _graph(prompt=TOKENS)
    tracer, neuronpedia = (_json(graph, tmp_path, target=target) for target in ("circuit-tracer", "neuronpedia"))
    assert tracer["metadata"]["node_threshold"] == neuronpedia["metadata"]["node_threshold"] == 1
    # In circuit-tracer's page a threshold among the qParams wins over the slider.
    assert "pruningThreshold" not in tracer["qParams"] and neuronpedia["qParams"]["pruningThreshold"] == 1
    assert tracer["metadata"]["schema_version"] == neuronpedia["metadata"]["schema_version"] == 1
    # Influence is a cumulative share of all nodes, errors too; without a prompt it is of weights.
    for written in (tracer, _json(_graph(), tmp_path)):
        shown = sorted(node["influence"] for node in written["nodes"])
        assert shown[0] < 0.5 and shown[-1] == pytest.approx(1.0) and len(set(shown)) > len(shown) / 2


def test_texts_that_would_be_tags_or_ends_of_an_answer(tmp_path: Path) -> None:
    graph = _graph(prompt=TOKENS, labels={"blocks.0.mlp_in/1": "<img src=x onerror=alert(1)>"})
    graph.nodes.loc[graph.nodes["kind"] == "logit", "label"] = 'a "(p=2)" <b>'
    written = _json(graph, tmp_path)
    check_drawn(written)
    assert not any("<" in node["clerp"] for node in written["nodes"])
    labelled = [n["clerp"] for n in _json(graph, tmp_path, target="neuronpedia")["nodes"]]
    assert "<img src=x onerror=alert(1)> (blocks.0.mlp_in/1)" in labelled


# ---------------------------------------------------------------------------------------------- pinned and groups


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
    assert pinned_nodes(graph, [unit]) == at_all and pinned_nodes(graph, [at_all[2], "token@0"]) == [
        at_all[2],
        "token@0",
    ]
    assert set(pinned_nodes(graph, circuit)) == set(graph.nodes["node"][graph.nodes["kind"] == "unit"])
    written = _json(graph, tmp_path, pinned=[unit])
    assert len(written["qParams"]["pinnedIds"]) == len(TOKENS)
    with pytest.raises(ValueError, match=r"blocks\.0\.mlp_in/99 is pinned but not in the graph"):
        graph.export(tmp_path, pinned=["blocks.0.mlp_in/99"])
    with pytest.raises(ValueError, match="no node of this graph"):
        graph.export(tmp_path, groups={"mine": ["nowhere"]})


def test_groups_by_label(tmp_path: Path) -> None:
    labels = {"blocks.0.mlp_in/1": "names", "blocks.1.mlp_in/2": "names", "blocks.1.mlp_in/3": "alone"}
    graph = _graph(prompt=TOKENS, keep=None, labels=labels)
    assert groups(graph) == {"names": groups(graph)["names"]}
    assert set(groups(graph)["names"]) == {"blocks.0.mlp_in/1@4", "blocks.1.mlp_in/2@4"}
    ways: list[dict[str, Any]] = [{"target": "neuronpedia"}, {"groups": groups(graph)}]
    for how in ways:
        exported = graph.export(tmp_path, **how)
        (group,) = json.loads(exported.path.read_text())["qParams"]["supernodes"]
        assert group[0] == "names" and len(group) == 3
    assert "supernodes=%5B%5B%22names" in exported.query  # circuit-tracer reads them from there
    assert graph.export(tmp_path).query == "slug=unit-graph"


def _with(factors: swd.Factors, read: Any = (), write: Any = ()) -> swd.Factors:
    """The factors with other vectors of some units."""
    own = factors.read.clone(), factors.write.clone()
    for unit, vector in dict(read).items():
        own[0][:, unit] = vector
    for unit, vector in dict(write).items():
        own[1][unit] = vector
    return swd.Factors(*own, provenance=dict(factors.provenance))


def test_groups_by_writes_and_by_being_active_together() -> None:
    model = lettered()
    factors = sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out", "blocks.1.mlp_in"])
    factors = swd.FactorSet(
        {
            **factors,
            # Unit 4 writes what unit 3 of the layer below writes, the other way round.
            "blocks.1.mlp_out": _with(
                factors["blocks.1.mlp_out"], write={4: -2.0 * factors["blocks.0.mlp_out"].write[3]}
            ),
            # Unit 7 is active where unit 2 is.
            "blocks.1.mlp_in": _with(factors["blocks.1.mlp_in"], read={7: 3.0 * factors["blocks.1.mlp_in"].read[:, 2]}),
        }
    )
    graph = unit_graph(model, factors, all_units(dict(factors)), prompt=TOKENS, keep=None, isolated=True)
    by_writes = [sorted(nodes) for nodes in groups(graph, "writes", factors=factors, alike=0.95).values()]
    assert by_writes == [["blocks.0.mlp_out/3@4", "blocks.1.mlp_out/4@4"]]
    tokens = torch.randint(0, 20, (8, 24), generator=torch.Generator().manual_seed(1))
    audit = swd.audit(model, factors, tokens)
    both = groups(graph, "writes", audit=audit, alike=0.95)
    assert ["blocks.1.mlp_in/2@4", "blocks.1.mlp_in/7@4"] in [sorted(nodes) for nodes in both.values()]
    assert any(name.startswith("promotes ") for name in both)
    # Any two members are alike: a chain of neighbours is not one group.
    assert all(len(nodes) < 4 for nodes in both.values())
    assert len(groups(graph, "writes", factors=factors, alike=1e-9)) < 4
    with pytest.raises(ValueError, match="need factors"):
        groups(graph, "writes")
    with pytest.raises(ValueError, match="alike"):
        groups(graph, "writes", factors=factors, alike=0.0)
    with pytest.raises(ValueError, match="by"):
        groups(graph, "taste")
    with pytest.raises(ValueError, match="other factors"):
        groups(graph, "writes", factors=sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out"], seed=3))


# ---------------------------------------------------------------------------------------------- feature files


def test_feature_files_hold_what_the_audit_knows(tmp_path: Path) -> None:
    model = lettered()
    factors = sparse_factors(model, ["blocks.0.mlp_out", "blocks.1.mlp_out", "blocks.1.mlp_in"])
    graph = unit_graph(model, factors, all_units(dict(factors)), prompt=TOKENS, keep=None)
    tokens = torch.randint(0, 20, (8, 24), generator=torch.Generator().manual_seed(1))
    known = [f"blocks.1.mlp_out/{unit}" for unit in range(6)]
    audit = swd.audit(model, factors, tokens, units=known).with_labels({known[0]: "of the audit"})
    exported = graph.export(tmp_path, audit=audit)
    numbers = FeatureNumbers.of(graph)
    folder = tmp_path / "features" / numbers.name
    n_units = graph.nodes["kind"].eq("unit").sum()
    assert len(list(folder.iterdir())) == n_units and exported.features == (n_units, 6)
    for unit in range(6):
        profile = audit.unit(known[unit])
        file = json.loads((folder / f"{numbers.number('blocks.1.mlp_out', unit)}.json").read_text(encoding="utf-8"))
        assert file["top_logits"] == [token for token, _ in profile.logits.promoted]
        assert file["bottom_logits"] == [token for token, _ in profile.logits.suppressed]
        by_sign = [(sign, [c for c in profile.contexts if sign * c.z[c.peak] > 0]) for sign in (1, -1)]
        groups_shown = zip(file["examples_quantiles"], [pair for pair in by_sign if pair[1]], strict=True)
        for group, (sign, contexts) in groups_shown:
            examples = group["examples"]
            for example, context in zip(examples, contexts, strict=True):
                assert tuple(example["tokens"]) == context.tokens and example["train_token_ind"] == context.peak
                assert [sign * z for z in example["tokens_acts_list"]] == pytest.approx(context.z)
                assert example["tokens_acts_list"][context.peak] > 0
        assert file["act_min"] == 0 and file["act_max"] >= profile.peak
        assert file["activation_frequency"] == pytest.approx(profile.density)
    written = json.loads(exported.path.read_text(encoding="utf-8"))
    assert "of the audit (blocks.1.mlp_out/0)" in [node["clerp"] for node in written["nodes"]]
    # A unit that no audit knows has a file, too: viewers ask for one.
    file = json.loads((folder / f"{numbers.number('blocks.0.mlp_out', 0)}.json").read_text())
    assert file["examples_quantiles"] == []
    # Without an audit later: what is known stays.
    graph.export(tmp_path)
    assert json.loads((folder / f"{numbers.number('blocks.1.mlp_out', 0)}.json").read_text())["examples_quantiles"]
    others = swd.audit(model, sparse_factors(model, ["blocks.0.mlp_out"], seed=3), tokens)
    with pytest.raises(ValueError, match="the audit: the graph was made of other factors"):
        graph.export(tmp_path, audit=others)
    url = "https://example.org/features"
    details = _json(graph, tmp_path, target="neuronpedia", features_url=url)["metadata"]["feature_details"]
    assert details == {"feature_json_base_url": url}


# ---------------------------------------------------------------------------------------------- query-key pairs


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
    graph = _graph(units=units, prompt=TOKENS, attention="frozen", isolated=True)
    for target, rows_up in (("circuit-tracer", 0), ("neuronpedia", 0)):
        written = _json(graph, tmp_path, attention=_attention(), target=target)
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
