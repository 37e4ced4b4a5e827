"""Presets (spec.py): names, and how they differ."""

import pytest
import torch

from swd_lens.base.errors import SpecError
from swd_lens.factorization.solve import solve
from swd_lens.solver import DEFAULT_PRESET, PRESETS, AnnealSpec
from swd_lens.solver.spec import resolve

WEIGHT = torch.randn(8, 12, generator=torch.Generator().manual_seed(0))


def test_unknown_names_list_the_nearest_and_all_and_settings_of_others_say_whose_they_are():
    with pytest.raises(
        SpecError, match=r"no preset 'papr'; did you mean paper\? valid: best, deep, paper, pruned, quick, svd_pruned, thorough"
    ):
        solve(WEIGHT, preset="papr")
    with pytest.raises(SpecError, match=r"no setting 'outer_iteration'; did you mean outer_iterations.*valid: .*square_share"):
        solve(WEIGHT, outer_iteration=8)
    with pytest.raises(SpecError, match=r"preset 'best' has no setting 'rounding'.*; preset 'paper' has it"):
        solve(WEIGHT, rounding="exact")
    with pytest.raises(
        SpecError, match=r"'refine_rounds'.*; preset 'best' or 'quick' or 'thorough' or 'deep' or 'svd_pruned' has it"
    ):
        solve(WEIGHT, preset="paper", refine_rounds=0)


def test_presets_of_the_annealed_solver_differ_in_their_iterations_only():
    assert DEFAULT_PRESET in PRESETS and PRESETS["best"] == AnnealSpec()
    for shape in ((256, 512), (512, 512)):  # solved in float64, in float32
        specs = [resolve(name, {}).for_matrix(*shape, min(shape), calibrated=True) for name in ("quick", "best", "thorough")]
        iterations = [spec.outer_iterations for spec in specs]
        assert iterations == sorted(iterations) and len(set(iterations)) == 3
        for spec, outer in zip(specs, iterations, strict=True):
            assert spec == AnnealSpec(outer_iterations=outer).for_matrix(*shape, min(shape), calibrated=True)
