"""TransformerLens' own tools on a bridge with units: caching, patching, gradients, generate."""

import pytest
import torch

from tests import families
from tests.bridge.conftest import TOKENS, close, fresh, sites_with, swap_dense


def test_caching_and_hook_contexts(host):
    model, site = host.model, next(site for site in host.sites() if site.name == "blocks.1.mlp_out")
    undo = swap_dense(host, [site])
    with torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
        assert "hook_mlp_out_unit" in model.blocks[1].get_hooks()
        z = cache["mlp_out_unit", 1]
        assert z.shape == (*TOKENS.shape, site.d_out)
        _, sliced = model.run_with_cache(TOKENS, names_filter=site.hook_name, pos_slice=-1)
        assert torch.equal(sliced[site.hook_name].flatten(), z[:, -1].flatten())
        zero = [(site.hook_name, lambda z, hook: torch.zeros_like(z))]
        ablated = model.run_with_hooks(TOKENS, fwd_hooks=zero)
        assert not close(ablated, host.run(TOKENS))
        with model.hooks(fwd_hooks=zero):
            assert torch.equal(host.run(TOKENS), ablated)
    undo()


@pytest.mark.quick_cases(2)
def test_activation_patching_finds_units_by_their_short_name(causal):
    from transformer_lens import patching

    model, sites = causal.model, [site for site in causal.sites() if site.kind == "mlp_out"]
    undo = swap_dense(causal, sites)
    clean = TOKENS.clone()
    clean[:, 4] = 77  # the only difference
    with torch.no_grad():
        _, cache = model.run_with_cache(clean)

        def setter(z, index, clean_z):
            z[:, index[1]] = clean_z[:, index[1]]
            return z

        effects = patching.generic_activation_patch(
            model=model,
            corrupted_tokens=TOKENS,
            clean_cache=cache,
            patching_metric=lambda logits: (logits - causal.run(TOKENS)).abs().max(),
            patch_setter=setter,
            activation_name="mlp_out_unit",
            index_axis_names=("layer", "pos"),
        )
    undo()
    assert effects.shape == (model.cfg.n_layers, TOKENS.shape[1])
    assert effects[:, :4].max() == 0 and effects[0, 4] > 0


@pytest.mark.parametrize("name", families.CAUSAL)
@pytest.mark.parametrize("packed", [True, False])
def test_backward_hooks_see_the_gradients(name, packed):
    host = fresh(name)
    sites = sites_with(host, packed)
    undo = swap_dense(host, sites)
    names = [site.hook_name for site in sites]
    _, cache = host.model.run_with_cache(TOKENS, return_type="loss", incl_bwd=True)
    for name in names:
        assert cache[f"{name}_grad"].shape == cache[name].shape and cache[f"{name}_grad"].abs().sum() > 0
    undo()


@pytest.mark.quick_cases(5)
@pytest.mark.parametrize("packed", [True, False])
def test_generating_with_and_without_cache(causal, packed):
    model = causal.model
    undo = swap_dense(causal, sites_with(causal, packed))
    how = {"max_new_tokens": 5, "do_sample": False, "stop_at_eos": False, "verbose": False, "return_type": "tokens"}
    with torch.no_grad():
        cached = model.generate(TOKENS[:1], use_past_kv_cache=True, **how)
        whole = model.generate(TOKENS[:1], use_past_kv_cache=False, **how)
        undo()
        dense = model.generate(TOKENS[:1], use_past_kv_cache=True, **how)
    assert cached.shape == (1, TOKENS.shape[1] + 5)
    assert torch.equal(cached, whole) and torch.equal(cached, dense)


def test_an_input_that_differs_between_the_parts_of_a_packed_site_is_an_error():
    host = fresh("llama")
    site = next(site for site in host.alternatives() if site.layer == 0)
    undo = swap_dense(host, [site])
    hooks = [("blocks.0.attn.k.hook_in", lambda h, hook: h * 2)]
    with torch.no_grad():
        dense = host.run(TOKENS)
        with pytest.raises(RuntimeError, match=r"blocks\.0\.attn_qkv is attached.*but k got another input"):
            host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        same = [(f"blocks.0.attn.{part}.hook_in", lambda h, hook: h * 2) for part in "qkv"]
        assert not close(host.model.run_with_hooks(TOKENS, fwd_hooks=same), dense)
        assert torch.equal(host.run(TOKENS), dense)  # nothing is left of the forward that failed

        def stop(h, hook):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):  # after q was served
            host.model.run_with_hooks(TOKENS + 1, fwd_hooks=[("blocks.0.attn.k.hook_in", stop)])
        host.model.reset_hooks()
        assert torch.equal(host.run(TOKENS), dense)
    undo()
