"""Questions of a first session: each is answered in at most three lines, and the answer is a number that can be checked.

What reads a token: units/test_directions.py; what feeds a unit: bridge/test_graph.py; what units add: units/test_residual.py.
"""

from types import SimpleNamespace

import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.audit import logit_effect
from swd_lens.units.keys import read_unit

PROMPT = "The list is"
SITE = "blocks.2.mlp_out"


@pytest.fixture(scope="module")
def session(default_model):
    """The model, factors of six of its sites, text, a task and its scores."""
    model, text = default_model, swd.text_tokens(2_048, split="train")
    surface = [SITE, "blocks.3.mlp_out", "blocks.3.attn_o"]
    factors = swd.factorize(model, surface, sparsity=0.75, tokens=text, preset="quick", outer_iterations=4, progress=False)
    task = swd.load_task("gendered_pronoun", model, n_train=16, n_test=8)
    scores = swd.attribute(model, factors, task.train)
    return SimpleNamespace(model=model, text=text, factors=factors, task=task, scores=scores)


def cached(model, factors, prompt, hooks=()):
    """Logits and cache of a run with the factors attached."""
    with swd.attach(model, factors), model.hooks(fwd_hooks=list(hooks)), torch.no_grad():
        return model.run_with_cache(prompt)


def test_which_units_write_he_minus_she(session):
    table = session.factors.writers((" he", " she"), session.model)
    best = table.iloc[0]
    assert abs(best["cosine"]) == table["cosine"].abs().max() > 0.2 and best["rank"] == 1
    # What the unit does to the logit of he less that of she, as an audit says it.
    text = swd.text_tokens(512)
    effect = logit_effect(session.model, session.factors, read_unit(best), text, n=session.model.cfg.d_vocab)
    logits, (_, cache) = dict(effect.promoted), session.model.run_with_cache(text)
    inverse = float((1 / cache["ln_final.hook_scale"]).mean())
    assert logits[" he"] - logits[" she"] == pytest.approx(best["dot product"] * inverse, abs=1e-4)


def test_which_tokens_activate_a_unit(session):
    audit = swd.audit(session.model, session.factors[SITE], session.text, progress=False)
    context = audit.unit(8).contexts[0]
    _, cache = cached(session.model, session.factors[SITE], session.text)
    assert abs(context.z[context.peak]) == pytest.approx(float(cache["mlp_out_unit", 2][..., 8].abs().max()), rel=1e-4)


def test_steering_by_three_write_vectors(session):
    unit = session.factors.writers((" he", " she"), session.model).iloc[0]["unit"]
    hooks = swd.unit_hooks({unit: ("add", 3.0)}, session.factors)
    (_, plain), (_, steered) = (cached(session.model, session.factors, PROMPT, h) for h in ((), hooks))
    site, index = unit.rsplit("/", 1)
    out = ("attn_out" if site.endswith("attn_o") else "mlp_out", int(site.split(".")[1]))
    write = session.factors[site].write[int(index)]
    torch.testing.assert_close(steered[out] - plain[out], (3 * write).expand_as(plain[out]), atol=1e-4, rtol=1e-4)


def test_which_head_a_unit_reads(session):
    top = session.scores.top(session.scores.n_units)
    best = top[top["head"] != ""].iloc[0]
    site, index = read_unit(best)
    share = session.factors[site].read[:, index].square().view(session.model.cfg.n_heads, -1).sum(1)
    assert best["head"] == f"L3H{int(share.argmax())}"
    assert best["head share"] == pytest.approx(float(share.max() / share.sum()), abs=1e-5)
    graph = swd.unit_graph(session.model, session.factors, [best["unit"]], prompt=PROMPT, attention="frozen")
    assert set(graph.nodes["head"][graph.nodes["kind"] == "unit"]) == {best["head"]}


def test_the_share_of_head_3_1_s_score_that_two_units_have(session):
    parts = swd.score_parts(session.model, swd.baselines.svd(session.model, "blocks.3.attn_qkv"), 3, 1, PROMPT)
    pair = parts.strongest(-1, 0).iloc[0]
    share = parts.contribution(pair["q unit"], pair["k unit"])[-1, 0]
    assert float(share) == pytest.approx(pair["contribution"], abs=1e-5)
    shown = session.model.run_with_cache(PROMPT)[1]["attn_scores", 3][0, 1, -1, 0]
    assert float(parts.total[-1, 0]) == pytest.approx(float(shown), abs=1e-3)  # SVD is exact: the dense host's score


def test_what_one_prompt_owes_to_each_unit(session):
    scores = swd.attribute(
        session.model, session.factors, swd.Task.of_prompt(session.model, PROMPT, " he", " she"), sign="signed"
    )
    last, ids = scores.scores["blocks.3.mlp_out"], session.model.to_tokens([" he", " she"], prepend_bos=False)[:, 0]
    # Of the last site's units, z times the slope of the margin: what scaling all of them by 1 + e changes, over e.
    e = 1e-3
    scaled = lambda z, hook: z * (1 + e)  # noqa: E731
    (plain, _), (more, _) = (
        cached(session.model, session.factors, PROMPT, h) for h in ((), [("blocks.3.hook_mlp_out_unit", scaled)])
    )
    # Hooks act at all positions, of which the last site's others reach no logit of the last one.
    margins = [float((logits[0, -1, ids[0]] - logits[0, -1, ids[1]]).double()) for logits in (plain, more)]
    assert float(last.sum()) == pytest.approx((margins[1] - margins[0]) / e, rel=0.02, abs=0.02)
