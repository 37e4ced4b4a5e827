"""Invariants of the solver (method.md §5.2). Numbers against the reference are in test_golden.py.

Equivariances are tested in float64: choosing a support amplifies rounding, and float32 would test luck.
"""

from dataclasses import replace

import pytest
import torch
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st
from torch import Tensor

from swd_lens.base.errors import BudgetError
from swd_lens.factorization.solve import solve as solve_by
from swd_lens.solver import DsfSpec, Step, dsf, plan_budget, realised
from swd_lens.units.factors import Factors
from tests.solver.matrices import SHAPES, gram_of, weight_of


def solve(weight: Tensor, gram: Tensor | None = None, sparsity: float = 0.5, **options: object) -> Factors:
    return solve_by(weight, gram, sparsity, preset="paper", **options)


def product64(weight: Tensor, gram: Tensor | None, sparsity: float = 0.5, **overrides: object) -> Tensor:
    spec = DsfSpec(**{"outer_iterations": 12, **overrides})
    metric = None if gram is None else gram.double()
    read, write = dsf.factorize(weight.double(), metric, plan_budget(*weight.shape, sparsity, spec), spec)
    return read @ write


def assert_same_bits(one, other) -> None:
    assert torch.equal(one.read, other.read) and torch.equal(one.write, other.write)


# ---------------------------------------------------------------------- counts and supports


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("calibrated", [True, False])
@pytest.mark.parametrize("rounding", ["reference", "exact"])
def test_counts_are_the_planned_ones(shape: tuple[int, int], calibrated: bool, rounding: str):
    factors = solve(weight_of(shape), gram_of(shape[0]) if calibrated else None, 0.6, rounding=rounding)
    spec = DsfSpec(rounding=rounding)
    budget = plan_budget(*shape, 0.6, spec)
    n = min(shape)
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


# ---------------------------------------------------------------------- invariances


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("c", [0.5, 2.0, 2.0**40, 2.0**-40])
def test_clean_arithmetic_ignores_the_scale_of_the_gram_to_the_bit(shape: tuple[int, int], c: float):
    weight, gram = weight_of(shape), gram_of(shape[0])
    assert_same_bits(solve(weight, gram, arithmetic="clean"), solve(weight, c * gram, arithmetic="clean"))


def test_both_arithmetics_are_the_same_method():
    weight, gram = weight_of((20, 32)), gram_of(20)
    clean, reference = (product64(weight, gram, arithmetic=a) for a in ("clean", "reference"))
    torch.testing.assert_close(clean, reference, rtol=1e-5, atol=1e-5)


# ---------------------------------------------------------------------- the call


def test_progress_callback():
    seen, errors = [], []

    def look(step: Step) -> None:
        seen.append((step.iteration, step.total))
        errors.append(step.relmse())

    weight, gram = weight_of((20, 32)), gram_of(20)
    factors = solve(weight, gram, outer_iterations=6, final_iterations=0, on_iteration=look)
    assert seen == [(t, 6) for t in range(1, 7)]
    # The alternation sees the Gram's diagonal only; without finalisation its last error is the result's own.
    assert errors[-1] == pytest.approx(factors.relmse(gram.diagonal().diag()), rel=1e-4)
    assert errors[0] > errors[-1] > 0


# ---------------------------------------------------------------------- any input


@settings(max_examples=40, deadline=None)
@given(
    d_in=st.integers(3, 14),
    d_out=st.integers(3, 14),
    sparsity=st.floats(0.02, 0.9),
    rank=st.integers(1, 14),
    calibrated=st.booleans(),
    arithmetic=st.sampled_from(["reference", "clean"]),
    seed=st.integers(0, 1000),
)
# Cholesky fails: rho is lost to rounding beside a Gram of rank one.
@example(d_in=10, d_out=3, sparsity=0.125, rank=1, calibrated=True, arithmetic="clean", seed=74)
def test_any_shape_sparsity_and_degenerate_gram(d_in, d_out, sparsity, rank, calibrated, arithmetic, seed):
    g = torch.Generator().manual_seed(seed)
    weight = torch.randn(d_in, d_out, generator=g)
    inputs = torch.randn(rank, d_in, generator=g)  # rank-deficient whenever rank < d_in
    gram = inputs.T @ inputs if calibrated else None
    try:
        factors = solve(weight, gram, sparsity, rounding="exact", arithmetic=arithmetic, outer_iterations=6)
    except BudgetError:
        assume(False)
        return
    assert bool(torch.isfinite(factors.read).all() and torch.isfinite(factors.write).all())
    budget = factors.settings["budget_square"] + factors.settings["budget_other"]
    # A unit that lost all its edges on one side has nothing to give on the other: only then K is not used up.
    assert factors.edges == budget or (factors.edges < budget and not bool(factors.valid_units.all()))
    assert budget <= (1 - sparsity) * weight.numel() + 1e-6
    assert factors.relmse(gram) < 1
