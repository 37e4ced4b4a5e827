"""Items that look at units themselves."""

import pytest

from tests.study.paper.conftest import table


@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_an_edit_stands_beside_its_controls(every):
    edit = every[1]["edit"]
    assert set(table(edit, 0)["method"]) == {"unit", "random", "oracle", "LoRA, rate 0.08"}
    assert "At a requested shift of 1" in edit.findings[1]


@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_the_clearest_query_key_case_is_one_of_the_scan(every):
    item = every[1]["qk"]
    largest = max(case["removed KL"] for case in item.numbers["cases"])
    assert "without query unit" in item.findings[1] and largest > 0
    assert {row["site"] for row in table(item, 0).to_dict("records")} == set(item.numbers["fidelity"]["relmse"])
