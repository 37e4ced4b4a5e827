"""make: edits along a unit's read vector, the controls that share their calibration, and units changed at run time.

1. Edits share one calibration, dW = alpha r dbar^T with alpha = shift / ((h* r) ||d||), so that h* dW d = shift.
   `edit_unit` takes r = a_c, the read vector of a unit (paper, app. component editing). On the dense base that is the rank-one
   increment which a change of the unit's write vector induces: A B' - A B = alpha a_c dbar^T for B'_c = B_c + alpha dbar.
2. `random_unit` draws the control: another unit of the site, neither silent nor extreme at the target. `oracle_edit` takes
   r = h* / ||h*||, the read direction that knows the target.
3. `unit_hooks` changes no weight: a unit is turned up, down, held at a value or added to while the host runs. Scaling z_c by s is
   scaling the unit's write vector by s; clamping puts one value there whatever the unit reads; adding v writes v times the write
   vector beside what the unit writes.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.edited import Delta, Edit
from swd_lens.analysis.edit.target import Target, find_target, require_editable, require_number
from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.errors import EditError, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import Host, host_of, sites_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import HookName, Site, hook_name
from swd_lens.units import attach
from swd_lens.units.attach import require_free
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.keys import read_unit
from swd_lens.units.match import check_weights, described
from swd_lens.units.unit_set import UnitSet, sources_by_site

BASES = ("dense", "replacement")
RANDOM_SEED, RANDOM_BAND = 17, (0.35, 0.85)  # paper, app. component editing
# |h* r| below this share of ||h*|| ||r|| is what float32 rounding of h* leaves of zero.
_SILENT = 1e-6
HOWS = ("scale", "clamp", "add")


@with_torch_defaults
def edit_unit(
    model: Any,
    factors: Any,
    unit: Any,
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
        unit: "blocks.3.mlp_out/17", ("blocks.3.mlp_out", 17) or a row of a table: a unit of an mlp_out or attn_o site.
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
    one_of("base", base, BASES, EditError)
    units = factor_set(factors)
    site, index = unit_of(host_of(model), units, unit)
    # Attached, the other sites' units change what enters this one.
    with attach(model, units) if base == "replacement" else nullcontext():
        target = find_target(model, site, prompt, answer, foil, direction=direction, prepend_bos=prepend_bos)
    return unit_edit(model, units, site, index, target, shift, base=base)


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
    delta, calibration = calibrated(f.read[:, index], target, shift, f"unit {name}", offset)
    settings = provenance(host_of(model), site, target, method, shift, base=base)
    settings |= {"unit": name, **calibration, "offset": offset, "valid_units": int(f.valid_units.sum())}
    if base == "dense":
        return Edit(site.name, method, shift, delta, target, settings, model)
    # The set with B_c + alpha dbar in row c of the site's write matrix.
    write = f.write.clone()
    write[index] += delta.write[0].to(write.device)
    note = {"edited_unit": index, "edited_edges_added": int((write != 0).sum() - (f.write != 0).sum())}
    after = replace(f, write=write, settings={**f.settings, **note})
    # What enters later sites changes, so that the set's probe and theirs no longer hold; the site's own does (read is as it was).
    of_set = {key: value for key, value in factors.provenance.items() if not key.startswith("probe_")}
    changed = FactorSet({**factors, site.name: after}, of_set)
    settings |= {"edges_added": changed[site.name].edges - f.edges, "edges": changed.edges}
    return Edit(site.name, method, shift, delta, target, settings, model, changed, factors)


def oracle_edit(model: Any, site: Site, target: Target, shift: float) -> Edit:
    """The target-conditioned dense rank-one edit: its read vector is h* / ||h*||."""
    read = target.input / target.input.double().norm().clamp(min=1e-30).float()
    delta, calibration = calibrated(read, target, shift, "the oracle's read vector")
    settings = provenance(host_of(model), site, target, "oracle", shift) | calibration
    return Edit(site.name, "oracle", shift, delta, target, settings, model)


def random_unit(f: Factors, target: Target, *, seed: int = RANDOM_SEED, but: int | None = None) -> int:
    """The random control: uniform among valid units whose |z at the target| lies between the 35th and 85th percentiles.

    Args:
        f: the site's factors.
        seed: of the draw (paper: 17).
        but: a unit that is not drawn (the edited one); it counts for the percentiles.

    Raises EditError: no unit lies in between.
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
            f"{target.site} has no unit whose |z| on {quoted(target.prompt)} lies between the 35th and 85th percentiles; "
            "take more units"
        )
    return candidates[int(torch.randint(len(candidates), (1,), generator=torch.Generator().manual_seed(seed)))]


def calibrated(
    read: Float[Tensor, " d_in"], target: Target, shift: float, what: str, offset: float = 0.0
) -> tuple[Delta, dict[str, float]]:
    """dW = alpha read dbar^T with alpha = shift / (z ||d||); computed in float64, kept in float32.

    Args:
        what: whose read vector it is, for the message.
        offset: a constant that is part of the unit's z.

    Returns: dW, and {"alpha": ..., "z": h* read + offset}.

    Raises EditError: z is nothing but rounding.
    """
    h, d, read = target.input.double(), target.direction.double(), read.detach().float().cpu()
    z = float(h @ read.double()) + offset
    if abs(z) <= _SILENT * float(h.norm() * read.double().norm()):
        raise EditError(
            f"{what} is silent on {quoted(target.prompt)}: z = {z:.2g} at the last position, so no write vector moves the "
            "margin there; take a unit that is active (swd_lens.select_edit_unit finds some)"
        )
    alpha = shift / (z * float(d.norm()))
    return Delta(read[:, None].clone(), (alpha * d / d.norm()).float()[None]), {"alpha": alpha, "z": z}


def provenance(host: Host, site: Site, target: Target, method: str, shift: float, *, base: str = "dense") -> dict[str, Any]:
    """The settings of every edit: choices, and whose W it belongs to."""
    weight = host.weight(site)
    return {
        "base": base,
        "method": method,
        "shift": shift,
        "calibration": "h* dW d = shift, d = u_answer - u_foil"
        + (", times the final norm's weight" if target.direction_is == "through_norm" else " (plain unembedding)"),
        "final_norm_folded": host.readout()[0] is None,
        "norm_behind_site": host.norm_behind(site) is not None,
        "weight_norm": float(weight.double().norm()),
        "model": str(host.model.cfg.model_name),
        "swd_lens": __version__,
        **described(host, site),
        **standing_hooks(host.model),
    }


# ---------------------------------------------------------------------------------------------- units


def factor_set(factors: Any) -> FactorSet:
    """Factors of any form as a set. Raises EditError: something else than Factors at a site (a transcoder has no read vector
    of a unit of W); AttachError: one Factors that does not know its site, or none at all."""
    if isinstance(factors, FactorSet):
        return factors
    sources = sources_by_site(factors)
    for name, source in sources.items():
        if not isinstance(source, Factors):
            raise EditError(f"an edit takes Factors; {name} holds a {type(source).__name__}")
    return FactorSet(sources, factors.provenance if isinstance(factors, UnitSet) else {})


def unit_of(host: Host, factors: Mapping[str, Factors], unit: Any) -> tuple[Site, int]:
    """A unit's site and index. Raises ValueError: (EditError) a site of which there are no factors, no such unit, an invalid
    unit, or a site that does not write to the residual stream; or not a unit's name; AttachError: units are attached at the
    site, or the factors are not this host's."""
    name, index = read_unit(unit, factors)
    require_editable(name)
    _require_unit(name, index, factors)
    site, f = sites_of(host, name)[0], factors[name]
    if not bool(f.valid_units[index]):
        its_unit = f"{name}/{index}"
        raise EditError(f"unit {its_unit} is not valid: its read or its write vector is empty, so it does nothing; take another")
    require_free(host, [site])
    check_weights(host, site, f)
    return site, index


def _require_unit(site: str, index: int, factors: Mapping[str, Any]) -> None:
    if site not in factors:
        unit = f"{site}/{index}"
        raise EditError(f"unit {unit}: these factors hold {', '.join(factors)}, not {site}")
    _require_index(site, index, factors[site].n_units)


def _require_index(site: str, index: int, n_units: int) -> None:
    if not 0 <= index < n_units:
        raise EditError(f"unit {site}/{index}: {site} has {n_units} units, 0 to {n_units - 1}")


# ---------------------------------------------------------------------------------------------- units at run time


@with_torch_defaults
def unit_hooks(
    changes: Mapping[Any, tuple[str, float | int]], factors: Any = None, *, positions: str | int | Sequence[int] = "all"
) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that scale, clamp or add to units: for `model.hooks(fwd_hooks=...)` and `model.run_with_hooks(...)`
    while attached (ours).

        hooks = swd.unit_hooks({"blocks.2.mlp_out/5": ("scale", 2.0), "blocks.3.mlp_out/17": ("clamp", 0.0)})
        with swd.attach(model, factors), model.hooks(fwd_hooks=hooks):
            logits = model(prompt)

    Without units attached a HookedTransformer refuses them. A TransformerBridge passes over names of hook points that it does not
    have, without a word: there they do nothing.

    Args:
        changes: unit ("blocks.2.mlp_out/5" or a pair) -> ("scale", s): z becomes s z; ("clamp", v): z becomes v; or ("add", c):
            z becomes z + c, which adds c times the unit's write vector to the site's output and nothing else (steering).
        factors: what is attached; the units' numbers are then checked now, and otherwise when the hooks run.
        positions: "all", "scoring" (the last position), one position or several (negative ones count from the end).

    Raises:
        EditError: a change that is none of these, a value that is not finite, a unit that these factors do not have, or unknown
            positions; or no changes.
        ValueError: not a unit's name.
    """
    if not isinstance(changes, Mapping):
        raise EditError(
            f"unit_hooks takes what becomes of each unit first, got a {type(changes).__name__}: "
            "unit_hooks({'blocks.2.mlp_out/5': ('scale', 2.0)}, factors)"
        )
    if not changes:
        raise EditError('there are no units to change; give {"blocks.2.mlp_out/5": ("scale", 2.0)}')
    where, by_site = _positions(positions), {}
    for unit, change in changes.items():
        held = {} if factors is None else sources_by_site(factors)
        site, index = read_unit(unit, held)
        if factors is not None:
            _require_unit(site, index, held)
        unit = f"{site}/{index}"
        if not isinstance(change, tuple | list) or len(change) != 2 or change[0] not in HOWS:
            raise EditError(
                f'unit {unit}: a change is ("scale", factor), ("clamp", value) or ("add", value), got {quoted(change)}'
            )
        how, value = change[0], require_number(f"unit {unit}: the value of {change[0]!r}", change[1])
        by_site.setdefault(site, []).append((index, how, value))
    return [(HookName(hook_name(site)), _hook(site, of_site, where)) for site, of_site in by_site.items()]


def _positions(positions: Any) -> slice | list[int]:
    named = {"all": slice(None), "scoring": slice(-1, None)}
    if isinstance(positions, str) and positions in named:
        return named[positions]
    listed = [positions] if isinstance(positions, int) else [] if isinstance(positions, str) else list(positions)
    if not listed or not all(isinstance(position, int) for position in listed):
        raise EditError(f'positions must be "all", "scoring" or position numbers, got {quoted(positions)}')
    return listed


_CHANGED: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "scale": lambda z, value: z * value,
    "clamp": torch.full_like,
    "add": lambda z, value: z + value,
}


def _hook(site: str, changes: Sequence[tuple[int, str, float]], where: slice | list[int]) -> Callable[..., Any]:
    def hook_fn(z: Float[Tensor, "batch pos unit"], hook: Any) -> Float[Tensor, "batch pos unit"]:
        changed = z.clone()
        for index, how, value in changes:
            _require_index(site, index, z.shape[-1])
            at = z[:, where, index]
            changed[:, where, index] = _CHANGED[how](at, value)
        return changed

    return hook_fn
