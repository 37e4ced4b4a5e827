"""What a graph holds: norms' scales without a prompt, logits before a cap, and what has no slope."""

import pandas as pd
import pytest
import torch

from swd_lens.analysis.graph import replays, unit_graph
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.analysis.graph_checks import FROZEN, HOSTS, TOKENS, all_units, drawn, nudged, random_factors, weights_of
from tests.micro import toy_model


@pytest.mark.parametrize("name", ["LN", "RMS", "parallel"])
def test_without_a_prompt_a_weight_is_a_nudge_at_scale_one(name):
    model, factors, graph = drawn(host=name, keep=None, answers=[2])
    weights = weights_of(graph)
    change = nudged(model, factors, ("blocks.0.attn_o", 1, 2), "blocks.1.mlp_in", 0.05, scale_one=True)[2]
    for unit in range(5):
        assert weights["blocks.0.attn_o/1", f"blocks.1.mlp_in/{unit}"] == pytest.approx(float(change[unit]), abs=1e-4)
    logit = nudged(model, factors, ("blocks.1.mlp_out", 1, 4), "logits", 0.05, scale_one=True)[2]
    assert weights["blocks.1.mlp_out/1", "logit 2"] == pytest.approx(float(logit), abs=1e-4)
    assert not any(".mlp_in/" in source or ".attn_v/" in source for source, _ in weights)


def test_average_scale_and_cosine():
    model, factors, graph = drawn(("mlp_out", "mlp_in"), keep=None)
    plain = weights_of(graph)
    key = ("blocks.0.mlp_out/1", "blocks.1.mlp_in/2")
    _, cache = model.run_with_cache(torch.tensor([TOKENS, TOKENS[::-1]]))
    inverse = (1 / cache["blocks.1.ln2.hook_scale"]).mean()
    averaged = weights_of(unit_graph(model, factors, all_units(factors), tokens=torch.tensor([TOKENS, TOKENS[::-1]]), keep=None))
    assert averaged[key] == pytest.approx(plain[key] * float(inverse), rel=1e-4)
    cosine = weights_of(unit_graph(model, factors, all_units(factors), keep=None, normalize="cosine"))
    read = factors["blocks.1.mlp_in"].read[:, 2] * model.state_dict()["blocks.1.ln2.w"]
    read = read - read.mean()
    write = factors["blocks.0.mlp_out"].write[1]
    assert cosine[key] == pytest.approx(float(torch.cosine_similarity(read, write, dim=0)), abs=1e-5)


def test_answers_of_capped_logits_are_those_before_the_cap():
    """A tanh on the logits changes no edge; probabilities are those behind it."""
    plain, capped = toy_model(), toy_model(output_logits_soft_cap=5.0)
    factors = random_factors(plain, "attn_o", "mlp_in", "mlp_out")
    graphs = [unit_graph(model, factors, all_units(factors), **FROZEN) for model in (plain, capped)]
    assert graphs[1].settings["logits"] == "before the soft cap of 5" and "logits" not in graphs[0].settings
    edges, nodes = ([getattr(graph, part) for graph in graphs] for part in ("edges", "nodes"))
    edges = [table.set_index(["source", "target"]).sort_index()[["weight", "contribution"]] for table in edges]
    pd.testing.assert_frame_equal(*edges, rtol=1e-3, atol=1e-4)
    pd.testing.assert_frame_equal(*(table.drop(columns=["probability", "influence"]) for table in nodes), rtol=1e-3, atol=1e-4)
    with attach(capped, factors):
        expected = capped(torch.tensor([TOKENS]))[0, -1].softmax(-1)
    shown = graphs[1].nodes[graphs[1].nodes["kind"] == "logit"]
    assert shown["probability"].tolist() == pytest.approx([float(expected[int(token)]) for token in shown["token"]])
    moved = [replays(model, factors, graph, strengths=(0.0,)) for model, graph in zip((plain, capped), graphs, strict=True)]
    torch.testing.assert_close(moved[0].effects, moved[1].effects, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved[0].changes, moved[1].changes, rtol=1e-3, atol=1e-4)


def test_without_a_prompt_norms_behind_sites_have_scale_one_or_their_mean():
    model = toy_model(**HOSTS["norms behind"])
    factors = random_factors(model, "mlp_in", "mlp_out")
    norm = model.blocks[0].ln2_post
    write, read = (factors["blocks.0.mlp_out"].write * norm.w, factors["blocks.1.mlp_in"].read * model.blocks[1].ln2.w[:, None])

    def edges(**settings):
        graph = unit_graph(model, factors, all_units(factors), keep=None, **settings)
        found = weights_of(graph)
        names = [(f"blocks.0.mlp_out/{i}", f"blocks.1.mlp_in/{j}") for i in range(5) for j in range(5)]
        return torch.tensor([found[name] for name in names]).view(5, 5)

    torch.testing.assert_close(edges(), write @ read, rtol=1e-4, atol=1e-5)
    cosines = torch.nn.functional.normalize(write, dim=1) @ torch.nn.functional.normalize(read, dim=0)
    torch.testing.assert_close(edges(normalize="cosine"), cosines, rtol=1e-4, atol=1e-5)
    rows = torch.tensor([TOKENS, TOKENS[::-1]])
    _, cache = model.run_with_cache(rows)
    means = [(1 / cache[f"blocks.{i}.{ln}.hook_scale"]).mean() for i, ln in ((0, "ln2_post"), (1, "ln2"))]
    torch.testing.assert_close(edges(tokens=rows), write @ read * means[0] * means[1], rtol=1e-4, atol=1e-5)


def test_activation_functions_that_mix_neurons():
    model = toy_model(act_fn="solu_ln")
    factors = {"blocks.0.mlp_out": Factors(torch.randn(32, 3), torch.randn(3, 16))}
    with pytest.raises(UnsupportedHostError, match="mixes neurons"):
        unit_graph(model, factors, ["blocks.0.mlp_out/1"], prompt=TOKENS)
