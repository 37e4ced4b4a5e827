"""compare: one road for every method, CE that is matched or said not to be, roles, hosts of their own; what is refused."""

import pandas as pd
import pytest
import torch

import swd_lens as swd
import swd_lens.circuits.protocol
from swd_lens import baselines
from swd_lens.circuits import attribute, compare, evaluate, fidelity
from swd_lens.circuits.compare import check_tasks, role_of, sources_of
from tests.circuits.worked import FEW, OTHER, TOY
from tests.contract import swd_zero_data
from tests.micro import random_tokens, toy_model

SITE = "blocks.1.mlp_out"


@pytest.fixture(scope="module")
def tokens():
    return random_tokens(9, 8)


@pytest.fixture(scope="module")
def both(model, every):
    """Two methods on two tasks."""
    return compare(model, {"SWD": every, "SVD": baselines.svd(model, "all")}, [TOY, OTHER], evaluation=FEW)


def test_compare_runs_every_method_through_the_same_code(model, every, both):
    one = {SITE: every[SITE]}
    alone = compare(model, {"SWD": one}, TOY)  # of one task, with the usual grid
    assert alone.table()["method"].tolist() == ["SWD"] and both.table()["method"].tolist() == ["SWD", "SVD"] * 2
    curve = evaluate(model, one, TOY, attribute(model, one, TOY))
    assert alone["toy"].curves["SWD"].rows.equals(curve.rows)
    assert both["toy"].scores["SVD"].n_units == baselines.svd(model, "all").n_units
    assert alone["toy"].table()["margin"].tolist() == alone.table()["margin"].tolist()


def test_several_tasks_are_kept_by_name(model, every, both):
    assert list(both) == ["toy", "other"] and len(both) == 2
    alone = compare(model, {"SWD": every}, OTHER, evaluation=FEW)["other"].curves["SWD"]
    assert both["other"].curves["SWD"].rows.equals(alone.rows)
    frame = both.without(["SVD"]).prefixes()
    assert frame.groupby("task", sort=False).size().tolist() == [len(c.curves["SWD"].rows) for c in both.values()]
    assert list(frame.columns[:5]) == ["task", "method", "seed", "units", "edges"] and frame["seed"].isna().all()


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


def test_options_reach_attribution_and_evaluation(model, every):
    comparison = compare(
        model, {"SWD": every}, TOY, attribution={"batch_size": 5}, evaluation={"grid": [0, 3]}, positions="all", ablation="zero"
    )
    curve = comparison["toy"].curves["SWD"]
    assert curve.rows["units"].tolist() == [0, 3, every.n_units]
    assert (curve.settings["positions"], curve.settings["ablation"]) == ("all", "zero")


def test_what_it_refuses_before_any_work(model):
    for methods, tasks, how, message in (
        ([], [TOY], {}, "nothing to compare"),
        (["SWD"], [], {}, "no task to compare on"),
        (["SWD"], [TOY, TOY], {}, "two tasks are called 'toy'"),
        (["SWD", "SVD"], [TOY], {"reference": "svd"}, "reference must be one of 'SWD', 'SVD', got 'svd'"),
        (["SWD"], [TOY], {"fidelities": {"SVD": None}}, "fidelities are of 'SVD', but the curves are called 'SWD'"),
        (["SWD"], [TOY], {"roles": {"SVD": "control"}}, "methods of roles= must be one of 'SWD', got 'SVD'"),
        (["SWD"], [TOY], {"roles": {"SWD": "main"}}, "roles= of 'SWD' must be one of 'swd', .*, got 'main'"),
        (["SWD"], [TOY], {"hosts": {"SVD": None}}, "hosts= names SVD"),
        (["SWD"], [TOY], {"hosts": {"SWD": None}}, "hosts= names SWD"),
        (["SWD"], [TOY], {"evaluation": {"ablaton": "zero"}}, "evaluation= has no option 'ablaton'; evaluate takes grid"),
        (["SWD"], [TOY], {"attribution": {"model": 0}}, "attribution= has no option 'model'; attribute takes score"),
    ):

        def never():
            raise AssertionError("made before the check")

        with pytest.raises((ValueError, TypeError), match=message):
            compare(model, dict.fromkeys(methods, never), tasks, **how)


def test_names_and_kinds_of_methods_and_tasks(every):
    # Of the parts of compare, since beartype, in tests alone, lets nothing of another kind reach compare.
    for check, given, message in (
        (sources_of, {"Random-B": []}, "'Random-B' has no seeds"),
        (sources_of, {"R": [every], "R/0": every}, "two curves are called 'R/0'"),
        (sources_of, [every], r'methods must be a mapping \{"name": factors, \.\.\.\}, got a list'),
        (check_tasks, ["ioi"], r"every task must be a Task, got 'ioi'; make one with swd_lens\.load_task"),
        (check_tasks, "ioi", "must be a Task or a list of them, got 'ioi'"),
        (check_tasks, {"toy": TOY}, r"must be a Task or a list of them, got \{'toy'.*pass list\(tasks.values\(\)\)"),
    ):
        with pytest.raises((ValueError, TypeError), match=message):
            check(given)


@pytest.mark.slow
def test_what_is_worse_in_ce_or_kl_is_named(model, every, tokens):
    sites = "*.mlp_in"
    every = {site: every[site] for site in (f"blocks.{layer}.mlp_in" for layer in range(2))}
    methods = {"SVD": baselines.svd(model, sites), "Random-B": baselines.random_b_seeds(model, sites, range(2))}
    few = {"grid": [4], "random_sets": 0}  # CE and KL are what is looked at here
    how = {"tokens": tokens, "evaluation": few, "tolerance": 0.0005}
    comparison = compare(model, {**methods, "SWD": every}, TOY, **how)
    alone, exact = fidelity(model, every, tokens), fidelity(model, methods["SVD"], tokens)
    off, kl_off = alone.ce - exact.ce, alone.kl - exact.kl
    # Nearer to the text than the dense model, by chance, and yet another model: KL alone says it.
    assert off < -0.001 and kl_off > 0.0005 and comparison.reference == "SVD"
    assert (comparison.ce_difference("SWD"), comparison.kl_difference("SWD")) == pytest.approx((off, kl_off), abs=1e-9)
    assert [comparison.out_by(method) for method in comparison.methods] == [(), (), ("KL",)]
    se, kl_se = alone.difference_se(exact), alone.difference_se(exact, of="KL")
    assert (comparison.ce_difference_se("SWD"), comparison.kl_difference_se("SWD")) == pytest.approx((se, kl_se), rel=1e-6)
    assert comparison.ce_difference_se("SVD") is comparison.kl_difference_se("SVD") is None and min(se, kl_se) > 0
    label = f"SWD (KL {kl_off:+.4f} ± {kl_se:.4f})"
    legend = [text.get_text() for text in comparison.plot().legends[0].get_texts()]
    assert legend == ["SVD", "Random-B, mean ± sd of 2 seeds", label] and label in comparison._repr_html_()
    table = comparison.fidelity()
    assert table["method"].tolist() == ["SVD", "Random-B", "Random-B", "SWD"] and table["seed"].tolist() == [pd.NA, 0, 1, pd.NA]
    last = table.iloc[-1]
    assert (last["CE"], last["KL"], last["CE delta"]) == (alone.ce, alone.kl, alone.ce_delta)
    assert last["KL difference"] == pytest.approx(kl_off, abs=1e-9)
    both = {"SVD": methods["SVD"], "SWD": every}
    other = compare(model, both, TOY, reference="SWD", **how | {"tolerance": 1e9})
    assert other.matching() == (
        "Matched: no method's CE or KL is worse than that of SWD by more than 1e+09 nats; the worst CE is that of SVD, "
        f"CE {-off:+.4f} ± {se:.4f}, KL {-kl_off:+.4f} ± {kl_se:.4f}."
    )


def test_without_tokens_nothing_is_called_matched(both):
    assert both.matched("SWD") is None and both.ce_difference("SVD") is None
    assert both.table()[["matched", "out by"]].isna().all(axis=None) and both.fidelity()["CE"].isna().all()
    assert both.matching() == "CE and KL were not matched: not measured for SWD, SVD (pass tokens=)." and both.matching() in repr(
        both
    )
    assert both.plot()._suptitle.get_text().replace("\n", " ") == both.matching()


def test_roles_are_what_made_the_units_or_what_is_said(model, every):
    methods = {
        "SWD": {SITE: every[SITE]},
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
    compared = compare(model, {name: methods[name] for name in ("SWD", "SVD", "Random-B")}, TOY, roles=said, evaluation=FEW)
    assert compared.in_role("swd") == ["SWD"] and compared.in_role("control", "paper") == ["SVD", "Random-B"]


@pytest.mark.slow
def test_a_method_may_have_a_host_of_its_own(model, every, tokens):
    other = toy_model()
    with torch.no_grad():
        other.blocks[1].mlp.W_out.mul_(1.5)
    units = swd_zero_data(other, SITE)
    own = {SITE: every[SITE]}
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
