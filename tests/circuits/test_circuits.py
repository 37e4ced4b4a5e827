"""Attribution and evaluation on a toy model: against slow, obvious versions of themselves."""

import numpy as np
import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits import attribute, evaluate, prefix_grid
from swd_lens.circuits.intervene import intervention_hooks
from swd_lens.hosts import host_of
from swd_lens.inject import attach
from swd_lens.sites import hook_name
from tests.contract import swd_zero_data
from tests.micro import random_split, toy_model


@pytest.fixture(scope="module")
def model():
    return toy_model()


@pytest.fixture(scope="module")
def factors(model):
    return swd_zero_data(model, "all")


def margin(logits, split, i):
    right, wrong = list(split.answer_ids[i]), list(split.distractor_ids[i])
    return logits[right].mean() - logits[wrong].mean()


@pytest.mark.parametrize("positions", ["scoring", "all"])
def test_attribution_is_that_of_whole_prompts_one_by_one(model, factors, positions):
    split = random_split()
    fast = attribute(model, factors, split, positions=positions, batch_size=5)
    expected = {site: torch.zeros(f.n_units) for site, f in factors.items()}
    means, vectors = {site: torch.zeros(f.n_units) for site, f in factors.items()}, 0
    with attach(model, factors):
        for i, prompt in enumerate(split.tokens):
            z = {}
            hooks = [(hook_name(site), lambda value, hook, site=site, z=z: z.update({site: value})) for site in factors]
            logits = model.run_with_hooks(prompt[None], fwd_hooks=hooks)[0, -1]
            gradients = torch.autograd.grad(margin(logits, split, i), list(z.values()))
            chosen = slice(-1, None) if positions == "scoring" else slice(None)
            vectors += 1 if positions == "scoring" else len(prompt)
            for site, gradient in zip(z, gradients, strict=True):
                expected[site] += (z[site] * gradient)[0, chosen].sum(0).clamp(min=0).detach() / len(split)
                means[site] += z[site][0, chosen].sum(0).detach()
    for site in factors:
        torch.testing.assert_close(fast.scores[site], expected[site], rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(fast.means[site], means[site] / vectors, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("positions", ["scoring", "all"])
@pytest.mark.parametrize("ablation", ["mean", "zero"])
def test_curve_is_that_of_whole_prompts_one_by_one(model, factors, positions, ablation):
    split = random_split(12, seed=3, name="test")
    scores = attribute(model, factors, random_split(), positions=positions)
    curve = evaluate(model, factors, split, scores, grid=[0, 5, 40], ablation=ablation, tokens_per_forward=40)
    with attach(model, factors), torch.no_grad():
        for k, row in zip([0, 5, 40], curve.rows.itertuples(), strict=False):
            for mode, found in (("keep", row.q_keep), ("ablate", row.q_ablate)):
                hooks = intervention_hooks(scores, scores.ranking()[:k], mode, ablation=ablation)
                slow = [
                    float(margin(model.run_with_hooks(prompt[None], fwd_hooks=hooks)[0, -1], split, i))
                    for i, prompt in enumerate(split.tokens)
                ]
                assert found == pytest.approx(sum(slow) / len(slow), abs=2e-5)


def test_first_order_prediction_matches_finite_differences(model):
    """Sum over units of z_i dg/dz_i is the derivative of the margin along z: checked in float64 by central differences."""
    model = toy_model(dtype=torch.float64)
    factors, site = baselines.svd(model, "blocks.1.mlp_out"), "blocks.1.mlp_out"
    tokens = torch.tensor([[1, 5, 7, 2]])

    def run(scale):
        z = {}

        def hook_fn(value, hook):
            z["z"] = (value * scale).detach().requires_grad_(True)
            return z["z"]

        logits = model.run_with_hooks(tokens, fwd_hooks=[(hook_name(site), hook_fn)])[0, -1]
        return logits[3] - logits[4], z["z"]

    with attach(model, factors):
        g, z = run(1.0)
        gradient = torch.autograd.grad(g, z)[0]
        predicted = float((z * gradient).sum().detach())
        step = 1e-6
        measured = float((run(1 + step)[0] - run(1 - step)[0]) / (2 * step))
        assert predicted == pytest.approx(measured, rel=1e-6)
        # The constant terms: what the margin's linearisation at z keeps when all units are zero.
        constant = float(g) - predicted
        small = 1e-3
        assert constant + (1 + small) * predicted == pytest.approx(
            float(run(1 + small)[0]), abs=10 * small**2 * abs(predicted)
        )


def test_frozen_parameters_still_give_gradients(model, factors):
    before = attribute(model, factors, random_split())
    frozen = toy_model()
    for parameter in frozen.parameters():
        parameter.requires_grad_(False)
    after = attribute(frozen, factors, random_split())
    for site in factors:
        torch.testing.assert_close(after.scores[site], before.scores[site], rtol=1e-5, atol=1e-6)


def test_a_host_that_keeps_no_prefix_gives_the_same_scores_and_curves(model, factors, monkeypatch):
    split, test = random_split(), random_split(12, seed=3, name="test")
    assert max(len(prompt) for prompt in split.tokens) > 1
    kept = attribute(model, factors, split)
    curve = evaluate(model, factors, test, kept)
    monkeypatch.setattr(type(host_of(model)), "freeze_prefix", lambda self, tokens: None)
    whole = attribute(model, factors, split)
    assert whole.settings == kept.settings
    for site in factors:
        torch.testing.assert_close(whole.scores[site], kept.scores[site], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(whole.means[site], kept.means[site], rtol=1e-5, atol=1e-6)
    # The same scores again, so that both judge the same prefixes.
    again = evaluate(model, factors, test, kept)
    np.testing.assert_allclose(again.rows.to_numpy(), curve.rows.to_numpy(), rtol=1e-5, atol=1e-5)


def test_units_that_no_hook_sees_are_an_error(model, factors, monkeypatch):
    kind = type(host_of(model))
    last_logits = kind.last_logits

    def without_hooks(self, *arguments, **options):
        self.model.reset_hooks()
        return last_logits(self, *arguments, **options)

    monkeypatch.setattr(kind, "last_logits", without_hooks)
    with pytest.raises(swd.UnsupportedHostError, match=r"the units of blocks\.0\.attn_qkv, blocks\.0\.attn_o, "):
        attribute(model, factors, random_split())


def test_the_same_inputs_give_the_same_bits(model, factors):
    first, second = (
        evaluate(model, factors, random_split(), attribute(model, factors, random_split())) for _ in range(2)
    )
    assert first.rows.equals(second.rows)


def test_prefix_grid():
    assert prefix_grid(20) == [0, 1, 2, 3, 4, 6, 8, 12, 16, 20]
    assert prefix_grid(1) == [0, 1]
    assert 48 in prefix_grid(3072)  # method.md §0.5
    assert prefix_grid(768)[-3:] == [384, 512, 768]


def test_scores_of_other_factors_are_refused(model, factors):
    scores = attribute(model, factors, random_split())
    with pytest.raises(ValueError, match="attribute these factors first"):
        evaluate(model, {"blocks.0.mlp_out": factors["blocks.0.mlp_out"]}, random_split(), scores)
    with pytest.raises(ValueError, match=r"prefix lengths must lie in 0 \.\. "):
        evaluate(model, factors, random_split(), scores, grid=[-1])
    with pytest.raises(ValueError, match="positions must be one of"):
        attribute(model, factors, random_split(), positions="last")


def test_plots_draw_every_point(model, factors):
    curve = evaluate(model, factors, random_split(), attribute(model, factors, random_split()))
    figure = curve.plot()
    for ax, column in zip(figure.axes, ("sufficiency", "necessity_drop"), strict=True):
        line = ax.lines[0]
        assert line.get_xdata().tolist() == curve.rows["edges"].tolist()
        np.testing.assert_array_equal(line.get_ydata(), curve.rows[column])
