"""multiverse: costs and shares by hand, against curves of a toy, and its null simulated."""

import math
from dataclasses import replace

import pandas as pd
import pytest
import torch
from scipy.stats import kstest

import swd_lens as swd
from swd_lens.circuits import protocol
from swd_lens.circuits.measure import Margins, Threshold
from swd_lens.circuits.multiverse import EVERY, Multiverse, Side, costs, relabelled, shares_of
from swd_lens.tasks.task import Task
from tests.benchmarks.calibration import crossing
from tests.circuits.slow import able_split, carried_by
from tests.circuits.worked import kept
from tests.contract import swd_zero_data
from tests.micro import toy_model

KEY = ("task", "first_order", "scoring", "mean")


def side(edges, contrast, carried=1.0, dense=2.0):
    """A method whose prompts all carry as much."""
    contrast = torch.tensor(contrast, dtype=torch.float64)
    n = contrast.shape[1]
    of = torch.full((n,), carried, dtype=torch.float64)
    ones = torch.ones(n, dtype=torch.float64)
    return Side(torch.tensor(edges, dtype=torch.float64), contrast, of, of.square(), dense * ones, ones)


def test_a_cost_is_where_the_curve_crosses():
    own = side([0, 3, 15], [[-1.0, -3.0], [-1.0, 0.0], [2.0, 1.0]])  # means -2, -.5, 1.5: a quarter of the way from 3 to 15
    sums = (own.contrast.sum(1)[None], own.carried.sum()[None], own.squared.sum()[None], own.dense.sum()[None])
    assert float(costs(own.edges, *sums, 2)[0]) == pytest.approx(math.log(4) + 0.25 * (math.log(16) - math.log(4)))
    reached_at_once = costs(own.edges, sums[0] + 5, *sums[1:], 2)
    assert float(reached_at_once[0]) == 0.0
    for carried, squared in ((0.1, 0.005), (0.5, 40.0)):  # under a twentieth of 2 logits each; within two standard errors
        assert math.isnan(float(costs(own.edges, sums[0], torch.tensor([carried]), torch.tensor([squared]), sums[3], 2)[0]))


def test_shares_and_labels_by_hand_also_of_several_controls():
    """Two prompts, methods that reach the threshold at 1 and 7 edges on both: relabelling one prompt alone is a draw."""
    cheap, dear = side([0, 1, 7], [[-1.0, -1], [0, 0], [1, 1]]), side([0, 1, 7], [[-1.0, -1], [-1, -1], [0, 0]])
    fewer, counted = relabelled({KEY: (cheap, dear)}, 40, 0)
    assert fewer[0].item() == 1.0 and bool(counted.all())
    assert set(fewer[1:, 0].tolist()) == {0.0, 0.5, 1.0}
    table = shares_of({KEY: {"one": cheap, "other": dear}}, "one", 999, 0)
    assert table["share"].tolist() == [1.0] and table["p"][0] == pytest.approx(0.25, abs=0.05)  # the labels as they are: 1 of 4
    none = shares_of({KEY: {"one": cheap, "other": side([0, 1], [[-1.0, -1], [1, 1]], carried=0.01)}}, "one", 9, 0)
    assert none["specifications"].tolist() == [0] and none[["share", "p"]].isna().all(axis=None)
    sides = {"one": side([0, 7], [[-1.0] * 6, [0.0] * 6])}
    sides["a"], sides["b"] = side([0, 30], [[-1.0] * 6, [0.0] * 6]), side([0, 3], [[-1.0] * 6, [0.0] * 6])
    table = shares_of({KEY: sides}, "one", 999, 0).set_index("control")
    assert table["share"].tolist() == [1.0, 0.0, 0.0] and list(table.index) == ["a", "b", EVERY]
    assert table.loc["a", "p"] < 0.05 and table.loc["b", "p"] == 1.0 and table.loc[EVERY, "p"] == 1.0
    assert table.loc["a", "p Holm"] == pytest.approx(2 * table.loc["a", "p"])


def drawn(generator, n_specifications, n_contents):
    """Two methods with exchangeable prompts: every prompt has its own two curves, alike in all specifications."""
    specifications, edges = {}, torch.tensor([0.0, 3, 10, 40, 200, 1000], dtype=torch.float64)
    of_prompt = [0.3 * torch.randn(n_contents, generator=generator, dtype=torch.float64).exp() for _ in range(2)]
    for i in range(n_specifications):
        sides = []
        for k in range(2):
            rise = (edges.log1p()[:, None] / 7) ** (0.5 + of_prompt[k] + 0.1 * i)
            whole = 2 + torch.rand(n_contents, generator=generator, dtype=torch.float64)
            keep = whole * rise + 0.2 * torch.randn(6, n_contents, generator=generator, dtype=torch.float64)
            keep[-1], empty = whole, keep[0]
            margins = Margins(keep, keep, whole, empty, whole)
            contrast, carried = Threshold("recovered", 0.9).contrast(margins), whole - empty
            sides.append(Side(edges, contrast, carried, carried.square(), whole, torch.ones(n_contents, dtype=torch.float64)))
        specifications["task", str(i), "scoring", "mean"] = {"one": sides[0], "other": sides[1]}
    return specifications


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("n_specifications", [1, 8])
def test_p_is_uniform_for_exchangeable_methods(n_specifications):
    generator, p = torch.Generator().manual_seed(0), []
    for draw in range(200):
        specifications = drawn(generator, n_specifications, 24)
        pairs = {key: tuple(sides.values()) for key, sides in specifications.items()}
        fewer, counted = relabelled(pairs, 99, draw)
        shares = fewer.nansum(1) / counted.sum(1)
        own, others = shares[0], shares[1:]
        more, tied = int((others > own + 1e-9).sum()), int(((others - own).abs() <= 1e-9).sum())
        p.append((more + float(torch.rand(1, generator=generator)) * (1 + tied)) / 100)
        assert shares_of(specifications, "one", 99, draw)["p"][0] == (1 + more + tied) / 100
    assert kstest(p, "uniform").pvalue > 0.01
    assert sum(each <= 0.05 for each in p) <= 22


@pytest.fixture(scope="module")
def toy():
    model = toy_model()
    exact, splits = swd.baselines.neurons(model, "blocks.*.mlp_out"), [able_split(12, seed=seed, length=6) for seed in (1, 2, 3)]
    scores = swd.attribute(model, exact, splits[0])
    names = ("train", "validation", "test")
    splits = [replace(carried_by(model, exact, scores, of), name=name) for of, name in zip(splits, names, strict=True)]
    task, made = Task("toy", *splits, "random", False), []

    def neurons():
        made.append(1)
        return swd.baselines.neurons(model, "blocks.*.mlp_out")

    methods = {"SWD": swd_zero_data(model, "blocks.*.mlp_out"), "neurons": neurons}
    methods["random"] = [swd.baselines.random_b(model, "blocks.*.mlp_out", seed=seed) for seed in (0, 1)]
    found = swd.multiverse(methods, model, task, scores=["first_order", "attribution_patching"], positions="scoring", n=99)
    assert len(made) == 1
    return model, methods, task, found


def test_edges_are_those_at_which_the_curves_cross(toy):
    model, methods, task, found = toy
    assert found.method == "SWD" and found.controls == ["neurons", "random"] and len(found.rows) == 4 * 3
    assert found.settings["roles"] == {"SWD": "swd", "neurons": "control", "random": "control"}
    some = found.rows[found.rows["method"] != "random"].dropna()
    assert len(some) >= 4
    for row in some.to_dict("records"):
        factors = methods["SWD"] if row["method"] == "SWD" else swd.baselines.neurons(model, "blocks.*.mlp_out")
        scores = swd.attribute(model, factors, task, score=row["score"], positions=row["positions"])
        curve = swd.evaluate(model, factors, task, scores, ablation=row["ablation"], random_sets=0)
        m = {name: values.double() for name, values in curve.margins.items()}
        margins = Margins(m["keep"], m["ablate"], m["full"], m["keep"][0], m["dense"])
        edges = torch.tensor(curve.rows["edges"].tolist(), dtype=torch.float64)
        expected = crossing(Threshold("recovered", 0.9).contrast(margins), edges)
        assert row["edges"] == pytest.approx(expected or 0.0, rel=1e-4, abs=1e-3) and curve.carries


def test_an_interrupted_call_goes_on_where_it_was(toy, tmp_path, monkeypatch):
    """Stopped at its third curve, and called again with a further score: finished curves are taken over, to the bit."""
    model, methods, task, whole = toy
    how: dict = {"positions": "scoring", "n": 99, "out": tmp_path}
    evaluate, made = protocol.evaluate, []

    def stopped(*given, **options):
        made.append(options["ablation"])
        if len(made) == 3:
            raise KeyboardInterrupt
        return evaluate(*given, **options)

    monkeypatch.setattr(protocol, "evaluate", stopped)
    with pytest.raises(KeyboardInterrupt, match=r"multiverse was interrupted, 0 of 1 scores finished; .* goes on from there"):
        swd.multiverse(methods, model, task, scores="first_order", **how)
    assert not any(hook.fwd_hooks for hook in model.hook_dict.values())
    swd.multiverse(methods, model, task, scores="first_order", **how)
    assert len(made) == 3 + 6  # four replacements under two ablations, of which two curves were finished
    found = swd.multiverse(methods, model, task, scores=["first_order", "attribution_patching"], **how)
    assert len(made) == 3 + 6 + 8
    for each in (found, Multiverse.load(tmp_path / "multiverse.json")):
        pd.testing.assert_frame_equal(each.rows, whole.rows)
        pd.testing.assert_frame_equal(each.tests, whole.tests)
    with pytest.raises(swd.errors.ResumeError, match="evaluation"):
        swd.multiverse(methods, model, task, scores="first_order", **how, evaluation={"batch_size": 3})


def test_table_figure_and_file(toy, tmp_path):
    *_, found = toy
    table = found.table().set_index("control")
    wide = found.specifications()
    assert list(table.index) == ["neurons", "random", EVERY] and len(wide) == 4
    both = wide.dropna(subset=["SWD", "neurons"])
    assert table.loc["neurons", "specifications"] == len(both)
    assert table.loc["neurons", "fewer"] == (both["SWD"] < both["neurons"]).sum()
    assert len(found.plot().axes[0].lines) == 3 and "SWD needs fewer edges than" in repr(found)
    pd.testing.assert_frame_equal(kept(found, tmp_path).specifications(), wide)


def test_what_is_refused(toy):
    model, methods, task, _ = toy
    both = {name: methods[name] for name in ("SWD", "random")}
    for given, how, message in (
        ({"SWD": methods["SWD"]}, {}, "nothing to compare SWD with"),
        (both, {"of": "mine"}, "of must be one of 'SWD', 'random', got 'mine'"),
        (both, {"scores": "best"}, "scores must be one of"),
        (both, {"recovered": 1.5}, "recovered must be in"),
        (both, {"ablations": []}, "ablations= names nothing"),
    ):
        with pytest.raises(ValueError, match=message):
            swd.multiverse(given, model, task, **how)
