"""Ground truth: matrices and hosts whose units are known, and how near each method comes to them. CPU, offline.

1. planted.py: W = A B at a known support, with noise and rotations; toys.py: the toy models of the decomposition papers, trained
   here; compiled.py: a transformer whose weights are written.
2. scores.py: supports, cosines, circuits. methods.py: SWD and what it is compared with; spd.py: SPD of a toy model, as published.
3. run.py: all of these in one table, `swd-lens truth`.
"""

from swd_lens.truth.compiled import Compiled, compiled
from swd_lens.truth.methods import METHODS, Answer, Problem, answer
from swd_lens.truth.planted import Plant, Planted, planted
from swd_lens.truth.run import TruthTable, run_truth
from swd_lens.truth.scores import TrueUnits, circuit_aurocs, column_mmcs, mmcs, support_f1
from swd_lens.truth.toys import Toy, residual_mlp, superposition

__all__ = [
    "METHODS",
    "Answer",
    "Compiled",
    "Plant",
    "Planted",
    "Problem",
    "Toy",
    "TrueUnits",
    "TruthTable",
    "answer",
    "circuit_aurocs",
    "column_mmcs",
    "compiled",
    "mmcs",
    "planted",
    "residual_mlp",
    "run_truth",
    "superposition",
    "support_f1",
]
