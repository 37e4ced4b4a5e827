"""Other ways to turn a matrix into units, for comparison with SWD; each goes where SWD's factors go.

1. exact.py: SVD, Random-B and neurons of a host's sites (units/exact.py has them for one tensor), neurons and SVD with
   pruned weights, and the channels of its MLPs.
2. What the paper trains: transcoders, VPD by local reconstruction or by KL (methods.py), sparse pretraining (sparse_training.py).
"""

from swd_lens.base.errors import TrainError
from swd_lens.train.baselines.activity import Activity
from swd_lens.train.baselines.exact import channels_of, neurons, pruned, random_b, random_b_seeds, svd, svd_pruned
from swd_lens.train.baselines.methods import transcoder, vpd_kl, vpd_recon
from swd_lens.train.baselines.sparse_training import SparsePretrained, SparseSpec, sparse_pretrain
from swd_lens.train.baselines.spec import TranscoderSpec, VpdSpec
from swd_lens.train.baselines.units import LearnedUnits
from swd_lens.units.exact import neuron_factors, random_b_factors, svd_factors

__all__ = [
    "Activity",
    "LearnedUnits",
    "SparsePretrained",
    "SparseSpec",
    "TrainError",
    "TranscoderSpec",
    "VpdSpec",
    "channels_of",
    "neuron_factors",
    "neurons",
    "pruned",
    "random_b",
    "random_b_factors",
    "random_b_seeds",
    "sparse_pretrain",
    "svd",
    "svd_factors",
    "svd_pruned",
    "transcoder",
    "vpd_kl",
    "vpd_recon",
]
