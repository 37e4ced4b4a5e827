"""Bootstrap over prompts: how much a number would move with another draw of test prompts.

1. Draw as many prompts as there are, with replacement, `times` times: each draw is a vector of weights that sum to one.
2. A mean over the draw is weights @ values, so that all runs of a curve are resampled together, prompt by prompt.
"""

from collections.abc import Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import error

_AT_ONCE = 128  # draws: (draws, prompts) weights are held at a time


def resampled(values: Float[Tensor, "run prompt"], times: int, seed: int = 0) -> Float[Tensor, "times run"]:
    """Means of every run over `times` bootstrap draws of the prompts, the same draws for all runs.

    Raises:
        ValueError: times below 1.
    """
    if times < 1:
        raise error("no-bootstrap-draws", times=times)
    return torch.cat([weights @ values.T for weights in _draws(values.shape[1], times, seed)])


def interval(
    samples: Float[Tensor, "times *runs"], level: float = 0.95
) -> tuple[Float[Tensor, "*runs"], Float[Tensor, "*runs"]]:
    """Lower and upper end of the percentile interval; NaN where a sample is NaN."""
    tail = (1.0 - level) / 2.0
    ends = torch.tensor([tail, 1.0 - tail], dtype=samples.dtype)
    # A few columns at a time: torch.quantile refuses more than 2^24 numbers.
    flat = samples.flatten(1).split(1024, dim=1)
    low, high = torch.cat([torch.quantile(columns, ends, dim=0) for columns in flat], dim=1)
    return low.view(samples.shape[1:]), high.view(samples.shape[1:])


def _draws(prompts: int, times: int, seed: int) -> Iterator[Float[Tensor, "draw prompt"]]:
    generator = torch.Generator().manual_seed(seed)
    for start in range(0, times, _AT_ONCE):
        n = min(_AT_ONCE, times - start)
        drawn = torch.randint(prompts, (n, prompts), generator=generator)
        weights = torch.zeros(n, prompts, dtype=torch.float64)
        yield weights.scatter_add_(1, drawn, torch.ones(n, prompts, dtype=torch.float64)) / prompts
