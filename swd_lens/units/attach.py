"""attach: put units in place of a host's dense matrices, and take them out again without a trace.

1. Check everything before touching anything: sites exist, shapes fit, the factors were made from this very W (match.py),
   no site (nor one that shares its weights) is attached already.
2. List the swaps, then do them; each leaves an undo step. If one fails, those done are undone. Methods that rewrite
   weights are refused from here on, and sites that do not run are reported (watch.py).
3. The first time that a loaded set is attached whole, its probe is run: tokens that must give the z that were stored.
4. `detach` (or leaving the with block, also by an exception) runs the undo steps in reverse order.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from swd_lens.hosts import Host, Undo, host_of, sites_of
from swd_lens.hosts.sites import Site, overlapping, select_sites
from swd_lens.units.coder import Units
from swd_lens.units.match import AttachError, check_weights
from swd_lens.units.probe import check_probe
from swd_lens.units.projection import Projection, projection_of
from swd_lens.units.saelens import from_saelens, is_saelens
from swd_lens.units.sources import as_units
from swd_lens.units.watch import watch_block

_WHILE_ATTACHED = (
    "while units are attached: it rewrites weights that the factors stand for, and the units would keep the old ones. "
    "Detach first, then factorize or transport to the new weights"
)


class Attachment:
    """A live attachment. Use it as a context manager, or call `detach()`."""

    def __init__(self, host: Host, factors: Mapping[str, Units]):
        self._host = host
        self._undo: list[Undo] = []
        self.factors = dict(factors)
        self.sites: list[Site] = []
        self._made: dict[str, tuple[Any, Projection, Any]] = {}

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
        self._take_out()

    def _take_out(self) -> None:
        while self._undo:
            # Popped only when done: an interrupted detach can be called again (undoing twice is harmless).
            self._undo[-1]()
            self._undo.pop()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """The dense host for a moment: detach, run the body, attach the same units again (hooks on z stay).

        Raises:
            AttachError: the body rewrote weights and these units no longer belong to them; they stay detached.
        """
        before = self._weights()
        self.detach()
        try:
            yield
        finally:
            if self._weights() != before:
                for site in self.sites:
                    check_weights(self._host, site, self.factors[site.name])
            self._attach()

    @contextmanager
    def bypassed(self) -> Iterator[None]:
        """The dense host for a moment, cheaper than `suspended`: the units stay mounted and hand over to the host's product."""
        before = [(made[1], made[1].bypassed) for made in self._made.values()]
        try:
            for projection, _ in before:
                projection.bypassed = True
            yield
        finally:
            for projection, bypassed in before:
                projection.bypassed = bypassed

    def _weights(self) -> list[tuple[int, int]]:
        """Changes when a parameter is replaced or written to (not through `.data`): cheaper than reading them."""
        return [(p.data_ptr(), p._version) for p in self._host.model.parameters()]

    def __enter__(self) -> "Attachment":
        try:
            if not self.attached:
                raise AttachError(
                    "this attachment was detached; call swd_lens.attach(model, factors) again for a new one"
                )
            return self
        except BaseException:
            # A Ctrl-C in here: the with statement does not leave what it has not entered.
            self._take_out()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self._take_out()
        finally:  # a Ctrl-C may hit the first; what is undone is not undone again
            self._take_out()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        lines = [f"{site.hook_name}: {self.factors[site.name]!r}" for site in self.sites]
        return "\n  ".join([f"Attachment ({state})", *lines])

    def _attach(self) -> None:
        try:
            register = self._undo.append
            self._host.guard(_WHILE_ATTACHED, register)
            of_layer: dict[int, dict[str, Projection]] = {}
            for site in self.sites:
                block = self._host.model.blocks[site.layer]
                projection, hook = self._projection(site, block)
                projection.train(block.training)
                hook.train(block.training)
                self._host.swap(site, projection, hook, register)
                of_layer.setdefault(site.layer, {})[site.name] = projection
            for layer, projections in of_layer.items():
                watch_block(self._host.model.blocks[layer], projections, register)
        except BaseException:
            self._take_out()
            raise

    def _projection(self, site: Site, block: Any) -> tuple[Projection, Any]:
        """The site's projection and hook point, made once: `suspended` is called for every batch."""
        # Like the block's own parameters: the layers of a large host may lie on several devices.
        like = next(block.parameters())
        place = (like.device, like.dtype)
        if site.name not in self._made or self._made[site.name][0] != place:
            self._made[site.name] = place, *projection_of(self.factors[site.name], site.name, like)
        return self._made[site.name][1:]


def attach(model: Any, factors: Any) -> Attachment:
    """Replace the dense product at each site by units; z_i gets the hook point blocks.{L}.hook_{site}_unit.

    Args:
        model: a HookedTransformer or TransformerBridge.
        factors: a FactorSet, a dict site name -> Factors (or another unit source, see
            `swd_lens.units.sources.as_units`: read/write tensors, an encode/decode pair, a SAELens SAE or transcoder), or
            one Factors or SAELens object that knows its site.

    Returns:
        Attachment: `with attach(model, factors): ...`, or keep it and call `.detach()`.

    Raises:
        AttachError: a site is attached already, shapes differ, the factors were made from another W, or a loaded set's
            probe does not give the stored z.
        UnknownSiteError: a site that this host does not have, or two that share weights.
        UnitSourceError, TypeError: see `swd_lens.units.sources.as_units`.
        UnsupportedHostError: see `swd_lens.hosts.host_of`, or a setting of the host under which z would not be one vector
            per position.
    """
    host = host_of(model)
    given = by_site(factors)
    sites = sites_of(host, given)
    attachment = Attachment(host, {site.name: as_units(_of(given, site), site) for site in sites})
    attachment.sites = sites
    require_free(host, sites)
    for site in sites:
        _check(host, site, attachment.factors[site.name])
    try:
        attachment._attach()
        check_probe(host, factors, sites)
        return attachment
    except BaseException:
        attachment._take_out()
        raise


def by_site(factors: Any) -> dict[str, Any]:
    """A dict site name -> unit source, whatever way they were given.

    Raises:
        AttachError: nothing at all, or a single source that does not know its site.
    """
    if not isinstance(factors, Mapping):
        known = from_saelens(factors) if is_saelens(factors) else {}
        site = next(iter(known), None) or getattr(factors, "provenance", {}).get("site")
        if site is None:
            raise AttachError(
                f"this {type(factors).__name__} does not know its site (swd_lens.solve only saw tensors); "
                'name it: attach(model, {"blocks.0.mlp_out": factors})'
            )
        return {site: known.get(site, factors)}
    if not factors:
        raise AttachError("there are no factors to attach: the set is empty")
    return dict(factors)


def _of(given: Mapping[str, Any], site: Site) -> Any:
    """The source that names a site, also by a TransformerLens or Hugging Face name."""
    return (
        given[site.name] if site.name in given else next(f for name, f in given.items() if select_sites([site], name))
    )


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


def _check(host: Host, site: Site, f: Units) -> None:
    if (f.d_in, f.d_out) != (site.d_in, site.d_out):
        raise AttachError(
            f"factors for {site.name} are ({f.d_in}, {f.d_out}), the host's matrix is ({site.d_in}, {site.d_out}): "
            "they belong to another model"
        )
    check_weights(host, site, f)
