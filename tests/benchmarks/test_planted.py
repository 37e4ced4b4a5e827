"""Known optima (tests/benchmarks/planted.py): the measures by hand, and what moving budgets between the factors finds."""

import pytest
import torch

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
