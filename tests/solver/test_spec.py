"""Settings (spec.py): their bounds, the paper's values, and schedules by hand."""

from dataclasses import replace

import pytest
import torch

from swd_lens.base.errors import SpecError
from swd_lens.factorization.solve import solve
from swd_lens.solver import PRESETS, AnnealSpec, DsfSpec

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))
ABOVE, SHARE = "a finite number above 0", "a finite number above 0 and at most 1"
OUT_OF_RANGE = {
    "paper": [
        ("outer_iterations", (3, True), "whole number of at least 4"),
        ("inner_iterations", (0,), "whole number of at least 1"),
        ("support_iterations", (6,), "whole number from 1 to 5"),
        ("final_iterations", (-1,), "whole number of at least 0"),
        ("rho", (0.0,), ABOVE),
        ("ridge", (float("inf"),), ABOVE),
        ("square_density_square", (1.5,), "number above 0 and at most 1"),
        ("norm_floor", (float("nan"),), ABOVE),
        ("rounding", ("floor",), "one of 'reference', 'exact'"),
        ("arithmetic", ("fp8",), "one of 'reference', 'clean'"),
    ],
    "best": [
        ("outer_iterations", (1,), "whole number of at least 2"),
        ("inner_iterations", (0,), "whole number of at least 1"),
        ("refine_rounds", (-1,), "whole number of at least 0"),
        ("refine_steps", (0,), "whole number of at least 1"),
        ("seed", (-1,), "whole number of at least 0"),
        ("rho_start", (0.0,), ABOVE),
        ("rho_end", (-0.5,), ABOVE),
        ("ridge_end", (0,), ABOVE),
        ("start_share", (1.01,), SHARE),
        ("square_share", (0.0,), SHARE),
        ("gram_from", (-0.1,), "a finite number from 0 to 1"),
        ("shrinkage", (1.5,), "a finite number from 0 to 1"),
        ("shrinkage", ("some",), 'a number, or "auto"'),
    ],
}


@pytest.mark.parametrize("preset", OUT_OF_RANGE)
def test_settings_out_of_range(preset: str):
    for setting, values, message in OUT_OF_RANGE[preset]:
        for value in values:
            with pytest.raises(SpecError, match=f"{setting}={value!r}: (give|choose) .*{message}"):
                solve(WEIGHT, preset=preset, **{setting: value})


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
