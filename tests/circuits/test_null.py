"""circuit_null: by arithmetic on the micro model, its draws and strata by hand, its figures against runs of one circuit alone."""

import json
import math

import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.circuits import Circuit, attribute, evaluate, evaluate_circuits
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.null import CircuitNull, _Pool, has_others
from swd_lens.tasks.task import Task
from swd_lens.units.factors import Factors
from swd_lens.units.unit_set import UnitSet
from tests.circuits.slow import carried_by
from tests.contract import swd_zero_data
from tests.forwards import block_runs
from tests.micro import identity_factors, micro_model, random_split, split_of, toy_model

# tests/circuits/test_micro.py has the arithmetic: z of the test prompt is (4, 6), means are (2, 3), the margin is z0 + z1 = 10.
# Unit 1 is the better one, each has 3 edges.
#   circuit {1}: keep 2 + 6 = 8, ablate 4 + 3 = 7 (drop 3);   circuit {0}: keep 4 + 3 = 7, ablate 2 + 6 = 8 (drop 2)
SITE = "blocks.0.mlp_out"
TRAIN = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
TEST = split_of([[2]], [[1]], [[0]], d_vocab=3, name="test")


@pytest.fixture
def micro():
    model, factors = micro_model(), identity_factors()
    return model, factors, Task("by hand", TRAIN, TEST, TEST, "by hand", False), attribute(model, factors, TRAIN)


def test_random_circuits_of_all_units_by_hand(micro):
    null = swd.circuit_null(*micro, recovered=0.6 - 1e-6, n=30)  # of 5: unit 1 brings 3, unit 0 brings 2
    assert null.circuits[0].units == ((SITE, 1),)
    assert null.rows["circuit"].tolist() == ["circuit", *(f"random {i}" for i in range(30))]
    assert null.rows["units"].eq(1).all() and null.rows["edges"].eq(3).all()
    best = [circuit.units == ((SITE, 1),) for circuit in null.circuits[1:]]
    assert 0 < sum(best) < 30
    assert null.rows["recovered"].tolist() == pytest.approx([0.6, *(0.6 if same else 0.4 for same in best)])
    assert null.rows["sufficiency"].tolist() == pytest.approx([0.8, *(0.8 if same else 0.7 for same in best)])
    assert null.rows["drop"].tolist() == pytest.approx([3.0, *(3.0 if same else 2.0 for same in best)])
    # Equal circuits count as at least as good.
    assert null.recovered_p == null.drop_p == (1 + sum(best)) / 31
    table = null.table().set_index("measure")
    assert table["as good"].tolist() == [sum(best)] * 2 and table["p"].tolist() == [null.recovered_p] * 2
    assert table.loc["recovered", "random mean"] == pytest.approx(0.4 + 0.2 * sum(best) / 30)
    assert table.loc["drop", "random best"] == pytest.approx(3.0)
    assert null.q_full == pytest.approx(10.0)


def test_a_circuit_of_all_units_has_no_others(micro):
    model, factors, split, scores = micro
    for units, others in (([], False), ([(SITE, 1)], True), (scores.ranking(), False)):
        assert has_others(Circuit.of(UnitSet.of(model, factors), scores, units)) == others
    # Unit 1 writes nothing: unit 0 is the only one that could be drawn, and it is the circuit.
    factors = {SITE: Factors(torch.tensor([[1.0, 1.0], [1.0, 0.0]]), torch.tensor([[0.0, 2.0], [0.0, 0.0]]))}
    with pytest.raises(ValueError, match="the circuit has all 1 units that read and write"):
        swd.circuit_null(model, factors, split, attribute(model, factors, TRAIN), circuit=1, n=5)


def test_random_circuits_of_the_same_scores_by_hand(micro):
    # Both units are in one stratum: a random circuit is either of them, the member itself included.
    null = swd.circuit_null(*micro, circuit=1, n=40, match="score")
    best = sum(circuit.units == ((SITE, 1),) for circuit in null.circuits[1:])
    assert 5 < best < 35 and null.recovered_p == null.drop_p == (1 + best) / 41
    assert null.settings["pool units"] == 2 and null.settings["stratum"] == 4
    worse = swd.circuit_null(*micro, circuit=Circuit.of(micro[1], micro[3], [f"{SITE}/0"]), n=4, match="score")
    assert worse.recovered_p == worse.drop_p == 1.0


def test_a_task_that_is_not_carried_has_no_p_of_what_is_recovered(micro):
    model, factors, _, scores = micro
    wrong = split_of([[2]], [[0]], [[1]], d_vocab=3, name="test")  # margin -10
    with pytest.warns(swd.errors.UndefinedSufficiencyWarning):
        null = swd.circuit_null(model, factors, wrong, scores, circuit=1, n=4)
    assert math.isnan(null.recovered_p)
    # Ablating unit 1 takes 3 off the 10: the drop is -3, unit 0's -2.
    assert null.rows["drop"][0] == pytest.approx(-3.0) and null.drop_p == 1.0
    with pytest.warns(swd.errors.UndefinedSufficiencyWarning), pytest.raises(ValueError, match="does not carry"):
        swd.circuit_null(model, factors, wrong, scores)


def test_what_is_refused(micro):
    model, factors, task, scores = micro
    for how, message in (
        ({"n": 0}, "n, the number of random circuits, must be a whole number of at least 1, got 0"),
        ({"match": "units"}, "match must be one of .edges., .score., got .units."),
        ({"circuit": 3}, "3"),
        ({"circuit": 0}, "the circuit of 0 units has no edges"),
        ({"circuit": 2}, "the circuit has all 2 units that read and write"),
        ({"sufficiency": 2.0}, "reaches"),
        ({"sufficiency": 0.9, "recovered": 0.9}, "give one threshold"),
    ):
        with pytest.raises(ValueError, match=message):
            swd.circuit_null(model, factors, task, scores, **how)
    others = attribute(model, factors, split_of([[0]], [[1]], [[0]], d_vocab=3))
    with pytest.raises(ValueError, match="scores"):
        swd.circuit_null(model, factors, task, scores, circuit=Circuit.of(factors, others, [f"{SITE}/0"]))


def circuit_of(scores: list[float], edges: list[int], members: list[int]) -> Circuit:
    of_units = swd.types.UnitScores({"a": torch.tensor(scores)}, {"a": torch.zeros(len(scores))}, {})
    return Circuit(tuple(("a", i) for i in members), of_units, {"a": torch.tensor(edges)})


def test_a_draw_has_at_most_the_edges_and_no_unit_more_would_fit():
    edges = [5, 3, 0, 4, 2, 7]
    pool = _Pool.of(circuit_of([0.0] * 6, edges, [0, 3]), "edges")  # 9 edges
    assert [unit for _, unit in pool.units] == [0, 1, 3, 4, 5]  # by their scores, ties in order; unit 2 has no edges
    generator, seen = torch.Generator().manual_seed(0), set()
    for _ in range(200):
        drawn = [unit for _, unit in pool.draw(generator)]
        total = sum(edges[unit] for unit in drawn)
        assert len(set(drawn)) == len(drawn) and total <= 9
        assert all(total + edges[unit] > 9 for unit in (0, 1, 3, 4, 5) if unit not in drawn)
        seen.add(frozenset(drawn))
    # Every set to which nothing can be added: {0,3} {0,1} {0,4} {1,3,4} {4,5}; and {0,1}, {0,4} leave 1 and 2 open.
    assert seen == {frozenset(s) for s in ({0, 3}, {0, 1}, {0, 4}, {1, 3, 4}, {4, 5})}


def test_every_member_is_replaced_by_a_unit_of_its_stratum():
    # Ranked: 6 (no edges), 0, 1, 3, 5, 7, 8, 9, 2, 4; members 0 and 9, so strata of eight valid units: 0 ... 2, and 4 alone.
    scores, edges = [9.0, 8.5, 4.0, 8.0, 1.0, 6.0, 12.0, 5.5, 5.0, 4.5], [4, 4, 4, 4, 9, 4, 0, 4, 4, 4]
    pool = _Pool.of(circuit_of(scores, edges, [0, 9]), "score")
    assert [unit for _, unit in pool.units] == [0, 1, 3, 5, 7, 8, 9, 2, 4] and pool.stratum == 8
    generator, counts = torch.Generator().manual_seed(0), dict.fromkeys(range(10), 0)
    for _ in range(400):
        drawn = [unit for _, unit in pool.draw(generator)]
        assert len(set(drawn)) == 2 and 4 not in drawn  # no member is in its stratum
        for unit in drawn:
            counts[unit] += 1
    assert counts[6] == counts[4] == 0
    assert all(60 < counts[unit] < 140 for unit in (0, 1, 2, 3, 5, 7, 8, 9))  # 100 each, give or take 9
    # Of several draws the nearest in edges is taken.
    pool, generator = _Pool.of(circuit_of([8.0, 7.0, 6.0, 5.0], [3, 5, 40, 4], [0]), "score"), torch.Generator().manual_seed(0)
    assert {unit for _ in range(40) for _, unit in pool.draw(generator)} == {0}


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    factors = swd_zero_data(model, ["blocks.0.attn_o", "blocks.1.mlp_out"])
    others = [random_split(12, seed=seed, name=name) for name, seed in (("validation", 6), ("test", 5))]
    task = Task("toy", random_split(12), *others, "random", False)
    scores = attribute(model, factors, task)
    others = [carried_by(model, factors, scores, split) for split in others]
    return model, factors, Task("toy", task.train, *others, "random", False), scores


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("match", "ablation"), [("edges", "mean"), ("score", "zero")])
def test_every_row_is_what_its_circuit_gives_alone(toy, match, ablation):
    model, factors, task, scores = toy
    null = swd.circuit_null(model, factors, task, scores, circuit=6, n=5, match=match, ablation=ablation, seed=3)
    prefix = evaluate(model, factors, task, scores, grid=[6], ablation=ablation).rows.iloc[1]
    assert null.rows[["units", "edges"]].iloc[0].tolist() == [6, prefix["edges"]]
    for name in ("sufficiency", "drop", "q keep", "q ablate"):
        assert null.rows[name].iloc[0] == pytest.approx(prefix[name], abs=1e-5)
    for i, drawn in enumerate(null.circuits[1:], 1):
        alone = evaluate_circuits(model, factors, task, drawn, ablation=ablation).iloc[0]
        assert null.rows["edges"][i] == drawn.n_edges
        assert abs(prefix["edges"] - drawn.n_edges) < max(int(e.max()) for e in drawn.edges.values())
        assert match == "score" or drawn.n_edges <= prefix["edges"]
        assert null.rows["sufficiency"][i] == pytest.approx(alone["sufficiency"], abs=1e-5)
        assert null.rows["drop"][i] == pytest.approx(alone["drop"], abs=1e-5)
    for p, of in ((null.recovered_p, "q keep"), (null.drop_p, "drop")):
        assert p == (1 + sum(null.rows[of][1:] >= null.rows[of][0])) / 6
    how = {"circuit": 6, "n": 3, "match": match, "ablation": ablation}
    again, other = (swd.circuit_null(*toy, **how, seed=seed).circuits for seed in (3, 1))  # a seed is a draw
    assert [c.units for c in again] == [c.units for c in null.circuits[:4]] and again[1].units != other[1].units


def test_what_comes_before_the_first_replaced_layer_is_run_once(toy):
    model, _, task, _ = toy
    factors = swd_zero_data(model, "blocks.1.mlp_out")
    scores = attribute(model, factors, task)
    with block_runs(model, 0) as of_curve:
        evaluate(model, factors, task.test, scores, dense=DenseCache())
    with block_runs(model, 0) as of_both:
        swd.circuit_null(model, factors, task, scores, circuit=6, n=20)
    # All that the twenty-one circuits need of block 0 the curve needs, too.
    assert of_both.rows == of_curve.rows


def test_it_goes_to_json_and_has_a_card(micro):
    null = swd.circuit_null(*micro, circuit=1, n=4, match="score")
    values = json.loads(json.dumps(null.as_dict()))
    assert values["recovered_p"] == null.recovered_p and values["drop_p"] == null.drop_p
    again = CircuitNull.from_dict(values)
    pd.testing.assert_frame_equal(again.rows, null.rows)
    assert again.recovered_p == null.recovered_p and again.settings == null.settings and again.circuits == ()
    assert "1 units with 3 edges beside 4 random circuits, match='score'; p of recovered" in repr(null)
    assert "3 to 3 edges" in null._repr_html_() and len(null.plot().axes) == 2
