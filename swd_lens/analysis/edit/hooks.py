"""hooks: a unit turned up, down or held at a value while the host runs; no weight changes.

`unit_hooks` makes TransformerLens hooks on the units' own hook points. Scaling z_c by s is scaling the unit's write vector
by s; clamping puts one value there whatever the unit reads.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.target import EditError, require_number
from swd_lens.hosts.sites import hook_name, parse_unit

HOWS = ("scale", "clamp")
# One unit's change: z -> how(z, value).
_Change = tuple[int, str, float]


def unit_hooks(
    changes: Mapping[str, tuple[str, float | int]],
    factors: Any = None,
    *,
    positions: str | int | Sequence[int] = "all",
) -> list[tuple[str, Callable[..., Any]]]:
    """Hooks that scale or clamp units: for `model.hooks(fwd_hooks=...)` and `model.run_with_hooks(...)` while attached.

        hooks = swd.unit_hooks({"blocks.2.mlp_out/5": ("scale", 2.0), "blocks.3.mlp_out/17": ("clamp", 0.0)})
        with swd.attach(model, factors), model.hooks(fwd_hooks=hooks):
            logits = model(prompt)

    Args:
        changes: unit -> ("scale", s): z becomes s z; or ("clamp", v): z becomes v.
        factors: what is attached; the units' numbers are then checked now, and otherwise when the hooks run.
        positions: "all", "scoring" (the last position), one position or several (negative ones count from the end).

    Raises:
        EditError: a change that is neither, a value that is not finite, a unit that these factors do not have, or unknown
            positions; or no changes.
        ValueError: not a unit's name.
    """
    if not changes:
        raise EditError('there are no units to change; give {"blocks.2.mlp_out/5": ("scale", 2.0)}')
    where = _positions(positions)
    by_site: dict[str, list[_Change]] = {}
    for unit, change in changes.items():
        site, index = parse_unit(unit)
        _check_unit(unit, site, index, factors)
        by_site.setdefault(site, []).append((index, *_checked(unit, change)))
    return [(hook_name(site), _hook(site, some, where)) for site, some in by_site.items()]


def _checked(unit: str, change: Any) -> tuple[str, float]:
    if not isinstance(change, tuple | list) or len(change) != 2 or change[0] not in HOWS:
        raise EditError(f'unit {unit}: a change is ("scale", factor) or ("clamp", value), got {change!r}')
    how, value = change
    return how, require_number(f"unit {unit}: the value of {how!r}", value)


def _check_unit(unit: str, site: str, index: int, factors: Any) -> None:
    if factors is None:
        return
    held = factors if isinstance(factors, Mapping) else {getattr(factors, "provenance", {}).get("site", site): factors}
    if site not in held:
        raise EditError(f"unit {unit}: these factors hold {', '.join(held)}, not {site}")
    _require_index(site, index, held[site].n_units)


def _require_index(site: str, index: int, n_units: int) -> None:
    if index >= n_units:
        raise EditError(f"unit {site}/{index}: {site} has {n_units} units, 0 to {n_units - 1}")


def _positions(positions: Any) -> slice | list[int]:
    named = {"all": slice(None), "scoring": slice(-1, None)}
    if isinstance(positions, str):
        if positions not in named:
            raise EditError(f'positions must be "all", "scoring" or position numbers, got {positions!r}')
        return named[positions]
    listed = [positions] if isinstance(positions, int) else list(positions)
    if not listed or not all(isinstance(one, int) for one in listed):
        raise EditError(f'positions must be "all", "scoring" or position numbers, got {positions!r}')
    return listed


def _hook(site: str, changes: Sequence[_Change], where: slice | list[int]) -> Callable[..., Any]:
    def hook_fn(z: Float[Tensor, "batch pos unit"], hook: Any) -> Float[Tensor, "batch pos unit"]:
        changed = z.clone()
        for index, how, value in changes:
            _require_index(site, index, z.shape[-1])
            at = z[:, where, index]
            changed[:, where, index] = at * value if how == "scale" else torch.full_like(at, value)
        return changed

    return hook_fn
