"""make: edits with one calibration, dW = alpha r dbar^T with alpha = shift / ((h* r) ||d||), so that h* dW d = shift.

1. `edit_unit` takes r = a_c, the read vector of a unit (paper, app. component editing). On the dense base that is the rank-one
   increment which a change of the unit's write vector induces: A B' - A B = alpha a_c dbar^T for B'_c = B_c + alpha dbar.
2. `random_unit` draws the control: another unit of the site, neither silent nor extreme at the target.
3. `oracle_edit` takes r = h* / ||h*||, the read direction that knows the target.
"""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.edited import Edit
from swd_lens.analysis.edit.standing import Delta
from swd_lens.analysis.edit.target import EditError, Target, find_target, require_editable, require_number
from swd_lens.base._version import __version__
from swd_lens.hosts import Host, host_of, norms_output
from swd_lens.hosts.sites import Site, parse_unit, select_sites
from swd_lens.units import attach
from swd_lens.units.attach import by_site, require_free
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.match import check_weights, described

BASES = ("dense", "replacement")
RANDOM_SEED, RANDOM_BAND = 17, (0.35, 0.85)  # paper, app. component editing
# |h* r| below this share of ||h*|| ||r|| is what float32 rounding of h* leaves of zero.
_SILENT = 1e-6


def edit_unit(
    model: Any,
    factors: Any,
    unit: str,
    prompt: Any,
    answer: str | int,
    foil: str | int,
    shift: float | int,
    *,
    base: str = "dense",
    direction: str = "unembedding",
    prepend_bos: bool | None = None,
) -> Edit:
    """The rank-one edit along one unit's read vector that moves a prompt's margin by `shift` at the site's output.

    Args:
        model: the host, with nothing attached at the unit's site.
        factors: a FactorSet, a dict site -> Factors, or one Factors that knows its site.
        unit: "blocks.3.mlp_out/17": a unit of an mlp_out or attn_o site.
        prompt: a text, or (pos,) token ids; its last position is edited for.
        answer, foil: one token each, as text (" Mary") or id: the margin is logit(answer) - logit(foil).
        shift: h* dW d, in logits, with the residual stream read by the plain unembedding. What the final margin makes of it
            (later layers, the final normalization) is measured by `side_effects`, and is usually another number.
        base: "dense" (paper) changes the host's W. "replacement" changes the unit's write vector in the factors; h* is then
            what enters the site while all these factors are attached. The unit's support grows to what d reaches.
        direction, prepend_bos: see `find_target`.

    Returns:
        Edit: not applied yet.

    Raises:
        ValueError: (EditError) an unknown, invalid or silent unit, a site that does not write to the residual stream, answer
            or foil not one token, a shift that is not finite; or a unit name that cannot be read.
        UnknownSiteError: a site that this host does not have.
        AttachError: the factors are not this host's, or units are attached at the site.
    """
    shift = require_number("shift", shift)
    if base not in BASES:
        raise EditError(f"base must be one of {BASES}, got {base!r}")
    host, given = host_of(model), factor_set(factors)
    site, index = unit_of(host, given, unit)
    require_free(host, [site])
    check_weights(host, site, given[site.name])
    # Attached, the other sites' units change what enters this one.
    with attach(model, given) if base == "replacement" else nullcontext():
        target = find_target(model, site, prompt, answer, foil, direction=direction, prepend_bos=prepend_bos)
    return unit_edit(model, given, site, index, target, shift, base=base)


def unit_edit(
    model: Any,
    factors: FactorSet,
    site: Site,
    index: int,
    target: Target,
    shift: float,
    *,
    base: str = "dense",
    method: str = "unit",
) -> Edit:
    """`edit_unit` for a target that is known already."""
    f, name = factors[site.name], f"{site.name}/{index}"
    # Offsets of transported factors are part of z; a dense increment has no place for them.
    offset = float(f.offsets.unit[index]) if base == "replacement" and f.offsets is not None else 0.0
    drive = _drive(target.input, f.read[:, index].cpu(), offset, f"unit {name}", target)
    delta, alpha = rank_one(f.read[:, index], drive, target.direction, shift)
    settings = made_with(host_of(model), site, target, method, shift, base=base)
    settings |= {"unit": name, "alpha": alpha, "z": drive, "offset": offset, "valid_units": int(f.valid_units.sum())}
    if base == "dense":
        return Edit(site.name, method, shift, delta, target, settings, model)
    changed, grown = _changed(factors, site.name, index, delta)
    settings |= {"edges_added": grown, "edges": changed.edges}
    return Edit(site.name, method, shift, delta, target, settings, model, changed, factors)


def oracle_edit(model: Any, site: Site, target: Target, shift: float) -> Edit:
    """The target-conditioned dense rank-one edit: its read vector is h* / ||h*||."""
    read = target.input / target.input.double().norm().clamp(min=1e-30).float()
    drive = _drive(target.input, read, 0.0, "the oracle's read vector", target)
    delta, alpha = rank_one(read, drive, target.direction, shift)
    settings = made_with(host_of(model), site, target, "oracle", shift) | {"alpha": alpha, "z": drive}
    return Edit(site.name, "oracle", shift, delta, target, settings, model)


def random_unit(f: Factors, target: Target, *, seed: int = RANDOM_SEED, but: int | None = None) -> int:
    """The random control: uniform among valid units whose |z at the target| lies between the 35th and 85th percentiles.

    Args:
        f: the site's factors.
        seed: of the draw (paper: 17).
        but: a unit that is not drawn (the edited one); it counts for the percentiles.

    Raises:
        EditError: no unit lies in between.
    """
    z = (target.input.double() @ f.read.double().cpu()).abs()
    valid = f.valid_units.cpu()
    if not bool(valid.any()):
        raise EditError(f"{target.site} has no valid unit to draw a control from")
    low, high = (torch.quantile(z[valid], share) for share in RANDOM_BAND)
    inside = valid & (z >= low) & (z <= high)
    candidates = [i for i in inside.nonzero().flatten().tolist() if i != but]
    if not candidates:
        raise EditError(
            f"{target.site} has no unit whose |z| on {target.prompt!r} lies between the 35th and 85th percentiles; take "
            "more units"
        )
    return candidates[int(torch.randint(len(candidates), (1,), generator=torch.Generator().manual_seed(seed)))]


def rank_one(
    read: Float[Tensor, " d_in"], drive: float, direction: Float[Tensor, " d_out"], shift: float
) -> tuple[Delta, float]:
    """dW = alpha read dbar^T and alpha = shift / (drive ||d||); computed in float64, kept in float32."""
    d = direction.double()
    alpha = shift / (drive * float(d.norm()))
    return Delta(read.detach().float().cpu()[:, None].clone(), (alpha * d / d.norm()).float()[None]), alpha


def _drive(h: Float[Tensor, " d_in"], read: Float[Tensor, " d_in"], offset: float, what: str, target: Target) -> float:
    """h* r (plus the unit's offset), what the shift is divided by."""
    z = float(h.double() @ read.double()) + offset
    if abs(z) <= _SILENT * float(h.double().norm() * read.double().norm()):
        raise EditError(
            f"{what} is silent on {target.prompt!r}: z = {z:.2g} at the last position, so no write vector moves the margin "
            "there; take a unit that is active (swd_lens.select_edit_unit finds some)"
        )
    return z


def made_with(
    host: Host, site: Site, target: Target, method: str, shift: float, *, base: str = "dense"
) -> dict[str, Any]:
    """What every edit records: choices, and whose W it belongs to."""
    weight = host.weight(site)
    return {
        "base": base,
        "method": method,
        "shift": shift,
        "calibration": "h* dW d = shift, d = u_answer - u_foil"
        + (", times the final norm's weight" if target.direction_is == "through_norm" else " (plain unembedding)"),
        "final_norm_folded": host.readout()[0] is None,
        "norm_behind_site": norms_output(host, site),
        "weight_norm": float(weight.double().norm()),
        "model": str(host.model.cfg.model_name),
        "swd_lens": __version__,
        **described(host, site),
    }


# ---------------------------------------------------------------------------------------------- units


def factor_set(factors: Any) -> FactorSet:
    """Factors of any form as a set.

    Raises:
        EditError: something else than Factors at a site (a transcoder has no read vector of a unit of W).
        AttachError: one Factors that does not know its site, or none at all.
    """
    if isinstance(factors, FactorSet):
        return factors
    given = by_site(factors)
    others = [name for name, f in given.items() if not isinstance(f, Factors)]
    if others:
        raise EditError(f"an edit takes Factors; {others[0]} holds a {type(given[others[0]]).__name__}")
    return FactorSet(given)


def unit_of(host: Host, factors: Mapping[str, Factors], unit: str) -> tuple[Site, int]:
    """A unit's site and index.

    Raises:
        ValueError: (EditError) a site of which there are no factors, no such unit, an invalid unit, or a site that does not
            write to the residual stream; or not a unit's name.
    """
    name, index = parse_unit(unit)
    require_editable(name)
    if name not in factors:
        raise EditError(f"unit {unit}: these factors hold {', '.join(factors)}, not {name}")
    site, f = select_sites(host.sites(), name, host.alternatives())[0], factors[name]
    if index >= f.n_units:
        raise EditError(f"unit {unit}: {name} has {f.n_units} units, 0 to {f.n_units - 1}")
    if not bool(f.valid_units[index]):
        raise EditError(
            f"unit {unit} is not valid: its read or its write vector is empty, so it does nothing; take another"
        )
    return site, index


def _changed(factors: FactorSet, name: str, index: int, delta: Delta) -> tuple[FactorSet, int]:
    """The set with B_c + alpha dbar in row c, and how many edges that added."""
    before = factors[name]
    write = before.write.clone()
    write[index] += delta.write[0].to(write.device)
    note = {"edited_unit": index, "edited_edges_added": int((write != 0).sum() - (before.write != 0).sum())}
    after = replace(before, write=write, settings={**before.settings, **note})
    # What enters later sites changes, so that the set's probe and theirs no longer hold; the site's own does (read is as it was).
    provenance = {key: value for key, value in factors.provenance.items() if not key.startswith("probe_")}
    changed = FactorSet({site: after if site == name else f for site, f in factors.items()}, provenance)
    return changed, after.edges - before.edges
