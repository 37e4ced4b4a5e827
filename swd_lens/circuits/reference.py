"""What is put in an ablated unit's place: its mean over training prompts, zero, or its activation on the corrupt prompt.

1. `ablation_values` gives the fixed ones per site: means over whatever `mean_over` of the scores says, or zeros.
2. `Reference` brings them into the shape of a bucket: one vector for all prompts and positions, one per position (aligned
   at the end, because prompts end at the scoring position), or, for "resample", one per prompt and position.
"""

from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Host
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site
from swd_lens.tasks.task import Bucket, TaskError, TaskSplit

ABLATIONS = ("mean", "zero", "resample")


def ablation_values(scores: UnitScores, ablation: str) -> dict[str, Float[Tensor, "*_pos _unit"]]:
    """What replaces a unit's activation: its mean over training prompts (paper §2.2), or zero.

    Raises:
        ValueError: neither "mean" nor "zero".
    """
    if ablation not in ("mean", "zero"):
        raise ValueError(
            f"ablation must be 'mean' or 'zero' here, got {ablation!r} (resampled values belong to prompts: see evaluate)"
        )
    return {site: mean if ablation == "mean" else torch.zeros_like(mean) for site, mean in scores.means.items()}


def aligned(means: Float[Tensor, "pos unit"], length: int) -> Float[Tensor, "_pos unit"]:
    """The rows of a per-position mean for a prompt of this length: its last ones; before the longest training prompt's first
    position, that position's."""
    missing = length - len(means)
    return means[-length:] if missing <= 0 else torch.cat([means[:1].expand(missing, -1), means])


class Reference:
    """Values for the prompts of a bucket.

    Args:
        sites: the attached sites.
        split: the prompts that will be intervened on; "resample" needs a corrupt prompt for each.

    Raises:
        ValueError: an unknown ablation.
        TaskError: "resample" and a prompt without a corrupt one, or, with positions="all", one of another length.
    """

    def __init__(self, host: Host, sites: Sequence[Site], scores: UnitScores, ablation: str, split: TaskSplit):
        if ablation not in ABLATIONS:
            raise ValueError(f"ablation must be one of {ABLATIONS}, got {ablation!r}")
        self.host, self.sites, self.positions = host, list(sites), scores.settings["positions"]
        self.fixed = None if ablation == "resample" else ablation_values(scores, ablation)
        self.scores = scores
        if self.fixed is None:
            _require_corrupt(split, self.positions)

    def __call__(self, bucket: Bucket) -> dict[str, Float[Tensor, "_batch _pos _unit"]]:
        """site -> (batch or 1, pos or 1, unit), to be broadcast over the bucket's prompts and positions."""
        if self.fixed is None:
            return self._resampled(bucket)
        length = bucket.tokens.shape[1]
        return {
            site: value.view(1, 1, -1) if value.ndim == 1 else aligned(value, length)[None]
            for site, value in self.fixed.items()
        }

    def _resampled(self, bucket: Bucket) -> dict[str, Tensor]:
        """z on each row's corrupt prompt, under the unpruned replacement; prompts of one length are run together."""
        by_length: dict[int, tuple[list[int], list[Tensor]]] = {}
        for row, tokens in enumerate(bucket.corrupt):
            assert tokens is not None  # checked for the whole split
            rows, prompts = by_length.setdefault(len(tokens), ([], []))
            rows.append(row)
            prompts.append(tokens)
        found: dict[str, Tensor] = {}
        for chosen, prompts in by_length.values():
            for site, value in self._run(torch.stack(prompts)).items():
                kept = value[:, -1:] if self.positions == "scoring" else value
                whole = found.setdefault(site, kept.new_empty(len(bucket.index), *kept.shape[1:]))
                whole[chosen] = kept
        return found

    def _run(self, tokens: Int[Tensor, "batch pos"]) -> dict[str, Float[Tensor, "batch pos _unit"]]:
        seen: dict[str, Tensor] = {}

        def watch(name: str) -> Any:
            return lambda z, hook: seen.update({name: z.detach()})

        with torch.no_grad(), self.host.model.hooks(fwd_hooks=[(s.hook_name, watch(s.name)) for s in self.sites]):
            self.host.run_blocks(tokens, max(site.layer for site in self.sites) + 1)
        require_seen(self.sites, seen, "units")
        return seen


def _require_corrupt(split: TaskSplit, positions: str) -> None:
    corrupt = split.corrupt or (None,) * len(split)
    without = [i for i, tokens in enumerate(corrupt) if tokens is None]
    if without:
        raise TaskError(
            f"ablation='resample' needs a corrupt prompt for every example; {len(without)} of {len(split)} {split.name} prompts "
            f"of {split.task!r} have none, the first is {split.examples[without[0]].prompt!r}. Take ablation='mean'"
        )
    if positions == "all":
        lengths = [0 if tokens is None else len(tokens) for tokens in corrupt]
        other = [i for i, length in enumerate(lengths) if length != len(split.tokens[i])]
        if other:
            i = other[0]
            raise TaskError(
                f"ablation='resample' at all positions needs corrupt prompts of the same length; {len(other)} of {len(split)} "
                f"{split.name} prompts of {split.task!r} differ, the first has {len(split.tokens[i])} tokens and its corrupt one "
                f"{lengths[i]}. Take positions='scoring' or ablation='mean'"
            )
