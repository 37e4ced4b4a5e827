"""Other ways to turn a matrix into units, for comparison with SWD; each goes where SWD's factors go.

1. exact.py: dense exact factorizations of a tensor, SVD and Random-B. surface.py: the same for a host's sites.
2. learned/: what the paper trains: transcoders, VPD by local reconstruction or by KL, sparse pretraining.
"""

from swd_lens.baselines.exact import random_b_factors, svd_factors
from swd_lens.baselines.learned import (
    Activity,
    LearnedUnits,
    SparsePretrained,
    SparseSpec,
    TrainError,
    TranscoderSpec,
    VpdSpec,
    channels_of,
    sparse_pretrain,
    transcoder,
    vpd_kl,
    vpd_recon,
)
from swd_lens.baselines.surface import random_b, random_b_seeds, svd

__all__ = [
    "Activity",
    "LearnedUnits",
    "SparsePretrained",
    "SparseSpec",
    "TrainError",
    "TranscoderSpec",
    "VpdSpec",
    "channels_of",
    "random_b",
    "random_b_factors",
    "random_b_seeds",
    "sparse_pretrain",
    "svd",
    "svd_factors",
    "transcoder",
    "vpd_kl",
    "vpd_recon",
]
