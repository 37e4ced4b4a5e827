"""look_inside: sections and views of a real set on the embedded model, as run.json and the report take them."""

import json
from dataclasses import asdict

import pytest
import torch

import swd_lens as swd
from swd_lens.study.inside import look_inside
from swd_lens.study.section import AttentionView, ReportSection


@pytest.fixture(scope="module")
def factors(default_model):
    text = swd.text_tokens(2_048, split="train")
    sites = ["blocks.0.attn_qkv", "blocks.1.attn_o", "blocks.2.mlp_out"]
    return swd.factorize(default_model, sites, sparsity=0.6, tokens=text, preset="quick", outer_iterations=4, progress=False)


@pytest.fixture(scope="module")
def tasks(default_model):
    return [swd.load_task(name, default_model, n_train=8, n_test=8) for name in ("ioi", "gendered_pronoun")]


def test_what_a_report_gets(default_model, factors, tasks):
    before = {name: t.clone() for name, t in default_model.state_dict().items()}
    views, sections = look_inside(default_model, factors, tasks)
    (view,) = views
    # The pair's view is that of a replay: patterns whose rows sum to one, and a map in units of its largest entry.
    values = view.tensor()
    assert view.names[:2] == ("dense", "with units") and values.shape[0] == 4
    torch.testing.assert_close(values[:3].sum(-1), torch.ones(3, values.shape[1]), atol=1e-2, rtol=0)
    assert float(values[3].abs().max()) == pytest.approx(1.0, abs=1e-3)
    assert view.task in {"ioi", "gendered_pronoun"} and len(view.tokens) == values.shape[1]
    pairs, graph, paths = sections
    assert len(pairs.pictures) == 3 and len(pairs.tables[0].rows) == 8
    removed = [row[2] for row in pairs.tables[0].rows]
    assert removed == sorted(removed, reverse=True) and removed[0] > 0
    assert "· attn_qkv" in graph.pictures[0].svg and "Strongest edges: " in graph.pictures[0].description
    # The same graph to look into: of its own data, with heads and true replays.
    assert graph.graph is not None and len(graph.graph.graph["edges"]) <= 60 and len(graph.graph.page()) < 400_000
    assert graph.graph.attention and graph.graph.replays and pairs.graph is None and paths.graph is None
    assert "gendered pronoun" in paths.title and "blocks.2.mlp_out/" in paths.pictures[0].description
    # As run.json keeps them.
    kept = json.loads(json.dumps([section.as_dict() for section in sections]))
    assert [ReportSection.from_dict(one) for one in kept] == list(sections)
    assert AttentionView.from_dict(json.loads(json.dumps(asdict(view)))) == view
    assert all(torch.equal(default_model.state_dict()[name], t) for name, t in before.items())


def test_a_task_that_is_not_there(default_model, factors, tasks):
    with pytest.raises(ValueError, match="there is no task 'docstring'; there are ioi, gendered_pronoun"):
        look_inside(default_model, factors, tasks, graph_task="docstring")
