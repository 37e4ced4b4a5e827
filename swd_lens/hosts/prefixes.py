"""Kept prefixes: what both kinds of host do with the keys and values of a prompt's earlier positions.

A prefix repeated for many copies of the batch holds keys and values once: copies are made when a layer is run. Copies follow each
other whole, so that copies of copies are just more copies.
"""

from typing import Any

import torch
from torch import Tensor

from swd_lens.hosts.host import Start


def require_before(start: Start | None, layer: int) -> None:
    """Raise ValueError where a run to `layer` would start behind it."""
    if start is not None and start.layer > layer:
        raise ValueError(f"this run ends before block {layer}, but its start is block {start.layer}; take an earlier start")


def require_kept(prefix: Any, layer: int) -> None:
    """Raise ValueError where a run would start before the first layer that a prefix keeps (`repeat_prefix(..., from_layer)`)."""
    first = getattr(prefix, "from_layer", 0)
    if layer < first:
        raise ValueError(
            f"this prefix keeps layers from {first} on only (repeat_prefix with from_layer={first}), but the run starts "
            f"at layer {layer}; take the whole prefix, or a start at layer {first} or later"
        )


def shape_only(tensor: Tensor, times: int) -> Tensor:
    """As many rows as `times` copies would have, all one element; not a view, which would keep the whole alive."""
    return tensor.new_zeros((1,) * tensor.ndim).expand(times * tensor.shape[0], *tensor.shape[1:])


def appended(kept: Tensor, new: Tensor, times: int, dim: int) -> Tensor:
    """Append keys or values of `times` copies of the batch to those that are kept once, along their dimension of positions."""
    copies = kept.expand(times, *kept.shape), new.unflatten(0, (times, -1))
    return torch.cat(copies, dim=dim if dim < 0 else dim + 1).flatten(0, 1)
