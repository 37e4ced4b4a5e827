"""Runs of a screen: sites of the dense host whose outputs are set to their means.

1. Every site gets an `Output`, which hands over to the host's own product, so that what it computes can be averaged and replaced.
2. Each bucket of prompts is run once: dense margins, the mean output of every site, what enters each block, and the keys and
   values of all positions but the last.
3. An intervention is run from its first layer on; those of one layer run together, one copy of the prompts each.
4. Before that, a few prompts are run plainly and by these shortcuts; where they differ, the plain way is taken.
"""

import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint

from swd_lens.base.interrupts import Undo
from swd_lens.base.progress import tqdm
from swd_lens.circuits.interventions import Outcome, at_once
from swd_lens.hosts import Host, Start
from swd_lens.hosts.recording import recording, require_seen
from swd_lens.hosts.sites import Site
from swd_lens.hosts.verified import verified
from swd_lens.tasks.split import Bucket, TaskSplit
from swd_lens.units import require_detached

_CHECKED_PROMPTS = 4


class Output(nn.Module):
    """Stands for a site's product: the host's own, summed up while `counts`, in `rows` its `mean` (per position: `each`).
    of_expert: only tokens that are routed to it count; the site is shown zeros at others."""

    def __init__(self, of_expert: bool = False) -> None:
        super().__init__()
        self.of_expert = of_expert
        self.clear()

    def clear(self) -> None:
        self.counts, self.counted = False, False
        self.n: Tensor | int = 0
        self.sums: Tensor | float = 0.0
        self.mean: Tensor | None = None
        self.rows: list[slice] = []
        self.last_only, self.each = True, False

    def forward(self, h: Float[Tensor, "batch pos d_in"], bias: Tensor | None, dense: Any) -> Tensor:
        y = dense(h)
        if self.counts:
            seen, over = y[:, -1:] if self.last_only else y, 0 if self.each else (0, 1)
            there = h.any(-1, keepdim=True) if self.of_expert else torch.ones_like(y[..., :1], dtype=torch.bool)
            there = there[:, -1:] if self.last_only else there
            self.sums = self.sums + (seen.double() * there).sum(over).cpu()
            self.n, self.counted = self.n + there.sum(over).cpu(), True
        if self.rows and self.mean is not None:
            y = y.clone()
            for rows in self.rows:
                y[rows, -1 if self.last_only else slice(None)] = self.mean.to(y)
        return y


@contextmanager
def replaceable(host: Host, sites: Sequence[Site]) -> Iterator[dict[str, Output]]:
    """While open, every site's product goes through an `Output`."""
    require_detached(host.model, "screen")
    outputs, mode = {site.name: Output(site.expert is not None) for site in sites}, host.model.training
    with Undo() as undo:
        for site in sites:
            host.swap(site, outputs[site.name].train(mode), HookPoint().train(mode), undo.push)
        yield outputs


@dataclass(frozen=True)
class _Prepared:
    """A bucket with what its interventions share: what enters each block (at the last position where a prefix is kept)."""

    bucket: Bucket
    prefix: Any
    residuals: Mapping[int, Tensor]


class ScreenRuns:
    """The interventions on one task."""

    def __init__(
        self,
        host: Host,
        outputs: Mapping[str, Output],
        split: TaskSplit,
        positions: str,
        batch_size: int,
        tokens_per_forward: int,
    ):
        self.host, self.outputs, self.split, self.positions = host, outputs, split, positions
        self.batch_size, self.tokens_per_forward = batch_size, tokens_per_forward
        self.keeps_prefix, self.starts = positions == "scoring", True
        for output in outputs.values():
            output.clear()
            output.last_only, output.each = positions == "scoring", positions == "each"

    @property
    def fast_forward(self) -> list[str]:
        """Names of what runs leave out."""
        return ["start"] * self.starts + ["prefix"] * self.keeps_prefix

    def screen(self, interventions: Mapping[str, Sequence[Site]], described: str | None = None) -> tuple[Outcome, Outcome]:
        """The dense host's outcome, and that of the interventions, a row each; `described`: as progress, None shows none."""
        dense = Outcome.empty(1, len(self.split))
        layers = sorted({min(site.layer for site in sites) for sites in interventions.values()})
        buckets = list(self.split.buckets(self.batch_size))
        if self.keeps_prefix:  # the longest prompts: a host may attend both ways
            few, last = buckets[-1].tokens[:_CHECKED_PROMPTS], self.host.last_logits
            prefix = self.host.freeze_prefix(few)
            self.keeps_prefix = prefix is not None and verified(lambda: last(few, prefix), last(few))
        prepared = [self._prepare(bucket, layers, dense) for bucket in buckets]
        averaged = {name for name, output in self.outputs.items() if output.counted}
        require_seen([site for sites in interventions.values() for site in sites], averaged, "output")
        for output in self.outputs.values():
            output.mean = torch.as_tensor(output.sums) / torch.as_tensor(output.n).clamp(min=1)
        first = {name: min(site.layer for site in sites) for name, sites in interventions.items()}
        groups = {layer: [name for name, begins in first.items() if begins == layer] for layer in layers}
        # Interventions of a layer in the middle, from that layer and from the tokens on.
        singles = [sites for sites in interventions.values() if len(sites) == 1] or list(interventions.values())
        middle = min(site.layer for site in singles[len(singles) // 2])
        tried = [sites for sites in singles if min(site.layer for site in sites) == middle][-2:]
        run = functools.partial(self._logits, prepared[-1], middle, tried)
        if not verified(run, run(plainly=True), shortcut=self.fast_forward):
            self.starts = self.keeps_prefix = False
        places = {name: row for row, name in enumerate(interventions)}
        outcome = Outcome.empty(len(interventions), len(self.split))
        steps = [(each, layer) for each in prepared for layer in layers]
        for each, layer in tqdm(steps, desc=described, unit="layer", disable=described is None, leave=False):
            length = 1 if each.prefix is not None and self.keeps_prefix else each.bucket.tokens.shape[1]
            most = at_once(each.bucket, length, self.tokens_per_forward, whole=each.bucket.token_ids is None)
            for i in range(0, len(groups[layer]), most):
                names = groups[layer][i : i + most]
                logits = self._logits(each, layer, [interventions[name] for name in names])
                outcome.put(torch.tensor([places[name] for name in names]), each.bucket, logits)
        return dense, outcome

    def _prepare(self, bucket: Bucket, layers: Sequence[int], dense: Outcome) -> _Prepared:
        """Run a bucket once: its dense margins, its share of the means, and what enters the blocks."""
        prefix = self.host.freeze_prefix(bucket.tokens) if self.keeps_prefix else None
        names = {layer: f"blocks.{layer}.hook_resid_pre" for layer in layers}
        for output in self.outputs.values():
            output.counts = True
        with recording(self.host, hooks=names.values()) as seen:
            logits = self.host.last_logits(bucket.tokens, prefix, token_ids=bucket.token_ids)
        for output in self.outputs.values():
            output.counts = False
        dense.put(torch.zeros(1, dtype=torch.int64), bucket, logits[None])
        residuals = {
            layer: seen.hooks[name] if name in seen.hooks else self.host.residual(bucket.tokens, layer, prefix)
            for layer, name in names.items()
        }
        return _Prepared(bucket, prefix, residuals)

    def _logits(
        self, prepared: _Prepared, layer: int, interventions: Sequence[Sequence[Site]], plainly: bool = False
    ) -> Float[Tensor, "intervention batch _vocab"]:
        """Last-position logits under each intervention; the first replaced layer of all is `layer` or later."""
        bucket, times = prepared.bucket, len(interventions)
        tokens, prefix, start = bucket.tokens.repeat(times, 1), None, None
        if self.starts and not plainly:
            residual = prepared.residuals[layer]
            start = Start(layer, residual.repeat(times, *[1] * (residual.ndim - 1)))
            if prepared.prefix is not None and self.keeps_prefix:
                prefix = self.host.repeat_prefix(prepared.prefix, times, layer)
        batch = len(bucket.index)
        try:
            for i, sites in enumerate(interventions):
                for site in sites:
                    self.outputs[site.name].rows.append(slice(i * batch, (i + 1) * batch))
            logits = self.host.last_logits(tokens, prefix, start=start, token_ids=bucket.token_ids)
        finally:
            for output in self.outputs.values():
                output.rows = []
        return logits.view(times, batch, -1)
