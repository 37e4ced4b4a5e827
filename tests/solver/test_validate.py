"""Every refusal: its class, and a message with the value and the way out."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from swd_lens.base.errors import (
    BudgetError,
    GramError,
    SolveInputError,
    SparsityError,
    SpecError,
    UnitsError,
    WeightError,
)
from swd_lens.factorization.solve import solve
from swd_lens.solver import DEFAULT_PRESET, PRESETS, AnnealSpec, DsfSpec
from swd_lens.solver.automatic import MOST_SHRINKAGE, automatic_rho_end
from swd_lens.solver.presets import resolve
from swd_lens.solver.validate import check_tokens

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
        (
            WEIGHT.to_sparse(),
            r"weight is torch\.sparse_coo; give a dense matrix with its values, e\.g\. weight\.to_dense",
        ),
        (WEIGHT.to("meta"), "weight is on the meta device; give a dense matrix with its values"),
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
        (GRAM.to_sparse(), r"gram is torch\.sparse_coo; give a dense"),
        (GRAM.to("meta"), "gram is on the meta device; give a dense"),
    ],
)
@pytest.mark.parametrize("preset", ["best", "paper"])
def test_gram(gram: torch.Tensor, message: str, preset: str):
    with pytest.raises(GramError, match=message):
        solve(WEIGHT, gram, preset=preset)


def test_a_gram_asymmetric_by_rounding_is_accepted():
    assert solve(WEIGHT, with_entry(GRAM, 1, 4, 1e-6), outer_iterations=4).edges > 0


def indefinite_gram(share: float) -> torch.Tensor:
    """Three of twelve eigenvalues at -share of the largest."""
    generator = torch.Generator().manual_seed(1)
    vectors, _ = torch.linalg.qr(torch.randn(12, 12, generator=generator, dtype=torch.float64))
    values = torch.rand(12, generator=generator, dtype=torch.float64) + 0.1
    values[:3] = -share * values.max()
    return ((vectors * values) @ vectors.T).float()


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("more", [{}, {"tokens": 1}, {"units": None, "sparsity": 0.3}], ids=str)
def test_an_indefinite_gram_is_refused_by_every_preset(preset: str, more: dict):
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    gram = indefinite_gram(0.01)
    with pytest.raises(GramError, match="not positive semi-definite"):
        solve(weight, (gram + gram.T) / 2, preset=preset, **more)
    assert solve(weight, indefinite_gram(0.0), preset=preset, **more).edges > 0  # rounding pushes zeros below zero


def test_an_indefinite_gram_is_refused_where_only_its_diagonal_would_be_used():
    weight, gram = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), indefinite_gram(0.01)
    for used in ({"preset": "paper", "final_iterations": 0}, {"preset": "best", "shrinkage": 1.0}):
        with pytest.raises(GramError, match="not positive semi-definite"):
            solve(weight, gram, **used)


@pytest.mark.parametrize("shape", [(8, 8), (12, 8), (8, 24)])
@pytest.mark.parametrize("value", [1.0, -3.0, 1e-30])
def test_a_constant_matrix_and_the_papers_solver(shape: tuple[int, int], value: float):
    weight = torch.full(shape, value)
    with pytest.raises(WeightError, match=r"entries have one magnitude .* give preset=\"best\" or rounding=\"exact\""):
        solve(weight, preset="paper")
    for named in ({"preset": "best"}, {"preset": "paper", "rounding": "exact"}):  # as the message says
        f = solve(weight, **named)
        assert f.edges > 0 and bool(f.read.isfinite().all() and f.write.isfinite().all())


# Arguments of other types, which the tests' own check of annotations would refuse first.
OTHER_TYPES = """
import torch, swd_lens as swd
from swd_lens.base.errors import GramError, SparsityError, WeightError
from swd_lens.solver import cost

weight = torch.ones(8, 12)

def refused(kind, words, call):
    try:
        call()
    except kind as refusal:
        assert words in str(refusal), refusal
    else:
        raise AssertionError(f"accepted: {words}")

for s in ("0.5", None, [0.5], 0.5j, torch.tensor(0.5)):
    for call in (
        lambda: swd.solve(weight, sparsity=s),
        lambda: cost(8, 12, sparsity=s),
        lambda: swd.estimate((8, 12), sparsity=s),
        lambda: swd.estimate({"a": (8, 12)}, sparsity={"a": s}),
    ):
        refused(SparsityError, f"sparsity={s!r}: give a number inside (0, 1)", call)
refused(SparsityError, "sparsity=True", lambda: swd.solve(weight, sparsity=True))
refused(WeightError, "weight is a ndarray; give a torch.Tensor", lambda: swd.solve(weight.numpy()))
refused(WeightError, "weight is a NoneType; give a torch.Tensor", lambda: swd.solve(None))
refused(GramError, "gram is a list; give a torch.Tensor", lambda: swd.solve(weight, [[1.0]]))
"""


@pytest.mark.slow
def test_arguments_of_other_types():
    done = subprocess.run([sys.executable, "-c", OTHER_TYPES], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sparsity", [0.0, 1.0, -0.1, 1.5, 0, 1, float("nan")])
def test_sparsity(sparsity: float):
    with pytest.raises(SparsityError, match=rf"sparsity={sparsity}: give a number inside \(0, 1\)"):
        solve(WEIGHT, sparsity=sparsity)


def test_units_of_the_papers_solver():
    with pytest.raises(
        UnitsError, match=r'units=16: the paper.s solver is defined for 8 units, .* units=None, or take preset="best"'
    ):
        solve(WEIGHT, units=16, preset="paper")
    for units in (8, "1x", None):
        assert solve(WEIGHT, units=units, preset="paper", outer_iterations=4).n_units == 8


@pytest.mark.parametrize(("units", "width"), [(None, 8), ("2x", 16), ("1.5x", 12), (" .5x ", 4), (11, 11), (1, 1)])
def test_units_of_any_width(units: int | str | None, width: int):
    factors = solve(WEIGHT, units=units, outer_iterations=4)
    assert factors.n_units == factors.settings["units"] == width


@pytest.mark.parametrize("units", ["double", "2", "x", "-1x", "2xx", ""])
def test_units_that_are_no_width(units: str):
    with pytest.raises(
        UnitsError, match=rf"units='{units}': give a number, None for 8, one per coordinate .*, or \"2x\""
    ):
        solve(WEIGHT, units=units)


@pytest.mark.parametrize("units", [0, -3, 97, True, 8.0, 1.5, "0x", "100x"])
def test_units_out_of_range(units: object):
    # 8 x 12 = 96 entries: more units than that could not even have one each.
    with pytest.raises(UnitsError, match=rf"units={units!r}: give a whole number from 1 to 96"):
        solve(WEIGHT, units=units)


@pytest.mark.parametrize("tokens", [0, -5, True])
def test_tokens(tokens: object):
    with pytest.raises(ValueError, match=rf"tokens must be a whole number of at least 1, got {tokens!r}"):
        check_tokens(tokens)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (40, 40), (17, 5)])
@pytest.mark.parametrize("rounding", ["reference", "exact"])
def test_budget_names_a_sparsity_that_is_feasible_and_nearly_the_largest(shape: tuple[int, int], rounding: str):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    options = {"outer_iterations": 4, "rounding": rounding, "preset": "paper"}
    with pytest.raises(BudgetError, match="the largest feasible sparsity is") as refused:
        solve(weight, sparsity=0.99, **options)
    largest = float(str(refused.value).split("largest feasible sparsity is ")[1].split(",")[0])
    assert bool(torch.isfinite(solve(weight, sparsity=largest, **options).product()).all())
    with pytest.raises(BudgetError):
        solve(weight, sparsity=largest + 2e-4 + 1 / weight.numel(), **options)


@pytest.mark.parametrize("shape", [(8, 12), (12, 8), (40, 40), (17, 5)])
@pytest.mark.parametrize("units", [None, "1.5x", 3])
def test_budget_names_the_largest_feasible_sparsity_of_any_width(shape: tuple[int, int], units: int | str | None):
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    with pytest.raises(BudgetError, match="the largest feasible sparsity is") as refused:
        solve(weight, sparsity=0.999, units=units, outer_iterations=2)
    largest = float(str(refused.value).split("largest feasible sparsity is ")[1].split(",")[0])
    factors = solve(weight, sparsity=largest, units=units, outer_iterations=2)
    assert factors.edges <= (1 - largest) * weight.numel() + 1e-6 and bool(torch.isfinite(factors.product()).all())
    with pytest.raises(BudgetError):  # named to four digits; one edge less is one of the matrix's entries less
        solve(weight, sparsity=largest + 2e-4 + 1 / weight.numel(), units=units, outer_iterations=2)


def test_budget_names_the_largest_number_of_units():
    # K = 24 of 96: twelve units with a read and a write edge each.
    with pytest.raises(
        BudgetError, match=r"K=24 edges of 96 for a \(8, 12\) matrix, but 13 units need 26.*units=12"
    ) as e:
        solve(WEIGHT, sparsity=0.75, units=13)
    assert "0.7291" in str(e.value)  # 1 - 26 / 96 = .72917
    assert solve(WEIGHT, sparsity=0.75, units=12, outer_iterations=2).n_units == 12


def test_square_matrix_where_the_square_factor_would_take_the_whole_budget():
    # s = .875 leaves 12.5 % of the entries, a square matrix's square factor takes 16 %: the reference crashes here.
    with pytest.raises(BudgetError, match=r"K=200 edges of 1,600 for a \(40, 40\).*takes 256 .*needs 40"):
        solve(torch.randn(40, 40), sparsity=0.875, preset="paper")
    assert solve(torch.randn(40, 40), sparsity=0.875).edges == 200


def test_no_sparsity_is_feasible():
    with pytest.raises(BudgetError, match="no sparsity is feasible"):
        solve(torch.randn(2, 2), sparsity=0.25, preset="paper")
    # Two units need all four entries; one unit is content with two of the three that s = .25 leaves.
    with pytest.raises(BudgetError, match="no sparsity is feasible, or give units=1"):
        solve(torch.randn(2, 2), sparsity=0.25)
    with pytest.raises(BudgetError, match=r"no sparsity is feasible$"):
        solve(torch.randn(1, 2), sparsity=0.5)


def test_unknown_names_list_the_nearest_and_all():
    with pytest.raises(
        SpecError,
        match=r"no preset 'papr'; did you mean paper\? valid: best, deep, paper, pruned, quick, svd_pruned, thorough",
    ):
        solve(WEIGHT, preset="papr")
    with pytest.raises(
        SpecError, match=r"no setting 'outer_iteration'; did you mean outer_iterations.*valid: .*square_share"
    ):
        solve(WEIGHT, outer_iteration=8)


def test_a_setting_of_another_preset_says_whose_it_is():
    with pytest.raises(SpecError, match=r"preset 'best' has no setting 'rounding'.*; preset 'paper' has it"):
        solve(WEIGHT, rounding="exact")
    with pytest.raises(
        SpecError, match=r"'refine_rounds'.*; preset 'best' or 'quick' or 'thorough' or 'deep' or 'svd_pruned' has it"
    ):
        solve(WEIGHT, preset="paper", refine_rounds=0)


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
        solve(WEIGHT, preset="paper", **{setting: value})


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("outer_iterations", 1, "give a whole number of at least 2"),
        ("inner_iterations", 0, "give a whole number of at least 1"),
        ("refine_rounds", -1, "give a whole number of at least 0"),
        ("refine_steps", 0, "give a whole number of at least 1"),
        ("seed", -1, "give a whole number of at least 0"),
        ("rho_start", 0.0, "give a finite number above 0"),
        ("rho_end", -0.5, "give a finite number above 0"),
        ("ridge_end", 0, "give a finite number above 0"),
        ("start_share", 1.01, "give a finite number above 0 and at most 1"),
        ("square_share", 0.0, "give a finite number above 0 and at most 1"),
        ("gram_from", -0.1, "give a finite number from 0 to 1"),
        ("shrinkage", 1.5, "give a finite number from 0 to 1"),
        ("shrinkage", "some", 'give a number, or "auto"'),
    ],
)
def test_settings_of_the_annealed_solver_out_of_range(setting: str, value: object, message: str):
    with pytest.raises(SpecError, match=f"^{setting}={value!r}: {message}"):
        solve(WEIGHT, **{setting: value})


def test_all_refusals_are_value_errors():
    for error in (WeightError, GramError, SparsityError, UnitsError, BudgetError, SpecError):
        assert issubclass(error, SolveInputError) and issubclass(error, ValueError)


def test_paper_values():
    """Paper, app. swd-optimization, and for the last four the reference code (method.md §5.2)."""
    spec = PRESETS["paper"]
    assert spec == DsfSpec()
    assert (spec.outer_iterations, spec.inner_iterations, spec.support_iterations) == (40, 5, 2)
    assert (spec.rho, spec.ridge, spec.final_iterations, spec.final_rho) == (1.0, 1e-2, 20, 1.0)
    assert (spec.square_density(768, 768), spec.square_density(768, 3072)) == (0.16, 0.25)
    assert [spec.rho_start(t) for t in (0, 37, 39)] == [0.0, 1.0, 1.0]
    assert spec.rho_start(10) == pytest.approx((10 / 37) ** 3)
    assert (spec.start_share, spec.sparsity_cap, spec.norm_floor, spec.rounding) == (0.5, 0.99, 1e-8, "reference")


def test_presets_of_the_annealed_solver_differ_in_their_iterations_only():
    assert DEFAULT_PRESET in PRESETS and PRESETS["best"] == AnnealSpec()
    for shape in ((256, 512), (512, 512)):  # solved in float64, in float32
        specs = [
            resolve(name, {}).for_matrix(*shape, min(shape), calibrated=True) for name in ("quick", "best", "thorough")
        ]
        iterations = [spec.outer_iterations for spec in specs]
        assert iterations == sorted(iterations) and len(set(iterations)) == 3
        for spec, outer in zip(specs, iterations, strict=True):
            assert spec == AnnealSpec(outer_iterations=outer).for_matrix(*shape, min(shape), calibrated=True)


@pytest.mark.parametrize(
    ("shape", "options", "alternations"),
    [
        ((256, 512), {}, 56),
        ((256, 513), {}, 64),
        ((8, 12), {"precision": "float32"}, 64),
        ((512, 512), {"precision": "float64"}, 56),
        ((8, 12), {"outer_iterations": 9}, 9),
    ],
)
def test_alternations_where_none_are_named(shape: tuple[int, int], options: dict, alternations: int):
    """In float64, which takes twice the time, fewer; a number that is given stays."""
    assert resolve("best", options).for_matrix(*shape, min(shape), calibrated=True).outer_iterations == alternations


@pytest.mark.parametrize(
    ("shape", "units", "options", "balance"),
    [
        ((600, 600), 600, {}, 0.1),
        ((600, 900), 600, {}, 0.1),
        ((900, 600), 600, {}, 0.1),
        ((600, 901), 600, {}, 0.0),  # too wide
        ((600, 600), 1200, {}, 0.0),  # units outnumber coordinates
        ((600, 600), 600, {"basis": "input"}, 0.0),  # units are to stay what they start as
        ((64, 64), 64, {}, 0.0),  # solved in float64
        ((64, 64), 64, {"precision": "float32"}, 0.1),
        ((600, 600), 600, {"balance": 0.0}, 0.0),
        ((600, 600), 600, {"square_share": 0.2}, 0.0),  # a share that was asked for stays
    ],
)
def test_budgets_of_about_square_matrices_move(shape: tuple[int, int], units: int, options: dict, balance: float):
    assert resolve("best", options).for_matrix(*shape, units, calibrated=False).balance == balance


@pytest.mark.parametrize(("precision", "alternations"), [("float32", 84), ("float64", 56)])
def test_alternations_without_a_gram_are_more_in_float32(precision: str, alternations: int):
    assert solve(WEIGHT, precision=precision).settings["outer_iterations"] == alternations


def test_alternations_auto_are_those_that_are_not_named():
    assert resolve("quick", {"outer_iterations": "auto"}) == PRESETS["best"]
    with pytest.raises(SpecError, match=r'outer_iterations=.some.: give a number, or "auto"'):
        resolve("best", {"outer_iterations": "some"})


def test_schedules_by_hand():
    spec = AnnealSpec(rho_start=0.1, ridge_start=1e-2, ridge_end=1e-4, gram_from=0.5, gram_at_first=0)
    # Geometric: half way the penalty is sqrt(.1 * .9), the ridge sqrt(1e-2 * 1e-4).
    to_end = replace(spec, rho_end=0.9)
    assert [to_end.rho(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([0.1, 0.3, 0.9])
    assert [spec.ridge(p) for p in (0.0, 0.5, 1.0)] == pytest.approx([1e-2, 1e-3, 1e-4])
    # Linear from .5 on: at .75 half of the Gram. 1 leaves it out, 0 starts at once.
    assert [spec.gram_blend(p) for p in (0.0, 0.5, 0.75, 1.0)] == [0, 0, 0.5, 1]
    assert [replace(spec, gram_from=1).gram_blend(p) for p in (0.0, 0.99, 1.0)] == [0, 0, 0]
    assert [replace(spec, gram_from=0).gram_blend(p) for p in (0.0, 0.25, 1.0)] == [0, 0.25, 1]
    # With a share at once: from nothing to it, then linear.
    at_once = replace(spec, gram_from=0.8, gram_at_first=0.5)
    assert [at_once.gram_blend(p) for p in (0.0, 0.79, 0.8, 0.9, 1.0)] == pytest.approx([0, 0, 0.5, 0.75, 1])


@pytest.mark.parametrize(("precision", "start", "first"), [("float32", 0.7, 0.5), ("float64", 0.5, 0.0)])
def test_when_the_full_gram_begins_where_nothing_is_named(precision: str, start: float, first: float):
    """In float32, where matrices are large, later and at once; what is named stays."""
    settings = solve(WEIGHT, torch.eye(8), precision=precision).settings
    assert (settings["gram_from"], settings["gram_at_first"]) == (start, first)
    named = solve(WEIGHT, torch.eye(8), precision=precision, gram_from=0.3, gram_at_first=0.25).settings
    assert (named["gram_from"], named["gram_at_first"]) == (0.3, 0.25)


@pytest.mark.parametrize(("calibrated", "lower", "upper"), [(True, 0.4, 0.5), (False, 0.7, 0.8)])
def test_the_penaltys_end_by_hand(calibrated: bool, lower: float, upper: float):
    half = (lower + upper) / 2
    ends = {
        (0.1, 0.2, 0.0): lower,
        (0.5, 0.2, 0.0): lower,
        (0.625, 0.2, 0.0): half,
        (0.75, 0.2, 0.0): upper,
        (0.99, 0.2, 0.0): upper,
        (0.5, 0.2, 0.15): half if calibrated else lower,  # half of the most shrinkage
        (0.625, 0.2, 0.15): half,
        (0.5, 0.2, 1.0): upper if calibrated else lower,
        (0.5, 0.04, 0.0): upper,  # nearly all entries in one factor
    }
    for case, end in ends.items():
        assert automatic_rho_end(*case, calibrated=calibrated) == pytest.approx(end)
    assert automatic_rho_end(0.75, 0.2, 0.01, calibrated=calibrated) == upper


def test_shrinkage_by_hand():
    spec = AnnealSpec()
    # d_in / tokens, at most MOST_SHRINKAGE: an eighth at eight tokens per input.
    assert MOST_SHRINKAGE > 0.125 and spec.shrinkage_for(800, 100) == pytest.approx(0.125)
    assert spec.shrinkage_for(100, 100) == spec.shrinkage_for(10, 100) == MOST_SHRINKAGE
    assert spec.shrinkage_for(10_000, 100) == pytest.approx(0.01)
    assert spec.shrinkage_for(None, 100) == 0.0
    assert (
        AnnealSpec(shrinkage=0.125).shrinkage_for(None, 100) == AnnealSpec(shrinkage=0.125).shrinkage_for(9, 3) == 0.125
    )
    assert PRESETS["paper"].shrinkage_for(10, 100) == 0.0


def test_values_beyond_float32_are_named():
    # Finite in float64, infinite where the solver works.
    large = torch.eye(4, dtype=torch.float64)
    large[1, 2] = 1e300
    with pytest.raises(WeightError, match=r"weight\[1, 2\] is 1e\+300: every entry must be finite in float32"):
        solve(large)
    with pytest.raises(GramError, match=r"gram\[1, 2\] is 1e\+300: every entry must be finite in float32"):
        solve(torch.eye(4), large)
