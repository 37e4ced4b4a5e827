"""Units set to other values: the frozen prediction is a run with norms, patterns and slopes held; true changes of real forwards,
files, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.graph import Replays, replays, unit_graph
from tests.analysis.graph_checks import (
    APART,
    FROZEN,
    HOSTS,
    TOKENS,
    all_units,
    drawn,
    held_hooks,
    random_factors,
    set_hooks,
    shown_values,
)
from tests.micro import toy_model
from tests.refusals import refuses

FEW = ("attn_v", "attn_o", "mlp_out")  # queries, keys and MLP inputs stay dense


def test_true_changes_are_those_of_real_forwards_and_the_host_is_left_as_it_was(tmp_path: Path) -> None:
    model, factors, graph = drawn(FEW, prompt=TOKENS, attention="frozen", answers=3)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    logits = model(torch.tensor([TOKENS]))
    found = replays(model, factors, graph, strengths=(0.0, 0.5, 3.0))
    assert torch.equal(model(torch.tensor([TOKENS])), logits)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(point.fwd_hooks for point in model.hook_dict.values())
    clean = shown_values(model, factors, graph, [])
    gaps = []
    for i, node in list(enumerate(found.nodes))[::7]:
        for j, strength in enumerate(found.strengths):
            true = shown_values(model, factors, graph, set_hooks(node, strength, float(found.z[i]), factors)) - clean
            assert torch.allclose(found.changes[i, j], true, atol=2e-5), (node, strength)
            gaps.append(float((true - found.frozen[i, j]).abs().max()))
    assert max(gaps) > 1e-3  # a true run is not the frozen one
    # Later units by themselves: their runs take up at their block.
    rows = [i for i, node in enumerate(found.nodes) if node.startswith("blocks.1.")]
    late = replays(model, factors, graph, [found.nodes[i] for i in rows], found.strengths)
    assert len(rows) > 3 and torch.allclose(late.changes, found.changes[rows], atol=2e-5)
    found.save(tmp_path / "replays.json")
    again = Replays.load(tmp_path / "replays.json")
    assert again.nodes == found.nodes and torch.equal(again.effects, found.effects)
    assert torch.equal(again.changes, found.changes) and again.strengths == found.strengths
    assert "Replays(" in repr(found) and "logit" in found._repr_html_()


def test_a_graph_of_the_last_position(default_model: Any) -> None:
    factors = swd.baselines.svd(default_model, "blocks.*.mlp_out")
    graph = unit_graph(default_model, factors, [("blocks.2.mlp_out", 3), ("blocks.3.mlp_out", 1)], prompt="The king said")
    found = replays(default_model, factors, graph, "blocks.2.mlp_out/3")
    last = len(graph.settings["token_ids"]) - 1
    assert graph.nodes.set_index("node").loc[f"token@{last}", "label"] == graph.settings["tokens"][-1]
    assert found.nodes == (f"blocks.2.mlp_out/3@{last}",)
    table = found.table()
    assert list(table.columns) == ["node", "strength", "target", "frozen", "true"] and len(table) == 3 * len(found.targets)
    own = table[table["target"] == found.nodes[0]]
    assert own["true"].tolist() == pytest.approx(own["frozen"].tolist(), rel=1e-4)


def test_what_cannot_be_replayed_is_refused() -> None:
    model, factors, graph = drawn(FEW, prompt=TOKENS, attention="frozen", answers=1)
    with pytest.raises(ValueError, match="this graph has none"):
        replays(model, factors, unit_graph(model, factors, all_units(factors), answers=[1]))
    refuses(ValueError, "does not draw", replays, model, factors, graph, "blocks.0.mlp_out/4@77")
    refuses(ValueError, "got nan", replays, model, factors, graph, strengths=(float("nan"),))
    refuses(ValueError, "other factors", replays, model, random_factors(model, "mlp_out"), graph)
    graph.settings["task_prompts"] = 5  # pyright: ignore[reportIndexIssue]
    refuses(ValueError, "mean of 5 prompts", replays, model, factors, graph)
    del graph.settings["task_prompts"]  # pyright: ignore[reportIndexIssue]
    with torch.no_grad():
        model.embed.W_E.add_(torch.randn(model.embed.W_E.shape, generator=torch.Generator().manual_seed(1)))
    refuses(ValueError, "another model, or other hooks", replays, model, factors, graph)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("sites", [APART, FEW], ids=["all replaced", "some dense"])
@pytest.mark.parametrize("name", HOSTS)
def test_the_prediction_is_a_run_with_norms_patterns_and_slopes_held(name: str, sites: tuple[str, ...]) -> None:
    model = toy_model(**HOSTS[name])
    factors = random_factors(model, *sites, *(("mlp_gate",) if name == "gated" and sites == APART else ()))
    # Two of five units of every site are drawn: the others, and dense matrices, are paths all the same.
    units = [unit for unit in all_units(factors) if unit[1] < 2]
    graph = unit_graph(model, factors, units, answers=2, isolated=True, **FROZEN)
    nodes = list(graph.nodes["node"])
    clamped = [n for n in nodes if n.startswith("blocks.0.") and n.endswith(("/1@1", "/0@4"))]
    found = replays(model, factors, graph, clamped, (0.0, 2.0))
    held = held_hooks(model, factors)
    clean = shown_values(model, factors, graph, held)
    assert len(found.targets) == len(clean) and found.nodes == tuple(clamped)
    for i, node in enumerate(clamped):
        for j, strength in enumerate(found.strengths):
            hooks = [*set_hooks(node, strength, float(found.z[i]), factors), *held]
            true = shown_values(model, factors, graph, hooks) - clean
            assert torch.allclose(found.frozen[i, j], true, atol=1e-4, rtol=1e-4), (node, strength)
        assert found.effects[i, found.targets.index(node)] == 1.0
    assert float(found.effects.abs().sum()) > len(clamped)  # others are reached


@pytest.mark.parametrize("name", ["LN", "grouped"])
def test_packed_queries_keys_and_values(name: str) -> None:
    model, factors, graph = drawn(("attn_qkv", "attn_o", "mlp_out"), name, isolated=True, **FROZEN)
    found = replays(model, factors, graph, ["blocks.0.attn_qkv/1@2", "blocks.0.attn_o/3@4"], (0.0,))
    held = held_hooks(model, factors)
    clean = shown_values(model, factors, graph, held)
    for i, node in enumerate(found.nodes):
        true = shown_values(model, factors, graph, [*set_hooks(node, 0.0, 0.0, factors), *held]) - clean
        assert torch.allclose(found.frozen[i, 0], true, atol=1e-4, rtol=1e-4)


def test_where_every_site_is_drawn_the_graphs_own_edges_say_the_same() -> None:
    """All paths are then edges: effects are the sum over all paths of products of weights."""
    model, factors, graph = drawn(isolated=True, **FROZEN)
    found = replays(model, factors, graph, strengths=())
    names = {name: i for i, name in enumerate(graph.nodes["node"])}
    weight = torch.zeros(len(names), len(names))
    for row in graph.edges.itertuples():
        weight[names[row.source], names[row.target]] = row.weight
    paths = torch.linalg.inv(torch.eye(len(names)) - weight)
    rows, columns = [names[n] for n in found.nodes], [names[n] for n in found.targets]
    assert torch.allclose(found.effects, paths[rows][:, columns], atol=1e-4)
    assert found.changes.shape == (len(rows), 0, len(columns))
