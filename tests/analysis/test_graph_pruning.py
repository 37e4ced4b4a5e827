"""Which edges are kept, and what influence is."""

import pytest

from swd_lens.analysis.graph import feeders, unit_graph
from swd_lens.units.factors import Factors
from tests.analysis.graph_checks import TOKENS, all_units, drawn, random_factors
from tests.micro import toy_model


def test_a_graph_of_targets_leads_to_them_alone():
    model, factors, graph = drawn(units="all", targets="blocks.1.mlp_in/2", prompt=TOKENS, keep=None)
    target = f"blocks.1.mlp_in/2@{len(TOKENS) - 1}"
    followed = {target}
    for _ in range(12):
        followed |= set(graph.edges["source"][graph.edges["target"].isin(followed)])
    assert set(graph.edges["target"]) <= followed and set(graph.nodes["node"]) == followed
    assert not (graph.nodes["kind"] == "logit").any() and graph.settings["targets"] == ["blocks.1.mlp_in/2"]
    assert float(graph.nodes.set_index("node").loc[target, "influence"]) == 1.0
    fed = feeders(model, factors, "blocks.1.mlp_in/2", prompt=TOKENS, n=None).set_index("source")["contribution"]
    into = graph.edges[graph.edges["target"] == target]
    for source, contribution in zip(into["source"], into["contribution"], strict=True):
        assert contribution == pytest.approx(fed[source.rpartition("@")[0]], abs=1e-5)
    static = unit_graph(model, factors, ["mlp_out", "attn_o"], targets=[("blocks.1.mlp_in", 2)])
    assert set(static.edges["target"]) == {"blocks.1.mlp_in/2"} and len(static.edges) == 15


def test_pruning_keeps_the_strongest_and_says_so():
    model, factors, everything = drawn(keep=None)
    units = all_units(factors)
    ten = unit_graph(model, factors, units, keep=10)
    assert list(ten.edges["source"]) == list(everything.edges["source"].head(10))
    assert ten.edges["strength"].is_monotonic_decreasing and ten.settings["keep"] == 10
    assert ten.settings["edges_possible"] == everything.settings["edges_possible"] == len(everything.edges)
    assert set(ten.nodes["node"]) == set(ten.edges["source"]) | set(ten.edges["target"])
    assert len(unit_graph(model, factors, units, keep=10, isolated=True).nodes) == len(units)
    least = float(everything.edges["weight"].abs().median())
    assert unit_graph(model, factors, units, keep=None, min_weight=least).edges["weight"].abs().min() >= least
    assert unit_graph(model, factors, units, keep=None, per_node=2).edges["target"].value_counts().max() == 2


def test_of_equal_edges_no_more_are_kept_than_asked_for():
    """Small whole numbers and no norm: weights that are equal on paper are equal to the bit."""
    model = toy_model(normalization_type=None)
    factors = random_factors(model, "attn_o", "mlp_in")
    for site, f in factors.items():
        write = (4 * f.write).round()
        same = write[:1].expand_as(write).clone() if site == "blocks.0.attn_o" else write
        factors[site] = Factors((4 * f.read).round(), same)
    graph = unit_graph(model, factors, all_units(factors), keep=None, per_node=2)
    counts = graph.edges["target"].value_counts()
    assert counts.max() == 2 and counts.min() == 2
    # Of equal ones the first: all that writes before the first MLP is one and the same.
    first = graph.edges[graph.edges["target"].str.startswith("blocks.0.")]
    assert len(first) > 2
    assert set(first["source"]) == {"blocks.0.attn_o/0", "blocks.0.attn_o/1"}


def test_influence_is_shared_out():
    """Shares of the answers, the one at the top, and everything below it holds no more than the whole."""
    _, _, graph = drawn(("attn_o", "mlp_out", "mlp_in"), prompt=TOKENS, answers=[3], keep=None)
    influence = graph.nodes.set_index("node")["influence"]
    assert influence["logit 3"] == 1.0
    assert 0 < influence["token@4"] <= 1.0
    into = graph.edges[graph.edges["target"] == "logit 3"]
    assert into["strength"].sum() <= 1.0 + 1e-6
    given = into["contribution"].sum() + float(graph.nodes.set_index("node").loc["logit 3", "rest"])
    assert given == pytest.approx(float(graph.nodes.set_index("node").loc["logit 3", "activation"]), abs=1e-4)
