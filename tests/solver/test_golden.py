"""The paper preset against what the public reference reached (shared/golden/reference.json), row by row.

The reference chooses supports, which amplifies float32 rounding: run with one thread instead of two, it misses its own
numbers by up to 5 %. The numbers were made with two threads, and so are ours; preset "paper" then repeats the
reference's bits, and the ratios are 1 up to 1e-6. The tolerance leaves room for another BLAS, not for another method.
"""

import json
from functools import lru_cache
from pathlib import Path
from statistics import geometric_mean

import pytest
import torch
from safetensors.torch import load_file

from swd_lens.solver import solve

GOLDEN = Path(__file__).resolve().parents[3] / "shared" / "golden"
ROWS = json.loads((GOLDEN / "reference.json").read_text())["rows"] if (GOLDEN / "reference.json").exists() else []
TOLERANCE = 0.01
REFERENCE_THREADS = 2


@pytest.fixture(autouse=True)
def threads():  # instead of conftest's one
    before = torch.get_num_threads()
    torch.set_num_threads(REFERENCE_THREADS)
    yield
    torch.set_num_threads(before)


@lru_cache
def matrix(name: str) -> dict[str, torch.Tensor]:
    return load_file(GOLDEN / f"{name}.safetensors")


def row_id(row: dict) -> str:
    return f"{row['matrix']}-{row['sparsity']}-{'zero' if row['zero_data'] else 'calibrated'}"


@pytest.mark.skipif(not ROWS, reason=f"no {GOLDEN}/reference.json: the golden matrices are not part of the repository")
def test_golden_rows_cover_all_matrices_and_both_kinds_of_data():
    assert {row["matrix"] for row in ROWS} == {"mlp_in", "mlp_out", "attn_qkv", "attn_out"}
    assert len(ROWS) == 30 and sum(row["zero_data"] for row in ROWS) == 15


@pytest.mark.skipif(not ROWS, reason=f"no {GOLDEN}/reference.json: the golden matrices are not part of the repository")
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_paper_preset_repeats_the_reference(row: dict):
    tensors = matrix(row["matrix"])
    gram = None if row["zero_data"] else tensors["gram_calibration"]
    factors = solve(tensors["W"], gram, row["sparsity"], preset="paper", outer_iterations=row["outer_iterations"])

    assert int(factors.read.count_nonzero()) == row["nonzeros_read"]
    assert int(factors.write.count_nonzero()) == row["nonzeros_write"]
    measured = {
        "relmse_heldout": factors.relmse(tensors["gram_heldout"]),
        "relmse_calibration": factors.relmse(tensors["gram_calibration"]),
        "relative_frobenius": factors.relative_frobenius(),
    }
    for name, value in measured.items():
        assert value == pytest.approx(row[name], rel=TOLERANCE), f"{name}: {value / row[name]:.4f} of the reference's"


# ---------------------------------------------------------------------- preset best

MISSING = f"no {GOLDEN}/reference.json: the golden matrices are not part of the repository"


OFTEN = [i for i, r in enumerate(ROWS) if r["sparsity"] in (0.5, 0.75) or r["matrix"] == "attn_out"]


@lru_cache
def best_ratio(index: int) -> float:
    """Error over the reference's: held-out relMSE, or relative Frobenius for zero-data. K is checked on the way."""
    row = ROWS[index]
    tensors = matrix(row["matrix"])
    factors = solve(tensors["W"], None if row["zero_data"] else tensors["gram_calibration"], row["sparsity"])
    assert factors.edges == round((1 - row["sparsity"]) * tensors["W"].numel())
    if row["zero_data"]:
        return factors.relative_frobenius() / row["relative_frobenius"]
    return factors.relmse(tensors["gram_heldout"]) / row["relmse_heldout"]


def rows_where(zero_data: bool, *sparsities: float) -> list[int]:
    return [i for i, r in enumerate(ROWS) if r["zero_data"] == zero_data and r["sparsity"] in sparsities]


@pytest.mark.skipif(not ROWS, reason=MISSING)
@pytest.mark.parametrize("index", OFTEN, ids=lambda i: row_id(ROWS[i]))
def test_best_beats_the_reference(index: int):
    """The benchmark command has every row; these take half of its time."""
    assert best_ratio(index) < 1


@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_best_has_three_fifths_of_the_references_error():
    """The issue's bar, .60; measured .56."""
    ratios = [best_ratio(i) for i in rows_where(False, 0.5, 0.75)]
    assert len(ratios) == 8 and geometric_mean(ratios) <= 0.60


@pytest.mark.skipif(not ROWS, reason=MISSING)
def test_twice_the_units_help():
    tensors = matrix("mlp_out")
    once, twice = (
        solve(tensors["W"], tensors["gram_calibration"], 0.5, units=u, outer_iterations=16) for u in (None, "2x")
    )
    assert twice.edges == once.edges and twice.n_units == 2 * once.n_units
    assert twice.relmse(tensors["gram_heldout"]) < 0.8 * once.relmse(tensors["gram_heldout"])
