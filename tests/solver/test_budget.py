"""Budgets against counts that need no model and no data (method.md §0.3, §0.4)."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swd_lens.base.errors import BudgetError
from swd_lens.factorization.solve import solve
from swd_lens.solver import PRESETS, AnnealSpec, Budget, DsfSpec, plan_budget, plan_shares, realised

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))

PAPER = PRESETS["paper"]
EXACT = DsfSpec(rounding="exact")


def realised_pair(d_in: int, d_out: int, sparsity: float, spec: DsfSpec = PAPER) -> tuple[int, int]:
    n = min(d_in, d_out)
    budget = plan_budget(d_in, d_out, sparsity, spec)
    return realised(n * n, budget.square, spec), realised(d_in * d_out, budget.other, spec)


def test_gpt2_mlp_out():
    for sparsity, other, total in (
        (0.125, 1_916_928, 2_064_382),
        (0.25, 1_622_016, 1_769_470),
        (0.375, 1_327_104, 1_474_558),
        (0.5, 1_032_192, 1_179_646),
        (0.625, 737_280, 884_734),
        (0.75, 442_368, 589_822),
        (0.875, 147_456, 294_910),
    ):
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


def test_rounding_of_the_reference_and_exact_rounding():
    # 442,368 * (1 - 184,320 / 442,368) is 258,047.99999999997 in double precision: rounded down, nothing is lost.
    assert realised_pair(384, 1152, 0.5) == (36_863, 184_320)
    assert realised_pair(384, 1152, 0.75) == (36_863, 73_727)
    assert sum(realised_pair(3072, 768, 0.5, EXACT)) == 1_179_648
    # 1000 * (1 - 0.9) is 99.99999999999997 in double precision.
    assert plan_budget(10, 100, 0.9, EXACT).total == 100
    # s = .95 leaves (768, 3072) nothing like 1 % in the other factor: 0.01 * numel = 23,592 is kept instead of 14,746.
    spec = DsfSpec(square_density_rectangular=0.175)
    nominal = plan_budget(768, 3072, 0.95, spec)
    assert nominal.other < 0.01 * 768 * 3072
    assert realised_pair(768, 3072, 0.95, spec)[1] == 23_592


BEST = AnnealSpec()


def test_shares_by_hand():
    # (384, 1536), s = .5: K = 294,912 = 2 n^2 with n = 384; share n^2 / (2 (n^2 + 2 n^2)) = 1/6: 49,152.
    assert plan_shares(384, 1536, 0.5, 384, BEST) == plan_shares(1536, 384, 0.5, 384, BEST) == Budget(49_152, 245_760)
    # s = .75: K = n^2, share 1/4.
    assert plan_shares(384, 1536, 0.75, 384, BEST) == Budget(36_864, 110_592)
    # The share is of K, whatever the number of units.
    assert plan_shares(384, 1536, 0.75, 768, BEST) == Budget(36_864, 110_592)
    assert plan_shares(384, 1536, 0.75, 384, AnnealSpec(square_share=0.5)) == Budget(73_728, 73_728)


def test_shares_leave_one_entry_per_unit_and_no_more_than_fit():
    # (10, 100), s = .9: K = 100; the share 100 / (2 * 200) = 1/4 is 25. 40 units need 40 in each factor, 50 all of K.
    assert plan_shares(10, 100, 0.9, 10, BEST) == Budget(25, 75)
    assert plan_shares(10, 100, 0.9, 40, BEST) == Budget(40, 60)
    assert plan_shares(10, 100, 0.9, 50, BEST) == Budget(50, 50)
    # A share of nearly all leaves the other factor one entry per unit.
    assert plan_shares(10, 100, 0.9, 10, AnnealSpec(square_share=1.0)) == Budget(90, 10)
    # (20, 32), s = .25: K = 480; ten units hold 10 * 20 in the square factor and 10 * 32 = 320 in the other, which is
    # full before the share 400 / (2 * 880) of K (109) leaves it 371: the square factor takes the remaining 160.
    assert plan_shares(20, 32, 0.25, 10, BEST) == Budget(160, 320)
    # s = .01: K = 633 (633.6 rounded down), but ten units hold at most 10 * (20 + 32) = 520.
    assert plan_shares(20, 32, 0.01, 10, BEST) == Budget(200, 320)


@settings(max_examples=300, deadline=None)
@given(
    d_in=st.integers(1, 40),
    d_out=st.integers(1, 40),
    sparsity=st.floats(0.001, 0.999),
    units=st.integers(1, 200),
    share=st.just("auto") | st.floats(0.01, 1.0),
)
def test_shares_always_add_up_or_are_refused(d_in: int, d_out: int, sparsity: float, units: int, share: float | str):
    # K to a millionth, as 1 - s is inexact: 1000 * (1 - .9) = 99.99999999999997 means 100.
    n, long, total = min(d_in, d_out), max(d_in, d_out), math.floor(d_in * d_out * (1 - sparsity) + 5e-7)
    if total < 2 * units:
        with pytest.raises(BudgetError, match=f"K={total:,} edges"):
            plan_shares(d_in, d_out, sparsity, units, AnnealSpec(square_share=share))
        return
    budget = plan_shares(d_in, d_out, sparsity, units, AnnealSpec(square_share=share))
    assert budget.total == min(total, units * (n + long))
    assert units <= budget.square <= units * n and units <= budget.other <= units * long


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (40, 40), (17, 5)])
@pytest.mark.parametrize(
    "how", [*({"preset": "paper", "rounding": r} for r in ("reference", "exact")), {}, {"units": "1.5x"}, {"units": 3}], ids=str
)
def test_budget_names_a_sparsity_that_is_feasible_and_nearly_the_largest(shape: tuple[int, int], how: dict[str, Any]):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    how = {"outer_iterations": 4, **how}
    with pytest.raises(BudgetError, match="the largest feasible sparsity is") as refused:
        solve(weight, sparsity=0.999, **how)
    largest = float(str(refused.value).split("largest feasible sparsity is ")[1].split(",")[0])
    factors = solve(weight, sparsity=largest, **how)
    assert factors.edges <= (1 - largest) * weight.numel() + 1e-6 and bool(torch.isfinite(factors.product()).all())
    with pytest.raises(BudgetError):  # named to four digits; one edge less is one of the matrix's entries less
        solve(weight, sparsity=largest + 2e-4 + 1 / weight.numel(), **how)


def test_what_a_refused_budget_says():
    # K = 24 of 96: twelve units with a read and a write edge each.
    with pytest.raises(BudgetError, match=r"K=24 edges of 96 for a \(8, 12\) matrix, but 13 units need 26.*units=12") as e:
        solve(WEIGHT, sparsity=0.75, units=13)
    assert "0.7291" in str(e.value)  # 1 - 26 / 96 = .72917
    assert solve(WEIGHT, sparsity=0.75, units=12, outer_iterations=2).n_units == 12
    # s = .875 leaves 12.5 % of the entries, a square matrix's square factor takes 16 %: the reference crashes here.
    with pytest.raises(BudgetError, match=r"K=200 edges of 1,600 for a \(40, 40\).*takes 256 .*needs 40"):
        solve(torch.randn(40, 40), sparsity=0.875, preset="paper")
    assert solve(torch.randn(40, 40), sparsity=0.875).edges == 200
    with pytest.raises(BudgetError, match="no sparsity is feasible"):
        solve(torch.randn(2, 2), sparsity=0.25, preset="paper")
    # Two units need all four entries; one unit is content with two of the three that s = .25 leaves.
    with pytest.raises(BudgetError, match="no sparsity is feasible, or give units=1"):
        solve(torch.randn(2, 2), sparsity=0.25)
    with pytest.raises(BudgetError, match=r"no sparsity is feasible$"):
        solve(torch.randn(1, 2), sparsity=0.5)
