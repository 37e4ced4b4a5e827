"""TaskExample: one prompt in strings, before any tokenizer has seen it. TaskSplit: the tokenized prompts of one split.

1. A split is handed out in buckets of one length, so that no padding is ever needed: a batch gives, row by row, what single
   prompts give.
2. The margin is the paper's: mean answer logit minus mean distractor logit at the last position (app. A.3). It needs the
   logits of the split's answers and distractors only (`token_ids`), a few hundred columns at most instead of a vocabulary.
3. A metric function takes the margin's place: it sees whole-vocabulary logits, and `token_ids` is None.
"""

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import pandas as pd
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.display import card, folded_settings
from swd_lens.base.divergence import CHUNK_BYTES
from swd_lens.base.errors import TaskError, encodable, quoted, seen, visible_token
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.encoding import vocabulary_hash
from swd_lens.tasks.text import same_length

PER_PROMPT = ("examples", "tokens", "answer_ids", "distractor_ids", "corrupt")  # fields of a split


@dataclass(frozen=True)
class TaskExample:
    """One prompt, the next tokens that are right and those that are wrong.

    Attributes:
        prompt: the text up to the scoring position (its last token).
        answers: right continuations, each of which should be one token (leading space included, " Mary").
        distractors: wrong continuations, each one token; the task margin is mean answer logit minus mean distractor logit.
        corrupt: the same prompt with the decisive content changed (for resampling), or None.
        meta: where the example comes from: family, split, template, ... (strings only; goes into reports).
    """

    prompt: str
    answers: tuple[str, ...]
    distractors: tuple[str, ...]
    corrupt: str | None = None
    meta: Mapping[str, str] = field(default_factory=dict)

    def _repr_html_(self) -> str:
        facts = {"prompt": self.prompt, "answers": listed(self.answers), "distractors": listed(self.distractors)}
        if self.corrupt is not None:
            facts["corrupt"] = self.corrupt
        return card("TaskExample", facts, folded_settings(self.meta, "where it comes from"))


def listed(tokens: tuple[str, ...]) -> str:
    """Tokens with their spaces seen."""
    return "  ".join(visible_token(token) for token in tokens) or "none"


class Unusable(Exception):
    """One example that cannot be scored; it is dropped and counted under `reason`, or refused with the detail."""

    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


@with_torch_defaults
@dataclass(frozen=True)
class Bucket:
    """Prompts of one length, or of several (`joined`).

    Attributes:
        index: (batch,) which examples of the split these are.
        tokens: (batch, pos); of several lengths, the shorter ones stand at the end of their rows, behind zeros.
        answers, distractors: (batch, answer) weights over `token_ids`; each row sums to 1 over its tokens, so a product with
            logits is a mean. With a metric they have no columns.
        token_ids: (answer,) the tokens whose logits the margin needs: pass them to `host.last_logits(tokens, token_ids=...)`.
            None with a metric, which needs the whole vocabulary.
        d_vocab: of the host that the prompts were tokenized for.
        corrupt: tokens of each row's corrupt prompt, None where it has none; their lengths may differ from `tokens`.
        examples: the rows' examples.
        metric: the function that stands in for the margin, or None.
    """

    index: Int[Tensor, " batch"]
    tokens: Int[Tensor, "batch pos"]
    answers: Float[Tensor, "batch answer"]
    distractors: Float[Tensor, "batch answer"]
    token_ids: Int[Tensor, " answer"] | None
    d_vocab: int
    corrupt: tuple[Int[Tensor, " _pos"] | None, ...]
    examples: tuple[TaskExample, ...]
    metric: Callable[..., Any] | None = None

    @classmethod
    def joined(cls, buckets: Sequence["Bucket"]) -> "Bucket":
        """One bucket of several of the same split, for runs that compute the last position alone."""
        first, longest = buckets[0], max(bucket.tokens.shape[1] for bucket in buckets)
        return replace(
            first,
            index=torch.cat([bucket.index for bucket in buckets]),
            tokens=torch.cat([F.pad(bucket.tokens, (longest - bucket.tokens.shape[1], 0)) for bucket in buckets]),
            answers=torch.cat([bucket.answers for bucket in buckets]),
            distractors=torch.cat([bucket.distractors for bucket in buckets]),
            corrupt=tuple(tokens for bucket in buckets for tokens in bucket.corrupt),
            examples=tuple(example for bucket in buckets for example in bucket.examples),
        )

    def margin(self, logits: Float[Tensor, "*runs batch _columns"]) -> Float[Tensor, "*runs batch"]:
        """Mean answer logit minus mean distractor logit, per prompt (float32), or what the metric gives. logits: at the
        scoring position, of exactly `token_ids` or of the whole vocabulary; of one run, or of several. Raises TaskError:
        logits of neither width, a metric that does not give one number per prompt, or a margin that is not finite."""
        columns = self._columns(logits).float()
        if self.metric is None:
            margins = (columns * (self.answers - self.distractors).to(columns.device)).sum(-1)
        elif columns.ndim > 2:
            return torch.stack([self.margin(run) for run in columns])
        else:
            # A copy: a metric may write into what it is given.
            values, batch = self.metric(columns.clone(), list(self.examples)), len(columns)
            if not (isinstance(values, Tensor) and values.shape == (batch,) and values.is_floating_point()):
                got = f"{values.dtype} of shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
                raise TaskError(
                    f"metric {quoted(getattr(self.metric, '__name__', self.metric))} must give one float per prompt, a tensor of "
                    f"shape ({batch},); it gave {got}. It is called as metric(logits, examples) with logits (batch, vocab)"
                )
            margins = values.float()
        if not bool(margins.isfinite().all()):
            first = tuple((~margins.isfinite()).nonzero()[0].tolist())
            raise TaskError(
                f"the margin of prompt {quoted(self.examples[first[-1]].prompt)} is {float(margins[first])}; run the host "
                "in float32, or look at its logits there"
            )
        return margins

    def correct(self, logits: Float[Tensor, "*runs batch _columns"]) -> Float[Tensor, "*runs batch"]:
        """1.0 where the best answer lies above every distractor, else 0.0; NaN with a metric, which knows no right and wrong."""
        if self.metric is not None:
            return torch.full(logits.shape[:-1], torch.nan, dtype=torch.float32)
        columns = self._columns(logits).detach().float().cpu()
        best = columns.masked_fill(self.answers == 0, -torch.inf).amax(-1)
        return (best > columns.masked_fill(self.distractors == 0, -torch.inf).amax(-1)).float()

    def _columns(self, logits: Tensor) -> Tensor:
        if self.token_ids is not None and logits.shape[-1] == len(self.token_ids):
            return logits
        if logits.shape[-1] != self.d_vocab:
            few = "" if self.token_ids is None else f"the {len(self.token_ids)} of bucket.token_ids, or "
            raise TaskError(f"logits have {logits.shape[-1]} columns; give {few}the whole vocabulary's {self.d_vocab}")
        return logits if self.token_ids is None else logits[..., self.token_ids.to(logits.device)]


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class TaskSplit:
    """Tokenized examples of one split."""

    name: str  # "train", "validation" or "test"
    examples: tuple[TaskExample, ...]  # the examples that were kept, in order
    tokens: tuple[Int[Tensor, " _pos"], ...]  # their prompts, one 1-D int64 tensor each; the scoring position is the last token
    answer_ids: tuple[tuple[int, ...], ...]  # answer_ids, distractor_ids: token ids per example
    distractor_ids: tuple[tuple[int, ...], ...]
    d_vocab: int  # of the host they were tokenized for
    dropped: dict[str, int] = field(default_factory=dict)  # reason -> how many examples were dropped for it
    task: str = "task"  # the name of the task that this is a split of
    # tokens of each example's corrupt prompt, None where it has none; () where no example has one
    corrupt: tuple[Int[Tensor, " _pos"] | None, ...] = ()
    # metric(logits (batch, vocab) float32, examples) -> (batch,), in the margin's place; None = the margin
    metric: Callable[..., Any] | None = None
    # where the examples come from; prepend_bos: whether prompts begin with BOS (None: not known). Both go into every result.
    source: str = ""
    prepend_bos: bool | None = None
    vocabulary: str = ""  # SHA-256 of the words of the tokenizer that they were made with; "": not known (prompts of ids)

    def __post_init__(self) -> None:
        object.__setattr__(self, "task", encodable(self.task))

    def __len__(self) -> int:
        return len(self.examples)

    def and_then(self, other: "TaskSplit") -> "TaskSplit":
        """This split's prompts, then another's of the same task, for what is run on both: its buckets hold prompts of both."""
        both = {name: getattr(self, name) + getattr(other, name) for name in PER_PROMPT}
        if both["corrupt"]:
            both["corrupt"] = tuple(each for split in (self, other) for each in split.corrupt or (None,) * len(split))
        return replace(self, name=f"{self.name} and {other.name}", dropped={}, **both)

    def table(self) -> pd.DataFrame:
        """One row per example: prompt, answers and distractors (spaces as dots), and the prompt's tokens counted."""
        rows = [
            {"prompt": e.prompt, "answers": listed(e.answers), "distractors": listed(e.distractors), "tokens": len(tokens)}
            for e, tokens in zip(self.examples, self.tokens, strict=True)
        ]
        return pd.DataFrame(rows, columns=["prompt", "answers", "distractors", "tokens"])

    @seen
    def __repr__(self) -> str:
        lengths = [len(tokens) for tokens in self.tokens]
        dropped = sum(self.dropped.values())
        words = f"{len(self)} prompts" + (f" of {min(lengths)} to {max(lengths)} tokens" if lengths else "")
        return f"TaskSplit({self.task}, {self.name}: {words}{f', {dropped} dropped' if dropped else ''})"

    def _repr_html_(self) -> str:
        about = {"source": self.source, "prepend_bos": self.prepend_bos, "d_vocab": self.d_vocab, "dropped": self.dropped}
        return card(repr(self), self.table(), folded_settings(about))

    def require_host(self, model: Any) -> None:
        """Require that the prompts were tokenized for a host with this one's vocabulary. Raises TaskError: its vocabulary has
        another size, or other words."""
        d_vocab = int(model.cfg.d_vocab)
        if self.d_vocab != d_vocab:
            raise TaskError(
                f"task {quoted(self.task)} was tokenized for a host with {self.d_vocab} tokens, this one has {d_vocab}: "
                "its ids mean other words here. Load the task for this host: load_task(name, model)"
            )
        of_host = vocabulary_hash(model.tokenizer)
        if self.vocabulary and of_host and self.vocabulary != of_host:
            name = getattr(model.tokenizer, "name_or_path", "") or type(model.tokenizer).__name__
            raise TaskError(
                f"task {quoted(self.task)} was tokenized with another vocabulary than this host's ({name}), of the same "
                f"{d_vocab} tokens: its ids mean other words here. Load the task for this host: load_task(name, model)"
            )

    @functools.cached_property
    def token_ids(self) -> Int[Tensor, " answer"] | None:
        """The different answers and distractors of the whole split, ascending; None with a metric."""
        if self.metric is not None:
            return None
        return torch.tensor(sorted({i for ids in (*self.answer_ids, *self.distractor_ids) for i in ids}))

    def first(self, n: int) -> "TaskSplit":
        """The first n prompts; all where there are no more."""
        return self if len(self) <= n else self.at(range(n))

    def at(self, places: Sequence[int]) -> "TaskSplit":
        """The prompts at these places, in this order."""
        columns = {name: getattr(self, name) for name in PER_PROMPT if getattr(self, name)}
        return replace(self, **{name: tuple(column[i] for i in places) for name, column in columns.items()})

    def buckets(self, batch_size: int = 256) -> Iterator[Bucket]:
        """Prompts grouped by length, shortest first, at most batch_size at once; every example comes exactly once.

        With a metric, which wants the whole vocabulary, no more than have CHUNK_BYTES of logits.
        """
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        size = batch_size if self.metric is None else min(batch_size, max(1, CHUNK_BYTES // (4 * self.d_vocab)))
        batches = same_length([len(prompt) for prompt in self.tokens], lambda _: size)
        for rows in sorted(batches, key=lambda rows: len(self.tokens[rows[0]])):
            tokens = torch.stack([self.tokens[i] for i in rows])
            right, wrong = (self._weights(ids, rows) for ids in (self.answer_ids, self.distractor_ids))
            corrupt = tuple(self.corrupt[i] if self.corrupt else None for i in rows)
            examples = tuple(self.examples[i] for i in rows)
            ids, d_vocab, metric = self.token_ids, self.d_vocab, self.metric
            yield Bucket(torch.tensor(rows), tokens, right, wrong, ids, d_vocab, corrupt, examples, metric)

    def _weights(self, ids: Sequence[Sequence[int]], rows: list[int]) -> Float[Tensor, "batch answer"]:
        if self.token_ids is None:
            return torch.zeros(len(rows), 0, dtype=torch.float32)
        weights = torch.zeros(len(rows), len(self.token_ids), dtype=torch.float32)
        for row, i in enumerate(rows):
            columns = torch.searchsorted(self.token_ids, torch.tensor(list(ids[i])))
            weights[row, columns] = 1.0 / len(ids[i])
        return weights
