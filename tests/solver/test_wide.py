"""Block updates of more units than the other side has coordinates: each solver beside its formula (wide.py)."""

import pytest
import torch

from swd_lens.factorization.solve import solve
from swd_lens.solver import wide
from swd_lens.solver.metric import Metric
from tests.solver.matrices import gram_of, weight_of

UNITS, INPUTS, OUTPUTS, C = 9, 7, 4, 0.35


def drawn(*shape):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def eye(n):
    return torch.eye(n, dtype=torch.float64)


def solution(solver, rhs):
    return solver(rhs.clone(), torch.empty_like(rhs))[0]


def metric_of(n):
    gram = gram_of(n).double()
    return Metric.of((gram + gram.T) / 2, weight_of((n, OUTPUTS)).double(), 0.0)  # in float32 it is not symmetric to the bit


def mixed_of(metric, blend):
    assert metric.matrix is not None
    return (1 - blend) * eye(len(metric.matrix)) + blend * metric.matrix


def test_the_read_factor_against_a_matrix_of_few_outputs():
    unit, goal, right = drawn(UNITS, OUTPUTS), drawn(INPUTS, OUTPUTS), drawn(INPUTS, UNITS)
    expected = (goal @ unit.T + right) @ torch.linalg.inv(unit @ unit.T + C * eye(UNITS))
    torch.testing.assert_close(solution(wide.right_solver(unit, goal, C), right), expected)


@pytest.mark.parametrize("n_outputs", [OUTPUTS, 1])
def test_the_read_factor_in_the_metric(n_outputs):
    unit, goal, right = drawn(UNITS, n_outputs), drawn(INPUTS, n_outputs), drawn(INPUTS, UNITS)
    metric, blend, ridge, rho = metric_of(INPUTS), 0.6, 0.01, 0.34
    mixed, rhs = mixed_of(metric, blend), goal @ unit.T + right
    found = solution(wide.kronecker_solver(metric, unit, goal, blend, ridge, rho), right)
    inside = unit @ torch.linalg.pinv(unit)  # onto the column space
    of_both = mixed @ found @ (unit @ unit.T + ridge * inside) + rho * found @ inside
    torch.testing.assert_close(of_both @ inside, rhs @ inside)
    beyond = eye(UNITS) - inside
    torch.testing.assert_close((ridge + rho) * found @ beyond, rhs @ beyond)


@pytest.mark.parametrize("blend", [0.0, 0.6])
def test_the_write_factor_against_a_matrix_of_few_inputs(blend):
    read, goal, right, metric = drawn(INPUTS, UNITS), drawn(INPUTS, OUTPUTS), drawn(UNITS, OUTPUTS), metric_of(INPUTS)
    mixed = mixed_of(metric, blend)
    expected = torch.linalg.solve(read.T @ mixed @ read + C * eye(UNITS), read.T @ goal + right)
    torch.testing.assert_close(solution(wide.left_solver(metric, read, goal, blend, C), right), expected)


def test_the_write_factor_where_the_gram_has_few_directions():
    """A root of C_g that is zero divides nothing: the solution is that of the normal equations."""
    read, goal, right, few = drawn(INPUTS, UNITS), drawn(INPUTS, OUTPUTS), drawn(UNITS, OUTPUTS), drawn(INPUTS, 3)
    metric = Metric.of(few @ few.T, weight_of((INPUTS, OUTPUTS)).double(), 0.0)
    mixed = mixed_of(metric, 1.0)
    expected = torch.linalg.solve(read.T @ mixed @ read + C * eye(UNITS), read.T @ goal + right)
    torch.testing.assert_close(solution(wide.left_solver(metric, read, goal, 1.0, C), right), expected)


def test_against_a_matrix_of_few_entries():
    read = eye(40)
    read[3, 5], read[20, 1] = 0.7, -1.2
    rows, metric = wide.as_sparse(read.T), metric_of(40)
    assert rows is not None and wide.as_sparse(drawn(6, 6)) is None
    normal = wide.sparse_normal(rows, read, metric, 0.6)
    mixed = mixed_of(metric, 0.6)
    torch.testing.assert_close(normal, read.T @ mixed @ read)
    torch.testing.assert_close(wide.sparse_normal(rows, read), read.T @ read)
    rhs = drawn(40, OUTPUTS)
    expected = torch.linalg.solve(normal + C * eye(40), rhs)
    torch.testing.assert_close(solution(wide.cholesky_solver(normal.clone(), C), rhs), expected)
    torch.testing.assert_close(solution(wide.cholesky_right_solver(normal.clone(), C), rhs.T), expected.T)


@pytest.mark.parametrize("shape, basis", [((96, 32), "input"), ((32, 96), "output")])
def test_a_named_side_has_the_error_of_plain_updates(shape, basis, monkeypatch):
    weight, gram = weight_of(shape), gram_of(shape[0])
    of_wide = solve(weight, gram, basis=basis).relmse(gram)
    monkeypatch.setattr(wide, "is_wide", lambda *_: False)
    assert of_wide <= 1.05 * solve(weight, gram, basis=basis).relmse(gram)
