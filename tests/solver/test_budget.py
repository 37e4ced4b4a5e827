"""Budgets against counts that need no model and no data (method.md §0.3, §0.4)."""

import pytest

from swd_lens.solver import PRESETS, SolveSpec, plan_budget, realised

PAPER = PRESETS["paper"]
EXACT = SolveSpec(rounding="exact")


def realised_pair(d_in: int, d_out: int, sparsity: float, spec: SolveSpec = PAPER) -> tuple[int, int]:
    n = min(d_in, d_out)
    budget = plan_budget(d_in, d_out, sparsity, spec)
    return realised(n * n, budget.square, spec), realised(d_in * d_out, budget.other, spec)


@pytest.mark.parametrize(
    ("sparsity", "other", "total"),
    [
        (0.125, 1_916_928, 2_064_382),
        (0.25, 1_622_016, 1_769_470),
        (0.375, 1_327_104, 1_474_558),
        (0.5, 1_032_192, 1_179_646),
        (0.625, 737_280, 884_734),
        (0.75, 442_368, 589_822),
        (0.875, 147_456, 294_910),
    ],
)
def test_gpt2_mlp_out(sparsity: float, other: int, total: int):
    budget = plan_budget(3072, 768, sparsity, PAPER)
    assert (budget.square, budget.other) == (147_456, other)
    assert sum(realised_pair(3072, 768, sparsity)) == total
    assert plan_budget(768, 3072, sparsity, PAPER) == budget


def test_all_of_gpt2_small_as_the_paper_counts_it():
    # 48 matrices, s = 1 - 26,770,920 / 84,934,656. Nominal 26,770,896; each of the 96 factors loses one entry.
    sparsity = 1 - 26_770_920 / 84_934_656
    shapes = [(768, 2304), (768, 768), (768, 3072), (3072, 768)]
    assert 12 * sum(plan_budget(*shape, sparsity, PAPER).total for shape in shapes) == 26_770_896
    assert 12 * sum(sum(realised_pair(*shape, sparsity)) for shape in shapes) == 26_770_800
    assert plan_budget(768, 768, sparsity, PAPER).square == 94_371
    assert plan_budget(768, 768, sparsity, PAPER).other == 91_538
    assert plan_budget(768, 2304, sparsity, PAPER).other == 410_271


def test_floating_point_decides_whether_the_reference_loses_an_entry():
    # 442,368 * (1 - 184,320 / 442,368) is 258,047.99999999997 in double precision: rounded down, nothing is lost.
    assert realised_pair(384, 1152, 0.5) == (36_863, 184_320)
    assert realised_pair(384, 1152, 0.75) == (36_863, 73_727)


def test_exact_rounding_keeps_all_of_k():
    assert sum(realised_pair(3072, 768, 0.5, EXACT)) == 1_179_648
    # 1000 * (1 - 0.9) is 99.99999999999997 in double precision.
    assert plan_budget(10, 100, 0.9, EXACT).total == 100


def test_reference_cap_overshoots():
    # s = .95 leaves (768, 3072) nothing like 1 % in the other factor: 0.01 * numel = 23,592 is kept instead of 14,746.
    spec = SolveSpec(square_density_rectangular=0.175)
    nominal = plan_budget(768, 3072, 0.95, spec)
    assert nominal.other < 0.01 * 768 * 3072
    assert realised_pair(768, 3072, 0.95, spec)[1] == 23_592
