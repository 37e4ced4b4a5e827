"""Sparsest basis of a span (span.py) and rotations of a few units (rotate.py): planted factors are found, others left alone."""

import pytest
import torch
from torch import Tensor

from swd_lens.solver import solve
from swd_lens.solver.span import SPARSE, WHOLE, cut, from_span, main_directions, share_of_entries, sparse_vectors, sparsest_basis
from tests.benchmarks.planted import Planted, Row, error, planted, support_f1
from tests.solver.matrices import weight_of

ROW = Row(96, 32, 32, 6, 8)


def double(truth: Planted) -> Planted:
    return Planted(truth.read.double(), truth.write.double(), truth.weight.double(), None)


def cosines(found: Tensor, truth: Tensor) -> Tensor:
    """Of each true column, the largest |cosine| with a found one."""
    normed = torch.nn.functional.normalize
    return (normed(found, dim=0).T @ normed(truth, dim=0)).abs().amax(0)


def test_a_sparse_vector_meets_its_constraint_and_is_the_planted_one():
    """The plane of e1 + e2 and (1, 1, 1, -1, 0, ...): each coordinate's sparsest vector has two entries."""
    plane = torch.zeros(9, 2)
    plane[:2, 0], plane[2:4, 1] = 1.0, torch.tensor([1.0, -1.0])
    mixed = plane @ torch.tensor([[1.0, 0.4], [0.5, 1.0]])
    basis = main_directions(mixed, 2)
    constraints = basis[[0, 3]].T.contiguous()
    y = sparse_vectors(basis, constraints, (60, 60))
    assert (constraints * y).sum(0) == pytest.approx(torch.ones(2), abs=1e-5)
    expected = torch.stack([plane[:, 0], -plane[:, 1]], 1)
    assert torch.allclose(basis @ y, expected, atol=1e-3)


@pytest.mark.parametrize("row", [ROW, Row(128, 64, 32, 8, 8), Row(128, 64, 64, 8, 8)])
def test_the_sparsest_basis_is_the_planted_one(row: Row):
    truth = double(planted(row, 0))
    basis = main_directions(truth.weight, row.units)
    assert torch.allclose(basis.T @ basis, torch.eye(basis.shape[1], dtype=torch.float64), atol=1e-6)
    coefficients = sparsest_basis(basis.float())
    assert coefficients.norm(dim=0) == pytest.approx(torch.ones(row.units), abs=1e-4)
    found = cosines(basis @ coefficients.double(), truth.read)
    assert float((found > 0.99).double().mean()) > 0.85
    assert float(found.mean()) > cosines(basis, truth.read).mean() + 0.3


def test_two_worths_decide_between_the_factors():
    """Read norms 5 and 1, write norms 2 and 1: worth 3*2, 4*2 and 1*1; 2*5 and 1*1; the largest of each unit and side stays."""
    read = torch.tensor([[3.0, 0.0], [4.0, 0.0], [0.0, 1.0]])
    write = torch.tensor([[2.0, 0.0], [0.0, 1.0]])
    assert cut(read, write, 4)[0].tolist() == [[0.0, 0.0], [4.0, 0.0], [0.0, 1.0]]
    assert all(torch.equal(*pair) for pair in zip(cut(read, write, 5), (read, write), strict=True))


@pytest.mark.parametrize("turned", [False, True])
def test_factors_of_a_planted_product(turned: bool):
    truth = double(planted(ROW, 1))
    found = from_span(truth.weight.T.contiguous() if turned else truth.weight, 32, truth.edges)
    assert found is not None
    read, write = (found[1].T, found[0].T) if turned else found
    assert int(read.count_nonzero() + write.count_nonzero()) <= truth.edges
    assert error(truth, read, write) < 0.05 and support_f1(truth, read, write) > 0.9


def test_a_weight_of_lower_rank_fills_up_with_its_largest_inputs():
    truth = double(planted(Row(96, 32, 24, 6, 8), 0))
    found = from_span(truth.weight, 32, 600)
    assert found is not None and found[0].shape == (96, 32)
    assert float((truth.weight - found[0] @ found[1]).norm() / truth.weight.norm()) < 0.05


@pytest.mark.parametrize(("shape", "units"), [((96, 32), 32), ((32, 96), 32), ((48, 48), 48), ((48, 40), 40), ((96, 32), 40)])
def test_ordinary_matrices_and_wide_factorizations_are_left_alone(shape: tuple[int, int], units: int):
    weight = weight_of(shape)
    assert from_span(weight.double(), units, 900) is None
    ours, plain = (solve(weight, None, 0.7, units=units, start=start, outer_iterations=8) for start in ("auto", "coordinates"))
    assert torch.equal(ours.read, plain.read) and torch.equal(ours.write, plain.write)


def test_nothing_is_sparse_in_a_random_span_and_a_planted_one_shows():
    g = torch.Generator().manual_seed(0)
    assert share_of_entries(main_directions(torch.randn(128, 64, generator=g), 64)) > SPARSE
    assert share_of_entries(main_directions(planted(Row(128, 64, 64, 8, 8), 0).weight, 64)) < SPARSE
    assert share_of_entries(torch.zeros(128, 0)) == 1
    assert WHOLE.rounds > 1  # what the tests above search with


def test_best_finds_what_it_missed_from_coordinates():
    row = Row(128, 64, 64, 16, 8)  # too dense for its pieces to be seen
    truth = planted(row, 1)
    sparsity = 1 - truth.edges / truth.weight.numel()
    steps: list[int] = []
    found = solve(truth.weight, None, sparsity, units=64, on_iteration=lambda step: steps.append(step.iteration))
    plain = solve(truth.weight, None, sparsity, units=64, start="coordinates")
    assert support_f1(truth, found.read, found.write) > 0.97 > 0.95 > support_f1(truth, plain.read, plain.write)
    assert error(truth, found.read, found.write) < 0.1 * error(truth, plain.read, plain.write)
    assert steps == list(range(40, 57))  # it stands nearly there, and begins late
    named = [solve(truth.weight, None, 0.8, basis="output", start=start) for start in ("auto", "coordinates")]
    assert torch.equal(named[0].read, named[1].read)
