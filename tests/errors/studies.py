"""Triggers of the sections "The paper's items" and "The best circuit" of swd_lens/ERRORS.md."""

import swd_lens as swd
from swd_lens.study import paper
from tests import families
from tests.bridge.test_circuits import split_for
from tests.errors.triggers import trigger


@trigger
def paper_unknown_item(folder, patch):
    paper.settings_of("singel-matrix", "tiny")


@trigger
def paper_unknown_profile(folder, patch):
    paper.settings_of("audit", "large")


@trigger
def paper_item_without_profile(folder, patch):
    paper.plan("edit", "qwen2.5-3b")


@trigger
def paper_unknown_setting(folder, patch):
    paper.settings_of("audit", "tiny").changed(layer=3)


@trigger
def paper_setting_of_another_type(folder, patch):
    paper.settings_of("audit", "tiny").changed(layers=3)


@trigger
def paper_folder_without_items(folder, patch):
    paper.results_in(folder)


# ---------------------------------------------------------------------------------------------- the best circuit


def best(n_rows=4, **settings):
    model = families.bridge("llama")
    split = split_for(model, 6, 1, "train")
    task = swd.Task("toy", split, split, split, "random", False)
    text = families.some_tokens(n_rows, 8)
    return swd.best_circuit(model, task, "blocks.1.mlp_out", tokens=text, minutes=1e-9, progress=False, **settings)


@trigger
def best_circuit_without_goal(*_):
    best(kl=0.0)


@trigger
def best_circuit_of_nothing(*_):
    best(recovered=50.0)
