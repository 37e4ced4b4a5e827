"""refine: on planted problems that can be solved by hand, and what must hold on any."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import scipy.stats
import torch

import swd_lens as swd
from swd_lens.base.errors import UndefinedSufficiencyWarning
from swd_lens.circuits import UnitScores, attribute, evaluate, evaluate_circuits, refine
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.circuits.measure import Threshold
from swd_lens.circuits.refine import _Search
from swd_lens.hosts import host_of
from swd_lens.tasks.task import Task
from swd_lens.units import attach
from swd_lens.units.factors import Factors
from tests.circuits.slow import able_split, carried_by, last_logits, margin_of
from tests.contract import swd_zero_data
from tests.micro import micro_model, random_split, split_of, toy_model

SITE = "blocks.0.mlp_out"
TRAIN, VALIDATION, TEST = able_split(12, seed=3, name="train"), able_split(8, seed=9, name="validation"), able_split(8)
TASK = Task("toy", TRAIN, VALIDATION, TEST, "random", False)
# One prompt of the micro model: token 2, hidden activation h = (4, 6), margin = x1 - x0 after the MLP.
ONE = split_of([[2]], [[1]], [[0]], d_vocab=3)


def planted(reads, writes, scores, means=None):
    """Factors of the micro model with units of these reads and writes, ranked by these scores; means are zero if not given."""
    factors = {SITE: Factors(torch.tensor(reads).T.contiguous(), torch.tensor(writes))}
    found = attribute(micro_model(), factors, ONE)
    at = torch.zeros(len(scores)) if means is None else torch.tensor(means)
    return factors, UnitScores({SITE: torch.tensor(scores)}, {SITE: at}, found.settings)


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    factors = swd_zero_data(model, "*.mlp_out")
    return model, factors, attribute(model, factors, TRAIN)


@pytest.fixture(scope="module")
def carried(toy):
    """A task that the toy's units carry, of different prompts in its three splits."""
    sizes = {"train": 16, "validation": 24, "test": 24}
    splits = [carried_by(*toy, random_split(n, seed=50 + n + i, name=k)) for i, (k, n) in enumerate(sizes.items())]
    return Task("toy", *splits, "random", False)


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
        assert found.validation == found.train and found.of == "sufficiency"  # one split is all there is
        same = refine(micro_model(), factors, ONE, scores, cost=cost)  # the empty circuit's margin is 0
        assert (same.of, same.refined.units, same.prefix.units) == ("recovered", found.refined.units, found.prefix.units)
        without_time = refine(micro_model(), factors, ONE, scores, sufficiency=0.9, cost=cost, seconds=0.0)
        assert without_time.refined.units == without_time.prefix.units == found.prefix.units
        assert found.test.empty and found.target == 0.9
        assert found.refined.provenance == {
            "kind": "refined", "cost": cost, "sufficiency": 0.9, "ablation": "mean", "n_train": 1, "n_validation": 1,
        }  # fmt: skip


def test_recovered_is_counted_from_the_empty_circuit():
    # As above, and what is left out is at half of its activation: empty 4.4 of 8.8. Units 0 and 2 alone: 8 + .4, so that they
    # recover (8.4 - 4.4) / 4.4; the prefix of three has 8.6.
    means = [2.0, 0.2, 2.0, 0.2]
    factors, scores = planted([[1.0, 0.0], [0.1, 0.0]] * 2, [[0.0, 1.0]] * 4, [4.0, 3.0, 2.0, 1.0], means)
    found = refine(micro_model(), factors, ONE, scores)
    assert set(found.refined.units) == {(SITE, 0), (SITE, 2)}
    assert found.train == pytest.approx({"prefix": 4.2 / 4.4, "refined": 4 / 4.4}, rel=1e-6)


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


@pytest.mark.slow
@pytest.mark.parametrize(("how", "cost"), [({"recovered": 0.7}, "edges"), ({"sufficiency": 0.9}, "units"), ({}, "edges")])
def test_never_dearer_than_the_prefix_and_sure_on_validation(toy, carried, how, cost):
    model, factors, scores = toy
    found = refine(model, factors, carried, scores, cost=cost, rounds=1, **how)
    of, target = next(iter(how.items()), ("recovered", 0.9))
    assert (found.of, found.target) == (of, target)
    assert getattr(found.refined, f"n_{cost}") <= getattr(found.prefix, f"n_{cost}")
    # What is expected of the test prompts lies above the threshold, by a plain prediction bound: the mean of the validation
    # prompts, spread pooled over these and the training prompts (each is about something of its own).
    both = {"prefix": found.prefix, "refined": found.refined}
    for name, circuit in both.items():
        there, here = (contrast(toy, split, circuit, of, target) for split in (carried.train, carried.validation))
        degrees = len(there) + len(here) - 2
        spread = ((len(there) - 1) * there.var(ddof=1) + (len(here) - 1) * here.var(ddof=1)) / degrees
        ahead = max(spread, here.var(ddof=1)) / len(carried.test)  # both splits have as many prompts
        assert here.mean() >= scipy.stats.t.ppf(0.95, degrees) * (spread / len(here) + ahead) ** 0.5 - 1e-5
        assert found.validation[name] > target
    # All numbers are those of judge, on each split.
    for split, values in ((carried.train, found.train), (carried.validation, found.validation)):
        again = evaluate_circuits(model, factors, split, both).set_index("circuit")[of]
        assert again.to_dict() == pytest.approx(dict(values), abs=1e-5)
    pd.testing.assert_frame_equal(found.test, evaluate_circuits(model, factors, carried, both))
    assert found.table()[f"{of} (test)"].tolist() == found.test[of].tolist()
    assert found.table()["edges"].tolist() == [found.prefix.n_edges, found.refined.n_edges]
    for shown in (repr(found), found._repr_html_()):
        assert "refined" in shown or "->" in shown


def contrast(toy, split, circuit, of, target):
    """How far every prompt's margin with the circuit kept is above what the threshold asks."""
    model, factors, scores = toy
    margins = evaluate(model, factors, split, scores, grid=[]).margins
    full, empty = margins["full"].numpy(), margins["keep"][0].numpy()
    asked = target * full + ((1 - target) * empty if of == "recovered" else 0)
    return kept_margins(model, factors, split, circuit) - asked


def kept_margins(model, factors, split, circuit):
    with circuit.attach(model, factors), torch.no_grad():
        return np.array([float(margin_of(last_logits(model, p), split, i)) for i, p in enumerate(split.tokens)])


@pytest.mark.parametrize("ablation", ["zero", "resample"])
def test_no_single_unit_of_a_searched_circuit_can_go(toy, ablation):
    """What the search itself ends in, before it is decided on validation prompts where to stop."""
    model, factors, scores = toy
    with attach(model, factors) as attachment:
        runner = InterventionRunner(host_of(model), attachment, TRAIN, scores, ablation, keep=True)
        search = _Search(runner, scores, attachment.factors.active_edges, "edges", Threshold("sufficiency", 1.02))
        everything = torch.ones(scores.n_units, dtype=torch.bool)
        start, *_, end = search.at(1.02, start=everything, rounds=0)
        assert search.price(end) < search.price(start)
        inside = end.nonzero()[:, 0]
        without = end.repeat(len(inside), 1)
        without[torch.arange(len(inside)), inside] = False
        assert search.values(end[None])[0] >= 1.02 - 1e-6 and bool((search.values(without) < 1.02 + 1e-6).all())


@pytest.mark.slow
def test_test_prompts_choose_nothing_and_no_more_training_prompts_are_used_than_it_was_told(toy, carried):
    model, factors, scores = toy
    # Other test prompts: the same circuits.
    other = replace(carried, test=carried_by(*toy, random_split(40, seed=20, name="test")))
    one, two = (refine(model, factors, task, scores, recovered=0.6, rounds=0) for task in (carried, other))
    assert one.refined.units == two.refined.units and one.test["q keep"][1] != two.test["q keep"][1]
    first = {name: getattr(carried.train, name)[:5] for name in ("examples", "tokens", "answer_ids", "distractor_ids", "corrupt")}
    few = refine(model, factors, carried, scores, recovered=0.5, rounds=0, max_prompts=5)
    same = refine(model, factors, replace(carried, train=replace(carried.train, **first)), scores, recovered=0.5, rounds=0)
    assert few.refined.units == same.refined.units and few.refined.provenance["n_train"] == 5


def test_what_is_refused(toy):
    model, factors, scores = toy
    with pytest.raises(ValueError, match=r"robust, the budget of the attack, must be a number from 0 to 1, got 1\.5"):
        refine(model, factors, TASK, scores, robust=1.5)
    with pytest.raises(ValueError, match="cost must be one of"):
        refine(model, factors, TASK, scores, cost="tokens")
    with pytest.raises(ValueError, match="no prefix can be expected to reach sufficiency 9 on further prompts: 8 prompts"):
        refine(model, factors, TASK, scores, sufficiency=9.0)
    with pytest.raises(ValueError, match="give one threshold"):
        refine(model, factors, TASK, scores, sufficiency=0.9, recovered=0.9)
    wrong = replace(TRAIN, answer_ids=TRAIN.distractor_ids, distractor_ids=TRAIN.answer_ids)
    for of in ("sufficiency", "recovered"):
        with pytest.raises(ValueError, match=rf"of which {of} is a share, is -\d\.\d+ logits, not above zero"):
            refine(model, factors, wrong, scores, **{of: 0.9})
    other = {site: Factors(f.read.flip(1), f.write.flip(0), weight=f.read @ f.write) for site, f in factors.items()}
    with pytest.raises(ValueError, match="with other factors of"):
        refine(model, other, TASK, scores)
    assert not hasattr(model.blocks[0], "hook_mlp_out_unit")


def test_tasks_that_only_the_test_prompts_fail_and_empty_circuits(toy, carried):
    model, factors, scores = toy
    test = carried.test
    wrong = replace(test, answer_ids=test.distractor_ids, distractor_ids=test.answer_ids)
    with pytest.warns(UndefinedSufficiencyWarning):
        found = refine(model, factors, replace(carried, test=wrong), scores, recovered=0.5, rounds=0)
    assert found.test["recovered"].isna().all() and min(found.validation.values()) >= 0.5 - 1e-6
    model, factors, scores = toy
    with warnings.catch_warnings():
        warnings.simplefilter("error", UndefinedSufficiencyWarning)
        found = refine(model, factors, carried, scores, recovered=-0.5, rounds=0)
    assert found.prefix.units == found.refined.units == ()


def test_a_robust_circuit_by_hand():
    """Units add 10, 2 and -2 to the margin. The first alone recovers all of it, and .8 where the last is restored; the first two
    1.2, and 1.0."""
    reads, writes = [[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]], [[0.0, 2.5], [0.0, 1 / 3], [0.5, 0.0]]
    factors, scores = planted(reads, writes, [3.0, 2.0, 1.0])
    plain = refine(micro_model(), factors, ONE, scores)
    assert plain.refined.units == ((SITE, 0),) and plain.budget is None
    robust = refine(micro_model(), factors, ONE, scores, robust=1.0)
    assert robust.refined.units == robust.prefix.units == ((SITE, 0), (SITE, 1)) and robust.budget == 1.0
    assert robust.validation["refined"] == pytest.approx(1.0)
    # Of two outside units .4 may be restored together: 10 - .8 is not below .9 of 10.
    assert refine(micro_model(), factors, ONE, scores, robust=0.2).refined.units == ((SITE, 0),)


@pytest.mark.slow
def test_a_robust_circuit_holds_where_outside_units_are_restored(default_model):
    """On the embedded model: it takes more edges, and is not worse under attack than a circuit that was not searched so."""
    factors = swd.baselines.neurons(default_model, "blocks.3.mlp_out")
    task = swd.load_task("gendered_pronoun", default_model, n_train=40, n_validation=40, n_test=40)
    scores = attribute(default_model, factors, task)
    how = {"max_prompts": 40, "rounds": 0}
    plain = refine(default_model, factors, task, scores, **how)
    robust = refine(default_model, factors, task, scores, robust=0.2, **how)
    assert plain.budget is None and robust.budget == 0.2 and robust.refined.provenance["budget"] == 0.2
    assert "under attack" not in plain.test and robust.refined.n_edges > plain.refined.n_edges
    attacked = [swd.attack(default_model, factors, task, each.refined, budget=0.2, n=1).recovered for each in (plain, robust)]
    assert robust.validation["refined"] >= 0.9 - 1e-6 and attacked[1] >= attacked[0] - 0.01
    assert robust.table()["under attack (test)"].tolist() == robust.test["under attack"].tolist()
    assert robust.test["under attack"][1] == pytest.approx(attacked[1], abs=1e-6) and attacked[1] > 0.87
    assert robust.provenance == scores.settings | dict(robust.refined.provenance)
    (ax,) = robust.plot().axes
    drawn = {line.get_label(): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines}
    edges = [robust.prefix.n_edges, robust.refined.n_edges]
    assert drawn["validation"] == (edges, list(robust.validation.values()))
    assert drawn["test"] == (edges, robust.test["recovered"].tolist())
    assert drawn["under attack (test)"] == (edges, robust.test["under attack"].tolist())
    (of_plain,) = plain.plot().axes
    assert [line.get_label() for line in of_plain.lines[:2]] == ["validation", "test"]
