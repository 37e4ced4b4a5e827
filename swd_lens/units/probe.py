"""probe: tokens whose z was stored with the factors; a loaded set must give it again on the host it is attached to.

1. `add_probe` runs the probe's tokens through the host with the earlier sites attached, takes the vector that enters the
   site at the last position, and keeps z on the units that it moves most.
2. `check_probe`, whenever a whole set is attached to a host with nothing else in it, runs the tokens and compares.
   Loads-but-wrongly (another model's forward, a changed normalization, a rounding) ends in an error instead of in a paper.
   Parts of a set, sets put together, nested attachments and hooks of the user's change what enters a site: there it is
   not asked.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.hosts import Host, drops_out, host_of
from swd_lens.hosts.sites import Site
from swd_lens.units.factors import Factors
from swd_lens.units.match import AttachError, dtype_of
from swd_lens.units.passport import Probe
from swd_lens.units.unit_set import UnitSet

PROBE_LENGTH = 16
# Relative to the largest |z| of the probe. Float32 hosts agree to 1e-5; rounding through a deep bfloat16 host is coarse.
_TOLERANCE = {"float32": 1e-3, "float64": 1e-3}
_ROUNDED_TOLERANCE = 0.1


def probe_tokens(rows: Int[Tensor, "rows pos"] | None, d_vocab: int, n_ctx: int) -> list[int]:
    """The first calibration tokens, or seeded random ones without calibration."""
    if rows is not None:
        return rows[0, :PROBE_LENGTH].tolist()
    length = min(PROBE_LENGTH, n_ctx)
    return torch.randint(0, d_vocab, (length,), generator=torch.Generator().manual_seed(0)).tolist()


def add_probe(f: Factors, model: Any, site: Site, tokens: list[int]) -> Factors:
    """The factors with a probe of what enters the site on these tokens in the host as it is now; none under dropout."""
    if drops_out(model):
        return f
    h = _inputs(host_of(model), [site], tokens)[site.name]
    return replace(f, probe=Probe.of(h, f.read, f.offsets))


def check_probe(units: UnitSet) -> None:
    """Run the probe of a set that has just been attached as a whole, to a host without dropout, hooks or other units.

    Raises:
        AttachError: a site does not give the stored z.
    """
    host = units.host
    if not _is_as_it_was_made(units):
        return
    tolerance = _TOLERANCE.get(dtype_of(host), _ROUNDED_TOLERANCE)
    for name, h in _inputs(host, units.sites, units.provenance["probe_tokens"]).items():
        f = units.factors[name]
        probe = f.probe
        assert probe is not None
        error = replace(probe, input=h).error(f.read, f.offsets)
        if error > tolerance:
            raise AttachError(
                f"the probe of {name} fails: on the stored tokens its units give a z that is off by {error:.2g} of its size "
                f"(allowed {tolerance:g}). The host computes something else than when these factors were made: compare "
                "model, transformer_lens version and settings (attention, positions, normalization), or factorize again"
            )


def _inputs(host: Host, sites: Sequence[Site], tokens: list[int]) -> dict[str, Tensor]:
    """What enters each site at the last position of the tokens."""
    found: dict[str, Tensor] = {}
    row = torch.tensor([tokens])
    with torch.no_grad(), host.inputs(sites, lambda site, h: found.update({site.name: h[0, -1].float().cpu()})):
        host.run_blocks(row, max(site.layer for site in sites) + 1)
    return found


def _is_as_it_was_made(units: UnitSet) -> bool:
    """Whether what enters every site should now be what entered it when the set was made."""
    if "probe_tokens" not in units.provenance or set(units) != set(units.provenance.get("probe_sites", ())):
        return False
    if units.coders or any(f.probe is None for f in units.factors.values()) or drops_out(units.host.model):
        return False
    return is_bare(units.host, set(units))


def is_bare(host: Host, beside: Collection[str] = ()) -> bool:
    """Whether no hooks, and no units but at the sites named, change what this host computes."""
    if any(hook.fwd_hooks for hook in host.model.hook_dict.values()):
        return False
    everywhere = (*host.sites(), *host.alternatives())
    return not any(host.is_swapped(site) for site in everywhere if site.name not in beside)
