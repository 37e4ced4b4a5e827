"""data_efficiency: independent fits and one run's checkpoints, measured by the same function; the first count that suffices."""

from functools import partial

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.study.data_efficiency import DataEfficiency, Point, data_efficiency
from tests.micro import random_tokens, toy_model

SITE = "blocks.1.mlp_out"
TEXT, HELD = random_tokens(24, 10), random_tokens(8, 10, seed=1)
SWD = {"sparsity": 0.5, "preset": "quick", "outer_iterations": 3}
TRAIN = {"n_tokens": 200, "tokens_per_step": 50, "progress": False}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def found(model):
    units = baselines.transcoder(model, SITE, TEXT, **TRAIN)
    late = partial(baselines.vpd_recon, model, SITE, TEXT, keep=(), **TRAIN)
    methods = {"SWD": SWD, "TC": units, "VPD": late}
    made = data_efficiency(model, SITE, methods, heldout=HELD, tokens=TEXT, token_counts=(15, 100, 5000))
    return made, units


def test_points_are_what_the_parts_give_alone(model, found):
    made, units = found
    table = made.table()
    assert table[["method", "tokens", "kind"]].values.tolist() == [
        ["SWD", 20, "independent fit"],  # whole rows of ten
        ["SWD", 100, "independent fit"],
        ["SWD", 240, "independent fit"],  # all there is
        *[["TC", tokens, "checkpoint"] for tokens in (50, 100, 200)],
        ["VPD", 200, "checkpoint"],
    ]
    alone = swd.factorize(model, SITE, tokens=TEXT[:10], progress=False, **SWD)
    assert made.points[1].fidelity == swd.fidelity(model, alone, HELD) and made.points[1].edges == alone.edges
    assert made.points[4].fidelity == swd.fidelity(model, units.at(100), HELD)
    assert made.points[4].relmse == made.points[4].fidelity.relmse[SITE]
    assert made.settings["methods"]["TC"]["settings"]["tokens_per_step"] == 50
    assert len(made.as_dict()["points"]) == 7 and "TC" in made._repr_html_()


def test_a_whole_mlp_is_judged_by_what_it_writes(model):
    whole = "blocks.0.mlp"
    units = [f(model, whole, TEXT, keep=(), **TRAIN) for f in (baselines.transcoder, baselines.vpd_recon)]
    methods = {"SWD": SWD, "TC": units[0], "VPD": units[1]}
    made = data_efficiency(model, whole, methods, heldout=HELD, tokens=TEXT, token_counts=(240,))
    with torch.no_grad():
        _, dense = model.run_with_cache(HELD)
        wanted = dense["blocks.0.hook_mlp_out"]
        for point, one in zip(made.points[1:], units, strict=True):
            with swd.attach(model, one):
                _, cache = model.run_with_cache(HELD)
            error = (cache["blocks.0.hook_mlp_out"] - wanted).square().sum() / wanted.square().sum()
            assert point.relmse == pytest.approx(float(error), rel=1e-5)
    assert set(made.points[0].fidelity.relmse) == {"blocks.0.mlp_in", "blocks.0.mlp_out"}


def test_tokens_to_reach():
    def points(method, *deltas):
        measured = [swd.Fidelity(0.0, d, d, 1.0, {SITE: d}, 1) for d in deltas]
        return [Point(method, 10 ** (i + 1), "checkpoint", 5, f, f.relmse[SITE]) for i, f in enumerate(measured)]

    made = DataEfficiency([*points("a", 0.5, 0.1, 0.01), *points("b", 0.05, 0.5, 0.2), *points("c", 0.0, 0.3, 0.1)], {})
    assert made.tokens_to_reach(0.1) == {"a": 100, "b": None, "c": 1000}  # c was there by chance, and left again
    assert made.tokens_to_reach(0.01, "relMSE") == {"a": 1000, "b": None, "c": None}
    with pytest.raises(ValueError, match="metric='loss': choose one of 'CE delta', 'KL', 'relMSE'"):
        made.tokens_to_reach(0.1, "loss")


def test_the_figure(found):
    figure = found[0].plot()
    assert [ax.get_xscale() for ax in figure.axes] == ["log"] * 3
    assert [ax.get_yscale() for ax in figure.axes] == ["symlog", "log", "log"]
    assert [line.get_marker() for line in figure.axes[1].lines] == ["o", "s", "s"]
    assert len(found[0].plot("KL").axes) == 1


@pytest.mark.parametrize(
    ("methods", "more", "error", "says"),
    [
        ({}, {}, ValueError, "nothing to measure"),
        ({"x": 3}, {}, TypeError, "'x' is a int; give LearnedUnits"),
        ({"SWD": SWD}, {"tokens": None}, swd.TokenError, "'SWD' is fitted by SWD, which needs tokens="),
        ({"SWD": SWD}, {"token_counts": ()}, ValueError, r"token_counts=\[\]"),
        ({"x": lambda: 3}, {}, TypeError, "the function of 'x' gave a int"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, methods, more, error, says):
    with pytest.raises(error, match=says):
        data_efficiency(model, SITE, methods, **{"heldout": HELD, "tokens": TEXT, **more})


def test_units_of_another_site_are_refused(model, found):
    with pytest.raises(ValueError, match=r"'TC' replaces blocks\.1\.mlp_out, not blocks\.0\.mlp_out"):
        data_efficiency(model, "blocks.0.mlp_out", {"TC": found[1]}, heldout=HELD)
    with pytest.raises(ValueError, match="'mlp_out' names 2 sites"):
        data_efficiency(model, "mlp_out", {"TC": found[1]}, heldout=HELD)
