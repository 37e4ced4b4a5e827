"""Studies: what a researcher asks of a replacement once it is attached."""

from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.study.allocate import allocate
from swd_lens.study.allocation import Allocation
from swd_lens.study.audit import logit_effect, top_contexts
from swd_lens.study.data_efficiency import DataEfficiency, data_efficiency
from swd_lens.study.generate import generate
from swd_lens.study.replacement import ModelReplacement, replace_model
from swd_lens.study.run import Run, run_study
from swd_lens.study.samples import Samples
from swd_lens.study.sweep import Sweep, SweepPoint, sweep

__all__ = [
    "Allocation",
    "DataEfficiency",
    "Fidelity",
    "ModelReplacement",
    "Run",
    "Samples",
    "Sweep",
    "SweepPoint",
    "allocate",
    "data_efficiency",
    "fidelity",
    "generate",
    "logit_effect",
    "replace_model",
    "run_study",
    "sweep",
    "top_contexts",
]
