"""data_efficiency: independent fits, one run's checkpoints and single points, measured by the same function, and once.

Then what is made of them: the first count that suffices, the figure, the file.
"""

import sys
from functools import partial
from importlib.util import find_spec

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import ResumeError
from swd_lens.study.data_efficiency import DataEfficiency, data_efficiency
from tests.contract import saelens_transcoder
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model
from tests.refusals import refuses

pytestmark = pytest.mark.filterwarnings("ignore:.* calibration tokens for")  # few, to be quick

SITE = "blocks.1.mlp_out"
TEXT, HELD = random_tokens(24, 10), random_tokens(8, 10, seed=1)
SWD = {"sparsity": 0.5, "preset": "quick", "outer_iterations": 3, "basis": "paper"}
TRAIN = {"n_tokens": 200, "tokens_per_step": 50, "progress": False}


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def found(model):
    units = baselines.transcoder(model, SITE, TEXT, **TRAIN)
    late = partial(baselines.vpd_recon, model, SITE, TEXT, keep=(), **TRAIN)
    methods = {"SWD": SWD, "TC": units, "VPD": late}
    made = data_efficiency(model, SITE, methods, heldout=HELD, tokens=TEXT, token_counts=(15, 100, 19, 5000))
    return made, units


def test_points_are_what_the_parts_give_alone(model, found):
    made, units = found
    table = made.table()
    assert table[["method", "tokens", "kind"]].values.tolist() == [
        ["SWD", 20, "independent fit"],  # whole rows of ten, fitted once for 15 and 19
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


def test_of_a_run_those_checkpoints_that_are_asked_for_and_its_last(model, found):
    made, units = found
    few = data_efficiency(model, SITE, {"TC": units}, heldout=HELD, checkpoints=[100, 150])  # 150 was not kept
    assert few.points == [point for point in made.points if point.method == "TC" and point.tokens in (100, 200)]
    assert data_efficiency(model, SITE, {"TC": units}, heldout=HELD, checkpoints=[]).points == few.points[-1:]


def test_nothing_is_run_twice(model, found):
    """Rows that enter the block before the replaced one."""
    counts = {"heldout": HELD, "tokens": TEXT, "token_counts": (100, 240)}
    rows = []
    for methods in ({"a": SWD}, {"a": SWD, "b": {**SWD, "sparsity": 0.6}}, {"TC": found[1]}):
        with block_runs(model, 0) as runs:
            data_efficiency(model, SITE, methods, **counts)
        rows.append(runs.rows)
    # A fit: its calibration and a probe. Two are measured together: the dense host once, with two rows that check it and one for
    # each of them, which are attached twice, with a probe each time.
    measured = len(HELD) + 2 + 2 + 4
    assert rows[0] == 10 + 24 + 2 + measured and rows[1] - rows[0] == 2 + measured
    assert rows[2] == len(HELD) + 2 + 3  # three checkpoints at once: each is checked by one row, the dense host by two


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


def test_the_figure(found):
    figure = found[0].plot()
    assert [ax.get_xscale() for ax in figure.axes] == ["log"] * 3
    assert [ax.get_yscale() for ax in figure.axes] == ["symlog", "log", "log"]
    assert [line.get_marker() for line in figure.axes[1].lines] == ["o", "s", "s"]
    assert len(found[0].plot("KL").axes) == 1
    refuses(ValueError, "no metric to plot: choose among 'CE delta'", found[0].plot, [])


def test_a_folder_and_units_with_their_tokens(model, found, tmp_path):
    made, units = found
    units.save(tmp_path)
    factors = swd.factorize(model, SITE, tokens=TEXT[:10], progress=False, **SWD)
    # Another name of the same site is understood, and so is a function that gives units with their tokens.
    methods = {
        "folder": str(tmp_path),
        "set": (factors, 100),
        "mapping": ({"blocks.1.mlp.W_out": factors[SITE]}, 100),
        "function": lambda: (factors[SITE], 7),
    }
    again = data_efficiency(model, SITE, methods, heldout=HELD)
    by_hand = [p for p in made.points if p.method == "TC"]
    assert [(p.tokens, p.fidelity) for p in again.points[:3]] == [(p.tokens, p.fidelity) for p in by_hand]
    alone = swd.fidelity(model, factors, HELD)
    for point, tokens in zip(again.points[3:], (100, 100, 7), strict=True):
        assert (point.kind, point.tokens, point.edges) == ("single point", tokens, factors.edges)
        assert point.fidelity == alone
    assert [line.get_marker() for line in again.plot("KL").axes[0].lines].count("D") == 3


@pytest.mark.skipif(find_spec("sae_lens") is None, reason="needs sae_lens, which is not installed here")
def test_a_published_dictionary_as_a_single_point(model):
    for site in (SITE, "blocks.1.mlp"):
        (units,) = saelens_transcoder(model, site).values()
        made = data_efficiency(model, site, {"published": (units.coder, 60_000_000)}, heldout=HELD)
        (point,) = made.points
        assert (point.kind, point.tokens, point.edges) == ("single point", 60_000_000, units.edges)
        assert point.fidelity == swd.fidelity(model, units, HELD) and point.relmse == point.fidelity.relmse[site]


def test_the_file_keeps_what_was_measured(model, found, tmp_path, monkeypatch):
    path, units = tmp_path / "efficiency.json", found[1]
    asked = {"heldout": HELD, "tokens": TEXT, "token_counts": (20, 100), "out": path}

    def broken():
        raise RuntimeError("out of memory")

    refuses(RuntimeError, "out of memory", data_efficiency, model, SITE, {"SWD": SWD, "TC": broken, "late": units}, **asked)
    assert DataEfficiency.load(path).methods == ["SWD"] and len(DataEfficiency.load(path).points) == 2

    measured = []
    module = sys.modules[data_efficiency.__module__]  # which the package's function of the same name hides
    fidelities = module.fidelities
    monkeypatch.setattr(module, "fidelities", lambda *given: measured.extend(given[1]) or fidelities(*given))
    methods = {"SWD": SWD, "TC": lambda: units}
    made = data_efficiency(model, SITE, methods, **asked)
    assert len(measured) == 3  # the transcoder's
    assert made.points == found[0].points[:2] + found[0].points[3:6]
    assert DataEfficiency.load(path) == made
    data_efficiency(model, SITE, methods, **asked)
    assert len(measured) == 3
    # Fewer counts: the file keeps the others.
    fewer = data_efficiency(model, SITE, {"SWD": SWD}, **{**asked, "token_counts": (100,)})
    assert len(fewer.points) == 1 and len(measured) == 3 and DataEfficiency.load(path).points == made.points

    with pytest.raises(ResumeError, match=r"holds 'SWD' at 20 tokens, made otherwise: sparsity 0\.5 then, 0\.6 now"):
        data_efficiency(model, SITE, {"SWD": {**SWD, "sparsity": 0.6}}, **asked)
    with pytest.raises(ResumeError, match=r"holds another measurement: .*the held-out tokens "):
        data_efficiency(model, SITE, {"SWD": SWD}, **{**asked, "heldout": TEXT})
    assert DataEfficiency.load(path) == made
    renewed = data_efficiency(model, SITE, {"SWD": {**SWD, "sparsity": 0.6}}, **asked, overwrite=True)
    assert DataEfficiency.load(path) == renewed


def test_fits_that_were_not_measured_yet_are_not_made_again(model, tmp_path, monkeypatch):
    asked = {"heldout": HELD, "tokens": TEXT, "token_counts": (100, 240), "out": tmp_path / "efficiency.json"}
    whole = data_efficiency(model, SITE, {"SWD": SWD}, **{**asked, "out": tmp_path / "whole.json"})

    def stop(*args, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(sys.modules["swd_lens.study.data_efficiency"], "fidelities", stop)
        data_efficiency(model, SITE, {"SWD": SWD}, **asked)
    assert len(list((tmp_path / "efficiency.fits").iterdir())) == 2
    with block_runs(model, 0) as runs:
        again = data_efficiency(model, SITE, {"SWD": SWD}, **asked)
    assert again == whole
    assert runs.rows == len(HELD) + 2 + 2 + 4  # measured, but not calibrated
    assert sorted(path.name for path in tmp_path.iterdir() if path.suffix != ".lock") == ["efficiency.json", "whole.json"]


@pytest.mark.parametrize(
    ("methods", "more", "error", "says"),
    [
        ({}, {}, ValueError, "nothing to measure"),
        ({"x": 3}, {}, TypeError, "'x' is a int; give LearnedUnits"),
        ({"SWD": SWD}, {"tokens": None}, swd.TokenError, "'SWD' is fitted by SWD, which needs tokens="),
        ({"SWD": SWD}, {"token_counts": ()}, ValueError, r"token_counts=\[\]"),
        ({"SWD": SWD}, {"token_counts": (10, True)}, ValueError, r"token_counts=\[10, True\]: give one or more whole"),
        ({"SWD": {**SWD, "tokens": None}}, {}, ValueError, "'SWD' sets 'tokens': its fits take tokens= and token_counts="),
        ({"SWD": SWD}, {"heldout": HELD[:, :1]}, swd.TokenError, "heldout needs rows of at least two tokens"),
        ({"SWD": SWD}, {"out": "."}, IsADirectoryError, r"\. is a folder; give the name of a file in it"),
        ({"SWD": SWD}, {"out": "a.fits"}, ValueError, "ends in; name a file that ends otherwise"),
        ({"x": lambda: 3}, {}, TypeError, "the function of 'x' gave a int"),
        ({"x": swd.FactorSet({})}, {}, TypeError, "'x' is a FactorSet, which does not say how many tokens"),
    ],
)
def test_what_cannot_be_measured_is_refused(model, methods, more, error, says):
    refuses(error, says, data_efficiency, model, SITE, methods, **{"heldout": HELD, "tokens": TEXT, **more})


def test_what_cannot_be_measured_is_refused_before_anything_is_trained(model, found):
    def trained():
        raise AssertionError("was called")

    factors = found[1]
    for wrong, error, says in (
        ({"sparsity": 2.0}, ValueError, "sparsity"),
        ((factors, 0), ValueError, "'wrong' says tokens=0: give the number of tokens"),
        (factors[SITE], TypeError, "'wrong' is a CoderUnits, which does not say how many tokens it took"),
        (dict(factors), TypeError, "'wrong' is a dict, which does not say"),
        ("nowhere/at/all", baselines.TrainError, "holds no units.json"),
    ):
        refuses(error, says, data_efficiency, model, SITE, {"first": trained, "wrong": wrong}, heldout=HELD, tokens=TEXT)
    with swd.attach(model, factors), pytest.raises(swd.AttachError, match="attached already"):
        data_efficiency(model, SITE, {"first": trained}, heldout=HELD)


def test_units_of_another_site_are_refused(model, found):
    with pytest.raises(ValueError, match=r"'TC' replaces blocks\.1\.mlp_out, not blocks\.0\.mlp_out"):
        data_efficiency(model, "blocks.0.mlp_out", {"TC": found[1]}, heldout=HELD)
    with pytest.raises(ValueError, match=r"'TC' replaces blocks\.1\.mlp_out, not blocks\.1\.mlp"):
        data_efficiency(model, "blocks.1.mlp", {"TC": (dict(found[1]), 200)}, heldout=HELD)
    refuses(ValueError, "'mlp_out' names 2 sites", data_efficiency, model, "mlp_out", {"TC": found[1]}, heldout=HELD)
