"""Pruning of singular vectors (svd_prune.py): supports by hand and by plain loops, K exact, least squares on the supports."""

import math

import pytest
import torch
from torch import Tensor

from swd_lens.base.errors import BudgetError
from swd_lens.solver import Step, solve
from swd_lens.solver.svd_prune import _support
from tests.solver.matrices import gram_of, weight_of

SHAPES = [(24, 10), (10, 24), (16, 16)]
PLAIN = {"preset": "svd_pruned", "precision": "float64"}


def error_of(product: Tensor, weight: Tensor, gram: Tensor) -> float:
    """The relMSE under a Gram."""
    missed = weight.double() - product.double()
    return float((missed * (gram.double() @ missed)).sum() / (weight.double() * (gram.double() @ weight.double())).sum())


def svd_of(weight: Tensor) -> tuple[Tensor, Tensor]:
    left, singular, right = torch.linalg.svd(weight.double(), full_matrices=False)
    return left * singular.sqrt(), singular.sqrt()[:, None] * right


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("sparsity", "calibrated"), [(0.3, True), (0.5, False), (0.75, True), (0.9, False)])
def test_k_is_exact_and_every_kept_unit_reads_and_writes(shape, sparsity, calibrated):
    weight = weight_of(shape)
    solution = solve(weight, gram_of(shape[0]) if calibrated else None, sparsity, **PLAIN)
    read, write = solution.read, solution.write
    assert read.shape == (shape[0], min(shape)) and write.shape == (min(shape), shape[1])
    assert int(read.count_nonzero() + write.count_nonzero()) == int(round((1 - sparsity) * weight.numel(), 6))
    assert torch.equal(read.any(0), write.any(1))
    assert solution.solver == "svd_prune" and solution.settings["units"] == min(shape)
    torch.testing.assert_close(read.norm(dim=0), write.norm(dim=1))  # canonical scale


@pytest.mark.parametrize("shape", SHAPES)
def test_a_weight_whose_singular_vectors_fit_in_k_is_its_svd(shape):
    rank = 3
    weight = torch.randn(shape[0], rank, generator=torch.Generator().manual_seed(0)) @ torch.randn(
        rank, shape[1], generator=torch.Generator().manual_seed(1)
    )
    # K is all but an entry; the three units have 3 (d_in + d_out) of them, fewer than K.
    sparsity = 1 / weight.numel()
    solution = solve(weight, gram_of(shape[0]), sparsity, **PLAIN)
    assert int(solution.read.count_nonzero()) == rank * shape[0]
    assert int(solution.write.count_nonzero()) == rank * shape[1]
    read, write = svd_of(weight)
    for i in range(rank):  # largest singular value first; the sign of a pair is free
        one, other = solution.read[:, i : i + 1] @ solution.write[i : i + 1], read[:, i : i + 1] @ write[i : i + 1]
        torch.testing.assert_close(one, other.float(), rtol=1e-4, atol=1e-5)
    assert not solution.read[:, rank:].any() and not solution.write[rank:].any()


def test_the_support_is_of_the_entries_that_cost_most_to_leave_out():
    # Singular values and inputs of about one size: every unit is large enough to open by itself.
    weight = torch.linalg.qr(torch.randn(14, 9, generator=torch.Generator().manual_seed(0))).Q * torch.linspace(1, 2, 9)
    inputs = torch.randn(60, 14, generator=torch.Generator().manual_seed(1))
    gram = inputs.T @ inputs / 60
    solution = solve(weight, gram, 0.5, **PLAIN, refine_rounds=0)
    read, write = svd_of(weight)
    g = gram.double()
    worth = []  # by leaving out every entry in turn
    for factor, kept in ((read, solution.read), (write, solution.write)):
        for i, j in torch.cartesian_prod(*map(torch.arange, factor.shape)).tolist():
            less = factor.clone()
            less[i, j] = 0.0
            missed = read @ write - (less @ write if factor is read else read @ less)
            worth.append((float((missed * (g @ missed)).sum()), bool(kept[i, j])))
    worth.sort(reverse=True)
    n_kept = sum(kept for _, kept in worth)
    assert n_kept == 63 and all(kept for _, kept in worth[:63])
    # Without refinement the values are those of the SVD.
    read_kept, product = solution.read != 0, solution.read @ solution.write
    torch.testing.assert_close(product, ((read * read_kept) @ (write * (solution.write != 0))).float())


def test_activation_aware_and_refitted_is_better_than_pruning_by_magnitude():
    for shape in SHAPES:
        weight, gram = weight_of(shape), gram_of(shape[0])
        solution = solve(weight, gram, 0.5, **PLAIN)
        read, write = svd_of(weight)
        entries = torch.cat([read.flatten(), write.flatten()]).abs()
        least = entries.sort(descending=True).values[weight.numel() // 2 - 1]
        plain = (read * (read.abs() >= least)) @ (write * (write.abs() >= least))
        ours = error_of(solution.read @ solution.write, weight, gram)
        unrefined = solve(weight, gram, 0.5, **PLAIN, refine_rounds=0)
        assert ours < error_of(unrefined.read @ unrefined.write, weight, gram) < error_of(plain, weight, gram)


def test_values_are_least_squares_on_the_support():
    weight, gram = weight_of((12, 7)), gram_of(12)
    solution = solve(weight, gram, 0.5, **PLAIN, refine_rounds=400, refine_steps=40)
    read, write, g = solution.read.double(), solution.write.double(), gram.double()
    missed = g @ (weight.double() - read @ write)
    scale = g @ weight.double()
    # The gradient of the error is zero on either support.
    for gradient, whole, support in (
        (read.T @ missed, read.T @ scale, write != 0),
        (missed @ write.T, scale @ write.T, read != 0),
    ):
        assert float(gradient[support].abs().max()) < 1e-3 * float(whole.abs().max())


def test_the_error_falls_with_every_round():
    steps: list[float] = []

    def on_iteration(step: Step) -> None:
        assert step.total == 5 and step.iteration == len(steps) + 1
        steps.append(step.relmse())

    weight, gram = weight_of((16, 16)), gram_of(16)
    solution = solve(weight, gram, 0.5, **PLAIN, refine_rounds=5, on_iteration=on_iteration)
    assert len(steps) == 5 and steps == sorted(steps, reverse=True) and steps[0] > steps[-1]
    assert steps[-1] == pytest.approx(error_of(solution.read @ solution.write, weight, gram), rel=1e-4)


# Two units; worth of reads (2 inputs) and writes (2 outputs). In order: r00 9, w01 8, r10 7, w00 6, w11 5, w10 4, r01 3, r11 2.
READ, WRITE = torch.tensor([[9.0, 3.0], [7.0, 2.0]]), torch.tensor([[6.0, 8.0], [4.0, 5.0]])


def test_a_units_first_entry_brings_one_of_the_other_side():
    for edges, read, write in (
        (2, [[1, 0], [0, 0]], [[0, 1], [0, 0]]),  # the first entry of unit 0 and the best of its other side
        (3, [[1, 0], [1, 0]], [[0, 1], [0, 0]]),
        (4, [[1, 0], [1, 0]], [[1, 1], [0, 0]]),
        # A fifth edge is too little for unit 1, which opens with w11 and r01, and unit 0 has no further entry.
        (5, [[1, 0], [1, 0]], [[1, 1], [0, 0]]),
        (6, [[1, 1], [1, 0]], [[1, 1], [0, 1]]),
        (7, [[1, 1], [1, 0]], [[1, 1], [1, 1]]),
        (9, [[1, 1], [1, 1]], [[1, 1], [1, 1]]),
    ):
        kept_read, kept_write = _support(READ, WRITE, edges)
        assert kept_read.int().tolist() == read and kept_write.int().tolist() == write, edges
    # r0 9, w0 8 of unit 0; r1 7, w1 6 of unit 1; then w0' 5: of three edges unit 1 would take two, so unit 0 takes one more.
    kept_read, kept_write = _support(torch.tensor([[9.0, 7.0]]), torch.tensor([[8.0, 5.0], [6.0, 0.0]]), 3)
    assert kept_read.tolist() == [[True, False]] and kept_write.tolist() == [[True, True], [False, False]]


def test_equal_units_and_inputs_that_are_never_active():
    solution = solve(torch.eye(10), None, 0.9, **PLAIN)  # K = 10: of ten equal units of two edges
    assert int(solution.read.count_nonzero()) == int(solution.write.count_nonzero()) == 5
    assert torch.equal(solution.read.any(0), solution.write.any(1))
    solution = solve(weight_of((12, 8)), gram_of(12, dead=(3, 7)), 0.5, **PLAIN)
    assert not solution.read[[3, 7]].any() and int(solution.settings["nonzeros_read"]) > 0


def test_scales_of_weight_and_gram_change_nothing():
    weight, gram = weight_of((16, 10)), gram_of(16)
    one = solve(weight, gram, 0.5, **PLAIN)
    other = solve(weight * 2.0**40, gram * 2.0**-30, 0.5, **PLAIN)
    assert torch.equal(one.read * 2.0**20, other.read) and torch.equal(one.write * 2.0**20, other.write)


def test_a_budget_of_no_unit_and_other_widths_are_refused():
    with pytest.raises(BudgetError, match="K=1 edges of 60"):
        solve(weight_of((6, 10)), None, 0.98, **PLAIN)
    with pytest.raises(ValueError, match="units=7"):
        solve(weight_of((6, 10)), None, 0.5, **PLAIN, units=7)
    few = solve(weight_of((6, 10)), None, 0.9666, **PLAIN)
    assert few.settings["nonzeros_read"] == few.settings["nonzeros_write"] == 1
    assert math.isclose(float((few.read @ few.write).abs().max()), float(weight_of((6, 10)).abs().max()), rel_tol=0.5)
