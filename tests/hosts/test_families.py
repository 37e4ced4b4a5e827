"""Every architecture on every kind of host: units take the place of the matrices, TransformerLens' tools work on them.

Runs on transformer_lens 3.9 (HookedTransformer and bridge) and on 4.x (bridge only).
"""

import copy
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec

import pytest
import torch
from transformer_lens import patching

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import find_sites, host_of
from tests import families
from tests.contract import identity

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick

HAS_HOOKED = find_spec("transformer_lens.HookedTransformer") is not None
HOSTS = [("bridge", family) for family in families.FAMILIES]
HOSTS += [("hooked", family) for family in families.HOOKED if HAS_HOOKED]
CAUSAL = [(kind, family) for kind, family in HOSTS if family in families.CAUSAL]
TOKENS = families.some_tokens(2, 9)

every_host = pytest.mark.parametrize(("kind", "family"), HOSTS)
every_causal_host = pytest.mark.parametrize(("kind", "family"), CAUSAL)


@cache
def shared(kind, family):
    """A host for tests that leave it as they found it."""
    return getattr(families, kind)(family)


@cache
def svd_of(kind, family, sites="all"):
    return baselines.svd(shared(kind, family), sites)


@cache
def quick_factors(kind, family):
    return swd.factorize(shared(kind, family), "all", sparsity=0.4, outer_iterations=2, refine_rounds=0, progress=False)


def logits_of(model, tokens=TOKENS):
    with torch.no_grad():
        return host_of(model).run(tokens)


def relative(a, b):
    """Largest difference, relative to the scale of b."""
    return float((a - b).abs().max() / b.abs().max())


def apart_or_packed(model):
    """The alternative way to see the attention's input matrices, where the host has one."""
    return sorted({site.kind for site in host_of(model).alternatives()} - {"mlp"})


@pytest.mark.quick_cases(5)
@every_host
def test_a_folder_computes_what_transformers_computes(kind, family):
    model = shared(kind, family)
    with torch.no_grad():
        assert relative(model(TOKENS), families.reference(family)(TOKENS).logits) < 1e-5
    assert type(model).__name__ == ("HookedTransformer" if kind == "hooked" else "TransformerBridge")
    assert not model.training and model.cfg.model_name == families.checkpoint(family).name  # and not where the folder lies


# ---------------------------------------------------------------------------------------------- exact factors


@pytest.mark.quick_cases(4)
@every_host
def test_exact_factors_packed_where_apart_and_apart_where_packed(kind, family):
    model = shared(kind, family)
    for pattern in filter(None, [apart_or_packed(model)]):
        dense, hooks = logits_of(model), list(model.hook_dict.items())
        with swd.attach(model, identity(model, pattern)) as attachment:
            assert {site.kind for site in attachment.sites} == set(pattern)
            assert relative(logits_of(model), dense) < 1e-5
        assert list(model.hook_dict.items()) == hooks
    assert apart_or_packed(model) or family == "qwen3_5"


@pytest.mark.skipif(not HAS_HOOKED, reason="transformer_lens 4 has no HookedTransformer to compare with")
@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("family", families.HOOKED)
def test_both_kinds_of_host_agree(family):
    hooked, bridge = shared("hooked", family), shared("bridge", family)
    assert [str(site) for site in find_sites(hooked)] == [str(site) for site in find_sites(bridge)]
    factors = swd.factorize(hooked, "all", sparsity=0.4, outer_iterations=2, refine_rounds=0, tokens=TOKENS, progress=False)
    assert all(torch.equal(host_of(bridge).weight(site), host_of(hooked).weight(site)) for site in find_sites(bridge))
    seen = []
    for model in (hooked, bridge):  # the same set: the fingerprints agree, too, or attaching would refuse
        with torch.no_grad(), swd.attach(model, factors):
            seen.append(model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("_unit")))
    (logits, cache_a), (other, cache_b) = seen
    assert relative(other, logits) < 1e-5
    assert set(cache_a) == set(cache_b) == {site.hook_name for site in find_sites(hooked)}
    assert max(relative(cache_b[name], cache_a[name]) for name in cache_a) < 1e-5


# ---------------------------------------------------------------------------------------------- gradients


def margin(logits):
    return logits[0, -1, 17] - logits[0, -1, 29]


@contextmanager
def in_double():
    """Hugging Face computes norms and softmax in float32 in a model of any dtype: make those upcasts double, too.

    Without it the function is one of float32 steps, and no finite difference of it is good to 1e-6.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "float32", torch.float64)
        patch.setattr(torch, "float", torch.float64)
        patch.setattr(torch.Tensor, "float", torch.Tensor.double)
        yield


@pytest.mark.quick_cases(3)
@every_host
def test_gradient_of_a_margin_by_z_is_the_finite_difference_in_float64(kind, family):
    model = getattr(families, kind)(family).to(torch.float64)
    for parameter in model.parameters():
        parameter.requires_grad_(False)  # gradients by z need none of them
    tokens = TOKENS[:1]
    z_of, generator, step = {}, torch.Generator().manual_seed(0), 1e-6  # at 1e-5 the curvature shows

    def keep(z, hook):
        z_of[hook.name] = z

    with in_double(), swd.attach(model, identity(model, "all")) as attachment:
        names = [site.hook_name for site in attachment.sites]
        with model.hooks(fwd_hooks=[(name, keep) for name in names]):
            gradients = torch.autograd.grad(margin(host_of(model).run(tokens)), [z_of[name] for name in names])
        for name, gradient in zip(names, gradients, strict=True):
            direction = torch.randn(gradient.shape, generator=generator, dtype=torch.float64)

            def at(size, name=name, direction=direction):
                with torch.no_grad(), model.hooks(fwd_hooks=[(name, lambda z, hook: z + size * direction)]):
                    return margin(host_of(model).run(tokens))

            slope = float((at(step) - at(-step)) / (2 * step))
            assert float((gradient * direction).sum()) == pytest.approx(slope, rel=1e-6, abs=1e-6), name


@pytest.mark.quick_cases(4)
@every_causal_host
def test_backward_hooks_fire_in_a_frozen_host(kind, family):
    model = copy.deepcopy(shared(kind, family))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    site = find_sites(model, "mlp_out")[0]
    seen = []
    bwd_hooks = [(site.hook_name, lambda g, hook: seen.append(g))]
    with swd.attach(model, identity(model, "all")), model.hooks(bwd_hooks=bwd_hooks):
        margin(host_of(model).run(TOKENS)).backward()
    assert len(seen) == 1 and float(torch.as_tensor(seen[0][0]).abs().max()) > 0


# ---------------------------------------------------------------------------------------------- TransformerLens' tools


@pytest.mark.quick_cases(4)
@every_host
def test_cache_names_filter_and_pos_slice(kind, family):
    model = shared(kind, family)
    with torch.no_grad(), swd.attach(model, svd_of(kind, family)) as attachment:
        _, whole = model.run_with_cache(TOKENS)
        _, last = model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("_unit"), pos_slice=-1)
        units = {site.name: attachment.factors[site.name].n_units for site in attachment.sites}
    assert set(last) == {site.hook_name for site in attachment.sites}
    for site in attachment.sites:
        z = whole[f"{site.kind}_unit", site.layer]
        assert z.shape == (2, 9, units[site.name])
        assert torch.equal(last[site.hook_name].reshape(2, -1), z[:, -1])


@pytest.mark.quick_cases(2)
@every_host
def test_generic_activation_patch_finds_the_units(kind, family):
    model = shared(kind, family)
    clean, corrupted = TOKENS[:1], families.some_tokens(1, 9, seed=5)
    with torch.no_grad(), swd.attach(model, svd_of(kind, family, "mlp_out")):
        clean_logits, clean_cache = model.run_with_cache(clean)
        results = patching.generic_activation_patch(
            model,
            corrupted,
            clean_cache,
            patching_metric=margin,
            patch_setter=patching.layer_pos_patch_setter,
            activation_name="mlp_out_unit",
            index_axis_names=("layer", "pos"),
        )
        # Done by hand, in the last layer: there a causal model's last position alone decides.
        last = model.cfg.n_layers - 1
        patched = model.run_with_hooks(
            corrupted, fwd_hooks=[(f"blocks.{last}.hook_mlp_out_unit", lambda z, hook: _with_last(z, clean_cache[hook.name]))]
        )
        assert results.shape == (model.cfg.n_layers, 9)
        assert float(results[last, -1]) == pytest.approx(float(margin(patched)), abs=1e-5)
    assert float(margin(clean_logits)) != pytest.approx(float(margin(logits_of(model, corrupted))), abs=1e-4)


def _with_last(z, clean):
    z = z.clone()
    z[:, -1] = clean[:, -1]
    return z


@pytest.mark.quick_cases(4)
@every_causal_host
def test_generate_gives_the_same_tokens_with_and_without_the_cache(kind, family):
    model = shared(kind, family)
    prompt = "The list is"
    how = {"max_new_tokens": 6, "do_sample": False, "verbose": False, "stop_at_eos": False, "prepend_bos": True}
    dense = model.generate(prompt, use_past_kv_cache=True, **how)
    with torch.no_grad(), swd.attach(model, svd_of(kind, family)):
        assert model.generate(prompt, use_past_kv_cache=True, **how) == dense
        assert model.generate(prompt, use_past_kv_cache=False, **how) == dense


@pytest.mark.quick_cases(4)
@every_causal_host
def test_stop_at_layer_runs_the_units_below_it_without_a_warning(kind, family, recwarn):
    model = shared(kind, family)
    seen = []
    with torch.no_grad(), swd.attach(model, svd_of(kind, family, "mlp_out")) as attachment:
        recwarn.clear()
        hooks = [(site.hook_name, lambda z, hook: seen.append(hook.name)) for site in attachment.sites]
        with model.hooks(fwd_hooks=hooks):
            model(TOKENS, stop_at_layer=1)
    assert seen == ["blocks.0.hook_mlp_out_unit"]
    assert not [w for w in recwarn if issubclass(w.category, swd.SiteDidNotRunWarning)]


# ---------------------------------------------------------------------------------------------- the host around the units


@pytest.mark.quick_cases(3)
@every_host
def test_dtype_copies_and_modes_follow_the_host(kind, family):
    model = getattr(families, kind)(family)
    dense = logits_of(model)
    attachment = swd.attach(model, identity(model, "all"))
    twin = copy.deepcopy(model)
    assert relative(logits_of(twin), dense) < 1e-5
    with torch.no_grad():
        twin.blocks[0].hook_mlp_out_unit.add_hook(lambda z, hook: torch.zeros_like(z))
    assert relative(logits_of(twin), dense) > 1e-3
    assert relative(logits_of(model), dense) < 1e-5  # the copy's hook is the copy's
    model.train()
    assert model.blocks[0].hook_mlp_out_unit.training
    model.eval()
    assert not any(module.training for module in model.blocks[0].modules())
    model.to(torch.float64)
    assert logits_of(model).dtype == torch.float64
    model.to(torch.float32)
    assert relative(logits_of(model), dense) < 1e-5
    attachment.detach()
    assert relative(logits_of(model), dense) < 1e-6


@pytest.mark.quick_cases(4)
@every_host
def test_a_printed_host_shows_its_units_one_line_per_site(kind, family):
    model = shared(kind, family)
    factors = svd_of(kind, family, "blocks.0.*")
    with swd.attach(model, factors):
        lines = [line for line in repr(model).splitlines() if " units, " in line]
    for site, f in factors.items():
        (line,) = [line for line in lines if f"{site} (" in line]
        assert f"({f.d_in}, {f.d_out}): {f.n_units} units, {f.edges:,} edges, s=" in line
    assert " units, " not in repr(model)


# BERT counts positions from the left, whatever is padding: it is padded on the right.
PADDED = [(kind, family, side) for kind, family in HOSTS for side in ("left", "right") if (family, side) != ("bert", "left")]


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("kind", "family", "side"), PADDED)
def test_a_padded_batch_gives_row_by_row_what_single_prompts_give(kind, family, side):
    model = shared(kind, family)
    prompts = [families.some_tokens(1, length, seed=length)[0] for length in (9, 5, 7)]
    batch, mask = torch.zeros(3, 9, dtype=torch.int64), torch.zeros(3, 9, dtype=torch.int64)
    real = [slice(9 - len(p), 9) if side == "left" else slice(0, len(p)) for p in prompts]
    for row, (prompt, where) in enumerate(zip(prompts, real, strict=True)):
        batch[row, where], mask[row, where] = prompt, 1
    with torch.no_grad(), swd.attach(model, quick_factors(kind, family)) as attachment:
        names = {site.hook_name for site in attachment.sites}
        logits, cached = model.run_with_cache(batch, attention_mask=mask, padding_side=side, names_filter=names.__contains__)
        for row, (prompt, where) in enumerate(zip(prompts, real, strict=True)):
            alone, z_alone = model.run_with_cache(
                prompt[None], attention_mask=torch.ones_like(prompt[None]), names_filter=names.__contains__
            )
            assert relative(logits[row, where], alone[0]) < 1e-5
            assert max(relative(cached[name][row, where], z_alone[name][0]) for name in names) < 1e-5


# ---------------------------------------------------------------------------------------------- back again


@pytest.mark.quick_cases(6)
@every_host
def test_exact_factors_give_the_dense_logits_and_the_host_is_restored_bit_for_bit_also_after_an_exception(kind, family):
    model = shared(kind, family)
    dense, hooks, classes = logits_of(model), list(model.hook_dict.items()), [type(m) for m in model.modules()]
    state = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(ZeroDivisionError), swd.attach(model, svd_of(kind, family)) as attachment:
        assert relative(logits_of(model), dense) < 1e-5 and len(attachment.sites) == len(host_of(model).sites())
        assert list(model.state_dict()) == list(state)
        raise ZeroDivisionError
    assert torch.equal(logits_of(model), dense)
    assert list(model.hook_dict.items()) == hooks and [type(m) for m in model.modules()] == classes
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


@pytest.mark.quick_cases(4)
@every_host
def test_a_site_that_does_not_run_is_reported(kind, family):
    model = shared(kind, family)
    site = find_sites(model, "mlp_out")[0]
    with torch.no_grad(), swd.attach(model, identity(model, site.name)):
        mlp = model.blocks[site.layer].mlp
        module = mlp.out if kind == "bridge" else mlp  # something goes round the matrix
        module.__dict__["forward"] = lambda x, *args, **kwargs: x[..., : site.d_out]
        with pytest.warns(swd.SiteDidNotRunWarning, match=rf"{site.name}: attached, but did not run"):
            logits_of(model)
        del module.__dict__["forward"]
