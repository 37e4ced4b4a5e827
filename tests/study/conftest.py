"""The small run of a hostile host, as tests of the report have it, and what studies of the embedded model share."""

from dataclasses import replace

import pytest

import swd_lens as swd
from swd_lens.solver import PRESETS
from tests.report.conftest import host, run  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def few_alternations():
    """How good factors are is no matter here: neither SWD's nor those of the paper's solver, a usual control."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("best", "paper"):
            patch.setitem(PRESETS, name, replace(PRESETS[name], outer_iterations=5))
        yield


@pytest.fixture(scope="module")
def tasks(default_model):
    return [swd.load_task(name, default_model, n_train=24, n_test=12) for name in ("ioi", "gendered_pronoun")]
