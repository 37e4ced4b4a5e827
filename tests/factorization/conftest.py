"""The host that most of these tests factorize."""

import pytest

from tests.micro import toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()
