"""Examples become token ids: the single-token checks that keep, drop and count.

1. A `Collector` is offered examples one by one and keeps those that this host's tokenizer can score: every answer and
   distractor one token, no overlap between them, a prompt that fits the context. The others are counted by reason, or
   refused (`on_bad="raise"`). A prompt whose ids were kept before, in this split or in another one, is a duplicate.
2. Years are special. Where two-digit numbers are several tokens, greater-than is refused as a whole, with the reason. Our own
   families have checks of theirs (`Family.check`): greater_digit is refused where a digit is no token, and a prompt of
   greater_than needs the tokens [century, two digits] in it, or "later" would not be about one token.
3. A prompt whose text begins with BOS gets no second one; other traps of prompts are collected beside it (cautions.py).
4. A generated prompt with words outside the vocabulary is unusable: it says something else to this host.
5. What was kept becomes a `TaskSplit`.
"""

import functools
import re
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import TaskError, quoted
from swd_lens.tasks.cautions import Cautions
from swd_lens.tasks.encoding import UnknownWords, begins_with_bos, vocabulary_hash
from swd_lens.tasks.generators import family_of
from swd_lens.tasks.split import TaskExample, TaskSplit, Unusable

TWO_DIGITS = dict.fromkeys(f"{number:02d}" for number in range(100))  # in order, and quick to look up
DUPLICATE = "duplicate prompt"
_HALVES = re.compile("[\ud800-\udfff]")  # lone surrogates: JSON can hold them, no tokenizer reads them


class TaskTokenizer:
    """A host's tokenizer as tasks need it; answers that come again and again are looked up once. prepend_bos: whether prompts
    begin with BOS; None = as the host does it (encoding.py). Raises TaskError: the host has no tokenizer, or a BOS is asked of a
    tokenizer that has none."""

    def __init__(self, task: str, model: Any, prepend_bos: bool | None = None):
        if model.tokenizer is None:
            raise TaskError(f"task {quoted(task)} needs a host with a tokenizer; set one with model.set_tokenizer(...)")
        if prepend_bos is None:
            prepend_bos = begins_with_bos(model)
        if prepend_bos and model.tokenizer.bos_token_id is None:
            raise TaskError(f"task {quoted(task)}: prepend_bos=True, but this tokenizer has no BOS token; pass prepend_bos=False")
        self.task, self.prepend_bos = task, prepend_bos
        self.tokenizer, self.n_ctx, self.d_vocab = model.tokenizer, int(model.cfg.n_ctx), int(model.cfg.d_vocab)
        self.unknown, self.cautions = UnknownWords(model.tokenizer), Cautions(self)
        self.short = functools.cache(lambda text: tuple(self.ids(text)))  # of answers, which come again and again
        self.single = functools.cache(self._single)
        self.side = functools.cache(lambda texts, role: tuple(dict.fromkeys(self.single(text, role) for text in texts)))

    def ids(self, text: str) -> list[int]:
        """The tokens of a text. Raises TaskError: the tokenizer cannot read it (a lone surrogate, half of an emoji, is no
        text)."""
        try:
            return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])
        except (TypeError, ValueError) as cause:
            raise TaskError(
                f"{quoted(self.task)}: this host's tokenizer cannot read {quoted(str(text)[:60])} ({cause})"
            ) from None

    def pieces(self, text: str) -> list[str]:
        return [self.tokenizer.decode([i]) for i in self.ids(text)]

    def prompt(self, text: str, what: str = "prompt") -> Int[Tensor, " _pos"]:
        """The tokens of a prompt, BOS included. Raises Unusable: nothing to score, or more tokens than the context holds."""
        ids, unusable = self.prompt_ids(text, what)
        if unusable is not None:
            raise unusable
        return torch.tensor(ids)

    def prompt_ids(self, text: str, what: str = "prompt") -> tuple[list[int], Unusable | None]:
        """The tokens of a prompt, BOS included, and why it cannot be scored (None: it can)."""
        text_ids = self.ids(text)
        bos = [self.tokenizer.bos_token_id] if self.prepend_bos else []
        text_ids = text_ids[1:] if bos and text_ids[:1] == bos else text_ids  # chat templates print it, too
        ids = bos + text_ids
        if not text_ids:
            return ids, Unusable(f"empty {what}", repr(text))
        if len(ids) > self.n_ctx:
            return ids, Unusable(f"{what} longer than the context", f"{len(ids)} tokens, n_ctx is {self.n_ctx}")
        return ids, None

    def _single(self, text: str, role: str) -> int:
        ids = self.ids(text)
        if len(ids) != 1 and text.startswith(" "):
            # SentencePiece puts a space before every text: " Mary" alone is then two tokens, and one behind a word.
            word = self.ids("a")
            both = self.ids("a" + text)
            ids = both[len(word) :] if both[: len(word)] == word and len(both) == len(word) + 1 else ids
        if len(ids) != 1:
            pieces = f"{text!r} is {len(ids)} tokens {self.pieces(text)}"
            raise Unusable(f"{role} is not one token", pieces + self._with_space(text))
        if ids[0] == self.tokenizer.unk_token_id and text.strip() != self.tokenizer.unk_token:
            raise Unusable(f"{role} is not in the vocabulary", repr(text) + self._with_space(text))
        return ids[0]

    def _with_space(self, text: str) -> str:
        """The hint that a word in the middle of a text begins with a space."""
        return "" if text.startswith(" ") else f"; did you mean {' ' + text.strip()!r}, with the space before the word?"

    @functools.cached_property
    def splits_two_digits(self) -> str | None:
        """How a two-digit number is split, if most of them are; None where they are single tokens."""
        split = [text for text in TWO_DIGITS if len(self.ids(text)) != 1]
        if len(split) <= len(TWO_DIGITS) // 2:
            return None
        shown = "41" if "41" in split else split[-1]
        return f"{shown!r} -> {self.pieces(shown)}"


class Collector:
    """Keeps the usable examples of one split, "train", "validation" or "test".

    seen: ids of prompts kept so far and how each reads, shared by the collectors of a task, so that none straddles; None =
    duplicates are kept. on_bad: "raise" or "drop". metric: with one, answers and distractors are not looked at.
    """

    def __init__(
        self,
        split: str,
        tokenizer: TaskTokenizer,
        seen: dict[tuple[int, ...], str] | None,
        on_bad: str,
        metric: Callable[..., Any] | None,
    ):
        if on_bad not in ("raise", "drop"):
            raise ValueError(f"on_bad must be 'raise' or 'drop', got {quoted(on_bad)}")
        self.split, self.tokenizer, self.seen, self.on_bad, self.metric = split, tokenizer, seen, on_bad, metric
        self.kept: list[tuple[TaskExample, Tensor, tuple[int, ...], tuple[int, ...], Tensor | None]] = []
        self.dropped: Counter[str] = Counter()

    def offer(self, example: TaskExample) -> None:
        """Keep an example, or drop and count it. Raises TaskError: it is unusable and on_bad is "raise", or it asks for two
        digits in one token of a tokenizer that splits them."""
        try:
            row = self._tokenize(example)
        except Unusable as why:
            if self.on_bad == "raise":
                where = f"task {self.tokenizer.task!r}, {self.split} prompt {example.prompt!r}"
                raise TaskError(f"{where}: {why} (on_bad='drop' leaves such examples out and counts them)") from None
            self.dropped[why.reason] += 1
            return
        self.kept.append((example, *row))
        self.tokenizer.cautions.see(example, row[0].tolist(), row[1], row[2])
        self.tokenizer.unknown.see(example.prompt, row[0].tolist())
        if example.corrupt is not None and row[-1] is not None:
            self.tokenizer.unknown.see(example.corrupt, row[-1].tolist())
        if self.seen is not None:
            self.seen[tuple(row[0].tolist())] = example.prompt

    def fill(self, examples: Iterable[TaskExample], n: int | None = None) -> None:
        """Offer examples until n are kept; no more are drawn than that takes."""
        examples = iter(examples)
        while n is None or len(self.kept) < n:
            example = next(examples, None)
            if example is None:
                return
            self.offer(example)

    def finish(self, before: Counter[str] | None = None) -> TaskSplit:
        """The split of what was kept. before: what a reader dropped of this split before it got here. Raises TaskError:
        nothing was kept; the reasons are counted."""
        dropped = self.dropped + (before or Counter())
        task, name = self.tokenizer.task, self.split
        if not self.kept and not dropped:
            raise TaskError(f"task {quoted(task)} has no {name} examples; a task needs at least one prompt in each split")
        if not self.kept:
            reasons = "; ".join(f"{reason} ({count})" for reason, count in dropped.most_common())
            hint = ". Answers and distractors must be single tokens (paper, app. A.4)" if "not one token" in reasons else ""
            raise TaskError(f"task {quoted(task)} has no usable {name} example with this tokenizer: {reasons}{hint}")
        examples, tokens, answers, distractors, corrupt = zip(*self.kept, strict=True)
        return TaskSplit(
            name,
            examples,
            tokens,
            answers,
            distractors,
            self.tokenizer.d_vocab,
            dict(dropped),
            task,
            corrupt,
            self.metric,
            vocabulary=vocabulary_hash(self.tokenizer.tokenizer),
        )

    def _tokenize(self, example: TaskExample) -> tuple[Tensor, tuple[int, ...], tuple[int, ...], Tensor | None]:
        texts = (example.prompt, example.corrupt or "", *example.answers, *example.distractors)
        if halves := [text for text in texts if _HALVES.search(text)]:
            raise Unusable("half of a character", repr(halves[0]))
        tokenizer = self.tokenizer
        tokens = tokenizer.prompt(example.prompt)
        if self.seen is not None and (before := self.seen.get(tuple(tokens.tolist()))) is not None:
            same = "it was there before" if before == example.prompt else f"to this host it is {before!r}, of the same ids"
            raise Unusable(DUPLICATE, f"{same}, and a prompt must not be in two splits")
        corrupt = None if example.corrupt is None else tokenizer.prompt(example.corrupt, "corrupt prompt")
        if self.metric is not None:
            return tokens, (), (), corrupt
        if not example.answers or not example.distractors:
            counts = f"{len(example.answers)} answers, {len(example.distractors)} distractors"
            raise Unusable("no answers or no distractors", counts)
        is_year = example.answers[0] in TWO_DIGITS and all(text in TWO_DIGITS for text in example.distractors)
        if is_year and tokenizer.splits_two_digits is not None:
            raise TaskError(
                f"task {quoted(tokenizer.task)} asks which two-digit year comes next, and this tokenizer makes several "
                f"tokens of two digits ({tokenizer.splits_two_digits}), so no answer is one token. The paper leaves "
                "greater-than out for Qwen for that reason (app. A.4); use greater_digit, which asks for the last digit"
            )
        family = family_of(example)
        if family is not None and family.check is not None:
            family.check(example, tokenizer)
        answers = tokenizer.side(example.answers, "an answer")
        distractors = tokenizer.side(example.distractors, "a distractor")
        if both := set(answers) & set(distractors):
            raise Unusable("an answer is also a distractor", repr(tokenizer.tokenizer.decode(sorted(both))))
        if "family" in example.meta and tokenizer.tokenizer.unk_token_id in tokens:
            raise Unusable("words outside the vocabulary", repr(tokenizer.pieces(example.prompt)))
        return tokens, answers, distractors, corrupt
