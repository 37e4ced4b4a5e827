"""A toy model and its exact factors, for the tests of units."""

import pytest

from swd_lens import baselines
from tests.micro import toy_model


@pytest.fixture
def model():
    return toy_model()


@pytest.fixture
def factors(model):
    return baselines.svd(model, "all")
