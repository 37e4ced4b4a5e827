"""Transcoders on tensors made by hand: losses, ghost gradients, the start; the arithmetic stands beside them."""

import pytest
import torch

from swd_lens.train.baselines.coders import Transcoder, geometric_median, ghost_loss, reconstruction_loss
from swd_lens.train.baselines.spec import TranscoderSpec


def drawn(coder, seed=0):
    coder.draw(torch.Generator().manual_seed(seed))
    return coder


def test_losses_by_hand():
    got, wanted = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[4.0, 2.0], [0.0, 2.0]])
    # squared errors 9, 0 and 0, 4: mean 13 / 4
    assert float(reconstruction_loss(got, wanted, "mse")) == pytest.approx(3.25)
    # over the targets' norms sqrt(20) and 2: (9 / sqrt(20) + 4 / 2) / 4
    assert float(reconstruction_loss(got, wanted, "normed")) == pytest.approx((9 / 20**0.5 + 2) / 4)
    coder = drawn(Transcoder(2, 1, TranscoderSpec(width=2, l1=0.5, loss="mse")))
    with torch.no_grad():
        coder.W_enc.copy_(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
        coder.W_dec.copy_(torch.tensor([[2.0], [1.0]]))
        coder.b_enc.copy_(torch.tensor([0.0, 1.0]))
        coder.b_dec.copy_(torch.tensor([1.0, 0.0]))
        coder.b_out.copy_(torch.tensor([0.5]))
    # x - b_dec = (2, -1); pre-activations 2 and -2 - 2 + 1 = -3: z = (2, 0); y = 2 * 2 + 0.5 = 4.5
    x, y = torch.tensor([[3.0, -1.0]]), torch.tensor([[4.0]])
    loss, said = coder.loss(x, y, 1)
    assert float(loss.detach()) == pytest.approx(0.25 + 0.5 * 2)
    assert said["l0"] == 1.0 and said["l1"] == 2.0
    assert coder.silent.tolist() == [0, 1]


def test_decoder_rows_keep_norm_one_and_lose_the_gradient_along_them():
    coder = drawn(Transcoder(3, 4, TranscoderSpec(width=5)))
    torch.testing.assert_close(coder.W_dec.norm(dim=1), torch.ones(5))
    coder.W_dec.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    coder.adjust_gradients()
    assert float((coder.W_dec.grad * coder.W_dec.detach()).sum(1).abs().max()) < 1e-6
    assert float(coder.W_dec.grad.abs().max()) > 0.1


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
    # Features that fire have none.
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


def test_geometric_median_by_hand_and_the_start_of_a_transcoder():
    # The corners (-1, 0), (1, 0), (0, 6) are seen under 120 degrees each from (0, 1 / sqrt(3)); their mean is (0, 2).
    corners = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 6.0]])
    assert geometric_median(corners).tolist() == pytest.approx([0.0, 3**-0.5], abs=1e-3)
    # On a line it is the middle one, however far the last is; a token itself, at no distance.
    assert geometric_median(torch.tensor([[0.0], [1.0], [1000.0]])).tolist() == pytest.approx([1.0], abs=0.05)
    assert geometric_median(torch.full((4, 2), 3.0)).tolist() == [3.0, 3.0]
    x = torch.tensor([[-1.0, 0.0], [1.0, 0.0], [0.0, 6.0]])
    y = torch.cat([x, torch.ones(3, 1)], 1)
    for start, height in (("mean", 2.0), ("median", 3**-0.5)):
        coder = drawn(Transcoder(2, 3, TranscoderSpec(width=4, start=start)))
        coder.begin(x, y)
        assert coder.b_dec.tolist() == pytest.approx([0.0, height], abs=1e-3)
        assert coder.b_out.tolist() == pytest.approx([0.0, height, 1.0], abs=1e-3)
