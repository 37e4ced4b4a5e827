"""Pieces of a sparse weight (pieces.py) and swaps of entries (swaps.py): planted blocks are read off, others left alone."""

import pytest
import torch
from torch import Tensor

from swd_lens.solver import solve
from swd_lens.solver.metric import Metric
from swd_lens.solver.pieces import LARGE, LEAST, SPARSE, agreeing, apart, from_pieces, peeled, share_of_weight, visible_pieces
from tests.benchmarks.planted import Planted, Row, error, planted, support_f1
from tests.solver.matrices import weight_of

ROW = Row(128, 64, 64, 4, 4)
IDENTITY = Metric.of(None, torch.zeros(1, 1), 0.0)


def block(shape: tuple[int, int], rows: list[int], columns: list[int], reads: list[float], writes: list[float]) -> Tensor:
    weight = torch.zeros(shape)
    weight[torch.tensor(rows)[:, None], torch.tensor(columns)] = torch.outer(torch.tensor(reads), torch.tensor(writes))
    return weight


def test_two_blocks_that_overlap_in_an_entry_are_read_off():
    """Rows 0 to 3 by columns 0 to 3 and rows 3 to 6 by columns 3 to 6 share (3, 3), which agrees with neither."""
    first = block((12, 10), [0, 1, 2, 3], [0, 1, 2, 3], [1.0, -2.0, 0.5, 1.5], [2.0, 1.0, -1.0, 0.7])
    second = block((12, 10), [3, 4, 5, 6], [3, 4, 5, 6], [0.8, 1.0, -1.2, 2.0], [-1.0, 0.6, 1.1, 0.9])
    read, write = visible_pieces(first + second, LARGE, 1e-6)
    assert len(write) == 2
    for piece, true in zip(range(2), (first, second), strict=True):  # the larger first
        assert torch.allclose(torch.outer(read[:, piece], write[piece]), true, atol=1e-5)


def test_small_pieces_are_seen_only_where_they_may_be():
    weight = block((8, 8), [1, 2], [4, 5], [1.0, 2.0], [3.0, -1.0])
    assert visible_pieces(weight, LARGE, 1e-6)[1].shape == (0, 8)
    read, write = visible_pieces(weight, LEAST[-1], 1e-6)
    assert torch.allclose(read @ write, weight)
    single = torch.zeros(8, 8)
    single[3, 3] = 1.0
    assert len(visible_pieces(single, LEAST[-1], 1e-6)[1]) == 0  # an entry foretells nothing


def test_of_pieces_that_share_an_entry_the_better_is_taken():
    """Piece 1 shares entry 5 with piece 0, piece 2 shares entry 9 with piece 1 only; piece 3 shares 0 with piece 0."""
    places = torch.tensor([[[0, 5]], [[5, 9]], [[9, 12]], [[0, 20]]])
    everything = torch.ones(4, 1, 2, dtype=torch.bool)
    assert apart(places, everything, 30).tolist() == [0, 2]
    inside = everything.clone()
    inside[1, 0, 0] = inside[3, 0, 0] = False  # what is outside does not count
    assert apart(places, inside, 30).tolist() == [0, 1, 3]
    assert apart(places[:0], everything[:0], 30).tolist() == []


def test_a_row_that_enough_columns_agree_on_is_read():
    """A unit of writes 2, 1, -1: row 0 is half of it; of row 1 a column is of something else; row 2 is another's."""
    write = torch.tensor([[2.0, 1.0, -1.0, 0.0]])
    rest = torch.zeros(9, 4)
    rest[:4] = torch.tensor([[1.0, 0.5, -0.5, 0.0], [4.0, 2.0, 7.0, 3.0], [2.0, 3.0, 4.0, 0.0], [0.0, 0.0, 0.0, 5.0]])
    found = agreeing(rest, write, 1e-6).squeeze(1)
    assert found.tolist() == pytest.approx([0.5, 2.0] + [0.0] * 7)
    assert agreeing(rest, write[:0], 1e-6).shape == (9, 0)
    assert not agreeing(rest, torch.tensor([[2.0, 0.0, 0.0, 0.0]]), 1e-6).any()  # one column says nothing


@pytest.mark.parametrize("row", [ROW, Row(128, 64, 64, 8, 8), Row(64, 128, 64, 8, 8), Row(128, 64, 32, 8, 8)])
def test_planted_factors_are_peeled(row: Row):
    truth = planted(row, 0)
    assert share_of_weight(truth.weight) < SPARSE
    found = peeled(truth.weight, row.units)
    assert found is not None
    assert support_f1(truth, *found) > 0.99 and error(truth, *found) < 0.1


def test_peeling_stops_before_it_makes_things_worse():
    """Of units with a single input, which are no blocks, what is taken for one leaves more than there was."""
    truth = planted(Row(128, 64, 64, 8, 8, "single inputs"), 0)
    found = peeled(truth.weight, 64)
    assert found is not None
    blocks = (truth.read != 0).sum(0) > 1
    alone = Planted(truth.read[:, blocks], truth.write[blocks], truth.weight, None)
    assert support_f1(alone, *found) > 0.97
    assert float((truth.weight - found[0] @ found[1]).norm()) < float(truth.weight.norm())
    # The others start as rows of what is left, so that the product is whole.
    whole = from_pieces(truth.weight.double(), 64, truth.edges, IDENTITY)
    assert whole is not None and error(truth, whole[0].float(), whole[1].float()) < 0.02


def test_weights_without_blocks_have_no_pieces():
    for shape in ((96, 32), (32, 96), (48, 48)):
        weight = weight_of(shape)
        assert share_of_weight(weight) > 2 * SPARSE
        assert from_pieces(weight.double(), min(shape), 900, IDENTITY) is None
    diagonal = torch.diag(torch.arange(1.0, 25.0)).double()  # sparse, and no two entries in a row
    assert share_of_weight(diagonal) < SPARSE and from_pieces(diagonal, 24, 60, IDENTITY) is None
    truth = planted(Row(40, 20, 10, 2, 2), 0)
    assert from_pieces(truth.weight.double(), 200, 900, IDENTITY) is None  # more units than there are rows to start them
    solve(truth.weight, None, 0.4, units=200)


@pytest.mark.parametrize(("sparsity", "units"), [(0.1, 4), (0.3, 8)])
def test_budgets_hold_no_more_entries_than_the_factors(sparsity: float, units: int):
    """K is larger than what the few units of a sparse weight have room for."""
    weight = planted(Row(40, 20, 10, 2, 2), 0).weight
    found = solve(weight, None, sparsity, units=units)
    plain = solve(weight, None, sparsity, units=units, start="coordinates")
    assert found.read.shape == (40, units) and found.settings["nonzeros_write"] <= units * 20
    residuals = [float((weight - s.read @ s.write).norm()) for s in (found, plain)]
    assert residuals[0] <= 1.01 * residuals[1] + 1e-5


@pytest.mark.parametrize("scale", [2.0**-40, 2.0**40])
def test_scale_changes_nothing(scale: float):
    truth = planted(Row(64, 48, 32, 4, 4), 0)
    ours, scaled = (peeled(truth.weight * factor, 32) for factor in (1.0, scale))
    assert ours is not None and scaled is not None
    assert torch.equal(ours[0], scaled[0]) and torch.equal(ours[1] * scale, scaled[1])
