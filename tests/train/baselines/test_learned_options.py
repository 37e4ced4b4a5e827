"""Options of the learned baselines, off by default: ghost gradients, medians, clipping, mean minimality; by hand."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import host_of
from swd_lens.train.baselines.fits import HostFit
from swd_lens.train.baselines.spec import TrainError, TranscoderSpec, VpdSpec
from swd_lens.train.baselines.transcoders import Transcoder, geometric_median, ghost_loss
from swd_lens.train.baselines.units import Trajectory
from swd_lens.train.baselines.vpd import Vpd, clip_components, minimality
from tests.micro import random_tokens, toy_model

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(24, 10)


def drawn(coder, seed=0):
    coder.draw(torch.Generator().manual_seed(seed))
    return coder


# ---------------------------------------------------------------------------------------------- minimality, clipping


def test_mean_minimality_by_hand():
    upper = torch.tensor([[1.0, 0.0], [0.25, 0.25]])
    # p = .5: columns 1, .5 and 0, .5: means .75 and .25 (and half of 1e-6), their sum 1, their mean .5
    assert float(minimality(upper, 0.5, 0.0, "sum")) == pytest.approx(1.0, abs=1e-5)
    assert float(minimality(upper, 0.5, 0.0, "mean")) == pytest.approx(0.5, abs=1e-5)


def test_the_reduction_reaches_the_loss():
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(6, 2)
    charges = []
    for reduction in ("sum", "mean"):
        vpd = drawn(Vpd(3, 2, VpdSpec(width=5, hidden=2, reduction=reduction)))
        vpd.stand_for(torch.zeros(3, 2), torch.zeros(2))
        charges.append(float(vpd.loss(x, y, 1)[1]["minimality"]))
    assert charges[0] == pytest.approx(5 * charges[1]) and charges[0] > 0


def with_gradients(**settings):
    """Two matrices; of V and U of each, one entry has a gradient: 3, 4 and 0, 12: norm 13. Importances have 7 everywhere."""
    parts = [drawn(Vpd(2, 2, VpdSpec(width=3, hidden=1, **settings))) for _ in range(2)]
    for part, (v, u) in zip(parts, ((3.0, 4.0), (0.0, 12.0)), strict=True):
        for parameter in part.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
        for parameter, entry in ((part.W_enc, v), (part.W_dec, u)):
            parameter.grad = torch.zeros_like(parameter)
            parameter.grad[0, 0] = entry
    return parts


@pytest.mark.parametrize(("clip", "factor"), [(None, 1.0), (20.0, 1.0), (1.3, 0.1)])
def test_clipping_by_hand(clip, factor):
    parts = with_gradients(clip=clip)
    clip_components(parts)
    entries = [float(t[0, 0]) for part in parts for t in (part.W_enc.grad, part.W_dec.grad) if t is not None]
    assert entries == pytest.approx([3 * factor, 4 * factor, 0, 12 * factor], rel=1e-6)
    assert all(bool((p.grad == 7).all()) for part in parts for p in part.importance.parameters())
    # a matrix that is trained alone has a norm of its own: 5
    alone = with_gradients(clip=clip)[0]
    alone.adjust_gradients()
    assert alone.W_enc.grad is not None
    assert float(alone.W_enc.grad[0, 0]) == pytest.approx(3 * min(1.0, (clip or 5) / 5), rel=1e-6)


def test_matrices_of_a_run_are_clipped_together():
    model, parts = toy_model(), with_gradients(clip=1.3, fidelity="kl")
    matrices = swd.find_sites(model, ["blocks.0.mlp_in", "blocks.0.mlp_out"])
    HostFit(host_of(model), matrices[0], dict(zip(matrices, parts, strict=True)), Trajectory()).adjust_gradients(1)
    entries = [float(t[0, 0]) for part in parts for t in (part.W_enc.grad, part.W_dec.grad) if t is not None]
    assert entries == pytest.approx([0.3, 0.4, 0, 1.2], rel=1e-6)


@pytest.mark.parametrize(("method", "site"), [("vpd_recon", SITE), ("vpd_recon", "blocks.0.mlp"), ("vpd_kl", SITE)])
def test_training_clips(method, site):
    """A limit that is never reached changes no bit; one that stops the components leaves them where they began."""
    model, train = toy_model(), getattr(baselines, method)
    how = {"n_tokens": 100, "tokens_per_step": 50, "progress": False}
    plain, wide, still = (train(model, site, TOKENS, **how, clip=clip) for clip in (None, 1e6, 1e-20))
    for at in (50, 100):
        free, same, stopped = (units.checkpoints[at] for units in (plain, wide, still))
        assert all(torch.equal(free[name], same[name]) for name in free)
        moved = {name for name in free if not torch.equal(stopped[name], still.checkpoints[50][name])}
        assert all("importance" in name for name in moved) and bool(moved) == (at == 100)
    assert not torch.equal(plain.checkpoints[50]["mlp_out.W_enc"], plain.checkpoints[100]["mlp_out.W_enc"])


# ---------------------------------------------------------------------------------------------- ghost gradients


@pytest.mark.parametrize(("loss", "factor"), [("mse", 0.5), ("normed", 1.0)])
def test_ghost_loss_by_hand(loss, factor):
    before = torch.tensor([[0.0]], requires_grad=True)
    write = torch.tensor([[3.0, 4.0]], requires_grad=True)
    residual, error = torch.tensor([[0.0, 2.0]], requires_grad=True), torch.tensor(0.45, requires_grad=True)
    # exp(0) (3, 4) has length 5, the residual 2: brought to 1 it is (.6, .8); misses (.6, -1.2): (.36 + 1.44) / 2 = .9
    # "normed": over the residual's length, .45. Then multiplied to be .45, by .5 or by 1.
    found = ghost_loss(before, write, residual, error, loss)
    assert float(found.detach()) == pytest.approx(0.45, rel=1e-5)
    grads = torch.autograd.grad(found, (before, write, residual, error), allow_unused=True)
    # of .9 by the length .2 held fast: in (3, 4) (.6, -1.2) * .2, in the exponent (.6, -1.2) . (.6, .8) = -.6
    over = factor if loss == "mse" else factor / 2
    assert grads[1].flatten().tolist() == pytest.approx([0.12 * over, -0.24 * over], rel=1e-4)
    assert grads[0].item() == pytest.approx(-0.6 * over, rel=1e-4)
    assert grads[2] is None and grads[3] is None
    assert float(ghost_loss(before[:, :0], write[:0], residual, error, loss)) == 0.0


def half_dead(**settings):
    """Six features, of which the last three are far below zero for any of the inputs."""
    coder = drawn(Transcoder(5, 3, TranscoderSpec(width=6, dead_after=8, **settings)))
    with torch.no_grad():
        coder.b_enc[3:] = -30.0
    return coder


def test_only_dead_features_have_ghosts():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(8, 5, generator=generator), torch.randn(8, 3, generator=generator)
    gradients, losses = [], []
    for ghost in (False, True):
        coder = half_dead(ghost=ghost)
        loss, said = coder.loss(x, y, 1)
        loss.backward()
        gradients.append({name: p.grad for name, p in coder.named_parameters()})
        losses.append({name: float(value) for name, value in said.items()})
        assert said["dead"] == 0.5
    plain, more = gradients
    for name, alive in (("W_enc", (slice(None), slice(3))), ("W_dec", slice(3)), ("b_enc", slice(3))):
        torch.testing.assert_close(plain[name][alive], more[name][alive])
    for name in ("b_dec", "b_out"):
        torch.testing.assert_close(plain[name], more[name])
    for name, dead in (("W_enc", (slice(None), slice(3, 6))), ("W_dec", slice(3, 6)), ("b_enc", slice(3, 6))):
        assert not plain[name][dead].any() and bool((more[name][dead] != 0).all())
    assert "ghost" not in losses[0] and losses[1]["ghost"] == pytest.approx(losses[1]["error"], rel=1e-4)


def test_features_that_fire_have_no_ghost():
    generator = torch.Generator().manual_seed(3)
    x, y = torch.randn(64, 5, generator=generator), torch.randn(64, 3, generator=generator)
    coder = drawn(Transcoder(5, 3, TranscoderSpec(width=6, dead_after=64, ghost=True)))
    loss, said = coder.loss(x, y, 1)
    assert said["dead"] == 0 and said["ghost"] == 0
    assert float(loss.detach()) == pytest.approx(float(said["error"] + coder.spec.l1 * said["l1"]))


def test_ghosts_bring_features_back():
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 5, generator=generator)
    y = x @ torch.randn(5, 3, generator=generator)
    back = []
    for ghost in (False, True):
        coder, fired = half_dead(ghost=ghost), torch.zeros(6, dtype=torch.bool)
        adam = torch.optim.Adam(coder.parameters(), lr=0.05)
        for step in range(1, 201):
            coder.before_step()
            adam.zero_grad()
            coder.loss(x, y, step)[0].backward()
            coder.adjust_gradients()
            adam.step()
            fired |= coder.silent == 0
        assert bool(fired[:3].all())
        back.append(int(fired[3:].sum()))
    assert back[0] == 0 < back[1]


# ---------------------------------------------------------------------------------------------- the start


def test_geometric_median_by_hand():
    # The corners (-1, 0), (1, 0), (0, 6) are seen under 120 degrees each from (0, 1 / sqrt(3)); their mean is (0, 2).
    corners = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 6.0]])
    assert geometric_median(corners).tolist() == pytest.approx([0.0, 3**-0.5], abs=1e-3)
    # On a line it is the middle one, however far the last is; a token itself, at no distance.
    assert geometric_median(torch.tensor([[0.0], [1.0], [1000.0]])).tolist() == pytest.approx([1.0], abs=0.05)
    assert geometric_median(torch.full((4, 2), 3.0)).tolist() == [3.0, 3.0]


def test_the_start_of_a_transcoder():
    x = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 6.0]])
    y = torch.cat([x, torch.ones(3, 1)], 1)
    for start, height in (("mean", 2.0), ("median", 3**-0.5)):
        coder = drawn(Transcoder(2, 3, TranscoderSpec(width=4, start=start)))
        coder.begin(x, y)
        assert coder.b_dec.tolist() == pytest.approx([0.0, height], abs=1e-3)
        assert coder.b_out.tolist() == pytest.approx([0.0, height, 1.0], abs=1e-3)


# ---------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TranscoderSpec(start="mode"), "start='mode': choose one of 'mean', 'median'"),
        (lambda: VpdSpec(reduction="max"), "reduction='max': choose one of 'sum', 'mean'"),
        (lambda: VpdSpec(clip=0), "clip=0: give a finite number above 0"),
        (lambda: VpdSpec(clip=float("inf")), "clip=inf: give a finite number above 0"),
        (lambda: VpdSpec(fidelity="kl", routing="some"), "routing='some': choose one of 'all', 'layerwise', 'subset'"),
        (
            lambda: VpdSpec(fidelity="kl", masks="bernoulli"),
            "masks='bernoulli': choose one of 'continuous', 'binomial'",
        ),
        (lambda: VpdSpec(adversary="once"), "adversary='once': choose one of 'oneshot', 'persistent'"),
        (lambda: VpdSpec(persistent_steps=-1), "persistent_steps=-1: give a whole number of at least 0"),
        (lambda: VpdSpec(persistent_rate=0), "persistent_rate=0: give a finite number above 0"),
        (lambda: VpdSpec(persistent_warmup=2), "persistent_warmup=2: give a finite number from 0 to 1"),
        (
            lambda: VpdSpec(persistent_beta2=1.0),
            r"persistent_beta2=1\.0: give a finite number of at least 0 and below 1",
        ),
        (
            lambda: VpdSpec(routing="subset"),
            "routing='subset' is for fidelity='kl': by reconstruction .*or call vpd_kl",
        ),
        (lambda: VpdSpec(masks="binomial"), "masks='binomial' is for fidelity='kl'.* leave masks out"),
        (lambda: VpdSpec(adversarial=0.5), r"adversarial=0\.5 is for fidelity='kl'"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(TrainError, match=says):
        make()
