"""The activation f of an MLP, found in the host and held against what the host computes (`find_activation`).

1. Candidates are the functions that the block's modules call their activation.
2. The right one gives post from pre: post = f(pre), gated post = f(pre) * up, plus a constant (TransformerLens adds b_in of a
   gated MLP there). What else may stand between (a LayerNorm as in solu_ln, a softmax over channels) is refused: then one
   channel's change is not that channel's alone.
3. Where a kernel of torch gives the same values on a fine grid, it is used: TransformerLens and Hugging Face spell GELU out in
   eight passes over memory.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.machine import is_out_of_memory
from swd_lens.hosts import Host
from swd_lens.hosts.sites import Site

Activation = Callable[[Tensor], Tensor]

# What modules call their activation: TransformerLens and most of Hugging Face (act_fn), GPT-2 and NeoX (act), BERT, OPT.
_NAMES = ("act_fn", "act", "intermediate_act_fn", "activation_fn", "activation", "activation_func")
_KERNELS: dict[str, Activation] = {
    "relu": F.relu,
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu (tanh)": partial(F.gelu, approximate="tanh"),
}
_GRID = torch.linspace(-12, 12, 24_001, dtype=torch.float64)
_SAME = 1e-7  # of float64 values on the grid; gelu and gelu (tanh) differ by 5e-4
_ROUNDING = 8  # of the dtype's eps, relative to the largest |post|


def find_activation(host: Host, site: Site, pre: Tensor, up: Tensor | None, post: Tensor) -> tuple[Activation, str]:
    """The host's activation at a site, and its name. pre, up, post: (token, d_mlp) what the host computed; up None where
    nothing is gated. Raises UnsupportedHostError: no function of the host leads from pre to post channel by channel."""
    for name, function in _candidates(host, site):
        try:
            value = function(pre)
            every_second = function(pre[:, ::2])  # a softmax over channels would differ
            constant = post - (value if up is None else value * up)
            allowed = _ROUNDING * torch.finfo(post.dtype).eps * float(post.abs().max())
            same = float((constant - constant[:1]).abs().max()) <= allowed
            if same and float((every_second - value[:, ::2]).abs().max()) <= allowed:
                return _kernel(function, name)
        except (TypeError, RuntimeError, IndexError) as cause:
            # A module of that name is no function of one tensor.
            if is_out_of_memory(cause):
                raise
    between = "activation(pre)" if up is None else "activation(gate) * up"
    raise UnsupportedHostError(
        f"the MLP of blocks.{site.layer} does not feed {between} into mlp_out: another step stands there, such as the "
        "LayerNorm of solu_ln or a softmax over channels, or its activation was not found in the host. Pair interactions "
        "need an activation that acts on each channel by itself"
    )


def _candidates(host: Host, site: Site) -> Iterator[tuple[str, Any]]:
    known: set[int] = set()
    for module in host.model.blocks[site.layer].modules():
        for name in _NAMES:
            function = module.__dict__.get(name, module._modules.get(name))
            if callable(function) and id(function) not in known:
                known.add(id(function))
                yield getattr(function, "__name__", type(function).__name__), function


def _kernel(function: Activation, name: str) -> tuple[Activation, str]:
    try:
        value = function(_GRID)
    except RuntimeError as cause:  # its parameters sit elsewhere
        if is_out_of_memory(cause):
            raise
        return function, name
    for known, kernel in _KERNELS.items():
        if value.dtype == _GRID.dtype and float((value - kernel(_GRID)).abs().max()) <= _SAME:
            return kernel, known
    return function, name
