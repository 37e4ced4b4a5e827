"""Baselines that are trained: transcoders, VPD by reconstruction or KL, and sparse pretraining. Their units go where SWD's go."""

from swd_lens.baselines.learned.activity import Activity
from swd_lens.baselines.learned.channels import channels_of
from swd_lens.baselines.learned.methods import transcoder, vpd_kl, vpd_recon
from swd_lens.baselines.learned.sparse_spec import SparseSpec
from swd_lens.baselines.learned.sparse_training import SparsePretrained, sparse_pretrain
from swd_lens.baselines.learned.spec import TrainError, TranscoderSpec, VpdSpec
from swd_lens.baselines.learned.units import LearnedUnits

__all__ = [
    "Activity",
    "LearnedUnits",
    "SparsePretrained",
    "SparseSpec",
    "TrainError",
    "TranscoderSpec",
    "VpdSpec",
    "channels_of",
    "sparse_pretrain",
    "transcoder",
    "vpd_kl",
    "vpd_recon",
]
