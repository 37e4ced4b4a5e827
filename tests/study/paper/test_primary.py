"""The primary number: cells, tests, table, picture and sentences by hand; and with exchangeable methods, how often it says that
they differ.
"""

import itertools
import math
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest

from swd_lens.circuits import CostCurve, Fidelity
from swd_lens.circuits.comparison import Comparison, TaskComparison
from swd_lens.study.paper import primary
from swd_lens.study.paper.primary import Ratio

SITE = "blocks.3.mlp_out"
AT = {"recovered": 0.9, "share_of_drop": 0.5}


def curve(edges, of_dense, drop, *, on_validation=None, q_full=3.0, site=SITE):
    """Prefixes of these edges, of a dense margin of 3 and an empty one of 1.

    Args:
        on_validation: what they recover of the dense margin on validation prompts; None = as on test prompts.
    """
    head = {"units": list(range(len(edges))), "edges": edges}
    rows = pd.DataFrame(head | {"recovered of dense": of_dense, "drop": drop})
    validation = rows.assign(**{"recovered of dense": of_dense if on_validation is None else on_validation})
    return CostCurve(rows, "toy", 3.0, q_full, 1.0, 0.1, 1.0, 1.0, {"units": {site: 9}}, validation)


def fidelity(ce, kl=0.01):
    return Fidelity(2.0, ce, kl, 1.0, {}, 100)


def comparison_of(curves, groups=None, roles=None, **fidelities):
    names = dict.fromkeys(name.split("/")[0] for name in curves)
    roles = {name: "swd" if name.startswith("SWD") else "control" for name in names} | (roles or {})
    known = {name: fidelities.get(name.split("/")[0], fidelity(2.0)) for name in curves}
    return Comparison({"toy": TaskComparison("toy", curves, {})}, groups or {}, known, "SWD", roles=roles)


def three():
    """SWD needs 40 edges. Of its controls A is the cheapest on validation prompts, where it needs 5 of its 30 edges; on test
    prompts it needs 30, and B 20.
    """
    return {
        "SWD": curve([0, 10, 40], [0.0, 0.5, 1.0], [0.0, 0.4, 2.0]),
        "A": curve([0, 5, 30], [0.0, 0.8, 1.0], [0.0, 1.5, 2.0], on_validation=[0.0, 0.95, 1.0]),
        "B": curve([0, 20, 50], [0.0, 0.9, 1.0], [0.0, 0.9, 2.0]),
    }


# ---------------------------------------------------------------------------------------------- cells


def test_edges_are_of_test_prompts_and_the_cheapest_control_of_validation_prompts():
    found = primary.ratios(comparison_of(three()), "SWD", "a", **AT)
    recovered = {each.control: each for each in found if each.target == "recovered 0.9"}
    found_of = {name: (r.swd_edges, r.control_edges, r.cheapest) for name, r in recovered.items()}
    # A needs 5 on validation prompts; with those it would win by having been chosen.
    assert found_of == {"A": (40.0, 30.0, True), "B": (40.0, 20.0, False)}
    assert recovered["A"].log_ratio == pytest.approx(math.log(40 / 30)) and recovered["A"].sign == 1
    assert {(r.part, r.surface, r.task, r.swd, r.carried) for r in found} == {("MLP", "a", "toy", "SWD", True)}
    # Half of what the dense margin has beyond the empty circuit: 1 of 2 logits. B's second prefix takes .9.
    drops = {each.control: each for each in found if each.target == "a drop of 0.5"}
    assert {name: (r.swd_edges, r.control_edges) for name, r in drops.items()} == {"A": (40.0, 5.0), "B": (40.0, 50.0)}
    assert drops["B"].sign == -1 and drops["B"].log_ratio == pytest.approx(math.log(0.8))


def test_a_target_is_a_share_of_the_dense_margin_for_every_method():
    """A method that damages the margin has no easier target by that."""
    curves = three() | {"A": curve([0, 5, 30], [0.0, 0.5, 0.6], [0.0, 0.5, 0.6], q_full=2.2)}
    found = primary.ratios(comparison_of(curves), "SWD", "a", **AT)
    assert [r.control_edges for r in found if r.control == "A"] == [None, None]
    assert [r.sign for r in found if r.control == "A"] == [-1, -1]
    assert all(r.log_ratio == -math.inf for r in found if r.control == "A")


@pytest.mark.parametrize(
    ("of_swd", "of_a", "controls"),
    [
        (fidelity(2.0), fidelity(2.0005), ["A", "B"]),
        (fidelity(2.0), fidelity(2.1), ["B"]),
        (fidelity(2.0), fidelity(2.0, kl=0.02), ["B"]),  # the same CE, another model
        (fidelity(2.1, kl=0.1), fidelity(2.0), ["A", "B"]),  # closer to the dense model than SWD is
    ],
)
def test_controls_are_no_worse_in_ce_and_kl(of_swd, of_a, controls):
    found = primary.ratios(comparison_of(three(), SWD=of_swd, A=of_a), "SWD", "a", **AT)
    assert list(dict.fromkeys(each.control for each in found)) == controls


def test_only_methods_in_the_role_of_a_control_are_controls():
    compared = comparison_of(three() | {"SWD 2": three()["A"]}, roles={"A": "trained", "B": "paper"})
    assert {r.control for r in primary.ratios(compared, "SWD", "a", **AT)} == {"A"}
    alone = primary.ratios(comparison_of({"SWD": three()["SWD"]}), "SWD", "a", **AT)
    assert [(r.control, r.swd_edges, r.control_edges, r.sign) for r in alone] == [("", 40.0, None, 0)] * 2
    assert primary.tests(alone) == []
    assert primary.table_of_ratios(alone)["its edges"].tolist() == [40.0, 40.0]


def test_seeds_are_one_control_which_most_of_them_decide():
    def seed(edges):
        return curve([0, edges, 90], [0.0, 0.9 if edges else 0.0, 0.5], [0.0, 1.0, 1.0])

    def beside(*of_seeds):
        names = tuple(f"R/{i}" for i in range(len(of_seeds)))
        curves = {"SWD": three()["SWD"]} | dict(zip(names, map(seed, of_seeds), strict=True))
        return primary.ratios(comparison_of(curves, {"R": names}), "SWD", "a", **AT)[0]

    assert (beside(10, 20, 70).control_edges, beside(10, 20, 70).sign) == (20.0, 1)
    # 40 lies between the two: no win, though their mean is above it.
    assert (beside(10, 80).control_edges, beside(10, 80).sign) == (45.0, 0)
    # A seed without a circuit (0 here) lets the median be unknown, and decides no more than the other.
    assert (beside(10, 0).control_edges, beside(10, 0).sign) == (None, 0)
    assert (beside(10, 20, 0).control_edges, beside(10, 20, 0).sign) == (20.0, 1)


@pytest.mark.parametrize("n_seeds", range(1, 7))
def test_of_exchangeable_costs_each_side_wins_as_often(n_seeds):
    """Every one of 1 + n_seeds costs in SWD's place, any number of them without a circuit."""
    for n_without in range(n_seeds + 2):
        costs = [*map(float, range(n_seeds + 1 - n_without)), *[math.inf] * n_without]
        signs = [primary._majority(cost, costs[:i] + costs[i + 1 :]) for i, cost in enumerate(costs)]
        assert signs.count(1) == signs.count(-1)
        assert any(signs) == (2 * n_without <= len(costs))


def test_a_surface_that_only_one_of_the_two_carries_is_the_others_loss():
    """Leaving out what SWD does not carry would leave out its losses."""
    nothing = replace(three()["SWD"], q_full=1.05)
    assert not nothing.carries
    lost = primary.ratios(comparison_of(three() | {"SWD": nothing}), "SWD", "a", **AT)
    assert all((r.swd_edges, r.sign, r.carried) == (None, 1, True) for r in lost)
    won = primary.ratios(comparison_of({"SWD": three()["SWD"], "A": nothing}), "SWD", "a", **AT)
    assert all((r.control_edges, r.sign, r.carried) == (None, -1, True) for r in won)
    neither = primary.ratios(comparison_of({"SWD": nothing, "A": nothing}), "SWD", "a", **AT)
    assert all((r.sign, r.carried) == (0, False) and math.isnan(r.log_ratio) for r in neither)
    assert all(test.fewer == test.more == 0 and math.isnan(test.p) for test in primary.tests(neither))


# ---------------------------------------------------------------------------------------------- tests


def ratio(swd_edges, control_edges, *, task="t", surface="a", control="N", cheapest=True, carried=True, part="MLP"):
    costs = [math.inf if edges is None else edges for edges in (swd_edges, control_edges)]
    sign = int(np.sign(costs[0] - costs[1])) if costs[0] != costs[1] else 0
    return Ratio(task, surface, part, "recovered 0.9", "SWD", control, cheapest, swd_edges, control_edges, sign, carried)


def test_the_unit_is_the_surface():
    """Six surfaces won, the seventh by two of its three tasks; four tasks of an eighth are one loss, not four."""
    cells = [ratio(1.0, 2.0, surface=f"{i}") for i in range(6)]
    cells += [ratio(*edges, surface="6", task=f"{i}") for i, edges in enumerate([(1.0, 2.0), (1.0, None), (9.0, 2.0)])]
    cells += [ratio(8.0, 2.0, surface="7", task=f"{i}") for i in range(4)]
    cells += [ratio(None, None, surface="8"), ratio(1.0, 1.0, surface="9")]  # neither's
    (test,) = primary.tests(cells)
    assert (test.fewer, test.more) == (7, 1)
    assert test.p == test.p_holm == pytest.approx(2 * (1 + 8) / 2**8)
    # Of the cells: -inf, 7 halves, equal, 4.5 and four times 4; none of the neither's.
    assert test.median == pytest.approx(0.5)


def test_parts_and_controls_are_apart():
    cells = [
        ratio(1.0, 2.0, surface=f"{i}", part=part, control=control)
        for i, part, control in itertools.product(range(3), ("MLP", "attention"), "NS")
    ]
    found = primary.tests(cells)
    assert [(test.part, test.control, test.fewer) for test in found] == [(p, c, 3) for p in ("MLP", "attention") for c in "NS"]
    assert all(test.p == 0.25 and test.p_holm == 0.5 for test in found)


def test_holm_by_hand():
    def one(control, p):
        return primary.Test("MLP", "t", "SWD", control, 1, 0, 2.0, p)

    given = [one("a", 0.04), one("none", math.nan), one("b", 0.01), one("c", 0.03)]
    adjusted = {each.control: each.p_holm for each in primary.holm(given)}
    # Sorted .01 .03 .04: times 3, 2, 1 = .03 .06 .04, and never below the one before; what has no p takes no part.
    assert math.isnan(adjusted.pop("none"))
    assert adjusted == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})
    assert [each.control for each in primary.holm(given)] == ["a", "none", "b", "c"]


# ---------------------------------------------------------------------------------------------- shown


def test_tables():
    found = primary.ratios(comparison_of(three()), "SWD", "a", **AT)
    table = primary.table_of_ratios(found)
    assert table["target"].tolist() == ["recovered 0.9", "a drop of 0.5"]
    assert table["cheapest control"].tolist() == ["A", "A"] and table["control's edges"].tolist() == [30.0, 5.0]
    assert table["ratio"].tolist() == pytest.approx([4 / 3, 8.0]) and table["carried"].tolist() == ["yes", "yes"]
    tested = primary.table_of_tests(primary.tests(found))
    assert tested["control"].tolist() == ["A", "B", "A", "B"]
    assert list(zip(tested["fewer edges on"], tested["more edges on"], strict=True)) == [(0, 1), (0, 1), (0, 1), (1, 0)]
    assert tested["p"].tolist() == tested["p (Holm)"].tolist() == [1.0] * 4
    # No control has a circuit: the cell stays, with what SWD needs.
    alone = primary.table_of_ratios([ratio(4.0, None, cheapest=False)])
    assert alone.iloc[0]["its edges"] == 4.0 and alone.isna().iloc[0][["cheapest control", "ratio"]].all()


def test_words_by_hand():
    cells = [ratio(edges, 2.0, surface=f"{i}", task="t") for i, edges in enumerate([2.0, 4.0, 8.0])]
    cells += [ratio(None, 2.0, surface="3"), ratio(3.0, None, surface="4", cheapest=False)]
    cells += [ratio(None, None, surface="5", carried=False, cheapest=False)]
    (text,) = primary.in_words(cells, primary.tests(cells))
    # Without the first the middle is between 2 and 4 times, without the last between 1 and 2.
    assert text == (
        "MLP, recovered 0.9: edges over those of the cheapest control: SWD 2 in the median of 3 (1.41 to 2.83 leaving out one), "
        "1 where only it has a circuit, 1 where only the control has one, 1 of 6 cells not carried. With 4 surfaces and 1 "
        "control no difference can be told from chance: that takes 6 surfaces (sign test, Holm)."
    )


@pytest.mark.parametrize(("swd_edges", "side"), [(4.0, "more"), (1.0, "fewer"), (None, "more")])
def test_words_on_a_control_that_differs(swd_edges, side):
    cells = [ratio(swd_edges, 2.0, surface=f"{i}") for i in range(6)]
    said = f" Over surfaces (sign test, Holm): SWD needs {side} edges than N on 6 of 6 surfaces (p = 0.031)."
    assert primary.in_words(cells, primary.tests(cells))[0].endswith(said)
    # One surface the other way, and it is chance.
    cells[0] = ratio(4.0 if swd_edges == 1.0 else 1.0, 2.0, surface="0")
    ends = " With 6 surfaces and 1 control none differs beyond chance (sign test over surfaces, Holm)."
    assert primary.in_words(cells, primary.tests(cells))[0].endswith(ends)


def test_words_without_a_control():
    (text,) = primary.in_words([ratio(4.0, None, control="", cheapest=False)], [])
    assert text == "MLP, recovered 0.9: edges over those of the cheapest control: SWD none, 1 where only it has a circuit."


@pytest.mark.parametrize(("n_controls", "fewest"), [(1, 6), (3, 7), (8, 9)])
def test_the_fewest_surfaces_that_can_tell(n_controls, fewest):
    for n, any_p in ((fewest, True), (fewest - 1, False)):
        cells = [ratio(1.0, 2.0, surface=f"{i}", control=f"{c}") for i in range(n) for c in range(n_controls)]
        assert any(test.p_holm < 0.05 for test in primary.tests(cells)) is any_p
        assert ("can be told" in primary.in_words(cells, primary.tests(cells))[0]) is not any_p


def test_the_picture_shows_every_known_ratio():
    found = primary.ratios(comparison_of(three()), "SWD", "blocks.3.mlp_out", **AT)
    unknown = [replace(each, surface="blocks.2.mlp_out", control_edges=None) for each in found]
    left, right = primary.plot([*found, *unknown]).axes
    assert (left.get_title(), right.get_title()) == ("recovered 0.9", "a drop of 0.5")
    assert [label.get_text() for label in left.get_yticklabels()] == ["toy\nblocks.3.mlp_out", "toy\nblocks.2.mlp_out"]
    # The others hollow, the cheapest filled: 40 edges beside 20 and 30, in the row of the surface; nothing in the other's.
    hollow, filled = left.collections
    assert hollow.get_offsets().tolist() == [[pytest.approx(2.0), 0.0]] and not len(hollow.get_facecolors())
    assert filled.get_offsets().tolist() == [[pytest.approx(4 / 3), 0.0]] and len(filled.get_facecolors())


# ---------------------------------------------------------------------------------------------- calibration


def said_to_differ(costs):
    """(whether SWD is said to need more edges than some control, whether fewer), by surfaces and by cells.

    Args:
        costs: (method, surface, task) edges, infinite where there is no circuit; the first method is in SWD's place.
    """
    n_methods, n_surfaces, n_tasks = costs.shape
    edges = np.where(np.isfinite(costs), costs, None)
    found = {}
    for unit in ("surface", "cell")[: 3 - min(2, n_methods - 1)]:  # of one control both
        cells = [
            ratio(edges[0, s, t], edges[m, s, t], surface=f"{s}" if unit == "surface" else f"{s} {t}", control=f"{m}")
            for m, s, t in itertools.product(range(1, n_methods), range(n_surfaces), range(n_tasks))
        ]
        of_unit = [test for test in primary.tests(cells) if test.p_holm < 0.05]
        found[unit] = [any(t.more > t.fewer for t in of_unit), any(t.fewer > t.more for t in of_unit)]
    return found


def most(n_draws):
    """A rate of one in twenty, and two standard errors of so many draws."""
    return 0.05 + 2 * (0.05 * 0.95 / n_draws) ** 0.5


@pytest.mark.parametrize(
    ("n_controls", "n"),
    [(1, 150), (3, 50), pytest.param(3, 150, marks=pytest.mark.slow), pytest.param(8, 150, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("shared", [0.0, 0.9])
def test_exchangeable_methods_are_seldom_said_to_differ(n_controls, n, shared):
    """Costs of a cell, of a method on a surface (`shared` of a method's variance), and noise; a fifth have no circuit."""
    rng = np.random.default_rng(n_controls)
    shape = (n_controls + 1, 12, 4)
    said = {}
    for _ in range(n):
        logs = 4 + rng.normal(size=shape[1:]) + np.sqrt(shared) * rng.normal(size=(*shape[:2], 1))
        logs = logs + np.sqrt(1 - shared) * rng.normal(size=shape)
        costs = np.where(logs > 5.2, np.inf, np.exp(logs))
        for unit, found in said_to_differ(costs).items():
            said.setdefault(unit, []).append(found)
    rates = {unit: np.mean(found, axis=0) for unit, found in said.items()}
    assert (rates["surface"] <= most(n)).all()
    if shared and n_controls == 1:  # by cells, as if the tasks of a surface were independent, it would be said far too often
        assert (rates["cell"] > 0.1).all()


def test_a_method_that_needs_more_everywhere_is_said_to():
    """The test can tell: twice the edges on every surface, beside eight controls."""
    rng = np.random.default_rng(0)
    said = []
    for _ in range(4):
        logs = 4 + rng.normal(size=(1, 12, 4)) + 0.2 * rng.normal(size=(9, 12, 4))
        logs[0] += math.log(2)
        said.append(said_to_differ(np.exp(logs))["surface"])
    assert np.mean(said, axis=0).tolist() == [1.0, 0.0]
