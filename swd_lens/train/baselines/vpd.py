"""VPD: W as a sum of rank-one components V[:, c] U[c], of which each input uses few (method.md §1).

1. Start: V ~ N(0, 1/d_in), U ~ N(0, 1/C); then `faithfulness_steps` of AdamW on ||W - VU||^2, without data.
2. VPD-Recon-CI: output under the importance mask g; loss = mean squared error + minimality.
3. VPD-KL: masks m = g + (1 - g) u with u drawn (masks.py), what V U lacks of W as a component with a mask of its own; loss = KL
   of the host's logits + minimality (+ KL under masks that an adversary finds) (+ faithfulness).
4. Units: z_c = g_c(x) (x V)_c, so that the forward without stochastic masks is the sum of z_c U_c plus the bias.

Causal importance says how much each component matters for an input, a number per component and token in [0, 1]: a network maps
the projection's input x to one raw number r per component (method.md §1.3; `ScalarMlp` is given x V, a number per component, in
place of x), and r is squashed twice (leaky-hard, §1.4):
`lower_leaky` is the mask g, `upper_leaky` is what minimality charges. Where masks are binomial, the mask's r is `jittered` first.
Both are clamps to [0, 1]. They differ in what they let through where they clamp, so that no component is stuck: the mask of a
component that is off can be raised by its own gradient, and the charge of one that is above 1 still falls.

Minimality of a batch: sum over components of [mean + beta mean log2(1 + sum)] of (g_upper + 1e-12)^p over tokens; p falls from
p_start to p_end along a line. With reduction="mean" it is the mean over components.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from swd_lens.train.baselines.coders import Coder
from swd_lens.train.baselines.spec import VpdSpec
from swd_lens.train.engine import Logged

_EPS = 1e-12
_LEAK = 0.01
_JITTER = 0.05


class Vpd(Coder):
    """Components of one matrix: W_enc = V (d_in, unit), W_dec = U (unit, d_out), and the network of their importance.

    `weight` (d_in, d_out) is the frozen matrix that they stand for; only training needs it, and files do not hold it.
    """

    weight: Tensor | None
    bias: Tensor

    def __init__(self, d_in: int, d_out: int, spec: VpdSpec):
        super().__init__(d_in, d_out, spec)
        self.importance = IMPORTANCE_NETWORKS[spec.importance](d_in, self.W_enc.shape[1], spec.hidden)
        self.register_buffer("bias", torch.zeros(d_out, dtype=torch.float32))
        self.register_buffer("weight", None, persistent=False)

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.W_enc.copy_(torch.randn(self.W_enc.shape, generator=generator, dtype=torch.float32) / math.sqrt(self.W_enc.shape[0]))
        self.W_dec.copy_(torch.randn(self.W_dec.shape, generator=generator, dtype=torch.float32) / math.sqrt(self.W_dec.shape[0]))
        self.importance.draw(generator)

    def stand_for(self, weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"]) -> None:
        self.weight, self.bias = weight.detach().float(), bias.detach().float()  # the bias is kept as it is

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z = g(x) (x V). The plain clamp: the leak below zero is for training, it is no gradient of this function."""
        read = x @ self.W_enc
        return self.raw(x, read).clamp(0.0, 1.0) * read

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.bias

    def raw(self, x: Float[Tensor, "*batch d_in"], read: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        """Importances before they are squashed, from the input x and read = x V."""
        return self.importance(read if self.spec.importance == "scalar_mlp" else x)

    def masked(
        self,
        x: Float[Tensor, "*batch d_in"],
        sources: Float[Tensor, "*_some _sources"] | None = None,
        noise: Float[Tensor, "*batch unit"] | None = None,
    ) -> tuple[Float[Tensor, "*batch d_out"], Float[Tensor, "*batch unit"]]:
        """The output under masks, and the raw importances.

        Args:
            x: the site's input.
            sources: in [0, 1], one per component and a last one for what VU lacks of W (delta=False: not looked at): masks
                are g + (1 - g) sources. They broadcast over the batch. None: the masks are g, and what VU lacks is left out.
            noise: in [0, 1]; the importances that masks are made of are jittered by it. None: they are not.
        """
        read, width = x @ self.W_enc, self.W_enc.shape[1]
        raw = self.raw(x, read)
        g = lower_leaky(raw if noise is None else jittered(raw, noise))
        if sources is None:
            return self.decode(g * read), raw
        y = self.decode((g + (1 - g) * sources[..., :width]) * read)
        if self.spec.delta:
            y = y + sources[..., width:] * (x @ self.remainder())
        return y, raw

    def remainder(self) -> Float[Tensor, "d_in d_out"]:
        """W - VU, which the components lack."""
        assert self.weight is not None, "stand_for comes first"
        return self.weight - self.W_enc @ self.W_dec

    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        reconstruct([self])  # from W alone: neither x nor y is looked at

    def loss(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int) -> tuple[Tensor, Logged]:
        output, raw = self.masked(x)
        return total_loss((output - y).square().mean(), [raw], [self], step)

    def adjust_gradients(self) -> None:
        clip_components([self])  # where this matrix is trained alone


def clip_components(parts: list[Vpd]) -> None:
    """Brings the gradients of V and U, of all matrices of a run together, to a norm of spec.clip where it is larger; those of
    importance networks stay as they are (method.md §1.6, the public recipe's `vpd_pile4L`)."""
    if (most := parts[0].spec.clip) is not None:
        components = [p for part in parts for p in (part.W_enc, part.W_dec)]
        nn.utils.clip_grad_norm_(components, float(most), foreach=False)


def reconstruct(parts: list[Vpd]) -> None:
    """The faithfulness warm-up of all matrices of a run together."""
    spec = parts[0].spec
    adam = torch.optim.AdamW(
        [p for part in parts for p in (part.W_enc, part.W_dec)],
        lr=spec.faithfulness_rate,
        weight_decay=spec.faithfulness_decay,
        foreach=False,
    )
    with torch.enable_grad():
        for _ in range(spec.faithfulness_steps):
            adam.zero_grad()
            unfaithfulness(parts).backward()
            adam.step()
    adam.zero_grad()


def unfaithfulness(parts: Iterable[Vpd]) -> Float[Tensor, ""]:
    """||W - VU||^2 over the number of entries, of all matrices together."""
    errors = [part.remainder().square() for part in parts]
    total = torch.stack([error.sum() for error in errors]).sum()
    return total / sum(error.numel() for error in errors)


def total_loss(error: Tensor, raws: list[Tensor], parts: list[Vpd], step: int) -> tuple[Tensor, Logged]:
    """Fidelity (`error`, squared error or KL), minimality and faithfulness of a step, from 1, weighted, and what to log of them.
    raws: the raw importances (..., unit) of the run's matrices, in the order of `parts`."""
    spec = parts[0].spec
    flat = [raw.flatten(0, -2) for raw in raws]
    charges = [minimality(upper_leaky(raw), spec.p(step), spec.beta, spec.reduction) for raw in flat]
    charge = torch.stack(charges).sum()
    total = spec.fidelity_weight * error + spec.minimality * charge
    if spec.faithfulness:
        total = total + spec.faithfulness * unfaithfulness(parts)
    with torch.no_grad():
        logged = {
            "error": error.detach(),
            "minimality": charge.detach(),
            "l0": torch.stack([(raw > 0).float().sum(-1).mean() for raw in flat]).sum(),
            "unfaithfulness": unfaithfulness(parts),
            "p": torch.tensor(spec.p(step), dtype=torch.float64),
        }
    return total, logged


def minimality(
    upper: Float[Tensor, "token unit"], p: float | int, beta: float | int, reduction: str = "sum"
) -> Float[Tensor, ""]:
    """sum_c [mean_t + beta mean_t log2(1 + sum_t)] of (upper + 1e-12)^p (method.md §1.5); "mean": mean_c (§1.9)."""
    powered = (upper + _EPS) ** p
    mean = powered.mean(0)
    charges = mean + beta * mean * torch.log2(1 + powered.sum(0))
    return charges.mean() if reduction == "mean" else charges.sum()


# ---------------------------------------------------------------------------------------------- causal importance


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


class _Network(nn.Module):
    """Two layers with weights of these shapes, d_in and hidden being what each of their sums runs over."""

    def __init__(self, d_in: int, hidden: int, first: tuple[int, ...], second: tuple[int, ...], width: int):
        super().__init__()
        self.d_in, self.hidden = d_in, hidden
        self.w1 = nn.Parameter(torch.empty(first, dtype=torch.float32))
        self.b1 = nn.Parameter(torch.empty(first[1:], dtype=torch.float32))
        self.w2 = nn.Parameter(torch.empty(second, dtype=torch.float32))
        self.b2 = nn.Parameter(torch.empty(width, dtype=torch.float32))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """The random start: Kaiming normal, biases 0 (method.md §1.3)."""
        self.w1.copy_(torch.randn(self.w1.shape, generator=generator, dtype=torch.float32) * math.sqrt(2 / self.d_in))
        self.w2.copy_(torch.randn(self.w2.shape, generator=generator, dtype=torch.float32) * math.sqrt(1 / self.hidden))
        self.b1.zero_()
        self.b2.zero_()


class VectorMlp(_Network):
    """One MLP per component on the whole input: d_in -> hidden -> 1, exact GELU; C d_in hidden parameters.

    Its inner activations are C hidden numbers per token (12 GB at GPT-2's c_proj with 4,096 tokens): beyond `AT_ONCE` numbers
    they are made for a part of the tokens at a time, and again for the gradient.
    """

    AT_ONCE = 2**28

    def __init__(self, d_in: int, width: int, hidden: int):
        super().__init__(d_in, hidden, (d_in, width, hidden), (width, hidden), width)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        flat = x.reshape(-1, x.shape[-1])
        tokens = max(1, self.AT_ONCE // self.b1.numel())
        if len(flat) <= tokens:
            raw = self._raw(flat)
        else:
            raw = torch.cat([checkpoint(self._raw, part, use_reentrant=False) for part in flat.split(tokens)])
        return raw.reshape(*x.shape[:-1], -1)

    def _raw(self, x: Float[Tensor, "token d_in"]) -> Float[Tensor, "token unit"]:
        inner = (x @ self.w1.flatten(1)).unflatten(-1, tuple(self.b1.shape)) + self.b1
        return (nn.functional.gelu(inner) * self.w2).sum(-1) + self.b2


class SharedMlp(_Network):
    """One MLP for all components: d_in -> hidden -> C, exact GELU."""

    def __init__(self, d_in: int, width: int, hidden: int):
        super().__init__(d_in, hidden, (d_in, hidden), (hidden, width), width)

    def forward(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        return nn.functional.gelu(x @ self.w1 + self.b1) @ self.w2 + self.b2


class ScalarMlp(_Network):
    """One MLP per component on the component's own inner activation (x V)_c: 1 -> hidden -> 1, exact GELU; 3 C hidden + C
    parameters. That of the toy models of SPD (Bushnaq et al., 2025)."""

    def __init__(self, d_in: int, width: int, hidden: int):
        super().__init__(1, hidden, (1, width, hidden), (width, hidden), width)

    def forward(self, read: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        # Components first, so that each is a matrix product of its own, in place of a sum over a (batch, unit, hidden) array.
        flat = read.reshape(-1, read.shape[-1])
        inner = torch.baddbmm(self.b1[:, None], flat.T[..., None], self.w1.movedim(0, 1))
        raw = torch.bmm(nn.functional.gelu(inner), self.w2[..., None])[..., 0].T
        return (raw + self.b2).reshape(read.shape)


# By the name of the setting.
IMPORTANCE_NETWORKS = {"vector_mlp": VectorMlp, "shared_mlp": SharedMlp, "scalar_mlp": ScalarMlp}
