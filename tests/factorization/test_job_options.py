"""Options that no factorization can be made with (`SolveOptions`)."""

import pytest

import swd_lens as swd
from tests.factorization.test_factorize import QUICK, TOKENS, count_solves


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1, got 0"),
        ({"batch_size": True}, "batch_size must be a whole number of at least 1, got True"),
        ({"device": "nowhere"}, "device='nowhere' cannot be used here"),
    ],
)
def test_bad_settings_fail_before_anything_is_run(model, changed, message, monkeypatch):
    calls = count_solves(monkeypatch)
    with pytest.raises(ValueError, match=message):
        swd.factorize(model, "mlp_out", **{**QUICK, "tokens": TOKENS, **changed})
    assert calls == []
