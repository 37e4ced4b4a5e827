"""What the page shows: numbers, tables of effects, cards of units."""

import base64
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import unit_graph
from tests.analysis.graph_checks import all_units
from tests.analysis.graph_pages import Paths, large_graph, page_data, small_graph
from tests.refusals import refuses


def test_numbers_add_up_in_the_page_as_in_the_graph() -> None:
    """Drawn edges and rest make the activation (an answer: its centred logit) at every node, to 1e-5."""
    _, _, graph = small_graph()
    values = page_data(graph.show())["graphs"][0]
    nodes, edges = values["nodes"], values["edges"]
    drawn = [0.0] * len(nodes["node"])
    for target, contribution in zip(edges["target"], edges["contribution"], strict=True):
        drawn[target] += contribution
    checked = 0
    for i, kind in enumerate(nodes["kind"]):
        if kind != "token":
            assert drawn[i] + nodes["rest"][i] == pytest.approx(nodes["activation"][i], abs=1e-5), nodes["node"][i]
            checked += abs(drawn[i]) > 1e-3
    assert checked > 50


def test_tables_of_effects_are_the_replays(monkeypatch: pytest.MonkeyPatch) -> None:
    model, factors, graph = small_graph()
    found = swd.graph.replays(model, factors, graph, ["blocks.0.mlp_out/1", "blocks.1.attn_o/2@4"], (0.0, 2.0))
    values = page_data(graph.show(replays=found, attention=Paths(graph)))["graphs"][0]
    names = values["nodes"]["node"]
    assert tuple(names[i] for i in values["replays"]["nodes"]) == found.nodes

    def unpacked(name: str) -> torch.Tensor:
        return torch.frombuffer(bytearray(base64.b64decode(values["replays"][name])), dtype=torch.float32)

    assert torch.equal(unpacked("effects"), found.effects.flatten())
    assert torch.equal(unpacked("changes"), found.changes.flatten())
    assert len(values["attention"]["heads"]["source"]) == 2 * int((graph.edges["kind"] == "attention").sum())


def test_units_bring_what_the_audit_knows(default_model: Any) -> None:
    factors = swd.baselines.svd(default_model, "blocks.3.mlp_out")
    unit = "blocks.3.mlp_out/2"
    graph = unit_graph(default_model, factors, [unit, "blocks.3.mlp_out/9"], prompt="The king said")
    heard = swd.audit(default_model, factors, swd.text_tokens(512), units=[unit], n=6, progress=False)
    heard = heard.with_labels({unit: {"label": "by the audit", "author": "somebody"}})
    shown = page_data(graph.show(audit=heard))["units"]
    assert shown[unit]["label"] == "by the audit" and shown[unit]["author"] == "somebody"
    assert len(shown[unit]["contexts"]) == 5 and sum(shown[unit]["histogram"]["counts"]) == 512
    assert len(shown[unit]["promoted"]) == 8 and shown["blocks.3.mlp_out/9"] == {}
    profile = heard.unit(unit)
    peak, pieces, z = shown[unit]["contexts"][0]
    assert pieces[peak].strip() and z[peak] == pytest.approx(profile.contexts[0].z[profile.contexts[0].peak], rel=1e-2)
    assert page_data(graph.show(audit=[profile], labels={unit: "typed"}))["units"][unit]["label"] == "typed"


def test_graphs_without_a_prompt_and_without_edges_are_shown() -> None:
    model, factors, _ = small_graph()
    static = unit_graph(model, factors, all_units(factors), answers=[3, 5])
    values = page_data(static.show())["graphs"][0]
    assert values["has_prompt"] is False and set(values["nodes"]["activation"]) == {None}
    assert len(values["edges"]["weight"]) == len(static.edges)


def test_what_belongs_to_other_graphs_is_refused() -> None:
    graph = large_graph(20, 60)
    with pytest.raises(ValueError, match=r"these groups are of another graph: 1 of their nodes .* such as nothing"):
        graph.show(groups={"a": ["nothing"]})
    refuses(TypeError, "an Audit, or cards", graph.show, audit=[1])
    refuses(TypeError, "beside", graph.show, beside=graph.nodes)
    refuses(TypeError, "is a float", graph.show, labels={f"{graph.nodes['site'].iloc[16]}/{graph.nodes['unit'].iloc[16]}": 1.0})
