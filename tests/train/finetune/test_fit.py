"""FinetuneFit: steps by hand, losses, the best values."""

from types import SimpleNamespace

import pytest
import torch

from swd_lens.train.finetune import finetune
from swd_lens.train.finetune import fit as fit_module
from swd_lens.train.finetune.fit import FinetuneFit
from swd_lens.train.finetune.mount import SMALLEST
from swd_lens.train.finetune.spec import FinetuneSpec
from tests.micro import toy_model
from tests.train.conftest import HELD, ROWS, bits, supports
from tests.train.finetune.test_run import QUICK


def test_a_value_driven_through_zero_is_still_an_edge(toy, monkeypatch):
    """Every step ends with some values exactly zero: they come back as the smallest number, and can train on."""
    model, factors = toy
    adam = torch.optim.AdamW.step

    def zeroing(self, *args, **kwargs):
        result = adam(self, *args, **kwargs)
        with torch.no_grad():
            for group in self.param_groups:
                group["params"][0][::3] = 0.0
        return result

    monkeypatch.setattr(torch.optim.AdamW, "step", zeroing)
    tuned = finetune(model, factors, ROWS, **QUICK)
    assert supports(tuned) == supports(factors)
    assert all(bool((f.read.abs() == SMALLEST).any()) for f in tuned.values())


def test_three_steps_of_the_paper_by_hand(toy):
    """Dense factors with masks, PyTorch's own AdamW nowhere: the arithmetic of method.md §5.3 written out."""
    model, factors = toy
    site, lr, wd, eps, b1, b2 = "blocks.1.mlp_out", 5e-3, 1e-3, 0.1, 0.9, 0.95
    f, rows = factors[site], ROWS[:4]
    how = {"preset": "paper", "batch_size": 4, "steps": 3, "learning_rate": lr, "autocast": None, "progress": False}
    tuned = finetune(model, {site: f}, rows, **how)
    theta = [f.read.double(), f.write.double()]
    masks = [t != 0 for t in theta]
    first, second = [torch.zeros_like(t) for t in theta], [torch.zeros_like(t) for t in theta]
    exact = toy_model().double()

    def loss_of(read, write):
        def put(h, hook):
            return hook.z @ read @ write + exact.blocks[1].mlp.b_out

        def keep(h, hook):
            exact.hook_dict["blocks.1.hook_mlp_out"].z = h

        hooks = [("blocks.1.mlp.hook_post", keep), ("blocks.1.hook_mlp_out", put)]
        log_q = exact.run_with_hooks(rows, fwd_hooks=hooks)[:, :-1].log_softmax(-1)
        return -log_q.gather(-1, rows[:, 1:, None]).mean()

    for step, rate in ((1, lr), (2, lr), (3, lr / 2)):  # one step of warm-up (1 % of 3, at least 1), then 2/2, 1/2
        leaves = [t.clone().requires_grad_() for t in theta]
        grads = [g * mask for g, mask in zip(torch.autograd.grad(loss_of(*leaves), leaves), masks, strict=True)]
        rms = (sum(g.square().sum() for g in grads) / sum(int(mask.sum()) for mask in masks)).sqrt()
        for i, g in enumerate(grads):
            g = g / rms
            first[i] = b1 * first[i] + (1 - b1) * g
            second[i] = b2 * second[i] + (1 - b2) * g * g
            m, v = first[i] / (1 - b1**step), second[i] / (1 - b2**step)
            theta[i] = theta[i] * (1 - rate * wd) - rate * m / (v.sqrt() + eps)
    assert float((theta[0] - f.read).abs().max()) > 1e-3
    torch.testing.assert_close(tuned[site].read.double(), theta[0], rtol=0, atol=2e-6)
    torch.testing.assert_close(tuned[site].write.double(), theta[1], rtol=0, atol=2e-6)


def test_a_sum_of_losses_trains_under_autocast(toy):
    (model, factors), loss, autocast = toy, "ce+kl", "float16"
    tuned = finetune(model, factors, ROWS, heldout=HELD, loss=loss, autocast=autocast, **QUICK)
    exact = finetune(model, factors, ROWS, heldout=HELD, loss=loss, **QUICK)
    a, b = (x.provenance["finetune"]["after"] for x in (tuned, exact))
    assert a["kl"] == pytest.approx(b["kl"], rel=0.05) and a["ce"] == pytest.approx(b["ce"], rel=0.01)


def test_keep_best_keeps_the_values_of_the_lowest_held_out_loss_of_the_recipe(toy):
    model, factors = toy
    wild = {**QUICK, "learning_rate": 0.3, "heldout": HELD, "eval_every": 1}  # gets worse and worse
    best, last = (finetune(model, factors, ROWS, loss="kl", keep=keep, **wild) for keep in ("best", "last"))
    assert bits(best) == bits(factors)  # those before the first step
    assert last.provenance["finetune"]["after"]["kl"] > best.provenance["finetune"]["after"]["kl"]
    measured = fit_module.Heldout(ce_dense=1.0, ce=2.0, kl=0.5)
    for loss, expected in (("ce", 2.0), ("kl", 0.5), ("ce+kl", 2.0 + 0.3 * 0.5)):
        spec = FinetuneSpec(loss=loss, kl_weight=0.3)
        assert FinetuneFit._loss(SimpleNamespace(spec=spec), measured) == pytest.approx(expected)
