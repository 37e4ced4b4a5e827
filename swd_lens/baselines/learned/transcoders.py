"""Transcoder: f = relu((x - b_dec) W_enc + b_enc), y = f W_dec + b_out, trained on a projection's inputs and outputs.

1. Start: W_enc and W_dec Kaiming-uniform, rows of W_dec brought to norm 1; b_dec and b_out are the means of the first batch.
2. Loss per step: squared error of y, per token over the norm of the target (loss="normed") or not ("mse"), averaged over
   tokens and coordinates; plus l1 times the mean over tokens of the summed activations.
3. With unit_decoder, rows of W_dec have norm 1 before each step and gradients lose their part along them.

Units are the features after the ReLU. Ghost gradients are left out: the public recipe's take the input for the target, which
does not even broadcast where widths differ (method.md §2.1).
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.baselines.learned.spec import TranscoderSpec

# What a step logs: numbers, still on the device.
Said = dict[str, Tensor]


class Transcoder(nn.Module):
    """An encode/decode pair with weights W_enc (d_in, unit), W_dec (unit, d_out), biases b_enc, b_dec (input), b_out.

    `silent` (unit,) counts the tokens since a feature was last above zero.
    """

    silent: Tensor

    def __init__(self, d_in: int, d_out: int, spec: TranscoderSpec):
        super().__init__()
        self.spec = spec
        width = spec.units(d_in, d_out)
        self.W_enc = nn.Parameter(torch.empty(d_in, width))
        self.W_dec = nn.Parameter(torch.empty(width, d_out))
        self.b_enc = nn.Parameter(torch.empty(width))
        self.b_dec = nn.Parameter(torch.empty(d_in))
        self.b_out = nn.Parameter(torch.empty(d_out))
        self.register_buffer("silent", torch.zeros(width, dtype=torch.int64))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        """The random start; biases 0."""
        self.W_enc.copy_(_kaiming_uniform(self.W_enc, generator))
        self.W_dec.copy_(nn.functional.normalize(_kaiming_uniform(self.W_dec, generator), dim=1))
        for bias in (self.b_enc, self.b_dec, self.b_out, self.silent):
            bias.zero_()

    @torch.no_grad()
    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        """The part of the start that data decide, from the first batch."""
        self.b_dec.copy_(x.mean(0))
        self.b_out.copy_(y.mean(0))

    # ------------------------------------------------------------------ units

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z = relu((x - b_dec) W_enc + b_enc)."""
        return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        """z W_dec + b_out: the site's output, its bias included."""
        return z @ self.W_dec + self.b_out

    # ------------------------------------------------------------------ training

    def loss(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int) -> tuple[Tensor, Said]:
        """The loss of a batch, and error, L1, L0 and share of dead features for the log."""
        z = self.encode(x)
        error = reconstruction_loss(self.decode(z), y, self.spec.loss)
        l1 = z.sum(-1).mean()
        with torch.no_grad():
            alive = z > 0
            self.silent.copy_(torch.where(alive.any(0), 0, self.silent + len(z)))
            dead = (self.silent >= self.spec.dead_after).float().mean()
            said = {"error": error.detach(), "l1": l1.detach(), "l0": alive.sum(-1).float().mean(), "dead": dead}
        return error + self.spec.l1 * l1, said

    @torch.no_grad()
    def before_step(self) -> None:
        """Decoder rows to norm 1."""
        if self.spec.unit_decoder:
            self.W_dec.copy_(nn.functional.normalize(self.W_dec, dim=1))

    @torch.no_grad()
    def adjust_gradients(self) -> None:
        """Takes the part of each decoder row's gradient along the row out of it."""
        if self.spec.unit_decoder and self.W_dec.grad is not None:
            along = (self.W_dec.grad * self.W_dec).sum(1, keepdim=True)
            self.W_dec.grad -= along * self.W_dec


def reconstruction_loss(
    got: Float[Tensor, "token d_out"], wanted: Float[Tensor, "token d_out"], loss: str
) -> Float[Tensor, ""]:
    """Mean over tokens and coordinates of the squared error; "normed": divided, per token, by the norm of the target."""
    squared = (got - wanted).square()
    if loss == "normed":
        # The norm, not its square, and not centred: so in the public recipe.
        squared = squared / wanted.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(wanted.dtype).tiny)
    return squared.mean()


def _kaiming_uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """As torch's kaiming_uniform_ on this (rows, columns) shape: bound sqrt(6 / columns). Drawn on the CPU."""
    return (torch.rand(like.shape, generator=generator) * 2 - 1) * math.sqrt(6.0 / like.shape[1])
