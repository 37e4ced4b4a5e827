"""Every refusal: its class, and a message with the value and the way out."""

import subprocess
import sys

import pytest
import torch

from swd_lens.base.errors import BudgetError, GramError, SolveInputError, SparsityError, SpecError, UnitsError, WeightError
from swd_lens.factorization.solve import solve
from swd_lens.solver import PRESETS
from swd_lens.solver.validate import check_tokens

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
GRAM = torch.eye(8)


def with_entry(matrix: torch.Tensor, i: int, j: int, value: float) -> torch.Tensor:
    changed = matrix.clone()
    changed[i, j] = value
    return changed


def test_weight():
    for weight, message in (
        (torch.zeros(8), r"shape \(8,\).*two-dimensional"),
        (torch.zeros(2, 3, 4), r"shape \(2, 3, 4\).*two-dimensional"),
        (torch.zeros(0, 4), r"shape \(0, 4\).*empty"),
        (torch.ones(8, 12, dtype=torch.int64), r"dtype torch.int64.*weight.float\(\)"),
        (with_entry(WEIGHT, 3, 5, float("nan")), r"weight\[3, 5\] is nan: every entry"),
        (with_entry(with_entry(WEIGHT, 3, 5, float("nan")), 1, 2, -float("inf")), r"weight\[1, 2\] is -inf \(and 1 more"),
        (torch.zeros(8, 12), "all zeros"),
        (WEIGHT.to_sparse(), r"weight is torch\.sparse_coo; give a dense matrix with its values, e\.g\. weight\.to_dense"),
        (WEIGHT.to("meta"), "weight is on the meta device; give a dense matrix with its values"),
    ):
        with pytest.raises(WeightError, match=message):
            solve(weight)


def test_gram():
    for gram, message in (
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
    ):
        with pytest.raises(GramError, match=message):
            solve(WEIGHT, gram)


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
def test_an_indefinite_gram_is_refused_by_every_preset(preset: str):
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    gram = indefinite_gram(0.01)
    with pytest.raises(GramError, match="not positive semi-definite"):
        solve(weight, (gram + gram.T) / 2, preset=preset, tokens=1)
    assert solve(weight, indefinite_gram(0.0), preset=preset).edges > 0  # rounding pushes zeros below zero


def test_an_indefinite_gram_is_refused_where_only_its_diagonal_would_be_used():
    weight, gram = torch.randn(12, 8, generator=torch.Generator().manual_seed(0)), indefinite_gram(0.01)
    for used in ({"preset": "paper", "final_iterations": 0}, {"preset": "best", "shrinkage": 1.0}):
        with pytest.raises(GramError, match="not positive semi-definite"):
            solve(weight, gram, **used)


@pytest.mark.parametrize(("shape", "value"), [((8, 8), 1.0), ((12, 8), -3.0), ((8, 24), 1e-30)])
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
    told = r'units=16: the paper.s solver is defined for 8 units, .* units=None, or take preset="best"'
    with pytest.raises(UnitsError, match=told):
        solve(WEIGHT, units=16, preset="paper")
    for units in (8, "1x", None):
        assert solve(WEIGHT, units=units, preset="paper", outer_iterations=4).n_units == 8


@pytest.mark.parametrize(("units", "width"), [(None, 8), ("2x", 16), ("1.5x", 12), (" .5x ", 4), (11, 11), (1, 1)])
def test_units_of_any_width(units: int | str | None, width: int):
    factors = solve(WEIGHT, units=units, outer_iterations=4)
    assert factors.n_units == factors.settings["units"] == width


def test_units_that_are_no_width_or_out_of_range():
    for units in ("double", "2", "x", "-1x", "2xx", ""):
        with pytest.raises(UnitsError, match=rf"units='{units}': give a number, None for 8, one per coordinate .*, or \"2x\""):
            solve(WEIGHT, units=units)
    for units in (0, -3, 97, True, 8.0, 1.5, "0x", "100x"):  # of 96 entries no more units than that could have one each
        with pytest.raises(UnitsError, match=rf"units={units!r}: give a whole number from 1 to 96"):
            solve(WEIGHT, units=units)


def test_all_refusals_are_value_errors():
    for error in (WeightError, GramError, SparsityError, UnitsError, BudgetError, SpecError):
        assert issubclass(error, SolveInputError) and issubclass(error, ValueError)


@pytest.mark.parametrize("tokens", [0, -5, True])
def test_tokens(tokens: object):
    with pytest.raises(ValueError, match=rf"tokens must be a whole number of at least 1, got {tokens!r}"):
        check_tokens(tokens)


def test_values_beyond_float32_are_named():
    # Finite in float64, infinite where the solver works.
    large = torch.eye(4, dtype=torch.float64)
    large[1, 2] = 1e300
    with pytest.raises(WeightError, match=r"weight\[1, 2\] is 1e\+300: every entry must be finite in float32"):
        solve(large)
    with pytest.raises(GramError, match=r"gram\[1, 2\] is 1e\+300: every entry must be finite in float32"):
        solve(torch.eye(4), large)


def test_edges_in_place_of_a_sparsity():
    """K itself: the same as the sparsity that gives it; more than W has entries only where the solver can."""
    by_edges, by_sparsity = solve(WEIGHT, edges=48, preset="quick"), solve(WEIGHT, sparsity=0.5, preset="quick")
    assert torch.equal(by_edges.read, by_sparsity.read) and torch.equal(by_edges.write, by_sparsity.write)
    assert by_edges.edges == 48
    beyond = solve(WEIGHT, edges=8 + 96, units=8, basis="input", preset="quick")  # inputs as units, and all of W
    assert beyond.edges == 104 and beyond.settings["sparsity"] < 0
    torch.testing.assert_close(beyond.read @ beyond.write, WEIGHT)
    for wrong, preset, message in (
        (1, "best", "edges must be a whole number of at least 2, got 1"),
        (96, "paper", "edges=96: the weight has 96 entries"),
        (100, "pruned", "edges=100: the weight has 96 entries"),
    ):
        with pytest.raises(SparsityError, match=message):
            solve(WEIGHT, edges=wrong, preset=preset)
