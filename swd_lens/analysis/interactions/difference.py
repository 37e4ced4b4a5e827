"""Second differences through an activation, for all pairs of some units, summed over tokens (app. "Interaction Patterns").

Of one token, with preactivation h, contributions c_i = z_i B_i, activation f (gated: times the other branch, u) and W = W_out:

    Delta_ij = f(h) - f(h - c_i) - f(h - c_j) + f(h - c_i - c_j)        q_ij = Delta_ij W
    m_i      = [f(h) - f(h - c_i)] W                                    wanted: sum_t |q_ij|^2, E_i = sum_t |m_i|^2

A unit j of the up branch of a gated MLP, contribution d_j to u, enters linearly: two of them do not interact, but one does with
a unit of the gate, since what the product f(h) u loses when both are taken out is not the sum of what each takes out:

    Delta_ij = f(h) u - f(h - c_i) u - f(h) (u - d_j) + f(h - c_i) (u - d_j) = [f(h) - f(h - c_i)] d_j        m_j = f(h) d_j W

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
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.interactions.site import Activation

# What all units' own differences f(h) - f(h - c_i) may take for one block of tokens; it decides how long a block is.
_BLOCK_BYTES = 2**29
_LONGEST_BLOCK = 1024  # tokens: longer ones no longer fit the cache, and are slower
_SHORTEST_BLOCK = 64


@dataclass
class _Writes:
    """A unit's write vector without its zeros."""

    channels: Int[Tensor, " written"]  # (written,) the channels it writes, ascending
    weights: Float[Tensor, " written"]  # (written,) what it writes there
    places: Int[Tensor, " d_mlp"]  # (d_mlp,) where each channel stands among these; -1 where the unit does not write it


class _Projection:
    """The dense W_out and W W^T, by which differences are projected, and how many tokens a block of them has.

    Args:
        weight: (d_mlp, d_model) the dense W_out.
        activation: f.
        dtype: of all products.
        n_written: channels that all units write together, whose differences a block holds.
    """

    _add_block: Callable[..., None]  # adds a block of each tensor

    def __init__(self, weight: Float[Tensor, "d_mlp d_model"], activation: Activation, dtype: torch.dtype, n_written: int):
        self.n_tokens = 0
        self._activation = activation
        self._weight = weight.to(dtype)
        with _one_thread(weight.device):
            self._gram = self._weight @ self._weight.T
        wide = n_written * self._weight.element_size()
        self._block = min(max(_BLOCK_BYTES // wide, _SHORTEST_BLOCK), _LONGEST_BLOCK)

    def n_blocks(self, n_tokens: int) -> int:
        """How many blocks that many tokens are added in."""
        return -(-n_tokens // self._block)

    def add(self, *tensors: Float[Tensor, "_token _channel"] | None, each: Callable[[], Any] = lambda: None) -> None:
        """Add some tokens: z of the paired units (of the gate, then of the up branch), the preactivation, and the branch that
        a gate multiplies (None: no gate). each: called whenever a unit was paired with all later ones, or with all up units,
        for progress bars."""
        pre: Any = tensors[-2]
        with torch.no_grad():
            for rows in torch.arange(len(pre), device=pre.device).split(self._block):
                # (channel, token)
                block = (None if t is None else t[rows].to(self._weight).T.contiguous() for t in tensors)
                self._add_block(*block, each)
        self.n_tokens += len(pre)

    def _squared(self, delta: Tensor, channels: Tensor, gram: Tensor, within: Tensor | None = None) -> Tensor:
        """sum_t |delta_t W|^2 for delta (channel, token); gram is W W^T on them, or on those that `within` picks."""
        if len(delta) > self._weight.shape[1]:
            return (delta.T @ self._weight[channels]).square().sum()
        if within is not None:
            gram = gram.index_select(0, within).index_select(1, within)
        # A sum of squares, which rounding may take below zero where it is next to nothing.
        return torch.dot((delta @ delta.T).flatten(), gram.flatten()).clamp_min(0)


class PairSums(_Projection):
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
        n = len(write)
        self.pairs = torch.zeros(n, n, dtype=torch.float64)
        self.marginals = torch.zeros(n, dtype=torch.float64)
        self._writes = _writes(write.to(weight.device, dtype))
        super().__init__(weight, activation, dtype, sum(len(unit.channels) for unit in self._writes))

    def _add_block(self, z: Tensor, pre: Tensor, up: Tensor | None, each: Callable[[], Any]) -> None:
        def difference(i: int) -> Tensor:  # f(h) - f(h - c_i), on the channels that i writes
            unit = self._writes[i]
            with torch.no_grad():
                return full[unit.channels] - self._value(_less(pre, unit, z[i]), up, unit.channels)

        def sums(i: int) -> tuple[int, Tensor, Tensor]:
            unit = self._writes[i]
            with torch.no_grad():  # holds for the calling thread only; the full precision of products is everybody's
                gram = self._gram[unit.channels][:, unit.channels]
                marginal = self._squared(own[i], unit.channels, gram)
                # h - c_i and f(h - c_i), on the channels that i writes.
                less, cut = _less(pre, unit, z[i]), full[unit.channels] - own[i]
                squares = []  # sum over the block's tokens of |q_ij|^2 for j = i + 1 ...
                for j in range(i + 1, len(self._writes)):
                    other = self._writes[j]
                    in_i, in_j = _shared(unit, other)
                    channels = other.channels.index_select(0, in_j)
                    both = less.index_select(0, in_i)
                    both.addr_(other.weights.index_select(0, in_j), z[j], alpha=-1)
                    delta = self._value(both, up, channels)
                    delta -= cut.index_select(0, in_i)
                    delta += own[j].index_select(0, in_j)
                    squares.append(self._squared(delta, channels, gram, in_i))
            return i, marginal, torch.stack(squares).double().cpu() if squares else torch.zeros(0, dtype=torch.float64)

        units = range(len(self._writes))
        with _each_unit(pre.device) as each_unit:
            full = self._value(pre, up, slice(None))
            own = list(each_unit(difference, units))
            for i, marginal, later in each_unit(sums, units):
                self.marginals[i] += marginal.double().cpu()
                self.pairs[i, i + 1 :] += later
                self.pairs[i + 1 :, i] += later
                each()

    def _value(self, pre: Tensor, up: Tensor | None, channels: Any) -> Tensor:
        """f(pre), times the other branch where there is a gate; a new tensor."""
        value = self._activation(pre)
        return value if up is None else value * up[channels]


class GateUpSums(_Projection):
    """Running sums over tokens of |q_ij|^2 for units i of the gate and j of the up branch, and of |m|^2 of both.

    Args:
        gate_write, up_write: (unit, d_mlp) write vectors of the units of each that are paired.
        weight, activation, dtype: see `PairSums`.

    Attributes:
        pairs: (gate unit, up unit) float64, sum_t |q_ij|^2.
        marginals, up_marginals: float64, E of each gate unit and of each up unit.
        n_tokens: how many were added.
    """

    def __init__(
        self,
        gate_write: Float[Tensor, "gate d_mlp"],
        up_write: Float[Tensor, "up d_mlp"],
        weight: Float[Tensor, "d_mlp d_model"],
        activation: Activation,
        dtype: torch.dtype,
    ):
        self.pairs = torch.zeros(len(gate_write), len(up_write), dtype=torch.float64)
        self.marginals = torch.zeros(len(gate_write), dtype=torch.float64)
        self.up_marginals = torch.zeros(len(up_write), dtype=torch.float64)
        self._gate, self._up = (_writes(write.to(weight.device, dtype)) for write in (gate_write, up_write))
        super().__init__(weight, activation, dtype, sum(len(unit.channels) for unit in self._gate + self._up))

    def _add_block(self, z: Tensor, up_z: Tensor, pre: Tensor, up: Tensor, each: Callable[[], Any]) -> None:
        def of_up_unit(j: int) -> Tensor:
            unit = self._up[j]
            with torch.no_grad():
                own = full[unit.channels] * unit.weights[:, None] * up_z[j]
                return self._squared(own, unit.channels, self._gram[unit.channels][:, unit.channels])

        def of_gate_unit(i: int) -> tuple[int, Tensor, Tensor]:
            unit = self._gate[i]
            with torch.no_grad():
                gram = self._gram[unit.channels][:, unit.channels]
                opened = full[unit.channels] - self._activation(_less(pre, unit, z[i]))  # f(h) - f(h - c_i)
                marginal = self._squared(opened * up[unit.channels], unit.channels, gram)
                squares = []  # sum over the block's tokens of |[f(h) - f(h - c_i)] d_j W|^2 of every up unit j
                for other, z_j in zip(self._up, up_z, strict=True):
                    in_i, in_j = _shared(unit, other)
                    delta = opened.index_select(0, in_i)
                    delta *= other.weights.index_select(0, in_j)[:, None]
                    delta *= z_j
                    squares.append(self._squared(delta, other.channels.index_select(0, in_j), gram, in_i))
                return i, marginal, torch.stack(squares).double().cpu()

        with _each_unit(pre.device) as each_unit:
            full = self._activation(pre)
            own = list(each_unit(of_up_unit, range(len(self._up))))
            self.up_marginals += torch.stack(own).double().cpu()
            for i, marginal, pairs in each_unit(of_gate_unit, range(len(self._gate))):
                self.marginals[i] += marginal.double().cpu()
                self.pairs[i] += pairs
                each()


def _writes(write: Float[Tensor, "unit d_mlp"]) -> list[_Writes]:
    units = []
    for row in write:
        channels = row.nonzero()[:, 0]
        places = torch.full((len(row),), -1, dtype=torch.int32, device=row.device)
        places[channels] = torch.arange(len(channels), dtype=torch.int32, device=row.device)
        units.append(_Writes(channels, row[channels], places))
    return units


def _shared(unit: _Writes, other: _Writes) -> tuple[Int[Tensor, " both"], Int[Tensor, " both"]]:
    """The channels that two units write, as places in the list of each."""
    places = unit.places.index_select(0, other.channels)
    in_other = (places >= 0).nonzero()[:, 0]
    return places.index_select(0, in_other), in_other


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
