"""task_graph: the mean of the graphs of single prompts, to 1e-5, and what varies between them."""

import pandas as pd
import pytest
import torch

from swd_lens.analysis.graph import UnitGraph, attention_paths, task_graph, unit_graph
from swd_lens.circuits import Circuit, attribute
from swd_lens.hosts import host_of
from swd_lens.tasks import load_task
from swd_lens.tasks.aligned import ANSWER, WRONG, aligned_prompts
from swd_lens.tasks.task import Task
from swd_lens.train.baselines import svd
from swd_lens.units import attach
from tests import families
from tests.analysis.graph_checks import APART, all_units, random_factors
from tests.micro import toy_model
from tests.refusals import refuses

PROMPTS = [[3, 7, 1, 12, 5], [3, 8, 1, 12, 5], [3, 7, 1, 11, 6], [9, 7, 1], [3, 8, 1, 11, 6], [3, 9, 1, 11, 6]]
ANSWERS, WRONG_ANSWERS = [4, 9, 4, 4, 9, 9], [[2], [4, 5], [6], [6], [2], [2]]
HOSTS = {
    "LN": lambda: toy_model(),
    "grouped": lambda: toy_model(n_key_value_heads=1),
    "llama": lambda: families.hooked("llama"),
    "gpt2 bridge": lambda: families.bridge("gpt2"),
}


def task_of_ids(model) -> Task:
    """Three aligned prompts and one of another length to train on."""
    return Task.from_tokens("by hand", model, PROMPTS, ANSWERS, WRONG_ANSWERS, test_fraction=0.1, seed=0)


def single_graphs(model, factors, split, attention):
    """One unit_graph for every aligned prompt, nothing pruned, with its own answers at the top."""
    how = {"attention": attention, "keep": None, "isolated": True}
    return [
        unit_graph(model, factors, all_units(factors), prompt=tokens.tolist(), answers=[*right, *wrong], **how)
        for tokens, right, wrong in zip(split.tokens, split.answer_ids, split.distractor_ids, strict=True)
    ]


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("attention", ["frozen", "none"])
@pytest.mark.parametrize("name", HOSTS)
def test_it_is_the_mean_of_the_graphs_of_its_prompts(name, attention):
    model = HOSTS[name]()
    factors = random_factors(model, *APART, *["mlp_gate"] * (name == "llama"))
    task = task_of_ids(model)
    aligned = aligned_prompts(model, task)
    graph = task_graph(model, factors, all_units(factors), task, attention=attention, keep=None, isolated=True)
    n, before = len(aligned.split), {"activation": 0.0, "rest": 0.0}
    assert n == graph.settings["task_prompts"] == 3
    singles = single_graphs(model, factors, aligned.split, attention)
    units = graph.nodes[graph.nodes["kind"] == "unit"].set_index("node")
    for column in before:
        mean = sum(single.nodes.set_index("node")[column].reindex(units.index) for single in singles) / n
        assert (mean - units[column]).abs().max() <= 1e-5 * mean.abs().max()
    mine = graph.edges.set_index(["source", "target"])
    inner = mine[~mine.index.get_level_values("target").str.startswith("margin")]
    tables = [single.edges.set_index(["source", "target"])["contribution"].reindex(inner.index).fillna(0) for single in singles]
    each = pd.DataFrame({i: contributions for i, contributions in enumerate(tables)})
    assert (each.mean(axis=1) - inner["contribution"]).abs().max() <= 1e-5 * each.abs().max().max()
    share = each.var(axis=1, ddof=0) / each.pow(2).mean(axis=1)
    large = each.abs().max(axis=1) > 1e-3 * each.abs().max().max()
    assert (share - inner["varies"])[large].abs().max() < 1e-3 and inner["varies"].between(0, 1).all()
    assert inner["varies"][large].max() > 0.01


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("name", ["LN", "gpt2 bridge"])
def test_edges_and_rest_add_up_to_the_mean_margin(name):
    model = HOSTS[name]()
    factors = random_factors(model, *APART)
    task = task_of_ids(model)
    split, into = aligned_prompts(model, task).split, {}
    for top in ("margin", "answers"):
        graph = task_graph(model, factors, all_units(factors), task, top=top, keep=None, isolated=True)
        with torch.no_grad(), attach(model, factors):
            logits = torch.stack([host_of(model).last_logits(tokens[None])[0] for tokens in split.tokens])
        right, wrong = (
            torch.stack([row[list(ids)].mean() for row, ids in zip(logits, side, strict=True)])
            for side in (split.answer_ids, split.distractor_ids)
        )
        margin = {"margin": right - wrong, "answer": right - logits.mean(1), "wrong answer": wrong - logits.mean(1)}
        nodes = graph.nodes.set_index("node")
        names = ["margin"] if top == "margin" else ["answer", "wrong answer"]
        assert nodes.index[nodes["kind"] == "logit"].tolist() == names
        for node in names:
            expected = float(margin[node].mean())
            assert nodes.loc[node, "activation"] == pytest.approx(expected, abs=1e-5 * float(logits.abs().max()))
            edges = graph.edges[graph.edges["target"] == node]
            total, into[node] = edges["contribution"].sum(), edges.set_index("source")["weight"]
            assert total + nodes.loc[node, "rest"] == pytest.approx(nodes.loc[node, "activation"], abs=1e-4)
    # Of a pair of names the margin's edges are the difference of the answers' edges.
    difference = into["answer"] - into["wrong answer"]
    assert (difference - into["margin"]).abs().max() < 1e-5 * difference.abs().max()


def test_unaligned_prompts_are_counted():
    model = toy_model()
    aligned = aligned_prompts(model, task_of_ids(model))
    assert len(aligned.split) == 3 and aligned.left_out == {"of another length": 1} and aligned.drawn == 0
    fewer = aligned_prompts(model, task_of_ids(model), 1)
    assert len(fewer.split) == 1 and fewer.left_out["not needed"] == len(aligned.split) - 1
    factors = random_factors(model, "attn_o", "mlp_out")
    graph = task_graph(model, factors, all_units(factors), task_of_ids(model))
    assert graph.settings["task_left_out"] == aligned.left_out
    assert f"mean of {len(aligned.split)} prompts" in repr(graph)


def test_ioi_is_drawn_again_with_other_names(default_model):
    task = load_task("ioi", default_model, n_train=40, n_test=4)
    aligned = aligned_prompts(default_model, task, 8)
    assert len(aligned.split) == 8 and aligned.drawn > 0 and len(set(map(tuple, aligned.tokens.tolist()))) == 8
    assert {len(tokens) for tokens in aligned.split.tokens} == {len(aligned.roles)}
    assert sum(ANSWER in role for role in aligned.roles) == 1 and sum(WRONG in role for role in aligned.roles) == 2
    assert aligned.roles[-1] == "·to" and "[answer]" in aligned.text
    examples = aligned.split.examples
    assert len({example.meta["template"] for example in examples}) == 1
    for example in examples:
        assert example.prompt.count(example.answers[0].strip()) == 1
        assert example.prompt.count(example.distractors[0].strip()) == 2
    again = aligned_prompts(default_model, task, 8)
    assert [example.prompt for example in again.split.examples] == [example.prompt for example in examples]
    alone = aligned_prompts(default_model, task, 8, drawn=False)
    assert alone.drawn == 0 and len(alone.split) < 8
    pronouns = aligned_prompts(default_model, load_task("gendered_pronoun", default_model, n_train=12, n_test=2), 12)
    assert 6 <= len(pronouns.split) < 12  # one sentence about each of its six names, and what the split had itself
    assert pronouns.drawn > 0 and len({example.answers for example in pronouns.split.examples}) == 2
    assert len({example.meta["content"] for example in pronouns.split.examples}) == 6


def test_a_circuit_of_the_embedded_model(default_model, tmp_path):
    factors = svd(default_model, "attn_o")
    task = load_task("ioi", default_model, n_train=30, n_test=4)
    scores = attribute(default_model, factors, task.train, positions="all")
    circuit = Circuit.of(factors, scores, scores.ranking()[:12])
    graph = task_graph(default_model, factors, circuit, task, prompts=4, keep=30)
    assert graph.settings["task"] == "ioi" and len(graph.edges) == 30 and (graph.nodes["rank"] <= 12).any()
    assert graph.nodes[graph.nodes["kind"] == "token"]["label"].isin(graph.settings["tokens"]).all()
    table = graph.table(5)
    assert "varies" in table and "margin: answer − wrong answer" in " ".join(graph.table()["target"])
    graph.to_json(tmp_path / "graph.json")
    again = UnitGraph.load(tmp_path / "graph.json")
    pd.testing.assert_frame_equal(again.edges, graph.edges)
    assert again.settings == graph.settings and "<svg" in again._repr_html_()
    refuses(ValueError, "is the mean of 4 prompts", attention_paths, default_model, factors, graph)


def test_what_has_no_task_graph():
    model = toy_model()
    factors, task = random_factors(model, "attn_o", "mlp_out"), task_of_ids(model)
    refuses(ValueError, "attention must be", task_graph, model, factors, all_units(factors), task, attention="held")
    refuses(ValueError, "top must be", task_graph, model, factors, all_units(factors), task, top="both")
    refuses(ValueError, "taken from a Task or one of its splits, got list", aligned_prompts, model, PROMPTS)
    other = toy_model(d_vocab=31)
    with pytest.raises(ValueError, match="was tokenized for a host with 20 tokens"):
        task_graph(other, random_factors(other, "attn_o"), [("blocks.0.attn_o", 0)], task)
