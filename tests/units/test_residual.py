"""Units on the residual stream: results stacked as TransformerLens stacks heads. On bridges: bridge/test_flat_rows.py."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from tests import families
from tests.micro import W, identity_factors, micro_model, random_tokens, toy_model

WRITING = ["blocks.0.attn_o", "blocks.0.mlp_out", "blocks.1.mlp_out"]


@pytest.fixture(scope="module")
def toy():
    """A toy host, factors of its writing sites, and a cache of a run with them attached."""
    model = toy_model()
    factors = baselines.random_b(model, WRITING)
    with swd.attach(model, factors):
        _, cache = model.run_with_cache(random_tokens(2, 6))
    return model, factors, cache


def outputs_without_bias(model, cache) -> torch.Tensor:
    """(site, batch, pos, d_model) of WRITING, off hooks that swd_lens has no part in."""
    written = [cache["attn_out", 0] - model.blocks[0].attn.b_O]
    return torch.stack([*written, *(cache["mlp_out", layer] - model.blocks[layer].mlp.b_out for layer in (0, 1))])


def test_results_of_a_site_sum_to_its_output_without_the_bias(toy):
    model, factors, cache = toy
    results, labels = swd.stack_unit_results(cache, factors, return_labels=True)
    assert results.shape == (factors.n_units, 2, 6, 16) and len(labels) == factors.n_units
    assert labels[0] == "blocks.0.attn_o/0" and labels[-1] == f"blocks.1.mlp_out/{factors[WRITING[2]].n_units - 1}"
    of_site = torch.stack([results[[label.startswith(f"{site}/") for label in labels]].sum(0) for site in WRITING])
    torch.testing.assert_close(of_site, outputs_without_bias(model, cache), atol=1e-5, rtol=1e-5)


def test_results_by_hand():
    # For token 2, z = mlp_in's output (4, 6), and B = [[1, 2], [3, 4]].
    model = micro_model()
    with swd.attach(model, identity_factors()):
        _, cache = model.run_with_cache(torch.tensor([[0, 2]]))
    results = swd.stack_unit_results(cache, identity_factors())
    assert results[:, 0, -1].tolist() == [[4.0, 8.0], [18.0, 24.0]] and W.tolist() == [[1, 2], [3, 4]]


def test_results_take_what_stack_head_results_takes(toy):
    _, factors, cache = toy
    whole, labels = swd.stack_unit_results(cache, factors, return_labels=True)
    first = swd.stack_unit_results(cache, factors, layer=1, incl_remainder=True)
    n_first = sum(factors[site].n_units for site in WRITING[:2])
    torch.testing.assert_close(first[:-1], whole[:n_first])
    torch.testing.assert_close(first.sum(0), cache["resid_post", 0], atol=1e-4, rtol=1e-5)
    last = swd.stack_unit_results(cache, factors, pos_slice=-1, units=[(WRITING[1], 3), "blocks.0.mlp.W_out/1"])
    torch.testing.assert_close(last, whole[[labels.index(f"{WRITING[1]}/{i}") for i in (3, 1)], :, -1])
    scaled = swd.stack_unit_results(cache, factors, apply_ln=True)
    torch.testing.assert_close(scaled, cache.apply_ln_to_stack(whole, -1))
    assert swd.stack_unit_results(cache, factors, layer=0).shape == (0, 2, 6, 16)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", ["Gemma2", "Gemma3", "Olmo2"])
def test_results_behind_a_norm_went_through_it(name):
    """Summed over a site they are what it added to the stream: these hosts have no biases behind their matrices."""
    model = families.loaded(name)
    factors = baselines.svd(model, ["attn_o", "mlp_out"])
    with swd.attach(model, factors):
        _, cache = model.run_with_cache(families.some_tokens(2, 5))
    added = swd.stack_unit_results(cache, factors).sum(0)
    entered = cache["blocks.0.hook_resid_pre"] if "blocks.0.hook_resid_pre" in cache else cache["hook_embed"]
    torch.testing.assert_close(entered + added, cache["blocks.1.hook_resid_post"], atol=1e-4, rtol=1e-4)
    at_last = swd.stack_unit_results(cache, factors, pos_slice=-1)
    torch.testing.assert_close(at_last, swd.stack_unit_results(cache, factors)[:, :, -1])


def test_transported_offsets_are_no_unit_s():
    source, target = toy_model(), toy_model()
    source.process_weights_(fold_ln=False, center_writing_weights=False, center_unembed=False)
    target.process_weights_(fold_ln=True, center_writing_weights=True, center_unembed=True)
    moved = baselines.svd(source, "blocks.1.mlp_out").transport(target)
    with swd.attach(target, moved):
        _, cache = target.run_with_cache(random_tokens(1, 4))
    f = moved["blocks.1.mlp_out"]
    constant = target.blocks[1].mlp.b_out + (0 if f.offsets is None else f.offsets.out)
    summed = swd.stack_unit_results(cache, moved).sum(0)
    torch.testing.assert_close(summed, cache["mlp_out", 1] - constant, atol=1e-5, rtol=1e-5)
