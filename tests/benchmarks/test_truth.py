"""One answer measured again: it takes the place of the recorded one, a new one stands behind its case, the rest stays."""

from tests.benchmarks.results import Table
from tests.benchmarks.truth import _with

COLUMNS = ["case", "method", "F1"]


def test_rows_of_one_answer_are_replaced_or_added():
    old = Table("Toys", COLUMNS, [["a", "SWD", "1"], ["a", "VPD", "2"], ["b", "SWD", "3"], ["c", "SWD", "4"]])
    again = _with(old, Table("Toys", COLUMNS, [["a", "VPD", "5"], ["b", "VPD", "6"]]))
    assert again.rows == [["a", "SWD", "1"], ["a", "VPD", "5"], ["b", "SWD", "3"], ["b", "VPD", "6"], ["c", "SWD", "4"]]
    assert _with(old, Table("Others", COLUMNS, [["a", "VPD", "5"]])) == old
