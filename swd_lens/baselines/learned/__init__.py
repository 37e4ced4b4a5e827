"""Learned baselines."""

from swd_lens.baselines.learned.make import transcoder, vpd_kl, vpd_recon
from swd_lens.baselines.learned.units import LearnedUnits

__all__ = ["LearnedUnits", "transcoder", "vpd_kl", "vpd_recon"]
