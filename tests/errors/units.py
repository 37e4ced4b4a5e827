"""Triggers around units: other sources, files and the hub."""

import json
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from huggingface_hub.errors import EntryNotFoundError
from safetensors.torch import load_file, save_file

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.files import sha256
from swd_lens.base.sealed import seal
from swd_lens.hosts.sites import Site
from swd_lens.tasks.prompt import Prompt
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.folders import load_coders
from swd_lens.units.integrity import Offsets, Origin, Probe
from swd_lens.units.keys import read_unit
from swd_lens.units.saelens import from_saelens
from swd_lens.units.unit_set import as_units
from tests import families
from tests.errors.hosts import QUICK, SITE, small
from tests.errors.triggers import TRIGGERS, on_hooked, trigger
from tests.units.coder_folders import circuit_tracer_folder, random_weights, saelens_folder
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

if int(metadata.version("transformer_lens").split(".")[0]) < 4:
    from tests.micro import random_tokens, toy_model


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


@on_hooked
def no_calibration_tokens(*_):
    swd.factorize(toy_model(), SITE, **QUICK)


@trigger
def unknown_words(*_):
    Prompt.of(swd.load_default_model(kind="bridge"), "The queen works", "unit_graph")


@trigger
def helper_without_matrix(*_):
    model = families.bridge("gpt2")  # (64, 16)
    with swd.attach(model, {SITE: Coder(torch.ones(64, 3), torch.ones(3, 16))}):
        _, cache = model.run_with_cache(families.some_tokens(1))
    cache.stack_neuron_results(1)


# ---------------------------------------------------------------------------------------------- files and the hub


def edit_index(folder: Path, edit: Callable[[dict[str, Any]], Any]) -> None:
    described = json.loads((folder / "factors.json").read_text())
    edit(described)
    (folder / "factors.json").write_text(json.dumps(seal(described)))


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
    return replace(f, probe=Probe.of(torch.tensor([1.0, 2.0]), f.read, f.write))


@trigger
def no_factors_there(folder, _):
    FactorSet.from_pretrained(folder)


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
    replace(f, read=2 * f.read, held=None).save(folder)


@trigger
def loaded_passport_misfit(folder, _):
    load_with_tensors(folder, origin__spin=torch.ones(2))


@trigger
def loaded_probe_differs(folder, _):
    f = replace(probed(), offsets=Offsets(torch.zeros(2), torch.zeros(2)), held=None)
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
    Probe.of(torch.ones(2), small().read, small().write, k=0)


@trigger
def probe_not_finite(*_):
    Probe.of(torch.tensor([torch.nan, 1.0]), small().read, small().write)


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


@on_hooked
def attached_probe_without_tokens(folder, patch):
    model = toy_model()
    made = swd.factorize(model, SITE, sparsity=0.5, preset="quick", outer_iterations=4, progress=False)
    swd.attach(model, swd.FactorSet(dict(made), {**made.provenance, "probe_tokens": [1.5]}))


# ---------------------------------------------------------------------------------------------- units on the stream


@trigger
def not_a_key_of_a_set(*_):
    FactorSet({SITE: small()})[3]  # type: ignore[call-overload]


@trigger
def not_a_unit(*_):
    read_unit(3.5)


@trigger
def unit_without_a_site(*_):
    read_unit(3, ["blocks.0.mlp_out", "blocks.1.mlp_out"])


def stacked(attached: str = SITE, given: Any = None, **how: Any) -> None:
    """Results of a run with the SVD of one site attached, stacked with those of another or of something else."""
    model = toy_model()
    factors = baselines.svd(model, attached)
    with swd.attach(model, factors):
        _, cache = model.run_with_cache(random_tokens(1, 3))
    swd.stack_unit_results(cache, factors if given is None else given, **how)


@on_hooked
def no_such_unit(*_):
    stacked(units=(SITE, 16))


@on_hooked
def results_without_a_cache(*_):
    swd.stack_unit_results({}, baselines.svd(toy_model(), SITE))


@on_hooked
def results_of_a_reader(*_):
    stacked("blocks.0.mlp_in")


@trigger
def cache_without_scales(*_):
    model = families.bridge("gemma2")
    factors = baselines.svd(model, "blocks.0.mlp_out")
    with swd.attach(model, factors):
        _, cache = model.run_with_cache(families.some_tokens(1, 3), names_filter=lambda name: "unit" in name)
    swd.stack_unit_results(cache, factors)


@on_hooked
def results_without_write_vectors(*_):
    stacked(given={SITE: Coder(torch.eye(32), torch.ones(32, 16))})


@on_hooked
def cache_without_units(*_):
    stacked(given=baselines.svd(toy_model(), "blocks.1.mlp_out"))


@on_hooked
def cache_of_other_units(*_):
    stacked(given={SITE: Factors(torch.eye(32), torch.ones(32, 16))})


@trigger
def nothing_on_the_stream(*_):
    FactorSet({"blocks.0.mlp_in": small()}).writers(torch.ones(2))


@trigger
def not_a_direction(*_):
    FactorSet({SITE: small()}).writers(torch.zeros(2))


@trigger
def direction_of_another_kind(*_):
    FactorSet({SITE: small()}).writers(3.5)


@trigger
def direction_without_a_model(*_):
    FactorSet({SITE: small()}).writers(" she")


@on_hooked
def direction_of_no_token(*_):
    FactorSet({SITE: small()}).writers(" she", toy_model())


@trigger
def direction_of_another_width(*_):
    FactorSet({SITE: small()}).writers(torch.ones(7))


@trigger
def direction_setting(*_):
    FactorSet({SITE: small()}).writers(torch.ones(2), by="size")


# ---------------------------------------------------------------------------------------------- folders of coders


def loaded(folder, weights=None, **settings):
    load_coders(saelens_folder(folder, weights or random_weights(4, 5, 4, "b_enc"), **settings))


def traced(folder, **config):
    weights = random_weights(4, 5, 4, "b_enc")
    load_coders(circuit_tracer_folder(folder, {0: {**weights, "W_enc": weights["W_enc"].T}}, **config))


TRIGGERS |= {
    "coder-folder-missing": lambda folder, _: load_coders(folder / "nothing"),
    "coder-folder-of-nothing": lambda folder, _: load_coders(folder),
    "coder-folder-of-another-architecture": lambda folder, _: loaded(folder, architecture="temporal"),
    "coder-folder-of-other-weights": lambda folder, _: loaded(folder, architecture="jumprelu"),
    "coder-folder-across-layers": lambda folder, _: traced(folder, model_kind="cross_layer_transcoder"),
    "coder-folder-on-the-hub": lambda folder, _: traced(folder, transcoders=["hf://a/b/c", "hf://a/b/d"]),
}


@trigger
def coder_folder_site_twice(folder, _):
    for name in ("one", "other"):
        saelens_folder(folder / name, random_weights(4, 5, 4, "b_enc"))
    load_coders(folder)
