"""The small run of a hostile host, as tests of the report have it, and what studies of the embedded model share."""

from dataclasses import replace

import pytest

import swd_lens as swd
from swd_lens.solver import PRESETS
from swd_lens.study.trust import _of_common_lengths
from tests.report.conftest import host, run  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def few_alternations():
    """How good factors are is no matter here: neither SWD's nor those of the paper's solver, a usual control."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "best", replace(PRESETS["best"], outer_iterations=5, refine_rounds=1))
        patch.setitem(PRESETS, "paper", replace(PRESETS["paper"], outer_iterations=5))
        yield


def of_one_length(name, model, n_train, n_others, **how):
    """A task whose splits have prompts of one length, or two: each length costs as many forwards as a further task."""
    task = swd.load_task(name, model, n_train=5 * n_train, n_validation=5 * n_others, n_test=5 * n_others, **how)
    sizes = {"train": n_train, "validation": n_others, "test": n_others}
    return replace(task, **{split: _of_common_lengths(getattr(task, split), n) for split, n in sizes.items()})


@pytest.fixture(scope="module")
def tasks(default_model):
    return [of_one_length(name, default_model, 12, 8) for name in ("ioi", "gendered_pronoun")]
