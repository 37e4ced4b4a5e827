"""Masks and adversaries of VPD-KL: what is drawn, routed and climbed, against arithmetic and torch's own Adam."""

import math

import pytest
import torch

from swd_lens import baselines
from swd_lens.train.baselines.masks import Draws, Persistent, one_shot, seed_of
from swd_lens.train.baselines.spec import VPD_KLS, VpdSpec
from swd_lens.train.baselines.vpd import Vpd, jittered
from swd_lens.train.rows import rows_of
from tests.micro import random_tokens

SITE, MLP = "blocks.1.mlp_out", "blocks.0.mlp"
TOKENS = random_tokens(24, 10)
ONE_STEP = {"n_tokens": 50, "tokens_per_step": 50, "keep": (), "learning_rate": 1e-30, "progress": False}


def draws_of(n, width=4, **settings):
    draws = Draws([Vpd(2, 2, VpdSpec(fidelity="kl", width=width, hidden=1, **settings)) for _ in range(n)])
    draws.begin(1, (200, 150))
    return draws


def weights(units):
    return {name: t for site in units for name, t in units[site].coder.state_dict(prefix=f"{site}.").items()}


def test_routes_take_every_number_of_matrices_and_every_set_alike():
    taken = torch.stack(draws_of(3).routes((200, 150)), -1).flatten(0, 1)  # 30,000 positions
    share = torch.bincount((taken * torch.tensor([1, 2, 4])).sum(-1), minlength=8) / len(taken)
    # k = 1, 2, 3 a third each: one of three sets of one, one of three sets of two, the set of all; never none
    expected = torch.tensor([0, 1, 1, 1, 1, 1, 1, 3]) / 9
    # a binomial share of 1/9 has deviation .0018 here
    assert share[0] == 0 and float((share - expected).abs().max()) < 0.01


def test_a_subset_of_one_matrix_is_all(model):
    one, two = (
        baselines.vpd_kl(model, SITE, TOKENS, **{**ONE_STEP, "n_tokens": 150, "learning_rate": 0.01}, routing=routing)
        for routing in ("all", "subset")
    )
    torch.testing.assert_close(weights(one), weights(two), rtol=0, atol=0)
    assert one.log.equals(two.log)


def test_a_step_with_subsets_by_hand(model):
    """The logged KL of the first step is that of the host with each matrix on components where its route says so."""
    units = baselines.vpd_kl(model, MLP, TOKENS, **ONE_STEP, routing="subset")
    parts = {kind: units[f"blocks.0.{kind}"].coder for kind in ("mlp_in", "mlp_out")}
    mlp, ln, rows = model.blocks[0].mlp, model.blocks[0].ln2, next(rows_of(TOKENS, model).batches(5, 0, 0))
    generator = torch.Generator().manual_seed(1)  # 0 * 1,000,003 + step 1
    u = {kind: torch.rand(5, 10, 33, generator=generator) for kind in parts}
    count = torch.randint(1, 3, (5, 10, 1), generator=generator)
    rank = torch.rand(5, 10, 2, generator=generator).argsort(-1).argsort(-1)
    route = dict(zip(parts, (rank < count).unbind(-1), strict=True))
    assert all(0.5 < r.float().mean() < 0.95 for r in route.values())  # 3 of 4 in the mean

    def some(kind, x, w, dense):
        vpd = parts[kind]
        g = vpd.importance(x).clamp(0, 1)
        y = ((g + (1 - g) * u[kind][..., :-1]) * (x @ vpd.W_enc)) @ vpd.W_dec + vpd.bias
        return torch.where(route[kind][..., None], y + u[kind][..., -1:] * (x @ (w - vpd.W_enc @ vpd.W_dec)), dense)

    read = {}
    with torch.no_grad():
        dense = model(rows).log_softmax(-1)
        hooks = [
            ("blocks.0.ln2.hook_normalized", lambda out, hook: read.update(x=out * ln.w + ln.b)),
            ("blocks.0.mlp.hook_pre", lambda out, hook: some("mlp_in", read["x"], mlp.W_in, out)),
            ("blocks.0.mlp.hook_post", lambda out, hook: read.update(h=out)),
            ("blocks.0.hook_mlp_out", lambda out, hook: some("mlp_out", read["h"], mlp.W_out, out)),
        ]
        masked = model.run_with_hooks(rows, fwd_hooks=hooks).log_softmax(-1)
    kl = float((dense.exp() * (dense - masked)).sum(-1).mean())
    assert kl > 0 and math.isclose(units.log["error"].iloc[0], kl, rel_tol=1e-4)


def test_binomial_sources_are_0_or_1_and_the_last_one_between_with_jitter():
    draws = draws_of(2, masks="binomial")
    first, second = draws.sources((200, 150))
    components, remainder = first[..., :-1], first[..., -1]
    assert set(components.unique().tolist()) == {0.0, 1.0} and abs(float(components.mean()) - 0.5) < 0.01
    assert len(remainder.unique()) > 1000 and not torch.equal(first, second)
    noise = draws.noise[0]
    assert noise is not None and noise.shape == (200, 150, 4) and 0 <= float(noise.min()) < float(noise.max()) <= 1
    assert draws_of(2).noise == [None, None]
    # 1.05 * .4 - .05 * .2 = .42 - .01; r = 1 stays at 1 only without noise, and reaches it from 1 / 1.05
    got = jittered(torch.tensor([0.4, 1.0, 1.0]), torch.tensor([0.2, 0.0, 1.0]))
    assert got.tolist() == pytest.approx([0.41, 1.05, 1.0])


def persistent(n_tokens, **settings):
    """Of one matrix with two components and a remainder, 10 tokens a step."""
    how = {"fidelity": "kl", "width": 2, "hidden": 1, "tokens_per_step": 10, "adversarial": 0.5, "adversary": "persistent"}
    spec = VpdSpec(n_tokens=n_tokens, **how, **settings)
    return Persistent(spec, Draws([Vpd(2, 2, spec)]))


def test_one_shot_and_the_persistent_rate_by_hand():
    # 2.5% of 80 steps are 2: half the rate, then the rate
    assert [persistent(800).rate(step) for step in (1, 2, 3, 80)] == [0.005, 0.01, 0.01, 0.01]
    # int(.025 * 39) = 0: no warm-up
    assert persistent(390).rate(1) == 0.01
    draws = draws_of(1, width=2, adversarial=0.5, adversarial_steps=2, adversarial_rate=0.25)
    (got,) = one_shot(lambda s: (s[0] * torch.tensor([3.0, -1.0, 0.0])).sum(), draws, (2, 3))
    draws.begin(1, (2, 3))
    (start,) = draws.uniform((2, 3))
    # twice a quarter up, twice a quarter down, and the remainder's stays
    assert torch.allclose(got, (start + torch.tensor([0.5, -0.5, 0.0])).clamp(0, 1))


def test_persistent_ascent_is_adam_on_the_kl_itself():
    """Three steps of training, gradients that change: torch's Adam, with a clamp, on the KL without its weight in the loss."""
    adversary = persistent(390, persistent_beta1=0.6, persistent_rate=0.125)

    def kl(sources):
        return (sources[0] - 0.3).pow(3).sum() - sources[0].sin().sum()

    for step in (1, 2, 3):
        sources = adversary.sources(kl, (4, 5), step)
        (0.5 * kl(sources)).backward()
        adversary.after_backward(step)
    wanted = torch.rand(4, 5, 3, generator=torch.Generator().manual_seed(seed_of(0, 40))).requires_grad_(True)
    adam = torch.optim.Adam([wanted], lr=0.125, betas=(0.6, 0.99), eps=1e-8, maximize=True)
    for _ in range(9):
        adam.zero_grad()
        kl([wanted]).backward()
        adam.step()
        with torch.no_grad():
            wanted.clamp_(0, 1)
    torch.testing.assert_close(adversary.state()["source.0"], wanted.detach(), rtol=1e-5, atol=1e-6)
    assert adversary.adam_steps == 9


@pytest.mark.parametrize(("settings", "shape"), [({"delta": False}, (4, 5, 2)), ({"adversarial_scope": "batch"}, (1, 1, 3))])
def test_what_persistent_sources_are_for(settings, shape):
    adversary = persistent(390, **settings)
    (source,) = adversary.sources(lambda sources: sources[0].sum(), (4, 5), 1)
    assert source.shape == shape


@pytest.mark.parametrize("before", [0, 2])
def test_persistent_masks_are_worse_than_random_ones(model, before):
    """On rows that come back, as sources belong to places and not to tokens; also by the steps after backward passes alone."""
    how = {"n_tokens": 1000, "tokens_per_step": 50, "learning_rate": 1e-30, "keep": (), "progress": False}
    adversary = {"adversarial": 0.5, "adversary": "persistent", "persistent_steps": before, "persistent_rate": 0.05}
    log = baselines.vpd_kl(model, SITE, TOKENS[:5], **how, **adversary).log
    assert log["adversarial"].iloc[-1] > 1.3 * log["adversarial"].iloc[0]
    assert (log["adversarial"].iloc[10:] > log["error"].iloc[10:]).all()


def test_vpd_pile4l(model):
    """method.md §1.6: 400,000 steps of 64 x 512; all terms at once, here at a small size."""
    recipe = VPD_KLS["vpd_pile4l"]
    assert recipe.steps == 400_000 and recipe.tokens_per_step == 64 * 512 and recipe.warmup() == 0
    assert (recipe.fidelity_weight, recipe.adversarial, recipe.faithfulness, recipe.clip) == (0.5, 0.5, 1e7, 0.01)
    assert (recipe.routing, recipe.adversary, recipe.p(1), recipe.p_end) == ("subset", "persistent", 2.0, 0.4)
    assert recipe.rate(1) == pytest.approx(5e-5) and recipe.rate(400_000) == pytest.approx(5e-6)
    small = {"n_tokens": 100, "tokens_per_step": 50, "width": 8, "hidden": 2, "progress": False}
    units = baselines.vpd_kl(model, MLP, TOKENS, preset="vpd_pile4l", **small)
    assert set(units) == {"blocks.0.mlp_in", "blocks.0.mlp_out"} and torch.isfinite(torch.tensor(units.log["loss"])).all()
    assert units.provenance["settings"]["clip"] == 0.01 and units.provenance["settings"]["adversary"] == "persistent"
