"""refine: on planted problems that can be solved by hand, and what must hold on any."""

import warnings
from dataclasses import replace

import pandas as pd
import pytest
import torch

from swd_lens.base.errors import UndefinedSufficiencyWarning
from swd_lens.circuits import UnitScores, attribute, evaluate, judge, refine
from swd_lens.tasks.task import Task
from swd_lens.units.factors import Factors
from tests.circuits.slow import able_split
from tests.contract import swd_zero_data
from tests.micro import micro_model, split_of, toy_model

SITE = "blocks.0.mlp_out"
TRAIN, VALIDATION, TEST = able_split(12, seed=3, name="train"), able_split(8, seed=9, name="validation"), able_split(8)
TASK = Task("toy", TRAIN, VALIDATION, TEST, "random", False)
# One prompt of the micro model: token 2, hidden activation h = (4, 6), margin = x1 - x0 after the MLP.
ONE = split_of([[2]], [[1]], [[0]], d_vocab=3)


def planted(reads, writes, scores, means=None):
    """Factors of the micro model with units of these reads and writes, ranked by these scores, means zero."""
    factors = {SITE: Factors(torch.tensor(reads).T.contiguous(), torch.tensor(writes))}
    found = attribute(micro_model(), factors, ONE)
    return factors, UnitScores({SITE: torch.tensor(scores)}, {SITE: torch.zeros(len(scores))}, found.settings)


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    factors = swd_zero_data(model, "*.mlp_out")
    return model, factors, attribute(model, factors, TRAIN)


@pytest.fixture(scope="module")
def every_prefix(toy):
    """The curve of every prefix, and that of the usual grid, on the training prompts."""
    model, factors, scores = toy
    grids = (range(scores.n_units + 1), None)
    return [evaluate(model, factors, TRAIN, scores, grid=grid, bootstrap=0) for grid in grids]


def test_a_set_that_is_no_prefix_is_found():
    # Every unit reads input 0 (z = 4 * read) and writes to x1: it gives z to the margin. In the order of the ranking:
    #   unit 0 gives 4, unit 1 gives 0.4, unit 2 gives 4, unit 3 gives 0.4: whole 8.8; two edges each.
    factors, scores = planted([[1.0, 0.0], [0.1, 0.0], [1.0, 0.0], [0.1, 0.0]], [[0.0, 1.0]] * 4, [4.0, 3.0, 2.0, 1.0])
    for cost, price in (("units", (3, 2)), ("edges", (6, 4))):
        found = refine(micro_model(), factors, ONE, scores, sufficiency=0.9, cost=cost)
        # Prefixes: 4 / 8.8 = .45, 4.4 / 8.8 = .5, 8.4 / 8.8 = .95. Units 0 and 2 alone: 8 / 8.8 = .909.
        assert found.prefix.units == ((SITE, 0), (SITE, 1), (SITE, 2))
        assert set(found.refined.units) == {(SITE, 0), (SITE, 2)}
        assert (getattr(found.prefix, f"n_{cost}"), getattr(found.refined, f"n_{cost}")) == price
        assert found.train == pytest.approx({"prefix": 8.4 / 8.8, "refined": 8 / 8.8}, rel=1e-6)
        assert found.test.empty and found.target == 0.9
        assert found.refined.provenance == {
            "kind": "refined", "cost": cost, "sufficiency": 0.9, "ablation": "mean", "n_train": 1,
        }  # fmt: skip


def test_a_unit_outside_the_prefix_is_exchanged_for_several_inside():
    # Units 0, 1, 2 give 2 each; unit 3, the last of the ranking, gives 6; whole 12. Sufficiency 0.5 asks for 6:
    # the best prefix has three units, none of which can go; unit 3 alone will do.
    factors, scores = planted([[0.5, 0.0], [0.5, 0.0], [0.5, 0.0], [0.0, 1.0]], [[0.0, 1.0]] * 4, [4.0, 3.0, 2.0, 1.0])
    found = refine(micro_model(), factors, ONE, scores, sufficiency=0.5, cost="units")
    assert found.prefix.n_units == 3 and found.refined.units == ((SITE, 3),)
    none = refine(micro_model(), factors, ONE, scores, sufficiency=0.5, cost="units", rounds=0)
    assert none.refined.units == none.prefix.units


def test_a_cheap_unit_goes_where_the_one_that_adds_least_per_edge_cannot():
    # Unit 0 has 4 edges: read (1, 1), so z = 10, and write (-.1, .2): it gives 10 * (.2 + .1) = 3.
    # Unit 1 has 2 edges: read (.5, 0), so z = 2, and write (0, 1): it gives 2. Whole 5 (x1 - x0 of token 2 is 0).
    # Per edge unit 0 adds .75 and unit 1 adds 1, so unit 0 is the first to be tried; but without it 2 / 5 = .4 is left, too
    # little, and without unit 1 it is 3 / 5 = .6.
    factors, scores = planted([[1.0, 1.0], [0.5, 0.0]], [[-0.1, 0.2], [0.0, 1.0]], [1.0, 2.0])
    found = refine(micro_model(), factors, ONE, scores, sufficiency=0.59, rounds=0)
    assert found.prefix.units == ((SITE, 1), (SITE, 0))
    assert found.refined.units == ((SITE, 0),)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("sufficiency", "cost"), [(0.65, "edges"), (0.9, "units"), (1.05, "edges")])
def test_never_dearer_than_the_best_prefix_and_sufficient_on_train(toy, every_prefix, sufficiency, cost):
    model, factors, scores = toy
    found = refine(model, factors, TASK, scores, sufficiency=sufficiency, cost=cost, rounds=1)
    price = getattr(found.prefix, f"n_{cost}")
    least, tried = (curve.cost_at(sufficiency=sufficiency, cost=cost) for curve in every_prefix)
    assert least <= price <= tried
    assert getattr(found.refined, f"n_{cost}") < price  # this model has something to gain at all of these
    assert min(found.train.values()) >= sufficiency - 1e-6
    # Both numbers are those of judge, on train and on test.
    both = {"prefix": found.prefix, "refined": found.refined}
    again = judge(model, factors, TRAIN, both).set_index("circuit")["sufficiency"]
    assert again.to_dict() == pytest.approx(dict(found.train), abs=1e-6)
    pd.testing.assert_frame_equal(found.test, judge(model, factors, TEST, both))
    assert found.table()["sufficiency (test)"].tolist() == found.test["sufficiency"].tolist()
    assert found.table()["edges"].tolist() == [found.prefix.n_edges, found.refined.n_edges]
    for shown in (repr(found), found._repr_html_()):
        assert "refined" in shown or "->" in shown


@pytest.mark.parametrize(("ablation", "least"), [("zero", 1.02), ("resample", 1.02)])
def test_no_single_unit_of_the_refined_circuit_can_go(toy, ablation, least):
    model, factors, scores = toy
    found = refine(model, factors, TRAIN, scores, sufficiency=least, ablation=ablation, rounds=0)
    assert found.refined.n_edges < found.prefix.n_edges
    without = {
        str(i): replace(found.refined, units=found.refined.units[:i] + found.refined.units[i + 1 :])
        for i in range(found.refined.n_units)
    }
    rows = judge(model, factors, TRAIN, {"all": found.refined, **without}, ablation=ablation)
    assert rows["sufficiency"][0] >= least - 1e-6 and (rows["sufficiency"][1:] < least + 1e-6).all()


@pytest.mark.slow
def test_it_searches_on_train_only_and_on_no_more_prompts_than_it_was_told(toy):
    model, factors, scores = toy
    # Other test prompts: the same circuits.
    other = replace(TASK, test=able_split(5, seed=20))
    one, two = (refine(model, factors, task, scores, sufficiency=0.6, rounds=0) for task in (TASK, other))
    assert one.refined.units == two.refined.units and one.test["q keep"][1] != two.test["q keep"][1]
    first = {
        name: getattr(TRAIN, name)[:5] for name in ("examples", "tokens", "answer_ids", "distractor_ids", "corrupt")
    }
    few = refine(model, factors, TRAIN, scores, sufficiency=0.5, rounds=0, max_prompts=5)
    same = refine(model, factors, replace(TRAIN, **first), scores, sufficiency=0.5, rounds=0)
    assert few.refined.units == same.refined.units and few.refined.provenance["n_train"] == 5


def test_what_is_refused(toy):
    model, factors, scores = toy
    with pytest.raises(ValueError, match="cost must be one of"):
        refine(model, factors, TASK, scores, cost="tokens")
    with pytest.raises(ValueError, match="max_prompts must be at least 1"):
        refine(model, factors, TASK, scores, max_prompts=0)
    with pytest.raises(ValueError, match="no prefix keeps 9 of the margin"):
        refine(model, factors, TASK, scores, sufficiency=9.0)
    wrong = replace(TRAIN, answer_ids=TRAIN.distractor_ids, distractor_ids=TRAIN.answer_ids)
    with pytest.raises(ValueError, match=r"is -\d\.\d+, not positive: sufficiency is undefined"):
        refine(model, factors, wrong, scores)
    other = {site: Factors(f.read.flip(1), f.write.flip(0), weight=f.read @ f.write) for site, f in factors.items()}
    with pytest.raises(ValueError, match="with other factors of"):
        refine(model, other, TASK, scores)
    assert not hasattr(model.blocks[0], "hook_mlp_out_unit")


def test_a_task_that_only_the_test_prompts_fail_is_judged_as_undefined(toy):
    model, factors, scores = toy
    wrong = replace(TEST, answer_ids=TEST.distractor_ids, distractor_ids=TEST.answer_ids)
    with pytest.warns(UndefinedSufficiencyWarning):
        found = refine(model, factors, replace(TASK, test=wrong), scores, sufficiency=0.5, rounds=0)
    assert found.test["sufficiency"].isna().all() and min(found.train.values()) >= 0.5 - 1e-6


def test_an_empty_circuit_is_not_refined(toy):
    model, factors, scores = toy
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndefinedSufficiencyWarning)
        found = refine(model, factors, TRAIN, scores, sufficiency=-100.0)
    assert found.prefix.units == found.refined.units == ()
