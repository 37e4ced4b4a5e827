"""CostCurve by hand: what is read off a small curve, its plot, and the benchmark's areas."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

from swd_lens.base.errors import NotCarriedWarning
from swd_lens.circuits import attribute, evaluate
from swd_lens.circuits.curve import MIB_FRACTIONS
from tests.circuits.slow import carried_by
from tests.circuits.worked import ROWS, curve
from tests.contract import swd_zero_data
from tests.micro import identity_factors, micro_model, random_split, split_of, toy_model

COSTS = {  # of a threshold: edges and units
    "recovered": [(0.9, 30, 4), (0.8, 14, 2), (0.0, 0, 0), (1.1, None, None)],
    "sufficiency": [(0.05, 0, 0), (0.1, 0, 0), (0.11, 10, 1), (0.8, 14, 2), (0.95, 30, 4), (1.01, None, None)],
    # Fractions of the drop of ablating every unit, 2: not of the largest drop, 3.
    "necessity": [(0.5, 10, 1), (0.75, 14, 2), (1.0, 14, 3), (1.6, None, None), (0, 0, 0)],
    # Drops in logits, of the same column; what is more than the whole set's 2 is a drop, too.
    "drop": [(0, 0, 0), (1.0, 10, 1), (1.6, 14, 3), (3, 14, 3), (3.1, None, None)],
}


@pytest.mark.parametrize("of", COSTS)
def test_cost_at(of):
    assert curve().cost_at() == curve().cost_at(recovered=0.9)
    for level, edges, units in COSTS[of]:
        how = {of: level}
        assert (curve().cost_at(**how), curve().cost_at(**how, cost="units")) == (edges, units), how
        if units is None:
            told = r"no prefix of 't' reaches [13]\.\d+ on the test .*; the highest [a-z ]+ is [13]\.000"
            with pytest.raises(ValueError, match=told):
                curve().circuit_at(**how)
        else:
            assert curve().circuit_at(**how, cost="units").n_units == units


def test_min_cost_and_a_drop_that_is_not_there():
    helps = ROWS.assign(**{"drop": [0.0, 1.0, 1.0, 1.0, -0.5]})
    assert curve(helps).cost_at(necessity=0.5) is None
    assert curve(helps).cost_at(drop=0.5) == 10  # in logits there is one
    # From above: 1.0 costs 30, 0.9 costs 14 (2 units), 0.8 costs 14 too, so it adds nothing; 0.5 costs 10; 0.1 nothing.
    table = curve().min_cost("sufficiency")
    assert table.values.tolist() == [[0.1, 0], [0.5, 10], [0.9, 14], [1.0, 30]]
    # Drops: 3 costs 3 units, less than 2 does (4); 1.5 costs 2, 1 costs 1, 0 nothing.
    table = curve().min_cost("drop", "units")
    assert table.values.tolist() == [[0.0, 0], [1.0, 1], [1.5, 2], [3.0, 3]]
    for value, cost in curve().min_cost().values.tolist():
        assert curve().cost_at(recovered=value) == cost


def test_what_is_chosen_on_validation_prompts_is_measured_on_test_prompts():
    validation = ROWS.assign(recovered=[0.0, 0.95, 0.2, 0.8, 1.0], sufficiency=[0.1, 0.9, 0.1, 0.8, 1.0])
    one = curve(validation=validation)
    assert (curve().chosen_on, one.chosen_on) == ("test", "validation")
    assert (curve().cost_at(), one.cost_at()) == (30, 10)
    assert one.row_at()["recovered"] == 4 / 9  # which the test prompts say of it
    assert one.cost_at(sufficiency=0.85) == 10 and one.circuit_at(sufficiency=0.85).n_units == 1
    assert "1 unit with 10 active edges recovers 44% of it" in one.in_words()
    with pytest.raises(ValueError, match=r"on the validation prompts; the highest sufficiency is 1\.000"):
        one.circuit_at(sufficiency=1.01)


def test_a_surface_that_does_not_carry_the_task_has_a_sentence_and_no_cost():
    # Carried is 9 of 11 logits: not above two errors of 4.6; and 9 of 200 is less than a twentieth.
    for one in (curve(carried_se=4.6), replace(curve(), q_dense=200.0)):
        assert not one.carries
        assert "s does not carry t: with all units the margin is 10.00, with every unit at its reference" in one.in_words()
        for call in (one.cost_at, one.row_at):
            with pytest.warns(NotCarriedWarning, match="No circuit of these units has a cost"):
                assert call(sufficiency=0.05) is None
        with pytest.raises(ValueError, match="No circuit of these units can be chosen"):
            one.circuit_at()
        assert one.smallest_admissible() is None and one.circuit(2).n_units == 2
    assert curve(carried_se=4.4).carries
    # Of a single prompt there is no error: what it does on that prompt is all that is asked.
    assert curve(carried_se=float("nan")).carries


def test_the_smallest_admissible_prefix_beats_random_sets():
    random = ROWS.assign(**{"random drop": [np.nan, 1.2, 1.4, 0.5, np.nan]})
    assert curve(validation=random).smallest_admissible()["units"] == 2  # the first whose drop is above
    said = curve(validation=random).in_words()
    assert " The smallest admissible prefix (beyond random sets): 2 units with 14 active edges recover " in said
    assert "admissible" not in curve().in_words()
    assert curve(validation=random.assign(**{"random drop": 9.0})).smallest_admissible() is None
    assert curve(validation=ROWS).smallest_admissible() is None and curve().smallest_admissible() is None


def test_circuit_at_is_the_prefix_that_cost_at_prices():
    circuit = curve().circuit_at(sufficiency=0.8)
    # Of the two prefixes of 14 edges the shorter one.
    assert circuit.units == (("s", 1), ("s", 3)) and circuit.n_edges == 14
    assert circuit.provenance["kind"] == "prefix"
    assert circuit.provenance["chosen_at"] == {"sufficiency": 0.8, "cost": "edges", "chosen_on": "test"}
    assert curve().circuit_at(drop=1.5).provenance["chosen_at"] == {"drop": 1.5, "cost": "edges", "chosen_on": "test"}
    assert curve().circuit(4).n_edges == 30 and curve().circuit(0).units == ()
    with pytest.raises(ValueError, match="n_units must be a whole number from 0 to 4, got 5"):
        curve().circuit(5)


def test_cost_interval_inverts_a_t_test_at_every_cost():
    """Against a loop: costs on a fine grid, prompts' margins mixed in log(1 + cost), scipy's own t test."""
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(5, 30, dtype=torch.float64, generator=generator)
    keep = torch.tensor(ROWS["q keep"].tolist(), dtype=torch.float64)[:, None] + 2 * noise
    full, ablate = 10 + noise[0], 10 - torch.tensor(ROWS["drop"].tolist())[:, None].double() + noise
    one = curve(margins={"keep": keep, "ablate": ablate, "full": full, "dense": full + 1})
    logs, fine = np.log1p(ROWS["edges"]), np.linspace(0, np.log1p(30), 4001)
    mixed = {name: np.stack([np.interp(fine, logs, m) for m in of.T.numpy()]) for name, of in (("k", keep), ("a", ablate))}
    whole, dense, empty = full.numpy()[:, None], full.numpy()[:, None] + 1, keep[0].numpy()[:, None]
    for how, contrast in (
        ({"recovered": 0.6}, mixed["k"] - 0.6 * whole - 0.4 * empty),
        ({"recovered_of_dense": 0.6}, mixed["k"] - 0.6 * dense - 0.4 * empty),
        ({"sufficiency": 0.6}, mixed["k"] - 0.6 * whole),
        ({"necessity": 0.4}, whole - mixed["a"] - 0.4 * (whole - empty)),
        ({"drop": 0.7}, whole - mixed["a"] - 0.7),
    ):
        ends = scipy.stats.ttest_1samp(contrast, 0).confidence_interval(0.95)
        low = np.expm1(fine[np.argmax(ends.high >= 0)]) if (ends.high >= 0).any() else None
        high = np.expm1(fine[len(fine) - np.argmax((ends.low < 0)[::-1])]) if ends.low[-1] >= 0 else None
        found = one.cost_interval(**how)
        for end, expected in zip(found, (low, high), strict=True):
            assert end is None if expected is None else end == pytest.approx(expected, abs=1.5)
    assert one.cost_interval(sufficiency=9) == (None, None)


def test_what_is_refused():
    for call in (curve().cost_at, curve().circuit_at, curve().cost_interval):
        with pytest.raises(ValueError, match=r"give one threshold: .* or drop=1\.0"):
            call(necessity=0.5, drop=1.0)
        with pytest.raises(ValueError, match="cost must be one of"):
            call(sufficiency=0.5, cost="tokens")
    for of_curve, how, message in (
        (curve(), {"sufficiency": 0.5}, "carries no margins"),
        (curve(margins={"full": torch.ones(1)}), {}, "measured on a single prompt"),
        (curve(), {"level": 95}, r"level must be in \(0, 1\), got 95"),
    ):
        with pytest.raises(ValueError, match=message):
            of_curve.cost_interval(**how)
    with pytest.raises(ValueError, match="carries no scores"):
        curve(scores=None).circuit_at(sufficiency=0.5)
    with pytest.raises(ValueError, match="of must be one of"):
        curve().min_cost("accuracy")


def test_cpr_and_cmd_by_hand():
    rows = pd.DataFrame({"units": [0, 1, 2, 5, 10], "edges": [0, 20, 20, 90, 100], "recovered": [0.0, 0.2, 0.4, 1.2, 1.0]})
    one = curve(rows, {"grid": "mib"})
    # Of 10 units the fractions allow 0, 0, 0, 0, 0, 0, 1, 2, 5, 10:
    #   f = 0 up to .05, .2 at .1, .4 at .2, 1.2 at .5, 1 at 1.
    # Trapezoids: (.05)(.1) + (.1)(.3) + (.3)(.8) + (.5)(1.1) = .005 + .03 + .24 + .55 = .825
    # |1 - f| = 1 up to .05, .8, .6, .2, 0: (.049)(1) + (.05)(.9) + (.1)(.7) + (.3)(.4) + (.5)(.1) = .334
    assert one.mib() == pytest.approx({"CPR": 0.825, "CMD": 0.334}, rel=1e-12)
    # Of 100 edges they allow 0 .. 10 -> prefix 0; 20 -> prefix 2 (not 1); 50 -> prefix 2; 100 -> prefix 10.
    #   f = 0 up to .1, .4 at .2, .4 at .5, 1 at 1: (.1)(.2) + (.3)(.4) + (.5)(.7) = .49
    #   |1 - f| = 1, .6, .6, 0: (.099)(1) + (.1)(.8) + (.3)(.6) + (.5)(.3) = .509
    assert one.mib("edges") == pytest.approx({"CPR": 0.49, "CMD": 0.509}, rel=1e-12)


def test_areas_need_their_grid_and_a_full_circuit_that_differs_from_the_empty_one():
    with pytest.raises(ValueError, match='grid="mib"'):
        curve().mib()
    with pytest.raises(ValueError, match="cost must be one of"):
        curve(settings={"grid": "mib"}).mib("tokens")
    flat = curve(ROWS.assign(recovered=np.nan), {"grid": "mib"})
    assert all(np.isnan(value) for value in flat.mib().values())


def test_areas_of_a_curve_are_those_of_all_prefixes():
    """On the grid of evaluate(grid="mib") as with every single prefix evaluated: none that is larger fits a fraction."""
    model = toy_model()
    factors = swd_zero_data(model, "all")
    scores = attribute(model, factors, random_split())
    split = carried_by(model, factors, scores, random_split(8, seed=6, name="test"))
    found = evaluate(model, factors, split, scores, grid="mib")
    every = evaluate(model, factors, split, scores, grid=range(scores.n_units + 1)).rows
    empty, full = every["q keep"].iloc[0], every["q keep"].iloc[-1]
    for cost in ("units", "edges"):
        fits = [every[every[cost] <= fraction * every[cost].iloc[-1]] for fraction in MIB_FRACTIONS]
        f, x = np.array([(rows["q keep"].iloc[-1] - empty) / (full - empty) for rows in fits]), np.array(MIB_FRACTIONS)
        assert {int(rows["units"].iloc[-1]) for rows in fits} <= set(found.rows["units"])
        expected = {"CPR": float(np.trapezoid(f, x)), "CMD": float(np.trapezoid(np.abs(1 - f), x))}
        assert found.mib(cost) == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_tables_are_copies_and_settings_record_every_choice():
    one = curve()
    table = one.table()
    table.loc[0, "units"] = 7
    assert one.rows["units"].tolist() == [0, 1, 2, 3, 4]
    model = micro_model()
    train = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
    scores = attribute(model, identity_factors(), train)
    found = evaluate(model, identity_factors(), train, scores, grid=[1], ablation="zero", random_sets=7, seed=2)
    own = {"ablation": "zero", "test_split": "train", "n_test": 2, "grid": "own", "n_validation": 0}
    own |= {"random_sets": 7, "random_sets_seed": 2}
    assert found.settings == {**scores.settings, **own, "replacement": {}}
    assert found.as_dict()["settings"] == found.settings and len(found.as_dict()["rows"]) == 3
