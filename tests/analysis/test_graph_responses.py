"""The frozen prediction is a run with norms, patterns and slopes held."""

import pytest
import torch

from swd_lens.analysis.graph import replays, unit_graph
from tests.analysis.graph_checks import (
    APART,
    FROZEN,
    HOSTS,
    all_units,
    drawn,
    held_hooks,
    random_factors,
    set_hooks,
    shown_values,
)
from tests.micro import toy_model

FEW = ("attn_v", "attn_o", "mlp_out")  # queries, keys and MLP inputs stay dense


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
