"""The toy model, its factors, and a comparison by hand; each made once per module."""

import pytest

from swd_lens.circuits.comparison import Comparison, TaskComparison
from tests.circuits.worked import by_hand
from tests.contract import swd_zero_data
from tests.micro import toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def every(model):
    """SWD of all sites."""
    return swd_zero_data(model, "all")


@pytest.fixture(scope="module")
def few(every):
    """Three sites that write to the residual stream, the one in the middle alone in no block."""
    return {site: every[site] for site in ("blocks.0.mlp_out", "blocks.1.attn_o", "blocks.1.mlp_out")}


@pytest.fixture
def worked():
    """One method of one curve, and one of three seeds, of which one never recovers 0.9."""
    curves = {
        "one": by_hand([0, 1, 4], [0, 5, 30], [0.1, 0.95, 1.0], [0.0, 1.0, 1.5]),
        "many/0": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.90, 1.0], [0.0, 0.5, 2.0]),
        "many/1": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.50, 1.1], [0.0, 1.2, 2.0]),
        "many/2": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.60, 0.8], [0.0, 1.0, 2.0], q=5.0),
    }
    groups = {"many": ("many/0", "many/1", "many/2")}
    return Comparison({"toy": TaskComparison("toy", curves, {})}, groups, {}, "one")
