"""Losses of the learned baselines on tensors made by hand; the arithmetic stands beside them."""

import pytest
import torch

from swd_lens.train.baselines.spec import (
    TRANSCODERS,
    VPD_KLS,
    VPD_RECONS,
    TrainError,
    TranscoderSpec,
    VpdSpec,
    recipe,
)
from swd_lens.train.baselines.transcoders import Transcoder, reconstruction_loss
from swd_lens.train.baselines.vpd import (
    VectorMlp,
    Vpd,
    lower_leaky,
    minimality,
    total_loss,
    unfaithfulness,
    upper_leaky,
)


def drawn(coder, seed=0):
    coder.draw(torch.Generator().manual_seed(seed))
    return coder


def test_reconstruction_loss():
    got, wanted = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[4.0, 2.0], [0.0, 2.0]])
    # squared errors 9, 0 and 0, 4: mean 13 / 4
    assert float(reconstruction_loss(got, wanted, "mse")) == pytest.approx(3.25)
    # over the targets' norms sqrt(20) and 2: (9 / sqrt(20) + 4 / 2) / 4
    assert float(reconstruction_loss(got, wanted, "normed")) == pytest.approx((9 / 20**0.5 + 2) / 4)


def test_transcoder_loss_by_hand():
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


def test_leaky_hard():
    raw = torch.tensor([-1.0, -1.0, 0.5, 2.0], requires_grad=True)
    assert lower_leaky(raw).tolist() == [0.0, 0.0, 0.5, 1.0]
    # gradient 1 lowers r under descent: blocked below zero; -1 raises it: a hundredth passes
    (gradient,) = torch.autograd.grad(lower_leaky(raw), raw, torch.tensor([1.0, -1.0, 1.0, 1.0]))
    assert gradient.tolist() == pytest.approx([0.0, -0.01, 1.0, 0.0])
    (gradient,) = torch.autograd.grad(upper_leaky(raw).sum(), raw)
    assert upper_leaky(raw).tolist() == pytest.approx([0.0, 0.0, 0.5, 1.01])
    assert gradient.tolist() == pytest.approx([0.0, 0.0, 1.0, 0.01])


def test_minimality_by_hand():
    upper = torch.tensor([[1.0, 0.0], [0.25, 0.0]])
    # p = 0.5: column 0 is 1 and .5: mean .75; column 1 is 1e-6 twice
    assert float(minimality(upper, 0.5, 0.0)) == pytest.approx(0.75 + 1e-6, abs=1e-7)
    # beta = 2: + 2 * .75 * log2(1 + 1.5)
    expected = 0.75 + 2 * 0.75 * 1.3219281
    assert float(minimality(upper, 0.5, 2.0)) == pytest.approx(expected, abs=1e-5)


def test_vpd_units_sum_to_its_output():
    vpd = drawn(Vpd(6, 4, VpdSpec(width=8, hidden=3)))
    bias = torch.arange(4.0)
    vpd.stand_for(torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), bias)
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    z = vpd.encode(x)
    torch.testing.assert_close(vpd.decode(z), torch.einsum("tu,uo->to", z, vpd.W_dec) + bias)
    g = lower_leaky(vpd.importance(x))
    torch.testing.assert_close(z, g * (x @ vpd.W_enc))
    assert 0 < float((g > 0).float().mean()) < 1


def by_hand():
    """W = (2, 0), one component V = (1, 1), U = 3, bias 1; importance r = 0.5 x0."""
    vpd = drawn(Vpd(2, 1, VpdSpec(width=1, importance="shared_mlp", hidden=1, minimality=0.1, p_start=1.0, p_end=1.0)))
    with torch.no_grad():
        vpd.W_enc.copy_(torch.tensor([[1.0], [1.0]]))
        vpd.W_dec.copy_(torch.tensor([[3.0]]))
    vpd.stand_for(torch.tensor([[2.0], [0.0]]), torch.tensor([1.0]))
    vpd.importance.forward = lambda x: 0.5 * x[..., :1]  # pyright: ignore[reportAttributeAccessIssue]
    return vpd


def test_vpd_masks_by_hand():
    vpd, x = by_hand(), torch.tensor([[1.0, 3.0]])
    # x V = 4, g = .5: 4 * .5 * 3 + 1 = 7
    y, raw = vpd.masked(x)
    assert (y.item(), raw.item()) == (7.0, 0.5)
    # u = .5: m = .5 + .5 * .5 = .75, 4 * .75 * 3 + 1 = 10; W - VU = (-1, -3), x (W - VU) = -10, a quarter of it: 7.5
    y, _ = vpd.masked(x, torch.tensor([[0.5, 0.25]]))
    assert y.item() == 7.5
    # both sources 1: nothing is masked, and the dense output 2 * 1 + 1 comes back
    y, _ = vpd.masked(x, torch.ones(1, 2))
    assert y.item() == 3.0


def test_vpd_recon_loss_by_hand():
    vpd = by_hand()
    # (7 - 3)^2 + .1 * mean_t g_upper = 16 + .1 * .5
    loss, said = vpd.loss(torch.tensor([[1.0, 3.0]]), torch.tensor([[3.0]]), 1)
    assert loss.item() == pytest.approx(16.05)
    assert said["error"].item() == 16.0 and said["l0"].item() == 1.0
    # (2 - 3)^2 and (0 - 3)^2, two entries
    assert said["unfaithfulness"].item() == 5.0


def test_terms_of_several_matrices():
    parts = [by_hand(), by_hand()]
    raws = [torch.tensor([[0.5], [0.1]]), torch.tensor([[1.0], [1.0]])]
    # fidelity 2, plus .1 * (mean .3 + mean 1); squared errors 10 and 10 over four entries
    loss, said = total_loss(torch.tensor(2.0), raws, parts, 1)
    assert loss.item() == pytest.approx(2.13)
    assert said["l0"].item() == 2.0
    assert unfaithfulness(parts).item() == 5.0


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


def test_schedules():
    spec = VpdSpec(n_tokens=4096 * 101)
    assert spec.steps == 101 and spec.warmup() == 1
    assert spec.p(1) == 2.0 and spec.p(101) == pytest.approx(0.3) and spec.p(51) == pytest.approx(1.15)
    assert spec.rate(1) == pytest.approx(3e-4) and spec.rate(101) == pytest.approx(3e-5)
    assert TranscoderSpec().steps == 500 and TranscoderSpec().warmup() == 25
    assert TranscoderSpec().rate(1) == pytest.approx(4e-4 / 25)


def test_the_papers_recipes():
    # token counts of method.md §0.6, in steps of 4,096; widths and penalties of the paper's appendix
    tc3k, tc24k = (recipe(TRANSCODERS, "paper", kind) for kind in ("mlp_out", "mlp"))
    assert (tc3k.steps, tc3k.units(3072, 768), tc3k.l1, tc3k.seed) == (500, 3072, 5e-5, 42)
    assert (tc24k.steps, tc24k.units(768, 768), tc24k.l1, tc24k.seed) == (1536, 24_576, 1.4e-4, 42)
    assert TRANSCODERS["paper_tc12k"].units(3072, 768) == 12_288
    recon, kl = VPD_RECONS["paper"], VPD_KLS["paper"]
    assert (recon.steps, recon.width, recon.hidden, recon.minimality, recon.seed) == (1024, 3072, 128, 1e-4, 0)
    assert (kl.steps, kl.width, kl.fidelity) == (400_000, 3072, "kl")
    assert VPD_KLS["spd_gpt2"].steps == 50_000
    # multiples are of the larger side: as wide as the paper's at GPT-2's shapes
    assert TranscoderSpec(width="1x").units(768, 3072) == 3072 and TranscoderSpec(width="32x").units(768, 768) == 24_576


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: TranscoderSpec().changed({"widht": 3}), r"did you mean width\?"),
        (lambda: TranscoderSpec(width="3"), 'or "4x" for four times'),
        (lambda: TranscoderSpec(loss="huber"), "loss='huber': choose one of 'mse', 'normed'"),
        (lambda: TranscoderSpec(n_tokens=0), "n_tokens=0: give a whole number of at least 1"),
        (lambda: VpdSpec(p_end=0), "p_end=0: give a finite number above 0"),
        (lambda: VpdSpec(beta1=1.0), "beta1=1.0: give a finite number of at least 0 and below 1"),
        (lambda: recipe(TRANSCODERS, "papr", "mlp"), "no preset 'papr'; did you mean paper"),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(TrainError, match=says):
        make()
