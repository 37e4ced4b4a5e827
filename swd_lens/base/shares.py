"""The fewest units that together have a share of what all of them give: how concentrated an effect is."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def fewest_with(
    share: float, gains: Float[Tensor, "prediction unit"], edges: Int[Tensor, " unit"]
) -> Int[Tensor, "prediction 2"]:
    """Edges and number of the first units, by descending gain, whose sum reaches the share, the last of them counted.

    Args:
        share: of the sum of gains, between 0 and 1.
        gains: at least 0 each.
        edges: of each unit.

    Returns: (edges, units) of each prediction; 0 where it has no gains.
    """
    ranked, order = gains.sort(dim=1, descending=True, stable=True)
    total = gains.sum(1, keepdim=True)
    needed = (ranked.cumsum(1) < share * total).sum(1, keepdim=True)
    n_edges = edges[order].cumsum(1).gather(1, needed.clamp(max=len(edges) - 1))
    return torch.cat([n_edges, needed + 1], 1) * (total > 0)
