"""Studies: what a researcher asks of a replacement once it is attached."""

from swd_lens.study.checkpoint import save_checkpoint
from swd_lens.study.data_efficiency import DataEfficiency, data_efficiency
from swd_lens.study.generate import Samples, generate
from swd_lens.study.replacement import ModelReplacement, replace_model
from swd_lens.study.run import Run
from swd_lens.study.run_study import run_study
from swd_lens.study.stability import stability
from swd_lens.study.stability_card import Stability
from swd_lens.study.sweep import Sweep, SweepPoint, sweep

__all__ = [
    "DataEfficiency",
    "ModelReplacement",
    "Run",
    "Samples",
    "Stability",
    "Sweep",
    "SweepPoint",
    "data_efficiency",
    "generate",
    "replace_model",
    "run_study",
    "save_checkpoint",
    "stability",
    "sweep",
]
