"""Values on a fixed support: what a projection in training computes, its gradients, and values that reach zero."""

from dataclasses import replace

import pytest
import torch
from transformer_lens.hook_points import HookPoint

from swd_lens.train.finetune.mount import SMALLEST, Support, TrainedProjection
from swd_lens.units.factors import Factors
from swd_lens.units.integrity import Offsets
from swd_lens.units.projection import UnitProjection


def random_factors(offsets: bool = False) -> Factors:
    generator = torch.Generator().manual_seed(0)

    def sparse(*shape: int) -> torch.Tensor:
        mask = torch.rand(shape, generator=generator) < 0.4
        return torch.randn(shape, generator=generator) * mask

    f = Factors(sparse(6, 5), sparse(5, 7))
    return replace(f, offsets=Offsets(torch.randn(5, generator=generator), torch.randn(7, generator=generator))) if offsets else f


def projection(f: Factors) -> TrainedProjection:
    return TrainedProjection(f, HookPoint(), torch.zeros(1))


@pytest.mark.parametrize("offsets", [False, True])
@pytest.mark.parametrize("bias", [None, torch.arange(7.0)])
def test_it_computes_what_attached_units_compute(offsets, bias):
    f = random_factors(offsets)
    parts = (f.offsets.unit, f.offsets.out) if offsets else (None, None)
    h = torch.randn(2, 3, 6, generator=torch.Generator().manual_seed(1))
    expected = UnitProjection(f.read, f.write, HookPoint(), *parts)(h, bias)
    torch.testing.assert_close(projection(f)(h, bias, lambda h: h), expected, rtol=0, atol=1e-6)
    switched = projection(f)
    switched.bypassed = True  # the host's own product
    assert torch.equal(switched(h, None, lambda h: h * 3), h * 3)


def test_gradients_are_those_of_dense_factors_at_the_nonzeros():
    f, h = random_factors(), torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    p = projection(f)
    found = torch.autograd.grad(p(h, None, lambda h: h).pow(3).sum(), [p.read.values, p.write.values])
    read, write = f.read.clone().requires_grad_(), f.write.clone().requires_grad_()
    dense = torch.autograd.grad(((h @ read) @ write).pow(3).sum(), [read, write])
    for values, whole, factor in zip(found, dense, (f.read, f.write), strict=True):
        torch.testing.assert_close(values, whole[factor != 0])


def test_values_are_float32_whatever_the_host_and_one_that_became_zero_stays_an_edge():
    f = random_factors()
    p = TrainedProjection(f, HookPoint(), torch.zeros(1, dtype=torch.bfloat16))
    assert p.read.values.dtype == torch.float32
    y = p(torch.ones(2, 6, dtype=torch.bfloat16), torch.ones(7, dtype=torch.bfloat16), lambda h: h)
    assert y.dtype == torch.bfloat16
    read, write = p.factors(f)
    assert torch.equal(read, f.read) and torch.equal(write, f.write)
    f = random_factors()
    support = Support(f.read, "cpu")
    with torch.no_grad():
        support.values[:4] = torch.tensor([0.0, -0.0, 1e-45, -1e-40])
    support.keep_nonzero()
    assert support.values[:4].tolist() == [SMALLEST, -SMALLEST, SMALLEST, -SMALLEST]
    assert torch.equal(support.dense() != 0, f.read != 0)
    assert torch.equal(support.dense(torch.bfloat16) != 0, f.read != 0)  # the smallest number is one in bfloat16, too
