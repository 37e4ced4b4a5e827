"""Cases that stay quick are spread over all of a test's, and no case is lost."""

import pytest

from tests.quick import mark_all_but_quick_cases, spread


class Case:
    """What pytest's items have and `mark_all_but_quick_cases` asks for."""

    def __init__(self, test: str, n: int | None):
        self.parent, self.name, self.originalname = "file", f"{test}[a]", test
        self.mark = None if n is None else pytest.mark.quick_cases(n).mark
        self.added: list[str] = []

    def get_closest_marker(self, name: str):
        return self.mark if name == "quick_cases" else None

    def add_marker(self, mark) -> None:
        self.added.append(mark.name)


@pytest.mark.parametrize(("n", "expected"), [(1, [0]), (2, [0, 6]), (3, [0, 4, 8]), (10, list(range(10))), (99, list(range(10)))])
def test_they_are_spread_evenly(n, expected):
    assert spread(range(10), n) == expected
    # Four families in four dtypes, the latter changing from case to case: four cases have them all.
    families, dtypes = zip(*spread([(family, dtype) for family in range(4) for dtype in range(4)], 4), strict=True)
    assert set(families) == set(dtypes) == set(range(4))


def test_the_others_are_slow_and_unmarked_tests_are_left_alone():
    many, other, unmarked = ([Case(test, n) for _ in range(4)] for test, n in (("many", 2), ("other", 1), ("un", None)))
    mark_all_but_quick_cases([*many, *unmarked, *other])  # pyright: ignore[reportArgumentType]
    assert [case.added for case in many] == [[], ["slow"], ["slow"], []]
    assert [case.added for case in other] == [[], ["slow"], ["slow"], ["slow"]]
    assert all(not case.added for case in unmarked)
