"""Sparse pretraining's schedule and projection, on tensors and numbers (paper app. sparse-pretrain-setting; method.md §§0.2, 3).

1. `Schedule`: density and learning rate after n tokens. Density is 1 in the warm-up, falls exponentially to its end value, and
   stays. The learning rate grows with 1 / sqrt(density), times a linear warm-up and a linear fall to 0.
2. `normalized`: all gradients divided by their common root mean square.
3. `project_`: keep the floor(d numel) largest entries of a matrix, at least one per output row.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

_SMALLEST_RMS, _ADDED_TO_RMS = 1e-8, 1e-5


@dataclass(frozen=True)
class Schedule:
    """Density and learning rate by tokens gone through before an update. The defaults are the paper's."""

    # Of the whole schedule, whatever part of it is trained.
    updates: int = 38_146
    tokens_per_update: int = 131_072
    end_density: float | int = 0.2
    # Where density is 1 and the warm-up is over.
    learning_rate: float | int = 3e-4
    # Shares of the updates, rounded down to whole ones: end of the warm-up, and from where the density stays.
    warmup: float | int = 0.01
    falling_until: float | int = 0.8

    @property
    def tokens(self) -> int:
        """Of the whole schedule."""
        return self.updates * self.tokens_per_update

    @property
    def n0(self) -> int:
        """Tokens at the end of the warm-up; whole updates."""
        return self._updates(self.warmup) * self.tokens_per_update

    @property
    def n1(self) -> int:
        """Tokens from which the density stays; whole updates."""
        return self._updates(self.falling_until) * self.tokens_per_update

    def _updates(self, share: float | int) -> int:
        """A share of all updates, rounded down: 0.29 of 100 are 29, not the 28 that floats make of it."""
        return math.floor(round(share * self.updates, 6))

    def density(self, tokens: int) -> float:
        """After `tokens` tokens: before the update that follows."""
        if tokens < self.n0:
            return 1.0
        if tokens >= self.n1:
            return float(self.end_density)
        return self.end_density ** ((tokens - self.n0) / (self.n1 - self.n0))

    def rate(self, tokens: int) -> float:
        """Learning rate of the update that follows `tokens` tokens."""
        rising = tokens / self.n0 if tokens < self.n0 else (self.tokens - tokens) / (self.tokens - self.n0)
        return self.learning_rate * rising / math.sqrt(self.density(tokens))


def budget(numel: int, density: float) -> int:
    """Entries that a matrix keeps: floor(d numel)."""
    return math.floor(density * numel)


def normalized(gradients: Sequence[Tensor]) -> list[Tensor]:
    """All divided by (r + 1e-5), r their common root mean square, where that exceeds 1e-8; no clipping: always."""
    total = sum(float(g.double().square().sum()) for g in gradients)
    rms = math.sqrt(total / sum(g.numel() for g in gradients))
    return [g / (rms + _ADDED_TO_RMS) for g in gradients] if rms > _SMALLEST_RMS else list(gradients)


@torch.no_grad()
def project_(matrix: Float[Tensor, "row column"], density: float) -> None:
    """Zero all but the budget's largest entries, in place; each row (an output neuron, a token) keeps its largest.

    The rows' largest entries come first, then the largest of the rest, so that the total stays floor(d numel).

    Raises:
        ValueError: the budget does not give every row one entry.
    """
    if density >= 1:
        return
    keep = budget(matrix.numel(), density)
    rows = matrix.shape[0]
    if keep < rows:
        raise ValueError(
            f"density {density:.4g} keeps {keep} entries of {tuple(matrix.shape)}, fewer than its {rows} rows"
        )
    magnitude = matrix.abs()
    kept = torch.zeros(matrix.shape, dtype=torch.bool, device=matrix.device)  # contiguous, whatever the matrix is
    kept.scatter_(1, magnitude.argmax(1, keepdim=True), True)
    rest = torch.where(kept, -1.0, magnitude).reshape(-1)
    kept.view(-1)[rest.topk(keep - rows, sorted=False).indices] = True
    matrix.mul_(kept)
