"""VPD: W as a sum of rank-one components V[:, c] U[c], of which each input uses few (method.md §1).

1. Start: V ~ N(0, 1/d_in), U ~ N(0, 1/C); then `faithfulness_steps` of AdamW on ||W - VU||^2, without data.
2. VPD-Recon-CI: output under the importance mask g; loss = mean squared error + minimality.
3. VPD-KL: masks m = g + (1 - g) u with u uniform, what V U lacks of W as a component with a mask of its own; loss = KL of the
   host's logits + minimality (+ faithfulness).
4. Units: z_c = g_c(x) (x V)_c, so that the forward without stochastic masks is the sum of z_c U_c plus the bias.

Minimality of a batch: sum over components of [mean + beta mean log2(1 + sum)] of (g_upper + 1e-12)^p over tokens; p falls from
p_start to p_end along a line.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.baselines.learned.importance import importance_network, lower_leaky, upper_leaky
from swd_lens.baselines.learned.spec import VpdSpec

_EPS = 1e-12


class Vpd(nn.Module):
    """Components of one matrix: W_enc = V (d_in, unit), W_dec = U (unit, d_out), and the network of their importance.

    `weight` (d_in, d_out) and `bias` are the frozen matrix it stands for.
    """

    weight: Tensor
    bias: Tensor

    def __init__(self, weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"], spec: VpdSpec):
        super().__init__()
        self.spec = spec
        d_in, d_out = weight.shape
        generator = torch.Generator().manual_seed(spec.seed)
        self.W_enc = nn.Parameter(torch.randn(d_in, spec.width, generator=generator) / math.sqrt(d_in))
        self.W_dec = nn.Parameter(torch.randn(spec.width, d_out, generator=generator) / math.sqrt(spec.width))
        self.importance = importance_network(spec.importance, d_in, spec.width, spec.hidden, generator)
        self.register_buffer("weight", weight.detach().float())
        self.register_buffer("bias", bias.detach().float())

    # ------------------------------------------------------------------ units

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z = g(x) (x V)."""
        return lower_leaky(self.importance(x)) * (x @ self.W_enc)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.bias

    # ------------------------------------------------------------------ training

    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        """Steps towards VU = W before the first token; neither x nor y is looked at."""
        spec = self.spec
        adam = torch.optim.AdamW(
            [self.W_enc, self.W_dec],
            lr=spec.faithfulness_rate,
            weight_decay=spec.faithfulness_decay,
            foreach=False,
        )
        for _ in range(spec.faithfulness_steps):
            adam.zero_grad()
            self.unfaithfulness().backward()
            adam.step()
        adam.zero_grad()

    def unfaithfulness(self) -> Float[Tensor, ""]:
        """||W - VU||^2 over the number of entries."""
        return (self.weight - self.W_enc @ self.W_dec).square().mean()

    def loss(
        self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """The local loss of a batch (VPD-Recon-CI) and what to log of it."""
        raw = self.importance(x)
        g = lower_leaky(raw)
        error = (self.decode(g * (x @ self.W_enc)) - y).square().mean()
        return self.total(error, raw, g, step)

    def total(self, error: Tensor, raw: Tensor, g: Tensor, step: int) -> tuple[Tensor, dict[str, float]]:
        spec = self.spec
        charge = minimality(upper_leaky(raw), spec.p(step), spec.beta)
        total = spec.fidelity_weight * error + spec.minimality * charge
        if spec.faithfulness:
            total = total + spec.faithfulness * self.unfaithfulness()
        with torch.no_grad():
            said = {
                "error": float(error),
                "minimality": float(charge),
                "l0": float((g > 0).float().sum(-1).mean()),
                "unfaithfulness": float(self.unfaithfulness()),
                "p": spec.p(step),
            }
        return total, said

    def before_step(self) -> None: ...

    def adjust_gradients(self) -> None: ...


def minimality(upper: Float[Tensor, "token unit"], p: float | int, beta: float | int) -> Float[Tensor, ""]:
    """sum_c [mean_t + beta mean_t log2(1 + sum_t)] of (upper + 1e-12)^p (method.md §1.5)."""
    powered = (upper + _EPS) ** p
    mean = powered.mean(0)
    return (mean + beta * mean * torch.log2(1 + powered.sum(0))).sum()
