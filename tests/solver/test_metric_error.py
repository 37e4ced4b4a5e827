"""relmse_of: the share of a matrix that two factors miss, by columns, with and without a Gram and the vectors left out."""

import pytest
import torch

from swd_lens.solver import metric
from swd_lens.solver.metric import relmse_of

H = torch.randn(40, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
READ, WRITE, DENSE = (
    torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) for seed, shape in ((2, (6, 4)), (3, (4, 9)), (4, (6, 9)))
)


def share(inputs):
    """Compute it from outputs: the error's squares over the matrix' own."""
    missed = inputs @ (DENSE - READ @ WRITE).double()
    return float(missed.square().sum() / (inputs @ DENSE.double()).square().sum())


@pytest.mark.parametrize("tile", [1, 12, 2**21])
def test_it_is_the_share_of_the_outputs_whatever_the_tiles(tile, monkeypatch):
    monkeypatch.setattr(metric, "_TILE", tile)
    gram = (H.T @ H).float()
    assert relmse_of(READ, WRITE, DENSE, gram) == pytest.approx(share(H), rel=1e-5)
    assert relmse_of(READ, WRITE, DENSE) == pytest.approx(share(torch.eye(6).double()), rel=1e-5)
    assert relmse_of(READ, WRITE, DENSE, gram, without=H[:3].float()) == pytest.approx(share(H[3:]), rel=1e-4)


def test_nothing_left_is_measured_on_everything():
    assert relmse_of(READ, WRITE, DENSE, (H.T @ H).float(), without=H.float()) == pytest.approx(share(H), rel=1e-5)
