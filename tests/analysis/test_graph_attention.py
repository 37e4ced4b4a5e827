"""Attention edges by head add up to the graph's contributions; scores by pairs add up to what the host shows."""

import json

import pandas as pd
import pytest
import torch

from swd_lens.analysis.graph import AttentionPaths, attention_paths, unit_graph
from swd_lens.analysis.graph.attention import OTHERS, PAIR
from swd_lens.hosts import host_of
from swd_lens.hosts.recording import record
from swd_lens.units import attach
from tests import families
from tests.analysis.graph_checks import APART, FROZEN, TOKENS, all_units, drawn, random_factors
from tests.micro import toy_model
from tests.refusals import refuses

PLACE = ["layer", "head", "dest", "src"]
HOSTS = {
    "LN": lambda: toy_model(),
    "alibi": lambda: toy_model(positional_embedding_type="alibi"),
    "soft cap": lambda: toy_model(attn_scores_soft_cap=3.0),
    "llama": lambda: families.hooked("llama"),  # rotary, grouped query heads
    "llama bridge": lambda: families.bridge("llama"),
    "qwen3 bridge": lambda: families.bridge("qwen3"),  # with norms of queries and keys
    "gpt2 bridge": lambda: families.bridge("gpt2"),
}


def graph_and_paths(model, kinds, **how):
    factors = random_factors(model, *kinds)
    graph = unit_graph(model, factors, all_units(factors), **FROZEN)
    return factors, graph, attention_paths(model, factors, graph, **how)


def shown_scores(model, factors) -> dict[int, torch.Tensor]:
    """hook_attn_scores of the host with the factors attached: layer -> (head, dest, src)."""
    names = {layer: f"blocks.{layer}.attn.hook_attn_scores" for layer in range(len(model.blocks))}
    with torch.no_grad(), attach(model, factors):
        seen = record(host_of(model), torch.tensor([TOKENS]), hooks=list(names.values()), keep=torch.Tensor.clone)
    return {layer: seen.hooks[name][0] for layer, name in names.items()}


def check_heads(model, graph, paths):
    edges = graph.edges[graph.edges["kind"] == "attention"].set_index(["source", "target"])["contribution"]
    sums = paths.heads.groupby(["source", "target"])["contribution"].sum()
    assert len(edges) > 0 and set(edges.index) == set(sums.index)
    off = (sums - edges[sums.index]).abs().max()
    assert off <= 1e-5 * edges.abs().max()
    counts = paths.heads.groupby(["source", "target"]).size()
    assert set(counts) == {int(model.cfg.n_heads)}
    # The split is one: some edge is carried by more than one head, and not in equal parts.
    assert paths.heads.groupby(["source", "target"])["contribution"].std().max() > 0


def check_scores(model, factors, paths):
    shown = shown_scores(model, factors)
    cap = getattr(model.cfg, "attn_scores_soft_cap", -1.0)
    sums = paths.scores.groupby(PLACE)["contribution"].sum()
    places = paths.heads[PLACE].drop_duplicates()
    assert len(sums) == len(places) > 0
    largest = max(float(scores[scores > -1e4].abs().max()) for scores in shown.values())
    for (layer, head, dest, src), score in sums.items():
        score = cap * torch.tensor(score / cap).tanh().item() if cap > 0 else score
        assert abs(score - float(shown[layer][head, dest, src])) <= 1e-5 * largest


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", HOSTS)
def test_heads_and_pairs_add_up(name, packed):
    model = HOSTS[name]()
    kinds = ("attn_qkv", "attn_o", "mlp_out") if packed else (*APART, "mlp_gate") if "ll" in name or "qw" in name else APART
    factors, graph, paths = graph_and_paths(model, kinds, pairs=3)
    check_heads(model, graph, paths)
    check_scores(model, factors, paths)
    assert paths.scores[paths.scores["part"] == PAIR].groupby(PLACE).size().eq(3).all()
    # Nothing is left when all pairs stand by themselves.
    every = attention_paths(model, factors, graph, pairs=10_000).scores
    assert every[every["part"] == OTHERS]["contribution"].abs().max() < 1e-5 * every["contribution"].abs().max()


@pytest.mark.parametrize("name", ["LN", "llama bridge"])
def test_edges_through_values_that_have_no_units(name):
    """Tokens and units of earlier layers, through the matrix W_V and the norm; without query and key units no scores."""
    model = HOSTS[name]()
    _, graph, paths = graph_and_paths(model, ("attn_o", "mlp_out"))
    check_heads(model, graph, paths)
    assert paths.scores.empty and any(source.startswith("token") for source in paths.heads["source"])
    assert paths.table(3).columns.tolist() == paths.heads.columns.tolist()


def test_a_pruned_graph_is_split_as_it_was_drawn():
    model, factors, graph = drawn(prompt=TOKENS, attention="frozen", keep=250)
    check_heads(model, graph, attention_paths(model, factors, graph))


def test_pairs_are_named_and_the_strongest():
    model = toy_model()
    factors, _, paths = graph_and_paths(model, APART)
    table = paths.table(4)
    assert table["contribution"].abs().is_monotonic_decreasing and len(table) == 4
    first = table.iloc[0]
    assert first["q unit"].startswith(f"blocks.{first['layer']}.attn_q/")
    assert first["k unit"].startswith(f"blocks.{first['layer']}.attn_k/")
    z, write = {}, {kind: factors[f"blocks.{first['layer']}.attn_{kind}"].write for kind in "qk"}
    with torch.no_grad(), attach(model, factors):
        _, cache = model.run_with_cache(torch.tensor([TOKENS]))
        for kind, position in (("q", "dest"), ("k", "src")):
            unit = int(first[f"{kind} unit"].rpartition("/")[2])
            head = slice(8 * first["head"], 8 * first["head"] + 8)
            activation = cache[f"blocks.{first['layer']}.hook_attn_{kind}_unit"][0, first[position], unit]
            z[kind] = activation * write[kind][unit, head]
    assert float(z["q"] @ z["k"]) / 8**0.5 == pytest.approx(first["of the pair"], rel=1e-4)
    pattern = cache[f"blocks.{first['layer']}.attn.hook_pattern"]
    assert float(pattern[0, first["head"], first["dest"], first["src"]]) == pytest.approx(first["pattern"], rel=1e-5)


def test_it_goes_to_json_and_shows_itself():
    for kinds in (APART, ("attn_o", "mlp_out")):
        _, _, paths = graph_and_paths(toy_model(), kinds)
        again = AttentionPaths.from_dict(json.loads(json.dumps(paths.as_dict())))
        pd.testing.assert_frame_equal(again.heads, paths.heads)
        pd.testing.assert_frame_equal(again.scores, paths.scores)
        assert again.settings == paths.settings and repr(again) == repr(paths)
        assert "<table" in paths._repr_html_() and "edges by head" in paths._repr_html_()
    refuses(ValueError, "heads", AttentionPaths.from_dict, {"scores": [], "settings": {}})


def test_what_cannot_be_split():
    model, factors, graph = drawn(**FROZEN)
    with pytest.raises(ValueError, match='attention="frozen"'):
        attention_paths(model, factors, unit_graph(model, factors, all_units(factors), prompt=TOKENS))
    for others in (random_factors(model, *APART, n_units=6), random_factors(model, "attn_o")):
        refuses(ValueError, "the graph was made with other factors", attention_paths, model, others, graph)
