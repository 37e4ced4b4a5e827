"""Items of the paper on the embedded model, as small as they can be: one, and all."""

import shutil
from dataclasses import replace

import pandas as pd
import pytest

import swd_lens as swd
from swd_lens.solver import PRESETS
from swd_lens.study import paper

SMALL = {
    "tasks": {"gendered_pronoun": [16, 12]},
    "heldout_tokens": 512,
    "calibration_tokens": 512,
    "sparsities": [0.5],
    "outer_iterations": 4,
    "random_circuits": 4,
}
# Every item's own settings, as small.
ALL_SMALL = {
    "random_b_seeds": 1,
    "token_counts": [512, 1024],
    "sparser_tokens": 512,
    "grid": [0.5],
    "trained": [
        {"label": "TC", "method": "transcoder", "l1": [1e-5, 1e-3], "width": 8}
        | {"n_tokens": 512, "tokens_per_step": 256, "seed": 0},
        {"label": "VPD", "method": "vpd_recon", "importance": "shared_mlp", "hidden": 4, "width": 8}
        | {"n_tokens": 512, "tokens_per_step": 256, "seed": 0},
    ],
    "factorization_tokens": 512,
    "finetune_tokens": 512,
    "sparse_pretraining": {"updates": 4, "stop_after": 3, "tokens_per_update": 256},
    "shifts": [-1, 1],
    "edit_tokens": 512,
    "lora_rates": [0.08],
    "other_tokens": 32,
    "task": "gendered_pronoun",
    "per_layer": 1,
    "audit_tokens": 512,
    "contexts": 4,
    "per_head": 1,
    "interaction_units": 64,
    "overlap_tokens": 512,
    "interaction_tokens": 256,
    "shown": 8,
    "top": 6,
}


@pytest.fixture(scope="package", autouse=True)
def quick_solver():
    """What an item does with factors does not depend on how good they are."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "best", replace(PRESETS["best"], outer_iterations=4))
        yield


@pytest.fixture(scope="package")
def model():
    return swd.load_default_model()


@pytest.fixture(scope="package")
def finished(model, quick_solver, tmp_path_factory):
    """A folder with one item."""
    folder = tmp_path_factory.mktemp("paper")
    how = {"profile": "tiny", "model": model, "out": folder, "progress": False, "random_b_seeds": 1, **SMALL}
    return folder, paper.run_item("controls", **how)


@pytest.fixture(scope="package")
def every(finished, model, tmp_path_factory):
    """All items beside the finished one: their folder, their results, and the steps that were said."""
    out, steps = tmp_path_factory.mktemp("all") / "all", []
    shutil.copytree(finished[0], out)
    how = {"on_step": steps.append, "progress": False, **SMALL, **ALL_SMALL}
    return out, paper.run_items("all", profile="tiny", model=model, out=out, **how), steps


def table(result, number):
    """One of a result's tables, as it can be asked."""
    return pd.DataFrame(result.tables[number].rows, columns=list(result.tables[number].columns))
