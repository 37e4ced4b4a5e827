"""Edges of unit graphs: every kind against the intervention that it claims, and contributions that add up to z."""

import pytest
import torch

from swd_lens.analysis.graph import unit_graph
from swd_lens.train.baselines import svd
from tests.analysis.graph_checks import APART, FROZEN, HOSTS, TOKENS, all_units, check_edges, drawn, nudged, weights_of


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", HOSTS)
def test_every_edge_is_what_a_nudge_does(name):
    model, factors, graph = drawn((*APART, "mlp_gate") if name == "gated" else APART, name, **FROZEN)

    def count(source: tuple[str, int, int], target: str) -> int:
        return check_edges(model, factors, graph, source, target)

    # The residual stream: one position, 5 units of each later reader.
    for target in ("attn_q", "attn_k", "attn_v", "mlp_in") if name == "LN" else ("attn_k", "mlp_in"):
        assert count(("blocks.0.mlp_out", 1, 2), f"blocks.1.{target}") == 5
    assert count(("blocks.0.attn_o", 3, 4), "blocks.1.attn_v") == 5
    # Within a block the MLP reads what the attention wrote, unless both are parallel.
    assert count(("blocks.0.attn_o", 0, 1), "blocks.0.mlp_in") == (0 if name == "parallel" else 5)
    # Values to all later positions: 5 units at 2, 3, 4.
    assert count(("blocks.1.attn_v", 2, 2), "blocks.1.attn_o") == 15
    assert count(("blocks.0.mlp_in", 4, 3), "blocks.0.mlp_out") == 5
    if name == "gated":
        assert count(("blocks.1.mlp_gate", 0, 1), "blocks.1.mlp_out") == 5
        assert count(("blocks.0.attn_o", 0, 1), "blocks.0.mlp_gate") == 5
    # Nothing leaves a q or k unit, the pattern being held.
    assert not any(".attn_q/" in source or ".attn_k/" in source for source, _ in weights_of(graph))


@pytest.mark.parametrize("name", ["LN", "grouped"])
def test_packed_values(name):
    kinds = ("attn_qkv", "attn_o", "mlp_out")  # mlp_out: held, or a nudge would go through it, too
    model, factors, graph = drawn(kinds, name, **FROZEN)
    assert check_edges(model, factors, graph, ("blocks.0.attn_qkv", 1, 1), "blocks.0.attn_o") == 20
    assert check_edges(model, factors, graph, ("blocks.0.attn_o", 1, 1), "blocks.1.attn_qkv") == 5


@pytest.mark.parametrize("name", ["LN", "gated"])
def test_paths_through_matrices_that_have_no_units(name):
    model, factors, graph = drawn(("attn_o", "mlp_out"), name, **FROZEN)
    assert check_edges(model, factors, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.mlp_out") == 5
    assert check_edges(model, factors, graph, ("blocks.0.attn_o", 1, 3), "blocks.0.mlp_out") == 5
    assert check_edges(model, factors, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.attn_o") == 10


def test_a_path_through_a_replaced_site_runs_through_its_product():
    # mlp_in and attn_v are attached but none of their units is drawn, so they must not be held.
    model, factors, graph = drawn(units=["attn_o", "mlp_out"], **FROZEN)
    products = {site: f for site, f in factors.items() if site.endswith(("attn_o", "mlp_out"))}
    with torch.no_grad():
        for layer, block in enumerate(model.blocks):
            block.mlp.W_in.copy_(factors[f"blocks.{layer}.mlp_in"].product())
            for part in "QKV":
                product = factors[f"blocks.{layer}.attn_{part.lower()}"].product()
                getattr(block.attn, f"W_{part}").copy_(product.unflatten(1, (2, 8)).transpose(0, 1))
    assert check_edges(model, products, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.mlp_out") == 5
    assert check_edges(model, products, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.attn_o") == 10


def test_weights_to_the_answers():
    model, factors, graph = drawn(prompt=TOKENS, answers=[4, 9], keep=None)
    for site in ("blocks.0.attn_o", "blocks.1.mlp_out"):
        change = nudged(model, factors, (site, 2, 4), "logits", 0.05)
        for token in (4, 9):
            assert weights_of(graph)[f"{site}/2@4", f"logit {token}"] == pytest.approx(float(change[token]), rel=2e-3)


def test_contributions_of_everything_add_up_to_z(default_model):
    """On the embedded model, all sites replaced: tokens, all earlier units and biases make every residual reader's z."""
    model = default_model
    factors = svd(model, "all")
    prompt = "The war lasted from the year 1743 to the year 17"
    graph = unit_graph(model, factors, all_units(dict(factors)), prompt=prompt, isolated=True, keep=50)
    rest = graph.nodes.set_index("node")
    last = int(graph.nodes["position"].max())
    _, cache = model.run_with_cache(torch.tensor(graph.settings["token_ids"])[None])
    checked = 0
    for layer, block in enumerate(model.blocks):
        for kind, norm, scale in (("attn_qkv", block.ln1, "ln1"), ("mlp_in", block.ln2, "ln2")):
            # Everything in the residual stream that no unit writes: the biases so far.
            bias = sum(b.attn.b_O + b.mlp.b_out for b in model.blocks[:layer])
            bias = bias + (block.attn.b_O if kind == "mlp_in" else 0)
            constant = 0.0
            if isinstance(bias, torch.Tensor):
                constant = (bias - bias.mean()) * norm.w / cache[f"blocks.{layer}.{scale}.hook_scale"][0, -1]
            name = f"blocks.{layer}.{kind}"
            expected = ((constant + norm.b) @ factors[name].read).detach()
            for unit in range(factors[name].n_units):
                row = rest.loc[f"{name}/{unit}@{last}"]
                assert row["rest"] == pytest.approx(float(expected[unit]), abs=1e-4 * max(1.0, abs(row["activation"])))
                checked += 1
    assert checked == sum(f.n_units for name, f in factors.items() if name.endswith(("attn_qkv", "mlp_in")))


def test_frozen_attention_explains_attn_o_exactly():
    model, factors, graph = drawn(("attn_v", "attn_o"), isolated=True, **FROZEN)
    for layer, block in enumerate(model.blocks):
        expected = block.attn.b_V.flatten().detach() @ factors[f"blocks.{layer}.attn_o"].read  # patterns sum to one
        for unit in range(5):
            row = graph.nodes.set_index("node").loc[f"blocks.{layer}.attn_o/{unit}@4"]
            assert row["rest"] == pytest.approx(float(expected[unit]), abs=1e-4)
