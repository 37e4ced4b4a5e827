"""The support of a factor: its largest magnitudes, found without sorting the matrix.

1. `kth_largest`: a partial sort around one rank, by numpy on the CPU.
2. `keep_exactly`: the k largest; of those that tie at the threshold the first by index. Entries tie when rounding could
   have parted them (`TIED`): symmetric problems have such entries, and which of them is larger depends on the processor.
3. `keep_above`: those strictly above the k-th largest, as the reference code does (ties at the threshold all drop out).
4. `kth_largest_estimate`: a sample's own quantile (`magnitude_sample`), for iterations whose support is not the last one.
5. `tie_floor` and `first_largest`: the same rule for a threshold of one's own, and for the largest entry of a row or column.
"""

import math

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

# The share of entries that this many give is off by 0.3 % (one sigma), which changed the error reached by less than 1 %
# (golden matrices).
ESTIMATE_SAMPLE = 32_768

# Where a smaller share is kept a sample holds too few of them (256 are off by 6 %): units that start as neurons, with .01 of
# the edges between the two, had 3 % more error (embedded model).
FEW = 1 / 128

# Magnitudes whose relative difference is below this count as equal. Rounding in an alternation parts entries that are equal
# in exact arithmetic by 1e-15 to 1e-12 (float64); entries of different value lie 1e-6 apart near a threshold.
TIED = {torch.float64: 1e-10, torch.float32: 1e-6}


def kth_largest(magnitude: Float[Tensor, "rows columns"], k: int) -> Float[Tensor, ""]:
    """The k-th largest entry (k = 1: the maximum). Entries must be finite. Raises ValueError: k outside 1..numel."""
    n = magnitude.numel()
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: give a rank from 1 to {n}, the number of entries")
    return _kth_smallest(magnitude.flatten(), n - k + 1)


def _kth_smallest(flat: Float[Tensor, " n"], k: int) -> Float[Tensor, ""]:
    """The k-th smallest entry itself, on the CPU by numpy: its partial sort takes a fifth to an eighth of the time of torch's."""
    if flat.device.type != "cpu":
        return flat.kthvalue(k).values
    return flat.new_tensor(np.partition(flat.numpy(), k - 1)[k - 1])


def kth_largest_estimate(values: Float[Tensor, "rows columns"], k: int) -> float:
    """About the k-th largest magnitude of signed values: exact for small matrices or few entries, else a sample's quantile."""
    n = values.numel()
    if n <= 2 * ESTIMATE_SAMPLE or k < FEW * n:
        return float(kth_largest(values.abs(), k))
    sample = magnitude_sample(values)
    rank = sample.numel() - round(k / n * sample.numel())
    return float(_kth_smallest(sample, min(max(rank, 1), sample.numel())))


def magnitude_sample(values: Float[Tensor, "rows columns"], sample: int = ESTIMATE_SAMPLE) -> Float[Tensor, " sample"]:
    """Magnitudes at an even stride, about so many; of small matrices all.

    The stride is coprime to the distance of entries of one column, and of a square factor's large ones, its diagonal's. Else the
    sample would see only some columns, or too much of the diagonal: at 384 x 384 eleven times as much as there is.
    """
    n, row = values.numel(), values.shape[1]
    if n <= 2 * ESTIMATE_SAMPLE:
        return values.flatten().abs()
    stride, distances = max(n // sample, 1), row * (row + 1) if n == row**2 else row
    while math.gcd(stride, distances) > 1:
        stride += 1
    return values.flatten()[::stride].abs()


def keep_exactly(magnitude: Float[Tensor, "rows columns"], k: int) -> Bool[Tensor, "rows columns"]:
    """Mask of exactly k entries, the largest; ties at the threshold (`TIED`) are filled in index order."""
    threshold = kth_largest(magnitude, k)
    kept = magnitude > threshold * (1 + TIED[magnitude.dtype])
    ties = (magnitude >= tie_floor(threshold)).logical_and_(~kept).flatten().nonzero().flatten()
    kept = kept.flatten()
    kept[ties[: k - int(kept.count_nonzero())]] = True
    return kept.view(magnitude.shape)


def tie_floor(threshold: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The smallest magnitude that ties with a threshold."""
    return threshold * (1 - TIED[threshold.dtype])


def first_largest(magnitude: Float[Tensor, "rows columns"], dim: int) -> Int[Tensor, "_ _"]:
    """Index of the largest entry along `dim`, which is kept with length one; of those that tie the first."""
    return (magnitude >= tie_floor(magnitude.amax(dim, keepdim=True))).int().argmax(dim, keepdim=True)


def keep_above(
    magnitude: Float[Tensor, "rows columns"], k: int, out: Float[Tensor, "rows columns"] | None = None
) -> Bool[Tensor, "rows columns"] | Float[Tensor, "rows columns"]:
    """The entries strictly above the k-th largest: k - 1 of them, fewer if some tie with it; a mask, or 1 and 0 in `out`, which
    may be the magnitudes' own buffer. With k above the number of entries all are kept."""
    threshold = kth_largest(magnitude, k) if k <= magnitude.numel() else magnitude.new_tensor(-1.0)
    return torch.gt(magnitude, threshold, out=out)
