"""TransformerLens' own helpers while units are attached: right, corrected or refused, and none silently wrong.

1. `CACHE` and `MODEL` call each helper; what it gives is held against a dense twin, a copy of the host whose matrices are
   read @ write. The attached host computes what the twin does, so what is right or corrected agrees with it.
2. `REFUSED` has those that must not run, `STORED` those that show the dense host's own weights, as its state_dict does.
3. Every public name of ActivationCache, HookedTransformer and TransformerBridge (3.9) is in one of these, or in `APART`, which
   has no forward and no attached weight in it; and the table of how-to/attach.md names those that a user would ask about.
"""

import copy
import re
import warnings
from importlib import metadata
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformer_lens import ActivationCache, SVDInterpreter
from transformer_lens.model_bridge import TransformerBridge

import swd_lens as swd
from swd_lens.base.errors import AttachError
from swd_lens.hosts import host_of
from swd_lens.hosts.weights import stored_matrix
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import Offsets

HOOKED = int(metadata.version("transformer_lens").split(".")[0]) < 4
KINDS = ["hooked", "bridge"] if HOOKED else ["bridge"]
SITES = ("blocks.0.attn_o", "blocks.1.mlp_out", "blocks.2.attn_o", "blocks.2.mlp_out")
TEXT = "The list is"
LAYERS = 4


@pytest.fixture(scope="module", params=KINDS)
def kind(request):
    return request.param


@pytest.fixture(scope="module")
def model(kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
        return swd.load_default_model(kind=kind)


@pytest.fixture(scope="module")
def factors(model):
    """Factors that compute something else than W; those of the last site have the constants that transport leaves."""
    host, generator, made = host_of(model), torch.Generator().manual_seed(0), {}
    for site in host.sites():
        if site.name in SITES:
            read = torch.randn(site.d_in, 24, generator=generator) / site.d_in**0.5
            write = host.weight(site).std() * torch.randn(24, site.d_out, generator=generator)
            constants = (torch.randn(n, generator=generator) for n in (24, site.d_out))
            made[site.name] = Factors(read, write, offsets=Offsets(*constants) if site.name == SITES[-1] else None)
    return made


@pytest.fixture(scope="module")
def twin(model, factors):
    """A dense host that computes what the attached one does."""
    dense = copy.deepcopy(model)
    host = host_of(dense)
    for site in host.sites():
        if site.name in factors:
            f = factors[site.name]
            stored_matrix(host, site).write(f.read @ f.write)
            if f.offsets is not None:
                dense.blocks[site.layer].mlp.b_out.data += f.offsets.unit @ f.write + f.offsets.out
    return dense


@pytest.fixture(scope="module")
def caches(model, factors, twin):
    """The cache of the attached host, looked at after it is detached, and that of the twin."""
    with swd.attach(model, factors):
        _, cache = model.run_with_cache(TEXT)
    return cache, twin.run_with_cache(TEXT)[1]


def same(left, right):
    """Tensors agree to float32's rounding, all else exactly."""
    if isinstance(left, Tensor):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-4)
    elif isinstance(left, dict):
        assert left.keys() == right.keys()
        for name in left:
            same(left[name], right[name])
    elif isinstance(left, list | tuple):
        assert len(left) == len(right)
        for a, b in zip(left, right, strict=True):
            same(a, b)
    else:
        assert left == right


def stack(cache):
    return cache.decompose_resid(return_labels=False)


def headed(cache):
    cache = copy.copy(cache)
    cache.cache_dict = dict(cache.cache_dict)
    cache.compute_head_results()
    return [cache["result", layer, "attn"] for layer in range(LAYERS)]


def streams(cache):
    return {name: value for name, value in cache.items() if name.endswith(("resid_pre", "resid_post", "_out"))}


def switched_off(cache):
    """toggle_autodiff switches gradients for the whole process."""
    with torch.enable_grad():
        cache.toggle_autodiff(False)
        return torch.is_grad_enabled()


def projected(model):
    return torch.randn(model.cfg.d_model, 3, generator=torch.Generator().manual_seed(1))


CACHE = {
    "accumulated_resid": lambda c: c.accumulated_resid(incl_mid=True, apply_ln=True, return_labels=True),
    "apply_ln_to_stack": lambda c: c.apply_ln_to_stack(stack(c)),
    "apply_slice_to_batch_dim": lambda c: c.apply_slice_to_batch_dim(slice(0, 1)).stack_neuron_results(LAYERS),
    "compute_head_results": headed,
    "decompose_resid": lambda c: c.decompose_resid(apply_ln=True, return_labels=True),
    "get_full_resid_decomposition": lambda c: [
        c.get_full_resid_decomposition(return_labels=True),
        c.get_full_resid_decomposition(expand_neurons=False, layer=2, mlp_input=True),
        c.get_full_resid_decomposition(apply_ln=True, project_output_onto=projected(c.model)),
    ],
    "get_neuron_results": lambda c: c.get_neuron_results(1, neuron_slice=(3, 9), pos_slice=-1),
    "items": lambda c: streams(dict(c.items())),
    "keys": lambda c: [name for name in c.keys() if not name.endswith("_unit")],  # noqa: SIM118
    "logit_attrs": lambda c: c.logit_attrs(stack(c), 7, 9),
    "remove_batch_dim": lambda c: copy.copy(c).remove_batch_dim().stack_head_results(2, pos_slice=-1),
    "ssm_layers": lambda c: c.ssm_layers(),
    "stack_activation": lambda c: c.stack_activation("resid_post"),
    "stack_head_results": lambda c: c.stack_head_results(3, incl_remainder=True, apply_ln=True, return_labels=True),
    "stack_neuron_results": lambda c: c.stack_neuron_results(3, incl_remainder=True, pos_slice=-1, return_labels=True),
    "to": lambda c: c.to("cpu").stack_neuron_results(2),
    "toggle_autodiff": lambda c: switched_off(c),
    "values": lambda c: len(streams(dict(zip(c.keys(), c.values(), strict=True)))),
}


@pytest.mark.parametrize("name", CACHE)
def test_helpers_of_a_cache_give_what_those_of_the_dense_twin_give(caches, name):
    attached, dense = (CACHE[name](cache) for cache in caches)
    same(attached, dense)


def test_units_without_a_matrix_are_refused_by_helpers_that_multiply_by_it(model):
    """An encode/decode pair has no read @ write; later layers of it do not stand in the way of earlier ones."""

    class Pair:
        def encode(self, h):
            return h[..., :8].relu()

        def decode(self, z):
            return torch.cat([z] * 16, -1)

    with swd.attach(model, {"blocks.1.mlp_out": Pair(), "blocks.1.attn_o": Pair()}):
        _, cache = model.run_with_cache(TEXT)
        with pytest.raises(AttachError, match=r"accumulated_bias multiplies by the dense weight of blocks\.1\.(attn_o|mlp_out)"):
            model.accumulated_bias(2)
        model.accumulated_bias(1)
    cache.stack_neuron_results(1)
    for helper in ("stack_head_results", "stack_neuron_results", "get_full_resid_decomposition"):
        with pytest.raises(AttachError, match=rf"cache\.{helper} multiplies .* swd\.stack_unit_results\(cache, factors\)"):
            getattr(cache, helper)(2)
    with pytest.raises(AttachError, match=r"cache\.get_neuron_results multiplies"):
        cache.get_neuron_results(1)


def test_the_dense_host_for_a_moment_and_nested_attachments(model, factors, kind):
    first, second = ({site: factors[site] for site in pair} for pair in (SITES[:2], SITES[2:]))
    with swd.attach(model, first) as attachment:
        with swd.attach(model, second):
            _, both = model.run_with_cache(TEXT)
        with attachment.dense():
            _, dense = model.run_with_cache(TEXT)
        _, one = model.run_with_cache(TEXT)
        if kind == "hooked":  # a bridge cannot be copied after a forward with gradients
            assert type(copy.deepcopy(model).run_with_cache(TEXT)[1]) is type(one)
    assert set(both.stood) == set(SITES) and set(one.stood) == set(first) and type(dense) is ActivationCache
    assert "run_with_cache" not in vars(model) and "accumulated_bias" not in vars(model)


# ---------------------------------------------------------------------------------------------- helpers of the model


def hooked_logits(model):
    """With a hook through each way of setting one."""
    seen = []
    with model.hooks(fwd_hooks=[("blocks.3.hook_resid_pre", lambda x, hook: 2 * x)]):
        seen.append(model(TEXT))
    model.add_hook("blocks.3.hook_resid_pre", lambda x, hook: 3 * x)
    seen.append(model(TEXT))
    model.reset_hooks()
    seen.append(model.run_with_hooks(TEXT, fwd_hooks=[("blocks.3.hook_resid_pre", lambda x, hook: 0 * x)]))
    model.add_perma_hook("blocks.3.hook_resid_pre", lambda x, hook: 4 * x)
    seen.append(model(TEXT))
    model.reset_hooks(including_permanent=True)
    return [*seen, model(TEXT)]


def cached_by(model, start):
    cache = start(model)
    model(TEXT)
    model.reset_hooks()
    return {name: value.clone() for name, value in cache.items() if name.endswith("resid_post")}


def cached_into(model, method):
    cache = {}
    getattr(model, method)(cache) if method == "cache_all" else getattr(model, method)(cache, lambda n: "post" in n)
    model(TEXT)
    model.reset_hooks()
    return {name: value.clone() for name, value in cache.items() if name.endswith("resid_post")}


def cached_through_hooks(model):
    cache, forward, _ = model.get_caching_hooks(lambda name: name.endswith("resid_post"))
    model.run_with_hooks(TEXT, fwd_hooks=forward)
    return dict(cache)


def continued(model, method, **more):
    found = getattr(model, method)(model.to_tokens(TEXT), max_new_tokens=4, do_sample=False, **more)
    return torch.cat(list(found), -1) if method == "generate_stream" else found


def by_head(model):
    """All of these are settings; units of attn_o and mlp_out are not in the way of this one."""
    model.set_use_hook_mlp_in(True)
    logits = model(TEXT)
    model.set_use_hook_mlp_in(False)
    return logits


MODEL = {
    "forward": lambda m: m(TEXT),
    "run_with_cache": lambda m: streams(m.run_with_cache(TEXT)[1]),
    "hooks add_hook add_perma_hook run_with_hooks reset_hooks": hooked_logits,
    "loss_fn": lambda m: m.loss_fn(m(TEXT), m.to_tokens(TEXT)),
    "generate": lambda m: continued(m, "generate", verbose=False),
    "generate_stream": lambda m: continued(m, "generate_stream", verbose=False),
    "hf_generate": lambda m: continued(m, "hf_generate"),
    "original_model": lambda m: m.original_model(m.to_tokens(TEXT)).logits,
    "accumulated_bias": lambda m: [m.accumulated_bias(LAYERS), m.accumulated_bias(2, True), m.accumulated_bias(3, False, False)],
    "tokens_to_residual_directions": lambda m: m.tokens_to_residual_directions(5),
    "set_use_hook_mlp_in": by_head,
    "set_ungroup_grouped_query_attention": lambda m: m(TEXT),
    "add_caching_hooks": lambda m: cached_by(m, lambda m: m.add_caching_hooks()),
    "get_caching_hooks": cached_through_hooks,
    "cache_all": lambda m: cached_into(m, "cache_all"),
    "cache_some": lambda m: cached_into(m, "cache_some"),
    "get_residual input_to_embed get_pos_offset": lambda m: [m.input_to_embed(TEXT)[0], m.get_pos_offset(None, 1)],
    "setup": lambda m: (m.setup(), m(TEXT))[1],
    "to cpu move_model_modules_to_device": lambda m: m.to("cpu").cpu()(TEXT),
    "W_E W_U b_U W_in b_in b_Q b_K b_V W_Q W_K W_V QK": lambda m: [m.W_E, m.W_U, m.W_in, m.b_in, m.b_Q, m.W_Q, m.W_V, m.QK.AB],
    "W_pos W_E_pos": lambda m: m.W_E_pos,
    "QK_for_attn_layers": lambda m: m.QK_for_attn_layers()[1].AB,
}
SAYS = r"is attached|while units are attached|while attn_o is attached|has no attribute 'W_O'|has no attribute 'W_out'"
REFUSED = {
    "W_O": lambda m: m.W_O,
    "W_out": lambda m: m.W_out,
    "OV": lambda m: m.OV,
    "all_composition_scores": lambda m: m.all_composition_scores("V"),
    "OV_for_attn_layers": lambda m: m.OV_for_attn_layers(),
    "stack_params_for": lambda m: m.stack_params_for("mlp", "mlp.W_out"),
    "get_params": lambda m: m.get_params(),
    "tl_parameters": lambda m: m.tl_parameters(),
    "tl_named_parameters": lambda m: m.tl_named_parameters(),
    "init_weights": lambda m: m.init_weights(),
    "load_state_dict": lambda m: m.load_state_dict(m.state_dict()),
    "load_and_process_state_dict": lambda m: m.load_and_process_state_dict(m.state_dict()),
    "process_weights_": lambda m: m.process_weights_(),
    "process_weights": lambda m: m.process_weights(),
    "fold_layer_norm": lambda m: m.fold_layer_norm(m.state_dict()),
    "fold_value_biases": lambda m: m.fold_value_biases(m.state_dict()),
    "center_writing_weights": lambda m: m.center_writing_weights(m.state_dict()),
    "center_unembed": lambda m: m.center_unembed(m.state_dict()),
    "refactor_factored_attn_matrices": lambda m: m.refactor_factored_attn_matrices(m.state_dict()),
    "enable_compatibility_mode": lambda m: m.enable_compatibility_mode(),
    "set_use_attn_result": lambda m: switched(m, "use_attn_result"),
}
SETTINGS = ("set_use_split_qkv_input", "set_use_attn_in")  # refused with units that read what attention reads
STORED = {
    "state_dict": lambda m: dict(m.state_dict()),
    "named_parameters parameters": lambda m: dict(m.named_parameters()),
    "n_params_total": lambda m: m.n_params_total,
    "W_gate": lambda m: m.W_gate,
}


@pytest.mark.parametrize("setting", SETTINGS)
def test_inputs_of_each_head_are_refused_where_units_read_the_attentions_input(model, setting):
    with swd.attach(model, swd.baselines.svd(model, "blocks.0.attn_qkv")):
        with pytest.raises((RuntimeError, AttributeError), match=r"attached|while units read the attention's input"):
            switched(model, setting.removeprefix("set_"))
        for stack in ("W_Q", "W_K", "W_V", "QK"):
            with pytest.raises(RuntimeError, match=r"model\.W_[QKV] was read while blocks\.0\.attn_qkv is attached"):
                getattr(model, stack)
        assert model.W_O.shape[0] == LAYERS


def test_singular_vectors_of_a_bridge_are_refused(model, factors, kind):
    if kind == "hooked":
        pytest.skip("there it reads the stored dense weights by name")
    with swd.attach(model, factors), pytest.raises(RuntimeError, match="the bridge's parameters were read"):
        SVDInterpreter(model)


def switched(model, setting):
    """The setting switched on, and a forward under it."""
    getattr(model, f"set_{setting}")(True)
    try:
        model(TEXT)
    finally:
        getattr(model, f"set_{setting}")(False)


def has(model, names):
    if missing := [name for name in names.split() if not hasattr(type(model), name)]:
        pytest.skip(f"{type(model).__name__} has no {missing[0]}")


@pytest.mark.filterwarnings("ignore:cache_(all|some) is deprecated:DeprecationWarning")  # by transformer_lens 4
@pytest.mark.parametrize("names", MODEL)
def test_helpers_of_the_model_give_what_those_of_the_dense_twin_give(model, factors, twin, names):
    has(model, names.split()[0])
    with swd.attach(model, factors):
        attached = MODEL[names](model)
    same(attached, MODEL[names](twin))


@pytest.mark.parametrize("name", REFUSED)
def test_helpers_that_would_read_or_rewrite_replaced_matrices_are_refused(model, factors, name):
    has(model, name)
    with swd.attach(model, factors), pytest.raises((RuntimeError, AttributeError), match=SAYS):
        REFUSED[name](model)


@pytest.mark.parametrize("names", STORED)
def test_weights_that_are_shown_by_name_are_the_dense_hosts(model, factors, names):
    has(model, names.split()[0])
    dense = STORED[names](model)
    with swd.attach(model, factors):
        same(STORED[names](model), dense)


# ---------------------------------------------------------------------------------------------- the list

# Names in which neither a forward nor a matrix of an attached site is: text and ids, counts, names and registries of hooks,
# devices that are not here, and what makes another model.
APART = set(
    """
    to_tokens to_string to_str_tokens to_single_token to_single_str_token get_token_position set_tokenizer tokenizer
    all_head_labels attn_head_labels check_hooks_to_add check_and_add_hook clear_contexts hook_points list_hooks
    remove_all_hook_fns hook_dict hook_aliases get_hook_point block_hooks block_submodules blocks_with layer_types
    composition_layer_indices clear_hook_registry cuda mps train from_pretrained from_pretrained_no_processing boot_native
    boot_transformers check_model_support list_supported_models load_sample_training_dataset sample_datapoint
    fill_missing_keys b_O b_out diffusion_generate prepare_multimodal_inputs compute_ssm_effective_attention compute_ssm_state
    """.split()  # noqa: SIM905
)


def public(cls):
    """What a user sees of a class of transformer_lens."""
    classes = [c for c in cls.__mro__ if c.__module__.startswith("transformer_lens")]
    return {name for c in classes for name in vars(c) if not name.startswith("_")}


@pytest.mark.skipif(not HOOKED, reason="the list is of transformer_lens 3.9")
def test_every_public_name_is_in_the_list():
    from transformer_lens import HookedTransformer

    listed = {name for names in (*CACHE, *MODEL, *REFUSED, *STORED) for name in names.split()} | APART | {*SETTINGS}
    assert public(ActivationCache) | public(HookedTransformer) | public(TransformerBridge) == listed


def test_the_guides_table_has_every_helper_of_a_cache_and_each_that_is_refused():
    guide = (Path(swd.__file__).parent / "docs" / "pages" / "how-to" / "attach.md").read_text(encoding="utf-8")
    table = guide[guide.index("| TransformerLens' helper |") :].partition("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines()[2:]]
    verdicts = {name: row[1].strip() for row in rows for name in re.findall(r"`(\w+)`", row[0])}
    assert set(verdicts.values()) == {"right", "corrected", "refused", "the stored dense weights"}
    assert set(CACHE) | set(REFUSED) <= set(verdicts)
    assert {name for name, verdict in verdicts.items() if verdict == "refused"} == {*REFUSED, "SVDInterpreter", *SETTINGS}
