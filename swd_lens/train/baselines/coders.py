"""Coders in training: what every one of them is (`Coder`), and the ReLU transcoder.

`Transcoder`: f = relu((x - b_dec) W_enc + b_enc), y = f W_dec + b_out, trained on a projection's inputs and outputs.
1. Start: W_enc and W_dec Kaiming-uniform, rows of W_dec brought to norm 1; b_dec and b_out are the means of the first batch, or
   its geometric medians.
2. Loss per step: squared error of y, per token over the norm of the target (loss="normed") or not ("mse"), averaged over
   tokens and coordinates; plus l1 times the mean over tokens of the summed activations.
3. With ghost, a term more that gives gradients to dead features (`ghost_loss`).
4. With unit_decoder, rows of W_dec have norm 1 before each step and gradients lose their part along them.

Its units are the features after the ReLU.
"""

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.train.baselines.spec import TrainSpec, TranscoderSpec
from swd_lens.train.engine import Logged

_EPS = 1e-6  # of ratios of the ghost term, as in the public recipe
# Of the geometric median: rounds at most, and shares of the mean distance: what counts as still, and as no distance at all.
_ROUNDS, _STILL, _NEAR = 100, 1e-5, 1e-6


class Coder(nn.Module):
    """An encode/decode pair in training, with weights W_enc (d_in, unit) and W_dec (unit, d_out); all parameters are trained."""

    def __init__(self, d_in: int, d_out: int, spec: TrainSpec):
        super().__init__()
        self.spec: Any = spec
        width = spec.units(d_in, d_out)
        self.W_enc = nn.Parameter(torch.empty(d_in, width, dtype=torch.float32))
        self.W_dec = nn.Parameter(torch.empty(width, d_out, dtype=torch.float32))

    def draw(self, generator: torch.Generator) -> None:
        """The random start."""
        raise NotImplementedError

    def stand_for(self, weight: Float[Tensor, "d_in d_out"], bias: Float[Tensor, " d_out"]) -> None:
        """Take the matrix that the coder replaces, and its bias; called where the settings say `per_matrix`."""

    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        """The part of the start that needs the first batch's inputs and outputs, or the matrix."""

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        """z, the units."""
        raise NotImplementedError

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        """The site's output, its bias included."""
        raise NotImplementedError

    def loss(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int) -> tuple[Tensor, Logged]:
        """The loss of a batch in step 1, 2, ..., and what to log of it."""
        raise NotImplementedError

    def before_step(self) -> None:
        """Bring the weights to what a step begins with, and what is kept."""

    def adjust_gradients(self) -> None:
        """Change the gradients before the optimizer's step."""


class Transcoder(Coder):
    """Weights of a `Coder`, and biases b_enc, b_dec (of the input) and b_out.

    `silent` (unit,) counts the tokens since a feature was last above zero.
    """

    silent: Tensor

    def __init__(self, d_in: int, d_out: int, spec: TranscoderSpec):
        super().__init__(d_in, d_out, spec)
        width = self.W_enc.shape[1]
        self.b_enc = nn.Parameter(torch.empty(width, dtype=torch.float32))
        self.b_dec = nn.Parameter(torch.empty(d_in, dtype=torch.float32))
        self.b_out = nn.Parameter(torch.empty(d_out, dtype=torch.float32))
        self.register_buffer("silent", torch.zeros(width, dtype=torch.int64))

    @torch.no_grad()
    def draw(self, generator: torch.Generator) -> None:
        self.W_enc.copy_(_kaiming_uniform(self.W_enc, generator))
        self.W_dec.copy_(nn.functional.normalize(_kaiming_uniform(self.W_dec, generator), dim=1))
        for bias in (self.b_enc, self.b_dec, self.b_out, self.silent):
            bias.zero_()

    @torch.no_grad()
    def begin(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"]) -> None:
        for bias, of in ((self.b_dec, x), (self.b_out, y)):
            bias.copy_(geometric_median(of) if self.spec.start == "median" else of.mean(0))

    def encode(self, x: Float[Tensor, "*batch d_in"]) -> Float[Tensor, "*batch unit"]:
        return torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.b_out

    def loss(self, x: Float[Tensor, "token d_in"], y: Float[Tensor, "token d_out"], step: int) -> tuple[Tensor, Logged]:
        """The loss of a batch, and what to log: error, L1, L0, share of dead features (and the ghost term, where it is on)."""
        z = self.encode(x)
        output = self.decode(z)
        error = reconstruction_loss(output, y, self.spec.loss)
        l1 = z.sum(-1).mean()
        with torch.no_grad():
            alive = z > 0
            self.silent.copy_(torch.where(alive.any(0), 0, self.silent + len(z)))
            dead = self.silent >= self.spec.dead_after
            logged = {"error": error.detach(), "l1": l1.detach(), "l0": alive.sum(-1).float().mean()}
            logged["dead"] = dead.float().mean()
        total = error + self.spec.l1 * l1
        if self.spec.ghost:
            before = (x - self.b_dec.detach()) @ self.W_enc[:, dead] + self.b_enc[dead]
            ghost = ghost_loss(before, self.W_dec[dead], y - output, error, self.spec.loss)
            total, logged = total + ghost, {**logged, "ghost": ghost.detach()}
        return total, logged

    @torch.no_grad()
    def before_step(self) -> None:
        if self.spec.unit_decoder:
            self.W_dec.copy_(nn.functional.normalize(self.W_dec, dim=1))

    @torch.no_grad()
    def adjust_gradients(self) -> None:
        if self.spec.unit_decoder and self.W_dec.grad is not None:
            # Without the part along each decoder row, which normalizing the row would undo.
            along = (self.W_dec.grad * self.W_dec).sum(1, keepdim=True)
            self.W_dec.grad -= along * self.W_dec


def reconstruction_loss(
    output: Float[Tensor, "token d_out"], target: Float[Tensor, "token d_out"], loss: str
) -> Float[Tensor, ""]:
    """Mean over tokens and coordinates of the squared error; "normed": divided, per token, by the norm of the target."""
    squared = (output - target).square()
    if loss == "normed":
        # The norm, not its square, and not centred: so in the public recipe.
        squared = squared / target.norm(dim=-1, keepdim=True).clamp_min(torch.finfo(target.dtype).tiny)
    return squared.mean()


def ghost_loss(
    before: Float[Tensor, "token dead"],
    write: Float[Tensor, "dead d_out"],
    residual: Float[Tensor, "token d_out"],
    error: Float[Tensor, ""],
    loss: str,
) -> Float[Tensor, ""]:
    """The term by which features that are silent, and so get no gradient through the ReLU, learn what the others leave over.

    1. What they would write if exp took the ReLU's place, exp(before) write, is brought per token to half the residual's length.
    2. `reconstruction_loss` of that, the residual as the target, multiplied so that its value is the error's.

    Lengths, residual, error, b_dec and the factor of 2 are constants for the gradient: nothing moves but the dead features' own
    read and write vectors and biases. Other than in the public recipe,
    - the residual is target - output, not input - output, which does not even broadcast where widths differ (method.md §2.1);
    - the factor of 2 is one for the batch, not one per entry;
    - b_dec is held: moving, it shifts all features, and more of them died than without the term (on the embedded model).

    before: what the ReLU gets, of the dead features; write: their rows of W_dec; residual: target - output; error: the batch's
    reconstruction error, whose value the term has (0 where no feature is dead); loss: as of `reconstruction_loss`.
    """
    residual, error = residual.detach(), error.detach()
    if before.shape[1] == 0:
        return torch.zeros_like(error)
    ghost = before.exp() @ write
    length = residual.norm(dim=-1, keepdim=True) / (2 * ghost.detach().norm(dim=-1, keepdim=True) + _EPS)
    missed = reconstruction_loss(length * ghost, residual, loss)
    return missed * (error / (missed.detach() + _EPS))


def geometric_median(x: Float[Tensor, "token d"]) -> Float[Tensor, " d"]:
    """The point whose distances to all tokens add up to least, by Weiszfeld's iteration from the mean.

    Each round is the mean weighted by one over the distance, until a round moves it by less than 1e-5 of the mean distance; at
    most 100 rounds. One outlier moves the mean as far as it likes, but not this.
    """
    middle = x.mean(0)
    for _ in range(_ROUNDS):
        distance = (x - middle).norm(dim=1)
        size = float(distance.mean())
        if size == 0:
            return middle
        weight = 1 / distance.clamp_min(_NEAR * size)  # a token may be the middle itself
        moved = (weight @ x) / weight.sum()
        step, middle = float((moved - middle).norm()), moved
        if step < _STILL * size:
            return middle
    return middle


def _kaiming_uniform(like: Tensor, generator: torch.Generator) -> Tensor:
    """As torch's kaiming_uniform_ on this (rows, columns) shape: bound sqrt(6 / columns). Drawn on the CPU."""
    return (torch.rand(like.shape, generator=generator, dtype=torch.float32) * 2 - 1) * math.sqrt(6.0 / like.shape[1])
