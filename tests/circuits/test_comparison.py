"""Comparison: matched CE and KL, tables and seeds worked by hand."""

import warnings
from dataclasses import replace

import pandas as pd
import pytest

from swd_lens.circuits import Fidelity
from swd_lens.circuits.comparison import Comparison, TaskComparison
from tests.circuits.worked import by_hand


def measured(comparison, kl=0.01, **ce):
    """The comparison with these CEs, the dense host's being 1; `kl` of all, or by name, the others' then being .01."""
    kls = dict.fromkeys(ce, 0.01) | kl if isinstance(kl, dict) else dict.fromkeys(ce, kl)
    found = {name.replace("_", "/"): Fidelity(1.0, float(ce[name]), kls[name], 1.0, {}, 1) for name in ce}
    return replace(comparison, fidelities=found)


def test_the_smallest_admissible_prefix_stands_beside_the_thresholds_where_random_sets_were_drawn(worked):
    """Seeds 0 and 1 of "many" have one of 20 and of 40 edges, seed 2 has none."""
    assert not any("admissible" in column for column in worked.table())
    highest = {"one": [9.0, 0.5, 9.0], "many/0": [9.0, 0.4, 9.0], "many/1": [9.0, 9.0, 1.0], "many/2": [9.0, 9.0, 9.0]}
    curves = {
        name: replace(curve, validation=curve.rows.assign(**{"random drop": highest[name]}), settings={"random_sets": 50})
        for name, curve in worked["toy"].curves.items()
    }
    of_task = TaskComparison("toy", curves, {})
    column = "edges of the smallest admissible"
    assert of_task.table()[column].fillna(-1).tolist() == [5, 20, 40, -1]
    assert replace(worked, tasks={"toy": of_task}).table()[column].tolist() == [5, 30]


def test_the_reference_of_seeds_is_their_mean_and_a_group_is_as_far_off_as_its_worst(worked):
    comparison = measured(worked, one=1.5, many_0=1.5004, many_1=1.4996, many_2=1.502)
    assert comparison.ce_difference("many") == pytest.approx(0.002)
    assert comparison.label("many") == "many (CE +0.0020)"
    back = replace(comparison, reference="many")  # mean 1.5006667
    assert back.ce_difference("one") == pytest.approx(-0.0006667, abs=1e-6) and back.matched("one") is True
    assert back.ce_difference("many") == pytest.approx(0.0013333, abs=1e-6)
    missing = measured(worked, one=1.5, many_0=1.5, many_1=1.5)
    assert missing.matched("many") is None and "not measured for many" in missing.matching()


def test_better_is_matched_and_worse_in_either_is_not(worked):
    of_many = dict.fromkeys(("many_0", "many_1", "many_2"), 1.5)
    better = measured(worked, one=1.5, **of_many | {"many_2": 1.2})
    assert better.out_by("many") == () and better.ce_difference("many") == pytest.approx(0.0)
    assert better.matching().startswith("Matched: no method's CE or KL is worse than that of one by more than 0.001 nats")
    # CE within the tolerance, KL of one seed thirty times as far: gendered pronouns of a pruned control, once.
    by_kl = measured(worked, kl={"many_1": 0.015}, one=1.5, **of_many)
    assert by_kl.out_by("many") == ("KL",) and by_kl.matched("many") is False
    assert by_kl.kl_difference("many") == pytest.approx(0.005) and by_kl.ce_difference("many") == pytest.approx(0.0)
    assert by_kl.label("many") == "many (KL +0.0050)"
    assert by_kl.matching() == "Worse than one by more than 0.001 nats, so not comparable with it: many (KL +0.0050)."
    by_both = measured(worked, kl={"many_1": 0.015}, one=1.5, **of_many | {"many_0": 1.6})
    assert by_both.out_by("many") == ("CE", "KL") and by_both.label("many") == "many (CE +0.1000, KL +0.0050)"
    assert by_both.table()["out by"].tolist() == ["", "CE, KL"] and by_both.table()["matched"].tolist() == [True, False]
    assert replace(by_kl, reference="many").matched("one") is True  # the worse one has the better one beside it


def test_table_over_seeds_by_hand(worked):
    one, many = worked.table().to_dict("records")
    # Recovered 0.9: seeds 0 and 1 reach it with 2 and 4 units, 20 and 40 edges; seed 2 never does.
    assert many["units at recovered 0.9"] == 3 and many["edges at recovered 0.9"] == 30
    assert many["edges at recovered 0.9 sd"] == pytest.approx(200**0.5)
    assert many["edges at recovered 0.9 min"] == 20 and many["reached recovered 0.9"] == 2
    # Half of the whole drop (2): 1. Seed 0 needs all (40 edges), seeds 1 and 2 the first prefix (20): mean 80 / 3.
    assert many["edges at necessity 0.5"] == pytest.approx(80 / 3) and many["reached necessity 0.5"] == 3
    assert many["edges at necessity 0.5 sd"] == pytest.approx((400 / 3) ** 0.5)
    assert many["seeds"] == 3 and many["margin"] == pytest.approx(3.0)
    # Half of 1.5 is 0.75: the first prefix of one unit.
    assert (one["units at recovered 0.9"], one["edges at recovered 0.9"]) == (1, 5)
    assert (one["edges at necessity 0.5"], one["edges at necessity 0.5 min"], one["reached necessity 0.5"]) == (5, 5, 1)
    assert pd.isna(one["edges at necessity 0.5 sd"]) and one["seeds"] == 1


def test_costs_at_a_drop_in_logits_and_at_a_sufficiency_by_hand(worked):
    one, many = worked.table(drop=1.0).to_dict("records")
    # Drop 1: "one" with its first prefix; seeds 1 and 2 with theirs, seed 0 with all units (40 edges, 4 units).
    assert (one["units at drop 1"], one["edges at drop 1"], one["reached drop 1"]) == (1, 5, 1)
    assert many["edges at drop 1"] == pytest.approx(80 / 3) and many["units at drop 1"] == pytest.approx(8 / 3)
    assert (many["reached drop 1"], many["edges at drop 1 min"]) == (3, 20)
    # 1.6 is more than "one" ever loses (1.5); half of its own drop it reaches.
    one, many = worked.table(drop=1.6).to_dict("records")
    assert pd.isna(one["edges at drop 1.6"]) and one["edges at necessity 0.5"] == 5 and many["edges at drop 1.6"] == 40
    of_task = worked["toy"].table(drop=1.0).set_index("method")
    assert of_task["edges at drop 1"].tolist() == [5, 40, 20, 20] and of_task["edges at drop 1"].dtype == "Int64"
    # Where no drop is asked for, tables are what they were.
    for table in (worked.table, worked["toy"].table):
        assert not any("drop" in column or "sufficiency" in column for column in table())
        at_drop = [column for column in table(drop=1.0) if "drop 1" in column]
        assert list(table()) == [column for column in table(drop=1.0) if column not in at_drop] and len(at_drop) > 1
    one, many = worked.table(sufficiency=0.5).to_dict("records")
    assert (one["edges at recovered 0.9"], one["edges at sufficiency 0.5"]) == (5, 5)
    assert many["edges at sufficiency 0.5"] == 20 and many["reached sufficiency 0.5"] == 3
    assert worked["toy"].table(sufficiency=0.5).set_index("method").loc["many/2", "edges at sufficiency 0.5"] == 20


def test_what_is_not_carried_has_no_cost_and_the_table_says_so(worked):
    """Neither in a warning nor as 0: the column says it."""
    curves = dict(worked["toy"].curves) | {"one": replace(worked["toy"].curves["one"], q_empty=1.95)}
    comparison = replace(worked, tasks={"toy": TaskComparison("toy", curves, {})})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        one, many = comparison.table(drop=1.0, sufficiency=0.9).to_dict("records")
        of_task = comparison["toy"].table()
    assert one["carries"] is False and one["carried"] == pytest.approx(0.05)
    assert all(pd.isna(one[f"edges at {of}"]) for of in ("recovered 0.9", "necessity 0.5", "drop 1", "sufficiency 0.9"))
    assert many["carries"] is True and many["carried"] == pytest.approx(3.0) and many["edges at recovered 0.9"] == 30
    assert of_task["carries"].tolist() == [False, True, True, True]


def test_costs_are_chosen_on_validation_prompts():
    """Of a curve whose first prefix reaches .9 on test prompts alone."""
    rows = by_hand([0, 1, 4], [0, 5, 30], [0.0, 0.95, 1.0], [0.0, 1.0, 1.5]).rows
    curve = by_hand([0, 1, 4], [0, 5, 30], [0.0, 0.95, 1.0], [0.0, 1.0, 1.5], validation=rows.assign(recovered=[0, 0.8, 1.0]))
    comparison = Comparison({"toy": TaskComparison("toy", {"one": curve}, {})}, reference="one")
    assert comparison.table().iloc[0]["edges at recovered 0.9"] == 30 == curve.cost_at()


def test_columns_are_of_the_same_type_whatever_was_reached(worked):
    alone = Comparison({"toy": TaskComparison("toy", {"one": worked["toy"].curves["one"]}, {})}, reference="one")
    for table in (alone.table, alone["toy"].table, worked.table):
        kinds = [list(table(recovered=level).dtypes.astype(str)) for level in (0.9, 5.0)]
        assert kinds[0] == kinds[1] and "object" not in kinds[0]
    costs = "edges at recovered 5"
    assert alone.table(recovered=5.0)[costs].dtype == "Int64" and alone["toy"].table()["margin"].dtype == "Float64"
    seeds = worked.table(recovered=5.0)
    assert (seeds[costs].dtype, seeds[f"{costs} min"].dtype) == ("Float64", "Int64")
    many = seeds.iloc[1]
    assert pd.isna(many[costs]) and pd.isna(many[f"{costs} min"]) and many["reached recovered 5"] == 0


def test_comparisons_side_by_side_and_without_methods(worked):
    first, second = worked.without(["many"]), worked.without(["one"])
    assert list(first.methods) == ["one"] and list(second.methods) == ["many"]
    again = first.beside(second)
    assert again.methods == worked.methods
    assert again["toy"].curves == worked["toy"].curves
    with pytest.raises(ValueError, match="two curves are called 'one'"):
        first.beside(worked)
    renamed = Comparison({"another": TaskComparison("another", dict(second["toy"].curves), {})})
    with pytest.raises(ValueError, match="one comparison is of toy, the other of another"):
        first.beside(renamed)
