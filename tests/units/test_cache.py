"""TransformerLens' own tools work on units; tests/session/test_helpers.py has what each helper of a cache gives."""

import torch

from swd_lens.units import attach
from swd_lens.units.cache import UnitCache
from tests.micro import random_tokens


def test_editing_z_moves_the_output_along_the_write_vector(model, factors):
    tokens, site = random_tokens(1, 5), "blocks.1.mlp_out"

    def push(z, hook):
        z = z.clone()
        z[:, -1, 3] += 2.0
        return z

    with attach(model, factors), torch.no_grad():
        _, plain = model.run_with_cache(tokens)
        with model.hooks(fwd_hooks=[("blocks.1.hook_mlp_out_unit", push)]):
            _, edited = model.run_with_cache(tokens)
    moved = (edited["mlp_out", 1] - plain["mlp_out", 1])[0]
    torch.testing.assert_close(moved[-1], 2.0 * factors[site].write[3], rtol=1e-4, atol=1e-5)
    assert moved[:-1].abs().max() == 0


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
