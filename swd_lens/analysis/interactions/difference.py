"""Second differences through an activation, for all pairs of some units, summed over tokens (app. "Interaction Patterns").

Of one token, with preactivation h, contributions c_i = z_i B_i, activation f (gated: times the other branch, u) and W = W_out:

    Delta_ij = f(h) - f(h - c_i) - f(h - c_j) + f(h - c_i - c_j)        q_ij = Delta_ij W
    m_i      = [f(h) - f(h - c_i)] W                                    wanted: sum_t |q_ij|^2, E_i = sum_t |m_i|^2

Nothing is approximated; three facts about f and B make it cheap.

1. f acts on each channel by itself, so Delta_ij is zero wherever i or j does not write: only the channels S that both write
   are computed, a few percent of d_mlp at usual sparsities.
2. f(h) - f(h - c_j) is needed once per unit, not per pair. What is left per pair is one activation on S.
3. sum_t |Delta W|^2 = <Delta^T Delta, (W W^T) restricted to S>: |S|^2 products a token in place of |S| d_model. W W^T is
   computed once. Where |S| > d_model the product with W is the cheaper one, and is taken.

Tensors are laid out (channel, token), so that picking channels copies whole rows. Tokens come in blocks; sums over blocks are
float64, products have the host's precision (float32 at least). On a CPU as many Python threads as torch would use take one
unit at a time, each with single-threaded kernels: two threads that meet after every small kernel wait for each other most of
the time on a busy machine. So the bits of these sums do not depend on the number of threads; those of the host's forward may.

f is found in the host (`find_activation`), and held against what the host computes.

1. Candidates are the functions that the block's modules call their activation.
2. The right one gives post from pre: post = f(pre), gated post = f(pre) * up, plus a constant (TransformerLens adds b_in of a
   gated MLP there). What else may stand between (a LayerNorm as in solu_ln, a softmax over channels) is refused: then one
   channel's change is not that channel's alone.
3. Where a kernel of torch gives the same values on a fine grid, it is used: TransformerLens and Hugging Face spell GELU out in
   eight passes over memory.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import error
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

# What all units' own differences f(h) - f(h - c_i) may take for one block of tokens; it decides how long a block is.
_BLOCK_BYTES = 2**29
_LONGEST_BLOCK = 1024  # tokens: longer ones no longer fit the cache, and are slower
_SHORTEST_BLOCK = 64


@dataclass
class _Writes:
    """A unit's write vector without its zeros.

    Attributes:
        channels: (written,) the channels it writes, ascending.
        weights: (written,) what it writes there.
    """

    channels: Int[Tensor, " written"]
    weights: Float[Tensor, " written"]


class PairSums:
    """Running sums of |q_ij|^2 and |m_i|^2 over tokens.

    Memory: W W^T (d_mlp, d_mlp), half a gigabyte for a block of tokens, and what a few pairs take; the more the units write,
    the shorter a block.

    Args:
        write: (unit, d_mlp) write vectors of the units that are paired.
        weight: (d_mlp, d_model) the dense W_out.
        activation: f.
        dtype: of all products.

    Attributes:
        pairs: (unit, unit) float64, sum_t |q_ij|^2; symmetric, zero on the diagonal.
        marginals: (unit,) float64, E_i.
        n_tokens: how many were added.
    """

    def __init__(
        self,
        write: Float[Tensor, "unit d_mlp"],
        weight: Float[Tensor, "d_mlp d_model"],
        activation: Activation,
        dtype: torch.dtype,
    ):
        n, device = len(write), weight.device
        self.pairs = torch.zeros(n, n, dtype=torch.float64)
        self.marginals = torch.zeros(n, dtype=torch.float64)
        self.n_tokens = 0
        self._activation = activation
        self._weight = weight.to(dtype)
        with _one_thread(device):
            self._gram = self._weight @ self._weight.T
        self._writes = [_writes(row.to(device, dtype)) for row in write]
        # Where a channel sits in a unit's own list; -1 where the unit does not write it.
        self._index = torch.full((n, write.shape[1]), -1, dtype=torch.int32, device=device)
        for index, unit in zip(self._index, self._writes, strict=True):
            index[unit.channels] = torch.arange(len(unit.channels), dtype=torch.int32, device=device)
        wide = sum(len(unit.channels) for unit in self._writes) * self._weight.element_size()
        self._block = min(max(_BLOCK_BYTES // wide, _SHORTEST_BLOCK), _LONGEST_BLOCK)

    def n_blocks(self, n_tokens: int) -> int:
        """How many blocks that many tokens are added in."""
        return -(-n_tokens // self._block)

    def add(
        self,
        z: Float[Tensor, "_token unit"],
        pre: Float[Tensor, "_token d_mlp"],
        up: Float[Tensor, "_token d_mlp"] | None,
        each: Callable[[], Any] = lambda: None,
    ) -> None:
        """Add some tokens: z of the paired units, the preactivation, and the branch that a gate multiplies (None: no gate).

        Args:
            each: called whenever a unit was paired with all later ones, for progress bars.
        """
        with torch.no_grad():
            for rows in torch.arange(len(pre), device=pre.device).split(self._block):
                block = [None if t is None else t[rows].to(self._weight).T.contiguous() for t in (z, pre, up)]
                assert block[0] is not None and block[1] is not None
                self._add_block(block[0], block[1], block[2], each)
        self.n_tokens += len(pre)

    def _add_block(self, z: Tensor, pre: Tensor, up: Tensor | None, each: Callable[[], Any]) -> None:
        def difference(i: int) -> Tensor:
            unit = self._writes[i]
            with torch.no_grad():
                return full[unit.channels] - self._value(_less(pre, unit, z[i]), up, unit.channels)

        def sums(i: int) -> tuple[int, Tensor, Tensor]:
            unit = self._writes[i]
            with torch.no_grad():  # holds for the calling thread only; the full precision of products is everybody's
                gram = self._gram[unit.channels][:, unit.channels]
                marginal = self._squared(own[i], unit.channels, gram)
                later = self._with_later(i, z, _less(pre, unit, z[i]), full[unit.channels] - own[i], up, own, gram)
            return i, marginal, later

        units = range(len(self._writes))
        with _each_unit(pre.device) as each_unit:
            full = self._value(pre, up, slice(None))
            own = list(each_unit(difference, units))
            for i, marginal, later in each_unit(sums, units):
                self.marginals[i] += marginal.double().cpu()
                self.pairs[i, i + 1 :] += later
                self.pairs[i + 1 :, i] += later
                each()

    def _with_later(
        self, i: int, z: Tensor, less: Tensor, cut: Tensor, up: Tensor | None, own: list[Tensor], gram: Tensor
    ) -> Float[Tensor, " later"]:
        """sum over the block's tokens of |q_ij|^2 for j = i + 1 ...

        Args:
            less, cut: (written, token) h - c_i and f(h - c_i) on the channels that i writes.
            own: f(h) - f(h - c_j) of every unit j, on the channels that j writes.
            gram: W W^T on the channels that i writes.
        """
        squares = []
        for j in range(i + 1, len(self._writes)):
            unit = self._writes[j]
            index = self._index[i].index_select(0, unit.channels)
            in_j = (index >= 0).nonzero()[:, 0]
            in_i = index.index_select(0, in_j)
            channels = unit.channels.index_select(0, in_j)
            both = less.index_select(0, in_i)
            both.addr_(unit.weights.index_select(0, in_j), z[j], alpha=-1)
            delta = self._value(both, up, channels)
            delta -= cut.index_select(0, in_i)
            delta += own[j].index_select(0, in_j)
            squares.append(self._squared(delta, channels, gram, in_i))
        return torch.stack(squares).double().cpu() if squares else torch.zeros(0, dtype=torch.float64)

    def _value(self, pre: Tensor, up: Tensor | None, channels: Any) -> Tensor:
        """f(pre), times the other branch where there is a gate; a new tensor."""
        value = self._activation(pre)
        return value if up is None else value * up[channels]

    def _squared(self, delta: Tensor, channels: Tensor, gram: Tensor, within: Tensor | None = None) -> Tensor:
        """sum_t |delta_t W|^2 for delta (channel, token); gram is W W^T on them, or on those that `within` picks."""
        if len(delta) > self._weight.shape[1]:
            return (delta.T @ self._weight[channels]).square().sum()
        if within is not None:
            gram = gram.index_select(0, within).index_select(1, within)
        # A sum of squares, which rounding may take below zero where it is next to nothing.
        return torch.dot((delta @ delta.T).flatten(), gram.flatten()).clamp_min(0)


def _writes(row: Float[Tensor, " d_mlp"]) -> _Writes:
    channels = row.nonzero()[:, 0]
    return _Writes(channels, row[channels])


def _less(pre: Tensor, unit: _Writes, z: Tensor) -> Float[Tensor, "written token"]:
    """h - c_i on the channels that the unit writes."""
    return torch.addr(pre.index_select(0, unit.channels), unit.weights, z, alpha=-1)


@contextmanager
def _each_unit(device: torch.device) -> Iterator[Callable[..., Any]]:
    """A `map` that takes one unit per thread; torch's number of threads is one inside and restored after."""
    threads = torch.get_num_threads()
    if device.type != "cpu" or threads == 1:
        yield map
        return
    with _one_thread(device):
        pool = ThreadPoolExecutor(threads)
        try:
            yield pool.map
        finally:
            # After a Ctrl-C units that were not begun are dropped; nothing is left to run when this returns.
            pool.shutdown(cancel_futures=True)


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Kernels of a CPU on one thread inside: how many share a kernel decides how it rounds. Restored after."""
    threads = torch.get_num_threads()
    try:
        if device.type == "cpu":
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(threads)


# ------------------------------------------------------------------ the activation


def find_activation(host: Host, site: Site, pre: Tensor, up: Tensor | None, post: Tensor) -> tuple[Activation, str]:
    """The host's activation at a site, and its name.

    Args:
        pre, up, post: (token, d_mlp) what the host computed; up None where nothing is gated.

    Raises:
        UnsupportedHostError: no function of the host leads from pre to post channel by channel.
    """
    for name, function in _candidates(host, site):
        try:
            if _leads(function, pre, up, post):
                return _kernel(function, name)
        except (TypeError, RuntimeError, IndexError):  # a module of that name that is no function of one tensor
            continue
    between = "activation(pre)" if up is None else "activation(gate) * up"
    raise error("interactions-of-mixed-channels", layer=site.layer, between=between)


def _candidates(host: Host, site: Site) -> Iterator[tuple[str, Any]]:
    known: set[int] = set()
    for module in host.model.blocks[site.layer].modules():
        for name in _NAMES:
            function = module.__dict__.get(name, module._modules.get(name))
            if callable(function) and id(function) not in known:
                known.add(id(function))
                yield getattr(function, "__name__", type(function).__name__), function


def _leads(function: Activation, pre: Tensor, up: Tensor | None, post: Tensor) -> bool:
    value = function(pre)
    every_second = function(pre[:, ::2])  # a softmax over channels would differ
    constant = post - (value if up is None else value * up)
    allowed = _ROUNDING * torch.finfo(post.dtype).eps * float(post.abs().max())
    same = float((constant - constant[:1]).abs().max()) <= allowed
    return same and float((every_second - value[:, ::2]).abs().max()) <= allowed


def _kernel(function: Activation, name: str) -> tuple[Activation, str]:
    try:
        value = function(_GRID)
    except RuntimeError:  # its parameters sit elsewhere
        return function, name
    for known, kernel in _KERNELS.items():
        if value.dtype == _GRID.dtype and float((value - kernel(_GRID)).abs().max()) <= _SAME:
            return kernel, known
    return function, name
