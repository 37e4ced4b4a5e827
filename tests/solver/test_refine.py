"""Refinement descends, ends at the least-squares solution, and keeps supports."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import conjugate_gradient, refine
from tests.solver.matrices import SHAPES, gram_of, weight_of


def problem(shape: tuple[int, int], calibrated: bool = True, width: int = 12) -> tuple[Metric, Tensor, Tensor, Tensor]:
    """Metric, target, and random sparse factors to start from, in float64."""
    g = torch.Generator().manual_seed(3)
    weight = weight_of(shape).double()
    metric = Metric.of(gram_of(shape[0]).double() if calibrated else None, weight, 0.0)
    read = torch.randn(shape[0], width, generator=g) * (torch.rand(shape[0], width, generator=g) < 0.4)
    write = torch.randn(width, shape[1], generator=g) * (torch.rand(width, shape[1], generator=g) < 0.4)
    return metric, metric.scale * weight, 0.1 * read.double(), 0.1 * write.double()


def test_one_entry_by_hand():
    # Least squares 2 x = 6 and 5 y = 10 with y off the support: x = 3 after one step, y stays 0.
    normal = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    support = torch.tensor([[1.0], [0.0]])
    x = conjugate_gradient(
        torch.zeros(2, 1), torch.tensor([[6.0], [10.0]]), support, lambda p: normal @ p, normal.diagonal()[:, None], 1
    )
    assert x.tolist() == [[3.0], [0.0]]


def test_it_reaches_the_least_squares_solution_and_descends_at_every_step():
    g = torch.Generator().manual_seed(0)
    factor = torch.randn(10, 6, generator=g, dtype=torch.float64)
    normal, rhs = factor.T @ factor, torch.randn(6, 3, generator=g, dtype=torch.float64)
    support = (torch.rand(6, 3, generator=g) < 0.6).double()

    def after(steps: int) -> Tensor:
        return conjugate_gradient(torch.zeros_like(rhs), rhs, support, lambda p: normal @ p, normal.diagonal()[:, None], steps)

    def objective(x: Tensor) -> float:
        return float((x * (normal @ x)).sum() / 2 - (x * rhs).sum())

    values = [objective(after(steps)) for steps in range(9)]
    assert values[0] == 0 and all(later < earlier for earlier, later in pairwise(values))
    exact = torch.zeros_like(rhs)
    for j in range(3):  # columns are independent: solve each on its support
        on = support[:, j].bool()
        exact[on, j] = torch.linalg.solve(normal[on][:, on], rhs[on, j])
    torch.testing.assert_close(after(40), exact, rtol=1e-8, atol=1e-8)


def test_nothing_to_solve():
    zero = torch.zeros(2, 3)
    x = conjugate_gradient(zero, zero, torch.ones(2, 3), lambda p: p, torch.ones(2, 1), 8)
    assert torch.equal(x, zero)
    # An operator of zeros: no unit of the other factor is in use.
    x = conjugate_gradient(zero, torch.ones(2, 3), torch.ones(2, 3), lambda p: 0 * p, torch.zeros(2, 1), 8)
    assert torch.equal(x, zero)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [True, False])
def test_the_error_never_rises_and_supports_stay(shape: tuple[int, int], calibrated: bool):
    metric, target, read, write = problem(shape, calibrated)
    errors = [metric.error(target, *refine(read, write, target, metric, rounds, 2)) for rounds in range(7)]
    assert errors[0] == metric.error(target, read, write)
    assert all(later <= earlier for earlier, later in pairwise(errors))
    assert errors[-1] < 0.8 * errors[0]
    copies = read.clone(), write.clone(), target.clone()
    a, b = refine(read, write, target, metric, 6, 2)
    assert all(torch.equal(*pair) for pair in zip((read, write, target), copies, strict=True))  # the start is left alone
    assert torch.equal(a != 0, read != 0) and torch.equal(b != 0, write != 0)


def test_the_write_factor_alone_is_weighted_least_squares():
    """One round of many steps: the write factor before the read factor's turn is the exact solution under C."""
    metric, target, read, write = problem((20, 32))
    assert metric.matrix is not None
    normal = read.T @ metric.matrix @ read
    b = conjugate_gradient(
        write, read.T @ metric.matrix @ target, (write != 0).double(), lambda p: normal @ p, normal.diagonal()[:, None], 400
    )
    gradient = read.T @ metric.matrix @ (target - read @ b)
    assert float(gradient[write != 0].abs().max()) < 1e-6 * float(gradient.abs().max())
    assert metric.error(target, read, b) < metric.error(target, read, write)


def test_parallel_units_do_not_blow_up():
    """Two units that read the same: a singular system in float32. Steps along rounding errors once gave a relMSE of 142."""
    target = torch.tensor([[0.5, 1.5, -0.5, -0.6, 2.0], [-1.0, 0.3, 0.2, 0.9, 0.1]])
    read = torch.tensor([[1.0, 1.0], [0.0, 0.0]])
    write = torch.tensor([[0.0, 1.0, 0.0, -0.5, 1.0], [0.5, 0.0, 0.0, 0.0, 1.0]])
    metric = Metric.of(None, target, 0.0)
    before = metric.error(target, read, write)
    for rounds in (1, 3, 10):
        a, b = refine(read, write, target, metric, rounds, 8)
        assert metric.error(target, a, b) < before and float(b.abs().max()) < 10
