"""Studies: what a researcher asks of a replacement once it is attached."""

from swd_lens.study.audit import logit_effect, top_contexts
from swd_lens.study.fidelity import Fidelity, fidelity
from swd_lens.study.run import Run, run_study

__all__ = ["Fidelity", "Run", "fidelity", "logit_effect", "run_study", "top_contexts"]
