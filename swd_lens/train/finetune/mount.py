"""Factors in training inside a frozen host: values on fixed supports, the modules that compute with them, and the mounting.

1. `Support` holds one factor: the flat places of its nonzeros, found once, and a float32 vector of their values. Training
   changes the vector only; entries outside the places do not exist for it, so the support cannot grow. `keep_nonzero` replaces
   a value that became zero by the smallest normal number of its sign: it cannot shrink either.
2. `TrainedProjection` scatters both vectors into dense factors in every forward; autograd brings back the gradient at the
   places. While it is `bypassed` it returns the host's own dense product: one mounted host is both, replaced and dense.
3. `mounted` puts them into a host whose parameters ask for no gradients, and takes them out again.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from swd_lens.base.errors import FinetuneError
from swd_lens.hosts.host import frozen
from swd_lens.hosts.predictions import Predictions
from swd_lens.units import Projection, UnitSet, attach
from swd_lens.units.factors import Factors
from swd_lens.units.projection import UnitHookPoint, switched, watch_block

# The smallest number with full precision: below it arithmetic may flush to zero. bfloat16 holds it, too.
SMALLEST = torch.finfo(torch.float32).tiny
_WHILE_TRAINING = "while factors are fine-tuned on this host: they stand for the weights that it would rewrite"


class Support(nn.Module):
    """One factor as values on fixed places. values: (nnz,) float32, trainable, in row-major order of the places."""

    def __init__(self, factor: Float[Tensor, "rows columns"], device: torch.device | str):
        super().__init__()
        self.shape = (factor.shape[0], factor.shape[1])
        flat = factor.detach().to(device, torch.float32).reshape(-1)
        self._places = flat.nonzero()[:, 0]  # int64: torch scatters by nothing else
        self.values = nn.Parameter(flat[self._places])

    def dense(self, dtype: torch.dtype = torch.float32) -> Float[Tensor, "rows columns"]:
        """The factor, differentiable by the values."""
        values = self.values.to(dtype)
        return values.new_zeros(self.shape[0] * self.shape[1]).scatter_(0, self._places, values).view(self.shape)

    @torch.no_grad()
    def keep_nonzero(self) -> None:
        """Move what came closer to zero than the smallest normal number back to it; -0.0 counts as negative."""
        small = self.values.abs() < SMALLEST
        self.values.copy_(torch.where(small, torch.full_like(self.values, SMALLEST).copysign(self.values), self.values))


class TrainedProjection(Projection):
    """Factors in training; like `UnitProjection`, but for where read and write come from. Offsets are kept as they are."""

    def __init__(self, f: Factors, hook: HookPoint, like: Tensor):
        """. like: a parameter of the host beside the site: its device is where the values lie."""
        super().__init__(hook)
        self.read, self.write = Support(f.read, like.device), Support(f.write, like.device)
        offsets = (None, None) if f.offsets is None else (f.offsets.unit, f.offsets.out)
        self.offset_unit, self.offset_out = (None if t is None else t.to(like.device, like.dtype) for t in offsets)

    def forward(
        self, h: Float[Tensor, "*batch d_in"], bias: Shaped[Tensor, " d_out"] | None, dense: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*batch d_out"]:
        if self.bypassed:
            return self.run_dense(h, dense)
        z = self.show(_plus(h @ self.read.dense(h.dtype), self.offset_unit))
        return _plus(_plus(z @ self.write.dense(z.dtype), bias), self.offset_out)

    @torch.no_grad()
    def factors(self, f: Factors) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
        """read and write as they are now, where and as the given Factors hold theirs."""
        return self.read.dense().to(f.read.device, f.read.dtype), self.write.dense().to(f.write.device, f.write.dtype)


def _plus(y: Tensor, constant: Tensor | None) -> Tensor:
    # In y's dtype: under autocast y is bfloat16 and would be promoted by a float32 bias.
    return y if constant is None else y + constant.to(y.dtype)


@dataclass(frozen=True)
class Mounted:
    """A host with factors in training."""

    units: UnitSet  # the factors as they were given, all of them `Factors`
    projections: dict[str, TrainedProjection] = field(default_factory=dict)  # by site name, in execution order

    def supports(self) -> dict[str, Support]:
        """ "blocks.0.mlp_out.read" -> its support, for every factor, in execution order."""
        return {
            f"{name}.{side}": getattr(projection, side)
            for name, projection in self.projections.items()
            for side in ("read", "write")
        }

    @cached_property
    def predictions(self) -> Predictions:
        """Predictions of the host with the factors."""
        return Predictions(self.units.host)

    def run(self, rows: Tensor, *, dense: bool) -> Float[Tensor, "_rows pos _width"]:
        """A run for `predictions`: of the host with the factors, with gradient where it is on; or of the dense host, without."""
        if not dense:
            return self.predictions.run(rows)
        with torch.no_grad(), switched(self.projections.values(), "bypassed"):
            return self.predictions.run(rows)


def trainable(model: Any, factors: Any) -> UnitSet:
    """The units that were given, if all of them can be trained and attached. Raises FinetuneError: a unit source that is not
    Factors, or without a nonzero entry; AttachError, UnknownSiteError, UnitSourceError, UnsupportedHostError: see
    `swd_lens.attach`."""
    units = UnitSet.of(model, factors)
    for name, coder in units.coders.items():
        raise FinetuneError(
            f"{name} holds {coder.name}, an encode/decode pair: only read and write factors on a fixed support can be "
            "fine-tuned. Leave it out, or train it with its own code"
        )
    for name, f in units.factors.items():
        if f.edges == 0:
            raise FinetuneError(f"{name} has no nonzero entry, so there is nothing to train; leave it out")
    with attach(model, units):  # not `.detach()`: a Ctrl-C in that would leave them attached
        pass
    return units


@contextmanager
def mounted(units: UnitSet) -> Iterator[Mounted]:
    """The host with all factors in training. On the way out, also by an exception or Ctrl-C, it is what it was."""
    host, training = units.host, Mounted(units)
    with frozen(host, _WHILE_TRAINING) as undo:
        for site in units.sites:
            block = host.model.blocks[site.layer]
            hook = UnitHookPoint(f"{site.name}, in training")
            projection = TrainedProjection(units.factors[site.name], hook, next(block.parameters()))
            host.swap(site, projection.train(block.training), hook.train(block.training), undo.push)
            training.projections[site.name] = projection
        for layer in {site.layer: None for site in units.sites}:
            of_layer = {site.name: training.projections[site.name] for site in units.sites if site.layer == layer}
            watch_block(host.model.blocks[layer], of_layer, undo.push)
        yield training
