"""Feeders of a unit: the edges into it alone, which add up to its z."""

import pytest

from swd_lens.analysis.graph import feeders
from tests.analysis.graph_checks import FROZEN, TOKENS, drawn, weights_of


def test_feeders_of_a_unit_are_the_edges_into_it_and_add_up_to_z():
    model, factors, graph = drawn(isolated=True, **FROZEN)
    nodes, last = graph.nodes.set_index("node"), len(TOKENS) - 1
    for site, index in (("blocks.1.mlp_in", 2), ("blocks.1.attn_o", 1), ("blocks.1.mlp_out", 3), ("blocks.1.attn_v", 0)):
        fed, unit = feeders(model, factors, (site, index), prompt=TOKENS, n=None), f"{site}/{index}@{last}"
        edges = graph.edges[graph.edges["target"] == unit]
        given = fed[(fed["source"] != "rest") & (fed["weight"] != 0)]
        names = [f"{source}@{position}" for source, position in zip(given["source"], given["position"], strict=True)]
        found = dict(zip(names, given["contribution"], strict=True))
        assert found == pytest.approx(dict(zip(edges["source"], edges["contribution"], strict=True)), abs=1e-5)
        assert fed["contribution"].sum() == pytest.approx(nodes.loc[unit, "activation"], abs=1e-4)
        rest = fed.set_index("source").loc["rest", "contribution"]
        assert rest == pytest.approx(nodes.loc[unit, "rest"], abs=1e-4)
        assert fed["rank"].tolist() == list(range(1, len(fed) + 1)) and fed["contribution"].abs().is_monotonic_decreasing
        assert feeders(model, factors, f"{site}/{index}", prompt=TOKENS, n=3).equals(fed.head(3))


def test_feeders_without_a_prompt_are_weights():
    model, factors, graph = drawn(("attn_o", "mlp_in"), keep=None)
    fed, weight = feeders(model, factors, "blocks.1.mlp_in/2", n=None), weights_of(graph)
    assert fed.columns.tolist() == ["rank", "source", "kind", "weight"] and len(fed) == 10
    for source, w in zip(fed["source"], fed["weight"], strict=True):
        assert w == pytest.approx(weight[source, "blocks.1.mlp_in/2"], rel=1e-5)
    with pytest.raises(ValueError, match=r"no unit of blocks\.0\.attn_o, .* speaks to blocks\.1\.attn_o/0"):
        feeders(model, factors, "blocks.1.attn_o/0")
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp_in/5 is not among"):
        feeders(model, factors, "blocks.1.mlp_in/5", prompt=TOKENS)
