"""BridgeHost on every family: which sites there are, that a swap changes nothing but the arithmetic, and that undoing it
leaves no trace."""

import copy
import warnings

import einops
import pytest
import torch
from torch import nn
from transformer_lens.model_bridge import TransformerBridge
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

from swd_lens.hosts import Affine, Host, Undo, UnsupportedHostError, host_of
from swd_lens.sites import Site
from tests import families
from tests.bridge.conftest import DenseUnits, sites_with, swap_dense, swap_in

APART = {"attn_q": (16, 16), "attn_k": (16, 8), "attn_v": (16, 8), "attn_o": (16, 16)}
WIDE = {"attn_q": (16, 32), "attn_k": (16, 16), "attn_v": (16, 16), "attn_o": (32, 16)}
FULL = dict.fromkeys(APART, (16, 16))
QKV = dict.fromkeys(("attn_q", "attn_k", "attn_v"), (16, 16))
WHOLE = {"mlp": (16, 16)}
PACKED = {"attn_qkv": (16, 48), "attn_o": (16, 16)}
GATED = {"mlp_gate": (16, 32), "mlp_in": (16, 32), "mlp_out": (32, 16)}
PLAIN = {"mlp_in": (16, 32), "mlp_out": (32, 16)}
LINEAR = {
    **{"attn_qkv": (16, 64), "attn_gate": (16, 32), "attn_beta": (16, 4), "attn_decay": (16, 4), "attn_o": (32, 16)},
    **GATED,
}
# family -> per layer: sites, then their alternatives
TABLE: dict[str, list[tuple[dict, dict]]] = {
    "gpt2": [({**PACKED, "mlp_in": (16, 64), "mlp_out": (64, 16)}, {**QKV, **WHOLE})] * 2,
    "pythia": [({**PACKED, **PLAIN}, {**QKV, **WHOLE})] * 2,
    "llama": [({**APART, **GATED}, {"attn_qkv": (16, 32), **WHOLE})] * 2,
    "qwen2": [({**APART, **GATED}, {"attn_qkv": (16, 32), **WHOLE})] * 2,
    "qwen3": [({**WIDE, **GATED}, {"attn_qkv": (16, 64), **WHOLE})] * 2,
    "gemma2": [({**WIDE, **GATED}, {"attn_qkv": (16, 64), **WHOLE})] * 2,
    # The last layer attends; its q_proj holds a gate beside the query and is twice as wide.
    "qwen3_5": [(LINEAR, WHOLE)] * 3 + [({**WIDE, "attn_q": (16, 64), **GATED}, {"attn_qkv": (16, 96), **WHOLE})],
    # The MLP is no module of its own.
    "bert": [({**FULL, **PLAIN}, {"attn_qkv": (16, 48)})] * 2,
}
LLAMA_NAMES = {
    **{f"attn_{x}": f"model.layers.{{}}.self_attn.{x}_proj" for x in "qkvo"},
    **{"mlp_gate": "model.layers.{}.mlp.gate_proj", "mlp_in": "model.layers.{}.mlp.up_proj"},
    "mlp_out": "model.layers.{}.mlp.down_proj",
}
HF_NAMES: dict[str, dict[str, str]] = {
    "gpt2": {
        **{"attn_qkv": "transformer.h.{}.attn.c_attn", "attn_o": "transformer.h.{}.attn.c_proj"},
        **{"mlp_in": "transformer.h.{}.mlp.c_fc", "mlp_out": "transformer.h.{}.mlp.c_proj"},
    },
    "pythia": {
        **{"attn_qkv": "gpt_neox.layers.{}.attention.query_key_value", "attn_o": "gpt_neox.layers.{}.attention.dense"},
        **{"mlp_in": "gpt_neox.layers.{}.mlp.dense_h_to_4h", "mlp_out": "gpt_neox.layers.{}.mlp.dense_4h_to_h"},
    },
    **dict.fromkeys(("llama", "qwen2", "qwen3", "gemma2"), LLAMA_NAMES),
    "qwen3_5": {
        **{"linear.attn_qkv": "model.layers.{}.linear_attn.in_proj_qkv"},
        **{"attn_gate": "model.layers.{}.linear_attn.in_proj_z", "attn_beta": "model.layers.{}.linear_attn.in_proj_b"},
        **{
            "attn_decay": "model.layers.{}.linear_attn.in_proj_a",
            "linear.attn_o": "model.layers.{}.linear_attn.out_proj",
        },
        **LLAMA_NAMES,
    },
    "bert": {
        **{f"attn_{x[0]}": f"bert.encoder.layer.{{}}.attention.self.{x}" for x in ("query", "key", "value")},
        **{"attn_o": "bert.encoder.layer.{}.attention.output.dense"},
        **{"mlp_in": "bert.encoder.layer.{}.intermediate.dense", "mlp_out": "bert.encoder.layer.{}.output.dense"},
    },
}

TOKENS = families.some_tokens(rows=3, pos=11)


def fresh(name: str) -> Host:
    return host_of(families.bridge(name))


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal within rounding, relative to the scale of the numbers."""
    return bool((left - right).abs().max() <= 1e-5 * right.abs().max())


def snapshot(model: TransformerBridge) -> dict:
    """Everything that an undo must restore."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "hooks": [(name, id(hook), hook.name) for name, hook in model.hook_dict.items()],
        "registry": [(name, id(hook)) for name, hook in model._hook_registry.items()],
        "blocks": [list(block._hook_registry) for block in model.blocks],
        "modules": [(name, id(module), type(module), sorted(vars(module))) for name, module in modules.items()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "methods": sorted(vars(model)),
    }


# ---------------------------------------------------------------------------------------------- what there is


@pytest.mark.parametrize("name", families.FAMILIES)
def test_the_sites_of_every_family(name: str):
    host = fresh(name)
    for got, which in ((host.sites(), 0), (host.alternatives(), 1)):
        expected = [(i, kind, *shape) for i, layer in enumerate(TABLE[name]) for kind, shape in layer[which].items()]
        assert [(s.layer, s.kind, s.d_in, s.d_out) for s in got] == expected


def _reference_weight(name: str, model: nn.Module, site: Site, linear: bool) -> torch.Tensor:
    names = HF_NAMES[name]
    module = model.get_submodule(names[("linear." if linear else "") + site.kind].format(site.layer))
    weight = module.weight if name == "gpt2" else module.weight.T
    if name == "pythia" and site.kind == "attn_qkv":
        # NeoX keeps each head's q, k and v together.
        return einops.rearrange(weight, "d_in (head three d_head) -> d_in (three head d_head)", head=2, three=3)
    return weight


@pytest.mark.parametrize("name", families.FAMILIES)
def test_weights_are_those_of_the_checkpoint(name: str):
    host, model = fresh(name), families.reference(name)
    for site in host.sites():
        linear = name == "qwen3_5" and site.layer < 3 and site.kind in ("attn_qkv", "attn_o")
        assert torch.equal(host.weight(site), _reference_weight(name, model, site, linear)), site


def test_a_packed_weight_is_its_parts_side_by_side(host):
    by_name = {site.name: site for site in host.sites() + host.alternatives()}
    packed = [s for s in by_name.values() if s.kind == "attn_qkv" and f"blocks.{s.layer}.attn_q" in by_name]
    assert packed
    for site in packed:
        parts = [by_name[f"blocks.{site.layer}.attn_{part}"] for part in "qkv"]
        assert torch.equal(host.weight(site), torch.cat([host.weight(part) for part in parts], dim=1))


def test_what_holds_matrices_but_is_no_site_is_named():
    class Experts(GeneralizedComponent):
        pass

    model = families.bridge("llama")
    experts = Experts("experts")
    experts._modules["_original_component"] = nn.Linear(4, 4)
    for block in model.blocks:
        block._modules["mlp"] = experts
    with pytest.warns(UserWarning, match=r"blocks\.0\.mlp: Experts"):
        host = host_of(model)
    assert {site.kind for site in host.sites()} == {"attn_q", "attn_k", "attn_v", "attn_o"}
    for block in model.blocks:
        block._modules["attn"] = experts
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.attn: Experts"):
        host_of(model)


def test_a_subclass_of_linear_is_no_site():
    class ScaledLinear(nn.Linear):
        pass

    model = families.bridge("llama")
    model.blocks[0].mlp.out._modules["_original_component"].__class__ = ScaledLinear
    with pytest.warns(UserWarning, match=r"blocks\.0\.mlp\.mlp_out: ScaledLinear"):
        names = [site.name for site in host_of(model).sites()]
    assert "blocks.0.mlp_out" not in names and "blocks.1.mlp_out" in names


def test_no_family_is_reported_as_incomplete(host):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        host_of(host.model)


@pytest.mark.parametrize(
    "more", [{"attn_only": True}, {"gated_mlp": True, "act_fn": "silu"}, {"normalization_type": None}]
)
def test_native_bridges(more):
    config = {"n_layers": 2, "d_model": 16, "n_ctx": 32, "d_head": 8, "n_heads": 2, "d_mlp": 24, "act_fn": "gelu"}
    model = TransformerBridge.boot_native({**config, "d_vocab": families.D_VOCAB, "seed": 0, **more}).eval()
    host = host_of(model)
    kinds = {site.kind for site in host.sites()}
    assert ("mlp_in" in kinds) != ("attn_only" in more) and ("mlp_gate" in kinds) == ("gated_mlp" in more)
    dense = host.run(TOKENS)
    undo = swap_dense(host, host.sites())
    assert close(host.run(TOKENS), dense)
    assert host.freeze_prefix(TOKENS) is None and close(host.last_logits(TOKENS), dense[:, -1])
    undo()
    assert torch.equal(host.run(TOKENS), dense)


# ---------------------------------------------------------------------------------------------- swapping


@pytest.mark.parametrize("packed", [True, False])
def test_units_of_the_dense_matrix_compute_the_dense_model_and_undoing_leaves_no_trace(host, packed):
    model, sites = host.model, sites_with(host, packed)
    with torch.no_grad():
        dense = host.run(TOKENS)
        before, state = snapshot(model), {k: v.clone() for k, v in model.state_dict().items()}
        weights = {site: host.weight(site) for site in sites}
        undo = swap_dense(host, sites)
        assert all(host.is_swapped(site) for site in sites)
        assert close(host.run(TOKENS), dense)
        assert list(model.state_dict()) == list(state)
        assert [id(p) for p in model.parameters()] == [i for _, i in before["parameters"]]
        assert all(torch.equal(host.weight(site), weights[site]) for site in sites)
        undo()
        undo()
        assert not any(host.is_swapped(site) for site in sites)
        assert snapshot(model) == before
        assert torch.equal(host.run(TOKENS), dense)
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_every_unit_hook_sees_and_changes_what_the_site_computes(host):
    """Zeroing z leaves the site with its bias; every site of every family takes part in the forward."""
    h, y = {}, {}
    for site in host.sites() + host.alternatives():
        undo = swap_dense(host, [site])
        with torch.no_grad(), host.inputs([site], h.__setitem__), host.outputs([site], y.__setitem__):
            _, cache = host.model.run_with_cache(TOKENS, names_filter=[site.hook_name])
            expected = y[site] if site.kind == "mlp" else h[site] @ host.weight(site)
            assert torch.allclose(cache[site.hook_name], expected)
            host.model.run_with_hooks(TOKENS, fwd_hooks=[(site.hook_name, lambda z, hook: z * 0)])
        bias = y[site][0, 0]
        assert torch.equal(y[site], bias.expand_as(y[site])), site
        undo()


def test_a_site_is_swapped_once(host):
    site = host.sites()[0]
    undo = swap_dense(host, [site])
    with pytest.raises(RuntimeError, match=f"{site.name} is attached already"):
        swap_dense(host, [site])
    undo()
    swap_dense(host, [site])()


@pytest.mark.parametrize(("part", "whole"), [("attn_k", "attn_qkv"), ("mlp_gate", "mlp")])
def test_overlapping_sites_are_not_swapped_together(part, whole):
    host = fresh("llama")
    sites = {site.kind: site for site in host.sites() + host.alternatives() if site.layer == 1}
    for first, second in ((part, whole), (whole, part)):
        undo = swap_dense(host, [sites[first]])
        before = snapshot(host.model)
        with pytest.raises(RuntimeError, match=rf"blocks\.1\.{first} is attached already"):
            swap_dense(host, [sites[second]])
        assert snapshot(host.model) == before and not host.is_swapped(sites[second])
        undo()


def test_a_whole_mlp_is_swapped_as_one(host):
    """Nothing else changes, and a unit of it that is added to adds to what the block writes."""
    sites = [site for site in host.alternatives() if site.kind == "mlp"]
    assert bool(sites) == (type(host.model.adapter).__name__ != "BertArchitectureAdapter")
    if not sites:
        return
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.mlp is a whole MLP.*mlp_in"):
        host.weight(sites[0])
    with torch.no_grad():
        dense, before = host.run(TOKENS), snapshot(host.model)
        undo = swap_dense(host, sites)
        assert torch.equal(host.run(TOKENS), dense)
        seen = {}
        hooks = [(site.hook_name, lambda y, hook: y + 1) for site in sites]
        hooks += [("blocks.0.mlp.hook_out", lambda y, hook: seen.update(changed=y))]
        plain = host.model.run_with_hooks(
            TOKENS, fwd_hooks=[("blocks.0.mlp.hook_out", lambda y, hook: seen.update(y=y))]
        )
        assert torch.equal(plain, dense)
        host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
        assert close(seen["changed"], seen["y"] + 1)
        undo()
        assert snapshot(host.model) == before


def test_undoing_an_older_swap_spares_the_newer_one():
    host = fresh("gpt2")
    site = host.sites()[0]
    old = swap_dense(host, [site])
    old()
    new = swap_dense(host, [site])
    old()
    assert host.is_swapped(site) and site.hook_name in host.model.hook_dict
    new()


def test_a_swap_that_fails_half_way_leaves_no_trace(host, monkeypatch):
    import swd_lens.hosts.bridge as bridge

    def fail(leaves, projection, name):
        original(leaves[:1], projection, name)
        raise KeyboardInterrupt

    original = bridge.mount
    before = snapshot(host.model)
    monkeypatch.setattr(bridge, "mount", fail)
    for site in host.sites() + host.alternatives():
        with pytest.raises(KeyboardInterrupt):
            swap_dense(host, [site])
        assert snapshot(host.model) == before


def test_projections_may_ask_for_the_dense_output(host):
    dense = host.run(TOKENS)
    sites, undos, seen = host.sites(), [], {}
    for site in sites:
        swap_in(host, site, DenseUnits, undos)
    with host.outputs(sites, lambda site, y: seen.update({site.hook_name: y})):
        y, cache = host.model.run_with_cache(TOKENS, names_filter=lambda name: name.endswith("_unit"))
    assert torch.equal(y, dense)
    assert all(torch.equal(cache[site.hook_name], seen[site.hook_name]) for site in sites)
    for undo in undos:
        undo()


def test_the_bias_is_read_when_the_model_runs():
    host = fresh("gpt2")
    site = next(site for site in host.sites() if site.name == "blocks.1.mlp_out")
    undo = swap_dense(host, [site])
    bias = host.model.blocks[1].mlp.out.bias
    with torch.no_grad():
        bias += 1
        edited = host.run(TOKENS)
        undo()
        assert close(edited, host.run(TOKENS))


@pytest.mark.parametrize("training", [True, False])
def test_train_mode_dtype_and_device_follow_the_host(training):
    host = fresh("llama")
    host.model.train(training)
    undo = swap_dense(host, sites_with(host, packed=True))
    assert {module.training for module in host.model.modules()} == {training}
    host.model.to(torch.float64)
    host.model.eval()
    assert host.run(TOKENS).dtype == torch.float64
    undo()
    assert host.run(TOKENS).dtype == torch.float64
    assert {p.dtype for p in host.model.parameters()} == {torch.float64}


def test_a_deep_copy_is_attached_and_independent(host):
    undo = swap_dense(host, sites_with(host, packed=True))
    with torch.no_grad():
        attached = host.run(TOKENS)
        twin = host_of(copy.deepcopy(host.model))
        assert torch.equal(twin.run(TOKENS), attached)
        for name in [name for name in twin.model.hook_dict if name.endswith("_unit")]:
            twin.model.add_hook(name, lambda z, hook: z * 0)
        assert not close(twin.run(TOKENS), attached)
        assert torch.equal(host.run(TOKENS), attached)
    undo()
    assert not any(host.is_swapped(site) for site in host.sites())
    assert any(twin.is_swapped(site) for site in twin.sites())


# ---------------------------------------------------------------------------------------------- TransformerLens' own tools


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


# ---------------------------------------------------------------------------------------------- reading


@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_outputs_are_inputs_times_the_weight_plus_the_bias(host, packed, swapped):
    sites, h, y = sites_with(host, packed), {}, {}
    undo = swap_dense(host, sites) if swapped else lambda: None
    with torch.no_grad(), host.inputs(sites, h.__setitem__), host.outputs(sites, y.__setitem__):
        host.run(TOKENS)
    undo()
    assert h.keys() == y.keys() == set(sites)
    for site in sites:
        assert h[site].shape == (*TOKENS.shape, site.d_in) and y[site].shape == (*TOKENS.shape, site.d_out)
        bias = y[site] - h[site] @ host.weight(site)
        assert close(bias + 1, (bias[:1, :1] + 1).expand_as(bias)), site  # the same everywhere
    seen = len(h)
    host.run(TOKENS)
    assert len(h) == seen


def test_watching_survives_a_swap_inside():
    host = fresh("gpt2")
    site, seen = host.sites()[-1], []
    with torch.no_grad(), host.inputs([site], lambda _, h: seen.append(h)):
        host.run(TOKENS)
        undo = swap_dense(host, [site])
        host.run(TOKENS)
        undo()
        host.run(TOKENS)
    assert len(seen) == 3 and torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_run_blocks_runs_the_first_blocks(causal):
    for n in range(1, causal.model.cfg.n_layers + 1):
        seen = []
        with torch.no_grad(), causal.inputs(causal.sites(), lambda site, _, seen=seen: seen.append(site.layer)):
            causal.run_blocks(TOKENS, n)
        assert set(seen) == set(range(n))


def test_run_blocks_of_an_encoder_runs_at_least_the_first_blocks():
    host, seen = fresh("bert"), set()
    with torch.no_grad(), host.inputs(host.sites(), lambda site, _: seen.add(site.layer)):
        host.run_blocks(TOKENS, 1)
    assert 0 in seen


# ---------------------------------------------------------------------------------------------- prefixes


@pytest.mark.parametrize("pos", [11, 2, 45])  # gemma2's window is 32 positions
@pytest.mark.parametrize("swapped", [True, False])
def test_a_prefix_gives_the_logits_of_the_whole_prompt(causal, pos, swapped):
    tokens = families.some_tokens(rows=3, pos=pos)
    undo = swap_dense(causal, sites_with(causal, packed=True)) if swapped else lambda: None
    with torch.no_grad():
        whole = causal.run(tokens)[:, -1]
        prefix = causal.freeze_prefix(tokens)
        assert prefix is not None
        first = causal.last_logits(tokens, prefix)
        assert close(first, whole) and close(causal.last_logits(tokens), whole)
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        other = tokens.clone()
        other[:, -1] = 77
        assert close(causal.last_logits(other, prefix), causal.run(other)[:, -1])
        twice = causal.last_logits(tokens.repeat(2, 1), causal.repeat_prefix(prefix, 2))
        assert close(twice, whole.repeat(2, 1))
        assert torch.equal(causal.last_logits(tokens, prefix), first)
        assert torch.equal(causal.last_logits(tokens, causal.repeat_prefix(prefix, 1)), first)
    undo()


def test_one_token_and_encoders_have_no_prefix(host):
    assert host.freeze_prefix(TOKENS[:, :1]) is None
    if not host.model.adapter.supports_generation:
        assert host.freeze_prefix(TOKENS) is None
    assert host.repeat_prefix(None, 3) is None
    assert close(host.last_logits(TOKENS), host.run(TOKENS)[:, -1])


def _gradients(host: Host, sites: list[Site], prefix) -> dict[Site, torch.Tensor]:
    """d (a logit difference at the last position) / d (z at the last position)."""
    kept = {}

    def keep(site: Site):
        def hook(z, hook):
            kept[site] = z
            z.retain_grad()

        return hook

    for site in sites:
        host.model.add_hook(site.hook_name, keep(site))
    logits = host.last_logits(TOKENS, prefix)
    (logits[:, 5] - logits[:, 6]).sum().backward()
    host.model.reset_hooks()
    return {site: z.grad[:, -1] for site, z in kept.items()}


@pytest.mark.parametrize("packed", [True, False])
def test_gradients_through_a_prefix_are_those_of_the_whole_prompt(causal, packed):
    sites = sites_with(causal, packed)
    undo = swap_dense(causal, sites)
    whole = _gradients(causal, sites, None)
    prefix = causal.freeze_prefix(TOKENS)
    for _ in range(2):
        got = _gradients(causal, sites, prefix)
        assert got.keys() == set(sites)
        assert all(close(got[site], whole[site]) for site in sites)
    undo()


# ---------------------------------------------------------------------------------------------- readout and processing


def test_the_readout_turns_the_last_block_into_logits(causal):
    norm, unembed = causal.readout()
    seen = {}
    hooks = [("ln_final.hook_normalized", lambda x, hook: seen.update(x=x.clone()))]
    with torch.no_grad():
        logits = causal.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    bias = getattr(causal.model.ln_final.original_component, "bias", None)
    x = seen["x"] * (1 if norm is None else norm) + (0 if bias is None else bias)
    y, cap = x @ unembed, getattr(causal.model.original_model.config, "final_logit_softcapping", None)
    assert close(y if cap is None else cap * torch.tanh(y / cap), logits)


def test_an_encoder_has_no_readout():
    with pytest.raises(UnsupportedHostError, match="BertArchitectureAdapter"):
        fresh("bert").readout()


@pytest.mark.parametrize("name", families.FAMILIES)
def test_affine_says_how_inputs_are_written(name):
    """h = x * scale + shift with x the normalized residual stream, as the bridge's own hooks show it."""
    host, folds = fresh(name), name not in ("qwen3_5", "bert")
    reads = [site for site in host.sites() + host.alternatives() if site.kind not in ("attn_o", "mlp_out")]
    if not folds:
        assert all(host.affine(site) is None for site in reads)
        return
    seen, x = {}, {}
    hooks = [
        (f"blocks.{layer}.{ln}.hook_normalized", lambda value, hook: x.update({hook.name: value.clone()}))
        for layer in (0, 1)
        for ln in ("ln1", "ln2")
    ]
    with torch.no_grad(), host.inputs(reads, seen.__setitem__):
        host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
    for site in reads:
        affine = host.affine(site)
        normalized = x[f"blocks.{site.layer}.{'ln1' if site.kind.startswith('attn') else 'ln2'}.hook_normalized"]
        assert affine is not None and affine.scale is not None
        assert (affine.shift is None) == (name not in ("gpt2", "pythia"))
        assert close(normalized * affine.scale + (0 if affine.shift is None else affine.shift), seen[site])


@pytest.mark.parametrize("name", families.FAMILIES)
def test_affine_of_what_writes(name):
    host = fresh(name)
    for site in host.sites():
        if site.kind == "mlp_out":
            assert host.affine(site) == Affine()
        if site.kind != "attn_o":
            continue
        affine = host.affine(site)
        if name == "qwen3_5":  # gated, or a recurrence
            assert affine is None
        elif name in ("gpt2", "pythia", "qwen2", "bert"):
            assert affine is not None and affine.scale is None and affine.shift is not None
            # Where the norm delivers its bias only (or, in BERT, the values are their biases), so does every attention pattern.
            where = "attn.v.hook_in" if name == "bert" else "ln1.hook_normalized"
            hooks, seen = [(f"blocks.{site.layer}.{where}", lambda h, hook: h * 0)], {}
            with torch.no_grad(), host.inputs([site], seen.__setitem__):
                host.model.run_with_hooks(TOKENS, fwd_hooks=hooks)
            assert close(seen[site], affine.shift.expand_as(seen[site]))
        else:
            assert affine == Affine()


COMPATIBLE = ("gpt2", "pythia", "llama", "qwen2", "qwen3", "gemma2")


@pytest.mark.parametrize("name", COMPATIBLE)
@pytest.mark.parametrize("packed", [True, False])
def test_compatibility_mode(name, packed):
    """Folded and centred: the same swaps on the processed weights, and nothing left to fold."""
    host = fresh(name)
    raw = host.processing()
    assert not any(raw[key] for key in ("fold_ln", "center_writing_weights", "compatibility_mode"))
    assert raw["fold_value_biases"] == (name not in ("gpt2", "pythia", "qwen2"))
    host.model.enable_compatibility_mode()
    centred = name in ("gpt2", "pythia")  # RMSNorm does not centre
    expected = {
        "fold_ln": True,
        "center_writing_weights": centred,
        "fold_value_biases": True,
        "compatibility_mode": True,
    }
    assert host.processing() == expected
    assert all(host.affine(site) == Affine() for site in host.sites() + host.alternatives())
    assert host.readout()[0] is None
    sites = sites_with(host, packed)
    with torch.no_grad():
        dense = host.run(TOKENS)
        h, y = {}, {}
        with host.inputs(sites, h.__setitem__), host.outputs(sites, y.__setitem__):
            assert close(host.run(TOKENS), dense)
        assert h.keys() == y.keys() == set(sites)
        before = snapshot(host.model)
        undo = swap_dense(host, sites)
        assert close(host.run(TOKENS), dense)
        _, cache = host.model.run_with_cache(TOKENS)
        assert all(torch.allclose(cache[s.hook_name], h[s] @ host.weight(s), atol=1e-4) for s in sites)
        prefix = host.freeze_prefix(TOKENS)
        assert close(host.last_logits(TOKENS, prefix), dense[:, -1])
        undo()
        assert snapshot(host.model) == before
        assert torch.equal(host.run(TOKENS), dense)


def test_processed_mlps_call_their_projections_only_while_needed():
    host = fresh("llama")
    host.model.enable_compatibility_mode()
    mlp, sites = host.model.blocks[0].mlp, [site for site in host.sites() if site.name == "blocks.0.mlp_in"]
    undo = swap_dense(host, sites)
    with host.inputs(sites, lambda site, h: None):
        undo()
        assert not mlp._use_processed_weights
    assert mlp._use_processed_weights and host.model.blocks[1].mlp._use_processed_weights


def test_processing_without_folding():
    host = fresh("gpt2")
    host.model.enable_compatibility_mode(fold_ln=False, fold_value_biases=False)
    folded = {key: value for key, value in host.processing().items() if key.startswith("fold")}
    assert folded == {"fold_ln": False, "fold_value_biases": False}
    assert host.processing()["center_writing_weights"] and host.processing()["compatibility_mode"]
    o = next(site for site in host.sites() if site.kind == "attn_o")
    affine = host.affine(o)
    assert affine is not None and affine.shift is not None


# ---------------------------------------------------------------------------------------------- guards


def test_what_rewrites_weights_is_refused_while_guarded(host):
    model, state = host.model, host.model.state_dict()
    before = sorted(vars(model))
    undos: list[Undo] = []
    for _ in range(2):
        host.guard("while units are attached", undos.append)
    undo, nested = undos
    for call in (
        model.enable_compatibility_mode,
        model.process_weights,
        lambda: model.load_state_dict(state),
        lambda: copy.deepcopy(model).process_weights(),
    ):
        with pytest.raises(RuntimeError, match="while units are attached"):
            call()
    nested()
    nested()
    with pytest.raises(RuntimeError, match="while units are attached"):
        model.process_weights()
    undo()
    assert sorted(vars(model)) == before
    model.load_state_dict(state)


def test_the_weight_of_a_swapped_site_cannot_be_read(host):
    for site in host.sites():
        undo = swap_dense(host, [site])
        leaves = host._leaves(site)
        for leaf in leaves:
            with pytest.raises(AttributeError, match=f"{site.name} is attached"):
                leaf.weight  # noqa: B018
            assert leaf.bias is None or leaf.bias.shape == (host.weight(site).shape[1] // len(leaves),)
            assert leaf._parameters["weight"] is not None
        undo()
        assert leaves[0].weight is leaves[0]._parameters["weight"]


FLAGS = [
    ("use_attn_result", ["attn_o"]),
    ("use_split_qkv_input", ["attn_q", "attn_k", "attn_v", "attn_qkv"]),
    ("use_attn_in", ["attn_q", "attn_k", "attn_v", "attn_qkv"]),
]


@pytest.mark.parametrize("name", ["gpt2", "pythia", "llama", "qwen2"])
@pytest.mark.parametrize(("flag", "kinds"), FLAGS)
def test_head_by_head_switches(name, flag, kinds):
    host = fresh(name)
    switch = getattr(host.model, f"set_{flag}")
    sites = [site for site in host.sites() + host.alternatives() if site.layer == 1 and site.kind in kinds]
    assert sites
    switch(True)
    for site in sites:
        with pytest.raises(UnsupportedHostError, match=rf"cfg\.{flag} is on.*model\.set_{flag}\(False\)"):
            swap_dense(host, [site])
    switch(False)
    for site in sites:
        undo = swap_dense(host, [site])
        switch(True)
        with pytest.raises(AttributeError, match=f"{site.name} is attached: its dense weight is not in use"):
            host.run(TOKENS)
        switch(False)
        host.run(TOKENS)
        undo()
    others = [site for site in host.sites() if site.kind.startswith("mlp")]
    dense = host.run(TOKENS)
    undo = swap_dense(host, others)
    switch(True)
    assert close(host.run(TOKENS), dense)
    switch(False)
    undo()
