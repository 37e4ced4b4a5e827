"""A toy model with letters for tokens, and an audit of random factors of what writes to the residual stream."""

import pytest

from swd_lens.analysis.audit import audit
from swd_lens.train.baselines import svd
from tests.analysis.audit_models import lettered, made_scores, sparse_factors
from tests.micro import random_tokens


@pytest.fixture(scope="module")
def model():
    return lettered()


@pytest.fixture(scope="module")
def factors(model):
    return sparse_factors(model, "*_o*")  # attn_o and mlp_out


@pytest.fixture(scope="module")
def exact(model):
    """Factors that are W itself, which edits are made with."""
    return svd(model, ["mlp_out", "attn_o"])


@pytest.fixture(scope="module")
def found(model, factors):
    scores = {"a task": made_scores(factors), "another": made_scores(factors, seed=1)}
    return audit(model, factors, random_tokens(9, 8), scores=scores, progress=False)
