"""The modules that stand in a host's dense product: they compute z, show it to its hook point, and write the output.

1. `UnitProjection` holds factors: z = h @ read, y = z @ write + bias.
2. `CoderProjection` holds an encode/decode pair (coder.py).
3. `switched` has projections left in their places for a moment: "bypassed" they are the dense host; with "keeps_error" they are
   the dense host with only what hooks change in z, and the part of the output that units do not explain stays in it.
4. `projection_of` makes the one that a unit source needs, on the host's device and in its dtype.
5. `Watch` says whether the matrix and the factors of an attached site are still those that were attached. Both are marked
   (base/snapshots.py) when the site is mounted: the parameters that hold the matrix, and read, write and offsets of factors; an
   encode/decode pair is used as it is, and whoever trains it may write to it. A forward compares versions, which in-place
   operations, `load_state_dict` of a submodule and replaced parameters change. A call of swd_lens (`host_of`), and taking the
   units out, compare values, so that what was written through `.data` is noticed, too. A host that was moved to another dtype
   has other bits: then the fingerprint in the units' provenance decides.
6. `watch_block` reports projections that did not run: before a block runs, their `ran` is set to False; a projection that
   computes sets it to True; after the block has run, those that are still False are named.
"""

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from swd_lens.base.errors import AttachError, SiteDidNotRunWarning, legible
from swd_lens.base.interrupts import Push, unparted
from swd_lens.base.snapshots import TensorSnapshot, count_nonzeros
from swd_lens.hosts import Host
from swd_lens.hosts.recording import hooks_of, name_of
from swd_lens.hosts.sites import Site
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import EDITED, Factors
from swd_lens.units.kernels import FactorProduct
from swd_lens.units.match import same_weights


class Watch:
    """Whether the matrix and the factors of one attached site are still those that were attached; also in a deep copy of the
    host, with its own matrix and factors. reported: an error has said that something was changed."""

    def __init__(self, host: Host, site: Site, units: Units):
        self.site, self.provenance = site, units.provenance
        self.weight = TensorSnapshot(host.stored_parameters(site))
        self.factors = units.mark if isinstance(units, Factors) else None
        self.reported = False

    def at_forward(self) -> None:
        """Raises AttachError where the matrix or the factors were written to."""
        # In most forwards this line is all that is done.
        if self.weight.written() or (self.factors is not None and self.factors.written()):
            self._require(
                not self.weight.written() or self.weight.recast() or not self.weight.changed(),
                self.factors is None or not self.factors.changed(),
            )

    def at_call(self, host: Host) -> None:
        """Raises AttachError where the matrix or the factors hold other values."""
        if self.weight.recast() and same_weights(host, self.site, self.provenance):
            self.weight.renew()
        self._require(not self.weight.changed(), self.factors is None or not self.factors.changed())

    def _require(self, weight_holds: bool, factors_hold: bool) -> None:
        self.reported = self.reported or not (weight_holds and factors_hold)
        if not weight_holds:
            raise AttachError(
                f"{self.site.name}: the host's matrix was changed while units are attached to it, and they stand for the "
                "matrix that it was. Detach, change it, then factorize again (or transport the factors) and attach those"
            )
        if not factors_hold:
            raise AttachError(f"{self.site.name}: {EDITED}")


class UnitHookPoint(HookPoint):
    """The hook point of one site's z; in a printed host it is the line that tells what sits there."""

    def __init__(self, label: str):
        super().__init__()
        self.label = label

    def __repr__(self) -> str:
        watching = "".join(
            f", {len(hooks)} {which}" for hooks, which in ((self.fwd_hooks, "fwd"), (self.bwd_hooks, "bwd")) if hooks
        )
        return f"{type(self).__name__}({self.label}{watching})"


class Projection(nn.Module):
    """One site's units at work inside a host; called with the site's input, its live bias and its own dense product.

    hook: the HookPoint that sees z (batch, pos, unit); a child of the host's block, not of this module, so that its name is
    blocks.{L}.hook_{site}_unit. gives_bias: what the units give by themselves (`local`) has the site's bias in it.
    """

    hook: HookPoint
    gives_bias: ClassVar[bool]
    ran: bool
    bypassed: bool
    keeps_error: bool
    watch: Watch | None

    def __init__(self, hook: HookPoint):
        super().__init__()
        self.ran = self.bypassed = self.keeps_error = False
        self.watch = None
        # Past nn.Module.__setattr__, which would register the hook as a child and give it a second name.
        object.__setattr__(self, "hook", hook)

    def require_unedited(self) -> None:
        """Raise AttachError if the host's matrix or the factors were changed since they were mounted; before z is computed.

        What a compiled graph computes, the next call of swd_lens checks.
        """
        if self.watch is not None and not torch.compiler.is_compiling():
            self.watch.at_forward()

    def run_dense(self, h: Float[Tensor, "*batch d_in"], dense: Callable[[Tensor], Tensor]) -> Tensor:
        """The host's own product, while `bypassed`; no z is computed and hooks on it are not called."""
        self.ran = True
        return dense(h)

    @abstractmethod
    def local(self, h: Float[Tensor, "*batch d_in"], dense: Callable[[Tensor], Tensor]) -> Float[Tensor, "*batch d_out"]:
        """Compute the units' own output for this input, also while `bypassed`; no hook sees z. dense: the site's own h -> h @
        W + bias, for units that read or write beyond it."""

    def show(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        """Show z to the hooks and return it as they leave it. Where one looks and gradients are on, z always requires grad.
        Raises ValueError: a hook gave it another shape."""
        self.ran = True
        if (self.hook.fwd_hooks or self.hook.bwd_hooks) and torch.is_grad_enabled() and not z.requires_grad:
            z = z.detach().requires_grad_(True)
        left = self.hook(z)
        if left is not z and getattr(left, "shape", None) != z.shape:
            # It would be broadcast, or end in an error somewhere later in the host.
            shape = tuple(left.shape) if isinstance(left, Tensor) else type(left).__name__
            raise ValueError(
                f"a hook on {legible(self.hook.name)} ({legible(', '.join(map(name_of, hooks_of(self.hook))))}) returned "
                f"{shape} for a z of {tuple(z.shape)}. Return a z of the same shape, (batch, pos, unit), or nothing; "
                "z.expand or z.repeat makes it one"
            )
        return left


@contextmanager
@unparted
def switched(projections: Iterable[Projection], switch: str) -> Iterator[None]:
    """While open, "bypassed" or "keeps_error" is true of these projections; afterwards each is as it was."""
    before = [(projection, getattr(projection, switch)) for projection in projections]
    try:
        for projection, _ in before:
            setattr(projection, switch, True)
        yield
    finally:
        for projection, was in before:
            setattr(projection, switch, was)


class UnitProjection(Projection):
    """A projection that multiplies by read and write factors.

    The factors are non-persistent buffers: they follow the host's `.to()`, and the host's state_dict keys stay the same.
    offset_unit, offset_out: constants of transported factors; n_nonzeros: of read and write, where they are counted already.
    """

    gives_bias = False
    offset_unit: Tensor | None
    offset_out: Tensor | None

    def __init__(
        self,
        read: Float[Tensor, "d_in unit"],
        write: Float[Tensor, "unit d_out"],
        hook: HookPoint,
        offset_unit: Float[Tensor, " unit"] | None = None,
        offset_out: Float[Tensor, " d_out"] | None = None,
        n_nonzeros: tuple[int, int] | None = None,
    ):
        super().__init__(hook)
        of_read, of_write = n_nonzeros or (None, None)
        self.read, self.write = FactorProduct(read, n_nonzeros=of_read), FactorProduct(write, n_nonzeros=of_write)
        self.register_buffer("offset_unit", offset_unit, persistent=False)
        self.register_buffer("offset_out", offset_out, persistent=False)

    def forward(
        self, h: Float[Tensor, "*batch d_in"], bias: Float[Tensor, " d_out"] | None, dense: Any = None
    ) -> Float[Tensor, "*batch d_out"]:
        if self.bypassed:
            return self.run_dense(h, dense)
        self.require_unedited()
        if self.keeps_error:
            z = self.read(h, self.offset_unit)
            return dense(h) + self.write(self.show(z) - z, None)
        if self.offset_out is not None:
            bias = self.offset_out if bias is None else bias + self.offset_out
        return self.write(self.show(self.read(h, self.offset_unit)), bias)

    def local(self, h: Float[Tensor, "*batch d_in"], dense: Any = None) -> Float[Tensor, "*batch d_out"]:
        return self.write(self.read(h, self.offset_unit), self.offset_out)

    def __repr__(self) -> str:
        # One line in a printed host, without its two products; what the units are, the hook point's line says.
        return f"{type(self).__name__}(read {self.read.kernel}, write {self.write.kernel})"


class CoderProjection(Projection):
    """A projection that runs an encode/decode pair, which is used as it is and is no child of the host."""

    gives_bias = True
    units: CoderUnits

    def __init__(self, units: CoderUnits, hook: HookPoint):
        super().__init__(hook)
        object.__setattr__(self, "units", units)

    def forward(
        self, h: Float[Tensor, "*batch d_in"], bias: Float[Tensor, " d_out"] | None, dense: Callable[[Tensor], Tensor]
    ) -> Float[Tensor, "*batch d_out"]:
        if self.bypassed:
            return self.run_dense(h, dense)
        self.require_unedited()
        if self.keeps_error:
            return dense(h) + self.units.change(h, dense, self.show)
        return self.units.run(h, dense, self.show)

    def local(self, h: Float[Tensor, "*batch d_in"], dense: Callable[[Tensor], Tensor]) -> Float[Tensor, "*batch d_out"]:
        return self.units.run(h, dense)


def projection_of(units: Units, name: str, like: Tensor) -> tuple[Projection, HookPoint]:
    """The projection for a unit source and its hook point, on the device and in the dtype of the host's weight `like`."""
    if isinstance(units, CoderUnits):
        hook = UnitHookPoint(f"{_label(units, name, units.edges)}, {units.name}")
        return CoderProjection(units, hook), hook
    assert isinstance(units, Factors)  # as_units lets nothing else through
    counts = count_nonzeros(units.read), count_nonzeros(units.write)  # once: the label and both kernels ask for them
    edges = units.edges if units.settings.get("edges") == "dense" else sum(counts)
    hook = UnitHookPoint(_label(units, name, edges))
    offsets = (None, None) if units.offsets is None else (units.offsets.unit, units.offsets.out)
    read, write, offset_unit, offset_out = (
        None if t is None else t.detach().to(like.device, like.dtype) for t in (units.read, units.write, *offsets)
    )
    assert read is not None and write is not None
    return UnitProjection(read, write, hook, offset_unit, offset_out, counts), hook


def _label(units: Units, name: str, edges: int) -> str:
    sparsity = 1.0 - edges / (units.d_in * units.d_out)
    return f"{name} ({units.d_in}, {units.d_out}): {units.n_units} units, {edges:,} edges, s={sparsity:.4f}"


class _Begin:
    # Objects, not closures: a deep copy of the host then watches its own projections.
    def __init__(self, projections: Mapping[str, Projection]):
        self.projections = dict(projections)

    def __call__(self, block: nn.Module, args: Any) -> None:
        for projection in self.projections.values():
            projection.ran = False


class _End(_Begin):
    def __call__(self, block: nn.Module, args: Any, output: Any = None) -> None:
        idle = [name for name, projection in self.projections.items() if not projection.ran]
        if idle:
            warnings.warn(
                SiteDidNotRunWarning(
                    f"{', '.join(idle)}: attached, but did not run in this forward; its output was computed without the "
                    "units, and hooks on z did not fire. Something replaced the module or goes round it; detach, and attach "
                    "again"
                ),
                stacklevel=2,
            )


def watch_block(block: nn.Module, projections: Mapping[str, Projection], push: Push) -> None:
    """Name the sites of a block that are attached but did not run (TransformerLens#1688), in a `SiteDidNotRunWarning`; a block
    that does not run at all (stop_at_layer, start_at_layer) says nothing. projections: of the block, by site name."""
    begin, end = _Begin(projections), _End(projections)

    def undo() -> None:
        for hooks, ours in ((block._forward_pre_hooks, begin), (block._forward_hooks, end)):
            for key in [key for key, hook in hooks.items() if hook is ours]:
                del hooks[key]

    push(undo)
    block.register_forward_pre_hook(begin)
    block.register_forward_hook(end)
