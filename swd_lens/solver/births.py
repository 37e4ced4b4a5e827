"""Births: units of little use give their edges back, and are born again as sparse rank-one pieces of the residual.

Units that start as coordinates may end up empty while others stand for two. Within the alternation (anneal.py), so that what is
born takes part in it:

1. A unit's use is what the loss would rise by without it. Units below LITTLE of the median use die.
2. Each becomes the largest rank-one piece of the residual that was found with as many read and write entries as units have on
   average: power iteration that keeps the largest entries, from the residual's STARTS largest columns. The residual goes on
   without it. Duals of the born begin at zero.

Planted factors of 4 + 4 entries (128 x 64, 64 units): without births F1 .80 and .82, error .07 and .06, after 300 and 600
alternations; with 30 times of birth .91 and .02 after 400. Births at the end alone, 40 alternations after each, gave .74. On a
matrix of a real model (golden attn_out) the error is 1 and 4 % larger with them (s = .5 and .75).
"""

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.shapes import Dense, Read, Write

LITTLE = 0.02  # of the median use; .05 and .1 find as much, .3 less
STARTS = 3
STEPS = 15  # of the power iteration


def reinit_unused_units(read: Read, write: Write, target: Dense, metric: Metric, entries: tuple[int, int]) -> list[int]:
    """Replace units of little use, in place. read, write, target: in the metric's coordinates; entries: that a born unit reads
    and writes. Returns: Their indices."""
    residual = target - read @ write
    own = (metric.weigh(read) * read).sum(0) * write.square().sum(1)
    use = own + 2 * ((metric.weigh(residual) @ write.T) * read).sum(0)
    useless = (use < LITTLE * use.median()).nonzero().squeeze(1)
    read[:, useless], write[useless] = 0.0, 0.0
    residual = target - read @ write
    for unit in useless.tolist():
        reads, writes = sparse_piece(residual, entries)
        read[:, unit], write[unit] = reads, writes
        residual = torch.addr(residual, reads, writes, alpha=-1)
    return useless.tolist()


def sparse_piece(residual: Dense, entries: tuple[int, int]) -> tuple[Float[Tensor, " d_in"], Float[Tensor, " d_out"]]:
    """Read and write vector, of equal norm, of a large rank-one piece with so many entries each."""
    n_reads, n_writes = entries
    largest, best = -1.0, None
    for column in residual.norm(dim=0).argsort(descending=True, stable=True)[:STARTS].tolist():
        writes = torch.zeros_like(residual[0])
        writes[column] = 1.0
        reads, size = residual[:, column], writes.new_zeros(())
        for _ in range(STEPS):
            reads = _unit_norm(_largest(residual @ writes, n_reads))
            writes = _largest(residual.T @ reads, n_writes)
            size = writes.norm()
            writes = _unit_norm(writes)
        if float(size) > largest:
            largest, best = float(size), (reads * size.sqrt(), writes * size.sqrt())
    assert best is not None
    return best


def _largest(vector: Float[Tensor, " width"], k: int) -> Float[Tensor, " width"]:
    """The k entries of largest magnitude; of those that tie the first."""
    kept = vector.abs().argsort(descending=True, stable=True)[:k]
    return torch.zeros_like(vector).index_copy_(0, kept, vector[kept])


def _unit_norm(vector: Float[Tensor, " width"]) -> Float[Tensor, " width"]:
    norm = vector.norm()
    return vector / norm if float(norm) > 0 else vector
