"""Numbers and sentences as the report writes them."""

import math

import pandas as pd
import pytest

from swd_lens.circuits.plots import compact
from swd_lens.report import wording
from swd_lens.report.wording import Cost, cost_sentences, headline
from swd_lens.study import Run


@pytest.mark.parametrize(
    ("written", "expected"),
    [
        (wording.count(1234567), "1,234,567"),
        (wording.count(None), "–"),
        (wording.count(pd.NA), "–"),
        (wording.fixed(-0.0001, 2), "0.00"),
        (wording.fixed(-1234.5, 1), "−1,234.5"),
        (wording.fixed(math.nan), "–"),
        (wording.tiny(0.0312), "0.03120"),
        (wording.tiny(3.14159e-9), "3×10⁻⁹"),
        (wording.tiny(-2.0e-13), "−2×10⁻¹³"),
        (wording.tiny(0.0), "0.00000"),
        (wording.signed(0.002, 4), "+0.0020"),
        (wording.signed(-0.002, 4), "−0.0020"),
        (wording.percent(0.98765, 2), "98.77%"),
        (wording.duration(12.34), "12.3 s"),
        (wording.duration(150), "2.5 min"),
        (wording.conjunction(["a", "b", "c"]), "a, b and c"),
        (wording.plural(1, "matrix", "matrices"), "1 matrix"),
        (compact(25_000), "25k"),
    ],
)
def test_writes(written: str, expected: str) -> None:
    assert written == expected


def test_settings_rows_keep_order_and_depth() -> None:
    rows = list(wording.settings_rows({"b": {"x": [1, 2.5], "deep": {"y": None}}, "a": True, "empty": {}}))
    assert rows == [(0, "b", ""), (1, "x", "1, 2.5"), (1, "deep", ""), (2, "y", "none"), (0, "a", "True"), (0, "empty", "none")]


def test_headline_is_made_from_the_numbers(run: Run) -> None:
    sentences = headline(run)
    assert "SWD s=0.75" in sentences[0] and "2 matrices" in sentences[0]
    assert f"{run.replacements[-2].fidelity.ce:.3f}" in sentences[0]
    assert headline(Run({}, [], {}, [], 0.0)) == []


def _cost(task: str, method: str, edges: int | None, units: int | None, carries: bool = True, part: str = "MLP") -> Cost:
    return Cost("mlp", task, method, part, edges, units, 64, carries)


def test_cost_sentences() -> None:
    costs = [_cost("a", "S", 100, 4), _cost("a", "SVD", 300, 3)]
    costs += [_cost("b", "S", 500, 64), _cost("b", "SVD", 250, 2)]  # every unit, and more edges than the control
    costs += [_cost("e_f", "S", None, None, False)]
    nothing, contest, least = cost_sentences(costs, "S", ["SVD"], 0.9)
    # ratios 3 and 1/2: median 1.75
    assert contest == (
        "To recover 90%, where both have a circuit that does (3 cases of surface and task), S needs in the median 1.8 times "
        "fewer active edges than SVD (fewer in 1 of 2; more for b (mlp); in 1, S takes every unit it has)."
    )
    assert nothing.startswith("Not carried: e f (mlp). There the margin") and nothing.endswith("no circuit has a cost.")
    assert "4 of the 64 units of mlp, with 100 active edges, recover 90% of what it carries of a." in least


def test_cost_sentences_say_where_a_control_behaves_worse() -> None:
    costs = [_cost("a", "S", 100, 4), _cost("a", "SVD", 300, 3)]
    (sentence, _) = cost_sentences(costs, "S", ["SVD"], 0.9, {("mlp", "SVD")})
    assert sentence.endswith("than SVD (fewer in 1 of 1; in 1, the control's cross-entropy or KL is worse: no fair match).")
    assert "cross-entropy" not in next(cost_sentences(costs, "S", ["SVD"], 0.9, {("attention", "SVD")}))


def test_several_controls_stand_in_one_sentence() -> None:
    costs = [_cost(task, method, edges, 4) for task in "ab" for method, edges in (("S", 200), ("P", 100), ("SVD", 300))]
    sentence, _ = cost_sentences(costs, "S", ["SVD", "P"], 0.9)
    assert sentence == (
        "To recover 90%, where both have a circuit that does (2 cases of surface and task), S needs in the median 1.5 times "
        "fewer active edges than SVD (fewer in 2 of 2); 2.0 times more active edges than P (fewer in 0 of 2; more for a (mlp) "
        "and b (mlp))."
    )


def test_mlps_and_attention_are_not_pooled() -> None:
    costs = [_cost(task, "S", 100, 4, part=part) for task, part in (("a", "MLP"), ("b", "attention"))]
    costs += [_cost("a", "SVD", 300, 3), _cost("b", "SVD", 50, 3, part="attention")]
    of_mlp, of_attention, _ = cost_sentences(costs, "S", ["SVD"], 0.9)
    assert "(1 case of surface and task in MLP), S needs 3.0 times fewer" in of_mlp
    assert "(1 case of surface and task in attention), S needs 2.0 times more" in of_attention


def test_cost_sentences_admit_a_loss_and_need_a_control() -> None:
    costs = [_cost("a", "S", 300, 4), _cost("a", "SVD", 100, 3)]
    assert "S needs 3.0 times more active edges than SVD (fewer in 0 of 1)." in next(cost_sentences(costs, "S", ["SVD"], 0.9))
    near = [_cost("a", "S", 102, 4), _cost("a", "SVD", 100, 3)]
    assert "S needs about as many active edges as SVD (fewer in 0 of 1)." in next(cost_sentences(near, "S", ["SVD"], 0.9))
    assert not any("SVD" in sentence for sentence in cost_sentences(costs[:1], "S", ["SVD"], 0.9))
