"""VPD on tensors made by hand: importances, minimality, masks, losses, clipping; the arithmetic stands beside them."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import host_of
from swd_lens.train.baselines.fits import HostFit
from swd_lens.train.baselines.spec import VpdSpec
from swd_lens.train.baselines.units import Trajectory
from swd_lens.train.baselines.vpd import (
    ScalarMlp,
    VectorMlp,
    Vpd,
    clip_components,
    lower_leaky,
    minimality,
    total_loss,
    unfaithfulness,
    upper_leaky,
)
from tests.micro import random_tokens, toy_model

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(24, 10)


def drawn(coder, seed=0):
    coder.draw(torch.Generator().manual_seed(seed))
    return coder


def test_leaky_hard_and_minimality_by_hand():
    raw = torch.tensor([-1.0, -1.0, 0.5, 2.0], requires_grad=True)
    assert lower_leaky(raw).tolist() == [0.0, 0.0, 0.5, 1.0]
    # gradient 1 lowers r under descent: blocked below zero; -1 raises it: a hundredth passes
    (gradient,) = torch.autograd.grad(lower_leaky(raw), raw, torch.tensor([1.0, -1.0, 1.0, 1.0]))
    assert gradient.tolist() == pytest.approx([0.0, -0.01, 1.0, 0.0])
    (gradient,) = torch.autograd.grad(upper_leaky(raw).sum(), raw)
    assert upper_leaky(raw).tolist() == pytest.approx([0.0, 0.0, 0.5, 1.01])
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.01])
    upper = torch.tensor([[1.0, 0.0], [0.25, 0.0]])
    # p = 0.5: column 0 is 1 and .5: mean .75; column 1 is 1e-6 twice
    assert float(minimality(upper, 0.5, 0.0)) == pytest.approx(0.75 + 1e-6, abs=1e-7)
    # beta = 2: + 2 * .75 * log2(1 + 1.5)
    expected = 0.75 + 2 * 0.75 * 1.3219281
    assert float(minimality(upper, 0.5, 2.0)) == pytest.approx(expected, abs=1e-5)
    upper = torch.tensor([[1.0, 0.0], [0.25, 0.25]])
    # p = .5: columns 1, .5 and 0, .5: means .75 and .25 (and half of 1e-6), their sum 1, their mean .5
    assert float(minimality(upper, 0.5, 0.0, "sum")) == pytest.approx(1.0, abs=1e-5)
    assert float(minimality(upper, 0.5, 0.0, "mean")) == pytest.approx(0.5, abs=1e-5)
    # The reduction reaches the loss.
    x, y = torch.randn(6, 3, generator=torch.Generator().manual_seed(1)), torch.zeros(6, 2)
    charges = []
    for reduction in ("sum", "mean"):
        vpd = drawn(Vpd(3, 2, VpdSpec(width=5, hidden=2, reduction=reduction)))
        vpd.stand_for(torch.zeros(3, 2), torch.zeros(2))
        charges.append(float(vpd.loss(x, y, 1)[1]["minimality"]))
    assert charges[0] == pytest.approx(5 * charges[1]) and charges[0] > 0


def by_hand():
    """W = (2, 0), one component V = (1, 1), U = 3, bias 1; importance r = 0.5 x0."""
    vpd = drawn(Vpd(2, 1, VpdSpec(width=1, importance="shared_mlp", hidden=1, minimality=0.1, p_start=1.0, p_end=1.0)))
    with torch.no_grad():
        vpd.W_enc.copy_(torch.tensor([[1.0], [1.0]]))
        vpd.W_dec.copy_(torch.tensor([[3.0]]))
    vpd.stand_for(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0]))
    vpd.importance.forward = lambda x: 0.5 * x[..., :1]  # pyright: ignore[reportAttributeAccessIssue]
    return vpd


def test_vpd_masks_and_losses_by_hand():
    vpd, x = by_hand(), torch.tensor([[1.0, 3.0]])
    # x V = 4, g = .5: 4 * .5 * 3 + 1 = 7
    y, raw = vpd.masked(x)
    assert (y.item(), raw.item()) == (7.0, 0.5)
    assert vpd.encode(x).item() == 2.0 and vpd.decode(vpd.encode(x)).item() == 7.0
    # u = .5: m = .5 + .5 * .5 = .75, 4 * .75 * 3 + 1 = 10; W - VU = (-1, -3), x (W - VU) = -10, a quarter of it: 7.5
    y, _ = vpd.masked(x, torch.tensor([[0.5, 0.25]]))
    assert y.item() == 7.5
    # both sources 1: nothing is masked, and the dense output 2 * 1 + 1 comes back
    y, _ = vpd.masked(x, torch.ones(1, 2))
    assert y.item() == 3.0
    vpd = by_hand()
    # (7 - 3)^2 + .1 * mean_t g_upper = 16 + .1 * .5
    loss, said = vpd.loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0]]), 1)
    assert loss.item() == pytest.approx(16.05)
    assert said["error"].item() == 16.0 and said["l0"].item() == 1.0
    # (2 - 3)^2 and (0 - 3)^2, two entries
    assert said["unfaithfulness"].item() == 5.0
    parts = [by_hand(), by_hand()]
    raws = [torch.tensor([[0.5], [0.1]]), torch.tensor([[1.0], [1.0]])]
    # fidelity 2, plus .1 * (mean .3 + mean 1); squared errors 10 and 10 over four entries
    loss, said = total_loss(torch.tensor(2.0), raws, parts, 1)
    assert loss.item() == pytest.approx(2.13)
    assert said["l0"].item() == 2.0
    assert unfaithfulness(parts).item() == 5.0


def test_scalar_importance_sees_one_inner_activation():
    network = ScalarMlp(6, 2, 1)  # six inputs; a component's network sees one number
    with torch.no_grad():
        network.w1.copy_(torch.tensor([[[2.0], [0.0]]]))
        network.b1.copy_(torch.tensor([[0.0], [1.0]]))
        network.w2.copy_(torch.tensor([[3.0], [10.0]]))
        network.b2.copy_(torch.tensor([0.5, 0.0]))
    # exact GELU: 2 * 3 -> 6 (to 1e-8), times 3, plus .5; gelu(1) = .8413447, times 10, whatever is read
    raw = network(torch.tensor([[[3.0, -7.0]], [[3.0, 9.0]]]))
    assert raw.shape == (2, 1, 2)
    torch.testing.assert_close(raw, torch.tensor([18.5, 8.413447]).expand(2, 1, 2), rtol=1e-5, atol=0)
    vpd = drawn(Vpd(6, 4, VpdSpec(width=8, hidden=3, importance="scalar_mlp")))
    vpd.stand_for(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.zeros(4))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    read = x @ vpd.W_enc
    torch.testing.assert_close(vpd.encode(x), vpd.importance(read).clamp(0, 1) * read)
    torch.testing.assert_close(vpd.masked(x)[1], vpd.importance(read))


def test_an_importance_network_computed_in_parts_gives_the_same_gradients(monkeypatch):
    network, x = drawn(VectorMlp(3, 4, 5)), torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0))

    def gradients():
        out = network(x)
        return out, torch.autograd.grad(out.square().sum(), list(network.parameters()))

    whole = gradients()
    monkeypatch.setattr(VectorMlp, "AT_ONCE", 4 * 5 * 3)
    torch.testing.assert_close(gradients(), whole)
    # one component by hand: gelu(x W1_c + b1_c) . w2_c + b2_c
    c = 2
    inner = torch.nn.functional.gelu(x @ network.w1[:, c] + network.b1[c])
    torch.testing.assert_close(network(x)[..., c], inner @ network.w2[c] + network.b2[c])


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


@pytest.mark.parametrize(("method", "site"), [("vpd_recon", "blocks.0.mlp"), ("vpd_kl", SITE)])
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
