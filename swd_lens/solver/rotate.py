"""Rotations: a few units at a time are exchanged for the sparsest basis of what they stand for.

At the end of a patient alternation most units of a planted product are right, and a few share what others should be. Moving
single entries does not part them; the span of all of them together, with the residual, does. Again and again:

1. An entry of the residual is drawn by its square, and 2 to 10 units near it: those that reach its row or column, or much of
   the residual.
2. Of their product plus the residual the main directions are taken, as many as units, and the sparsest basis of their columns or
   of their rows (span.py); the other side is least squares.
3. All factors are cut to K and refined a little; what lowers the error is kept.

Planted factors by "deep", from coordinates, without it and with it: 4 + 4 entries (128 x 64, 64 units) F1 .91 and .98, error .016
and .002; single inputs among 8 + 8 entries .86 and .92, .014 and .004. Matrices of trained models gain nothing, and it ends soon.
"""

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import refine
from swd_lens.solver.shapes import Dense, Read, Write
from swd_lens.solver.span import SMALL, cut, main_directions, sparsest_basis

# Units in one trial.
FEWEST, MOST = 2, 10
# Trials in vain, in a row, after which it ends: before the first success, and after it.
FIRST_PATIENCE, PATIENCE = 40, 150
# A trial that lowers the squared error by less than this share of it is rounding.
GAIN = 1e-6


def rotated(read: Read, write: Write, target: Dense, metric: Metric, trials: int, seed: int) -> tuple[Read, Write]:
    """Factors of no more entries and no larger error; in the metric's coordinates."""
    edges = int(read.count_nonzero() + write.count_nonzero())
    generator = torch.Generator().manual_seed(seed)
    error, in_vain, patience = metric.error(target, read, write), 0, FIRST_PATIENCE
    for _ in range(trials):
        if in_vain == patience or error < GAIN:
            break
        group = near_residual(read, write, target, generator)
        trial = exchange(read, write, target, group, by_output=bool(torch.rand(1, generator=generator) < 0.5))
        if trial is not None:
            a, b = cut(*trial, edges)
            trial = refine(a, b, target, metric, rounds=2, steps=4)
            lower = metric.error(target, *trial)
            if lower < error * (1 - GAIN):
                (read, write), error, in_vain, patience = trial, lower, 0, PATIENCE
                continue
        in_vain += 1
    return read, write


def near_residual(read: Read, write: Write, target: Dense, generator: torch.Generator) -> Int[Tensor, " chosen"]:
    """Step 1: indices of units, drawn. Draws go by size, not by place: other orders of channels and units draw the same."""
    residual = (target - read @ write).square()
    size = int(torch.randint(FEWEST, min(MOST, len(write)) + 1, (1,), generator=generator))
    entries = residual.flatten().cpu().sort(descending=True, stable=True)
    drawn = int(torch.multinomial(entries.values.to(torch.float32), 1, generator=generator))
    row, column = divmod(int(entries.indices[drawn]), target.shape[1])
    by_size = (read.norm(dim=0) * write.norm(dim=1)).argsort(descending=True, stable=True).argsort()
    draws = torch.rand(3, len(write), generator=generator).to(read)[:, by_size]
    reach = ((residual @ (write != 0).to(read).T) * (read != 0)).sum(0)
    at_entry = (read[row] != 0) * (1 + draws[0]) + (write[:, column] != 0) * (1 + draws[1])
    elsewhere = 2 * draws[2] * reach / reach.max().clamp_min(torch.finfo(reach.dtype).tiny)
    return (at_entry + elsewhere).topk(size).indices


def exchange(
    read: Read, write: Write, target: Dense, group: Int[Tensor, " chosen"], *, by_output: bool
) -> tuple[Read, Write] | None:
    """Step 2: the factors with these units anew; None where no sparse basis of their number was found."""
    product = target - read @ write + read[:, group] @ write[group]
    directions = main_directions(product.T if by_output else product, len(group)).to(torch.float32)
    if directions.shape[1] < len(group):
        return None
    sparse = (directions @ sparsest_basis(directions, SMALL)).to(target.dtype)
    if sparse.shape[1] < len(group):
        return None
    other = torch.linalg.pinv(sparse) @ (product.T if by_output else product)
    new_read, new_write = (other.T, sparse.T) if by_output else (sparse, other)
    read, write = read.clone(), write.clone()
    read[:, group], write[group] = new_read, new_write
    return read, write
