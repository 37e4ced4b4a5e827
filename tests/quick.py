"""Which cases of a test with many are quick: the README's command runs those, .ci/run the others, too.

`@pytest.mark.quick_cases(n)`: n of a test's cases, spread evenly over all of them (families, dtypes, sites, ...). The others are
marked slow.
"""

from collections.abc import Sequence
from typing import Any

import pytest


def mark_all_but_quick_cases(items: Sequence[pytest.Item]) -> None:
    """Mark slow what `quick_cases` leaves."""
    for cases, wanted in _by_test(items):
        for case in set(cases) - set(spread(cases, wanted)):
            case.add_marker(pytest.mark.slow)


def spread(cases: Sequence[Any], n: int) -> list[Any]:
    """One of each of n equal stretches, or all if there are fewer.

    In each stretch it is a place further on: of a parameter that changes from case to case not always the same value is taken.
    """
    n = min(n, len(cases))
    shortest = len(cases) // n
    return [cases[i * len(cases) // n + i % shortest] for i in range(n)]


def _by_test(items: Sequence[pytest.Item]) -> list[tuple[list[pytest.Item], int]]:
    """The cases of every test that is marked, and how many of them are to be quick."""
    tests: dict[tuple[Any, str], tuple[list[pytest.Item], int]] = {}
    for item in items:
        if mark := item.get_closest_marker("quick_cases"):
            cases, _ = tests.setdefault((item.parent, getattr(item, "originalname", item.name)), ([], *mark.args))
            cases.append(item)
    return list(tests.values())
