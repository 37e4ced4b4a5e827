"""attach: put units in place of a host's dense matrices, and take them out again without a trace.

1. Check everything before touching anything: sites exist, shapes fit, the factors were made from this very W (match.py),
   no site (nor one that shares its weights) is attached already.
2. List the swaps, then do them; each leaves an undo step. If one fails, those done are undone. Methods that rewrite
   weights are refused from here on, and sites that do not run are reported (watch.py).
3. The first time that a loaded set is attached whole, its probe is run: tokens that must give the z that were stored.
4. While `dense` is open, the units hand over to the host's own products.
5. `detach` (or leaving the with block, also by an exception) runs the undo steps in reverse order.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from swd_lens.base.undo import Undo
from swd_lens.hosts import Host, host_of
from swd_lens.hosts.sites import Site, overlapping
from swd_lens.units.match import AttachError, check_units
from swd_lens.units.probe import check_probe
from swd_lens.units.projection import Projection, bypassed, projection_of
from swd_lens.units.unit_set import UnitSet
from swd_lens.units.unit_set import sources_by_site as by_site
from swd_lens.units.watch import watch_block

__all__ = ["AttachError", "Attachment", "attach", "by_site", "require_free"]

_WHILE_ATTACHED = (
    "while units are attached: it rewrites weights that the factors stand for, and the units would keep the old ones. "
    "Detach first, then factorize or transport to the new weights"
)


class Attachment:
    """A live attachment. Use it as a context manager, or call `detach()`.

    Attributes:
        factors: the units, by site name.
        sites: where they stand, in execution order.
    """

    def __init__(self, units: UnitSet, undo: Undo):
        """Mounts the units, which `attach` has checked; `undo` is the caller's, so that an interruption leaves it in a hand."""
        self.factors, self.sites, self._undo = units, units.sites, undo
        self._projections: dict[str, Projection] = {}
        host = units.host
        host.guard(_WHILE_ATTACHED, undo.push)
        of_layer: dict[int, dict[str, Projection]] = {}
        for site in units.sites:
            block = host.model.blocks[site.layer]
            # Like the block's own parameters: the layers of a large host may lie on several devices.
            projection, hook = projection_of(units[site.name], site.name, next(block.parameters()))
            projection.train(block.training)
            hook.train(block.training)
            host.swap(site, projection, hook, undo.push)
            self._projections[site.name] = of_layer.setdefault(site.layer, {})[site.name] = projection
        for layer, projections in of_layer.items():
            watch_block(host.model.blocks[layer], projections, undo.push)

    @property
    def attached(self) -> bool:
        return bool(self._undo)

    def detach(self) -> None:
        """Give the host back as it was: logits, state_dict and hook_dict are restored bit for bit.

        Raises:
            AttachError: these factors are not attached (any more).
        """
        if not self.attached:
            raise AttachError(
                "these factors are not attached (any more); swd_lens.attach(model, factors) attaches them again"
            )
        self._undo.run()

    @contextmanager
    def dense(self) -> Iterator[None]:
        """The dense host for a moment: the units stay mounted and hand over to the host's own products.

        It computes what it computes without units, to the bit. No z is computed, and hooks on z are not called; rewriting
        weights stays refused.
        """
        with bypassed(self._projections.values()):
            yield

    def __enter__(self) -> "Attachment":
        try:
            if not self.attached:
                raise AttachError(
                    "this attachment was detached; call swd_lens.attach(model, factors) again for a new one"
                )
            return self
        except BaseException:
            # A Ctrl-C in here: the with statement does not leave what it has not entered.
            self._undo.run()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._undo.__exit__(kind, error, trace)

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        lines = [f"{site.hook_name}: {self.factors[site.name]!r}" for site in self.sites]
        return "\n  ".join([f"Attachment ({state})", *lines])


def attach(model: Any, factors: Any) -> Attachment:
    """Replace the dense product at each site by units; z_i gets the hook point blocks.{L}.hook_{site}_unit.

    Args:
        model: a HookedTransformer or TransformerBridge.
        factors: a FactorSet, a dict site name -> Factors (or another unit source, see
            `swd_lens.units.unit_set.as_units`: read/write tensors, an encode/decode pair, a SAELens SAE or transcoder), one
            Factors or SAELens object that knows its site, or a UnitSet.

    Returns:
        Attachment: `with attach(model, factors): ...`, or keep it and call `.detach()`.

    Raises:
        AttachError: a site is attached already, shapes differ, the factors were made from another W, or a loaded set's
            probe does not give the stored z.
        UnknownSiteError: a site that this host does not have, or two that share weights.
        UnitSourceError, TypeError: see `swd_lens.units.unit_set.as_units`.
        UnsupportedHostError: see `swd_lens.hosts.host_of`, or a setting of the host under which z would not be one vector
            per position.
    """
    host = host_of(model)
    units = UnitSet.of(host, factors)
    require_free(host, units.sites)
    for site in units.sites:
        check_units(host, site, units[site.name])
    undo = Undo()
    try:
        attachment = Attachment(units, undo)
        check_probe(units)
        return attachment
    except BaseException:
        undo.run()
        raise


def require_free(host: Host, sites: Sequence[Site]) -> None:
    """Raises AttachError where one of these sites, or one that shares its weights, is attached already."""
    everywhere = {site.name: site for site in (*host.sites(), *host.alternatives())}
    for site in sites:
        for name in (site.name, *overlapping(site.name)):
            if name in everywhere and host.is_swapped(everywhere[name]):
                shared = "" if name == site.name else f", which shares weights with {site.name},"
                raise AttachError(
                    f"{name}{shared} is attached already; detach it first (a site holds one set of units at a time)"
                )
