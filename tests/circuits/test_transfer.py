"""dense_transfer: by hand, against plain hooks in the dense host, exact for exact factors, its null simulated."""

import math

import pandas as pd
import pytest
import torch
from scipy.stats import kstest

import swd_lens as swd
from swd_lens.circuits import Circuit, attribute, evaluate_circuits
from swd_lens.circuits.measure import VALUES
from swd_lens.circuits.transfer import dense_transfer, gaps
from swd_lens.units.factors import Factors
from tests.circuits.slow import able_split, carried_by, margin_of
from tests.circuits.worked import kept
from tests.contract import EXACT, UNIT_SOURCES, swd_zero_data
from tests.micro import W, micro_model, split_of, toy_model

SITE = "blocks.0.mlp_out"
# The host writes z0 + z1 into the margin. These factors write z0 + .5 z1, so the error term is .5 z1.
# z of the test prompt is (4, 6), means are (2, 3). Circuit {0}:
#   replacement: full 4 + 3 = 7, empty 2 + 1.5 = 3.5, keep 4 + 1.5 = 5.5, ablate 2 + 3 = 5
#   error kept:  full 10, empty 10 - 2 - 1.5 = 6.5, keep 10 - 1.5 = 8.5, ablate 10 - 2 = 8
INEXACT = torch.tensor([[1.0, 2.0], [3.0, 3.5]])
TRAIN = split_of([[0], [1]], [[1], [1]], [[0], [0]], d_vocab=3)
TEST = split_of([[2]], [[1]], [[0]], d_vocab=3, name="test")


@pytest.fixture
def micro():
    model, factors = micro_model(), {SITE: Factors(torch.eye(2), INEXACT.clone(), weight=W.clone())}
    return model, factors, attribute(model, factors, TRAIN)


def test_both_ways_by_hand(micro, tmp_path):
    model, factors, scores = micro
    found = swd.dense_transfer(model, factors, TEST, Circuit.of(factors, scores, [f"{SITE}/0"]), n=9)
    row = found.prompts.iloc[0]
    ways = [[row[f"{name} ({way})"] for name in ("full", "empty", "keep", "ablate")] for way in ("replacement", "error kept")]
    assert ways == [pytest.approx([7, 3.5, 5.5, 5]), pytest.approx([10, 6.5, 8.5, 8])]
    table = found.table().set_index("measure")
    assert table["replacement"].tolist() == pytest.approx([2 / 3.5, 5.5 / 7, 2])
    assert table["error kept"].tolist() == pytest.approx([2 / 3.5, 0.85, 2])
    assert table["gap"].tolist() == pytest.approx([0, 0.85 - 5.5 / 7, 0]) and found.gap == pytest.approx(0)
    assert table["p"].tolist() == [1.0, 1.0, 1.0]  # one prompt: a flip changes the sign alone
    assert "recover 57% of by hand in the replacement and 57% in the dense model" in repr(found)
    assert kept(found, tmp_path).settings == found.settings


def test_a_task_that_is_not_carried_has_a_sentence(micro):
    model, factors, scores = micro
    wrong = split_of([[2]], [[0]], [[1]], d_vocab=3, name="test")
    found = swd.dense_transfer(model, factors, wrong, Circuit.of(factors, scores, [f"{SITE}/0"]), n=9)
    assert "does not carry by hand" in repr(found) and math.isnan(found.gap) and math.isnan(found.p)
    assert found.table().set_index("measure").loc["drop", "replacement"] == pytest.approx(-2)
    with pytest.raises(ValueError, match="n, the number of flips, must be a whole number of at least 1, got 0"):
        swd.dense_transfer(model, factors, TEST, Circuit.of(factors, scores, [f"{SITE}/0"]), n=0)


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize(("source", "positions"), [(source, ("scoring", "all")[i % 2]) for i, source in enumerate(EXACT)])
def test_with_exact_factors_it_is_recovered_itself(source, positions):
    model, split = toy_model(), able_split(9)
    factors = UNIT_SOURCES[source](model, "blocks.*.mlp_out")
    scores = attribute(model, factors, split, positions=positions)
    split = carried_by(model, factors, scores, split)
    circuit = Circuit.of(factors, scores, scores.ranking()[:9])
    found = dense_transfer(model, factors, split, circuit, n=19)
    own = evaluate_circuits(model, factors, split, circuit).iloc[0]
    table = found.table().set_index("measure")
    for measure in ("recovered", "sufficiency", "drop"):
        assert table.loc[measure, "replacement"] == pytest.approx(own[measure], abs=1e-5)
        assert table.loc[measure, "error kept"] == pytest.approx(own[measure], abs=1e-3)
    dense = torch.stack([margin_of(model(tokens[None])[0, -1], split, i) for i, tokens in enumerate(split.tokens)])
    assert torch.allclose(torch.tensor(found.prompts["full (error kept)"]).float(), dense, atol=1e-4)


@pytest.mark.parametrize(
    ("positions", "sites"), [("all", ("blocks.1.mlp_out",)), ("scoring", ("blocks.0.mlp_out", "blocks.1.mlp_out"))]
)
def test_it_is_the_dense_host_less_what_is_ablated(positions, sites):
    """Plain hooks: of each outside unit (z - mean) B comes off the dense output, z read from the input of that very run."""
    model, split = toy_model(), able_split(7)
    factors = swd_zero_data(model, list(sites))
    scores = attribute(model, factors, split, positions=positions)
    split = carried_by(model, factors, scores, split)
    circuit = Circuit.of(factors, scores, scores.ranking()[:6])
    found = dense_transfer(model, factors, split, circuit, n=9)
    for mode, name in (("keep", "keep (error kept)"), ("ablate", "ablate (error kept)")):
        masks = circuit.masks(mode)

        def hooks(site, masks=masks):
            f, layer, seen = factors[site], int(site.split(".")[1]), {}

            def read(h, hook):
                seen["z"] = h @ f.read

            def write(y, hook):
                moved = (seen["z"] - scores.means[site]) * masks[site]
                if positions == "scoring":
                    moved[:, :-1] = 0
                return y - moved @ f.write

            return [(f"blocks.{layer}.mlp.hook_post", read), (f"blocks.{layer}.hook_mlp_out", write)]

        of_all = [hook for site in sites for hook in hooks(site)]
        with torch.no_grad():
            logits = [model.run_with_hooks(tokens[None], fwd_hooks=of_all)[0, -1] for tokens in split.tokens]
        margins = torch.stack([margin_of(of, split, i) for i, of in enumerate(logits)])
        assert torch.allclose(torch.tensor(found.prompts[name]).float(), margins, atol=1e-4)
    replacement = evaluate_circuits(model, factors, split, circuit).iloc[0]
    assert found.table()["replacement"].tolist() == pytest.approx([replacement[of] for of in VALUES], abs=1e-5)
    assert abs(found.table()["gap"]).max() > 1e-3


def test_a_coders_error_term_stays():
    model, split = toy_model(), able_split(7)
    units = UNIT_SOURCES["transcoder"](model, "blocks.1.mlp_out")
    scores = attribute(model, units, split)
    circuit = swd.evaluate(model, units, split, scores, random_sets=0).circuit(4)
    found = dense_transfer(model, units, split, circuit, n=9)
    dense = torch.stack([margin_of(model(tokens[None])[0, -1], split, i) for i, tokens in enumerate(split.tokens)])
    assert torch.allclose(torch.tensor(found.prompts["full (error kept)"]).float(), dense, atol=1e-4)
    assert found.prompts["keep (error kept)"].sub(found.prompts["full (error kept)"]).abs().max() > 1e-3


def test_the_host_is_left_as_it_was():
    model, split = toy_model(), able_split(5)
    before = model(split.tokens[0][None])
    factors = swd_zero_data(model, "blocks.1.mlp_out")
    scores = attribute(model, factors, split)
    with swd.attach(model, factors) as attachment:
        inside = model(split.tokens[0][None])
        with attachment.keeping_errors():
            assert torch.equal(model(split.tokens[0][None]), before)
        assert torch.equal(model(split.tokens[0][None]), inside) and not torch.equal(inside, before)
    dense_transfer(model, factors, split, Circuit.of(factors, scores, scores.ranking()[:3]), n=3)
    assert torch.equal(model(split.tokens[0][None]), before)


def drawn(generator: torch.Generator, contents: int, per_content: int) -> pd.DataFrame:
    """Margins that are as likely one way as the other: alike within a content, skewed, and unlike in size between prompts."""
    n = contents * per_content
    base = 3 + torch.randn(n, generator=generator).exp()
    of_content = [f"{i // per_content}" for i in range(n)]
    columns: dict[str, object] = {"content": of_content}
    share = {"keep": 0.8, "ablate": 0.3, "empty": 0.1, "full": 1.0}
    for way in ("replacement", "error kept"):
        shift = torch.randn(contents, generator=generator).exp().repeat_interleave(per_content)
        for name, part in share.items():
            noise = 0.3 * torch.randn(n, generator=generator)
            columns[f"{name} ({way})"] = (part * base + (name == "keep") * 0.5 * shift + noise).double().tolist()
    return pd.DataFrame(columns)


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize(("contents", "per_content"), [(40, 1), (12, 4)])
def test_p_is_uniform_where_the_ways_are_exchangeable(contents, per_content):
    generator = torch.Generator().manual_seed(0)
    p = torch.tensor([gaps(drawn(generator, contents, per_content), 99, seed)["p"].tolist() for seed in range(200)])
    for of_measure in p.T:
        assert kstest(of_measure.numpy(), "uniform").pvalue > 0.01
        assert int((of_measure <= 0.05).sum()) <= 20  # 10 give or take 3.1, thrice


def test_a_gap_that_is_there_is_found():
    prompts = drawn(torch.Generator().manual_seed(0), 40, 1)
    prompts["keep (error kept)"] += 1.0
    table = gaps(prompts, 99, 0).set_index("measure")
    assert table.loc["recovered", "p"] == 0.01 and table.loc["drop", "p"] > 0.01
