"""Triggers for the rows of swd_lens/ERRORS.md about repairing whole models: budgets, replace_model, samples, fine-tuning.

What is shared stands in factorization.py.
"""

import json
from functools import cache
from types import SimpleNamespace

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.sealed import read_sealed, write_sealed
from swd_lens.factorization.allocation import LossCurve, fewest_edges, spend
from swd_lens.tasks.prompt import Prompt
from swd_lens.units.factors import Factors
from tests import families
from tests.errors.factorization import QUICK, SITE, factorized, model, tokens
from tests.errors.triggers import trigger
from tests.units.test_sources import Coder

# ---------------------------------------------------------------------------------------------- budgets


@trigger
def unknown_loss_of_budgets(*_):
    swd.allocate(model(), by="ce")


@trigger
def grid_without_the_uniform_budget(*_):
    swd.allocate(model(), grid=[1.5, 2])


@trigger
def goal_beyond_the_curves(*_):
    fewest_edges({SITE: LossCurve((100, 200, 400), (3.0, 2.0, 1.0))}, 0.5)


@trigger
def allocate_goal_of_no_kl(*_):
    swd.allocate(model(), kl=0.1, by="error")


@trigger
def kl_without_tokens(*_):
    swd.allocate(model(), SITE)


@trigger
def kl_on_single_tokens(*_):
    swd.allocate(model(), SITE, judge=tokens()[:, :1])


@trigger
def not_an_allocation(folder, _):
    (folder / "budgets.json").write_text(json.dumps({"sparsity": 0.5}))
    swd.Allocation.load(folder / "budgets.json")


@trigger
def edges_beyond_the_curves(*_):
    spend({SITE: LossCurve((100, 200, 400), (3.0, 2.0, 1.0))}, 401)


# ---------------------------------------------------------------------------------------------- replace_model


@trigger
def unknown_budgets(*_):
    swd.replace_model(model(), SITE, heldout=tokens(), budgets="equal")


@trigger
def nothing_held_out(*_):
    swd.replace_model(model(), SITE, tokens=tokens(), heldout=None, **QUICK)


@trigger
def finetune_options_that_are_set(folder, _):
    swd.replace_model(model(), SITE, tokens=tokens(), heldout=tokens(), finetune_options={"out": folder}, **QUICK)


@trigger
def budgets_of_a_mapping(*_):
    swd.replace_model(model(), SITE, heldout=tokens(), tokens=tokens(), sparsity={SITE: 0.5}, budgets="kl")


@trigger
def finetuning_without_tokens(*_):
    swd.replace_model(model(), SITE, heldout=tokens())


# ---------------------------------------------------------------------------------------------- samples


@cache
def factors():
    return baselines.svd(model(), SITE)


@trigger
def text_not_tokenizable(*_):
    Prompt.of(swd.load_default_model(), "half \ud83d", "generate")


@trigger
def samples_of_an_encoder(*_):
    swd.generate(families.bridge("bert"), {}, [[8, 9]])


@trigger
def samples_called_dense(*_):
    swd.generate(model(), {"dense": factors()}, [[8, 9]])


@trigger
def samples_of_no_length(*_):
    swd.generate(model(), factors(), [[8, 9]], max_new_tokens=0)


@trigger
def samples_at_negative_temperature(*_):
    swd.generate(model(), factors(), [[8, 9]], temperature=-1)


@trigger
def samples_without_prompts(*_):
    swd.generate(model(), factors(), [])


@trigger
def samples_of_an_empty_prompt(*_):
    swd.generate(model(), factors(), [""], prepend_bos=False)


@trigger
def samples_without_tokenizer(_, monkeypatch):
    monkeypatch.setattr(model(), "tokenizer", None)
    swd.generate(model(), factors(), ["Once upon a time"])


@trigger
def samples_not_finite(_, monkeypatch):
    bias = model().unembed.b_U
    before = bias.detach().clone()
    with torch.no_grad():
        bias[0] = torch.nan
        try:
            swd.generate(model(), factors(), [[8, 9]])
        finally:
            bias.copy_(before)


# ---------------------------------------------------------------------------------------------- fine-tuning


def finetuned(given=None, text=None, **settings):
    settings = {"steps": 1, "progress": False, **settings}
    swd.finetune(model(), factors() if given is None else given, tokens() if text is None else text, **settings)


@trigger
def finetune_setting_out_of_range(*_):
    finetuned(learning_rate=0)


@trigger
def finetune_count_out_of_range(*_):
    finetuned(batch_size=0)


@trigger
def finetune_unknown_choice(*_):
    finetuned(loss="mse")


@trigger
def finetune_unknown_preset(*_):
    finetuned(preset="papers")


@trigger
def finetune_unknown_setting(*_):
    finetuned(leaning_rate=1e-3)


@trigger
def finetune_steps_between(*_):
    finetuned(eval_every=0)


@trigger
def finetune_best_of_nothing(*_):
    finetuned(keep="best")


@trigger
def finetune_on_single_tokens(*_):
    finetuned(text=tokens()[:, :1])


@trigger
def finetune_text_too_short(*_):
    finetuned(batch_size=5)


@trigger
def finetune_encode_decode_pair(*_):
    finetuned({SITE: Coder(torch.randn(64, 3), torch.randn(3, 16))})


@trigger
def finetune_nothing_to_train(*_):
    finetuned({SITE: Factors(torch.zeros(64, 2), torch.zeros(2, 16))})


@trigger
def finetune_not_finite(*_):
    finetuned({SITE: Factors(torch.full((64, 2), 1e30), torch.full((2, 16), 1e30))})


@trigger
def finetune_more_processes_than_rows(_, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "3")
    monkeypatch.setattr(
        "accelerate.PartialState", lambda: SimpleNamespace(num_processes=3, process_index=0, device="cpu")
    )
    finetuned(batch_size=2)


@trigger
def finetune_into_another_folder(folder, _):
    factorized(out=folder)
    finetuned(out=folder)


@trigger
def finetune_damaged_folder(folder, _):
    finetuned(out=folder)
    (folder / "run.json").write_text("{")
    finetuned(out=folder)


@trigger
def finetune_damaged_checkpoint(folder, _):
    finetuned(out=folder)
    run = read_sealed(folder / "run.json", "a run")
    write_sealed(folder / "run.json", {**run, "finished": False})
    (folder / "checkpoint.safetensors").write_bytes(b"")
    finetuned(out=folder)


@trigger
def finetune_another_run(folder, _):
    finetuned(out=folder)
    finetuned(out=folder, learning_rate=1e-5)
