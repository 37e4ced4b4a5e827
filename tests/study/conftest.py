"""The small run of a hostile host, as tests of the report have it, and what studies of the embedded model share."""

from dataclasses import replace

import pytest

import swd_lens as swd
from swd_lens.solver import PRESETS
from tests.report.conftest import host, run  # noqa: F401 - fixtures


@pytest.fixture(scope="module")
def few_alternations():
    """The paper's solver is a usual control, and how good it is is no matter here."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(PRESETS, "paper", replace(PRESETS["paper"], outer_iterations=5))
        yield


@pytest.fixture(scope="module")
def tasks(default_model):
    return [swd.load_task(name, default_model, n_train=24, n_test=12) for name in ("ioi", "gendered_pronoun")]
