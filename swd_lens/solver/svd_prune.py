"""Pruning of the singular value decomposition: W's singular vectors made sparse, as units (preset "svd_pruned").

The SVD is the best W = A B with few units, but its units are dense. This is what becomes of it at the K of a factorization.

1. W = U S V^T, A = U sqrt(S), B = sqrt(S) V^T. So both vectors of a unit have the norm sqrt(sigma), which is the canonical form
   (solve.py). What is kept does not depend on this split: the scores of step 2 are the same for A D and D^-1 B.
2. An entry is worth the error that leaving it out alone would cause: for the read entry A_ij, |A_ij| sqrt(G_ii) times the norm of
   B's row j; for the write entry B_jk, |B_jk| times rms(z_j), rms(z_j)^2 = (A^T G A)_jj.
3. Support: the entries of most worth, K of both factors together. A unit needs an entry on either side, so the first one that it
   keeps brings with it the best one of its other side (`_support`).
4. Both factors in turns by least squares on their supports, in the coordinates of the metric (refine.py).
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import refine
from swd_lens.solver.spec import OnIteration, Step, SvdPruneSpec

# Singular values below this share of the largest are those of W's own rounding to float32: their vectors mean nothing.
ROUNDING = 8 * torch.finfo(torch.float32).eps


def factorize(
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None,
    edges: int,
    spec: SvdPruneSpec,
    shrinkage: float,
    on_iteration: OnIteration | None = None,
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Read and write factor, of `edges` entries together, of a validated weight, in its dtype; gram None means G = I. Unit i is
    of the i-th singular value. Raises GramError: G is not positive semi-definite."""
    metric, target, scale = Metric.scaled(weight, gram, shrinkage)
    left, singular, right = torch.linalg.svd(weight / scale, full_matrices=False)
    root = torch.where(singular > ROUNDING * singular[0], singular, 0.0).sqrt()
    read, write = left * root * metric.scale, right * root[:, None]  # of diag(v) W, as everything below

    # The root of the error that leaving an entry out alone would cause.
    mean_squares = (read * metric.weigh(read)).sum(0).clamp_min(0)
    worth = read.abs() * write.norm(dim=1), write.abs() * mean_squares.sqrt()[:, None]
    read_support, write_support = _support(*worth, edges)
    read, write = read * read_support, write * write_support
    for i in range(spec.refine_rounds):
        read, write = refine(read, write, target, metric, 1, spec.refine_steps)
        if on_iteration is not None:
            on_iteration(Step(i + 1, spec.refine_rounds, lambda a=read, b=write: metric.error(target, a, b)))
    return metric.undo(read) * scale, write


def _support(
    read_worth: Float[Tensor, "d_in unit"], write_worth: Float[Tensor, "unit d_out"], edges: int
) -> tuple[Bool[Tensor, "d_in unit"], Bool[Tensor, "unit d_out"]]:
    """The entries of most worth, as many as `edges` where so many have any; ties go by index, the read factor first.

    The first entry of a unit costs two edges: its own, and that of the best entry on the unit's other side. Where the last edge
    is too little for a new unit, it goes to the next entry of one that is there.
    """
    worth = torch.cat([read_worth.flatten(), write_worth.flatten()])
    n_read, n_units = read_worth.numel(), len(write_worth)
    order = worth.argsort(descending=True, stable=True)
    order = order[worth[order] > 0]
    is_write = order >= n_read
    unit = torch.where(is_write, (order - n_read) // write_worth.shape[1], order % n_units)

    # A unit's first entry on either side, as its place in the order; the later one comes with the earlier.
    places = torch.arange(len(order), device=order.device)
    nowhere = torch.full((n_units,), len(order), dtype=places.dtype, device=places.device)
    first_read, first_write = (nowhere.scatter_reduce(0, unit[side], places[side], "amin") for side in (~is_write, is_write))
    opens, partner = torch.minimum(first_read, first_write), torch.maximum(first_read, first_write)
    whole = partner < len(order)  # else one side has no entry of any worth
    cost = whole[unit].to(order.dtype)
    cost[opens[whole]], cost[partner[whole]] = 2, 0

    chosen = (cost.cumsum(0) <= edges) & (cost > 0)
    opened = torch.zeros_like(whole)
    opened[unit[chosen]] = True
    if int(cost[chosen].sum()) < edges:
        further = ((cost == 1) & ~chosen & opened[unit]).nonzero().flatten()
        chosen[further[:1]] = True
    chosen[partner[opened]] = True
    kept = torch.zeros_like(worth, dtype=torch.bool)
    kept[order[chosen]] = True
    return kept[:n_read].view(read_worth.shape), kept[n_read:].view(write_worth.shape)
