"""Fits: the losses of VPD-KL by hand."""

import math

import pytest
import torch

from swd_lens.train.rows import rows_of
from tests.train.baselines.test_methods import SITE, TOKENS, train


@pytest.mark.parametrize("masks", ["continuous", "binomial"])
def test_kl_steps_by_hand(model, masks):
    """The logged KL of the first step, before any update, is that of the host with masks drawn from seed and step."""
    units = train(model, "vpd_kl", n_tokens=50, keep=(), adversarial=0.0, learning_rate=1e-30, masks=masks)
    coder, rows = units[SITE].coder, next(rows_of(TOKENS, model).batches(5, 0, 0))
    generator = torch.Generator().manual_seed(1)  # 0 * 1,000,003 + step 1
    noise = torch.rand(5, 10, 32, generator=generator) if masks == "binomial" else None
    u = torch.rand(5, 10, 33, generator=generator)
    w, b = model.blocks[1].mlp.W_out.detach(), model.blocks[1].mlp.b_out.detach()
    with torch.no_grad():
        dense, cache = model.run_with_cache(rows)
        x = cache["blocks.1.mlp.hook_post"]
        if noise is None:
            g = coder.importance(x).clamp(0, 1)
            m = g + (1 - g) * u[..., :-1]
        else:
            g = (1.05 * coder.importance(x) - 0.05 * noise).clamp(0, 1)
            m = torch.where(u[..., :-1] > 0.5, 1.0, g)  # u = 1: the mask is 1; u = 0: it is g
        y = (m * (x @ coder.W_enc)) @ coder.W_dec + b + u[..., -1:] * (x @ (w - coder.W_enc @ coder.W_dec))
        masked = model.run_with_hooks(rows, fwd_hooks=[("blocks.1.hook_mlp_out", lambda out, hook: y)])
    log_p, log_q = dense.log_softmax(-1), masked.log_softmax(-1)
    kl = float((log_p.exp() * (log_p - log_q)).sum(-1).mean())
    assert kl > 0 and math.isclose(units.log["error"].iloc[0], kl, rel_tol=1e-4)


def test_worst_masks_are_worse(model):
    """Adversarial masks have a larger KL than the random ones that they start from."""
    log = train(model, "vpd_kl", adversarial_steps=6, n_tokens=350).log
    assert (log["adversarial"] > log["error"]).all()
    wide = train(model, "vpd_kl", adversarial_scope="batch", n_tokens=100).log
    assert (wide["adversarial"] > 0).all()
