"""Causal importance: how much each component matters for an input, a number per component and token in [0, 1].

1. A network maps the projection's input x to one raw number r per component (method.md §1.3).
2. Two squashings of the same r (leaky-hard, §1.4): `lower_leaky` is the mask, `upper_leaky` is what minimality charges.
   Where masks are binomial, the mask's r is `jittered` first.

Both are clamps to [0, 1]. They differ in what they let through where they clamp, so that no component is stuck: the mask of a
component that is off can be raised by its own gradient, and the charge of one that is above 1 still falls.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

_LEAK = 0.01
_JITTER = 0.05


class _LowerLeaky(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, raw: Tensor) -> Tensor:
        ctx.save_for_backward(raw)
        return raw.clamp(0.0, 1.0)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        (raw,) = ctx.saved_tensors
        gradient = gradients[0]
        # Below zero only what would raise the mask (a negative gradient, as descent subtracts it), and a hundredth of it.
        below = torch.where(gradient < 0, _LEAK * gradient, torch.zeros_like(gradient))
        inside = torch.where(raw <= 1, gradient, torch.zeros_like(gradient))
        return torch.where(raw > 0, inside, below)


def lower_leaky(raw: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """clamp(r, 0, 1); its gradient is 1 on (0, 1], 0 above, and below 0 a hundredth of what would raise r."""
    return _LowerLeaky.apply(raw)  # pyright: ignore[reportReturnType]


def upper_leaky(raw: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """0 below 0, r on [0, 1], 1 + (r - 1) / 100 above."""
    return torch.where(raw > 1, 1 + _LEAK * (raw - 1), raw.clamp_min(0.0))


def jittered(raw: Float[Tensor, "*shape"], noise: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """1.05 r - 0.05 noise, noise in [0, 1]: what `lower_leaky` gets where masks are binomial, so that r cannot rest at an end."""
    return (1 + _JITTER) * raw - _JITTER * noise


class VectorMlp(nn.Module):
    """One MLP per component on the whole input: d_in -> hidden -> 1, exact GELU; C d_in hidden parameters.

    Its inner activations are C hidden numbers per token (12 GB at GPT-2's c_proj with 4,096 tokens): beyond `AT_ONCE` numbers
    they are made for a part of the tokens at a time, and again for the gradient.
    """

    AT_ONCE = 2**28

    def __init__(self, d_in: int, width: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(d_in, width, hidden))
        self.b1 = nn.Parameter(torch.empty(width, hidden))
        self.w2 = nn.Parameter(torch.empty(width, hidden))
        self.b2 = nn.Parameter(torch.empty(width))

    def draw(self, generator: torch.Generator) -> None:
        """The random start: Kaiming normal, biases 0 (method.md §1.3)."""
        _draw(self, generator, self.w1.shape[0], self.w2.shape[1])

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        flat = x.reshape(-1, x.shape[-1])
        tokens = max(1, self.AT_ONCE // self.b1.numel())
        if len(flat) <= tokens:
            found = self._some(flat)
        else:
            found = torch.cat([checkpoint(self._some, part, use_reentrant=False) for part in flat.split(tokens)])
        return found.reshape(*x.shape[:-1], -1)

    def _some(self, x: Float[Tensor, "token d_in"]) -> Float[Tensor, "token unit"]:
        inner = (x @ self.w1.flatten(1)).unflatten(-1, tuple(self.b1.shape)) + self.b1
        return (nn.functional.gelu(inner) * self.w2).sum(-1) + self.b2


class SharedMlp(nn.Module):
    """One MLP for all components: d_in -> hidden -> C, exact GELU."""

    def __init__(self, d_in: int, width: int, hidden: int):
        super().__init__()
        self.w1 = nn.Parameter(torch.empty(d_in, hidden))
        self.b1 = nn.Parameter(torch.empty(hidden))
        self.w2 = nn.Parameter(torch.empty(hidden, width))
        self.b2 = nn.Parameter(torch.empty(width))

    def draw(self, generator: torch.Generator) -> None:
        """The random start: Kaiming normal, biases 0 (method.md §1.3)."""
        _draw(self, generator, *self.w1.shape)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        return nn.functional.gelu(x @ self.w1 + self.b1) @ self.w2 + self.b2


def importance_network(kind: str, d_in: int, width: int, hidden: int) -> VectorMlp | SharedMlp:
    """The network of this kind, "vector_mlp" or "shared_mlp"; its parameters are not drawn yet."""
    return {"vector_mlp": VectorMlp, "shared_mlp": SharedMlp}[kind](d_in, width, hidden)


@torch.no_grad()
def _draw(network: VectorMlp | SharedMlp, generator: torch.Generator, d_in: int, hidden: int) -> None:
    network.w1.copy_(torch.randn(network.w1.shape, generator=generator) * math.sqrt(2 / d_in))
    network.w2.copy_(torch.randn(network.w2.shape, generator=generator) * math.sqrt(1 / hidden))
    network.b1.zero_()
    network.b2.zero_()
