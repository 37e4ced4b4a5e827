"""attach: put factors in place of a host's dense matrices, and take them out again without a trace.

1. Check everything before touching anything: sites exist, shapes fit, the factors were made from this very W, no site is
   attached already.
2. List the swaps, then do them; each leaves an undo step. If one fails, those done are undone.
3. `detach` (or leaving the with block, also by an exception) runs the undo steps in reverse order.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any

from swd_lens.factors import Factors, fingerprint
from swd_lens.hosts import Host, Undo, host_of
from swd_lens.inject.units import unit_projection
from swd_lens.sites import Site, select_sites


class AttachError(ValueError):
    """Factors cannot be attached (or detached) as asked; nothing was changed."""


class Attachment:
    """A live attachment. Use it as a context manager, or call `detach()`."""

    def __init__(self, host: Host, factors: Mapping[str, Factors]):
        self._host = host
        self._undo: list[Undo] = []
        self.factors = dict(factors)
        self.sites: list[Site] = []

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
        """The dense host for a moment: detach, run the body, attach the same factors again (hooks on z are not kept)."""
        self.detach()
        try:
            yield
        finally:
            self._attach()

    def __enter__(self) -> "Attachment":
        if not self.attached:
            raise AttachError("this attachment was detached; call swd_lens.attach(model, factors) again for a new one")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.attached:
            self.detach()

    def __repr__(self) -> str:
        state = "attached" if self.attached else "detached"
        lines = [f"{site.hook_name}: {self.factors[site.name]!r}" for site in self.sites]
        return "\n  ".join([f"Attachment ({state})", *lines])

    def _attach(self) -> None:
        try:
            for site in self.sites:
                f = self.factors[site.name]
                projection, hook = unit_projection(f.read, f.write, like=next(self._host.model.parameters()))
                projection.train(self._host.model.training)
                self._undo.append(self._host.swap(site, projection, hook))
        except BaseException:
            self._take_out()
            raise


def attach(model: Any, factors: Factors | Mapping[str, Factors]) -> Attachment:
    """Replace the dense product at each site by its factors; z_i gets the hook point blocks.{L}.hook_{site}_unit.

    Args:
        model: a HookedTransformer.
        factors: a FactorSet, a dict site name -> Factors, or one Factors that knows its site (made by `factorize`).

    Returns:
        Attachment: `with attach(model, factors): ...`, or keep it and call `.detach()`.

    Raises:
        AttachError: a site is attached already, shapes differ, or the factors were made from another W.
        UnknownSiteError: a site that this host does not have.
        UnsupportedHostError: see `swd_lens.hosts.host_of`.
    """
    host = host_of(model)
    attachment = Attachment(host, by_site(factors))
    attachment.sites = select_sites(host.sites(), attachment.factors)
    for site in attachment.sites:
        _check(host, site, attachment.factors[site.name])
    attachment._attach()
    return attachment


def by_site(factors: Factors | Mapping[str, Factors]) -> dict[str, Factors]:
    """A dict site name -> Factors, whatever way the factors were given.

    Raises:
        AttachError: no factors at all, or a single Factors that does not know its site.
    """
    if isinstance(factors, Factors):
        site = factors.provenance.get("site")
        if site is None:
            raise AttachError(
                "these Factors do not know their site (swd_lens.solve only saw tensors); "
                'name it: attach(model, {"blocks.0.mlp_out": factors})'
            )
        return {site: factors}
    if not factors:
        raise AttachError("there are no factors to attach: the set is empty")
    return dict(factors)


def _check(host: Host, site: Site, f: Factors) -> None:
    if host.is_swapped(site):
        raise AttachError(f"{site.name} is attached already; detach it first (a site holds one set of units at a time)")
    if (f.d_in, f.d_out) != (site.d_in, site.d_out):
        raise AttachError(
            f"factors for {site.name} are ({f.d_in}, {f.d_out}), the host's matrix is ({site.d_in}, {site.d_out}): "
            "they belong to another model"
        )
    made_from = f.provenance.get("weight_sha256")
    weight = host.weight(site)
    if made_from is not None and made_from != fingerprint(weight):
        error = f.relative_frobenius(weight)
        raise AttachError(
            f"the factors of {site.name} were made from another W than this host has now (relative Frobenius error "
            f"against the present W: {error:.3f}). Usual causes: other weights, another dtype, or TransformerLens weight "
            "processing (fold_ln, center_writing_weights) that differs from when they were made. Load the host the same "
            "way, or factorize this host again."
        )
