"""InterventionRunner: prompts of one split under attached units, ready for any number of interventions.

1. Per bucket of prompts, compute once what interventions share (fast_forward.py), and the margin of the unpruned replacement.
   Where a host can, buckets of several lengths are joined behind it, as many prompts as batch_size.
2. Run the interventions, as many at once as memory allows; of each keep every prompt's margin, whether it was right, and
   (if asked for) KL(unpruned || intervened) at the scoring position, which needs the whole vocabulary's logits.
3. Partial interventions move units a share of the way to their reference; `gradients` says what each share does to the margin.
Memory does not grow with the number of interventions but for these few numbers.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.divergence import kl as kl_divergence
from swd_lens.base.divergence import log_probabilities
from swd_lens.base.errors import quoted
from swd_lens.base.progress import tqdm
from swd_lens.circuits.ablation import Reference
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import Masks, Runner, Shared, Values, find_fast_forward
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Host
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.host import frozen
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Bucket, TaskSplit
from swd_lens.units import Attachment

_LOGITS_AT_ONCE = 2**26  # a quarter of a gigabyte in float32
_KEPT_BYTES = 2**28  # of what is shared, between calls
_JOINED_BYTES = 2**26  # of what is shared by prompts that run together
_OF_BACKWARD = 4  # a pass with gradients has this part of the tokens at once: it keeps what every layer computed


@dataclass(frozen=True)
class Outcome:
    """Results of runs on the prompts of a split, in the split's order."""

    margins: Float[Tensor, "run prompt"]  # (run, prompt) in logits
    correct: Float[Tensor, "run prompt"]  # (run, prompt) 1.0, 0.0, or NaN where a metric knows no right and wrong
    # (run, prompt) KL(unpruned || run) at the scoring position in nats; NaN where it was not asked for
    kl: Float[Tensor, "run prompt"]

    @classmethod
    def empty(cls, runs: int, prompts: int) -> "Outcome":
        return cls(*(torch.full((runs, prompts), torch.nan, dtype=torch.float64) for _ in range(3)))

    @classmethod
    def of_host(cls, host: Host, split: TaskSplit, batch_size: int) -> "Outcome":
        """One plain run of every prompt, in the host as it is now."""
        outcome = cls.empty(1, len(split))
        with torch.no_grad():
            for bucket in split.buckets(batch_size):
                logits = host.last_logits(bucket.tokens, token_ids=bucket.token_ids)
                outcome.put(torch.zeros(1, dtype=torch.int64), bucket, logits[None])
        return outcome

    def put(self, runs: Int[Tensor, " _run"], bucket: Bucket, logits: Tensor, log_p: Tensor | None = None) -> None:
        """Enter a bucket's logits (run, batch, vocab); log_p: the unpruned replacement's log-probabilities, for KL."""
        rows = runs[:, None]
        self.margins[rows, bucket.index] = bucket.margin(logits).double().cpu()
        self.correct[rows, bucket.index] = bucket.correct(logits).double().cpu()
        if log_p is not None:
            for run, of_run in zip(runs.tolist(), logits, strict=True):  # one vocabulary at a time
                kl = kl_divergence(log_p, log_probabilities(of_run.float()))
                self.kl[run, bucket.index] = kl.double().cpu()

    def copy(self, runs: Int[Tensor, " _run"], bucket: Bucket, single: "Outcome") -> None:
        """Enter a single run's outcome on a bucket for all of these."""
        for name in ("margins", "correct", "kl"):
            of_bucket = getattr(single, name)[0, bucket.index]
            getattr(self, name)[runs[:, None], bucket.index] = of_bucket.expand(len(runs), -1)

    def of_prompts(self, prompts: slice) -> "Outcome":
        """Take some of the prompts, with all runs."""
        return Outcome(self.margins[:, prompts], self.correct[:, prompts], self.kl[:, prompts])

    @property
    def q(self) -> Float[Tensor, " run"]:
        """Mean margin per run (Q of the paper, §3.2)."""
        return self.margins.mean(1)


def at_once(bucket: Bucket, length: int, tokens_per_forward: int, *, whole: bool) -> int:
    """Number of interventions on a bucket that run together, at `length` positions of each prompt. whole: logits are of the
    whole vocabulary, which may outgrow everything else."""
    n_prompts = len(bucket.index)
    n = tokens_per_forward // (n_prompts * length)
    return max(1, min(n, _LOGITS_AT_ONCE // (n_prompts * bucket.d_vocab)) if whole else n)


class InterventionRunner:
    """Interventions on one split of prompts, with everything shared between them computed once.

    scores: whose positions and means the interventions use; ablation: see `Reference`; tokens_per_forward: prompts x positions x
    interventions at once, bounds memory; keep: keep what is shared between calls of `run` (for searches, which call it often), of
    as many buckets as have room; dense: what the dense host gives on the prompts, kept for other replacements. Raises ValueError:
    scores of other units than those attached, or of prompts with BOS where these have none (or the reverse); TaskError: prompts
    tokenized for another host.
    """

    def __init__(
        self,
        host: Host,
        attachment: Attachment,
        split: TaskSplit,
        scores: UnitScores,
        ablation: str,
        *,
        batch_size: int = 256,
        tokens_per_forward: int = 8_192,
        keep: bool = False,
        progress: bool = False,
        dense: DenseCache | None = None,
    ):
        attachment.factors.require_made_for(scores.settings, "this ranking")
        split.require_host(host.model)
        scored = scores.settings.get("prepend_bos")
        if None not in (scored, split.prepend_bos) and scored != split.prepend_bos:
            how = {True: "with", False: "without"}
            raise ValueError(
                f"the scores are of prompts {how[bool(scored)]} BOS, the {split.name} prompts of {quoted(split.task)} are "
                f"{how[bool(split.prepend_bos)]} BOS: their means do not fit; load both with the same prepend_bos"
            )
        self.host, self.attachment, self.split = host, attachment, split
        self.batch_size, self.tokens_per_forward = batch_size, tokens_per_forward
        self.keep, self.progress = keep, progress
        positions = scores.settings["positions"]
        self.reference = Reference(host, attachment.sites, scores, ablation, split)
        fast_forward = find_fast_forward(host, attachment.sites, attachment.factors, split, positions, dense=dense)
        self.runner = Runner(host, attachment.factors, fast_forward, dense)
        self._kept: dict[int, tuple[Bucket, Shared, Values]] = {}
        self._unpruned: Outcome | None = None

    def run(self, n: int, masks: Callable[[slice], Masks], *, kl: bool = False) -> tuple[Outcome, Outcome]:
        """Run n interventions on every prompt; gives their outcomes, and that of the unpruned replacement (a single run). masks:
        gives those of a slice of the n: site -> (circuit, unit), True where replaced, or shares of the way (fast_forward.py); kl:
        whether to compute KL."""
        outcome, unpruned = Outcome.empty(n, len(self.split)), self._unpruned or Outcome.empty(1, len(self.split))
        nothing = {site: torch.zeros(1, size, dtype=torch.bool) for site, size in self.attachment.factors.sizes.items()}
        with torch.no_grad(), self._fused():
            for bucket, shared, values in self._prepared():
                ids, log_p = None if kl else bucket.token_ids, None
                if self._unpruned is None or kl:
                    whole = self.runner.logits(shared, nothing, values, ids)
                    log_p = log_probabilities(whole[0].float()) if kl else None
                    unpruned.put(torch.zeros(1, dtype=torch.int64), bucket, whole, log_p)
                most = at_once(bucket, self._length(bucket), self.tokens_per_forward, whole=ids is None)
                for runs in torch.arange(n).split(most):
                    of_runs = masks(slice(int(runs[0]), int(runs[-1]) + 1))
                    acts = torch.stack([mask.any(1) for mask in of_runs.values()]).any(0)
                    # Replacing nothing is the unpruned replacement, to the bit: batches of another size round otherwise.
                    outcome.copy(runs[~acts], bucket, unpruned)
                    if bool(acts.any()):
                        acting = {site: mask[acts] for site, mask in of_runs.items()}
                        outcome.put(runs[acts], bucket, self.runner.logits(shared, acting, values, ids), log_p)
        self._unpruned = unpruned
        return outcome, unpruned

    def gradients(
        self, shares: Callable[[slice], Mapping[str, Float[Tensor, "run _unit"]]], n: int
    ) -> tuple[Float[Tensor, "run prompt"], dict[str, Float[Tensor, "run _unit"]]]:
        """Run n partial interventions, with the gradient of each one's mean margin by how far its units are moved. shares: gives
        those of a slice of the n: site -> (run, unit), how far of the way from its activation to its reference each unit is
        moved. Returns margins in logits, and site -> (run, unit) d Q / d share, float64 on the CPU."""
        margins = torch.full((n, len(self.split)), torch.nan, dtype=torch.float64)
        sizes = self.attachment.factors.sizes
        totals = {site: torch.zeros(n, size, dtype=torch.float64) for site, size in sizes.items()}
        with self._fused(), frozen(self.host, "while an attack is fitted"):
            for bucket, shared, values in self._prepared():
                tokens = self.tokens_per_forward // _OF_BACKWARD
                most = at_once(bucket, self._length(bucket), tokens, whole=False)
                for runs in torch.arange(n).split(most):
                    of_runs = shares(slice(int(runs[0]), int(runs[-1]) + 1))
                    leaves = {site: share.detach().float().requires_grad_(True) for site, share in of_runs.items()}
                    with torch.enable_grad():
                        of_bucket = bucket.margin(self.runner.logits(shared, leaves, values, bucket.token_ids))
                        by_site = torch.autograd.grad(of_bucket.sum(), list(leaves.values()), allow_unused=True)
                    margins[runs[:, None], bucket.index] = of_bucket.detach().double().cpu()
                    for site, gradient in zip(leaves, by_site, strict=True):
                        if gradient is not None:  # a site at which nothing is moved has no hook
                            totals[site][runs] += gradient.double().cpu() / len(self.split)
        return margins, totals

    def dense(self) -> Outcome:
        """The dense host on every prompt."""

        def run() -> Outcome:
            with self.attachment.dense(), self._fused():
                return Outcome.of_host(self.host, self.split, self.batch_size)

        return self.runner.dense.of_split(self.split, ("outcome", self.batch_size), run)

    def _fused(self) -> AbstractContextManager[bool]:
        """Fuse attention where prompts are long, as the longest one says."""
        return fused_attention(self.host, max(self.split.tokens, key=len)[None])

    def _length(self, bucket: Bucket) -> int:
        """Positions that a copy of a prompt computes; one that keys are copied for counts as computed."""
        shares = self.runner.fast_forward.shares and not standing_hooks(self.host.model)
        return 1 if shares else bucket.tokens.shape[1]

    def _prepared(self) -> Iterator[tuple[Bucket, Shared, Values]]:
        """Every bucket of prompts with what its interventions share, and what replaced units are set to."""
        # Buckets run together, of as many prompts as a batch may have, while what they share is small.
        groups: list[list[Bucket]] = []
        joins = self.runner.fast_forward.joins and self.split.metric is None  # which bounds its buckets by the vocabulary
        for bucket in self.split.buckets(self.batch_size):
            group = [*groups[-1], bucket] if groups and joins and groups[-1][0].tokens.shape[1] > 1 else [bucket]
            fits = sum(len(each.index) for each in group) <= self.batch_size and self._bytes(group) <= _JOINED_BYTES
            if len(group) > 1 and fits:
                groups[-1] = group
            else:
                groups.append([bucket])
        room = _KEPT_BYTES
        for i, group in enumerate(tqdm(groups, desc="circuits", unit="batch", disable=not self.progress, leave=False)):
            room -= self._bytes(group)
            if i in self._kept:
                yield self._kept[i]
                continue
            prepared = self._shared(group)
            if self.keep and room >= 0:
                self._kept[i] = prepared
            yield prepared

    def _bytes(self, group: Sequence[Bucket]) -> int:
        """At most: keys and values of every layer, and the residual stream."""
        cfg: Any = self.host.model.cfg
        positions = sum(len(bucket.index) for bucket in group) * group[-1].tokens.shape[1]  # the longest comes last
        return positions * (2 * cfg.n_layers + 1) * cfg.d_model * 4

    def _shared(self, group: Sequence[Bucket]) -> tuple[Bucket, Shared, Values]:
        """What interventions on a group share; of several buckets, of their last positions."""
        parts = [(self.runner.share(bucket.tokens), self.reference(bucket)) for bucket in group]
        if len(group) == 1:
            return group[0], *parts[0]
        values = {
            site: torch.cat(
                [of[site][:, -1:].expand(len(bucket.index), -1, -1) for bucket, (_, of) in zip(group, parts, strict=True)]
            )
            for site in parts[0][1]
        }
        return Bucket.joined(group), self.runner.join([shared for shared, _ in parts]), values
