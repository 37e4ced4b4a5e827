"""Outputs weighed: by hand, as the optimum of the two-sided loss, and through `solve`."""

import pytest
import torch
from torch import Tensor

from swd_lens import solver
from swd_lens.base.errors import GramError
from swd_lens.solver.metric import Metric
from swd_lens.solver.outputs import refit
from swd_lens.solver.refine import refine
from tests.solver.matrices import gram_of, weight_of
from tests.solver.test_refine import problem


def output_gram_of(d_out: int) -> Tensor:
    """Of random gradients, some outputs' a hundred times as large as others'."""
    g = torch.Generator().manual_seed(5)
    gradients = torch.randn(4 * d_out, d_out, generator=g) * torch.logspace(-1, 1, d_out)
    return gradients.T @ gradients / (4 * d_out)


def loss(read: Tensor, write: Tensor, weight: Tensor, gram: Tensor, outputs: Tensor) -> Tensor:
    error = weight - read @ write
    return torch.trace(error.T @ gram @ error @ outputs)


def test_one_unit_for_two_outputs_by_hand():
    # W = diag(2, 1) has rank two, one unit has rank one. Where both outputs count the same it takes the larger entry, 2. Where
    # the second output counts a hundred times, W H^(1/2) = diag(2, 10): it takes the other one.
    weight, ones = torch.diag(torch.tensor([2.0, 1.0])).double(), torch.ones(2, 1).double()
    same = refit(ones, ones.T, weight, None, torch.eye(2).double(), (0.0, 0.0))
    torch.testing.assert_close(same[0] @ same[1], torch.diag(torch.tensor([2.0, 0.0])).double(), atol=1e-3, rtol=0)
    weighed = refit(ones, ones.T, weight, None, torch.diag(torch.tensor([1.0, 100.0])).double(), (0.0, 0.0))
    torch.testing.assert_close(weighed[0] @ weighed[1], torch.diag(torch.tensor([0.0, 1.0])).double(), atol=1e-3, rtol=0)
    shrunk = refit(ones, ones.T, weight, None, torch.diag(torch.tensor([1.0, 100.0])).double(), (0.0, 1.0))  # all the way
    torch.testing.assert_close(shrunk[0] @ shrunk[1], torch.diag(torch.tensor([2.0, 0.0])).double(), atol=1e-3, rtol=0)


@pytest.mark.parametrize("calibrated", [True, False])
def test_each_factor_is_the_least_squares_solution_of_the_two_sided_loss(calibrated: bool):
    shape = (20, 12)
    metric, target, read, write = problem(shape, calibrated)
    outputs = output_gram_of(shape[1]).double()
    gram = torch.eye(shape[0]).double() if metric.matrix is None else metric.matrix
    # One turn of enough steps: the write factor with the given read factor, then the read factor with that one.
    new_read, new_write = refine(read, write, target, metric, 1, 2_000, outputs)
    assert torch.equal(new_read != 0, read != 0) and torch.equal(new_write != 0, write != 0)
    start = loss(read, write, target, gram, outputs)
    for a, b, free in ((read, new_write, 1), (new_read, new_write, 0)):
        factors = [a.clone().requires_grad_(), b.clone().requires_grad_()]
        gradient = torch.autograd.grad(loss(*factors, target, gram, outputs), factors[free])[0]
        support = factors[free] != 0
        assert float((gradient * support).norm() * factors[free].norm()) < 1e-6 * float(start)
    assert loss(new_read, new_write, target, gram, outputs) < 0.8 * start


def test_the_identity_is_no_weight():
    metric, target, read, write = problem((20, 12))
    plain = refine(read, write, target, metric, 3, 4)
    for one, other in zip(plain, refine(read, write, target, metric, 3, 4, torch.eye(12).double()), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("preset", "calibrated"), [("best", True), ("best", False), ("paper", True), ("pruned", False), ("svd_pruned", True)]
)
def test_solve_keeps_the_support_and_lowers_the_weighed_error(preset: str, calibrated: bool):
    weight, outputs = weight_of((24, 16)), output_gram_of(16)
    gram = gram_of(24) if calibrated else None
    plain = solver.solve(weight, gram, 0.5, preset=preset)
    made = solver.solve(weight, gram, 0.5, preset=preset, output_gram=outputs)
    for one, other in ((plain.read, made.read), (plain.write, made.write)):
        assert torch.equal(one != 0, other != 0)
    metric = torch.eye(24) if gram is None else gram
    before = loss(plain.read, plain.write, weight, metric, outputs)
    assert loss(made.read, made.write, weight, metric, outputs) < 0.95 * before
    added = {"output_gram": True, "refit_shrinkage": [0.0, 0.0]}
    assert made.settings == {**plain.settings, **added}


def test_scales_of_powers_of_two_change_no_bit():
    weight, gram, outputs = weight_of((24, 16)), gram_of(24), output_gram_of(16)
    made = solver.solve(weight, gram, 0.5, output_gram=outputs)
    again = solver.solve(weight, 4 * gram, 0.5, output_gram=outputs / 1024)
    assert torch.equal(made.read, again.read) and torch.equal(made.write, again.write)


def test_few_tokens_shrink_it():
    weight, gram, outputs = weight_of((24, 16)), gram_of(24), output_gram_of(16)
    many, few = (solver.solve(weight, gram, 0.5, output_gram=outputs, tokens=n, shrinkage=0) for n in (10**9, 64))
    # The inputs' is what was asked for, the outputs' d_out / tokens.
    assert few.settings["refit_shrinkage"] == [0, 0.25] and many.settings["refit_shrinkage"] == [0, 16 / 10**9]
    assert not torch.equal(many.write, few.write)
    of_paper = solver.solve(weight, gram, 0.5, output_gram=outputs, tokens=96, preset="paper").settings
    assert of_paper["refit_shrinkage"] == [0.25, 16 / 96] and of_paper["shrinkage"] == 0


def test_an_input_that_is_never_active_keeps_its_edges():
    weight, gram = weight_of((24, 16)).double(), gram_of(24).double()
    gram[3], gram[:, 3] = 0, 0
    g = torch.Generator().manual_seed(0)
    read, write = torch.randn(24, 16, generator=g).double(), torch.randn(16, 16, generator=g).double()
    new_read, _ = refit(read, write, weight, gram, output_gram_of(16).double(), (0.0, 0.0))
    assert float(Metric.of(gram, weight, 0.0).scale[3]) == 0
    assert torch.equal(new_read[3], read[3]) and not torch.equal(new_read[2], read[2])


def test_bad_output_grams():
    for outputs, message in (
        (torch.eye(24), r"output_gram has size 24 but weight has d_out=16"),
        (torch.ones(16), r"output_gram has shape \(16,\), not square; give E\[g\^T g\] of shape \(16, 16\)"),
        (torch.zeros(16, 16), r"the loss depends on no output"),
        (torch.eye(16).roll(1, 0), r"output_gram is not symmetric"),
        (torch.eye(16).index_fill(0, torch.tensor(2), float("nan")), r"output_gram\[2, 0\]"),
        (torch.eye(16).long(), r"output_gram\.float\(\)"),
        (torch.ones(16, 16) - 0.5 * torch.eye(16), r"output_gram is not positive semi-definite"),
    ):
        with pytest.raises(GramError, match=message):
            solver.solve(weight_of((24, 16)), gram_of(24), 0.5, output_gram=outputs)
