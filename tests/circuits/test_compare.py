"""compare: one road for every method, CE that is matched or said not to be, seeds, tables worked by hand, the figure's data."""

import warnings
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

import swd_lens as swd
import swd_lens.circuits.protocol
from swd_lens import baselines
from swd_lens.circuits import CostCurve, Fidelity, attribute, compare, evaluate, fidelity
from swd_lens.circuits.compare import check_tasks, role_of, sources_of
from swd_lens.circuits.comparison import Comparison, TaskComparison
from swd_lens.circuits.seeds import SeedCosts, mean_min_cost, over_seeds
from swd_lens.tasks.task import Task
from tests.contract import swd_zero_data
from tests.forwards import block_runs
from tests.micro import identity_factors, micro_model, random_split, random_tokens, split_of, toy_model

SITE = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def factors(model):
    return swd_zero_data(model, "all")


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(9, 8)


def task_named(name, seed):
    validation, test = random_split(seed=seed + 50, name="validation"), random_split(seed=seed, name="test")
    return Task(name, random_split(seed=0), validation, test, "random", False)


TOY, OTHER = task_named("toy", 6), task_named("other", 8)  # test prompts on which the toy model's margin is positive


FEW = {"grid": [0, 4, 16], "random_sets": 0}  # where curves are compared, not looked at


@pytest.fixture(scope="module")
def both(model, factors):
    """Two methods on two tasks."""
    return compare(model, {"SWD": factors, "SVD": baselines.svd(model, "all")}, [TOY, OTHER], evaluation=FEW)


def by_hand(units, edges, recovered, drop, task="toy", q=2.0, **more):
    """A curve of these numbers; its units carry all of the margin, give or take a tenth of a logit."""
    shares = {"recovered": recovered, "recovered of dense": recovered, "sufficiency": recovered}
    rows = pd.DataFrame({"units": units, "edges": edges} | shares | {"drop": drop})
    return CostCurve(rows, task, q, q, 0.0, 0.1, 1.0, 1.0, {}, **more)


@pytest.fixture
def worked():
    """One method of one curve, and one of three seeds, of which one never recovers 0.9."""
    curves = {
        "one": by_hand([0, 1, 4], [0, 5, 30], [0.1, 0.95, 1.0], [0.0, 1.0, 1.5]),
        "many/0": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.90, 1.0], [0.0, 0.5, 2.0]),
        "many/1": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.50, 1.1], [0.0, 1.2, 2.0]),
        "many/2": by_hand([0, 2, 4], [0, 20, 40], [0.1, 0.60, 0.8], [0.0, 1.0, 2.0], q=5.0),
    }
    groups = {"many": ("many/0", "many/1", "many/2")}
    return Comparison({"toy": TaskComparison("toy", curves, {})}, groups, {}, "one")


def measured(comparison, kl=0.01, **ce):
    """The comparison with these CEs, the dense host's being 1; `kl` of all, or by name, the others' then being .01."""
    kls = dict.fromkeys(ce, 0.01) | kl if isinstance(kl, dict) else dict.fromkeys(ce, kl)
    found = {name.replace("_", "/"): Fidelity(1.0, float(ce[name]), kls[name], 1.0, {}, 1) for name in ce}
    return replace(comparison, fidelities=found)


# ---------------------------------------------------------------------------------------------- the road


def test_compare_runs_every_method_through_the_same_code(model, factors, both):
    one = {SITE: factors[SITE]}
    alone = compare(model, {"SWD": one}, TOY)  # of one task, with the usual grid
    assert alone.table()["method"].tolist() == ["SWD"] and both.table()["method"].tolist() == ["SWD", "SVD"] * 2
    curve = evaluate(model, one, TOY, attribute(model, one, TOY))
    assert alone["toy"].curves["SWD"].rows.equals(curve.rows)
    assert both["toy"].scores["SVD"].n_units == baselines.svd(model, "all").n_units
    assert alone["toy"].table()["margin"].tolist() == alone.table()["margin"].tolist()


def test_several_tasks_are_kept_by_name(model, factors, both):
    assert list(both) == ["toy", "other"] and len(both) == 2
    alone = compare(model, {"SWD": factors}, OTHER, evaluation=FEW)["other"].curves["SWD"]
    assert both["other"].curves["SWD"].rows.equals(alone.rows)
    frame = both.without(["SVD"]).prefixes()
    assert frame.groupby("task", sort=False).size().tolist() == [len(c.curves["SWD"].rows) for c in both.values()]
    assert list(frame.columns[:5]) == ["task", "method", "seed", "units", "edges"] and frame["seed"].isna().all()


def test_the_smallest_admissible_prefix_stands_beside_the_thresholds_where_random_sets_were_drawn(worked):
    """Seeds 0 and 1 of "many" have one of 20 and of 40 edges, seed 2 has none."""
    assert not any("admissible" in column for column in worked.table())
    highest = {"one": [9.0, 0.5, 9.0], "many/0": [9.0, 0.4, 9.0], "many/1": [9.0, 9.0, 1.0], "many/2": [9.0, 9.0, 9.0]}
    curves = {
        name: replace(
            curve, validation=curve.rows.assign(**{"random drop": highest[name]}), settings={"random_sets": 50}
        )
        for name, curve in worked["toy"].curves.items()
    }
    of_task = TaskComparison("toy", curves, {})
    column = "edges of the smallest admissible"
    assert of_task.table()[column].fillna(-1).tolist() == [5, 20, 40, -1]
    assert replace(worked, tasks={"toy": of_task}).table()[column].tolist() == [5, 30]


def test_an_encode_decode_pair_takes_the_road_of_the_factors_it_computes(model, factors):
    """z = h @ read and y = z @ write + bias by functions: the numbers of the same factors, but for edges and bits."""
    f, bias = factors[SITE], model.blocks[1].mlp.b_out.detach()

    class Pair:
        def encode(self, h):
            return h @ f.read

        def decode(self, z):
            return z @ f.write + bias

    comparison = compare(model, {"factors": {SITE: f}, "pair": {SITE: Pair()}}, TOY, evaluation=FEW)
    rows = {name: curve.rows.drop(columns=["edges", "bits"]) for name, curve in comparison["toy"].curves.items()}
    np.testing.assert_allclose(rows["pair"].to_numpy(), rows["factors"].to_numpy(), rtol=1e-5, atol=1e-5)
    text = torch.stack([prompt[-1:].repeat(4) for prompt in TOY.test.tokens])
    one, other = (fidelity(model, {SITE: units}, text) for units in (f, Pair()))
    assert one.kl == pytest.approx(other.kl, rel=1e-4) and one.relmse[SITE] == pytest.approx(
        other.relmse[SITE], rel=1e-4
    )


def test_what_makes_factors_is_called_once_and_when_its_turn_comes(model, factors, tokens):
    called = []

    def maker(name):
        def make():
            called.append(name)
            return {SITE: factors[SITE]}

        return make

    methods = {"lazy": maker("lazy"), "plain": {SITE: factors[SITE]}, "seeds": [maker("first"), maker("second")]}
    comparison = compare(model, methods, [TOY, OTHER], tokens=tokens, evaluation=FEW)
    assert called == ["lazy", "first", "second"]
    assert list(comparison["toy"].curves) == ["lazy", "plain", "seeds/0", "seeds/1"]
    assert comparison.groups == {"seeds": ("seeds/0", "seeds/1")}
    assert comparison.methods == {"lazy": ("lazy",), "plain": ("plain",), "seeds": ("seeds/0", "seeds/1")}
    assert comparison["toy"].curves["seeds/1"].rows.equals(comparison["toy"].curves["plain"].rows)


def test_random_b_seeds_are_those_of_random_b(model):
    comparison = compare(model, {"Random-B": baselines.random_b_seeds(model, SITE, seeds=[3, 1])}, TOY, evaluation=FEW)
    for name, seed in (("Random-B/0", 3), ("Random-B/1", 1)):
        units = baselines.random_b(model, SITE, seed)
        alone = evaluate(model, units, TOY, attribute(model, units, TOY), **FEW)
        assert comparison["toy"].curves[name].rows.equals(alone.rows)
    for seeds in ([], [1, 1]):
        with pytest.raises(ValueError, match="one or more different seeds"):
            baselines.random_b_seeds(model, SITE, seeds=seeds)
    with pytest.raises(swd.UnknownSiteError):
        baselines.random_b_seeds(model, "blocks.9.mlp_out")


def test_options_reach_attribution_and_evaluation(model, factors):
    comparison = compare(
        model,
        {"SWD": factors},
        TOY,
        attribution={"batch_size": 5},
        evaluation={"grid": [0, 3]},
        positions="all",
        ablation="zero",
    )
    curve = comparison["toy"].curves["SWD"]
    assert curve.rows["units"].tolist() == [0, 3, factors.n_units]
    assert (curve.settings["positions"], curve.settings["ablation"]) == ("all", "zero")


def test_what_it_refuses(model, factors):
    with pytest.raises(ValueError, match="nothing to compare"):
        compare(model, {}, TOY)
    with pytest.raises(ValueError, match="no task to compare on"):
        compare(model, {"SWD": factors}, [])
    with pytest.raises(ValueError, match="two tasks are called 'toy'"):
        compare(model, {"SWD": factors}, [TOY, TOY])
    with pytest.raises(ValueError, match="reference must be one of 'SWD', 'SVD', got 'svd'"):
        compare(model, {"SWD": factors, "SVD": factors}, TOY, reference="svd")
    with pytest.raises(ValueError, match="'Random-B' has no seeds"):
        compare(model, {"Random-B": []}, TOY)
    with pytest.raises(ValueError, match="two curves are called 'R/0'"):
        compare(model, {"R": [factors], "R/0": factors}, TOY)
    with pytest.raises(ValueError, match="fidelities are of 'SVD', but the curves are called 'SWD'"):
        compare(model, {"SWD": factors}, TOY, fidelities={"SVD": None})


def test_what_is_of_another_kind_is_named(factors):
    # Of the parts of compare, since beartype, in tests alone, lets nothing of the kind reach compare.
    with pytest.raises(TypeError, match=r"every task must be a Task, got 'ioi'; make one with swd_lens\.load_task"):
        check_tasks(["ioi"])
    with pytest.raises(TypeError, match="must be a Task or a list of them, got 'ioi'"):
        check_tasks("ioi")
    with pytest.raises(
        TypeError, match=r"must be a Task or a list of them, got \{'toy'.*pass list\(tasks.values\(\)\)"
    ):
        check_tasks({"toy": TOY})
    with pytest.raises(TypeError, match=r'methods must be a mapping \{"name": factors, \.\.\.\}, got a list'):
        sources_of([factors])


def test_unknown_options_are_refused_before_any_work(model):
    def never():
        raise AssertionError("made before the check")

    with pytest.raises(TypeError, match="evaluation= has no option 'ablaton'; evaluate takes grid, ablation"):
        compare(model, {"SWD": never}, TOY, evaluation={"ablaton": "zero"})
    with pytest.raises(TypeError, match="attribution= has no option 'model'; attribute takes score, sign"):
        compare(model, {"SWD": never}, TOY, attribution={"model": model})


# ---------------------------------------------------------------------------------------------- matched CE


@pytest.mark.slow
def test_what_is_worse_in_ce_or_kl_is_named(model, factors, tokens):
    sites = "*.mlp_in"
    factors = {site: factors[site] for site in (f"blocks.{layer}.mlp_in" for layer in range(2))}
    methods = {"SVD": baselines.svd(model, sites), "Random-B": baselines.random_b_seeds(model, sites, range(2))}
    few = {"grid": [4], "random_sets": 0}  # CE and KL are what is looked at here
    how = {"tokens": tokens, "evaluation": few, "tolerance": 0.0005}
    comparison = compare(model, {**methods, "SWD": factors}, TOY, **how)
    alone, exact = fidelity(model, factors, tokens), fidelity(model, methods["SVD"], tokens)
    off, kl_off = alone.ce - exact.ce, alone.kl - exact.kl
    # Nearer to the text than the dense model, by chance, and yet another model: KL alone says it.
    assert off < -0.001 and kl_off > 0.0005
    assert comparison.reference == "SVD"
    assert comparison.ce_difference("SWD") == pytest.approx(off, abs=1e-9)
    assert comparison.kl_difference("SWD") == pytest.approx(kl_off, abs=1e-9)
    assert [comparison.matched(method) for method in comparison.methods] == [True, True, False]
    assert [comparison.out_by(method) for method in comparison.methods] == [(), (), ("KL",)]
    se, kl_se = alone.difference_se(exact), alone.difference_se(exact, of="KL")
    assert comparison.ce_difference_se("SWD") == pytest.approx(se, rel=1e-6) and se > 0
    assert comparison.kl_difference_se("SWD") == pytest.approx(kl_se, rel=1e-6) and kl_se > 0
    assert comparison.ce_difference_se("SVD") is comparison.kl_difference_se("SVD") is None  # the reference itself
    label = f"SWD (KL {kl_off:+.4f} ± {kl_se:.4f})"
    assert comparison.label("SWD") == label and comparison.label("SVD") == "SVD"
    legend = [text.get_text() for text in comparison.plot().legends[0].get_texts()]
    assert legend == ["SVD", "Random-B, mean ± sd of 2 seeds", label]
    assert comparison.table()["matched"].tolist() == [True, True, False]
    assert comparison.table()["out by"].tolist() == ["", "", "KL"]
    table = comparison.fidelity()
    assert table["method"].tolist() == ["SVD", "Random-B", "Random-B", "SWD"]
    assert table["seed"].tolist() == [pd.NA, 0, 1, pd.NA]
    assert table["CE"].iloc[-1] == alone.ce and table["KL"].iloc[-1] == alone.kl
    assert table["CE delta"].iloc[-1] == alone.ce_delta
    assert table["KL difference"].iloc[-1] == pytest.approx(kl_off, abs=1e-9)
    for shown in (repr(comparison), comparison._repr_html_()):
        assert label in shown
    both = {"SVD": methods["SVD"], "SWD": factors}
    other = compare(model, both, TOY, reference="SWD", **how | {"tolerance": 1e9})
    assert other.ce_difference("SVD") == pytest.approx(-off, abs=1e-9) and other.matched("SVD") is True
    assert other.matching() == (
        "Matched: no method's CE or KL is worse than that of SWD by more than 1e+09 nats; the worst CE is that of SVD, "
        f"CE {-off:+.4f} ± {se:.4f}, KL {-kl_off:+.4f} ± {kl_se:.4f}."
    )


def test_without_tokens_nothing_is_called_matched(both):
    comparison = both
    assert comparison.matched("SWD") is None and comparison.ce_difference("SVD") is None
    assert comparison.table()["matched"].isna().all() and comparison.table()["out by"].isna().all()
    assert comparison.fidelity()["CE"].isna().all()
    assert comparison.matching() == "CE and KL were not matched: not measured for SWD, SVD (pass tokens=)."
    assert comparison.matching() in repr(comparison)
    assert comparison.plot()._suptitle.get_text().replace("\n", " ") == comparison.matching()


@pytest.mark.slow
def test_blocks_before_the_replaced_ones_run_once_for_all_methods(model, factors, tokens):
    """Beside them the dense host's margins; of each further method a few prompts only, by which its shortcuts are verified."""
    one = {SITE: factors[SITE]}
    # Four of the longest prompts at most: plainly once (on the test split thrice), then with a kept prefix, in two parts.
    rows, checked = [], 4 * (1 + 2) + 4 * (3 + 2)
    for n in (1, 2, 4):
        methods = {f"{i}": (lambda: one) if i % 2 else one for i in range(n)}
        with block_runs(model, 0) as runs:
            comparison = compare(model, methods, [TOY, OTHER], tokens=tokens, evaluation=FEW)
        rows.append(runs.rows)
        assert (
            len({str(curve.rows) for curve in (t.curves[name] for t in [comparison["toy"]] for name in methods)}) == 1
        )
    once = 2 * (len(TOY.train) + 2 * len(TOY.test)) + len(tokens)
    assert once <= rows[0] and rows[1] - rows[0] <= 2 * checked and rows[2] - rows[1] <= 2 * 2 * checked


def test_seeds_of_more_than_a_bound_are_made_one_after_the_other(model, factors, tokens, monkeypatch):
    alive: list[int] = []
    most = []

    def seed(number):
        def made():
            alive.append(number)
            most.append(len(alive))
            return {SITE: factors[SITE]}

        return made

    measure = swd_lens.circuits.protocol.fidelities

    def measured(model, group, *rest, **how):
        alive.clear()
        return measure(model, group, *rest, **how)

    monkeypatch.setattr(swd_lens.circuits.protocol, "fidelities", measured)
    for n_bytes, together in ((1, 1), (2**29, 3)):
        monkeypatch.setattr(swd_lens.circuits.protocol, "_MADE_BYTES", n_bytes)
        most.clear()
        compare(model, {"seeds": [seed(i) for i in range(3)]}, TOY, tokens=tokens, evaluation=FEW)
        assert max(most) == together and len(most) == 3


def test_fidelity_that_was_measured_already_is_not_measured_again(model, factors, tokens, monkeypatch):
    found = fidelity(model, factors, tokens)
    calls = []
    monkeypatch.setattr(
        swd_lens.circuits.protocol, "fidelities", lambda *given, **how: calls.append(given) or {"b": found}
    )
    comparison = compare(
        model, {"a": factors, "b": factors}, TOY, tokens=tokens, fidelities={"a": found}, evaluation=FEW
    )
    assert len(calls) == 1 and list(calls[0][1]) == ["b"] and calls[0][1]["b"][SITE] is factors[SITE]
    assert comparison.fidelities == {"a": found, "b": found} and comparison.matched("b") is True


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
    assert better.matching().startswith(
        "Matched: no method's CE or KL is worse than that of one by more than 0.001 nats"
    )
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


# ---------------------------------------------------------------------------------------------- roles


def test_roles_are_what_made_the_units_or_what_is_said(model, factors):
    methods = {
        "SWD": {SITE: factors[SITE]},
        "SVD": baselines.svd(model, SITE),
        "Random-B": baselines.random_b_seeds(model, SITE, seeds=[0]),  # makers: nothing is made to know their role
        "paper": swd.factorize(model, SITE, sparsity=0.5, preset="paper", outer_iterations=4, calibration="zero-data"),
        "pruned": swd.factorize(model, SITE, sparsity=0.5, preset="svd_pruned", calibration="zero-data"),
        "channels": baselines.channels_of(model, SITE),
    }
    roles = {name: role_of(given) for name, given in methods.items()}
    assert roles == {
        "SWD": "swd", "SVD": "control", "Random-B": "swd", "paper": "paper", "pruned": "control", "channels": "control"
    }  # fmt: skip
    said = {"Random-B": "control"}
    compared = compare(
        model, {name: methods[name] for name in ("SWD", "SVD", "Random-B")}, TOY, roles=said, evaluation=FEW
    )
    assert compared.in_role("swd") == ["SWD"] and compared.in_role("control", "paper") == ["SVD", "Random-B"]
    for method, role in (("Random-C", "control"), ("SWD", "main")):
        with pytest.raises(ValueError, match=f"roles.* must be one of .*, got '{method if method != 'SWD' else role}'"):
            compare(model, {"SWD": factors}, TOY, roles={method: role})


# ---------------------------------------------------------------------------------------------- numbers


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


def test_costs_at_a_drop_in_logits_by_hand(worked):
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


def test_costs_at_a_drop_of_the_micro_model():
    # tests/circuits/test_micro.py: ablating unit 1 (3 edges) takes 3 logits off, both units (6 edges) take 5.
    train = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
    # Twice the same prompt: of one alone nobody knows how sure it is that the units carry the task.
    test = split_of([[2], [2]], [[1], [1]], [[0], [0]], d_vocab=3, name="test")
    comparison = compare(
        micro_model(), {"neurons": identity_factors()}, Task("micro", train, test, test, "by hand", False)
    )
    (task,) = comparison
    for drop, units, edges in ((3, 1, 3), (3.5, 2, 6), (5, 2, 6), (5.5, None, None)):
        row = comparison.table(drop=drop).iloc[0]
        costs = [row[f"{cost} at drop {drop:g}"] for cost in ("units", "edges")]
        assert pd.isna(costs).all() if units is None else costs == [units, edges]
        assert row["edges at necessity 0.5"] == 3  # half of 5
        assert comparison[task].curves["neurons"].cost_at(drop=drop) == edges


def test_sufficiency_is_asked_for_by_name(worked):
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
    curve = by_hand(
        [0, 1, 4], [0, 5, 30], [0.0, 0.95, 1.0], [0.0, 1.0, 1.5], validation=rows.assign(recovered=[0, 0.8, 1.0])
    )
    comparison = Comparison({"toy": TaskComparison("toy", {"one": curve}, {})}, reference="one")
    assert comparison.table().iloc[0]["edges at recovered 0.9"] == 30 == curve.cost_at()


def test_a_threshold_that_none_reaches(worked):
    many = worked.table(recovered=5.0).to_dict("records")[1]
    assert pd.isna(many["edges at recovered 5"]) and pd.isna(many["edges at recovered 5 min"])
    assert many["reached recovered 5"] == 0
    assert over_seeds([None, 4]) == SeedCosts(mean=4.0, sd=None, least=4, reached=1)


def test_columns_are_of_the_same_type_whatever_was_reached(worked):
    alone = Comparison({"toy": TaskComparison("toy", {"one": worked["toy"].curves["one"]}, {})}, reference="one")
    for table in (alone.table, alone["toy"].table, worked.table):
        kinds = [list(table(recovered=level).dtypes.astype(str)) for level in (0.9, 5.0)]
        assert kinds[0] == kinds[1] and "object" not in kinds[0]
    costs = "edges at recovered 5"
    assert alone.table(recovered=5.0)[costs].dtype == "Int64" and alone["toy"].table()["margin"].dtype == "Float64"
    seeds = worked.table(recovered=5.0)
    assert (seeds[costs].dtype, seeds[f"{costs} min"].dtype) == ("Float64", "Int64")


def test_mean_of_least_costs_by_hand(worked):
    curves = [worked["toy"].curves[name] for name in worked.groups["many"]]
    table = mean_min_cost(curves, "recovered", "edges")
    assert table["recovered"].tolist() == [0.1, 0.5, 0.6, 0.8, 0.9, 1.0, 1.1]
    #                         0.1  0.5  0.6     0.8             0.9 (0, 1)  1.0   1.1 (1 only)
    expected = [0.0, 20.0, (20 + 40 + 20) / 3, (20 + 40 + 40) / 3, 30.0, 40.0, 40.0]
    assert table["mean"].tolist() == pytest.approx(expected)
    assert table["reached"].tolist() == [3, 3, 3, 3, 2, 2, 1]
    assert table["sd"].iloc[4] == pytest.approx(200**0.5) and np.isnan(table["sd"].iloc[-1])


def test_one_curve_alone_is_its_own_mean(worked):
    curve = worked["toy"].curves["one"]
    for of in ("recovered", "drop"):
        alone, least = mean_min_cost([curve], of, "units"), curve.min_cost(of, "units")
        assert alone[of].tolist() == least[of].tolist() and alone["mean"].tolist() == least["units"].tolist()


# ---------------------------------------------------------------------------------------------- the figure


@pytest.mark.parametrize("cost", ["edges", "units"])
def test_the_figure_shows_the_least_costs(both, cost):
    figure = both.plot(cost)
    above, below = figure.axes[:2], figure.axes[2:4]
    assert [ax.get_title() for ax in above] == ["toy", "other"]
    for of, row in (("recovered", above), ("drop", below)):
        for task, ax in zip(both, row, strict=True):
            lines = [line for line in ax.lines if line.get_drawstyle() == "steps-pre"]
            for line, curve in zip(lines, both[task].curves.values(), strict=True):
                least = curve.min_cost(of, cost)
                assert list(line.get_xdata()) == least[of].tolist() and list(line.get_ydata()) == least[cost].tolist()
            assert ax.get_ylim()[0] <= 0  # the empty circuit is on the axis


def test_the_band_is_one_standard_deviation_over_the_seeds_that_reach(worked):
    ax = worked.plot().axes[0]
    (band,) = ax.collections
    table = mean_min_cost([worked["toy"].curves[name] for name in worked.groups["many"]], "recovered", "edges")
    corners = {(round(x, 6), round(y, 6)) for x, y in band.get_paths()[0].vertices}
    for row in table.fillna(0.0).itertuples():
        for y in (max(0.0, row.mean - row.sd), row.mean + row.sd):
            assert (round(row.recovered, 6), round(y, 6)) in corners
    assert list(ax.lines[1].get_ydata()) == table["mean"].tolist()


def test_odd_curves_are_drawn_too(worked):
    nothing = by_hand([0, 1], [0, 0], [np.nan, np.nan], [0.0, 0.0])
    comparison = Comparison({"$odd_": TaskComparison("$odd_", {"$a_": nothing}, {})}, {}, {}, "$a_")
    for cost in ("edges", "units"):
        figure = comparison.plot(cost)
        figure.draw_without_rendering()
        assert "do not\ncarry the task" in figure.axes[0].texts[0].get_text()
    with pytest.raises(ValueError, match="cost must be one of"):
        worked.plot("tokens")


@pytest.mark.slow
def test_a_method_may_have_a_host_of_its_own(model, factors, tokens):
    other = toy_model()
    with torch.no_grad():
        other.blocks[1].mlp.W_out.mul_(1.5)
    units = swd_zero_data(other, SITE)
    own = {SITE: factors[SITE]}
    how = {"tokens": tokens, "evaluation": FEW}
    both = compare(model, {"ours": own, "theirs": units}, [TOY, OTHER], hosts={"theirs": other}, **how)
    here = compare(model, {"ours": own}, [TOY, OTHER], **how)
    there = compare(other, {"theirs": units}, [TOY, OTHER], **how)
    for task in ("toy", "other"):
        assert both[task].curves["ours"].rows.equals(here[task].curves["ours"].rows)
        assert both[task].curves["theirs"].rows.equals(there[task].curves["theirs"].rows)
    assert both.fidelities["theirs"] == there.fidelities["theirs"]
    # CE is compared as it is; rows are differences from two dense models, which have no paired error.
    difference = there.fidelities["theirs"].ce - here.fidelities["ours"].ce
    assert both.ce_difference("theirs") == pytest.approx(difference)
    assert both.ce_difference_se("theirs") is None and both.matched("theirs") is (not both.out_by("theirs"))


@pytest.mark.parametrize("hosts", [{"theirs": None}, {"one": None}])
def test_hosts_are_of_methods_and_leave_one_to_the_model(model, factors, hosts):
    with pytest.raises(ValueError, match="hosts= names"):
        compare(model, {"one": {SITE: factors[SITE]}}, TOY, hosts=hosts)


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
