"""The optimizer: AdamW on the values of all supports, with the paper's normalisation of gradients.

1. The gradient of the mean loss, on the support only, summed over processes, arrives as one vector per factor.
2. With `normalize_gradients`: where their root mean square r over all entries of all factors exceeds 1e-8, divide by
   r + 1e-5 (method.md §3 and §5.3).
3. AdamW with the step's learning rate, per factor times its scale; then no value is zero (values.py).
"""

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from swd_lens.train.finetune.spec import FinetuneSpec
from swd_lens.train.finetune.values import Support

_SMALLEST_RMS = 1e-8
_ADDED_TO_RMS = 1e-5


class Optimizer:
    """Args: supports: factor name -> what to train; steps: how many there will be."""

    def __init__(self, supports: Mapping[str, Support], spec: FinetuneSpec, steps: int):
        self.supports, self.spec, self.steps = dict(supports), spec, steps
        self.scales = [_rms([s.values.detach()]) if spec.relative else 1.0 for s in supports.values()]
        # One plain loop over tensors: the fused and batched versions add up in other orders on other machines.
        self._adam: Any = torch.optim.AdamW(
            [{"params": [s.values]} for s in supports.values()],
            lr=0.0,
            betas=(spec.beta1, spec.beta2),
            eps=spec.eps,
            weight_decay=spec.weight_decay,
            foreach=False,
        )

    @property
    def values(self) -> list[Tensor]:
        return [support.values for support in self.supports.values()]

    def step(self, number: int, gradients: list[Tensor]) -> float:
        """Step `number`, counted from 1; returns the gradients' root mean square before normalisation."""
        rms = _rms(gradients)
        if self.spec.normalize_gradients and rms > _SMALLEST_RMS:
            gradients = [gradient / (rms + _ADDED_TO_RMS) for gradient in gradients]
        rate = self.spec.rate(number, self.steps)
        for group, gradient, scale in zip(self._adam.param_groups, gradients, self.scales, strict=True):
            group["params"][0].grad = gradient
            group["lr"] = rate * scale
        self._adam.step()
        for support in self.supports.values():
            support.values.grad = None
            support.keep_nonzero()
        return rms

    def state(self) -> dict[str, Tensor]:
        """Values and both moments of every factor, by name."""
        named = {}
        for name, support in self.supports.items():
            moments = self._adam.state[support.values]
            named[f"{name}.values"] = support.values.detach()
            named[f"{name}.first"], named[f"{name}.second"] = moments["exp_avg"], moments["exp_avg_sq"]
        return named

    @torch.no_grad()
    def load(self, named: Mapping[str, Tensor], step: int, scales: list[float]) -> None:
        """Go on from a `state()` after this many steps, with the scales of the values that training began with."""
        self.scales = scales
        for name, support in self.supports.items():
            values = support.values
            values.copy_(named[f"{name}.values"])
            first, second = (named[f"{name}.{which}"].to(values.device) for which in ("first", "second"))
            self._adam.state[values] = {"step": torch.tensor(float(step)), "exp_avg": first, "exp_avg_sq": second}


def _rms(tensors: list[Tensor]) -> float:
    """Root mean square over all entries, summed in float64."""
    total = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(total / sum(t.numel() for t in tensors))
