"""Hosts: the model that is being factorized, behind one small protocol.

`host_of(model)` wraps a model; `find_sites(model, pattern)` lists its factorizable matrices. Everything above this
package (calibration, injection, fidelity, circuits) speaks to `Host` only. There are two kinds: hooked/
(HookedTransformer, transformer_lens 3.9) and bridge/ (TransformerBridge, 3.9 and 4.x). This file knows both; the
others take a host as an argument and import host.py (but beginnings.py, which works on models).
"""

from typing import Any

from torch import nn

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.surroundings import claim, with_torch_defaults
from swd_lens.hosts.adapters import require_no_adapter
from swd_lens.hosts.families import is_bridge, is_hooked
from swd_lens.hosts.host import (
    STANDING,
    Affine,
    Begun,
    Host,
    Start,
    matrix_entries,
    require_gradients,
    require_no_dropout,
    sites_of,
)
from swd_lens.hosts.sites import Pattern, Site

__all__ = [
    "Affine",
    "Begun",
    "Host",
    "Start",
    "find_sites",
    "host_of",
    "matrix_entries",
    "require_gradients",
    "require_no_dropout",
    "sites_of",
]


def host_of(model: Any) -> Host:
    """Wrap a model.

    Cheap to call again: what was made of its matrices' shapes is remembered, and looked up by the shapes that it has now, so
    that modules that were replaced or processed since are seen. The model itself is neither changed nor kept alive. The call
    of swd_lens that asks, if one does, has it for its thread alone until it ends. Where units are attached, their factors and
    matrices are read once, to see that nobody changed them in place.

    Raises:
        AttachError: the matrix or the factors of an attached site were changed.
        HostInUseError: another thread uses it.
        UnsupportedHostError: neither a HookedTransformer nor a TransformerBridge, or one whose matrices cannot be seen as
            (d_in, d_out).
    """
    # Each kind is imported where it is needed: transformer_lens 4 has no HookedTransformer.
    if is_hooked(model):
        from swd_lens.hosts.hooked import HookedTransformerHost as Kind
    elif is_bridge(model):
        from swd_lens.hosts.bridge import BridgeHost as Kind
    else:
        if isinstance(model, nn.Module):
            require_no_adapter(model)
        raise UnsupportedHostError(
            f"swd_lens works on a transformer_lens HookedTransformer or TransformerBridge; got {type(model).__name__}. Load "
            "one with swd_lens.load_host(name), TransformerBridge.boot_transformers(name) or "
            "HookedTransformer.from_pretrained(name)."
        )
    claim(model)
    host = Kind(model)
    for guard in tuple(model.__dict__.get(STANDING, ())):
        guard.at_call(host)
    return host


@with_torch_defaults
def find_sites(model: Any, pattern: Pattern = "all") -> list[Site]:
    """The sites of a model that a pattern names, in execution order. See `swd_lens.hosts.sites.select_sites`.

    Raises:
        UnknownSiteError: nothing matches (nearest names listed), or two of them overlap.
        UnsupportedHostError: see `host_of`.
    """
    return sites_of(host_of(model), pattern)
