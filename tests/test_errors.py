"""Every row of swd_lens/ERRORS.md: its trigger raises the class that the row names, with the message that it shows.

1. `rows` reads the tables of the catalogue; `…` in a message stands for whatever is there.
2. `TRIGGERS` holds one function per row, under the row's id (its name with hyphens).
3. One test per row, at the end of this file; another says that rows and triggers are the same set.
"""

import builtins
import json
import re
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file
from torch import nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge.generalized_components.base import GeneralizedComponent

import swd_lens as swd
from swd_lens import baselines, solver
from swd_lens.analysis import edit, qk
from swd_lens.base.files import sha256
from swd_lens.factorization import workers
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import Site, parse_unit
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.passport import Offsets, Origin, Probe
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import as_units
from tests import (
    errors_baselines,
    errors_circuits,
    errors_edits,
    errors_finetune,
    errors_inside,
    errors_whole,
    families,
)
from tests.contract import identity
from tests.units.test_sources import (
    AddsItsInput,
    Coder,
    LooksAside,
    OpenCoder,
    Sae,
    answering,
    changed,
    sae,
    transcoder,
)

HOOKED = int(metadata.version("transformer_lens").split(".")[0]) < 4
if HOOKED:
    from tests.micro import random_split, random_tokens, toy_model

CATALOGUE = Path(swd.__file__).parent / "ERRORS.md"
SITE = "blocks.0.mlp_out"
QUICK = {"preset": "paper", "outer_iterations": 4, "sparsity": 0.5, "progress": False}

Trigger = Callable[[Path, pytest.MonkeyPatch], Any]
TRIGGERS: dict[str, Trigger] = {
    **errors_circuits.TRIGGERS,
    **errors_whole.TRIGGERS,
    **errors_finetune.TRIGGERS,
    **errors_inside.TRIGGERS,
    **errors_edits.TRIGGERS,
    **errors_baselines.TRIGGERS,
}
NEEDS_HOOKED: set[str] = errors_circuits.NEEDS_HOOKED | errors_whole.NEEDS_HOOKED | errors_inside.NEEDS_HOOKED


def trigger(function: Trigger) -> Trigger:
    TRIGGERS[function.__name__.replace("_", "-")] = function
    return function


def on_hooked(function: Trigger) -> Trigger:
    """A trigger on a HookedTransformer."""
    NEEDS_HOOKED.add(function.__name__.replace("_", "-"))
    return trigger(function)


def rows() -> dict[str, tuple[str, str]]:
    """id -> (name of the class, message)."""
    found: dict[str, tuple[str, str]] = {}
    for line in CATALOGUE.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip().replace("\\|", "|") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if len(cells) != 4 or cells[0] in ("id", "---"):
            continue
        assert cells[0] not in found, f"{cells[0]} is there twice"
        assert cells[3], f"{cells[0]} does not say why"
        found[cells[0]] = (cells[1], re.fullmatch(r"(`+)(.*)\1", cells[2])[2])  # type: ignore[index]
    return found


def class_named(name: str) -> type[BaseException]:
    places = (swd, builtins, huggingface_hub.errors, solver, workers, baselines, edit, qk)
    return next(getattr(place, name) for place in places if hasattr(place, name))


def plain(text: str) -> str:
    return " ".join(text.split())


def matches(message: str, template: str) -> bool:
    pattern = ".+?".join(re.escape(part) for part in plain(template).split("…"))
    return re.fullmatch(pattern, plain(message)) is not None


# Triggers are given a folder and a patcher, like pytest's fixtures; most need neither.


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
    experts._modules["_original_component"] = nn.Linear(4, 4)
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


# ---------------------------------------------------------------------------------------------- unit sources

SMALL_SITE = Site(1, "mlp_out", 3, 2)  # Coder's


@trigger
def unknown_source(*_):
    as_units(Coder, SMALL_SITE)


@trigger
def unknown_side(*_):
    CoderUnits(Coder(), 3, 2, 4, reads="left")


@trigger
def output_to_input(*_):
    CoderUnits(Coder(), 3, 2, 4, reads="output", writes="input")


@trigger
def coder_of_another_site(*_):
    as_units(sae("blocks.1.hook_mlp_out"), Site(2, "mlp_out", 9, 4))


@trigger
def coder_of_another_width(*_):
    as_units(sae("blocks.1.hook_mlp_out"), Site(1, "mlp_out", 9, 8))


@trigger
def no_pair_of_factors(*_):
    as_units(SimpleNamespace(read=torch.ones(3, 4), write=torch.ones(3, 2)), SMALL_SITE)


@trigger
def pair_does_not_fit(*_):
    as_units(SimpleNamespace(read=torch.ones(2, 4), write=torch.ones(4, 3)), SMALL_SITE)


@trigger
def pair_not_finite(*_):
    as_units(SimpleNamespace(read=torch.ones(3, 4) / 0, write=torch.ones(4, 2)), SMALL_SITE)


@trigger
def coder_fails(*_):
    as_units(Coder(), Site(1, "mlp_out", 5, 2))


@trigger
def coder_gives_no_tensor(*_):
    as_units(answering(encode=lambda x: (x, x)), SMALL_SITE)


@trigger
def coder_gives_another_kind(*_):
    as_units(answering(encode=lambda x: x.to_sparse()), SMALL_SITE)


@trigger
def coder_changes_device(*_):
    as_units(answering(encode=lambda x: x.to("meta")), SMALL_SITE)


@trigger
def coder_changes_axes(*_):
    as_units(answering(encode=lambda x: x.flatten()), SMALL_SITE)


@trigger
def decode_of_another_width(*_):
    as_units(answering(decode=lambda z: z), SMALL_SITE)


@trigger
def coder_on_another_device(*_):
    CoderUnits(OpenCoder().to("meta"), 3, 2, 4).encode(torch.ones(1, 3))


@trigger
def coder_not_counted_yet(*_):
    _ = next(iter(from_saelens(sae()).values())).sparsity


@trigger
def not_saelens(*_):
    from_saelens(Coder())


@trigger
def saelens_training(*_):
    from_saelens(changed(sae(), training_forward_pass=lambda step: step))


@trigger
def saelens_norm(*_):
    from_saelens(changed(sae(), cfg_normalize_activations="expected_average_only_in"))


@trigger
def saelens_heads(*_):
    from_saelens(changed(sae("blocks.1.attn.hook_z"), hook_z_reshaping_mode=True))


@trigger
def saelens_error_term(*_):
    from_saelens(changed(sae(), use_error_term=True))


@trigger
def saelens_skip(*_):
    from_saelens(changed(transcoder("mlp.hook_in", "hook_mlp_out"), W_skip=torch.ones(5, 4)))


@trigger
def saelens_one_head(*_):
    from_saelens(sae("blocks.1.attn.hook_z", hook_head_index=3))


@trigger
def saelens_nowhere(*_):
    from_saelens(Sae())


@trigger
def saelens_writes_nowhere(*_):
    from_saelens(Sae(d_out=5, hook_name="blocks.1.mlp.hook_post"))


@trigger
def saelens_several_blocks(*_):
    from_saelens(Sae(d_out=5, hook_name="blocks.1.mlp.hook_post", hook_name_out="blocks.2.hook_mlp_out"))


@trigger
def saelens_no_matrix(*_):
    from_saelens(sae("blocks.1.hook_resid_pre"))


@trigger
def saelens_mlp_in(*_):
    from_saelens(transcoder("hook_mlp_in", "hook_mlp_out"))


@trigger
def saelens_after_norm(*_):
    from_saelens(sae(hf_hook_name="model.layers.1.post_feedforward_layernorm.output"))


@trigger
def saelens_widths(*_):
    from_saelens(changed(sae(), cfg_d_sae=7))


@trigger
def saelens_forward(*_):
    from_saelens(AddsItsInput(hook_name="blocks.1.hook_mlp_out"))


@trigger
def saelens_positions(*_):
    from_saelens(LooksAside(hook_name="blocks.1.hook_mlp_out"))


# ---------------------------------------------------------------------------------------------- files and the hub


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    described = json.loads((folder / "factors.json").read_text())
    edit(described)
    (folder / "factors.json").write_text(json.dumps(described))


def file_of(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def rehash(folder: Path) -> None:
    digest = sha256(file_of(folder))
    edit_index(folder, lambda described: described["sites"][SITE].update(sha256=digest))


def load_edited_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    FactorSet({SITE: small()}).save(folder)
    edit_index(folder, edit)
    FactorSet.load(folder)


def load_with_tensors(folder: Path, f: Factors | None = None, **exchanged: torch.Tensor) -> None:
    """Save, exchange tensors of the file ("." is "__"), give the index its new hash, load."""
    FactorSet({SITE: f or small()}).save(folder)
    named = {name.replace("__", "."): value for name, value in exchanged.items()}
    save_file({**load_file(file_of(folder)), **named}, file_of(folder))
    rehash(folder)
    FactorSet.load(folder)[SITE]


def probed() -> Factors:
    f = small()
    return replace(f, probe=Probe.of(torch.tensor([1.0, 2.0]), f.read))


@trigger
def no_factors_there(folder, _):
    FactorSet.from_pretrained(folder)


@trigger
def damaged_index(folder, _):
    FactorSet({SITE: small()}).save(folder)
    (folder / "factors.json").write_text('{"format": 3, "sit')
    FactorSet.load(folder)


@trigger
def index_without_part(folder, _):
    load_edited_index(folder, lambda described: described.pop("sites"))


@trigger
def index_with_wrong_entry(folder, _):
    load_edited_index(folder, lambda described: described["sites"][SITE].update(d_in=0))


@trigger
def file_elsewhere(folder, _):
    load_edited_index(folder, lambda described: described["sites"][SITE].update(file="../other.safetensors"))


@trigger
def newer_format(folder, _):
    load_edited_index(folder, lambda described: described.update(format=99))


@trigger
def no_format(folder, _):
    load_edited_index(folder, lambda described: described.pop("format"))


@trigger
def missing_file(folder, _):
    FactorSet({SITE: small()}).save(folder)
    file_of(folder).unlink()
    FactorSet.load(folder)


@trigger
def exchanged_file(folder, _):
    FactorSet({SITE: small()}).save(folder)
    file_of(folder).write_bytes(b"version https://git-lfs.github.com/spec/v1")
    FactorSet.load(folder)


@trigger
def unreadable_file(folder, _):
    FactorSet({SITE: small()}).save(folder)
    file_of(folder).write_bytes(b"no tensors")
    rehash(folder)
    FactorSet.load(folder)


@trigger
def counts_differ(folder, _):
    load_with_tensors(folder, write__value=torch.tensor([2.0]))


@trigger
def edge_outside(folder, _):
    load_with_tensors(folder, read__index=torch.tensor([0, 4], dtype=torch.int32))


@trigger
def edges_not_ascending(folder, _):
    load_with_tensors(folder, read__index=torch.tensor([3, 0], dtype=torch.int32))


@trigger
def value_not_finite(folder, _):
    load_with_tensors(folder, read__value=torch.tensor([1.0, torch.inf]))


@trigger
def saved_not_finite(folder, _):
    Factors(torch.eye(2), torch.tensor([[1.0, 0.0], [torch.nan, 1.0]])).save(folder)


@trigger
def saved_passport_misfit(folder, _):
    replace(small(), origin=Origin(None, None, None, torch.ones(3), torch.ones(2))).save(folder)


@trigger
def saved_probe_differs(folder, _):
    f = probed()
    replace(f, read=2 * f.read).save(folder)


@trigger
def loaded_passport_misfit(folder, _):
    load_with_tensors(folder, origin__spin=torch.ones(2))


@trigger
def loaded_probe_differs(folder, _):
    f = replace(probed(), offsets=Offsets(torch.zeros(2), torch.zeros(2)))
    load_with_tensors(folder, f, read__value=torch.tensor([1.0, 2.25]))


@on_hooked
def attached_probe_differs(*_):
    model = toy_model()
    factors = swd.factorize(model, SITE, tokens=random_tokens(4, 16), **QUICK)
    with torch.no_grad():
        model.pos_embed.W_pos.mul_(3)  # W stays, what enters the site does not
    swd.attach(model, factors)


@trigger
def several_matrices(folder, _):
    FactorSet({SITE: small(), "blocks.1.mlp_out": small()}).save(folder)
    Factors.load(folder)


@trigger
def probe_of_no_units(*_):
    Probe.of(torch.ones(2), small().read, k=0)


@trigger
def probe_not_finite(*_):
    Probe.of(torch.tensor([torch.nan, 1.0]), small().read)


@trigger
def repository_without_factors(_, monkeypatch):
    def answer(*arguments, **named):
        raise EntryNotFoundError("404")  # of the hub's client; hub_scenarios.py has it answered by a server

    monkeypatch.setattr("swd_lens.units.hub.hf_hub_download", answer)
    FactorSet.from_pretrained("user/model")


@trigger
def not_on_this_machine(folder, _):
    FactorSet.from_pretrained("user/nothing", cache_dir=folder, local_files_only=True)


@trigger
def neither_folder_nor_repository(*_):
    FactorSet.from_pretrained("/no/such/folder")


@on_hooked
def resume_other_sites(folder, _):
    swd.factorize(toy_model(), SITE, out=folder, **QUICK)
    swd.factorize(toy_model(), "blocks.1.mlp_out", out=folder, **QUICK)


@on_hooked
def resume_unknown_recipe(folder, _):
    swd.factorize(toy_model(), SITE, **QUICK).save(folder)
    swd.factorize(toy_model(), SITE, out=folder, **QUICK)


@on_hooked
def resume_earlier_site(folder, _):
    swd.factorize(toy_model(), "blocks.1.mlp_out", out=folder, tokens=random_tokens(4, 16), **QUICK)
    swd.factorize(toy_model(), "mlp_out", out=folder, tokens=random_tokens(4, 16), **QUICK)


@on_hooked
def resume_made_otherwise(folder, _):
    swd.factorize(toy_model(), SITE, out=folder, **QUICK)
    swd.factorize(toy_model(), SITE, out=folder, **{**QUICK, "sparsity": 0.25})


@on_hooked
def resume_damaged(folder, _):
    (folder / "factors.json").write_text("{")
    swd.factorize(toy_model(), SITE, out=folder, **QUICK)


# ---------------------------------------------------------------------------------------------- the tests


def test_rows_and_triggers_are_the_same_set():
    assert sorted(rows()) == sorted(TRIGGERS)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name, marks=pytest.mark.skipif(name in NEEDS_HOOKED and not HOOKED, reason="needs a HookedTransformer")
        )
        for name in rows()
    ],
)
def test_the_message_is_the_one_in_the_catalogue(name, tmp_path, monkeypatch):
    kind, template = rows()[name]
    expected = class_named(kind)
    if issubclass(expected, Warning):
        with pytest.warns(expected) as caught:
            TRIGGERS[name](tmp_path, monkeypatch)
        message = next(str(one.message) for one in caught if one.category is expected)
    else:
        with warnings.catch_warnings(), pytest.raises(expected) as raised:
            warnings.simplefilter("ignore")
            TRIGGERS[name](tmp_path, monkeypatch)
        assert raised.type is expected, f"raised a {raised.type.__name__}"
        # str of a KeyError is the repr of its message.
        message = raised.value.args[0] if raised.type is KeyError else str(raised.value)
    assert matches(message, template), f"\ncatalogue: {template}\nraised:    {message}"
