"""Every refusal: its class, and a message with the value and the way out."""

import pytest
import torch

from swd_lens.solver import (
    PRESETS,
    BudgetError,
    GramError,
    SolveInputError,
    SolveSpec,
    SparsityError,
    SpecError,
    UnitsError,
    WeightError,
    solve,
)

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
GRAM = torch.eye(8)


def with_entry(matrix: torch.Tensor, i: int, j: int, value: float) -> torch.Tensor:
    changed = matrix.clone()
    changed[i, j] = value
    return changed


@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(8), r"shape \(8,\).*two-dimensional"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\).*two-dimensional"),
        (torch.zeros(0, 4), r"shape \(0, 4\).*empty"),
        (torch.ones(8, 12, dtype=torch.int64), r"dtype torch.int64.*weight.float\(\)"),
        (with_entry(WEIGHT, 3, 5, float("nan")), r"weight\[3, 5\] is nan: every entry"),
        (
            with_entry(with_entry(WEIGHT, 3, 5, float("nan")), 1, 2, -float("inf")),
            r"weight\[1, 2\] is -inf \(and 1 more",
        ),
        (torch.zeros(8, 12), "all zeros"),
    ],
)
def test_weight(weight: torch.Tensor, message: str):
    with pytest.raises(WeightError, match=message):
        solve(weight)


@pytest.mark.parametrize(
    ("gram", "message"),
    [
        (torch.zeros(8, 9), r"shape \(8, 9\), not square.*\(8, 8\)"),
        (torch.ones(8), r"shape \(8,\), not square"),
        (torch.eye(12), "size 12 but weight has d_in=8.*transpose"),
        (torch.eye(8, dtype=torch.int32), r"dtype torch.int32"),
        (with_entry(GRAM, 2, 6, float("inf")), r"gram\[2, 6\] is inf"),
        (with_entry(GRAM, 1, 4, 0.5), r"not symmetric: gram\[(1, 4|4, 1)\]"),
        (with_entry(GRAM, 3, 3, -1.0), r"gram\[3, 3\] = -1: the diagonal"),
        (torch.zeros(8, 8), "all-zero diagonal.*gram=None"),
        (torch.eye(8) - 10 * (torch.ones(8, 8) - torch.eye(8)), "not positive semi-definite"),
    ],
)
def test_gram(gram: torch.Tensor, message: str):
    with pytest.raises(GramError, match=message):
        solve(WEIGHT, gram)


def test_a_gram_asymmetric_by_rounding_is_accepted():
    assert solve(WEIGHT, with_entry(GRAM, 1, 4, 1e-6), outer_iterations=4).edges > 0


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.1, 1.5, 0, 1, float("nan")])
def test_sparsity(sparsity: float):
    with pytest.raises(SparsityError, match=rf"sparsity={sparsity}: give a number inside \(0, 1\)"):
        solve(WEIGHT, sparsity=sparsity)


def test_units():
    with pytest.raises(UnitsError, match=r"units=16: .* = 8 units; leave units=None or give units=8"):
        solve(WEIGHT, units=16)
    assert solve(WEIGHT, units=8, outer_iterations=4).n_units == 8


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (40, 40), (17, 5)])
@pytest.mark.parametrize("rounding", ["reference", "exact"])
def test_budget_names_a_sparsity_that_is_feasible_and_nearly_the_largest(shape: tuple[int, int], rounding: str):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options = {"outer_iterations": 4, "rounding": rounding}
    with pytest.raises(BudgetError, match="the largest feasible sparsity is") as refused:
        solve(weight, sparsity=0.99, **options)
    largest = float(str(refused.value).split("largest feasible sparsity is ")[1].split(",")[0])
    assert bool(torch.isfinite(solve(weight, sparsity=largest, **options).product()).all())
    with pytest.raises(BudgetError):
        solve(weight, sparsity=largest + 2e-4 + 1 / weight.numel(), **options)


def test_square_matrix_where_the_square_factor_would_take_the_whole_budget():
    # s = .875 leaves 12.5 % of the entries, a square matrix's square factor takes 16 %: the reference crashes here.
    with pytest.raises(BudgetError, match=r"K=200 edges of 1,600 for a \(40, 40\).*takes 256 .*needs 40"):
        solve(torch.randn(40, 40), sparsity=0.875)


def test_no_sparsity_is_feasible():
    with pytest.raises(BudgetError, match="no sparsity is feasible"):
        solve(torch.randn(2, 2), sparsity=0.25)


def test_unknown_names_list_the_nearest_and_all():
    with pytest.raises(SpecError, match=r"no preset 'papr'; did you mean paper\? valid: paper"):
        solve(WEIGHT, preset="papr")
    with pytest.raises(
        SpecError, match=r"no setting 'outer_iteration'; did you mean outer_iterations.*valid: .*rounding"
    ):
        solve(WEIGHT, outer_iteration=8)


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("outer_iterations", 3, "whole number of at least 4"),
        ("outer_iterations", True, "whole number of at least 4"),
        ("inner_iterations", 0, "whole number of at least 1"),
        ("support_iterations", 6, "whole number from 1 to 5"),
        ("final_iterations", -1, "whole number of at least 0"),
        ("rho", 0.0, "finite number above 0"),
        ("ridge", float("inf"), "finite number above 0"),
        ("square_density_square", 1.5, "number above 0 and at most 1"),
        ("norm_floor", float("nan"), "finite number above 0"),
        ("rounding", "floor", "choose one of 'reference', 'exact'"),
        ("arithmetic", "fp8", "choose one of 'reference', 'clean'"),
    ],
)
def test_settings_out_of_range(setting: str, value: object, message: str):
    with pytest.raises(SpecError, match=f"{setting}={value!r}: (give|choose).*{message.split(' ', 1)[1]}"):
        solve(WEIGHT, **{setting: value})


def test_all_refusals_are_value_errors():
    for error in (WeightError, GramError, SparsityError, UnitsError, BudgetError, SpecError):
        assert issubclass(error, SolveInputError) and issubclass(error, ValueError)


def test_paper_values():
    """Paper, app. swd-optimization, and for the last four the reference code (method.md §5.2)."""
    spec = PRESETS["paper"]
    assert spec == SolveSpec()
    assert (spec.outer_iterations, spec.inner_iterations, spec.support_iterations) == (40, 5, 2)
    assert (spec.rho, spec.ridge, spec.final_iterations, spec.final_rho) == (1.0, 1e-2, 20, 1.0)
    assert (spec.square_density(768, 768), spec.square_density(768, 3072)) == (0.16, 0.25)
    assert [spec.rho_start(t) for t in (0, 37, 39)] == [0.0, 1.0, 1.0]
    assert spec.rho_start(10) == pytest.approx((10 / 37) ** 3)
    assert (spec.start_share, spec.sparsity_cap, spec.norm_floor, spec.rounding) == (0.5, 0.99, 1e-8, "reference")
