"""TransformerLens' own tools work on units; tests/session/test_helpers.py has what each helper of a cache gives."""

import torch
from transformer_lens import patching

from swd_lens.hosts import find_sites
from swd_lens.units import attach
from swd_lens.units.cache import UnitCache
from tests.micro import random_tokens


def test_run_with_cache_and_names_filter(model, factors):
    tokens = random_tokens(2, 7)
    with attach(model, factors):
        _, cache = model.run_with_cache(tokens, names_filter=lambda name: name.endswith("_unit"))
    assert set(cache) == {site.hook_name for site in find_sites(model)}
    assert cache["mlp_out_unit", 1].shape == (2, 7, 16)
    assert cache["attn_qkv_unit", 0].shape == (2, 7, 16)


def test_pos_slice(model, factors):
    tokens = random_tokens(2, 7)
    with attach(model, factors):
        _, whole = model.run_with_cache(tokens)
        _, last = model.run_with_cache(tokens, pos_slice=-1)
    for site in find_sites(model):
        assert torch.equal(last[site.hook_name], whole[site.hook_name][:, -1:]) or torch.equal(
            last[site.hook_name], whole[site.hook_name][:, -1]
        )


def test_editing_z_moves_the_output_along_the_write_vector(model, factors):
    tokens, site = random_tokens(1, 5), "blocks.1.mlp_out"

    def push(z, hook):
        z = z.clone()
        z[:, -1, 3] += 2.0
        return z

    with attach(model, factors), torch.no_grad():
        _, plain = model.run_with_cache(tokens)
        with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out_unit", push)]):
            _, edited = model.run_with_cache(tokens)
    moved = (edited["mlp_out", 1] - plain["mlp_out", 1])[0]
    torch.testing.assert_close(moved[-1], 2.0 * factors[site].write[3], rtol=1e-4, atol=1e-5)
    assert moved[:-1].abs().max() == 0


def test_generic_activation_patch_finds_the_units(model, factors):
    clean, corrupted = random_tokens(1, 4), random_tokens(1, 4, seed=9)
    with attach(model, factors), torch.no_grad():
        _, clean_cache = model.run_with_cache(clean)
        results = patching.generic_activation_patch(
            model,
            corrupted,
            clean_cache,
            patching_metric=lambda logits: logits[0, -1, 3] - logits[0, -1, 4],
            patch_setter=patching.layer_pos_patch_setter,
            activation_name="mlp_out_unit",
            index_axis_names=("layer", "pos"),
        )
        # Patching all units of a position at a layer is patching mlp_out there: the same grid, by the usual name.
        expected = patching.get_act_patch_mlp_out(
            model, corrupted, clean_cache, lambda logits: logits[0, -1, 3] - logits[0, -1, 4]
        )
    assert results.shape == (2, 4)
    torch.testing.assert_close(results, expected, rtol=1e-4, atol=1e-5)


def test_gradient_of_the_margin_by_z(model, factors):
    tokens = random_tokens(1, 5)
    with attach(model, factors):
        stored = {}
        model.add_hook("blocks.0.hook_mlp_out_unit", lambda grad, hook: stored.update(grad=grad.clone()), dir="bwd")
        logits = model(tokens)
        (logits[0, -1, 3] - logits[0, -1, 4]).backward()
        model.reset_hooks()
    assert stored["grad"].shape == (1, 5, 16)
    assert stored["grad"].abs().max() > 0


def test_a_cache_knows_what_stood_in_its_run(model, factors):
    tokens = random_tokens(2, 6)
    with attach(model, factors["blocks.0.mlp_out"]), torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        with attach(model, factors["blocks.1.mlp_out"]) as inner, inner.dense():
            _, other = model.run_with_cache(tokens)
    _, plain = model.run_with_cache(tokens)
    assert isinstance(cache, UnitCache) and not isinstance(plain, UnitCache)
    assert set(cache.stood) == set(other.stood) == {"blocks.0.mlp_out"}  # not those that hand over to the dense product
    row = cache.apply_slice_to_batch_dim(0)
    assert isinstance(row, UnitCache) and row.stood is cache.stood
