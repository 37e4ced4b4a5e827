"""Ablation: which units are replaced, and by what: their means over training prompts, zero, or what they are on another prompt.

1. `Means` averages z over training prompts as they are run: at the scoring position of every prompt, over all tokens, or at
   every position by itself, counted from the end (prompts end at the scoring position); of an expert's units over the prompts
   and tokens that are routed to it.
2. `ablation_values` gives what replaces a unit whatever the prompt; `Reference` brings it into the shape of a bucket of
   prompts: one vector for all prompts and positions, one per position, or ("resample") one per prompt and position.
3. `replaced_masks` says which units are replaced when a set is kept or ablated.
4. `replaced` puts values in their place, or moves z a share of the way there; `intervention_hooks` does it in TransformerLens'
   own `run_with_hooks`. Many interventions at once are run by fast_forward.py.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.base.checks import one_of
from swd_lens.base.errors import TaskError, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Host
from swd_lens.hosts.recording import record
from swd_lens.hosts.sites import HookName, Site, expert_of, hook_name
from swd_lens.tasks.task import Bucket, TaskSplit
from swd_lens.units.keys import read_units

# Which units are replaced, or to which share: 1 (True) is the whole way to the reference activation, 0 is not at all.
Mask = Bool[Tensor, "*#batch unit"] | Float[Tensor, "*#batch unit"]
MEAN_OVER = ("scoring", "all_tokens", "per_position")
ABLATIONS = ("mean", "zero", "resample")

MODES = ("keep", "ablate")


class Means:
    """Running means of z at some sites over the prompts of a split."""

    def __init__(self, host: Host, sites: Sequence[Site], split: TaskSplit, positions: str, mean_over: str, batch_size: int):
        self.host, self.sites, self.split, self.mean_over = host, list(sites), split, mean_over
        self.batch_size = batch_size
        # With positions="scoring" only the last position's mean will ever be used.
        self.last_suffices = mean_over == "scoring" or (positions == "scoring" and mean_over == "per_position")
        longest = max(len(tokens) for tokens in split.tokens)
        self.rows = longest if mean_over == "per_position" and not self.last_suffices else 1
        self._sums: dict[str, Tensor] = {}
        self._counts = torch.zeros(self.rows, dtype=torch.int64)
        # Of experts, whose units are zero, and absent, at the tokens of other experts.
        self._routed: dict[str, Tensor] = {}
        self._done = torch.zeros(len(split), dtype=torch.bool)
        self._finished: dict[str, Tensor] | None = None

    def add(self, bucket: Bucket, z: Mapping[str, Float[Tensor, "batch _pos _unit"]]) -> None:
        """Add prompts that were run anyway; z has every position, or the last one where that suffices."""
        for name, value in z.items():
            total = self._total(value.detach().double())
            sums = self._sums.setdefault(name, torch.zeros(self.rows, total.shape[1], dtype=torch.float64))
            sums[-len(total) :] += total
            if expert_of(name) is not None:
                counts = self._total(value.detach().any(-1, keepdim=True).double())[:, 0].long()
                self._routed.setdefault(name, torch.zeros_like(self._counts))[-len(counts) :] += counts
        n, positions = next(iter(z.values())).shape[:2]
        if self.mean_over == "per_position" and not self.last_suffices:
            self._counts[-positions:] += n
        else:
            self._counts += n * (positions if self.mean_over == "all_tokens" else 1)
        self._done[bucket.index] = True

    def _total(self, value: Float[Tensor, "batch pos unit"]) -> Float[Tensor, "_pos unit"]:
        """Sum over the prompts, and over their tokens where one mean is for all."""
        if self.last_suffices:
            return value[:, -1:].sum(0).cpu()
        return (value.sum((0, 1))[None] if self.mean_over == "all_tokens" else value.sum(0)).cpu()

    def finished(self) -> dict[str, Float[Tensor, "*_pos _unit"]]:
        """The means, after running the prompts that were not added; (unit,), or (pos, unit) per position."""
        if self._finished is None:
            for bucket in self.split.buckets(self.batch_size):
                if not bool(self._done[bucket.index].all()):
                    self.add(bucket, record(self.host, bucket.tokens, units=self.sites).units)
            counts = {name: self._routed.get(name, self._counts).clamp(min=1)[:, None] for name in self._sums}
            means = {name: (total / counts[name]).float() for name, total in self._sums.items()}
            per_position = self.mean_over == "per_position"
            self._finished = means if per_position else {name: mean[0] for name, mean in means.items()}
        return self._finished


def ablation_values(scores: UnitScores, ablation: str) -> dict[str, Float[Tensor, "*_pos _unit"]]:
    """Activations that replace the units': their means over training prompts (paper §2.2), or zero. Raises ValueError: neither
    "mean" nor "zero"."""
    if ablation not in ("mean", "zero"):
        raise ValueError(
            f"ablation must be 'mean' or 'zero' here, got {quoted(ablation)} (resampled values belong to prompts: see evaluate)"
        )
    return {site: mean if ablation == "mean" else torch.zeros_like(mean) for site, mean in scores.means.items()}


def aligned(means: Float[Tensor, "*pos unit"], length: int) -> Float[Tensor, "_pos unit"]:
    """A mean for the positions of a prompt of this length: the last rows of a per-position mean, before the longest training
    prompt's first position that position's; (1, unit) where there is one mean for all positions."""
    if means.ndim == 1:
        return means[None]
    missing = length - len(means)
    return means[-length:] if missing <= 0 else torch.cat([means[:1].expand(missing, -1), means])


class Reference:
    """Values of replaced units on the prompts of a bucket. split: the prompts that will be intervened on; "resample" needs a
    corrupt prompt for each. Raises ValueError: an unknown ablation; TaskError: "resample" and a prompt without a corrupt one, or,
    with positions="all", one of another length."""

    def __init__(self, host: Host, sites: Sequence[Site], scores: UnitScores, ablation: str, split: TaskSplit):
        one_of("ablation", ablation, ABLATIONS)
        self.host, self.sites, self.positions = host, list(sites), scores.settings["positions"]
        self.fixed = None if ablation == "resample" else ablation_values(scores, ablation)
        if self.fixed is None:
            # Refuse a split that has no corrupt prompt for some example, or, at all positions, one of another length.
            corrupt = split.corrupt or (None,) * len(split)
            without = [i for i, tokens in enumerate(corrupt) if tokens is None]
            if without:
                raise TaskError(
                    f"ablation='resample' needs a corrupt prompt for every example; {len(without)} of {len(split)} {split.name} "
                    f"prompts of {quoted(split.task)} have none, the first is {quoted(split.examples[without[0]].prompt)}. Take "
                    "ablation='mean'"
                )
            lengths = [0 if tokens is None else len(tokens) for tokens in corrupt]
            other = [i for i, length in enumerate(lengths) if self.positions == "all" and length != len(split.tokens[i])]
            if other:
                i = other[0]
                raise TaskError(
                    f"ablation='resample' at all positions needs corrupt prompts of the same length; {len(other)} of "
                    f"{len(split)} {split.name} prompts of {quoted(split.task)} differ, the first has {len(split.tokens[i])} "
                    f"tokens and its corrupt one {lengths[i]}. Take positions='scoring' or ablation='mean'"
                )

    def __call__(self, bucket: Bucket) -> dict[str, Float[Tensor, "_batch _pos _unit"]]:
        """site -> (batch or 1, pos or 1, unit), to be broadcast over the bucket's prompts and positions."""
        if self.fixed is not None:
            return {site: aligned(value, bucket.tokens.shape[1])[None] for site, value in self.fixed.items()}
        # z on each row's corrupt prompt, under the unpruned replacement; prompts of one length are run together.
        by_length: dict[int, tuple[list[int], list[Tensor]]] = {}
        for row, tokens in enumerate(bucket.corrupt):
            assert tokens is not None  # checked for the whole split
            rows, prompts = by_length.setdefault(len(tokens), ([], []))
            rows.append(row)
            prompts.append(tokens)
        values: dict[str, Tensor] = {}
        for rows, prompts in by_length.values():
            for site, z in record(self.host, torch.stack(prompts), units=self.sites).units.items():
                kept = z[:, -1:] if self.positions == "scoring" else z
                values.setdefault(site, kept.new_empty(len(bucket.index), *kept.shape[1:]))[rows] = kept
        return values


def replaced_masks(scores: UnitScores, units: Any, mode: str) -> dict[str, Bool[Tensor, " _unit"]]:
    """Per site, True where a unit is replaced: the units not in the set (keep), or those in it (ablate). units: names
    ("blocks.2.mlp_out/17"), (site, index) pairs, a table or a circuit, see `swd_lens.units.keys.read_units`. Raises
    ValueError: a unit that these scores do not cover, or an unknown mode."""
    one_of("mode", mode, MODES)
    members = {site: torch.zeros(len(s), dtype=torch.bool) for site, s in scores.scores.items()}
    for site, index in read_units(units, members):
        if site not in members or not 0 <= index < len(members[site]):
            has = ", ".join(f"{name} (0 to {len(mask) - 1})" for name, mask in members.items())
            raise ValueError(f"unit {site}/{index} is not among the scored units: {has}")
        members[site][index] = True
    return {site: mask if mode == "ablate" else ~mask for site, mask in members.items()}


def replaced(z: Float[Tensor, "*batch pos unit"], mask: Mask, value: Tensor, positions: str) -> Float[Tensor, "*batch pos unit"]:
    """z with `value` in place of the masked units, at the last position ("scoring") or at all of them. mask: broadcasts over z
    (without its positions); of real numbers: shares of the way from z to `value`, 1 and 0 then give the bits of True and False.
    value: (..., pos or 1, unit), broadcasts over z; of more positions than z has, the last ones count."""
    length = 1 if positions == "scoring" else z.shape[-2]
    before, value = z[..., -length:, :], value.to(z)[..., -length:, :]
    if mask.is_floating_point():
        changed = torch.lerp(before, value, mask.to(z)[..., None, :])
    else:
        changed = torch.where(mask.to(z.device)[..., None, :], value, before)
    return changed if length == z.shape[-2] else torch.cat([z[..., :-length, :], changed], dim=-2)


@with_torch_defaults
def intervention_hooks(scores: UnitScores, units: Any, mode: str = "keep", *, ablation: str = "mean") -> list[tuple[str, Any]]:
    """Hooks for `model.run_with_hooks(tokens, fwd_hooks=...)` that keep or ablate a set of units (paper §protocol).

    They act where the scores were taken: at the last position, or at all of them. The factors must be attached. `units` are
    names, pairs, a table or a circuit.
    """
    masks, values = replaced_masks(scores, units, mode), ablation_values(scores, ablation)
    positions = scores.settings["positions"]

    def hook_of(mask: Bool[Tensor, " unit"], value: Float[Tensor, "*_pos unit"]) -> Callable[..., Tensor]:
        return lambda z, hook: replaced(z, mask, aligned(value, z.shape[1]), positions)

    return [(HookName(hook_name(site)), hook_of(mask, values[site])) for site, mask in masks.items() if mask.any()]
