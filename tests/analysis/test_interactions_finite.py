"""Pair interactions through the activation, against the paper's formulas written out in float64."""

import pytest
import torch

from swd_lens.analysis.interactions import difference, unit_interactions
from swd_lens.units import attach
from tests.analysis.interaction_checks import ACTIVATIONS, TOKENS, check, sparse_factors
from tests.micro import toy_model

SITE = "blocks.1.mlp_in"


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize("act_fn", ACTIVATIONS)
@pytest.mark.parametrize("density", [0.3, 1.0])  # common channels fewer than d_model, and more
def test_it_is_the_papers_definition(act_fn, density):
    model = toy_model(act_fn=act_fn)
    # A lower layer is replaced as well, as in the paper.
    factors = {site: sparse_factors(model, site, density=density, seed=i) for i, site in enumerate(("blocks.0.mlp_in", SITE))}
    found = unit_interactions(model, factors, SITE, TOKENS, top=8, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    check(found, ACTIVATIONS[act_fn], cache, 1, factors[SITE], model.blocks[1].mlp.W_out, "mlp_in")
    assert found.n_pairs == 28 and found.settings["tokens"] == 35 and found.settings["attached"] == list(factors)


def test_in_a_gated_mlp_the_gates_units_are_taken_out_and_the_other_branch_is_held():
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {"blocks.1.mlp_gate": sparse_factors(model, "blocks.1.mlp_gate")}
    found = unit_interactions(model, factors, "blocks.1.mlp_gate", TOKENS, top=6, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    up = cache["blocks.1.mlp.hook_pre_linear"].flatten(0, 1)
    weight = model.blocks[1].mlp.W_out
    check(found, ACTIVATIONS["silu"], cache, 1, factors["blocks.1.mlp_gate"], weight, "mlp_gate", up)
    with pytest.raises(ValueError, match=r"is gated: units of blocks\.1\.mlp_in enter .* linearly.*blocks\.1\.mlp_gate"):
        unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS)


GATE = "blocks.1.mlp_gate"


@pytest.mark.parametrize("density", [0.3, 1.0])
def test_gate_x_up_is_the_mixed_difference_of_the_product(density, monkeypatch):
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {site: sparse_factors(model, site, density=density, seed=i) for i, site in enumerate((GATE, SITE))}
    monkeypatch.setattr(difference, "_LONGEST_BLOCK", 3)
    found = unit_interactions(model, factors, "blocks.1.mlp_[gi]*", TOKENS, top=5, batch_size=2, progress=False)
    with attach(model, factors), torch.no_grad():
        _, cache = model.run_with_cache(TOKENS)
    seen = [cache[f"blocks.1.{name}"].flatten(0, 1).double() for name in ("mlp.hook_pre", "mlp.hook_pre_linear")]
    weight, f, (g, u) = model.blocks[1].mlp.W_out.detach().double(), ACTIVATIONS["silu"], seen
    taken = []
    for kind, units in (("mlp_gate", found.units), ("mlp_in", found.up.units)):
        z = cache[f"blocks.1.hook_{kind}_unit"].flatten(0, 1).double()
        taken.append([z[:, i, None] * factors[f"blocks.1.{kind}"].write[i].double() for i in units])

    def rms(delta):
        return float((delta @ weight).square().sum(1).mean().sqrt())

    for i, c in enumerate(taken[0]):
        assert float(found.marginal_rms[i]) == pytest.approx(rms(f(g) * u - f(g - c) * u), rel=1e-4)
        for j, d in enumerate(taken[1]):
            q = f(g) * u - f(g - c) * u - f(g) * (u - d) + f(g - c) * (u - d)
            assert float(found.interaction_rms[i, j]) == pytest.approx(rms(q), rel=1e-4, abs=1e-6)
            assert float(found.up.marginal_rms[j]) == pytest.approx(rms(f(g) * u - f(g) * (u - d)), rel=1e-4)
    alone = unit_interactions(model, factors, GATE, TOKENS, top=5, batch_size=2, progress=False)
    assert alone.up is None and alone.units == found.units
    torch.testing.assert_close(alone.marginal_rms, found.marginal_rms, rtol=1e-6, atol=0)


def test_gate_x_up_wants_factors_of_both_and_one_layer():
    model = toy_model(act_fn="silu", gated_mlp=True)
    factors = {GATE: sparse_factors(model, GATE)}
    with pytest.raises(ValueError, match=r"hold nothing for blocks\.1\.mlp_in"):
        unit_interactions(model, factors, [GATE, SITE], TOKENS, progress=False)
    with pytest.raises(ValueError, match="names 2 sites"):
        unit_interactions(model, factors, [GATE, "blocks.0.mlp_in"], TOKENS, progress=False)


def test_pairs_table_and_figures_say_the_same():
    model = toy_model()
    found = unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)
    pairs, row = found.pairs(3), found.table().iloc[0]
    best = pairs.iloc[0]
    assert best["R"] == row["max"] == found.values().max()
    scale = (best["marginal RMS"] * best["other's marginal RMS"]) ** 0.5
    assert best["R"] == pytest.approx(best["interaction RMS"] / scale)  # as the paper's 2.096 / sqrt(11.127 x 8.089) = .221
    assert list(pairs["R"]) == sorted(found.values(), reverse=True)[:3]
    assert row["R >= 0.10"] == sum(found.values() >= 0.1)
    bars = found.plot_pairs(3).axes[0]
    assert [bar.get_width() for bar in bars.patches] == list(pairs["R"])
    assert bars.get_yticklabels()[0].get_text() == " – ".join(best[name].split("/")[1] for name in ("unit", "other unit"))
    assert len(found.plot().axes) == 3 and "<svg" in found._repr_html_()
