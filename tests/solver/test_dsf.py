"""Invariants of the solver (method.md §5.2). Numbers against the reference are in test_golden.py.

Equivariances are tested in float64: choosing a support amplifies rounding, and float32 would test luck.
"""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from swd_lens.factorization.solve import solve as solve_by
from swd_lens.solver import DsfSpec, dsf, plan_budget, realised
from swd_lens.units.factors import Factors
from tests.solver.matrices import SHAPES, gram_of, weight_of


def solve(weight: Tensor, gram: Tensor | None = None, sparsity: float = 0.5, **options: object) -> Factors:
    return solve_by(weight, gram, sparsity, preset="paper", **options)


def product64(weight: Tensor, gram: Tensor | None, sparsity: float = 0.5, **overrides: object) -> Tensor:
    spec = DsfSpec(**{"outer_iterations": 12, **overrides})
    metric = None if gram is None else gram.double()
    read, write = dsf.factorize(weight.double(), metric, plan_budget(*weight.shape, sparsity, spec), spec)
    return read @ write


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("calibrated", "rounding"), [(True, "reference"), (False, "exact")])
def test_counts_are_the_planned_ones(shape: tuple[int, int], calibrated: bool, rounding: str):
    factors = solve(weight_of(shape), gram_of(shape[0]) if calibrated else None, 0.6, rounding=rounding)
    spec, n = DsfSpec(rounding=rounding), min(shape)
    budget = plan_budget(*shape, 0.6, spec)
    square, other = (factors.write, factors.read) if shape[0] > shape[1] else (factors.read, factors.write)
    assert square.shape == (n, n)
    assert int(square.count_nonzero()) == realised(n * n, budget.square, spec)
    assert int(other.count_nonzero()) == realised(shape[0] * shape[1], budget.other, spec)
    assert factors.settings["nonzeros_read"] + factors.settings["nonzeros_write"] == factors.edges


@pytest.mark.parametrize("shape", SHAPES)
def test_finalisation_keeps_supports_and_read_and_lowers_the_loss(shape: tuple[int, int]):
    weight, gram = weight_of(shape), gram_of(shape[0])
    # Before the canonical form, which shares a unit's norm between both factors.
    spec = DsfSpec()
    budget = plan_budget(*shape, 0.5, spec)
    read, before = dsf.factorize(weight, gram, budget, replace(spec, final_iterations=0))
    same_read, after = dsf.factorize(weight, gram, budget, spec)
    assert torch.equal(read, same_read)
    assert torch.equal(before != 0, after != 0)
    assert not torch.equal(before, after)
    assert Factors(read, after).relmse(gram, weight) <= Factors(read, before).relmse(gram, weight) * (1 + 1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_clean_arithmetic_ignores_the_scale_of_the_gram_to_the_bit(shape: tuple[int, int]):
    weight, gram = weight_of(shape), gram_of(shape[0])
    plain = solve(weight, gram, arithmetic="clean")
    for c in (0.5, 2.0**40, 2.0**-40):
        again = solve(weight, c * gram, arithmetic="clean")
        assert torch.equal(again.read, plain.read) and torch.equal(again.write, plain.write)


def test_both_arithmetics_are_the_same_method():
    weight, gram = weight_of((20, 32)), gram_of(20)
    clean, reference = (product64(weight, gram, arithmetic=a) for a in ("clean", "reference"))
    torch.testing.assert_close(clean, reference, rtol=1e-5, atol=1e-5)


def test_progress_callback():
    errors: list[float] = []
    weight, gram = weight_of((20, 32)), gram_of(20)
    factors = solve(weight, gram, outer_iterations=6, final_iterations=0, on_iteration=lambda step: errors.append(step.relmse()))
    # The alternation sees the Gram's diagonal only; without finalisation its last error is the result's own.
    assert errors[-1] == pytest.approx(factors.relmse(gram.diagonal().diag()), rel=1e-4)
    assert len(errors) == 6 and errors[0] > errors[-1] > 0


def test_where_cholesky_fails_the_inverse_is_that_of_lu():
    normal = torch.tensor([[0.0, 1.0], [1.0, 0.0]])
    for arithmetic in ("reference", "clean"):
        inverse = dsf._inverse(normal, 0.1, DsfSpec(arithmetic=arithmetic))
        torch.testing.assert_close(inverse @ (normal + 0.1 * torch.eye(2)), torch.eye(2))
