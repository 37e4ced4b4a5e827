"""Unit graphs: every kind of edge against the intervention that it claims, and contributions that add up to z."""

import pandas as pd
import pytest
import torch

from swd_lens.analysis.graph import feeders, replays, unit_graph
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.hosts import host_of
from swd_lens.train.baselines import svd
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.analysis.graph_checks import (
    TOKENS,
    all_units,
    check_edges,
    nudged,
    random_factors,
    sites_by_name,
    weights_of,
)
from tests.micro import toy_model

APART = ("attn_q", "attn_k", "attn_v", "attn_o", "mlp_in", "mlp_out")
HOSTS = {
    "LN": {},
    "LN folded": {"normalization_type": "LNPre"},
    "RMS": {"normalization_type": "RMS"},
    "no norm": {"normalization_type": None},
    "parallel": {"parallel_attn_mlp": True},
    "grouped": {"n_key_value_heads": 1},
    "rotary": {"positional_embedding_type": "rotary", "rotary_dim": 8},
    "gated": {"gated_mlp": True, "act_fn": "silu"},
    "norms behind": {"use_normalization_before_and_after": True, "normalization_type": "RMS"},
}


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", HOSTS)
def test_every_edge_is_what_a_nudge_does(name):
    model = toy_model(**HOSTS[name])
    kinds = (*APART, "mlp_gate") if name == "gated" else APART
    factors = random_factors(model, *kinds)
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None)

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
    model = toy_model(**HOSTS[name])
    factors = random_factors(
        model, "attn_qkv", "attn_o", "mlp_out"
    )  # mlp_out: held, or a nudge would go through it, too
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None)
    assert check_edges(model, factors, graph, ("blocks.0.attn_qkv", 1, 1), "blocks.0.attn_o") == 20
    assert check_edges(model, factors, graph, ("blocks.0.attn_o", 1, 1), "blocks.1.attn_qkv") == 5


@pytest.mark.parametrize("gated", [False, True])
def test_paths_through_matrices_that_have_no_units(gated):
    model = toy_model(**({"gated_mlp": True, "act_fn": "silu"} if gated else {}))
    factors = random_factors(model, "attn_o", "mlp_out")
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None)
    assert check_edges(model, factors, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.mlp_out") == 5
    assert check_edges(model, factors, graph, ("blocks.0.attn_o", 1, 3), "blocks.0.mlp_out") == 5
    assert check_edges(model, factors, graph, ("blocks.0.mlp_out", 1, 3), "blocks.1.attn_o") == 10


def test_a_path_through_a_replaced_site_runs_through_its_product():
    # mlp_in and attn_v are attached but none of their units is drawn, so they must not be held.
    model = toy_model()
    factors = random_factors(model, *APART)
    drawn = [unit for unit in all_units(factors) if unit[0].endswith(("attn_o", "mlp_out"))]
    graph = unit_graph(model, factors, drawn, prompt=TOKENS, attention="frozen", keep=None)
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
    model = toy_model()
    factors = random_factors(model, *APART)
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, answers=[4, 9], keep=None)
    for site in ("blocks.0.attn_o", "blocks.1.mlp_out"):
        change = nudged(model, factors, (site, 2, 4), "logits", 0.05)
        for token in (4, 9):
            assert weights_of(graph)[f"{site}/2@4", f"logit {token}"] == pytest.approx(float(change[token]), rel=2e-3)


@pytest.mark.parametrize("name", ["LN", "RMS", "parallel"])
def test_without_a_prompt_a_weight_is_a_nudge_at_scale_one(name):
    model = toy_model(**HOSTS[name])
    factors = random_factors(model, *APART)
    weights = weights_of(unit_graph(model, factors, all_units(factors), keep=None, answers=[2]))
    change = nudged(model, factors, ("blocks.0.attn_o", 1, 2), "blocks.1.mlp_in", 0.05, scale_one=True)[2]
    for unit in range(5):
        assert weights["blocks.0.attn_o/1", f"blocks.1.mlp_in/{unit}"] == pytest.approx(float(change[unit]), abs=1e-4)
    logit = nudged(model, factors, ("blocks.1.mlp_out", 1, 4), "logits", 0.05, scale_one=True)[2]
    assert weights["blocks.1.mlp_out/1", "logit 2"] == pytest.approx(float(logit), abs=1e-4)
    assert not any(".mlp_in/" in source or ".attn_v/" in source for source, _ in weights)


def test_average_scale_and_cosine():
    model = toy_model()
    factors = random_factors(model, "mlp_out", "mlp_in")
    plain = weights_of(unit_graph(model, factors, all_units(factors), keep=None))
    key = ("blocks.0.mlp_out/1", "blocks.1.mlp_in/2")
    _, cache = model.run_with_cache(torch.tensor([TOKENS, TOKENS[::-1]]))
    inverse = (1 / cache["blocks.1.ln2.hook_scale"]).mean()
    averaged = weights_of(
        unit_graph(model, factors, all_units(factors), tokens=torch.tensor([TOKENS, TOKENS[::-1]]), keep=None)
    )
    assert averaged[key] == pytest.approx(plain[key] * float(inverse), rel=1e-4)
    cosine = weights_of(unit_graph(model, factors, all_units(factors), keep=None, normalize="cosine"))
    read = factors["blocks.1.mlp_in"].read[:, 2] * model.state_dict()["blocks.1.ln2.w"]
    read = read - read.mean()
    write = factors["blocks.0.mlp_out"].write[1]
    assert cosine[key] == pytest.approx(float(torch.cosine_similarity(read, write, dim=0)), abs=1e-5)


def test_contributions_of_everything_add_up_to_z(default_model):
    """On the embedded model, all sites replaced: tokens, all earlier units and biases make every residual reader's z."""
    model = default_model
    factors = svd(model, "all")
    graph = unit_graph(
        model,
        factors,
        all_units(dict(factors)),
        prompt="The war lasted from the year 1743 to the year 17",
        isolated=True,
        keep=50,
    )
    rest = graph.nodes.set_index("node")
    host, sites = host_of(model), sites_by_name(model)
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
            affine = host.affine(sites[name])
            assert affine is not None and affine.shift is not None
            for unit in range(factors[name].n_units):
                row = rest.loc[f"{name}/{unit}@{last}"]
                assert row["rest"] == pytest.approx(float(expected[unit]), abs=1e-4 * max(1.0, abs(row["activation"])))
                checked += 1
    assert checked == sum(f.n_units for name, f in factors.items() if name.endswith(("attn_qkv", "mlp_in")))


def test_feeders_of_a_unit_are_the_edges_into_it_and_add_up_to_z():
    model = toy_model()
    factors = random_factors(model, *APART)
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None, isolated=True)
    nodes, last = graph.nodes.set_index("node"), len(TOKENS) - 1
    for site, index in (
        ("blocks.1.mlp_in", 2),
        ("blocks.1.attn_o", 1),
        ("blocks.1.mlp_out", 3),
        ("blocks.1.attn_v", 0),
    ):
        fed, unit = feeders(model, factors, (site, index), prompt=TOKENS, n=None), f"{site}/{index}@{last}"
        edges = graph.edges[graph.edges["target"] == unit]
        given = fed[(fed["source"] != "rest") & (fed["weight"] != 0)]
        names = [f"{source}@{position}" for source, position in zip(given["source"], given["position"], strict=True)]
        found = dict(zip(names, given["contribution"], strict=True))
        assert found == pytest.approx(dict(zip(edges["source"], edges["contribution"], strict=True)), abs=1e-5)
        assert fed["contribution"].sum() == pytest.approx(nodes.loc[unit, "activation"], abs=1e-4)
        rest = fed.set_index("source").loc["rest", "contribution"]
        assert rest == pytest.approx(nodes.loc[unit, "rest"], abs=1e-4)
        assert (
            fed["rank"].tolist() == list(range(1, len(fed) + 1)) and fed["contribution"].abs().is_monotonic_decreasing
        )
        assert feeders(model, factors, f"{site}/{index}", prompt=TOKENS, n=3).equals(fed.head(3))


def test_feeders_without_a_prompt_are_weights():
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_in")
    fed = feeders(model, factors, "blocks.1.mlp_in/2", n=None)
    weight = weights_of(unit_graph(model, factors, all_units(factors), keep=None))
    assert fed.columns.tolist() == ["rank", "source", "kind", "weight"] and len(fed) == 10
    for source, w in zip(fed["source"], fed["weight"], strict=True):
        assert w == pytest.approx(weight[source, "blocks.1.mlp_in/2"], rel=1e-5)
    with pytest.raises(ValueError, match=r"no unit of blocks\.0\.attn_o, .* speaks to blocks\.1\.attn_o/0"):
        feeders(model, factors, "blocks.1.attn_o/0")
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp_in/5 is not among"):
        feeders(model, factors, "blocks.1.mlp_in/5", prompt=TOKENS)
    with pytest.raises(ValueError, match="n=0: give a whole number"):
        feeders(model, factors, "blocks.1.mlp_in/1", n=0)


def test_a_graph_of_targets_leads_to_them_alone():
    model = toy_model()
    factors = random_factors(model, *APART)
    graph = unit_graph(model, factors, targets="blocks.1.mlp_in/2", prompt=TOKENS, keep=None)
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


def test_frozen_attention_explains_attn_o_exactly():
    model = toy_model()
    factors = random_factors(model, "attn_v", "attn_o")
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None, isolated=True)
    for layer, block in enumerate(model.blocks):
        expected = block.attn.b_V.flatten().detach() @ factors[f"blocks.{layer}.attn_o"].read  # patterns sum to one
        for unit in range(5):
            row = graph.nodes.set_index("node").loc[f"blocks.{layer}.attn_o/{unit}@4"]
            assert row["rest"] == pytest.approx(float(expected[unit]), abs=1e-4)


def test_pruning_keeps_the_strongest_and_says_so():
    model = toy_model()
    factors = random_factors(model, *APART)
    units = all_units(factors)
    everything = unit_graph(model, factors, units, keep=None)
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


def test_a_graph_inside_inference_mode_is_the_same():
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_out")
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen")
    with torch.inference_mode():
        again = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen")
    assert graph.edges.equals(again.edges)


def test_one_unit_and_all_the_answers_there_are():
    model = toy_model()
    factors = random_factors(model, "attn_o")
    graph = unit_graph(model, factors, "blocks.0.attn_o/1", prompt=TOKENS, answers=99, keep=None)
    assert graph.nodes["kind"].value_counts().to_dict() == {"logit": 20, "unit": 1, "token": 1}


def test_units_are_named_by_site_glob_table_and_pair():
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_out")
    whole = unit_graph(model, factors, all_units(factors), prompt=TOKENS, keep=None)
    for units in ("all", ["attn_o", "blocks.*.mlp_out"], pd.DataFrame(all_units(factors), columns=["site", "unit"])):
        assert unit_graph(model, factors, units, prompt=TOKENS, keep=None).edges.equals(whole.edges)
    mixed = unit_graph(model, factors, ["blocks.1.mlp_out", ("blocks.0.attn_o", 2)], answers=[3])
    drawn = mixed.nodes["node"][mixed.nodes["kind"] == "unit"].tolist()
    assert set(drawn) <= {"blocks.0.attn_o/2", *(f"blocks.1.mlp_out/{i}" for i in range(5))} and len(drawn) == 6
    with pytest.raises(ValueError, match=r"no site matches 'mlp_in'"):
        unit_graph(model, factors, ["mlp_in"], prompt=TOKENS)


def test_influence_is_shared_out():
    """Shares of the answers, the one at the top, and everything below it holds no more than the whole."""
    model = toy_model()
    factors = random_factors(model, "attn_o", "mlp_out", "mlp_in")
    graph = unit_graph(model, factors, all_units(factors), prompt=TOKENS, answers=[3], keep=None)
    influence = graph.nodes.set_index("node")["influence"]
    assert influence["logit 3"] == 1.0
    assert 0 < influence["token@4"] <= 1.0
    into = graph.edges[graph.edges["target"] == "logit 3"]
    assert into["strength"].sum() <= 1.0 + 1e-6
    given = into["contribution"].sum() + float(graph.nodes.set_index("node").loc["logit 3", "rest"])
    assert given == pytest.approx(float(graph.nodes.set_index("node").loc["logit 3", "activation"]), abs=1e-4)


def test_the_host_is_left_as_it_was():
    model = toy_model()
    before = {name: p.clone() for name, p in model.state_dict().items()}
    logits, names = model(torch.tensor([TOKENS])), list(model.hook_dict)
    factors = random_factors(model, *APART)
    first = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen")
    again = unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen")
    assert first.edges.equals(again.edges) and first.nodes.equals(again.nodes)
    assert torch.equal(model(torch.tensor([TOKENS])), logits) and list(model.hook_dict) == names
    assert all(torch.equal(p, before[name]) for name, p in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_drawn_is_refused():
    model = toy_model()
    factors = random_factors(model, *APART)
    units = all_units(factors)

    def refused(error: type[Exception], match: str, drawn=units, **settings) -> None:
        with pytest.raises(error, match=match):
            unit_graph(model, factors, drawn, **settings)

    refused(ValueError, r"no unit of blocks\.0\.mlp_in can speak.*attn_o, mlp_out", drawn=["blocks.0.mlp_in/1"])
    refused(ValueError, r"blocks\.0\.mlp_in/7 is not among .* \(0 to 4\)", drawn=["blocks.0.mlp_in/7"])
    refused(ValueError, r"blocks\.9\.mlp_in/0 is not among", drawn=[("blocks.9.mlp_in", 0)])
    refused(ValueError, "named twice", drawn=["blocks.0.mlp_in/1", ("blocks.0.mlp_in", 1)])
    refused(ValueError, "there are no units", drawn=[])
    refused(ValueError, "give one, prompt=", attention="frozen")
    refused(ValueError, "attention must be one of", attention="thawed")
    refused(ValueError, "cosine.*without one", prompt=TOKENS, normalize="cosine")
    refused(ValueError, "leave `tokens` out", prompt=TOKENS, tokens=torch.tensor([TOKENS]))
    refused(ValueError, "keep=0", keep=0)
    refused(ValueError, "min_weight=-1", min_weight=-1)
    refused(ValueError, "no tokenizer", prompt="text")
    refused(ValueError, "33|32", prompt=list(range(20)) + list(range(13)))
    refused(ValueError, "answer 20 is no token id", prompt=TOKENS, answers=[20])
    refused(ValueError, "likeliest tokens are those of a prompt", answers=3)
    refused(ValueError, "answer 4 is named twice", prompt=TOKENS, answers=[4, 3, 4])
    refused(ValueError, "answers=True", prompt=TOKENS, answers=True)
    refused(ValueError, "per_node=True: give a whole number", per_node=True)
    refused(ValueError, "one prompt, got 2", prompt=[TOKENS, TOKENS])


def test_coders_have_no_edges():
    model = toy_model()
    with pytest.raises(TypeError, match="no read and write vectors"):
        unit_graph(model, {"blocks.0.mlp": _Pair()}, ["blocks.0.mlp/1"])


class _Pair:
    reads, writes = "input", "output"

    def encode(self, x):
        return x

    def decode(self, z):
        return z


def test_answers_of_capped_logits_are_those_before_the_cap():
    """A tanh on the logits changes no edge; probabilities are those behind it."""
    plain, capped = toy_model(), toy_model(output_logits_soft_cap=5.0)
    factors = random_factors(plain, "attn_o", "mlp_in", "mlp_out")
    graphs = [
        unit_graph(model, factors, all_units(factors), prompt=TOKENS, attention="frozen", keep=None)
        for model in (plain, capped)
    ]
    assert graphs[1].settings["logits"] == "before the soft cap of 5" and "logits" not in graphs[0].settings
    edges, nodes = ([getattr(graph, part) for graph in graphs] for part in ("edges", "nodes"))
    edges = [table.set_index(["source", "target"]).sort_index()[["weight", "contribution"]] for table in edges]
    pd.testing.assert_frame_equal(*edges, rtol=1e-3, atol=1e-4)
    pd.testing.assert_frame_equal(
        *(table.drop(columns=["probability", "influence"]) for table in nodes), rtol=1e-3, atol=1e-4
    )
    with attach(capped, factors):
        expected = capped(torch.tensor([TOKENS]))[0, -1].softmax(-1)
    shown = graphs[1].nodes[graphs[1].nodes["kind"] == "logit"]
    assert shown["probability"].tolist() == pytest.approx([float(expected[int(token)]) for token in shown["token"]])
    moved = [
        replays(model, factors, graph, strengths=(0.0,)) for model, graph in zip((plain, capped), graphs, strict=True)
    ]
    torch.testing.assert_close(moved[0].effects, moved[1].effects, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(moved[0].changes, moved[1].changes, rtol=1e-3, atol=1e-4)


def test_without_a_prompt_norms_behind_sites_have_scale_one_or_their_mean():
    model = toy_model(**HOSTS["norms behind"])
    factors = random_factors(model, "mlp_in", "mlp_out")
    norm = model.blocks[0].ln2_post
    write, read = (
        factors["blocks.0.mlp_out"].write * norm.w,
        factors["blocks.1.mlp_in"].read * model.blocks[1].ln2.w[:, None],
    )

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
