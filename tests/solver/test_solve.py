"""The canonical form: product and supports stay, scale and sign are fixed."""

import pytest
import torch

from swd_lens.factorization.solve import solve
from swd_lens.solver import canonical
from tests.solver.matrices import gram_of, weight_of


def test_by_hand():
    # Unit 0: norms 3 and 12, so 6 each; the largest write entry is negative: both change sign.
    # Unit 1: norms 5 and 5; the largest write entry is 4, positive: nothing to do.
    read = torch.tensor([[3.0, 3.0], [0.0, 4.0]])
    write = torch.tensor([[0.0, -12.0], [-3.0, 4.0]])
    a, b = canonical(read, write)
    torch.testing.assert_close(a, torch.tensor([[-6.0, 3.0], [0.0, 4.0]]))
    torch.testing.assert_close(b, torch.tensor([[0.0, 6.0], [-3.0, 4.0]]))


def test_of_equal_magnitudes_the_first_is_positive():
    a, b = canonical(torch.ones(1, 2), torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    assert b.sign().tolist() == [[1.0, -1.0], [1.0, -1.0]] and a.sign().tolist() == [[-1.0, 1.0]]


def test_units_empty_on_either_side_are_left_alone():
    read = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    write = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    a, b = canonical(read, write)
    assert a[:, :3].equal(read[:, :3]) and b[:3].equal(write[:3])
    assert a[0, 3] == b[3, 1] == 2.0


@pytest.mark.parametrize("scales", [(0, 0), (-12, 12), (20, 3), (-18, -18), (-30, 30), (18, 18)])
def test_product_and_supports_stay_at_any_scale(scales: tuple[int, int]):
    g = torch.Generator().manual_seed(0)
    read = torch.randn(6, 5, generator=g) * (torch.rand(6, 5, generator=g) < 0.6) * 10.0 ** scales[0]
    write = torch.randn(5, 7, generator=g) * (torch.rand(5, 7, generator=g) < 0.6) * 10.0 ** scales[1]
    a, b = canonical(read, write)
    assert torch.equal(a != 0, read != 0) and torch.equal(b != 0, write != 0)
    torch.testing.assert_close(a.double() @ b.double(), read.double() @ write.double(), rtol=1e-5, atol=0)
    # Norms in float64: the squares of 1e-30 are no float32.
    torch.testing.assert_close(a.double().norm(dim=0), b.double().norm(dim=1), rtol=1e-5, atol=0)
    assert bool((b.gather(1, b.abs().argmax(1, keepdim=True)) > 0).all())


def test_idempotent_to_rounding():
    g = torch.Generator().manual_seed(1)
    once = canonical(torch.randn(6, 5, generator=g), 100 * torch.randn(5, 7, generator=g))
    for a, b in zip(canonical(*once), once, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)


@pytest.mark.parametrize("preset", ["best", "paper"])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_every_result_has_it(preset: str, scale: float):
    factors = solve(scale * weight_of((20, 32)), gram_of(20), preset=preset)
    read, write = factors.read.double(), factors.write.double()
    assert bool(factors.valid_units.any())
    read, write = read[:, factors.valid_units], write[factors.valid_units]
    torch.testing.assert_close(read.norm(dim=0), write.norm(dim=1), rtol=1e-4, atol=0)
    assert bool((write.gather(1, write.abs().argmax(1, keepdim=True)) > 0).all())
