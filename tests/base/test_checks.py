"""Checks of single arguments: what is taken, and what the refusal says."""

import math

import numpy as np
import pytest

from swd_lens.base.checks import bounded, one_of


def test_values_within_bounds_and_among_choices_are_taken():
    one_of("kind", None, ("a", None))
    for value in (1, 3, np.int64(2)):
        bounded("n", value, 1, 3)
    bounded("share", 0.5, 0, 1, whole=False)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (0, {"least": 1}, "n must be a whole number of at least 1, got 0"),
        (4, {"least": 1, "most": 3}, "n must be a whole number from 1 to 3, got 4"),
        (True, {}, "n must be a whole number, got True"),
        (1.0, {}, "n must be a whole number, got 1.0"),
        (math.nan, {"most": 2, "whole": False}, "n must be a number of at most 2, got nan"),
    ],
)
def test_others_are_refused_with_the_bounds(value, bounds, message):
    with pytest.raises(KeyError) as refusal:
        bounded("n", value, **bounds, error=KeyError)
    assert refusal.value.args == (message,)


def test_a_name_that_is_none_of_the_choices_is_refused_with_them():
    with pytest.raises(ValueError, match=r"kind must be one of 'a', None, got 'c'"):
        one_of("kind", "c", ("a", None))
