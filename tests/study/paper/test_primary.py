"""The primary number, by hand: least edges, log ratio, paired draws, Holm's adjustment."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch

from swd_lens.circuits import CostCurve, Fidelity
from swd_lens.circuits.compare import Comparison, TaskComparison
from swd_lens.study.paper import primary
from swd_lens.study.paper.primary import Ratio


def curve(edges, keep, ablate, unpruned):
    """Prefixes of these edges; margins by prefix and prompt."""
    margins = {"keep": torch.tensor(keep), "ablate": torch.tensor(ablate)}
    margins |= {"unpruned": torch.tensor(unpruned), "dense": torch.tensor(unpruned)}
    q = float(margins["unpruned"].mean())
    rows = {"units": list(range(len(edges))), "edges": edges}
    rows |= {"sufficiency": (margins["keep"].mean(1) / q).tolist()}
    rows |= {"drop": (q - margins["ablate"].mean(1)).tolist()}
    return CostCurve(pd.DataFrame(rows), "toy", q, q, 1.0, 1.0, {}, margins=margins)


def fidelity(ce):
    return Fidelity(2.0, ce, 0.0, 1.0, {}, 100)


@pytest.fixture
def comparison():
    whole = [2.0, 2.0]
    curves = {
        "SWD s=0.5": curve(
            [0, 10, 40], [[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]], [[2.0, 2.0], [1.5, 1.5], [0.0, 0.0]], whole
        ),
        "Neurons": curve([0, 5, 30], [[0.0, 0.0], [1.9, 1.9], [2.0, 2.0]], [[2.0, 2.0], [0.5, 0.5], [0.0, 0.0]], whole),
        # Its circuit would be the cheapest, but it is another model.
        "Far off": curve([0, 1, 2], [[0.0, 0.0], [2.0, 2.0], [2.0, 2.0]], [[2.0, 2.0], [0.0, 0.0], [0.0, 0.0]], whole),
    }
    fidelities = {"SWD s=0.5": fidelity(2.0), "Neurons": fidelity(2.0005), "Far off": fidelity(2.1)}
    return Comparison({"toy": TaskComparison("toy", curves, {})}, {}, fidelities, "SWD s=0.5")


def test_the_best_matched_control_counts(comparison):
    at_sufficiency, at_drop = primary.ratios(comparison, "SWD s=0.5", "a", sufficiency=0.9, share_of_drop=0.5)
    assert (at_sufficiency.control, at_sufficiency.swd_edges, at_sufficiency.control_edges) == ("Neurons", 40, 5)
    assert at_sufficiency.log_ratio == pytest.approx(math.log(8))
    # All prompts are alike, so every draw gives the same; 1 of 2,001 at least is the chance that it does not.
    assert (at_sufficiency.low, at_sufficiency.high) == pytest.approx((math.log(8), math.log(8)))
    assert at_sufficiency.p == pytest.approx(2 / 2001)
    # Half of the dense margin is a drop of one logit: SWD's second prefix takes half a logit, Neurons' takes 1.5.
    assert (at_drop.swd_edges, at_drop.control_edges) == (40, 5)


def test_a_control_closer_to_the_dense_model_counts_and_one_further_off_does_not(comparison):
    def control(ce_of_swd, ce_of_neurons):
        fidelities = {**comparison.fidelities, "SWD s=0.5": fidelity(ce_of_swd), "Neurons": fidelity(ce_of_neurons)}
        each = replace(comparison, fidelities=fidelities)
        return primary.ratios(each, "SWD s=0.5", "a", sufficiency=0.9, share_of_drop=0.5)[0].control

    assert control(2.005, 2.0) == "Neurons"  # exact, and SWD is not
    assert control(2.0, 2.0011) == ""
    assert control(2.0995, 2.0) == "Far off"  # as far off as SWD is now


def test_draws_are_paired():
    # The first prefix suffices for the first prompt alone: where that is drawn often enough, both need it only.
    suffices_once = [[0.0, 0.0], [2.0, 1.0], [2.0, 2.0]]
    ablate = [[2.0, 2.0], [1.0, 1.0], [0.0, 0.0]]
    curves = {
        "SWD": curve([0, 20, 80], suffices_once, ablate, [2.0, 2.0]),
        "Neurons": curve([0, 5, 20], suffices_once, ablate, [2.0, 2.0]),
    }
    comparison = Comparison(
        {"toy": TaskComparison("toy", curves, {})}, {}, {"SWD": fidelity(2.0), "Neurons": fidelity(2.0)}, "SWD"
    )
    ratio, _ = primary.ratios(comparison, "SWD", "a", sufficiency=0.9, share_of_drop=0.5)
    # Unpaired draws would give 20/20 and 80/5, too.
    assert (ratio.low, ratio.high) == pytest.approx((math.log(4), math.log(4)))


def test_what_has_no_circuit_has_no_ratio(comparison):
    at_sufficiency, _ = primary.ratios(comparison, "SWD s=0.5", "a", sufficiency=1.5, share_of_drop=0.5)
    assert at_sufficiency.control == "" and at_sufficiency.swd_edges is None
    assert math.isnan(at_sufficiency.log_ratio) and math.isnan(at_sufficiency.p_holm)
    assert primary.in_words([at_sufficiency]) == [
        "At sufficiency 1.5 no task has both a circuit of SWD and a control of no worse CE with one."
    ]


def test_holm_by_hand():
    def ratio(task, p):
        return Ratio(task, "a", "t", "SWD", "N", 2, 1, 0.7, 0.1, 0.9, p)

    adjusted = {each.task: each.p_holm for each in primary.holm([ratio("a", 0.04), ratio("b", 0.01), ratio("c", 0.03)])}
    # Sorted .01 .03 .04: times 3, 2, 1 = .03 .06 .04, and never below the one before.
    assert adjusted == pytest.approx({"b": 0.03, "c": 0.06, "a": 0.06})


def test_sentence_and_table(comparison):
    ratios = primary.adjusted(primary.ratios(comparison, "SWD s=0.5", "a", sufficiency=0.9, share_of_drop=0.5))
    text, _ = primary.in_words(ratios)
    assert text.startswith("At sufficiency 0.9, edges over those of the best control of no worse CE")
    assert text.endswith("of 1; tasks with significantly fewer / more): SWD s=0.5 8 (0 / 1).")
    table = primary.table_of_ratios(ratios)
    assert table["best control"].tolist() == ["Neurons", "Neurons"]


def test_the_picture_shows_every_known_ratio(comparison):
    ratios = primary.ratios(comparison, "SWD s=0.5", "blocks.3.mlp_out", sufficiency=0.9, share_of_drop=0.5)
    unknown = [replace(each, surface="blocks.2.mlp_out", log_ratio=math.nan) for each in ratios]
    figure = primary.plot([*ratios, *unknown])
    left, right = figure.axes
    assert (left.get_title(), right.get_title()) == ("sufficiency 0.9", "drop of 0.5 of the margin")
    assert [label.get_text() for label in left.get_yticklabels()] == ["toy\nblocks.3.mlp_out", "toy\nblocks.2.mlp_out"]
    # 40 edges beside 5, in the row of its surface; nothing in that of the other.
    assert left.collections[0].get_offsets().tolist() == [[pytest.approx(8.0), 0.0]]
