"""Task: prompts with right and wrong next tokens, tokenized for one host, in a train and a test split.

1. Every prompt, answer and distractor is tokenized; an answer or distractor that is not exactly one token, or answers that
   overlap distractors, make the example unusable: it is dropped and counted, or refused (`on_bad="raise"`).
2. A `TaskSplit` hands out buckets of prompts of one length, so that no padding is ever needed: a batch gives, row by row,
   what single prompts give.
3. The margin is the paper's: mean answer logit minus mean distractor logit at the last position (app. A.3).
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.tasks.example import TaskExample


class TaskError(ValueError):
    """A task that cannot be used with this host; the message counts the reasons."""


@dataclass(frozen=True)
class Bucket:
    """Prompts of one length.

    Attributes:
        index: (batch,) which examples of the split these are.
        tokens: (batch, pos).
        answers, distractors: (batch, vocab) weights; each row sums to 1 over its tokens, so a product with logits is a mean.
    """

    index: Int[Tensor, " batch"]
    tokens: Int[Tensor, "batch pos"]
    answers: Float[Tensor, "batch vocab"]
    distractors: Float[Tensor, "batch vocab"]

    def margin(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, " batch"]:
        """Mean answer logit minus mean distractor logit, per prompt (float32)."""
        weights = (self.answers - self.distractors).to(logits.device)
        return (logits.float() * weights).sum(-1)

    def correct(self, logits: Float[Tensor, "batch vocab"]) -> Bool[Tensor, " batch"]:
        """Whether the best answer lies above every distractor."""
        logits = logits.float().cpu()
        best = logits.masked_fill(self.answers == 0, -torch.inf).amax(-1)
        return best > logits.masked_fill(self.distractors == 0, -torch.inf).amax(-1)


@dataclass(frozen=True)
class TaskSplit:
    """Tokenized examples of one split.

    Attributes:
        name: "train" or "test".
        examples: the examples that were kept, in order.
        tokens: their prompts, one 1-D int64 tensor each; the scoring position is the last token.
        answer_ids, distractor_ids: token ids per example.
        d_vocab: of the host they were tokenized for.
        dropped: reason -> how many examples were dropped for it.
        task: the name of the task that this is a split of.
    """

    name: str
    examples: tuple[TaskExample, ...]
    tokens: tuple[Int[Tensor, " _pos"], ...]
    answer_ids: tuple[tuple[int, ...], ...]
    distractor_ids: tuple[tuple[int, ...], ...]
    d_vocab: int
    dropped: dict[str, int] = field(default_factory=dict)
    task: str = "task"

    def __len__(self) -> int:
        return len(self.examples)

    def buckets(self, batch_size: int = 256) -> Iterator[Bucket]:
        """Prompts grouped by length, shortest first, at most batch_size at once; every example comes exactly once."""
        by_length: dict[int, list[int]] = {}
        for i, prompt in enumerate(self.tokens):
            by_length.setdefault(len(prompt), []).append(i)
        for length in sorted(by_length):
            members = by_length[length]
            for start in range(0, len(members), batch_size):
                chosen = members[start : start + batch_size]
                yield Bucket(
                    torch.tensor(chosen),
                    torch.stack([self.tokens[i] for i in chosen]),
                    self._weights(self.answer_ids, chosen),
                    self._weights(self.distractor_ids, chosen),
                )

    def _weights(self, ids: Sequence[Sequence[int]], chosen: list[int]) -> Float[Tensor, "batch vocab"]:
        weights = torch.zeros(len(chosen), self.d_vocab)
        for row, i in enumerate(chosen):
            weights[row, list(ids[i])] = 1.0 / len(ids[i])
        return weights


@dataclass(frozen=True)
class Task:
    """A task for one host: `train` gives scores and mean activations, `test` judges the circuits.

    `source` says where the examples come from; it goes into every result.
    """

    name: str
    train: TaskSplit
    test: TaskSplit
    source: str
    prepend_bos: bool

    def __repr__(self) -> str:
        dropped = Counter(self.train.dropped) + Counter(self.test.dropped)
        lost = f", dropped {dict(dropped)}" if dropped else ""
        return f"Task({self.name}: {len(self.train)} train, {len(self.test)} test{lost}; {self.source})"

    @classmethod
    def from_examples(
        cls,
        name: str,
        train: Sequence[TaskExample],
        test: Sequence[TaskExample],
        model: Any,
        *,
        source: str = "the user's own examples",
        prepend_bos: bool = False,
        on_bad: str = "raise",
    ) -> "Task":
        """Tokenize examples for a host.

        Raises:
            TaskError: the host has no tokenizer, a split is (or becomes) empty, or, with on_bad="raise", an answer or
                distractor is not exactly one token, answers overlap distractors, or a prompt is too long.
        """
        splits = {
            split: _tokenize(name, split, examples, model, prepend_bos, on_bad)
            for split, examples in (("train", train), ("test", test))
        }
        return cls(name, splits["train"], splits["test"], source, prepend_bos)


def _tokenize(
    task: str, split: str, examples: Sequence[TaskExample], model: Any, prepend_bos: bool, on_bad: str
) -> TaskSplit:
    if model.tokenizer is None:
        raise TaskError(f"task {task!r} needs a host with a tokenizer; set one with model.set_tokenizer(...)")
    if not examples:
        raise TaskError(f"task {task!r} has no {split} examples; a task needs at least one prompt in each split")
    if on_bad not in ("raise", "drop"):
        raise ValueError(f"on_bad must be 'raise' or 'drop', got {on_bad!r}")
    kept: list[tuple[TaskExample, Tensor, tuple[int, ...], tuple[int, ...]]] = []
    dropped: Counter[str] = Counter()
    for example in examples:
        try:
            kept.append((example, *_tokenize_one(example, model, prepend_bos)))
        except _Unusable as why:
            if on_bad == "raise":
                raise TaskError(f"task {task!r}, {split} prompt {example.prompt!r}: {why}") from None
            dropped[why.reason] += 1
    if not kept:
        reasons = "; ".join(f"{reason} ({count})" for reason, count in dropped.most_common())
        raise TaskError(
            f"task {task!r} has no usable {split} example with this tokenizer: {reasons}. "
            "Single-token answers are needed (paper, app. A.4), so a digit-by-digit tokenizer cannot do greater-than."
        )
    examples, tokens, answers, distractors = zip(*kept, strict=True)
    return TaskSplit(split, examples, tokens, answers, distractors, model.cfg.d_vocab, dict(dropped), task)


class _Unusable(Exception):
    def __init__(self, reason: str, detail: str):
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


def _tokenize_one(
    example: TaskExample, model: Any, prepend_bos: bool
) -> tuple[Tensor, tuple[int, ...], tuple[int, ...]]:
    ids = _ids(model, example.prompt)
    if prepend_bos:
        ids = [model.tokenizer.bos_token_id, *ids]
    if not ids:
        raise _Unusable("empty prompt", repr(example.prompt))
    if len(ids) > model.cfg.n_ctx:
        raise _Unusable("prompt longer than the context", f"{len(ids)} tokens, n_ctx is {model.cfg.n_ctx}")
    answers = tuple(_single(model, text, "answer") for text in example.answers)
    distractors = tuple(_single(model, text, "distractor") for text in example.distractors)
    if not answers or not distractors:
        raise _Unusable("no answers or no distractors", f"{len(answers)} answers, {len(distractors)} distractors")
    if set(answers) & set(distractors):
        both = model.tokenizer.decode(sorted(set(answers) & set(distractors)))
        raise _Unusable("an answer is also a distractor", repr(both))
    return torch.tensor(ids), tuple(dict.fromkeys(answers)), tuple(dict.fromkeys(distractors))


def _ids(model: Any, text: str) -> list[int]:
    return list(model.tokenizer(text, add_special_tokens=False)["input_ids"])


def _single(model: Any, text: str, role: str) -> int:
    ids = _ids(model, text)
    if len(ids) != 1:
        pieces = [model.tokenizer.decode([i]) for i in ids]
        raise _Unusable(
            f"{role} is not one token", f"{text!r} is {len(ids)} tokens {pieces}; did you mean {' ' + text.strip()!r}?"
        )
    if ids[0] == model.tokenizer.unk_token_id and text.strip() != model.tokenizer.unk_token:
        raise _Unusable(f"{role} is not in the vocabulary", repr(text))
    return ids[0]
