"""Triggers around `save_checkpoint`."""

from dataclasses import replace

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.study import checkpoint
from swd_lens.units.integrity import Offsets
from tests import families
from tests.errors.triggers import on_hooked, trigger
from tests.units.test_sources import Coder

SITE = "blocks.0.mlp_out"


@trigger
def checkpoint_of_other_units(folder, _):
    swd.study.save_checkpoint(families.bridge("gpt2"), {SITE: Coder()}, folder)


@on_hooked
def checkpoint_of_single_positions(folder, _):
    from tests.errors.circuits import setting

    model, factors, _, scores = setting()
    swd.study.save_checkpoint(
        model, factors[SITE], folder, circuit=swd.Circuit.of(factors[SITE], scores, [f"{SITE}/0"])
    )


@on_hooked
def checkpoint_source_unknown(folder, _):
    from tests.micro import toy_model

    swd.study.save_checkpoint(toy_model(), baselines.svd(toy_model(), SITE), folder)


@trigger
def checkpoint_source_unreadable(folder, _):
    model = families.bridge("gpt2")
    swd.study.save_checkpoint(model, baselines.svd(model, SITE), folder / "new", source=folder)


@trigger
def matrix_not_in_checkpoint(folder, _):
    model = families.bridge("gpt2")
    with torch.no_grad():
        model.blocks[0].mlp.out.original_component.weight.mul_(2.0)
    swd.study.save_checkpoint(model, baselines.svd(model, SITE), folder)


@trigger
def architecture_without_bias(folder, _):
    model = families.bridge("gemma2")
    exact = baselines.svd(model, SITE)[SITE]
    zeros = Offsets(torch.zeros(exact.n_units), torch.zeros(exact.d_out))
    swd.study.save_checkpoint(model, {SITE: replace(exact, offsets=zeros, held=None)}, folder)


@trigger
def checkpoint_differs(folder, patch):
    patch.setattr(checkpoint, "TOLERANCE", -1.0)
    model = families.bridge("gpt2")
    swd.study.save_checkpoint(model, baselines.svd(model, SITE), folder)
