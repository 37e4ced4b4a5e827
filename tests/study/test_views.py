"""Attention views: true patterns, the heads that a replacement really changed, and no more values than a page can hold."""

import json
from dataclasses import asdict, replace

import pytest
import torch

import swd_lens as swd
from swd_lens.study import views as module
from swd_lens.study.section import AttentionView
from swd_lens.study.views import DENSE, REPLACED, attention_views


@pytest.fixture(scope="module")
def task(default_model):
    return swd.load_task("ioi", default_model, n_train=4, n_test=4)


@pytest.fixture(scope="module")
def surfaces(default_model):
    sites = {"first": "blocks.0.attn_o", "last": "blocks.3.mlp_out"}
    return {
        name: ("SWD", swd.factorize(default_model, site, sparsity=0.9, outer_iterations=4, progress=False))
        for name, site in sites.items()
    }


@pytest.fixture(scope="module")
def views(default_model, task, surfaces):
    return attention_views(default_model, [task], surfaces)


def _patterns(model, tokens):
    _, cache = model.run_with_cache(tokens[None])
    return {f"L{layer}H{h}": cache["pattern", layer][0, h] for layer in range(4) for h in range(4)}


def test_the_dense_view_is_the_model(default_model, task, views):
    dense, tokens = views[0], task.test.tokens[0]
    assert (dense.kind, dense.task, dense.signed) == (DENSE, "ioi", False)
    wanted = _patterns(default_model, tokens)
    assert dense.names == tuple(wanted) and len(dense.tokens) == len(tokens)
    assert "".join(dense.tokens).endswith(task.test.examples[0].prompt[-12:])
    assert float((dense.tensor() - torch.stack(list(wanted.values()))).abs().max()) <= 0.5e-4 + 1e-7


def test_a_replaced_surface_shows_what_it_changed(default_model, task, surfaces, views):
    # Nothing attends behind the last MLP: it has no view.
    assert [view.title for view in views] == ["the dense model", "first, SWD"]
    view, tokens = views[1], task.test.tokens[0]
    assert view.kind == REPLACED
    dense = _patterns(default_model, tokens)
    with swd.attach(default_model, surfaces["first"][1]):
        found = _patterns(default_model, tokens)
    (measured,) = view.measures.values()
    for head, kl in measured.items():
        p, q = dense[head].double(), found[head].double()
        terms = torch.where(p > 0, p * (p.log() - q.log()), 0.0)
        assert kl == pytest.approx(float(terms.sum(-1).mean()), rel=2e-3, abs=1e-6)
    assert list(measured.values()) == sorted(measured.values(), reverse=True) and set(measured) == set(dense)
    assert all(measured[f"L0H{h}"] < 1e-6 for h in range(4))  # layer 0 attends before anything is replaced
    most = list(measured)[:3]
    assert view.names == tuple(name for head in most for name in (head, f"{head}*"))
    assert torch.allclose(view.tensor()[1], found[most[0]], atol=1e-4)


def test_large_models_and_long_prompts_show_few_heads_and_positions(default_model, task, surfaces, monkeypatch):
    monkeypatch.setattr(module, "_MOST_HEADS", 5)
    monkeypatch.setattr(module, "_LONGEST", 7)
    tokens = task.test.tokens[0][None]
    before = default_model(tokens)
    dense, changed = attention_views(default_model, [task], surfaces)
    assert len(dense.names) == 8 and "8 of 16 heads, those that the replacements changed most" in dense.caption
    assert len(dense.tokens) == len(dense.values[0]) == len(dense.values[0][0]) == 7
    assert "its last 7 positions" in dense.caption and len(next(iter(changed.measures.values()))) == 5
    monkeypatch.setattr(module, "_MOST_VALUES", 3 * 49)
    dense, changed = attention_views(default_model, [task], surfaces)
    assert len(dense.names) == 3 and len(changed.names) == 2
    assert torch.equal(default_model(tokens), before)


def test_a_host_that_shows_no_patterns_has_no_views(default_model, task, monkeypatch):
    hooks = {name: hook for name, hook in default_model.hook_dict.items() if "blocks.2.attn.hook_pattern" not in name}
    monkeypatch.setattr(type(default_model), "hook_dict", property(lambda model: hooks), raising=False)
    monkeypatch.delitem(default_model.__dict__, "hook_dict", raising=False)
    assert attention_views(default_model, [task], {}) == []


def test_views_go_through_json_and_refuse_what_does_not_fit():
    values = torch.tensor([[[1.0, 0.0], [-0.12345, 0.5]]])
    view = AttentionView.of(values, ["a", "b"], ["h"], kind="pair", title="t", task="", signed=True)
    assert view.values == (((1.0, 0.0), (-0.1235, 0.5)),) or view.values == (((1.0, 0.0), (-0.1234, 0.5)),)
    assert AttentionView.from_dict(json.loads(json.dumps(asdict(view)))) == view
    others = {"kind": "k", "title": "t", "task": ""}
    with pytest.raises(ValueError, match="1 names and 3 tokens"):
        AttentionView.of(values, ["a", "b", "c"], ["h"], **others)
    with pytest.raises(ValueError, match="finite"):
        AttentionView.of(values.log(), ["a", "b"], ["h"], **others)
    assert replace(view, caption="c") != view
