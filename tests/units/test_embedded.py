"""The issue's bars, on the embedded model with all sixteen sites attached at once."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import find_sites
from tests.contract import identity

PROMPT = "When Mary and John went to the store, John gave a drink to"


@pytest.mark.parametrize("source", [identity, baselines.svd], ids=["A=W, B=I", "SVD"])
def test_exact_factors_everywhere(default_model, source):
    model, tokens = default_model, swd.text_tokens(512, split="test")
    assert len(find_sites(model)) == 16
    hooks, state = list(model.hook_dict.items()), {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        dense = model(tokens)
        with swd.attach(model, source(model, "all")):
            replaced = model(tokens)
            units = [name for name in model.hook_dict if name.endswith("_unit")]
        after = model(tokens)
    assert len(units) == 16
    assert (replaced - dense).abs().max() <= 1e-5 * dense.abs().max()
    assert torch.equal(after, dense)
    assert list(model.hook_dict.items()) == hooks
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_generate_from_a_string_with_and_without_the_cache(default_model):
    factors = swd.factorize(default_model, "all", sparsity=0.5, outer_iterations=4, progress=False)
    how = {"max_new_tokens": 8, "do_sample": False, "verbose": False}
    with swd.attach(default_model, factors):
        cached = default_model.generate(PROMPT, use_past_kv_cache=True, **how)
        uncached = default_model.generate(PROMPT, use_past_kv_cache=False, **how)
    assert cached == uncached and len(cached) > len(PROMPT)


def test_a_batch_is_its_rows(default_model):
    """Task prompts of one length in a batch give what single prompts give (no padding is ever involved)."""
    task = swd.load_task("ioi", default_model, n_train=10, n_test=40)
    with torch.no_grad(), swd.attach(default_model, baselines.svd(default_model, "mlp_out")):
        for bucket in task.test.buckets():
            together = default_model(bucket.tokens)[:, -1]
            for row, tokens in zip(together, bucket.tokens, strict=True):
                torch.testing.assert_close(row, default_model(tokens[None])[0, -1], rtol=1e-4, atol=1e-4)
