"""Interventions on units: keep a set and put mean activations in place of the rest, or ablate the set.

1. An intervention says, per site, which units are replaced (a boolean mask) and by what (mu).
2. `intervention_hooks` turns one into hooks for TransformerLens' own `run_with_hooks`.
3. `run_interventions` runs many at once on a bucket of prompts: the prompts are repeated, one copy per intervention, and
   every copy gets its own mask.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.circuits.attribution import UnitScores
from swd_lens.hosts import Host
from swd_lens.sites import hook_name, parse_unit
from swd_lens.tasks.task import Bucket

MODES = ("keep", "ablate")
ABLATIONS = ("mean", "zero")


def ablation_values(scores: UnitScores, ablation: str) -> dict[str, Float[Tensor, " _unit"]]:
    """What replaces a unit's activation: its mean over training prompts (paper §2.2), or zero."""
    if ablation not in ABLATIONS:
        raise ValueError(f"ablation must be one of {ABLATIONS}, got {ablation!r}")
    return {site: mean if ablation == "mean" else torch.zeros_like(mean) for site, mean in scores.means.items()}


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
    return _hooks({site: mask[None] for site, mask in masks.items()}, values, scores.settings["positions"])


def run_interventions(
    host: Host,
    bucket: Bucket,
    prefix: Any,
    replaced: Mapping[str, Bool[Tensor, "circuit _unit"]],
    values: Mapping[str, Float[Tensor, " _unit"]],
    positions: str,
) -> Float[Tensor, "circuit batch vocab"]:
    """Last-position logits of every prompt under every intervention, in one forward.

    Args:
        prefix: what `host.freeze_prefix(bucket.tokens)` returned, or None to run the prompts whole.
        replaced: site -> one mask per intervention.
        values: site -> what replaced units are set to.
    """
    circuits = len(next(iter(replaced.values())))
    batch = len(bucket.index)
    rows = {site: masks.repeat_interleave(batch, 0) for site, masks in replaced.items()}
    with host.model.hooks(fwd_hooks=_hooks(rows, values, positions)):
        logits = host.last_logits(bucket.tokens.repeat(circuits, 1), host.repeat_prefix(prefix, circuits))
    return logits.view(circuits, batch, -1)


def _hooks(masks: Mapping[str, Tensor], values: Mapping[str, Tensor], positions: str) -> list[tuple[str, Any]]:
    return [(hook_name(site), _replace(masks[site], values[site], positions)) for site in masks if masks[site].any()]


def _replace(mask: Bool[Tensor, "rows unit"], value: Float[Tensor, " unit"], positions: str) -> Any:
    def hook_fn(z: Float[Tensor, "batch pos unit"], hook: Any) -> Float[Tensor, "batch pos unit"]:
        rows, mu = mask[:, None].to(z.device), value.to(z)
        if positions == "all":
            return torch.where(rows, mu, z)
        return torch.cat([z[:, :-1], torch.where(rows, mu, z[:, -1:])], dim=1)

    return hook_fn
