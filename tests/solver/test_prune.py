"""Pruning (prune.py) and the side that units start on (`basis`): against least squares by hand, and by symmetry."""

import pytest
import torch

from swd_lens.base.errors import BudgetError
from swd_lens.solver import AnnealSpec, Budget, plan_shares, solve
from tests.solver.matrices import gram_of, weight_of

SHAPES = [(24, 10), (10, 24), (16, 16)]
SIDES = ("input", "output")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("basis", SIDES)
def test_units_are_coordinates_and_edges_are_within_budget(shape, basis):
    weight = weight_of(shape)
    solution = solve(weight, gram_of(shape[0]), 0.5, preset="pruned", basis=basis)
    identity, other = (solution.read, solution.write)[:: 1 if basis == "input" else -1]
    assert len(identity) == shape[SIDES.index(basis)]
    assert torch.equal(identity.count_nonzero(0), identity.count_nonzero(1)) and not identity.triu(1).any()
    # A unit that keeps no weight has no edge of its own, and every other has one.
    assert torch.equal(identity.diagonal() != 0, other.any(1 if basis == "input" else 0))
    numel = weight.numel() // 2
    assert numel - 1 <= int(solution.read.count_nonzero() + solution.write.count_nonzero()) <= numel


@pytest.mark.parametrize("basis", SIDES)
def test_the_support_is_of_the_largest_weighted_entries_and_the_values_are_least_squares(basis):
    weight, gram = weight_of((24, 10)), gram_of(24).double()
    solution = solve(weight, gram, 0.6, preset="pruned", basis=basis, precision="float64", refine_steps=400)
    product = (solution.read @ solution.write).double()
    score = weight.abs() * gram.diagonal().float().sqrt()[:, None]
    kept = product != 0
    assert float(score[kept].min()) >= float(score[~kept].max())
    for j in range(10):
        support = kept[:, j]
        best = torch.linalg.solve(gram[support][:, support], gram[support] @ weight[:, j].double())
        torch.testing.assert_close(product[support, j], best, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("shape", "basis"), [(SHAPES[0], "input"), (SHAPES[1], "output"), (SHAPES[2], "input"), (SHAPES[0], "output")]
)
def test_swaps_lower_the_error_at_the_same_edges(shape, basis):
    weight, gram = weight_of(shape), gram_of(shape[0])
    errors = []
    for swaps in (0, 1, 12):
        solution = solve(weight, gram, 0.6, preset="pruned", basis=basis, swaps=swaps)
        missed = weight - solution.read @ solution.write
        errors.append(float((gram @ missed * missed).sum()))
        edges = int(solution.read.count_nonzero() + solution.write.count_nonzero())
        assert edges <= int(0.4 * weight.numel()) and solution.read.shape[1] == shape[SIDES.index(basis)]
    assert errors[0] * (1 + 1e-5) >= errors[1] > errors[2]


def test_units_may_mix_coordinates_when_edges_are_exchanged():
    weight, gram = weight_of((24, 10)), gram_of(24)
    most_reads = [int(solve(weight, gram, 0.6, preset="pruned", swaps=swaps).read.count_nonzero(0).max()) for swaps in (0, 12)]
    assert most_reads[0] == 1 < most_reads[1]
    weight[3] = 0.0  # a unit without weight stays empty
    solution = solve(weight, gram, 0.5, preset="pruned", swaps=6)
    assert not solution.read[:, 3].any() and not solution.write[3].any()


def test_a_unit_that_costs_its_own_edge_is_left_out_when_the_budget_ends():
    weight = torch.tensor([[9.0, 8.0, 7.0], [6.0, 5.0, 4.0]])
    # K = 4: one read and three writes of input 0; input 1 would cost two more.
    solution = solve(weight, None, 1 / 3, preset="pruned", basis="input")
    torch.testing.assert_close(solution.read @ solution.write, torch.tensor([[9.0, 8.0, 7.0], [0.0] * 3]))  # weights as they are
    assert solution.settings["nonzeros_read"] == 1 and solution.settings["nonzeros_write"] == 3


@pytest.mark.parametrize("preset", ["quick", "pruned"])
def test_output_side_of_a_matrix_is_input_side_of_its_transpose(preset):
    weight = weight_of((12, 30))
    # The refinement takes the write factor first, whichever side it is.
    how = {} if preset == "pruned" else {"refine_rounds": 0}
    one = solve(weight, None, 0.6, preset=preset, basis="output", precision="float64", **how)
    other = solve(weight.T, None, 0.6, preset=preset, basis="input", precision="float64", **how)
    assert one.read.shape[1] == other.read.shape[1] == 30
    torch.testing.assert_close(one.read @ one.write, (other.read @ other.write).T, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_papers_side_is_the_short_one(shape):
    short = "input" if shape[0] <= shape[1] else "output"
    weight, gram = weight_of(shape), gram_of(shape[0])
    paper = solve(weight, gram, 0.5, preset="quick")
    share = paper.settings["budget_square"] / (paper.settings["budget_square"] + paper.settings["budget_other"])
    # Named, it keeps few edges; given the paper's share of them it is the paper's.
    named, few = (solve(weight, gram, 0.5, preset="quick", basis=short, **how) for how in ({"square_share": share}, {}))
    assert torch.equal(paper.read, named.read) and torch.equal(paper.write, named.write)
    assert few.settings["budget_square"] < paper.settings["budget_square"]


def test_units_of_a_named_side_keep_few_edges_there_unless_told_otherwise():
    weight, gram = weight_of((60, 20)), gram_of(60)
    few, told = (solve(weight, gram, 0.5, preset="quick", basis="input", **how) for how in ({}, {"square_share": 0.3}))
    assert few.settings["budget_square"] == 60  # one read a unit: .03 of 600 would be less
    assert told.settings["budget_square"] == int(0.3 * 600)
    assert int(few.read.count_nonzero() + few.write.count_nonzero()) == 600 and few.read.shape == (60, 60)
    assert bool(few.read.any(0).all()) and bool(few.write.any(1).all())
    # One write a unit is more than .03 of 1,000; .03 of 3,950 is more than a read a unit.
    assert plan_shares(20, 100, 0.5, 100, AnnealSpec(basis="output")) == Budget(100, 900)
    assert plan_shares(100, 40, 0.0125, 100, AnnealSpec(basis="input")) == Budget(118, 3832)


def test_a_budget_of_no_unit_is_refused():
    with pytest.raises(BudgetError, match=r"K=1 edges of 60 .* largest feasible sparsity is 0.9666"):
        solve(weight_of((6, 10)), None, 0.98, preset="pruned")
    assert solve(weight_of((6, 10)), None, 0.9666, preset="pruned").read.count_nonzero() == 1
