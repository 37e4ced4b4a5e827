"""Transcoder: f = relu((x - b_dec) W_enc + b_enc), y = f W_dec + b_out, trained on a projection's inputs and outputs.

1. Start: W_enc and W_dec Kaiming-uniform, rows of W_dec brought to norm 1; b_dec and b_out are the means of the first batch.
2. Loss per step: squared error of y, per token over the norm of the target (loss="normed") or not ("mse"), averaged over
   tokens and coordinates; plus l1 times the mean over tokens of the summed activations.
3. With unit_decoder, rows of W_dec have norm 1 before each step and gradients lose their part along them.

Units are the features after the ReLU. Ghost gradients are left out: the public recipe's take the input for the target, which
does not even broadcast where widths differ (method.md §2.1).
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.baselines.learned.spec import TranscoderSpec


class Transcoder(nn.Module):
    """An encode/decode pair with weights W_enc (d_in, unit), W_dec (unit, d_out), biases b_enc, b_dec (input), b_out."""

    def __init__(self, d_in: int, d_out: int, spec: TranscoderSpec):
        super().__init__()
        self.spec = spec
        generator = torch.Generator().manual_seed(spec.seed)
        self.W_enc = nn.Parameter(_kaiming_uniform(d_in, spec.width, generator))
        self.W_dec = nn.Parameter(nn.functional.normalize(_kaiming_uniform(spec.width, d_out, generator), dim=1))
        self.b_enc = nn.Parameter(torch.zeros(spec.width))
        self.b_dec = nn.Parameter(torch.zeros(d_in))
        self.b_out = nn.Parameter(torch.zeros(d_out))
        # Tokens since a feature was last above zero.
        self.register_buffer("silent", torch.zeros(spec.width, dtype=torch.int64))

    silent: Tensor

    @torch.no_grad()
    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        """Data-dependent start, from the first batch."""
        self.b_dec.copy_(x.mean(0))
        self.b_out.copy_(y.mean(0))

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.b_out

    def loss(
        self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int
    ) -> tuple[Tensor, dict[str, float]]:
        """The loss of a batch and what to log of it."""
        z = self.encode(x)
        error = reconstruction_loss(self.decode(z), y, self.spec.loss)
        l1 = z.sum(-1).mean()
        with torch.no_grad():
            alive = z > 0
            self.silent = torch.where(alive.any(0), 0, self.silent + len(z))
            said = {
                "error": float(error),
                "l1": float(l1),
                "l0": float(alive.sum(-1).float().mean()),
                "dead": float((self.silent >= DEAD_AFTER).float().mean()),
            }
        return error + self.spec.l1 * l1, said

    @torch.no_grad()
    def before_step(self) -> None:
        if self.spec.unit_decoder:
            self.W_dec.copy_(nn.functional.normalize(self.W_dec, dim=1))

    @torch.no_grad()
    def adjust_gradients(self) -> None:
        """Takes the part of each decoder row's gradient along the row out of it."""
        if self.spec.unit_decoder and self.W_dec.grad is not None:
            along = (self.W_dec.grad * self.W_dec).sum(1, keepdim=True)
            self.W_dec.grad -= along * self.W_dec

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__.copy()


# A feature counts as dead when this many tokens in a row left it at zero.
DEAD_AFTER = 100_000


def reconstruction_loss(
    got: Float[Tensor, "token d_out"], wanted: Float[Tensor, "token d_out"], loss: str
) -> Float[Tensor, ""]:
    """Mean over tokens and coordinates of the squared error; "normed": divided, per token, by the norm of the target."""
    squared = (got - wanted).square()
    if loss == "normed":
        # The norm, not its square, and not centred: so in the public recipe.
        squared = squared / wanted.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(wanted.dtype).tiny)
    return squared.mean()


def _kaiming_uniform(rows: int, columns: int, generator: torch.Generator) -> Tensor:
    """As torch's kaiming_uniform_ on a (rows, columns) tensor: bound sqrt(6 / columns)."""
    bound = math.sqrt(6.0 / columns)
    return (torch.rand(rows, columns, generator=generator) * 2 - 1) * bound
