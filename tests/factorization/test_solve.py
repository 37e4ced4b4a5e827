"""solve: tensors in, Factors out, with what makes them a file and a unit source."""

import pytest
import torch

import swd_lens as swd


def test_the_solvers_answer_becomes_factors(tmp_path):
    weight = torch.randn(12, 8, generator=torch.Generator().manual_seed(0))
    f = swd.solve(weight.half(), sparsity=0.5, preset="quick")
    assert f.edges == 48 and f.settings["preset"] == "quick" and set(f.provenance) == {"solver", "version"}
    assert f.weight is not None and f.weight.dtype == torch.float32 and 0 < f.relmse() < 1
    assert f.relmse(torch.eye(12)) == pytest.approx(f.relmse())
