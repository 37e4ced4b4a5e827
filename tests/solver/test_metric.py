"""The metric, by hand on two inputs."""

import pytest
import torch

from swd_lens.base.errors import GramError
from swd_lens.solver.metric import Metric

WEIGHT = torch.tensor([[1.0, 0.0, 2.0], [0.0, 3.0, 0.0]])
# v = (2, 5); correlation 6 / (2 * 5) = .6.
GRAM = torch.tensor([[4.0, 6.0], [6.0, 25.0]])


def test_unit_diagonal_and_eigenvectors_by_hand():
    metric = Metric.of(GRAM, WEIGHT, 0.0)
    torch.testing.assert_close(metric.matrix, torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
    torch.testing.assert_close(metric.scale, torch.tensor([[2.0], [5.0]]))
    torch.testing.assert_close(metric.undo(torch.tensor([[2.0, 4.0], [5.0, 0.0]])), torch.tensor([[1.0, 2.0], [1.0, 0.0]]))
    values, vectors = Metric.of(GRAM, WEIGHT, 0.0).eigen
    torch.testing.assert_close(values, torch.tensor([0.4, 1.6]))  # 1 - .6, 1 + .6
    torch.testing.assert_close(vectors.abs(), torch.full((2, 2), 0.5**0.5))


def test_shrinkage_by_hand():
    before = GRAM.clone()
    # (1 - .25) * .6 = .45 off the diagonal, 1 on it; half of the Gram blended in leaves .225.
    metric = Metric.of(GRAM, WEIGHT, 0.25)
    torch.testing.assert_close(metric.matrix, torch.tensor([[1.0, 0.45], [0.45, 1.0]]))
    torch.testing.assert_close(metric.weigh(torch.eye(2)), torch.tensor([[1.0, 0.45], [0.45, 1.0]]))
    torch.testing.assert_close(metric.weigh(torch.eye(2), 0.5), torch.tensor([[1.0, 0.225], [0.225, 1.0]]))
    assert torch.equal(metric.weigh(torch.eye(2), 0.0), torch.eye(2))
    # The scales 2 and 5 go a quarter of the way, in logarithms, to their geometric mean, sqrt(10).
    torch.testing.assert_close(metric.scale, torch.tensor([[2**0.75 * 10**0.125], [5**0.75 * 10**0.125]]))
    torch.testing.assert_close(Metric.of(GRAM, WEIGHT, 1.0).scale, torch.full((2, 1), 10**0.5))
    assert Metric.of(GRAM, WEIGHT, 1.0).matrix is None and torch.equal(GRAM, before)


def test_error_by_hand():
    # Residual: the first row of diag(v) W, (2, 0, 4), squared 20; the whole has 20 + 15^2 = 245; C's .6 joins rows whose
    # supports do not meet, so it adds nothing.
    metric = Metric.of(GRAM, WEIGHT, 0.0)
    target = metric.scale * WEIGHT
    read, write = torch.tensor([[0.0], [1.0]]), torch.tensor([[0.0, 15.0, 0.0]])
    assert metric.error(target, read, write) == pytest.approx(20 / 245)
    # Two equal rows: r C r = 2 (1 + .6) per column, of 3.2 * 4 in all; half of each is left.
    ones = torch.ones(2, 4)
    assert metric.error(ones, torch.ones(2, 1), 0.5 * torch.ones(1, 4)) == pytest.approx(0.25)
    opposite = torch.tensor([[1.0], [-1.0]])  # residual (0, 2): 4 per column, of 3.2
    assert metric.error(ones, opposite, torch.ones(1, 4)) == pytest.approx(4 / 3.2)


def test_dead_inputs():
    # Input 1 is dead; rounding may leave it correlated with input 0.
    metric = Metric.of(torch.tensor([[4.0, 1e-9, 1.0], [1e-9, 0.0, 0.0], [1.0, 0.0, 1.0]]), torch.ones(3, 2), 0.0)
    torch.testing.assert_close(metric.scale.squeeze(1), torch.tensor([2.0, 0.0, 1.0]))
    assert metric.matrix is not None
    torch.testing.assert_close(metric.matrix[[0, 2]][:, [0, 2]], torch.tensor([[1.0, 0.5], [0.5, 1.0]]))
    assert metric.matrix[1, 1] == 0
    undone = metric.undo(torch.ones(3, 1))
    assert undone.squeeze(1).tolist() == [0.5, 1.0, 1.0]
    # Two dead inputs and two correlated ones: as many entries as inputs, but not on the diagonal.
    gram = torch.zeros(4, 4)
    gram[2:, 2:] = GRAM
    matrix = Metric.of(gram, torch.ones(4, 3), 0.0).matrix
    assert matrix is not None
    torch.testing.assert_close(matrix[2:, 2:], torch.tensor([[1.0, 0.6], [0.6, 1.0]]))
    # Live scales 2 and 1, geometric mean sqrt(2); half way: 2^.5 2^.25 and 2^.25.
    scale = Metric.of(torch.diag(torch.tensor([4.0, 0.0, 1.0])), torch.ones(3, 2), 0.5).scale
    torch.testing.assert_close(scale.squeeze(1), torch.tensor([2**0.75, 0.0, 2**0.25]))


@pytest.mark.parametrize("gram", [None, torch.eye(2), torch.diag(torch.tensor([4.0, 0.0]))])
def test_without_correlations_nothing_is_multiplied(gram: torch.Tensor | None):
    metric = Metric.of(gram, WEIGHT, 0.3)
    assert metric.matrix is None
    rows = torch.randn(2, 3)
    assert metric.weigh(rows) is rows


def test_not_positive_semi_definite():
    with pytest.raises(GramError, match="not positive semi-definite"):
        Metric.of(torch.tensor([[1.0, 1.1], [1.1, 1.0]]), WEIGHT, 0.0)
    Metric.of(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), WEIGHT, 0.0)  # one direction only: a Gram of one token
