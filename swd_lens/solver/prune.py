"""Pruning: W itself made sparse, its own coordinates as units (preset "pruned"). The cheapest rival of a factorization.

W (d_in, d_out) ≈ S sparse, written as I S (units are inputs: neurons, at mlp_out) or as S I (units are outputs).

1. M = diag(v) W is the target in the coordinates of the metric C (metric.py), so that its entries are W_ij sqrt(G_ii): the
   score by which OBD and Wanda prune. The loss is tr((M - S)^T C (M - S)).
2. Support: the largest entries, as many as K leaves where every unit that keeps any costs one edge more.
3. Least squares on the support, by conjugate gradients against C (refine.py).
4. With `swaps`, edges are exchanged so many times, in either factor (swaps.py), and both refitted: units may then mix
   coordinates. Those that keep no weight stay empty.
5. Undo the scaling of the inputs.
"""

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import conjugate_gradient, refine
from swd_lens.solver.spec import OnIteration, PruneSpec, Step
from swd_lens.solver.swaps import STEPS, swapped

REFIT_ROUNDS = 3  # after the last exchange


def factorize(
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None,
    edges: int,
    spec: PruneSpec,
    shrinkage: float,
    on_iteration: OnIteration | None = None,
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Read and write factor, of `edges` entries together, of a validated weight, in its dtype; gram None means G = I. Raises
    GramError: G is not positive semi-definite."""
    at_output = spec.starts_at_output(*weight.shape)
    metric, target, scale = Metric.scaled(weight, gram, shrinkage)
    support = _support(target.abs(), edges, unit_dim=1 if at_output else 0).to(target.dtype)
    pruned = target * support
    if metric.matrix is not None:
        diagonal = torch.ones(len(target), 1, dtype=target.dtype, device=target.device)
        pruned = conjugate_gradient(pruned, metric.weigh(target), support, metric.weigh, diagonal, spec.refine_steps)
    kept = pruned.any(0 if at_output else 1)
    identity = torch.diag(kept.to(pruned.dtype))  # a unit of no entries has no edge at all
    read, write = (pruned, identity) if at_output else (identity, pruned)
    if spec.swaps:
        of_kept = swapped(read[:, kept], write[kept], target, metric, edges, spec.swaps + 1)  # the first turn fills up
        read[:, kept], write[kept] = refine(*of_kept, target, metric, REFIT_ROUNDS, STEPS)
    if on_iteration is not None:
        on_iteration(Step(1, 1, lambda: metric.error(target, read, write)))
    if spec.swaps:
        return metric.undo(read), write * scale
    if at_output:
        return metric.undo(read) * scale, write
    return read, metric.undo(write) * scale  # the units' own edges are 1


def _support(magnitude: Float[Tensor, "d_in d_out"], edges: int, unit_dim: int) -> Bool[Tensor, "d_in d_out"]:
    """The largest entries; the first of a unit costs two edges, each further one an edge. Ties go by index."""
    flat = magnitude.flatten()
    order = flat.argsort(descending=True, stable=True)[:edges]
    order = order[flat[order] > 0]
    unit = order // magnitude.shape[1] if unit_dim == 0 else order % magnitude.shape[1]
    first = torch.full((magnitude.shape[unit_dim],), len(order), dtype=order.dtype, device=order.device)
    first.scatter_reduce_(0, unit, torch.arange(len(order), device=order.device), "amin")
    cost = torch.ones_like(order)
    cost[first[first < len(order)]] += 1
    kept = torch.zeros_like(flat, dtype=torch.bool)
    kept[order[cost.cumsum(0) <= edges]] = True
    return kept.view(magnitude.shape)
