"""Swaps: entries of two factors that are worth least are exchanged for those that would lower the error most.

1. `filled`: where K is not reached, entries are added whose best value alone, all others held, lowers the loss most; with it.
2. Both factors are refitted a little (refine.py).
3. A share of the entries goes again, those that are worth least (`cut`, span.py), and so on. What raises the error is taken back,
   and half as many go in the next turn.

For factors that are nearly right, as those of peeled pieces, or that are to stay near what they are, as pruned neurons: the
alternation moves budgets and supports of all units.
"""

import torch

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import refine
from swd_lens.solver.shapes import Dense, Read, Write
from swd_lens.solver.span import cut
from swd_lens.solver.support import keep_exactly

# Turns, conjugate-gradient steps per factor in each, and the share of K that is exchanged in the first.
TURNS, STEPS, SHARE = 6, 8, 0.03
# Relative error (squared) of factors that are as right as float32 can tell.
EXACT = 1e-12
_TINY = 1e-30


def swapped(read: Read, write: Write, target: Dense, metric: Metric, edges: int, turns: int = TURNS) -> tuple[Read, Write]:
    """Factors with `edges` entries, in the metric's coordinates, from ones with no more; the first turn only fills up to them."""
    best, error, share = (read, write), float("inf"), SHARE
    spare = edges - 2 * len(write)  # each unit keeps one entry on either side
    for _ in range(turns):
        read, write = refine(*filled(read, write, target, metric, edges), target, metric, rounds=1, steps=STEPS)
        reached = metric.error(target, read, write)
        if reached < error:
            best, error = (read, write), reached
        else:
            share /= 2
        if error < EXACT or spare <= 0:
            break
        read, write = cut(*best, edges - min(max(int(edges * share), 1), spare))
    return best


def filled(read: Read, write: Write, target: Dense, metric: Metric, edges: int) -> tuple[Read, Write]:
    """Add the entries that are missing of `edges`, each where it alone, at its best value, lowers the loss most."""
    missing = edges - int(read.count_nonzero() + write.count_nonzero())
    if missing <= 0:
        return read, write
    rest = metric.weigh(target - read @ write)
    read_curvature = write.square().sum(1)  # C has a unit diagonal
    write_curvature = (metric.weigh(read) * read).sum(0)[:, None]
    read_steps = rest @ write.T / read_curvature.clamp_min(_TINY)
    write_steps = read.T @ rest / write_curvature.clamp_min(_TINY)
    read_gains = read_steps.square() * read_curvature * (read == 0)
    write_gains = write_steps.square() * write_curvature * (write == 0)
    chosen = keep_exactly(torch.cat([read_gains.flatten(), write_gains.flatten()])[None], missing)
    of_read, of_write = chosen.to(read).flatten().split([read.numel(), write.numel()])
    return read + read_steps * of_read.view_as(read), write + write_steps * of_write.view_as(write)
