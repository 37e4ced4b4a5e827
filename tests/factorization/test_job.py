"""What is to be factorized and how, checked before anything is run (job.py)."""

import warnings

import pytest

import swd_lens as swd
import swd_lens.factorization.job
import swd_lens.factorization.stages
import swd_lens.solver
from tests.factorization.test_factorize import QUICK, TOKENS
from tests.micro import random_tokens


def test_the_solver_is_told_the_number_of_tokens(model, monkeypatch):
    seen, solve = [], swd_lens.solver.solve
    monkeypatch.setattr(swd_lens.solver, "solve", lambda *a, **n: seen.append((n["tokens"], n["units"])) or solve(*a, **n))
    swd.factorize(model, "blocks.0.mlp_out", **QUICK, tokens=TOKENS)
    swd.factorize(model, "blocks.0.mlp_out", **QUICK, units=16)
    assert seen == [(108, None), (None, 16)]


def test_few_tokens(model):
    few = random_tokens(2, 6)
    with pytest.warns(UserWarning, match=r"Gram is singular; preset 'paper' applies no shrinkage here"):
        swd.factorize(model, "blocks.0.mlp_out", **QUICK, tokens=few)
    best = {"preset": "best", "outer_iterations": 4, "progress": False}
    with pytest.warns(UserWarning, match=r"12 calibration tokens .* shrinkage (\S+) is applied") as told:
        f = swd.factorize(model, "blocks.0.mlp_out", **best, tokens=few)["blocks.0.mlp_out"]
    assert f"shrinkage {f.settings['shrinkage']:.3g} is" in str(told[0].message) and f.settings["shrinkage"] > 0
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        swd.factorize(model, "blocks.0.mlp_out", **QUICK, tokens=random_tokens(4, 8))  # 32 tokens for 32 inputs


def test_bad_options_fail_before_anything_is_run(model, tmp_path, monkeypatch):
    def never(*arguments, **named):
        raise AssertionError("the host was touched")

    for work in ("factorization.stages.collect_grams", "factorization.job.host_fingerprint", "solver.solve"):
        monkeypatch.setattr(f"swd_lens.{work}", never)
    for bad, message in (
        ({"sparsity": 1}, "sparsity=1"),
        ({"outer_iteration": 5}, "no setting 'outer_iteration'"),
        ({"units": 7}, "units=7"),
        ({"preset": "papers"}, "no preset 'papers'"),
    ):
        with pytest.raises(ValueError, match=rf"blocks\.0\.mlp_out .*{message}"):
            swd.factorize(model, "blocks.0.mlp_out", **{**QUICK, **bad}, tokens=TOKENS, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
