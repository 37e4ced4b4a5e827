"""Means: what z is on average over training prompts, streamed; what ablation puts in a unit's place.

1. `mean_over` says what is averaged: the scoring position of every prompt, all tokens, or every position by itself, counted
   from the end (prompts end at the scoring position).
2. Contributions that need no means beforehand hand their z over as they go (`add`), so that nothing is run twice.
3. `finished` runs the prompts of which no z has been handed over, and divides.
"""

from collections.abc import Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.hosts import Host
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site
from swd_lens.tasks.task import Bucket, TaskSplit

MEAN_OVER = ("scoring", "all_tokens", "per_position")


class Means:
    """Running means of z at some sites over the prompts of a split."""

    def __init__(
        self, host: Host, sites: Sequence[Site], split: TaskSplit, positions: str, mean_over: str, batch_size: int
    ):
        self.host, self.sites, self.split, self.mean_over = host, list(sites), split, mean_over
        self.batch_size = batch_size
        # With positions="scoring" only the last position's mean will ever be used.
        self.last_suffices = mean_over == "scoring" or (positions == "scoring" and mean_over == "per_position")
        longest = max(len(tokens) for tokens in split.tokens)
        self.rows = longest if mean_over == "per_position" and not self.last_suffices else 1
        self._sums: dict[str, Tensor] = {}
        self._counts = torch.zeros(self.rows, dtype=torch.int64)
        self._done = torch.zeros(len(split), dtype=torch.bool)
        self._finished: dict[str, Tensor] | None = None

    def add(self, bucket: Bucket, z: Mapping[str, Float[Tensor, "batch _pos _unit"]]) -> None:
        """Count these prompts; z has every position, or the last one where that suffices."""
        for name, value in z.items():
            value = value.detach().double()
            if self.last_suffices:
                total = value[:, -1:].sum(0)
            elif self.mean_over == "all_tokens":
                total = value.sum((0, 1))[None]
            else:
                total = value.sum(0)
            total = total.cpu()
            sums = self._sums.setdefault(name, torch.zeros(self.rows, total.shape[1], dtype=torch.float64))
            sums[-len(total) :] += total
        n, positions = next(iter(z.values())).shape[:2]
        if self.mean_over == "per_position" and not self.last_suffices:
            self._counts[-positions:] += n
        else:
            self._counts += n * (positions if self.mean_over == "all_tokens" else 1)
        self._done[bucket.index] = True

    def finished(self) -> dict[str, Float[Tensor, "*_pos _unit"]]:
        """The means, after running the prompts that were not added; (unit,), or (pos, unit) per position."""
        if self._finished is None:
            for bucket in self.split.buckets(self.batch_size):
                if not bool(self._done[bucket.index].all()):
                    self.add(bucket, self._run(bucket))
            counts = self._counts.clamp(min=1)[:, None]
            means = {name: (total / counts).float() for name, total in self._sums.items()}
            per_position = self.mean_over == "per_position"
            self._finished = means if per_position else {name: mean[0] for name, mean in means.items()}
        return self._finished

    def _run(self, bucket: Bucket) -> dict[str, Tensor]:
        seen: dict[str, Tensor] = {}

        def watch(name: str):
            return lambda z, hook: seen.update({name: z.detach()})

        with torch.no_grad(), self.host.model.hooks(fwd_hooks=[(s.hook_name, watch(s.name)) for s in self.sites]):
            self.host.run_blocks(bucket.tokens, max(site.layer for site in self.sites) + 1)
        require_seen(self.sites, seen, "units")
        return seen
