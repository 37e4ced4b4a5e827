"""Rotations of a few units (rotate.py): planted factors are found, others are not made worse."""

import pytest
import torch
from torch import Tensor

from swd_lens.solver import solve
from swd_lens.solver.metric import Metric
from swd_lens.solver.rotate import exchange, near_residual, rotated
from swd_lens.solver.span import cut
from tests.benchmarks.planted import Planted, Row, error, planted, support_f1
from tests.solver.matrices import weight_of

ROW = Row(96, 32, 32, 6, 8)


def double(truth: Planted) -> Planted:
    return Planted(truth.read.double(), truth.write.double(), truth.weight.double(), None)


def mixed_up(truth: Planted, units: list[int]) -> tuple[Tensor, Tensor]:
    """The planted factors with some units mixed: the same product, dense in these units."""
    mix = torch.eye(len(units), dtype=truth.read.dtype) + 0.7
    read, write = truth.read.clone(), truth.write.clone()
    read[:, units], write[units] = read[:, units] @ mix, torch.linalg.inv(mix) @ write[units]
    return read, write


@pytest.mark.parametrize("by_output", [False, True])
def test_mixed_units_are_parted_again(by_output: bool):
    truth = double(planted(ROW, 0))
    read, write = mixed_up(truth, [3, 7, 12])
    assert int(cut(read, write, truth.edges)[0].count_nonzero()) != int(truth.read.count_nonzero())
    found = exchange(read, write, truth.weight, torch.tensor([3, 7, 12]), by_output=by_output)
    assert found is not None
    assert torch.allclose(found[0] @ found[1], truth.weight, atol=1e-4)
    sparse = cut(*found, truth.edges)
    assert support_f1(truth, *sparse) > 0.99 and error(truth, *sparse) < 0.01
    assert torch.equal(read[:, :3], found[0][:, :3])  # other units stay


def test_rotations_lower_the_error_with_as_many_entries():
    truth = double(planted(ROW, 0))
    start = cut(*mixed_up(truth, [3, 7, 12]), truth.edges)
    metric = Metric.of(None, truth.weight, 0.0)
    found, again = (rotated(*start, truth.weight, metric, 40, seed=0) for _ in range(2))
    assert error(truth, *found) < 0.1 * error(truth, *start)
    assert int(found[0].count_nonzero() + found[1].count_nonzero()) <= truth.edges
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    assert all(torch.equal(a, b) for a, b in zip(rotated(*start, truth.weight, metric, 0, seed=0), start, strict=True))


def test_units_near_the_residual_are_drawn():
    """A residual in one entry: only units that reach its row or its column are near."""
    truth = double(planted(ROW, 0))
    weight = truth.weight.clone()
    row, column = int(truth.read[:, 0].argmax()), int(truth.write[0].argmax())  # an entry that unit 0 has
    weight[row, column] += 1.0
    g = torch.Generator().manual_seed(0)
    reach = (truth.read[row] != 0) | (truth.write[:, column] != 0)
    for _ in range(5):
        some = near_residual(truth.read, truth.write, weight, g)
        assert 2 <= len(some) <= 10 and len(set(some.tolist())) == len(some)
        assert 0 in some and int(reach[some].sum()) == min(int(reach.sum()), len(some))


def test_an_ordinary_matrix_is_not_made_worse():
    weight = weight_of((32, 20)).double()
    solution = solve(weight, None, 0.5)
    read, write = solution.read.double(), solution.write.double()
    found = rotated(read, write, weight, Metric.of(None, weight, 0.0), 15, seed=0)
    metric = Metric.of(None, weight, 0.0)
    assert metric.error(weight, *found) <= metric.error(weight, read, write)


@pytest.mark.slow
def test_deep_finds_planted_factors():
    truth = planted(Row(48, 24, 24, 4, 4), 0)
    sparsity = 1 - truth.edges / truth.weight.numel()
    without, found = (solve(truth.weight, None, sparsity, preset="deep", rotations=n) for n in (0, 200))
    assert error(truth, found.read, found.write) <= error(truth, without.read, without.write)
    assert support_f1(truth, found.read, found.write) >= support_f1(truth, without.read, without.write)
