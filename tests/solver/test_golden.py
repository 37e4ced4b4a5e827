"""The paper preset against the public reference code, row by row; then preset best against both.

Choosing supports amplifies rounding: in float32 the reference itself misses its own numbers by up to 5 % when it runs with
another number of threads, and so does any copy of it on another processor. What does not depend on the processor:

1. In float64 the supports are the reference's, every entry of them (tests/golden_files/reference_float64.json: the public
   code run in float64), and the errors are equal to 1e-6.
2. In float32 each row's error lies within 3 % of the reference's float32 one (shared/golden/reference.json), and the
   geometric mean within 1 %.

Of thirty rows some are taken: in float64 each matrix with both kinds of data and each sparsity with both; in float32 the pairs
of matrix and sparsity that float64 leaves out. `python -m tests.benchmarks.solver` has all of a half and three quarters.
"""

import hashlib
import json
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


def row_id(row: dict) -> str:
    return f"{row['matrix']}-{row['sparsity']}-{'zero' if row['zero_data'] else 'calibrated'}"


ROW = {row_id(row): row for row in ROWS}
ROW_IN_FLOAT64 = {row_id(row): row for row in IN_FLOAT64}
FLOAT64 = [
    "attn_out-0.25-zero",
    "attn_out-0.75-calibrated",
    "attn_qkv-0.5-calibrated",
    "attn_qkv-0.875-zero",
    "mlp_in-0.5-zero",
    "mlp_in-0.875-calibrated",
    "mlp_out-0.25-calibrated",
    "mlp_out-0.75-zero",
]
FLOAT32 = [
    "attn_out-0.5-zero",
    "attn_qkv-0.25-calibrated",
    "attn_qkv-0.75-zero",
    "mlp_in-0.25-zero",
    "mlp_in-0.75-calibrated",
    "mlp_out-0.5-calibrated",
    "mlp_out-0.875-zero",
]


def cases(names: list[str], quick: str) -> list:
    """The rows as test cases, all but one slow."""
    return [pytest.param(name, marks=[] if name == quick else pytest.mark.slow) for name in names]


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
    assert list(ROW_IN_FLOAT64) == list(ROW)


@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize("name", cases(FLOAT64, quick="attn_out-0.75-calibrated"))
def test_paper_preset_in_float64_has_the_references_supports(name: str):
    row = ROW_IN_FLOAT64[name]
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


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_paper_preset_in_float32_has_the_references_errors_but_for_rounding():
    ratios = {name: float32_ratio(ROW[name]) for name in FLOAT32}
    assert all(abs(ratio - 1) < 0.03 for ratio in ratios.values()), ratios
    assert geometric_mean(ratios.values()) == pytest.approx(1, abs=0.01), ratios


# The bar's rows are each matrix at .5 and .75, calibrated: of each matrix one.
BARRED = ["attn_out-0.75-calibrated", "attn_qkv-0.5-calibrated", "mlp_in-0.75-calibrated", "mlp_out-0.5-calibrated"]
# Beside them rows without data, and the smallest matrix at another sparsity.
BEATEN = ["attn_out-0.25-zero", "attn_out-0.25-calibrated", "attn_qkv-0.75-zero", "mlp_in-0.5-zero", *BARRED]


@lru_cache  # the bar's rows are asked for twice
def best_ratio(name: str) -> float:
    """Error over the reference's: held-out relMSE, or relative Frobenius for zero-data. K is checked on the way."""
    row, tensors = ROW[name], matrix(ROW[name]["matrix"])
    factors = solve(tensors["W"], None if row["zero_data"] else tensors["gram_calibration"], row["sparsity"])
    assert factors.edges == round((1 - row["sparsity"]) * tensors["W"].numel())
    if row["zero_data"]:
        return factors.relative_frobenius() / row["relative_frobenius"]
    return factors.relmse(tensors["gram_heldout"]) / row["relmse_heldout"]


@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize("name", cases(BEATEN, quick="attn_out-0.25-zero"))
def test_best_beats_the_reference(name: str):
    assert best_ratio(name) < 1


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_best_has_eleven_twentieths_of_the_references_error():
    """Of these rows .520, of all eight .542 (the bar is .55). In float32 another processor may be a little worse."""
    assert geometric_mean(map(best_ratio, BARRED)) <= 0.54


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_twice_the_units_help():
    """Measured .85 of the error."""
    tensors, how = matrix("attn_out"), {"outer_iterations": 16, "precision": "float32"}
    once, twice = (solve(tensors["W"], tensors["gram_calibration"], 0.5, units=u, **how) for u in (None, "2x"))
    assert twice.edges == once.edges and twice.n_units == 2 * once.n_units
    assert twice.relmse(tensors["gram_heldout"]) < 0.9 * once.relmse(tensors["gram_heldout"])


@pytest.mark.slow
@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_budgets_that_grow_help():
    """Measured .95 and .87 of the error of ones that are whole from the start."""
    tensors, how = matrix("attn_out"), {"outer_iterations": 24, "precision": "float32"}
    for units, share in ((None, 0.99), ("2x", 0.93)):
        grown, whole = (
            solve(tensors["W"], tensors["gram_calibration"], 0.5, units=units, held_back=held_back, **how)
            for held_back in (0.3, 0.0)
        )
        assert grown.edges == whole.edges
        assert grown.relmse(tensors["gram_heldout"]) < share * whole.relmse(tensors["gram_heldout"])
