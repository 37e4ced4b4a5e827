"""Other ways to turn a matrix into units, for comparison with SWD; each goes where SWD's factors go.

1. surface.py: dense exact factorizations of a host's sites, SVD and Random-B; units/exact.py has them for one tensor.
2. The rest is what the paper trains: transcoders, VPD by local reconstruction or by KL (methods.py), sparse pretraining.
"""

from swd_lens.train.baselines.activity import Activity
from swd_lens.train.baselines.channels import channels_of
from swd_lens.train.baselines.methods import transcoder, vpd_kl, vpd_recon
from swd_lens.train.baselines.sparse_spec import SparseSpec
from swd_lens.train.baselines.sparse_training import SparsePretrained, sparse_pretrain
from swd_lens.train.baselines.spec import TrainError, TranscoderSpec, VpdSpec
from swd_lens.train.baselines.surface import random_b, random_b_seeds, svd
from swd_lens.train.baselines.units import LearnedUnits
from swd_lens.units.exact import random_b_factors, svd_factors

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
