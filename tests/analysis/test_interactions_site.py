"""One site and its text: what is refused, which units are paired."""

import pytest
import torch

from swd_lens.analysis.interactions import unit_interactions
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import Offsets
from tests.analysis.interaction_checks import TOKENS, sparse_factors
from tests.micro import toy_model

SITE = "blocks.1.mlp_in"


def test_errors_say_what_to_do():
    model = toy_model()
    factors = {SITE: sparse_factors(model, SITE)}
    with pytest.raises(ValueError, match=r"summed after the activation.*unit_overlap"):
        unit_interactions(model, factors, "blocks.1.mlp_out", TOKENS)
    with pytest.raises(ValueError, match=r"hold nothing for blocks\.0\.mlp_in; they are for blocks\.1\.mlp_in"):
        unit_interactions(model, factors, "blocks.0.mlp_in", TOKENS, progress=False)
    with pytest.raises(ValueError, match="names 2 sites"):
        unit_interactions(model, factors, "mlp_in", TOKENS)
    with pytest.raises(ValueError, match=r"top must be .* got 1"):
        unit_interactions(model, factors, SITE, TOKENS, top=1)
    one = Factors(torch.randn(16, 3), torch.eye(3, 32) * torch.tensor([[1.0], [0.0], [0.0]]))
    with pytest.raises(ValueError, match=r"blocks\.1\.mlp_in has 1 valid units"):
        unit_interactions(model, {SITE: one}, SITE, TOKENS, progress=False)


def test_units_without_edges_are_never_paired():
    model = toy_model()
    whole = sparse_factors(model, SITE)
    read, write = whole.read.clone(), whole.write.clone()
    write[3], read[:, 5] = 0, 0
    factors = Factors(read, write)
    # Transported factors add constants to z: unit 5 has the most energy, and no read edge.
    constants = Offsets(torch.zeros(12).index_fill(0, torch.tensor([5]), 50.0), torch.zeros(32))
    moved = Factors(factors.read, factors.write, offsets=constants)
    for some in (factors, moved):
        found = unit_interactions(model, {SITE: some}, SITE, TOKENS, progress=False)
        assert sorted(found.units) == [i for i in range(12) if i not in (3, 5)]
