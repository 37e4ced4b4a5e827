"""The support of a factor: its largest magnitudes, found without sorting the matrix.

1. `kth_largest`: sort a small strided sample, which brackets the answer; count what lies above the bracket; select
   inside it. The answer is exact; when the bracket misses, the whole matrix is searched.
2. `keep_exactly`: the k largest; of those that tie at the threshold the first by index.
3. `keep_above`: those strictly above the k-th largest, as the reference code does (ties at the threshold all drop out).
"""

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

# Sorting 16k entries takes about a millisecond and brackets the threshold to about 6 % of the matrix (4 sigma).
SAMPLE = 16_384


def kth_largest(magnitude: Float[Tensor, "rows columns"], k: int) -> Float[Tensor, ""]:
    """The k-th largest entry (k = 1: the maximum). Entries must be finite.

    Raises:
        ValueError: k outside 1..numel.
    """
    flat = magnitude.flatten()
    n = flat.numel()
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: give a rank from 1 to {n}, the number of entries")
    if n > 4 * SAMPLE and (found := _inside_bracket(flat, k, magnitude.shape[1])) is not None:
        return found
    return flat.kthvalue(n - k + 1).values


def _inside_bracket(flat: Float[Tensor, " n"], k: int, row: int) -> Float[Tensor, ""] | None:
    """The k-th largest by way of a sample's quantiles, or None if they do not enclose it."""
    n = flat.numel()
    stride = n // SAMPLE
    while math.gcd(stride, row) > 1:  # else the sample would see only some columns
        stride += 1
    sample = flat[::stride].sort().values
    size = sample.numel()
    share = 1 - k / n
    slack = 4 * math.sqrt(size * share * (1 - share)) + 4
    low, high = int(share * size - slack), int(share * size + slack)
    bracket = flat
    if low >= 0:
        bracket = bracket[bracket >= sample[low]]
    above = 0
    if high < size:
        inside = bracket[bracket <= sample[high]]
        above = bracket.numel() - inside.numel()
        bracket = inside
    rank = k - above
    if not 1 <= rank <= bracket.numel():
        return None
    return bracket.kthvalue(bracket.numel() - rank + 1).values


def keep_exactly(magnitude: Float[Tensor, "rows columns"], k: int) -> Bool[Tensor, "rows columns"]:
    """Mask of exactly k entries, the largest; ties at the threshold are filled in index order."""
    threshold = kth_largest(magnitude, k)
    kept = (magnitude > threshold).flatten()
    missing = k - int(kept.count_nonzero())
    ties = (magnitude == threshold).flatten().nonzero().flatten()
    kept[ties[:missing]] = True
    return kept.view(magnitude.shape)


def keep_above(magnitude: Float[Tensor, "rows columns"], k: int) -> Bool[Tensor, "rows columns"]:
    """Mask of the entries strictly above the k-th largest: k - 1 of them, fewer if some tie with it.

    With k above the number of entries all are kept.
    """
    if k > magnitude.numel():
        return torch.ones_like(magnitude, dtype=torch.bool)
    return magnitude > kth_largest(magnitude, k)
