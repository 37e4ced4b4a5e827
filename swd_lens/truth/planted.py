"""Planted factors: W = A B with a known support, and what is done to it: noise, correlated inputs, a rotation.

1. `Plant` says how many units, each with how many read and write entries at random places (normal values, seeded).
2. `planted` draws the matrix. Noise is added to W, as a share of its norm. A rotation is an orthogonal matrix behind W
   ("outputs"), as if the residual stream that it writes to had no privileged basis, or on both sides ("both").
3. True units of a rotated matrix are the rotated ones: their write vectors are dense, and no sparse answer has them.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.checks import bounded, one_of
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.truth.scores import TrueUnits
from swd_lens.units.exact import random_b_factors

ROTATIONS = ("none", "outputs", "both")
KINDS = ("plain", "unequal", "single inputs", "correlated", "remainder")


@dataclass(frozen=True)
class Plant:
    """A planted matrix.

    Attributes:
        d_in, d_out, units: sizes.
        reads, writes: entries of each unit's read and write vector.
        noise: norm of what is added to W, as a share of W's.
        rotation: one of ROTATIONS.
        kind: "plain"; "unequal", numbers of entries between 1 and twice the mean; "single inputs", every second unit reads one
            input; "correlated", inputs with a Gram that is not the identity; "remainder", the noise is dense and of rank four.
    """

    d_in: int = 64
    d_out: int = 48
    units: int = 32
    reads: int = 4
    writes: int = 4
    noise: float = 0.0
    rotation: str = "none"
    kind: str = "plain"

    def __post_init__(self) -> None:
        for name in ("d_in", "d_out", "units", "reads", "writes"):
            bounded(name, getattr(self, name), 1)
        bounded("reads", self.reads, 1, self.d_in)
        bounded("writes", self.writes, 1, self.d_out)
        bounded("noise", self.noise, 0, whole=False)
        one_of("rotation", self.rotation, ROTATIONS)
        one_of("kind", self.kind, KINDS)


@with_torch_defaults
@dataclass(frozen=True)
class Planted(TrueUnits):
    """A matrix with the units that it was made of, rotated with it.

    Attributes:
        weight: W (d_in, d_out), noise and rotation included.
        gram: (d_in, d_in) of the inputs; None: the identity.
    """

    weight: Float[Tensor, "d_in d_out"]
    gram: Float[Tensor, "d_in d_in"] | None


@with_torch_defaults
def planted(plant: Plant, seed: int = 0) -> Planted:
    """Draw a planted matrix; the same seed gives the same bits.

    Source: ours (evidence.md §5).
    """
    g = torch.Generator().manual_seed(seed)
    reads = _counts(plant, plant.reads, g)
    if plant.kind == "single inputs":
        reads = [1 if unit % 2 else plant.reads for unit in range(plant.units)]
    read = _factor(reads, plant.d_in, g).T.contiguous()
    write = _factor(_counts(plant, plant.writes, g), plant.d_out, g)
    weight, gram = read @ write, None
    if plant.kind == "correlated":
        mixing = torch.eye(plant.d_in) + 0.3 * torch.randn(plant.d_in, plant.d_in, generator=g) / plant.d_in**0.5
        mixing = mixing * torch.logspace(-0.5, 0.5, plant.d_in)
        gram = mixing.T @ mixing
    if plant.noise:
        noise = torch.randn(weight.shape, generator=g)
        if plant.kind == "remainder":
            noise = torch.randn(plant.d_in, 4, generator=g) @ torch.randn(4, plant.d_out, generator=g)
        weight = weight + noise * (plant.noise * weight.norm()) / noise.norm()
    if plant.rotation != "none":
        turn = rotation_of(plant.d_out, seed)
        weight, write = weight @ turn, write @ turn
    if plant.rotation == "both":
        turn = rotation_of(plant.d_in, seed + 1)
        weight, read = turn.T @ weight, turn.T @ read
        gram = None if gram is None else turn.T @ gram @ turn
    return Planted(read, write, weight, gram)


def rotation_of(size: int, seed: int) -> Float[Tensor, "size size"]:
    """A random orthogonal matrix (Haar), from the seed."""
    return random_b_factors(torch.eye(size), seed).write


def _factor(counts: Sequence[int], width: int, g: torch.Generator) -> Float[Tensor, "unit width"]:
    """So many normal values per unit, at random places."""
    values = torch.zeros(len(counts), width)
    for unit, count in enumerate(counts):
        places = torch.randperm(width, generator=g)[:count]
        values[unit, places] = torch.randn(count, generator=g)
    return values


def _counts(plant: Plant, mean: int, g: torch.Generator) -> list[int]:
    if plant.kind != "unequal":
        return [mean] * plant.units
    drawn = torch.rand(plant.units, generator=g) * 2 * mean
    return [max(1, round(float(value))) for value in drawn]
