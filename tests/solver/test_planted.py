"""Known optima (tests/benchmarks/planted.py): the measures by hand, and what moving budgets between the factors finds."""

import pytest
import torch

from swd_lens.solver import resolve, solve
from swd_lens.solver.anneal import Block, births_at, rebalance
from swd_lens.solver.births import reinit_unused_units
from swd_lens.solver.metric import Metric
from tests.benchmarks.planted import KINDS, ROWS, Row, error, mmcs, planted, support_f1

ROW = Row(128, 64, 64, 8, 8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_factors_are_an_answer(kind):
    truth = planted(Row(128, 64, 64, 8, 8, kind), 0)
    size = float(kind.split()[1]) if kind[-1].isdigit() else 0.0
    assert support_f1(truth, truth.read, truth.write) == mmcs(truth, truth.read, truth.write).__round__(5) == 1
    assert error(truth, truth.read, truth.write) == pytest.approx(size, rel=0.02, abs=1e-6)
    # In another order, and with half of the units gone.
    order = torch.randperm(64, generator=torch.Generator().manual_seed(0))
    read, write = truth.read[:, order], truth.write[order]
    assert support_f1(truth, read, write) == 1
    read[:, ::2] = write[::2] = 0.0
    assert 0.6 < support_f1(truth, read, write) < 0.73 and mmcs(truth, read, write) < 0.7


def test_every_row_leaves_room_for_its_factors():
    for row in ROWS:
        truth = planted(row, 0)
        assert truth.weight.shape == (row.d_in, row.d_out) and 0 < truth.edges < truth.weight.numel()


def test_one_threshold_for_both_factors():
    """Nine entries for six by two units: the nine largest of both are six reads and three writes."""
    read = Block(torch.zeros(6, 2), torch.zeros(6, 2), 3, worth=torch.tensor([9.0, 8, 7, 6, 5, 4, 0, 0, 0, 0, 0, 0]))
    write = Block(torch.zeros(2, 5), torch.zeros(2, 5), 6, worth=torch.tensor([9.5, 8.5, 7.5, 1, 1, 1, 1, 1, 1, 1]))
    rebalance(read, write, 1.0)
    assert (read.budget, write.budget) == (6, 3)
    rebalance(read, write, 0.5)
    assert (read.budget, write.budget) == (6, 3)
    write.worth = torch.zeros(10)  # worth nothing: an entry per unit stays
    rebalance(read, write, 1.0)
    assert (read.budget, write.budget) == (7, 2)


def test_a_piece_of_the_residual_is_found_and_takes_the_place_of_a_useless_unit():
    truth = planted(Row(30, 20, 6, 5, 4), 0)
    read, write = truth.read.clone(), truth.write.clone()
    read[:, 2], write[4] = 0.0, 0.0  # two units do nothing
    metric = Metric.of(None, truth.weight, 0.0)
    born = reinit_unused_units(read, write, truth.weight, metric, (5, 4))
    assert born == [2, 4]
    assert support_f1(truth, read, write) > 0.95 and error(truth, read, write) < 0.05  # units overlap in a few entries
    assert reinit_unused_units(read, write, truth.weight, metric, (5, 4)) == []


def test_births_are_spread_over_the_alternations():
    spec = resolve("best", {"outer_iterations": 100, "births": 3})
    assert sorted(births_at(spec)) == [10, 36, 62] and births_at(resolve("best", {})) == frozenset()


def test_deep_finds_planted_factors():
    truth = planted(ROW, 0)
    sparsity = 1 - truth.edges / truth.weight.numel()
    deep = solve(truth.weight, None, sparsity, preset="deep", rotations=0)
    best = solve(truth.weight, None, sparsity, start="coordinates")
    assert support_f1(truth, deep.read, deep.write) > 0.95 > 0.9 > support_f1(truth, best.read, best.write)
    assert error(truth, deep.read, deep.write) < 0.02 < error(truth, best.read, best.write)


@pytest.mark.slow
def test_budgets_find_the_planted_share():
    truth = planted(Row(128, 64, 64, 16, 8), 1)
    sparsity = 1 - truth.edges / truth.weight.numel()
    moved = solve(truth.weight, None, sparsity, preset="deep", square_share=0.6)  # of it a third is right
    reads, writes = int(moved.read.count_nonzero()), int(moved.write.count_nonzero())
    assert (moved.settings["budget_square"], moved.settings["budget_other"]) == (writes, reads)
    assert reads + writes == truth.edges and 0.62 < reads / truth.edges < 0.7
