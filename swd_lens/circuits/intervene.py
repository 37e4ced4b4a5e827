"""Interventions on units: keep a set and put mean activations in place of the rest, or ablate the set.

1. An intervention says, per site, which units are replaced (a boolean mask, `replaced_masks`) and by what (mu).
2. `intervention_hooks` turns one into hooks for TransformerLens' own `run_with_hooks`. Many at once are run by roads.py.
"""

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.circuits.reference import ablation_values, aligned
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts.sites import hook_name, parse_unit

MODES = ("keep", "ablate")


def replaced_masks(
    scores: UnitScores, units: Iterable[str | tuple[str, int]], mode: str
) -> dict[str, Bool[Tensor, " _unit"]]:
    """Per site, True where a unit is replaced: the units not in the set (keep), or those in it (ablate).

    Args:
        units: names ("blocks.2.mlp_out/17") or (site, index) pairs.

    Raises:
        ValueError: a unit that these scores do not cover, or an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {MODES}, got {mode!r}")
    chosen = {site: torch.zeros(len(s), dtype=torch.bool) for site, s in scores.scores.items()}
    for unit in units:
        site, index = parse_unit(unit) if isinstance(unit, str) else unit
        if site not in chosen or not 0 <= index < len(chosen[site]):
            has = ", ".join(f"{name} (0 to {len(mask) - 1})" for name, mask in chosen.items())
            raise ValueError(f"unit {site}/{index} is not among the scored units: {has}")
        chosen[site][index] = True
    return {site: mask if mode == "ablate" else ~mask for site, mask in chosen.items()}


def intervention_hooks(
    scores: UnitScores, units: Iterable[str | tuple[str, int]], mode: str = "keep", *, ablation: str = "mean"
) -> list[tuple[str, Any]]:
    """Hooks for `model.run_with_hooks(tokens, fwd_hooks=...)` that keep or ablate a set of units.

    They act where the scores were taken: at the last position, or at all of them. The factors must be attached.
    """
    masks, values = replaced_masks(scores, units, mode), ablation_values(scores, ablation)
    positions = scores.settings["positions"]
    return [(hook_name(site), _replace(mask, values[site], positions)) for site, mask in masks.items() if mask.any()]


def _replace(mask: Bool[Tensor, " unit"], value: Float[Tensor, "*_pos unit"], positions: str) -> Any:
    def hook_fn(z: Float[Tensor, "batch pos unit"], hook: Any) -> Float[Tensor, "batch pos unit"]:
        chosen = slice(-1, None) if positions == "scoring" else slice(None)
        at = z[:, chosen]
        mu = value.to(z) if value.ndim == 1 else aligned(value.to(z), at.shape[1])
        changed = torch.where(mask.to(z.device), mu, at)
        return changed if positions == "all" else torch.cat([z[:, :-1], changed], dim=1)

    return hook_fn
