"""disagreement: each prediction's KL against whole runs, quantiles by hand, the noise's moments, its null on a toy."""

import math

import pandas as pd
import pytest
import torch
from scipy.stats import kstest

import swd_lens as swd
from swd_lens.base.divergence import kl_per_prediction
from swd_lens.circuits.disagreement import _Moments, noise_units, quantiles
from swd_lens.circuits.fidelity import Runs, fidelity
from swd_lens.units import attach
from tests.circuits.worked import kept
from tests.contract import UNIT_SOURCES, swd_zero_data
from tests.forwards import block_runs
from tests.micro import random_tokens, toy_model

SITES = ["blocks.0.mlp_out", "blocks.1.mlp_out"]


@pytest.fixture(scope="module")
def made():
    model = toy_model()
    return model, swd_zero_data(model, SITES), random_tokens(6, 9)


def kl_of(model, factors, tokens):
    with torch.no_grad():
        dense = model(tokens)[:, :-1]
        with attach(model, factors):
            replaced = model(tokens)[:, :-1]
    return kl_per_prediction(dense.flatten(0, 1), replaced.flatten(0, 1)).view(len(tokens), -1)


def test_quantiles_are_of_the_predictions_own_kl(made):
    model, factors, tokens = made
    first = torch.zeros(6, 9, dtype=torch.bool)
    first[:, 0] = True
    found = swd.disagreement(model, factors, tokens, slices={"first": first, "others": lambda rows: ~first}, n=3, batch_size=4)
    each = kl_of(model, factors, tokens)
    for name, values in (("all", each.flatten()), ("first", each[:, 0]), ("others", each[:, 1:].flatten())):
        ordered = values.sort().values.tolist()
        of_slice = found.rows[found.rows["slice"] == name].set_index("of")
        assert of_slice["predictions"].eq(len(ordered)).all()
        for of, share in (("p50", 0.5), ("p99", 0.99), ("p99.9", 0.999), ("max", 1.0)):
            assert of_slice.loc[of, "KL"] == pytest.approx(ordered[math.ceil(share * len(ordered)) - 1], rel=1e-3, abs=1e-6)
    row, position = divmod(int(each.argmax()), 8)
    assert found.worst.iloc[0][["row", "position", "token"]].tolist() == [row, position, int(tokens[row, position])]
    beside = fidelity(model, factors, tokens, local=True)
    assert found.relmse == pytest.approx(dict(beside.local_relmse), rel=1e-4)
    assert float(each.mean()) == pytest.approx(beside.kl, rel=1e-3)


def test_quantiles_and_p_by_hand():
    kl = torch.tensor([[[4.0, 1, 2, 3]], [[1.0, 1, 9, 1]], [[0.0, 3, 0, 0]], [[2.0, 2, 2, 2]]], dtype=torch.float64)
    table = quantiles(kl, {"all": torch.ones(1, 4, dtype=torch.bool), "last": torch.tensor([[False, False, False, True]])})
    rows = table[table["slice"] == "all"].set_index("of")
    assert rows["KL"].tolist() == [2, 4, 4, 4] and rows["noise mean"].tolist() == pytest.approx([1, 14 / 3, 14 / 3, 14 / 3])
    assert rows["p"].tolist() == [0.5, 0.5, 0.5, 0.5]  # p50: 1, 0, 2 beside 2; max: 9, 3, 2 beside 4
    assert table[table["slice"] == "last"]["p"].tolist() == [0.25] * 4
    with pytest.raises(ValueError, match="the slice 'none' has no prediction that counts"):
        quantiles(kl, {"none": torch.zeros(1, 4, dtype=torch.bool)})


def test_noise_has_the_mean_and_covariance_of_the_errors():
    generator = torch.Generator().manual_seed(0)
    errors = torch.randn(500, 3, generator=generator) @ torch.randn(3, 5, generator=generator) + 2.0  # of rank 3
    moments = _Moments(5)
    for part in errors.split(120):
        moments.add(part[None])
    moments.finish()
    coder = noise_units(moments, 4, (0, 0)).coder
    y = torch.zeros(40, 500, 5)
    noise = coder.decode(y).flatten(0, 1).double()
    assert torch.allclose(noise.mean(0), errors.double().mean(0), atol=0.05)
    assert torch.allclose(noise.T.cov(), errors.double().T.cov(correction=0), atol=0.15)
    coder.draw = 1
    assert not torch.equal(coder.decode(y), coder.decode(y))


def test_what_is_left_out_does_not_count(made):
    model, factors, tokens = made
    found = swd.disagreement(model, factors, tokens, exclude=[int(tokens[0, 3])], n=2)
    counted = fidelity(model, factors, tokens, exclude=[int(tokens[0, 3])], local=True)
    assert found.rows["predictions"].iloc[0] == counted.n_predictions < 48
    assert found.relmse == pytest.approx(dict(counted.local_relmse), rel=1e-4)


@pytest.mark.parametrize("name", ["position", "surprise"])
def test_named_slices_part_the_predictions(made, tmp_path, name):
    model, factors, tokens = made
    found = swd.disagreement(model, factors, tokens, slices=name, n=2, seed=1)
    sizes = found.rows.drop_duplicates("slice").set_index("slice")["predictions"]
    assert sizes["all"] == sizes.drop("all").sum() == 48 and len(sizes) == {"position": 3, "surprise": 5}[name]
    assert kept(found, tmp_path).relmse == found.relmse
    pd.testing.assert_frame_equal(swd.disagreement(model, factors, tokens, slices=name, n=2, seed=1).rows, found.rows)


@pytest.mark.parametrize("source", ["svd", "transcoder"])
def test_exact_units_and_coders(made, source):
    model, _, tokens = made
    found = swd.disagreement(model, UNIT_SOURCES[source](model, "blocks.1.mlp_out"), tokens, n=2)
    if source == "svd":
        assert found.exact and "by rounding alone" in repr(found) and math.isnan(found.p()) and found.value("max") < 1e-6
    else:
        assert not found.exact and found.value("max") > 1e-3


def test_what_is_refused(made):
    model, factors, tokens = made
    for how, message in (
        ({"slices": "length"}, "slices must be one of 'position', 'surprise', got 'length'"),
        ({"slices": {"x": torch.ones(2, 2, dtype=torch.bool)}}, "the slice 'x' must be a bool mask of the rows"),
        ({"slices": {"all": torch.ones(6, 9, dtype=torch.bool)}}, "is called 'all' already"),
        ({"slices": {"none": torch.zeros(6, 9, dtype=torch.bool)}}, "the slice 'none' has no prediction"),
    ):
        with pytest.raises(ValueError, match=message):
            swd.disagreement(model, factors, tokens, **how)
    with pytest.raises(swd.errors.TokenError, match="at least two tokens"):
        swd.disagreement(model, factors, tokens[:, :1])


def test_the_dense_host_runs_once(made):
    model, _, tokens = made
    factors, counts = swd_zero_data(model, "blocks.1.mlp_out"), []
    for n in (1, 6):
        with block_runs(model, 0) as runs:
            swd.disagreement(model, factors, tokens, n=n)
        counts.append(runs.rows)
    assert counts[0] == counts[1]
    before = model(tokens)
    swd.disagreement(model, factors, tokens, n=1)
    assert torch.equal(model(tokens), before)


def p_of_noise(model, tokens, draws, n):
    """p-values of replacements whose error is noise: another covariance each time."""
    for draw in range(draws):
        moments = _Moments(16)
        generator = torch.Generator().manual_seed(draw)
        moments.add(0.3 * torch.randn(40, 6, generator=generator) @ torch.randn(6, 16, generator=generator))
        moments.finish()
        units = {"blocks.1.mlp_out": noise_units(moments, 32, (draw, 7))}
        found = swd.disagreement(model, units, tokens, n=n, seed=draw)
        yield [found.p("p50"), found.p("p99")]


@pytest.mark.slow
def test_p_is_uniform_for_a_replacement_whose_error_is_noise(monkeypatch):
    monkeypatch.setattr(Runs, "verify", lambda self, rows: None)  # noise differs from run to run
    p = torch.tensor(list(p_of_noise(toy_model(), random_tokens(60, 17), 200, 19)))
    for of in p.T:
        uniform = of - torch.rand(len(of), generator=torch.Generator().manual_seed(0)) / 20  # p has steps of 1 / 20
        assert kstest(uniform.numpy(), "uniform").pvalue > 0.01
    assert float((p <= 0.05).double().mean()) < 0.12
