"""A cache knows its units; tests/session/test_helpers.py has what its helpers give, test_questions.py steering."""

import torch

from swd_lens.units import attach
from swd_lens.units.cache import UnitCache
from tests.micro import random_tokens


def test_a_cache_knows_what_stood_in_its_run(model, factors):
    tokens = random_tokens(2, 6)
    with attach(model, factors["blocks.0.mlp_out"]), torch.no_grad():
        _, cache = model.run_with_cache(tokens)
        with attach(model, factors["blocks.1.mlp_out"]) as inner, inner.dense():
            _, other = model.run_with_cache(tokens)
    _, plain = model.run_with_cache(tokens)
    assert isinstance(cache, UnitCache) and not isinstance(plain, UnitCache)
    assert set(cache.stood) == set(other.stood) == {"blocks.0.mlp_out"}  # not those that hand over to the dense product
    row = cache.apply_slice_to_batch_dim(0)
    assert isinstance(row, UnitCache) and row.stood is cache.stood
