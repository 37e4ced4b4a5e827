"""match: whether units were made for the very matrix that a host has now; if not, an error that says what differs.

1. `weight_fingerprint` hashes a host's matrix, once for as long as it stays what it was.
2. Same fingerprint of W: they belong. (A host in bfloat16 or float16: same checksum of W rounded to that dtype.)
   What enters the site must be scaled and shifted as it was, too: W does not show everything that is folded.
3. Otherwise compare how both were processed (fold_ln, center_writing_weights) and their dtypes, and name the difference
   and its remedy: `transport` where it is exact, loading the host the same way, or factorizing again.

`transported` moves factors made under one weight processing exactly to a host under another. Folding writes a site's input as
h = x * scale + shift (`swd_lens.hosts.Affine`) and moves scale and shift into the weights and biases behind it. Factors follow,
from (scale, shift) 0 to 1:

4. Their origin must lead to the host's W: a sketch of W (integrity.py) is carried over and compared, up to the mean that
   centring takes out and that LayerNorm never sees.
5. read1 = (scale0 / scale1) read0: same support, same units. write stays: what centring would subtract from it is the mean
   over d_model, which every LayerNorm behind it removes, and which would make every write vector dense.
6. Constants: z = h1 @ read1 + (shift0 - shift1 * scale0 / scale1) @ read0 is the z of the old host, and the output gets
   shift1 @ W1 - shift0 @ W0, because the host's bias carries the dense one's share.

So z, and every score, mean and circuit taken on it, stays valid on the other host.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.errors import AttachError
from swd_lens.base.snapshots import checksum
from swd_lens.hosts import Host
from swd_lens.hosts.sites import PACKED, RESIDUAL_MATRICES, Site
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.integrity import Offsets, Origin, Probe, fingerprint, sketch

# Dtypes that a host is loaded in for speed; factors carry the checksum of W rounded to each.
_ROUNDED = {"bfloat16": torch.bfloat16, "float16": torch.float16}
# Host's model -> site -> checksums of what was hashed, and the hash.
_FINGERPRINTS: WeakKeyDictionary[Any, dict[str, tuple[Any, str]]] = WeakKeyDictionary()


def weight_fingerprint(host: Host, site: Site) -> str:
    """SHA-256 of the host's matrix at a site, see `fingerprint`; hashed again only when the matrix has changed."""
    of_site = _FINGERPRINTS.setdefault(host.model, {})
    # Read every time: versions do not see what is written through `.data`. A tenth of a hash's time.
    state = tuple(checksum(parameters[name]) for parameters, name in host.stored_parameters(site))
    if site.name not in of_site or of_site[site.name][0] != state:
        of_site[site.name] = state, fingerprint(host.weight(site))
    return of_site[site.name][1]


def rounded_checksum(host: Host, site: Site, dtype: str) -> str:
    """A checksum of the host's matrix at a site, rounded to "bfloat16" or "float16" (see `swd_lens.base.snapshots`)."""
    total, rest = checksum(host.weight(site).to(_ROUNDED[dtype]))[2]
    return f"{total:x}+{rest.hex()}"


def described(host: Host, site: Site) -> dict[str, Any]:
    """The provenance of a host's matrix: its hash and checksums, processing, dtype; plain JSON values.

    For a whole MLP, which has no single matrix, those of each of its matrices stand under "matrices".
    """
    about = {"processing": host.processing(), "dtype": dtype_of(host)}
    if site.kind == "mlp":
        return {"matrices": {part.name: described(host, part) for part in matrices_of(host, site)}, **about}
    rounded = {dtype: rounded_checksum(host, site, dtype) for dtype in _ROUNDED}
    return {"weight_sha256": weight_fingerprint(host, site), "weight_checksums": rounded, **about}


def matrices_of(host: Host, site: Site) -> list[Site]:
    """The host's matrices that a whole MLP is made of, in execution order; of a single matrix the site itself."""
    if site.kind != "mlp":
        return [site]
    return [part for part in host.sites() if part.layer == site.layer and part.kind in PACKED["mlp"]]


def dtype_of(host: Host) -> str:
    """Name the dtype of the host's first block: float32, bfloat16, ..."""
    return str(next(host.model.blocks[0].parameters()).dtype).removeprefix("torch.")


def same_weights(host: Host, site: Site, made_from: Mapping[str, Any]) -> bool:
    """Whether provenance describes the host's present W at a site; True where provenance says nothing."""
    if site.kind == "mlp":
        then = made_from.get("matrices", {})
        return all(same_weights(host, part, then[part.name]) for part in matrices_of(host, site) if part.name in then)
    sha, rounded, dtype = made_from.get("weight_sha256"), made_from.get("weight_checksums"), dtype_of(host)
    if sha is None or weight_fingerprint(host, site) == sha:
        return True
    if not isinstance(rounded, Mapping) or dtype not in _ROUNDED:
        return False
    return rounded.get(dtype) == rounded_checksum(host, site, dtype)


def same_input(host: Host, site: Site, origin: Origin | None) -> bool:
    """Whether scale and shift stand in the site's input as they did at the factors' origin; True where that is unknown.

    W alone does not say: value biases may be folded, or a bias with a weight of one, without a bit of this W changing.
    """
    affine = host.affine(site) if origin is not None else None
    if origin is None or affine is None:
        return True
    for recorded, present, neutral in ((origin.scale, affine.scale, 1.0), (origin.shift, affine.shift, 0.0)):
        if recorded is None and present is None:
            continue
        a, b = (
            torch.full((site.d_in,), neutral, dtype=torch.float32) if t is None else t.float().cpu() for t in (recorded, present)
        )
        tolerance = 1e-4 if dtype_of(host) in ("float32", "float64") else 2e-2
        if float((a - b).abs().max()) > tolerance * max(float(a.abs().max()), 1e-6):
            return False
    return True


def check_units(host: Host, site: Site, f: Units) -> None:
    """Refuse units of another size than the host's matrix, or that were made from another W than it has now. Raises
    AttachError: see the module's docstring."""
    if (f.d_in, f.d_out) != (site.d_in, site.d_out):
        raise AttachError(
            f"factors for {site.name} are ({f.d_in}, {f.d_out}), the host's matrix is ({site.d_in}, {site.d_out}): they "
            "belong to another model"
        )
    check_weights(host, site, f)


def check_weights(host: Host, site: Site, f: Units) -> None:
    """Refuse units that were made from another W than the host has now. Raises AttachError: see the module's docstring."""
    if any(key.startswith("needs_") for key in f.provenance):
        # Refuse a host without what a SAELens object needs beyond the hook's name (saelens.py).
        cfg, folded = host.model.cfg, host.processing()["fold_ln"]
        if f.provenance.get("needs_folded_ln", folded) != folded:
            needed = f.provenance["needs_folded_ln"]
            side = "before" if needed else "after"
            raise AttachError(
                f"{site.name}: these units read the LayerNorm's output {side} its weight and bias, this host has "
                f"fold_ln={folded}; load it with fold_ln={needed}"
            )
        if f.provenance.get("needs_ungated_mlp") and getattr(cfg, "gated_mlp", False):
            raise AttachError(
                f"{site.name}: these units were trained on {f.provenance.get('hook_name')}, which is the gate's output in a "
                "gated MLP like this host's; they belong to a model without a gate"
            )
        if f.provenance.get("needs_no_post_norm") and getattr(cfg, "use_normalization_before_and_after", False):
            raise AttachError(
                f"{site.name}: these units were trained on {f.provenance.get('hook_name')}, which this host normalizes once "
                "more before it is written (use_normalization_before_and_after); they belong to a model without that norm"
            )
    if not same_weights(host, site, f.provenance) or not same_input(host, site, getattr(f, "origin", None)):
        raise _difference(host, site, f)


def _difference(host: Host, site: Site, f: Any) -> Exception:
    """The error that names how the host differs from the one that the units were made on, and the remedy."""
    recorded, present = f.provenance.get("processing", {}), host.processing()
    common = [key for key in present if key in recorded and key != "compatibility_mode"]
    changed = [key for key in common if recorded[key] != present[key]]
    trained = isinstance(f, CoderUnits)
    again = "train them on" if trained else "factorize"
    if changed:
        was, has = (", ".join(f"{key}={flags[key]}" for key in changed) for flags in (recorded, present))
        advice = "Load" if trained else "Move them exactly with factors.transport(model), or load"
        return AttachError(
            f"the factors of {site.name} were made under another weight processing: they were made with {was}, this host "
            f"has {has}. {advice} the host as it was then (HookedTransformer.from_pretrained_no_processing, or a bridge "
            "without enable_compatibility_mode, is no processing)"
        )
    if f.provenance.get("dtype") not in (None, dtype_of(host)):
        dtype = f.provenance["dtype"]
        return AttachError(
            f"the factors of {site.name} were made from another W than this host has now: they were made in {dtype}, this "
            f"host is {dtype_of(host)}, and its W is not theirs rounded to {dtype_of(host)}. Load the host in {dtype}, or "
            f"{again} this one"
        )
    difference = ""
    if not trained:
        error = f.relative_frobenius(host.weight(site))
        difference = f"; relative Frobenius error of the factors against its W: {error:.3f}"
    model = f.provenance.get("model")
    whose = f" (they are of {model!r}, this host is {str(host.model.cfg.model_name)!r})" if model else ""
    return AttachError(
        f"the factors of {site.name} were made from another W than this host has now, under the same weight "
        f"processing{whose}{difference}. The usual cause is another checkpoint or further training; attach them to the "
        f"model they were made from, or {again} this one"
    )


# Of sketches: float32 weights through a float32 product of norms agree to 1e-6; another checkpoint is off by order one.
_TOLERANCE = 1e-4


def origin_of(host: Host, site: Site, weight: Float[Tensor, "d_in d_out"]) -> Origin | None:
    """Record what `transported` will need of the host that factors are made on; None where nothing could be folded exactly."""
    affine = host.affine(site)
    if affine is None:
        return None
    scale, shift = (None if t is None else t.detach().float().cpu() for t in (affine.scale, affine.shift))
    shifted = None if shift is None else (shift.double() @ weight.cpu().double()).float()
    return Origin(scale, shift, shifted, *sketch(weight))


def transported(host: Host, site: Site, f: Any) -> Any:
    """Factors (factors.py) of one site, moved to the matrix that the host has now. Raises AttachError: they do not lead to
    this host's matrix, carry no origin, or were changed in place."""
    f.require_unedited(site.name)
    weight, origin = host.weight(site), f.origin
    provenance = {**f.provenance, **described(host, site), "transported_from": f.provenance.get("processing")}
    known = "weight_sha256" in f.provenance
    if known and same_weights(host, site, f.provenance) and same_input(host, site, origin):
        return f if f.provenance.get("processing") == host.processing() else f.with_records(provenance=provenance)
    present = origin_of(host, site, weight)
    if origin is None or present is None:
        reasons = ["they carry no origin (made by solve, or where nothing folds)"] * (origin is None)
        reasons += ["this host has no foldable normalization in front of it"] * (present is None)
        reason = " and ".join(reasons)
        raise AttachError(f"{site.name}: these factors cannot be transported: {reason}; factorize this host")
    # Require that both matrices, taken back to before the fold, are the same up to the mean that centring takes out.
    if site.kind in RESIDUAL_MATRICES:
        before, now = origin.left, present.left
    else:
        before = origin.right if origin.scale is None else origin.scale * origin.right
        now = present.right if present.scale is None else present.scale * present.right
    errors = [float((a - b).norm() / b.norm()) for a, b in ((now, before), (now - now.mean(), before - before.mean()))]
    if min(errors) > _TOLERANCE:
        raise AttachError(
            f"the factors of {site.name} do not lead to this host's W: a sketch of it differs by {min(errors):.2g} of its "
            f"size (allowed {_TOLERANCE:g}), with and without centring. It is another checkpoint, or was trained further: "
            "factorize it"
        )
    ones = torch.ones(f.d_in, dtype=torch.float64)
    old, new = (ones if o.scale is None else o.scale.double() for o in (origin, present))
    if bool((new == 0).any()):
        raise AttachError(
            f"{site.name}: this host's normalization has a weight of exactly 0, so nothing leads back; factorize this host"
        )
    ratio = old / new
    constant = _or_zeros(origin.shift, f.d_in) - ratio * _or_zeros(present.shift, f.d_in)
    read = f.read.detach().cpu()
    offsets = Offsets(
        (constant @ read.double()).float() + (0 if f.offsets is None else f.offsets.unit.cpu()),
        (_or_zeros(present.shifted, f.d_out) - _or_zeros(origin.shifted, f.d_out)).float()
        + (0 if f.offsets is None else f.offsets.out.cpu()),
    )
    # The probe expects the same z from the input that the new host has, and y with the new offsets; a scale of 0 hid part of it.
    probe: Probe | None = None if bool((ratio == 0).any()) else f.probe
    if probe is not None:
        before = 0.0 if f.offsets is None else f.offsets.out.cpu().double()[probe.outputs]
        y = probe.y.double() - before + offsets.out.double()[probe.outputs]
        probe = replace(probe, input=((probe.input.double() - constant) / ratio).float(), y=y.float())
    moved = (ratio[:, None] * read.double()).float().to(f.read.device)
    nothing = not bool(offsets.unit.any()) and not bool(offsets.out.any())
    return replace(
        f,
        read=moved,
        weight=weight,
        origin=present,
        offsets=None if nothing else offsets.to(f.read.device),
        probe=probe,
        provenance=provenance,
        held=None,  # errors and probe hold for what was moved exactly
    )


def _or_zeros(vector: Tensor | None, length: int) -> Float[Tensor, " length"]:
    return torch.zeros(length, dtype=torch.float64) if vector is None else vector.double()
