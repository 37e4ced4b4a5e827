"""The toy models of the decomposition papers, trained here: their matrices and the units that they are said to be made of.

1. `superposition`: x -> relu(x W W^T + b) with more features than dimensions; 5 in 2 and 40 in 10. One unit per feature: it reads
   the feature and writes its row of W. That is features + features x dimensions entries, more than W has.
2. `residual_mlp`: 100 features in a fixed random embedding, 50 neurons, trained to give x + relu(x). One unit per feature, which
   writes to the neurons; the matrix is W_E W_in, as the embedding is known.

Data and optimizer are those of the papers (Braun et al., 2025; Bushnaq et al., 2025, appendix); steps are fewer, the rate falls
to zero. The papers print no loss of their models, so that tests/benchmarks/known.py trains them by the papers' own recipe, too.
`reference` is what a loss is held against here: of 5 in 2 that of the best regular pentagon, of the residual MLP that of 50
neurons which compute 50 of the features exactly (p / 12).
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.truth.scores import TrueUnits

# MMCS and ML2R of SPD (Bushnaq et al., 2025, table 1).
PUBLISHED: Mapping[str, tuple[float, float]] = {"TMS 5-2": (1.000, 0.993), "TMS 40-10": (1.000, 1.010)}
PRESENT = 0.05  # probability of a feature of the toys of superposition
_SAMPLE = 100_000  # of the loss


@dataclass(frozen=True)
class Toy:
    """A matrix of a trained toy model.

    Attributes:
        name: "TMS 5-2", ...
        weight: (features, d_out), as it is applied: x @ weight.
        truth: one unit per feature. gram: E[x^T x], exact. inputs: (sample, features).
        bias: b of relu(x W W^T + b); None: the toy is another model.
        loss: mean squared error on fresh data. reference: see the module; NaN where there is none.
    """

    name: str
    weight: Float[Tensor, "features d_out"]
    truth: TrueUnits
    gram: Float[Tensor, "features features"]
    inputs: Float[Tensor, "sample features"]
    loss: float
    reference: float
    bias: Float[Tensor, " features"] | None = None


def sparse_features(n: int, features: int, generator: torch.Generator) -> Float[Tensor, "n features"]:
    """Data of the toys of superposition: uniform on [0, 1], each present with probability .05."""
    return torch.rand(n, features, generator=generator) * (torch.rand(n, features, generator=generator) < PRESENT)


@with_torch_defaults
def superposition(
    features: int = 5, hidden: int = 2, *, steps: int = 4000, batch: int = 2048, falling: bool = True, seed: int = 0
) -> Toy:
    """Train a toy model of superposition: features uniform on [0, 1], each present with probability .05.

    Args:
        features, hidden: sizes; 5 and 2, or 40 and 10, are the papers'.
        steps: of AdamW. batch: samples of each.
        falling: the rate falls along a cosine; False: it stays, as published (10,000 steps of 1,024; 40 in 10: of 8,192).
        seed: of weights and data.

    Raises:
        ValueError: sizes, steps or batch below 1.

    Source: Elhage et al., 2022; sizes, data, rate .005 and weight decay .01 as in Bushnaq et al., 2025 (appendix).
    """
    for name, value in (("features", features), ("hidden", hidden), ("steps", steps), ("batch", batch)):
        bounded(name, value, 1)
    g = torch.Generator().manual_seed(seed)
    weight = (torch.randn(features, hidden, generator=g) / math.sqrt(features)).requires_grad_()
    bias = torch.zeros(features, requires_grad=True)

    def model(x: Tensor) -> Tensor:
        return torch.relu(x @ weight @ weight.T + bias)

    def data(n: int) -> Tensor:
        return sparse_features(n, features, g)

    _train([weight, bias], lambda: (model(x := data(batch)) - x).square().mean(), steps, 5e-3, falling)
    with torch.no_grad():
        fresh = data(_SAMPLE)
        loss = float((model(fresh) - fresh).square().mean())
    reference = _pentagon(fresh) if (features, hidden) == (5, 2) else math.nan
    gram = torch.full((features, features), PRESENT**2 / 4).fill_diagonal_(PRESENT / 3)
    return _toy(f"TMS {features}-{hidden}", weight.detach(), gram, data(8192), loss, reference, bias.detach())


@with_torch_defaults
def residual_mlp(features: int = 100, neurons: int = 50, *, d_embed: int = 1000, steps: int = 2000, seed: int = 0) -> Toy:
    """Train the residual MLP of compressed computation: features uniform on [-1, 1], each present with probability .01.

    Args:
        features, neurons, d_embed: sizes, the papers' by default.
        steps: of AdamW, 2,048 samples each.
        seed: of weights, embedding and data.

    Raises:
        ValueError: sizes or steps below 1.

    Source: Braun et al., 2025; rate .003, weight decay .01 and the cosine as in Bushnaq et al., 2025 (appendix).
    """
    for name, value in (("features", features), ("neurons", neurons), ("d_embed", d_embed), ("steps", steps)):
        bounded(name, value, 1)
    g = torch.Generator().manual_seed(seed)
    embedding = torch.nn.functional.normalize(torch.randn(features, d_embed, generator=g), dim=1)
    mixed = embedding @ embedding.T
    w_in = (torch.randn(d_embed, neurons, generator=g) / math.sqrt(d_embed)).requires_grad_()
    w_out = (torch.randn(neurons, d_embed, generator=g) / math.sqrt(neurons)).requires_grad_()

    def model(x: Tensor) -> Tensor:  # (x W_E + relu(x W_E W_in) W_out) W_E^T
        return x @ mixed + torch.relu(x @ (embedding @ w_in)) @ (w_out @ embedding.T)

    def data(n: int) -> Tensor:
        return (2 * torch.rand(n, features, generator=g) - 1) * (torch.rand(n, features, generator=g) < 0.01)

    def error(x: Tensor) -> Tensor:
        return (model(x) - x - torch.relu(x)).square().mean()

    _train([w_in, w_out], lambda: error(data(2048)), steps, 3e-3)
    with torch.no_grad():
        loss = float(error(data(_SAMPLE)))
    gram = torch.eye(features) * (0.01 / 3)
    return _toy("residual MLP", (embedding @ w_in).detach(), gram, data(8192), loss, 0.01 / 12)


def _train(parameters: list[Tensor], loss: Callable[[], Tensor], steps: int, rate: float, falling: bool = True) -> None:
    """AdamW with weight decay .01; the rate falls along a cosine, or stays."""
    adam = torch.optim.AdamW(parameters, lr=rate, weight_decay=0.01, foreach=False)
    with torch.enable_grad():
        for step in range(steps):
            if falling:
                adam.param_groups[0]["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / steps))
            adam.zero_grad()
            loss().backward()
            adam.step()


def _pentagon(x: Float[Tensor, "sample 5"]) -> float:
    """The least loss of five features on a regular pentagon, over its radius and a common bias, on these data."""
    angles = torch.arange(5) * (2 * math.pi / 5)
    directions = torch.stack([angles.cos(), angles.sin()], 1)
    similar = directions @ directions.T
    losses = [
        float((torch.relu(squared * (x @ similar) + bias) - x).square().mean())
        for squared in torch.linspace(1.0, 1.5, 21).tolist()
        for bias in torch.linspace(-0.45, 0.0, 19).tolist()
    ]
    return min(losses)


def _toy(
    name: str, weight: Tensor, gram: Tensor, inputs: Tensor, loss: float, reference: float, bias: Tensor | None = None
) -> Toy:
    return Toy(name, weight, TrueUnits(torch.eye(len(weight)), weight.clone()), gram, inputs, loss, reference, bias)
