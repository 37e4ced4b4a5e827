"""Unit graphs of bridges: what an edge says is what a nudge does, also where HookedTransformer does not exist."""

import pytest
import torch

from swd_lens.analysis.graph import feeders, unit_graph
from swd_lens.analysis.graph.data import records
from swd_lens.analysis.graph.frozen import require_drawable
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.circuits import attribute
from swd_lens.hosts import host_of
from swd_lens.tasks import Task
from swd_lens.units import attach
from tests import families
from tests.analysis.graph_checks import all_units, random_factors

TOKENS = families.some_tokens(rows=1, pos=7)[0].tolist()


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(
    "name", ["Llama", "Qwen3", "Gemma2", "Gemma3", "Olmo2", "Olmo3", "Exaone4", "Phi3", "NanoChat", "Apertus", "Granite"]
)
def test_contributions_add_up_where_there_are_no_biases(name):
    """RMSNorm, rotary positions, grouped heads, gated MLPs, and no bias anywhere: nothing is left of any linear target.

    Also where norms stand behind the matrices, and where the adapter does not let them be folded.
    """
    model = families.loaded(name)
    kinds = {site.kind for site in host_of(model).sites()}
    assert kinds <= {"attn_q", "attn_k", "attn_v", "attn_qkv", "attn_o", "mlp_in", "mlp_gate", "mlp_out"}
    factors = random_factors(model, *kinds)
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=5, isolated=True, answers=2)
    linear, curved = [], []
    for row in records(graph.nodes):
        if row["kind"] != "token":
            (curved if (row["site"] or "").endswith("mlp_out") else linear).append(row)
    assert len(linear) > 2 * len(TOKENS) * 5
    assert max(abs(row["rest"]) for row in linear) < 1e-4 * max(abs(row["activation"]) for row in linear)
    # ... and of what lies behind the activation function something is: it is no linear function.
    assert max(abs(row["rest"]) for row in curved) > 1e-3 * max(abs(row["activation"]) for row in curved)


@pytest.mark.parametrize(("name", "attention"), [("gpt2", "none"), ("pythia", "frozen"), ("qwen2", "frozen"), ("opt", "none")])
def test_the_same_graph_on_both_hosts(name, attention):
    pytest.importorskip("transformer_lens.HookedTransformer", reason="transformer_lens 4 has no HookedTransformer")
    graphs = []
    for model in (families.hooked(name), families.bridge(name)):
        factors = random_factors(model, "attn_v", "attn_o", "mlp_in", "mlp_out")
        graphs.append(unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention=attention, keep=None, answers=[9]))
    hooked, bridge = (graph.edges.set_index(["source", "target"]).sort_index() for graph in graphs)
    assert list(hooked.index) == list(bridge.index) and len(hooked) > 100
    for column in ("weight", "contribution"):
        assert torch.allclose(
            torch.tensor(hooked[column].to_numpy()),
            torch.tensor(bridge[column].to_numpy()),
            rtol=1e-3,
            atol=1e-4 * float(hooked[column].abs().max()),
        )


def test_a_normed_stream_cannot_be_followed():
    model = families.bridge("bert")
    factors = random_factors(model, "mlp_in", "mlp_out")
    with pytest.raises(UnsupportedHostError, match="unit graph needs"):
        unit_graph(model, factors, all_units(factors))
    with pytest.raises(UnsupportedHostError, match="unit graph needs"):
        require_drawable(host_of(model))


def test_linear_attention_is_followed_within_a_position_only():
    model = families.bridge("qwen3_5")
    factors = random_factors(model, "attn_o", "mlp_in", "mlp_out")
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, keep=5, isolated=True)
    reading = [row for row in records(graph.nodes) if (row["site"] or "").endswith("mlp_in") or row["kind"] == "logit"]
    assert max(abs(row["rest"]) for row in reading) < 1e-4 * max(abs(row["activation"]) for row in reading)
    with pytest.raises(UnsupportedHostError, match="pattern"):
        unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen")
    with pytest.raises(UnsupportedHostError, match="pattern"):
        require_drawable(host_of(model))


def test_a_stream_that_is_read_in_another_way_is_refused_before_any_work():
    """A probe of a few tokens: here the MLP reads what no norm of the stream gives."""
    model = families.bridge("llama")
    require_drawable(host_of(model))
    bent = ("blocks.1.ln2.hook_out", lambda h, hook: h + torch.arange(h.shape[-1]))
    with model.hooks(fwd_hooks=[bent]), pytest.raises(UnsupportedHostError, match=r"blocks\.1\.mlp_"):
        require_drawable(host_of(model))


def test_feeders_and_scores_of_one_prompt_on_a_bridge():
    model, ids = families.bridge("gpt2"), families.some_tokens(1, 6)[0]
    factors = random_factors(model, "mlp_out", "attn_o", "mlp_in")
    fed = feeders(model, factors, ("blocks.1.mlp_in", 2), prompt=ids, n=None)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(ids[None])
    z = float(cache["blocks.1.hook_mlp_in_unit"][0, -1, 2])
    assert fed["contribution"].sum() == pytest.approx(z, abs=1e-4) and len(fed) == 17  # 15 units, a token, the rest
    scores = attribute(model, factors, Task.of_prompt(model, ids, 3, 4))
    torch.testing.assert_close(float(scores.means["blocks.1.mlp_in"][2]), z, atol=1e-4, rtol=1e-4)
    assert scores.heads.keys() == {"blocks.0.attn_o", "blocks.1.attn_o"}
