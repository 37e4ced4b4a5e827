"""attach: put units in place of a host's dense matrices, and take them out again without a trace.

1. `attach` checks everything before touching anything: sites exist, shapes fit, the factors were made from this very W
   (match.py), no site (nor one that shares its weights) is attached already.
2. Then it mounts the units; each step leaves an undo step, and if one fails, those done are undone. Methods that rewrite
   weights are refused from here on, and sites that do not run are reported (projection.py).
3. Whenever a loaded set is attached whole to a host with nothing else in it, its probe is run: tokens whose z and y were stored
   with the factors (`probe_at`). Loads-but-wrongly (another model's forward, a changed normalization, a rounding) ends in an
   error instead of in a paper. Parts of a set, sets put together, nested attachments and hooks of the user's change what
   enters a site: there it is not asked.
4. An attachment is watched (projection.py): a host's matrix or factors that are changed while they are attached end the next
   forward, or the next call, in an error. While `dense` is open, the units hand over to the host's own products.
5. `detach` (or leaving the with block, also by an exception) runs the undo steps in reverse order, and checks afterwards.
   Attachments are listed in the host itself, for `detach(model)`: whoever lost the handle takes the units out with it. A copy
   of the host has no such list.
6. From `attach` to `detach` Ctrl-C is held back where it would leave a host half changed, or changed without a handle
   (base/interrupts.py).
"""

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.display import card
from swd_lens.base.errors import AttachError, brief, quoted
from swd_lens.base.holding import take
from swd_lens.base.interrupts import Undo, hold_back_interrupts, joint, unparted
from swd_lens.base.surroundings import claim, with_torch_defaults
from swd_lens.hosts import Host, host_of
from swd_lens.hosts.host import STANDING, drops_out
from swd_lens.hosts.recording import record
from swd_lens.hosts.sites import Site, overlapping
from swd_lens.hosts.weights import listed_in
from swd_lens.units.cache import cover_helpers
from swd_lens.units.integrity import Probe
from swd_lens.units.match import check_units, dtype_of
from swd_lens.units.projection import Projection, Watch, projection_of, switched, watch_block
from swd_lens.units.unit_set import UnitSet

PROBE_LENGTH = 16
# Relative to the largest |z| of the probe. Float32 hosts agree to 1e-5; rounding through a deep bfloat16 host is coarse.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
_ROUNDED_TOLERANCE = 0.1
_STANDING = "_standing_attachments"  # in a model's own __dict__: `_Listed`
_WHILE_ATTACHED = (
    "while units are attached: it rewrites weights that the factors stand for, and the units would keep the old ones. "
    "Detach first, then factorize or transport to the new weights"
)


@with_torch_defaults
class Attachment:
    """A live attachment. Use it as a context manager, or call `detach()`.

    Attributes:
        factors: the units, by site name.
        sites: where they stand, in execution order.
    """

    def __init__(self, units: UnitSet):
        self.factors, self.sites, self._undo = units, units.sites, Undo()
        self._projections: dict[str, Projection] = {}

    def projection(self, site: str) -> Projection:
        """The module that stands in the site's dense product."""
        return self._projections[site]

    @property
    def attached(self) -> bool:
        return bool(self._undo)

    @joint
    def detach(self) -> None:
        """Give the host back as it was: logits, state_dict and hook_dict are restored bit for bit.

        Raises:
            AttachError: these factors are not attached (any more). Or, once they are taken out: the host's matrix or the factors
                were changed in place while they were attached, and nothing has said so yet.
        """
        if not self._undo:
            raise AttachError("these factors are not attached (any more); swd_lens.attach(model, factors) attaches them again")
        self._undo.run()
        self._require_unedited()

    @contextmanager
    @unparted
    def keeping_errors(self) -> Iterator[None]:
        """The dense host for a moment, with hooks on z: y is the dense output plus what hooks change in z, through the units.

        Ablating unit i takes (z_i - mu_i) B_i off the dense output; what the units do not explain of it stays.
        """
        with switched(self._projections.values(), "keeps_error"):
            yield

    def _require_unedited(self) -> None:
        watches = [projection.watch for projection in self._projections.values() if projection.watch is not None]
        if not any(watch.reported for watch in watches):
            for watch in watches:
                watch.at_call(self.factors.host)

    @contextmanager
    @unparted
    def dense(self) -> Iterator[None]:
        """The dense host for a moment: the units stay mounted and hand over to the host's own products.

        It computes what it computes without units, to the bit. No z is computed, and hooks on z are not called; rewriting
        weights stays refused.
        """
        with switched(self._projections.values(), "bypassed"):
            yield

    @unparted
    def __enter__(self) -> "Attachment":
        if not self._undo:
            raise AttachError("this attachment was detached; call swd_lens.attach(model, factors) again for a new one")
        return self

    @joint
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        was_attached = bool(self._undo)  # an earlier detach has looked already
        self._undo.__exit__(kind, error, trace)
        if kind is None and was_attached:
            self._require_unedited()

    def __str__(self) -> str:
        lines = [f"{site.hook_name}: {self.factors[site.name]!r}" for site in self.sites]
        return "\n  ".join([f"Attachment ({'attached' if self.attached else 'detached'})", *lines])

    def __repr__(self) -> str:
        return brief(str(self))

    def _repr_html_(self) -> str:
        columns = {
            "hook of z": [site.hook_name for site in self.sites],
            "units": [self.factors[site.name].n_units for site in self.sites],
            "replaces": [site.name for site in self.sites],
            "shape": [f"({site.d_in}, {site.d_out})" for site in self.sites],
        }
        state = "attached" if self.attached else "detached"
        return card(f"Attachment of {len(self.sites)} sites, {state}", pd.DataFrame(columns))


@with_torch_defaults
@joint
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
        AttachError: a site is attached already, shapes differ, the factors were made from another W or were changed in place, or
            a loaded set's probe does not give the stored z and y.
        HostInUseError: another thread uses this host; the attachment holds it until it is detached.
        UnknownSiteError: a site that this host does not have, or two that share weights.
        UnitSourceError, TypeError: see `swd_lens.units.unit_set.as_units`.
        UnsupportedHostError: see `swd_lens.hosts.host_of`, or a setting of the host under which z would not be one vector
            per position.
    """
    # 1. Check everything before anything is touched.
    host = host_of(model)
    units = UnitSet.of(host, factors)
    require_free(host, units.sites)
    for site in units.sites:
        check_units(host, site, units[site.name])
    # 2. From here on every step is undone: if one fails or is interrupted, now; else by `detach`.
    attachment = Attachment(units)
    push = attachment._undo.push
    with attachment._undo.if_broken():
        # 3. The host is this thread's, lists the attachment, and refuses methods that rewrite weights.
        hold_back_interrupts(push)
        take(host.model, "attach", push)
        listed_in(host.model, _STANDING, attachment, push, _Listed)
        host.guard(_WHILE_ATTACHED, push)
        # 4. Swap each site's dense product for a projection.
        of_layer: dict[int, dict[str, Projection]] = {}
        for site in units.sites:
            block = host.model.blocks[site.layer]
            # Like the block's own parameters: the layers of a large host may lie on several devices.
            projection, hook = projection_of(units[site.name], site.name, next(block.parameters()))
            projection.train(block.training)
            hook.train(block.training)
            host.swap(site, projection, hook, push)
            projection.watch = Watch(host, site, units[site.name])
            listed_in(host.model, STANDING, projection.watch, push)
            attachment._projections[site.name] = of_layer.setdefault(site.layer, {})[site.name] = projection
        # 5. Tell TransformerLens' own helpers, and see to it that sites that do not run are reported.
        cover_helpers(host.model, attachment._projections, push)
        for layer, projections in of_layer.items():
            watch_block(host.model.blocks[layer], projections, push)
        # 6. Compare z and y with those that were stored with the factors.
        check_probe(units)
    return attachment


@with_torch_defaults
@joint
def detach(model: Any) -> None:
    """Take all attached units out of a host, also those whose handle was lost; where there are none, nothing is done.

    The host is given back as it was, bit for bit, and the handles that are still there are detached.

    Args:
        model: the very host that was given to `attach`, not a copy of it.

    Raises:
        AttachError: units stand in it that came with a copy. Or, once all units are taken out: the host's matrix or the factors
            were changed in place while they were attached, and nothing has said so yet.
        HostInUseError: another thread uses this host.
        UnsupportedHostError: see `swd_lens.hosts.host_of`.
    """
    attachments = tuple(reversed(getattr(model, "__dict__", {}).get(_STANDING, ())))
    if attachments:
        claim(model)
        _run_all(attachments)
    host = host_of(model)
    for attachment in attachments:
        attachment._require_unedited()
    if left := _attached(host):
        raise AttachError(
            f"the units at {left[0]} came with a copy of a host to which they were attached, and detach knows what was "
            "attached to a host itself; copy or store the host while it has no units"
        )


@unparted
def _run_all(attachments: Sequence[Attachment]) -> None:  # one function: Ctrl-C does not part them
    for attachment in attachments:
        attachment._undo.run()


class _Listed(list[Attachment]):
    """The attachments that stand in a host, the first one first; copies of a host have none of them."""

    def __deepcopy__(self, memo: Any) -> "_Listed":
        return _Listed()

    def __reduce__(self) -> Any:
        return _Listed, ()


def require_free(host: Host, sites: Sequence[Site]) -> None:
    """Raises AttachError where one of these sites, or one that shares its weights, is attached already."""
    for site in sites:
        name = attached_at(host, site)
        if name is not None:
            shared = "" if name == site.name else f", which shares weights with {site.name},"
            raise AttachError(
                f"{name}{shared} is attached already; detach it first (a site holds one set of units at a time): "
                ".detach() of its handle, or swd_lens.detach(model), which needs none"
            )


def attached_at(host: Host, site: Site) -> str | None:
    """The attached site that is this one or shares its weights; None where there is none."""
    attached = _attached(host)
    return next((name for name in (site.name, *overlapping(site.name)) if name in attached), None)


def require_detached(model: Any, call: str) -> None:
    """Raises AttachError where units are attached to a host that a call takes as the dense one."""
    if attached := _attached(host_of(model)):
        raise AttachError(f"{call} is of the dense host, and units are attached at {attached[0]}: detach them first")


def is_bare(host: Host, beside: Collection[str] = ()) -> bool:
    """Whether no hooks, and no units but at the sites named, change what this host computes."""
    return not any(hook.fwd_hooks for hook in host.model.hook_dict.values()) and set(_attached(host)) <= set(beside)


def _attached(host: Host) -> list[str]:
    """Names of the places where units are attached, also of whole MLPs and of matrices that share weights with others."""
    return [site.name for site in (*host.sites(), *host.alternatives()) if host.is_swapped(site)]


def probe_tokens(rows: Int[Tensor, "rows pos"] | None, d_vocab: int, n_ctx: int) -> list[int]:
    """Choose a probe's tokens: the first calibration tokens, or seeded random ones without calibration."""
    if rows is not None:
        return rows[0, :PROBE_LENGTH].tolist()
    length = min(PROBE_LENGTH, n_ctx)
    return torch.randint(0, d_vocab, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def probe_at(
    model: Any, site: Site, tokens: list[int], read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"]
) -> Probe | None:
    """A probe of two factors: what enters the site on these tokens in the host as it is now; none under dropout."""
    if drops_out(model):
        return None
    run = record(host_of(model), torch.tensor([tokens]), inputs=[site], keep=lambda h: h[0, -1].float().cpu())
    return Probe.of(run.inputs[site.name], read, write)


def check_probe(units: UnitSet) -> None:
    """Run the probe of a set that has just been attached as a whole, to a host without dropout, hooks or other units. Raises
    AttachError: a site does not give the stored z or y, or the stored tokens cannot be run by this host."""
    host, cfg = units.host, units.host.model.cfg
    if "probe_tokens" not in units.provenance or set(units) != set(units.provenance.get("probe_sites", ())):
        return
    if units.coders or any(f.probe is None for f in units.factors.values()) or drops_out(host.model):
        return
    if not is_bare(host, set(units)):
        return
    ids = units.provenance["probe_tokens"]
    whole = isinstance(ids, list | tuple) and all(type(token) is int and 0 <= token < cfg.d_vocab for token in ids)
    if not whole or not 1 <= len(ids) <= cfg.n_ctx:
        raise AttachError(
            f"the probe of these factors was made on tokens that this host cannot run: {quoted(ids)}. Load them from a "
            "copy, or factorize again"
        )
    tolerance = _TOLERANCE.get(dtype_of(host), _ROUNDED_TOLERANCE)
    # z as the mounted units compute it: the kernel is tried, too, and y is one product with a few columns.
    row = torch.tensor([ids], dtype=torch.int64)
    run = record(host, row, units=units.sites, keep=lambda z: z[0, -1].double().cpu())
    for name, z in run.units.items():
        f = units.factors[name]
        assert f.probe is not None
        what, difference = f.probe.misfit(z, f.write, f.offsets)
        if difference > tolerance:
            raise AttachError(
                f"the probe of {name} fails: on the stored tokens its units give a {what} that is off by {difference:.2g} "
                f"of its size (allowed {tolerance:g}). The host computes something else than when these factors were "
                "made: compare model, transformer_lens version and settings (attention, positions, normalization), or "
                "factorize again"
            )
