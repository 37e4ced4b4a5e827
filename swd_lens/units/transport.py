"""transport: factors made under one weight processing, moved exactly to a host under another.

Folding writes a site's input as h = x * scale + shift (`swd_lens.hosts.Affine`) and moves scale and shift into the weights
and biases behind it. Factors follow, from (scale, shift) 0 to 1:

1. Their origin must lead to the host's W: a sketch of W (passport.py) is carried over and compared, up to the mean that
   centring takes out and that LayerNorm never sees.
2. read1 = (scale0 / scale1) read0: same support, same units. write stays: what centring would subtract from it is the mean
   over d_model, which every LayerNorm behind it removes, and which would make every write vector dense.
3. Constants: z = h1 @ read1 + (shift0 - shift1 * scale0 / scale1) @ read0 is the z of the old host, and the output gets
   shift1 @ W1 - shift0 @ W0, because the host's bias carries the dense one's share.

So z, and every score, mean and circuit taken on it, stays valid on the other host.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.hosts import Host, host_of, sites_of
from swd_lens.hosts.sites import RESIDUAL_MATRICES, Site
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.match import described, same_input, same_weights
from swd_lens.units.passport import Offsets, Origin, Probe, sketch

# Of sketches: float32 weights through a float32 product of norms agree to 1e-6; another checkpoint is off by order one.
_TOLERANCE = 1e-4


def origin_of(host: Host, site: Site, weight: Float[Tensor, "d_in d_out"]) -> Origin | None:
    """What transport will need of the host that factors are made on; None where nothing could be folded exactly."""
    affine = host.affine(site)
    if affine is None:
        return None
    scale, shift = (None if t is None else t.detach().float().cpu() for t in (affine.scale, affine.shift))
    shifted = None if shift is None else (shift.double() @ weight.cpu().double()).float()
    return Origin(scale, shift, shifted, *sketch(weight))


def transport_set(model: Any, factors: Mapping[str, Factors]) -> FactorSet:
    """Every site's factors moved to the weights that the model has now.

    Raises:
        AttachError: they do not lead to this host's weights (site named), carry no origin, or were changed in place.
        UnknownSiteError: a site that this host does not have.
    """
    host = host_of(model)
    sites = sites_of(host, list(factors))
    moved = {site.name: _moved(host, site, factors[site.name]) for site in sites}
    return FactorSet(moved, getattr(factors, "provenance", {}))


def _moved(host: Host, site: Site, f: Factors) -> Factors:
    f.require_unedited(site.name)
    weight, origin = host.weight(site), f.origin
    provenance = {**f.provenance, **described(host, site), "transported_from": f.provenance.get("processing")}
    known = "weight_sha256" in f.provenance
    if known and same_weights(host, site, f.provenance) and same_input(host, site, origin):
        return f if f.provenance.get("processing") == host.processing() else replace(f, provenance=provenance)
    present = origin_of(host, site, weight)
    if origin is None or present is None:
        raise error(
            "not-transportable",
            site=site.name,
            reason=(
                "they carry no origin (made by solve, by an older version, or where nothing folds)"
                if origin is None
                else ""
            )
            + (" and " if origin is None and present is None else "")
            + ("this host has no foldable normalization in front of it" if present is None else ""),
        )
    _check_same_origin(site, origin, present)
    ones = torch.ones(f.d_in, dtype=torch.float64)
    old, new = (ones if o.scale is None else o.scale.double() for o in (origin, present))
    if bool((new == 0).any()):
        raise error("transport-through-zero", site=site.name)
    ratio = old / new
    constant = _or_zeros(origin.shift, f.d_in) - ratio * _or_zeros(present.shift, f.d_in)
    read = f.read.detach().cpu()
    offsets = Offsets(
        (constant @ read.double()).float() + (0 if f.offsets is None else f.offsets.unit.cpu()),
        (_or_zeros(present.shifted, f.d_out) - _or_zeros(origin.shifted, f.d_out)).float()
        + (0 if f.offsets is None else f.offsets.out.cpu()),
    )
    moved = (ratio[:, None] * read.double()).float().to(f.read.device)
    nothing = not bool(offsets.unit.any()) and not bool(offsets.out.any())
    return replace(
        f,
        read=moved,
        weight=weight,
        origin=present,
        offsets=None if nothing else offsets.to(f.read.device),
        probe=_moved_probe(f, ratio, constant, offsets),
        provenance=provenance,
        held=None,  # errors and probe hold for what was moved exactly
    )


def _check_same_origin(site: Site, old: Origin, new: Origin) -> None:
    """Both matrices, taken back to what stands before the fold, are the same up to the mean that centring takes out."""
    if site.kind in RESIDUAL_MATRICES:
        before, now = old.left, new.left
    else:
        before = old.right if old.scale is None else old.scale * old.right
        now = new.right if new.scale is None else new.scale * new.right
    errors = [float((a - b).norm() / b.norm()) for a, b in ((now, before), (now - now.mean(), before - before.mean()))]
    if min(errors) > _TOLERANCE:
        raise error("transport-elsewhere", site=site.name, difference=min(errors), tolerance=_TOLERANCE)


def _or_zeros(vector: Tensor | None, length: int) -> Float[Tensor, " length"]:
    return torch.zeros(length, dtype=torch.float64) if vector is None else vector.double()


def _moved_probe(
    f: Factors, ratio: Float[Tensor, " d_in"], constant: Float[Tensor, " d_in"], offsets: Offsets
) -> Probe | None:
    """The same z from the input that the new host has, and y with the new offsets; None where a scale of 0 hid part of it."""
    probe = f.probe
    if probe is None or bool((ratio == 0).any()):
        return None
    moved = ((probe.input.double() - constant) / ratio).float()
    if probe.outputs is None or probe.y is None:
        return replace(probe, input=moved)
    before = 0.0 if f.offsets is None else f.offsets.out.cpu().double()[probe.outputs]
    y = probe.y.double() - before + offsets.out.double()[probe.outputs]
    return replace(probe, input=moved, y=y.float())
