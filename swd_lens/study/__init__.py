"""Studies: what a researcher asks of a replacement once it is attached."""

from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.study.audit import logit_effect, top_contexts
from swd_lens.study.run import Run, run_study
from swd_lens.study.sweep import Sweep, SweepPoint, sweep

__all__ = [
    "Fidelity",
    "Run",
    "Sweep",
    "SweepPoint",
    "fidelity",
    "logit_effect",
    "run_study",
    "sweep",
    "top_contexts",
]
