"""verified: a shortened run is trusted only where it gives the plain logits; who asked is told why it is not."""

import warnings

import pytest
import torch

from swd_lens.hosts.verified import AGREES, verified

PLAIN = torch.tensor([1.0, -4.0, 2.0])


@pytest.mark.parametrize(
    ("plain", "fast", "how", "agrees"),
    [
        (PLAIN, PLAIN + 0.9 * 4 * AGREES, {}, True),
        (PLAIN, PLAIN + 1.1 * 4 * AGREES, {}, False),
        (lambda: PLAIN, PLAIN, {}, True),
        (PLAIN.bfloat16(), PLAIN.bfloat16() * 1.01, {}, True),
        (PLAIN.bfloat16(), PLAIN.bfloat16() * 1.01, {"rounded": False}, False),
        (PLAIN, PLAIN + 1e-4, {"within": 1e-5}, False),
        (torch.tensor([1.0, torch.inf]), torch.tensor([1.0, torch.inf]), {}, True),
        (torch.tensor([1.0, 2.0]), torch.tensor([1.0, torch.nan]), {}, False),
        (torch.tensor([torch.nan]), torch.tensor([torch.nan]), {}, True),
    ],
)
def test_the_logits_have_to_be_the_plain_ones(plain, fast, how, agrees):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert verified(lambda: fast, plain, **how) is agrees
    if not agrees:
        with pytest.warns(UserWarning, match=r"other logits when a run is shortened \(so\)"):
            assert not verified(lambda: fast, plain, shortcut="so", **how)


def test_a_run_that_fails_is_not_trusted_but_want_of_memory_says_nothing_of_the_host():
    def fails(error):
        def run():
            raise error

        return run

    assert not verified(fails(IndexError("position 3 of 1")), PLAIN)
    with pytest.warns(UserWarning, match=r"fails when it is shortened \(so\): IndexError: position 3 of 1"):
        assert not verified(fails(IndexError("position 3 of 1")), PLAIN, shortcut="so")
    with pytest.raises(MemoryError):
        verified(fails(MemoryError()), PLAIN, shortcut="so")
