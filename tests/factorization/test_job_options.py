"""Options that no factorization can be made with (`SolveOptions`)."""

import pytest

import swd_lens as swd
from tests.factorization.test_factorize import QUICK, TOKENS, count_solves


def test_bad_settings_fail_before_anything_is_run(model, monkeypatch):
    calls = count_solves(monkeypatch)
    for changed, message in (
        ({"batch_size": 0}, "batch_size must be .*, got 0"),
        ({"device": "nowhere"}, "device='nowhere' cannot"),
    ):
        with pytest.raises(ValueError, match=message):
            swd.factorize(model, "mlp_out", **{**QUICK, "tokens": TOKENS, **changed})
    assert calls == []
