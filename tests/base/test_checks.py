"""Checks of single arguments: what they let through, and what their messages say."""

import numpy as np
import pytest

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import TrainError


def test_one_of_takes_its_choices_and_names_them():
    one_of("by", "kl", ("kl", "error"))
    one_of("by", None, [None, 1])
    one_of("by", "b", iter("ab"))
    with pytest.raises(ValueError, match=r"^by must be one of 'kl', 'error', got 'ce'$"):
        one_of("by", "ce", (each for each in ("kl", "error")))
    with pytest.raises(TrainError, match=r"^loss must be one of 'a', got 'x\\x1b'$"):
        one_of("loss", "x\x1b", ["a"], TrainError)


def test_bounded_takes_what_lies_within_and_says_its_bounds():
    for value in (1, 7, np.int64(3)):
        bounded("n", value, 1, 7)
    for value in (0, 1, 0.25, np.float32(0.5)):
        bounded("share", value, 0, 1, whole=False)
    for value in (0, 8, 2.0, 2.5, True, None, "2", float("nan"), np.float64(2)):
        with pytest.raises(ValueError, match=r"^n must be a whole number from 1 to 7, got "):
            bounded("n", value, 1, 7)
    for value in (-1e-9, 1.5, float("nan"), float("inf"), True, "0.5", 1j):
        with pytest.raises(TrainError, match=r"^share must be a number from 0 to 1, got "):
            bounded("share", value, 0, 1, whole=False, error=TrainError)
    for bounds, words in (
        ({"least": 1}, "n must be a whole number of at least 1, got None"),
        ({"most": 0.5, "whole": False}, "n must be a number of at most 0.5, got None"),
        ({"whole": False}, "n must be a number, got None"),
    ):
        with pytest.raises(ValueError, match=f"^{words}$"):
            bounded("n", None, **bounds)
