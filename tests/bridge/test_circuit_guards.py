"""What circuits refuse or take care of, on bridges: norms behind the MLP, dropout, other hosts' prompts, metrics, hooks."""

import warnings

import numpy as np
import pytest
import torch

import swd_lens as swd
from swd_lens.circuits.fast_forward import find_fast_forward
from swd_lens.hosts import host_of
from tests import families

pytestmark = pytest.mark.filterwarnings("ignore:the mean margin of")  # of a model with random weights

SITE_0 = "blocks.0.mlp_out"


def small_split(d_vocab=families.D_VOCAB, **more):
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, 300, (n,), generator=generator) for n in (5, 5, 7, 7)]
    examples = tuple(swd.TaskExample(f"prompt {i}", ("right",), ("wrong",)) for i in range(4))
    ids = [((i,), (i + 1,)) for i in range(4)]
    answers, distractors = zip(*ids, strict=True)
    return swd.tasks.TaskSplit("train", examples, tuple(prompts), answers, distractors, d_vocab, **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_norm_behind_the_mlp_closes_the_road_of_known_z(dtype):
    """Gemma 2 normalizes what its MLP writes, so the residual stream does not move by (z' - z) @ write."""
    model = families.bridge("gemma2").to(dtype)
    factors, split = swd.baselines.svd(model, SITE_0), small_split()
    with swd.attach(model, factors) as attachment, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)  # nor is that a fault of the host to be reported
        for positions in ("scoring", "all"):
            fast_forward = find_fast_forward(host_of(model), attachment.sites, attachment.factors, split, positions)
            assert fast_forward.known is None


@pytest.mark.parametrize("name", ["gemma2", "llama"])
def test_direct_logits_are_what_the_written_vector_does_to_the_final_norm(name):
    """z through the norm behind the site, its scale held, times the gradient at what enters the final norm, by hand."""
    model, site = families.bridge(name), "blocks.0.mlp_out"
    factors, split = swd.baselines.svd(model, site), small_split()
    scores = swd.attribute(model, factors, split, score="direct_logit", sign="signed")
    expected = torch.zeros(factors[site].n_units)
    for i, tokens in enumerate(split.tokens):
        with swd.attach(model, factors), torch.no_grad():
            _, cache = model.run_with_cache(tokens[None])
        results = swd.stack_unit_results(cache, factors, pos_slice=-1)[:, 0]
        x = cache["blocks.1.hook_resid_post"][0].detach().requires_grad_(True)
        logits = model.unembed(model.ln_final(x[None]))[0, -1]
        if (cap := getattr(model.cfg, "output_logits_soft_cap", None)) and cap > 0:
            logits = cap * (logits / cap).tanh()
        margin = logits[list(split.answer_ids[i])].mean() - logits[list(split.distractor_ids[i])].mean()
        expected += results @ torch.autograd.grad(margin, x)[0][-1] / len(split)
    torch.testing.assert_close(scores.scores[site].float(), expected, rtol=1e-3, atol=1e-6)


def test_direct_effects_in_the_last_layer_are_all_effects():
    """mlp_out of the last layer has no other way to the logits than the direct one."""
    model = families.bridge("llama")
    factors, split = swd.baselines.svd(model, "blocks.1.mlp_out"), small_split()
    direct, first = (
        swd.attribute(model, factors, split, score=score, sign="signed") for score in ("direct_logit", "first_order")
    )
    torch.testing.assert_close(direct.scores["blocks.1.mlp_out"], first.scores["blocks.1.mlp_out"], rtol=1e-4, atol=1e-6)


def test_prompts_of_another_host_and_of_another_beginning_are_refused():
    model = families.bridge("llama")
    factors = swd.baselines.svd(model, SITE_0)
    with pytest.raises(swd.TaskError, match=r"tokenized for a host with 999 tokens, this one has 1366"):
        swd.attribute(model, factors, small_split(d_vocab=999))
    scores = swd.attribute(model, factors, small_split(prepend_bos=True, source="here"))
    assert scores.settings["prepend_bos"] is True and scores.settings["task_source"] == "here"
    with pytest.raises(ValueError, match="the scores are of prompts with BOS, the train prompts of 'task' are without"):
        swd.evaluate(model, factors, small_split(prepend_bos=False), scores)


def test_metrics_may_write_into_their_logits_but_must_have_a_gradient():
    model = families.bridge("llama")
    factors = swd.baselines.svd(model, SITE_0)

    def writes(logits, examples):
        logits[:, 7:] = -1e9
        return logits[:, 5] - logits[:, 6]

    found = []
    for metric in (writes, lambda logits, examples: logits[:, 5] - logits[:, 6]):
        split = small_split(metric=metric)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", swd.UndefinedSufficiencyWarning)
            scores = swd.attribute(model, factors, split)
            found.append(swd.evaluate(model, factors, split, scores, grid=[5], kl=True, random_sets=0).rows)
    np.testing.assert_allclose(found[0]["KL keep"], found[1]["KL keep"], rtol=1e-6, atol=1e-9)

    def right(logits, examples):
        return (logits.argmax(-1) == 5).float()

    with pytest.raises(ValueError, match="score='ablation' needs no gradient"):
        swd.attribute(model, factors, small_split(metric=right))
    assert swd.attribute(model, factors, small_split(metric=right), score="ablation").settings["score"] == "ablation"


def test_a_users_hook_that_wants_all_positions_keeps_the_runs_whole():
    model = families.bridge("llama")
    factors, split = swd.baselines.svd(model, SITE_0), small_split()
    scores, how = swd.attribute(model, factors, split), {"grid": torch.tensor([1, 2, 5, 5]), "random_sets": 0}
    plain = swd.evaluate(model, factors, split, scores, **how).rows
    assert plain["units"].tolist() == [0, 1, 2, 5, scores.n_units]  # the empty circuit always
    with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
        swd.evaluate(model, factors, split, scores, batch_size=0)

    def wants_position_3(x, hook):
        assert x[:, 3].shape[0]
        return x

    with model.hooks(fwd_hooks=[("blocks.1.hook_in", wants_position_3)]), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        hooked = swd.evaluate(model, factors, split, scores, **how).rows
    np.testing.assert_allclose(hooked.to_numpy(float), plain.to_numpy(float), rtol=1e-4, atol=1e-5)
