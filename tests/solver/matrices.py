"""Small weights and Grams that look like a trained model's."""

import torch
from torch import Tensor

from swd_lens.units.factors import Factors

SHAPES = [(20, 32), (32, 20), (24, 24)]


def weight_of(shape: tuple[int, int], seed: int = 0) -> Tensor:
    """Low rank plus noise, like a trained matrix."""
    g = torch.Generator().manual_seed(seed)
    rank = max(min(shape) // 3, 1)
    return torch.randn(shape[0], rank, generator=g) @ torch.randn(rank, shape[1], generator=g) / rank**0.5 + (
        0.5 * torch.randn(shape, generator=g)
    )


def gram_of(d_in: int, seed: int = 1, dead: tuple[int, ...] = (), rows: int | None = None) -> Tensor:
    """Correlated inputs of different scale, `rows` of them (4 d_in); `dead` ones are never active."""
    g = torch.Generator().manual_seed(seed)
    inputs = torch.randn(rows or 4 * d_in, d_in, generator=g)
    inputs = inputs @ (torch.eye(d_in) + 0.2 * torch.randn(d_in, d_in, generator=g)) * torch.logspace(-1, 1, d_in)
    inputs[:, list(dead)] = 0.0
    return inputs.T @ inputs / len(inputs)


def few_levels(shape: tuple[int, int]) -> Tensor:
    """Half precision, multiples of 1/4, about half of them zero: ties everywhere."""
    weight = weight_of(shape).half()
    weight[weight.abs() < 0.6] = 0.0
    return (weight * 4).round() / 4


def assert_same_bits(one: Factors, other: Factors) -> None:
    assert torch.equal(one.read, other.read) and torch.equal(one.write, other.write)
