"""Losses of the learned baselines on tensors made by hand; the arithmetic stands beside them."""

import pytest
import torch

from swd_lens.baselines.learned.importance import lower_leaky, upper_leaky
from swd_lens.baselines.learned.spec import TrainError, TranscoderSpec, VpdSpec, resolve
from swd_lens.baselines.learned.transcoder import Transcoder, reconstruction_loss
from swd_lens.baselines.learned.vpd import Vpd, minimality


def test_reconstruction_loss():
    got, wanted = torch.tensor([[1.0, 2.0], [0.0, 0.0]]), torch.tensor([[4.0, 2.0], [0.0, 2.0]])
    # squared errors 9, 0 and 0, 4: mean 13 / 4
    assert float(reconstruction_loss(got, wanted, "mse")) == pytest.approx(3.25)
    # over the targets' norms sqrt(20) and 2: (9 / sqrt(20) + 4 / 2) / 4
    assert float(reconstruction_loss(got, wanted, "normed")) == pytest.approx((9 / 20**0.5 + 2) / 4)


def test_transcoder_loss_by_hand():
    coder = Transcoder(2, 1, TranscoderSpec(width=2, l1=0.5, loss="mse"))
    with torch.no_grad():
        coder.W_enc.copy_(torch.tensor([[1.0, -1.0], [0.0, 2.0]]))
        coder.W_dec.copy_(torch.tensor([[2.0], [1.0]]))
        coder.b_enc.copy_(torch.tensor([0.0, 1.0]))
        coder.b_dec.copy_(torch.tensor([1.0, 0.0]))
        coder.b_out.copy_(torch.tensor([0.5]))
    # x - b_dec = (2, -1); pre-activations 2 and -2 - 2 + 1 = -3: z = (2, 0); y = 2 * 2 + 0.5 = 4.5
    x, y = torch.tensor([[3.0, -1.0]]), torch.tensor([[4.0]])
    loss, said = coder.loss(x, y, 1)
    assert float(loss) == pytest.approx(0.25 + 0.5 * 2)
    assert said["l0"] == 1.0 and said["l1"] == 2.0
    assert coder.silent.tolist() == [0, 1]


def test_decoder_rows_keep_norm_one_and_lose_the_gradient_along_them():
    coder = Transcoder(3, 4, TranscoderSpec(width=5))
    torch.testing.assert_close(coder.W_dec.norm(dim=1), torch.ones(5))
    coder.W_dec.grad = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    coder.adjust_gradients()
    assert float((coder.W_dec.grad * coder.W_dec).sum(1).abs().max()) < 1e-6
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
    weight, bias = torch.randn(6, 4, generator=torch.Generator().manual_seed(0)), torch.arange(4.0)
    vpd = Vpd(weight, bias, VpdSpec(width=8, hidden=3))
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    z = vpd.encode(x)
    torch.testing.assert_close(vpd.decode(z), torch.einsum("tu,uo->to", z, vpd.W_dec) + bias)
    g = lower_leaky(vpd.importance(x))
    torch.testing.assert_close(z, g * (x @ vpd.W_enc))
    assert 0 < float((g > 0).float().mean()) < 1


def test_schedules():
    spec = VpdSpec(n_tokens=4096 * 101)
    assert spec.steps == 101 and spec.warmup() == 1
    assert spec.p(1) == 2.0 and spec.p(101) == pytest.approx(0.3) and spec.p(51) == pytest.approx(1.15)
    assert spec.rate(1) == pytest.approx(3e-4) and spec.rate(101) == pytest.approx(3e-5)
    assert TranscoderSpec().steps == 500 and TranscoderSpec().warmup() == 25
    assert TranscoderSpec().rate(1) == pytest.approx(4e-4 / 25)
    with pytest.raises(TrainError, match="did you mean 'width'"):
        resolve(TranscoderSpec(), {"widht": 3})
