"""Distances to known units, by hand."""

import math

import pytest
import torch

from swd_lens.truth.scores import TrueUnits, auroc, circuit_aurocs, column_mmcs, mmcs, relative_error, support_f1, trimmed

READ = torch.tensor([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
WRITE = torch.tensor([[1.0, 0.0], [0.0, -1.0]])
TRUTH = TrueUnits(READ, WRITE)


def test_the_truth_is_found_in_any_order_sign_and_scale():
    read, write = READ[:, [1, 0]] * torch.tensor([-2.0, 0.5]), WRITE[[1, 0]] * torch.tensor([[-0.5], [2.0]])
    assert TRUTH.edges == 5 and TRUTH.n_units == 2
    assert support_f1(TRUTH, read, write) == 1 and mmcs(TRUTH, read, write) == pytest.approx(1)
    assert relative_error(READ @ WRITE, read, write) == pytest.approx(0, abs=1e-7)


def test_what_is_missing_or_too_much_counts():
    read = READ.clone()
    read[1, 0] = 0.0  # of five entries one is missing
    assert support_f1(TRUTH, read, WRITE) == pytest.approx(2 * 4 / (4 + 5))
    assert mmcs(TRUTH, read, WRITE) == pytest.approx((1 / math.sqrt(5) + 1) / 2)
    merged = READ.sum(1, keepdim=True), WRITE.sum(0, keepdim=True)  # one unit in place of two shares three entries with one
    assert support_f1(TRUTH, *merged) == pytest.approx(2 * 3 / (5 + 5))


def test_the_numbers_of_the_decomposition_papers():
    weight = torch.tensor([[3.0, 4.0], [0.0, 2.0]])
    assert column_mmcs(weight, torch.eye(2), weight) == (pytest.approx(1), pytest.approx(1))
    assert column_mmcs(weight, 0.9 * torch.eye(2), weight) == (pytest.approx(1), pytest.approx(0.9))
    # One unit for both rows: of row 0 it has the direction, of row 1 the cosine .8; its norms are 5 and 2.5.
    one = torch.tensor([[1.0], [0.5]]), weight[:1]
    assert column_mmcs(weight, *one) == (pytest.approx(0.9), pytest.approx((1 + 1.25) / 2))
    # A piece that points the other way is not the row's.
    assert column_mmcs(weight, -torch.eye(2), weight)[0] < 0.5


def test_trimming_keeps_the_largest_of_both_factors():
    read, write = torch.tensor([[4.0], [1.0]]), torch.tensor([[2.0, 0.1]])
    kept = trimmed(read, write, 3)
    assert int(kept[0].count_nonzero() + kept[1].count_nonzero()) == 3 and kept[1][0, 1] == 0
    torch.testing.assert_close(kept[0] @ kept[1], torch.tensor([[8.0, 0.0], [2.0, 0.0]]))
    whole = trimmed(read, write, 4)
    torch.testing.assert_close(whole[0] @ whole[1], read @ write)


def test_auroc_is_the_chance_of_being_above():
    assert auroc([3, 2], [1, 0]) == 1 and auroc([0, 1], [2, 3]) == 0 and auroc([1, 1], [1]) == 0.5
    assert auroc([2, 0], [1]) == 0.5 and math.isnan(auroc([], [1]))
    drawn = torch.randn(2, 4000, generator=torch.Generator().manual_seed(0))
    assert auroc(drawn[0].tolist(), drawn[1].tolist()) == pytest.approx(0.5, abs=0.02)


def test_a_circuits_units_and_edges():
    found = {"site": (READ, WRITE)}
    circuit = {"site": (0,)}
    assert circuit_aurocs({"site": TRUTH}, circuit, found, {"site": torch.tensor([3.0, 1.0])}) == (1, 1)
    # An edge has its entry's share: the first read entry is half of the other, and 2 / 2 ties with the other unit's edges.
    assert circuit_aurocs({"site": TRUTH}, circuit, found, {"site": torch.tensor([2.0, 1.0])}) == (1, pytest.approx(5 / 6))
    assert circuit_aurocs({"site": TRUTH}, circuit, found, {"site": torch.tensor([1.0, 2.0])})[0] == 0
    # The circuit's unit lacks an entry: that edge stands below all others. Its three edges against two of unit 1 (scores 1, 1):
    # 2, 2 and none, so 4 of 6 pairs are the right way round.
    read = READ.clone()
    read[0, 0] = 0.0
    of_units, of_edges = circuit_aurocs({"site": TRUTH}, circuit, {"site": (read, WRITE)}, {"site": torch.tensor([2.0, 1.0])})
    assert of_units == 1 and of_edges == pytest.approx(4 / 6)
    # The unit itself is missing.
    half = {"site": (READ[:, 1:], WRITE[1:])}
    assert circuit_aurocs({"site": TRUTH}, circuit, half, {"site": torch.tensor([2.0])}) == (0, 0)
