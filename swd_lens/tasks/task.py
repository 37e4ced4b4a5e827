"""Task: prompts with right and wrong next tokens, tokenized for one host, in a train and a test split.

1. `Task.from_prompts` takes a user's own lists, shuffles them once and splits them.
2. `Task.from_examples` takes the two splits as they are; `Task.from_tokens` takes ids, and `Task.of_prompt` makes a split of one
   prompt.
3. Either way every prompt, answer and distractor is tokenized (`swd_lens.tasks.tokenize`): an answer or distractor that is
   not exactly one token makes the example unusable. It is refused (`on_bad="raise"`) or dropped and counted.
4. A task says how many prompts it kept, and what became of the others.
"""

import random
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pandas as pd
from torch import Tensor

from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import error, seen
from swd_lens.base.surroundings import in_plain_surroundings
from swd_lens.tasks.chat import as_text, is_chat
from swd_lens.tasks.prompt import Prompt, decoded
from swd_lens.tasks.split import Bucket, TaskExample, TaskSplit, Unusable
from swd_lens.tasks.text import as_rows
from swd_lens.tasks.tokenize import DUPLICATE, Collector, TaskTokenizer

__all__ = ["Bucket", "Task", "TaskSplit"]

_SHOWN = 5  # examples of each split on a card


@in_plain_surroundings
@dataclass(frozen=True)
class Task:
    """A task for one host: `train` gives scores and mean activations, `test` judges the circuits.

    Attributes:
        name: of the task.
        train, test: the tokenized splits; no prompt is in both (but see `from_examples`).
        source: where the examples come from; it goes into every result.
        prepend_bos: whether every prompt begins with BOS.
        unused: prompts of the source that neither split needed.
    """

    name: str
    train: TaskSplit
    test: TaskSplit
    source: str
    prepend_bos: bool
    unused: int = 0

    def __post_init__(self) -> None:
        # Results are made from splits, and are to say where their prompts come from.
        about = {"source": self.source, "prepend_bos": self.prepend_bos}
        for name in ("train", "test"):
            object.__setattr__(self, name, replace(getattr(self, name), **about))

    @seen
    def __repr__(self) -> str:
        return f"Task({self.name}: {len(self.train)} train, {len(self.test)} test ({self.counts()}); {self.source})"

    def _repr_html_(self) -> str:
        first = [
            replace(split, examples=split.examples[:_SHOWN], tokens=split.tokens[:_SHOWN]).table()
            for split in self.splits
        ]
        shown = pd.concat(first, keys=["train", "test"], names=["split"]).reset_index("split")
        words = f"{len(self.train)} train and {len(self.test)} test prompts ({self.counts()}). The first of each:"
        about = {"source": self.source, "prepend_bos": self.prepend_bos, "d_vocab": self.train.d_vocab}
        return card(f"Task {self.name}", words, shown, folded_settings(about))

    @property
    def splits(self) -> tuple[TaskSplit, TaskSplit]:
        return self.train, self.test

    @property
    def dropped(self) -> dict[str, int]:
        """reason -> how many examples of both splits were dropped for it, the most frequent first."""
        return dict((Counter(self.train.dropped) + Counter(self.test.dropped)).most_common())

    def counts(self) -> str:
        """What became of the source's prompts, in words: kept, dropped and why, not needed."""
        kept, dropped = len(self.train) + len(self.test), self.dropped
        total = kept + sum(dropped.values()) + self.unused
        words = f"kept all {kept}" if kept == total else f"kept {kept} of {total}"
        words += f", {self.unused} not needed" if self.unused else ""
        reasons = "; ".join(f"{count} {reason}" for reason, count in dropped.items())
        return f"{words}; dropped: {reasons}" if reasons else words

    @classmethod
    def from_examples(
        cls,
        name: str,
        train: Sequence[TaskExample],
        test: Sequence[TaskExample],
        model: Any,
        *,
        source: str = "the user's own examples",
        prepend_bos: bool | None = False,
        on_bad: str = "raise",
        metric: Callable[..., Any] | None = None,
    ) -> "Task":
        """Tokenize two splits for a host. They are taken as they are: a prompt may be in both.

        Args:
            prepend_bos: see `load_task`.
            on_bad: "raise", or "drop" to leave unusable examples out and count them.
            metric: see `from_prompts`.

        Raises:
            TaskError: the host has no tokenizer, a split is (or becomes) empty, or, with on_bad="raise", an answer or
                distractor is not exactly one token, answers overlap distractors, or a prompt is too long.
        """
        build = TaskBuilder(name, model, prepend_bos, on_bad=on_bad, metric=metric, repeats=True)
        build.train.fill(train)
        build.test.fill(test)
        return build.task(source)

    @classmethod
    def from_prompts(
        cls,
        name: str,
        model: Any,
        prompts: Iterable[Any],
        answers: Iterable[str | Iterable[str]] | None = None,
        distractors: Iterable[str | Iterable[str]] | None = None,
        *,
        corrupt: Iterable[str] | None = None,
        test_fraction: float | int = 0.25,
        seed: int = 0,
        metric: Callable[..., Any] | None = None,
        prepend_bos: bool | None = None,
        on_bad: str = "raise",
    ) -> "Task":
        """A task of your own.

            task = Task.from_prompts(
                "capitals", model,
                prompts=["The capital of France is", "The capital of Japan is"],
                answers=[" Paris", " Tokyo"], distractors=[[" London", " Rome"], [" London", " Rome"]],
            )

        Args:
            name: of the task.
            model: the host, with a tokenizer.
            prompts: each up to the scoring position; the next token is the answer. A text, or messages (`[{"role": "user",
                "content": "..."}]`), which the tokenizer's chat template makes a text.
            answers, distractors: right and wrong next tokens of each prompt: a string, or a list of strings. Mind the leading
                space.
            corrupt: a corrupt prompt for each prompt.
            test_fraction: this share of the prompts, shuffled once, is the test split; at least one is.
            seed: of the shuffle.
            metric: metric(logits (batch, vocab) float32, examples) -> (batch,) takes the margin's place: larger is better, and
                it must be differentiable for attribution. Answers and distractors may then be left out; the function
                finds them in the examples, and they are not checked.
            prepend_bos: see `load_task`.
            on_bad: "raise", or "drop" to leave unusable examples and duplicate prompts out and count them.

        Raises:
            TaskError: something else than texts, lists of different lengths, fewer than two prompts, a share outside (0, 1), a
                duplicate prompt, and all that `from_examples` refuses.
        """
        if not 0 < test_fraction < 1:
            raise error("test-fraction-outside", test_fraction=test_fraction)
        prompts, corrupt = (_texts_of_chats(model, column, prepend_bos) for column in (prompts, corrupt))
        examples = _examples(name, prompts, answers, distractors, corrupt, metric)
        again = 0
        if on_bad == "drop":  # before the split, so that both parts get their share
            different = {example.prompt: example for example in reversed(examples)}
            again, examples = len(examples) - len(different), list(reversed(different.values()))
        if len(examples) < 2:
            raise error("own-task-of-one-prompt", name=name, n_examples=len(examples))
        random.Random(seed).shuffle(examples)
        n_test = min(max(1, round(len(examples) * test_fraction)), len(examples) - 1)
        build = TaskBuilder(name, model, prepend_bos, on_bad=on_bad, metric=metric)
        build.train.fill(examples[n_test:])
        build.test.fill(examples[:n_test])
        return build.task(f"the user's own prompts, seed {seed}", dropped={"train": Counter({DUPLICATE: again})})

    @classmethod
    def from_tokens(
        cls,
        name: str,
        model: Any,
        prompts: Iterable[Any],
        answers: Iterable[Any],
        distractors: Iterable[Any],
        *,
        test_fraction: float | int = 0.25,
        seed: int = 0,
    ) -> "Task":
        """A task of token ids, for hosts without a tokenizer and for prompts that no text gives.

            task = Task.from_tokens("sums", model, prompts=[[3, 11, 4], [5, 11, 2]], answers=[7, 7], distractors=[8, [3, 4]])

        Args:
            name: of the task.
            model: the host.
            prompts: rows of ids, of any lengths, or a (rows, pos) tensor. Nothing is put before them; the last is the scoring
                position.
            answers, distractors: right and wrong next tokens of each prompt: an id, or a list of ids.
            test_fraction, seed: see `from_prompts`.

        Raises:
            TaskError: lists of different lengths, fewer than two prompts, a share outside (0, 1), a prompt that is there
                twice, an answer outside the vocabulary, or one that is also a distractor.
            TokenError: ids that this host cannot run, see `swd_lens.tasks.text.as_rows`.
        """
        if not 0 < test_fraction < 1:
            raise error("test-fraction-outside", test_fraction=test_fraction)
        rows = [as_rows(prompt, model)[0] for prompt in _listed(name, "prompts", prompts)]
        sides = [
            _listed(name, what, side, len(rows)) for what, side in (("answers", answers), ("distractors", distractors))
        ]
        if len(rows) < 2:
            raise error("own-task-of-one-prompt", name=name, n_examples=len(rows))
        cases: dict[tuple[int, ...], tuple[Tensor, tuple[int, ...], tuple[int, ...]]] = {}
        for i, (row, right, wrong) in enumerate(zip(rows, *sides, strict=True)):
            location, ids = f"task {name!r}, prompt {i}", tuple(row.tolist())
            if ids in cases:
                raise error("unusable-ids", location=location, reason=Unusable(DUPLICATE, "the same ids"))
            answer = _single_ids(model, location, "an answer", right)
            distractor = _single_ids(model, location, "a distractor", wrong)
            _require_apart(location, answer, distractor)
            cases[ids] = row, answer, distractor
        shuffled = list(cases.values())
        random.Random(seed).shuffle(shuffled)
        n_test = min(max(1, round(len(shuffled) * test_fraction)), len(shuffled) - 1)
        train, test = (
            _split_of_ids(name, split, model, *zip(*part, strict=True))
            for split, part in (("train", shuffled[n_test:]), ("test", shuffled[:n_test]))
        )
        return cls(name, train, test, f"the user's own token ids, seed {seed}", False)

    @staticmethod
    def of_prompt(
        model: Any, prompt: Any, answers: Any, distractors: Any, *, prepend_bos: bool | None = None
    ) -> TaskSplit:
        """One prompt as a split, for what one prompt can be asked: its scores, its margin.

            scores = swd.attribute(model, factors, swd.Task.of_prompt(model, "The woman smiled because", " she", " he"))

        The mean activations of such scores are those of this prompt, so nothing changes where they are put in: to keep or ablate
        units, take the scores of a task.

        Args:
            prompt: a text, messages of a chat, or (pos,) token ids.
            answers, distractors: right and wrong next tokens: a text of one token (mind the leading space), an id, or several.
            prepend_bos: of a text; see `load_task`.

        Raises:
            TaskError: an answer or distractor that is not one token, or is both.
            TokenError: see `swd_lens.tasks.prompt.Prompt`; or a prompt longer than the context.
        """
        read, location = Prompt.of(model, prompt, "of_prompt", prepend_bos=prepend_bos), "the prompt"
        right = _single_ids(model, location, "an answer", answers)
        wrong = _single_ids(model, location, "a distractor", distractors)
        _require_apart(location, right, wrong)
        _warn_of_prompt(model, read, (answers, distractors), (right, wrong))
        split = _split_of_ids("one prompt", "train", model, [read.row(model)], [right], [wrong])
        return replace(split, source="one prompt", prepend_bos=read.prepend_bos)


def _split_of_ids(
    task: str,
    name: str,
    model: Any,
    prompts: Sequence[Tensor],
    answers: Sequence[tuple[int, ...]],
    distractors: Sequence[tuple[int, ...]],
) -> TaskSplit:
    """A split of ids, whose texts are what the ids read."""

    def texts(ids: tuple[int, ...]) -> tuple[str, ...]:
        return tuple(decoded(model, [token]) for token in ids)

    examples = tuple(
        TaskExample(decoded(model, prompt.tolist()), texts(right), texts(wrong), None, {"task": task})
        for prompt, right, wrong in zip(prompts, answers, distractors, strict=True)
    )
    return TaskSplit(
        name, examples, tuple(prompts), tuple(answers), tuple(distractors), int(model.cfg.d_vocab), task=task
    )


def _single_ids(model: Any, location: str, role: str, given: Any) -> tuple[int, ...]:
    """Ids of one prompt's answers or distractors, given as one or several texts or ids.

    Raises:
        TaskError: none, one that is not one token, or one outside the vocabulary.
    """
    tokens = given.tolist() if isinstance(given, Tensor) else given
    tokens = list(tokens) if isinstance(tokens, list | tuple) else [tokens]
    ids: list[int] = []
    try:
        for token in tokens:
            if isinstance(token, str):
                token = TaskTokenizer(location, model, False).single(token, role)
            if isinstance(token, bool) or not isinstance(token, int):
                raise Unusable(f"{role} is no token", f"{token!r}: give a text or an id")
            if not 0 <= token < int(model.cfg.d_vocab):
                raise Unusable(f"{role} is not in the vocabulary", f"id {token}, ids are 0 to {model.cfg.d_vocab - 1}")
            ids.append(token)
        if not ids:
            raise Unusable("no answers or no distractors", f"{role} is asked for")
    except Unusable as why:
        raise error("unusable-ids", location=location, reason=why) from None
    return tuple(dict.fromkeys(ids))


def _warn_of_prompt(
    model: Any, prompt: Prompt, given: tuple[Any, Any], ids: tuple[tuple[int, ...], tuple[int, ...]]
) -> None:
    """The cautions of one prompt, with its answers and distractors, where it is a text."""
    if prompt.text is None:
        return
    tokenizer = TaskTokenizer("one prompt", model, False)  # a BOS in the text was warned of when it was read
    right, wrong = (
        tuple(t for t in (side if isinstance(side, list | tuple) else [side]) if isinstance(t, str)) for side in given
    )
    tokenizer.cautions.see(TaskExample(prompt.text, right, wrong), list(prompt.ids), *ids)
    tokenizer.cautions.warn("the prompt")


def _require_apart(location: str, right: tuple[int, ...], wrong: tuple[int, ...]) -> None:
    if both := set(right) & set(wrong):
        why = Unusable("an answer is also a distractor", f"id {min(both)}")
        raise error("unusable-ids", location=location, reason=why)


class TaskBuilder:
    """The two collectors of a task that is being made.

    Args:
        on_bad, metric: see `Task.from_prompts`.
        repeats: a prompt may come again; else it is a duplicate, so that none is in both splits.
    """

    def __init__(
        self,
        task: str,
        model: Any,
        prepend_bos: bool | None,
        *,
        on_bad: str = "drop",
        metric: Callable[..., Any] | None = None,
        repeats: bool = False,
    ):
        self.tokenizer = TaskTokenizer(task, model, prepend_bos)
        seen = None if repeats else dict[tuple[int, ...], str]()
        self.train, self.test = (Collector(split, self.tokenizer, seen, on_bad, metric) for split in ("train", "test"))

    def task(self, source: str, unused: int = 0, dropped: Mapping[str, Counter[str]] | None = None) -> Task:
        """The task of what was collected.

        Args:
            dropped: split -> reason -> how many examples were dropped before they came here.
        """
        dropped = dropped or {}
        self.tokenizer.unknown.warn(f"task {self.tokenizer.task!r}")
        self.tokenizer.cautions.warn(f"task {self.tokenizer.task!r}")
        splits = (self.train.finish(dropped.get("train")), self.test.finish(dropped.get("test")))
        return Task(self.tokenizer.task, *splits, source, self.tokenizer.prepend_bos, unused)


def _examples(
    name: str,
    prompts: Any,
    answers: Any,
    distractors: Any,
    corrupt: Any,
    metric: Callable[..., Any] | None,
) -> list[TaskExample]:
    if metric is None and (answers is None or distractors is None):
        raise error("own-task-without-answers", name=name)
    texts = _listed(name, "prompts", prompts)
    n = len(texts)
    right = [()] * n if answers is None else _listed(name, "answers", answers, n)
    wrong = [()] * n if distractors is None else _listed(name, "distractors", distractors, n)
    others = [None] * n if corrupt is None else _listed(name, "corrupt", corrupt, n)
    return [
        TaskExample(
            _text(name, f"prompt {i}", texts[i]),
            _texts(name, f"answers of prompt {i}", right[i]),
            _texts(name, f"distractors of prompt {i}", wrong[i]),
            None if others[i] is None else _text(name, f"corrupt prompt {i}", others[i]),
            {"task": name},
        )
        for i in range(n)
    ]


def _texts_of_chats(model: Any, prompts: Any, prepend_bos: bool | None) -> Any:
    """Prompts in a list, chats among them as texts; what is no list of them as it is."""
    if not isinstance(prompts, list | tuple) or is_chat(prompts):
        return prompts
    return [as_text(model, prompt, prepend_bos) for prompt in prompts]


def _listed(name: str, what: str, values: Any, n: int | None = None) -> list[Any]:
    """Any iterable as a list, of n entries where n is given."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        got = f"the string {values!r}" if isinstance(values, str) else repr(values)
        raise error("own-task-column-not-a-list", name=name, column=what, kind=got)
    values = list(values)
    if n is not None and len(values) != n:
        raise error("own-task-column-of-another-length", name=name, n_prompts=n, n_entries=len(values), column=what)
    return values


def _text(name: str, what: str, value: Any) -> str:
    if not isinstance(value, str):
        raise error("own-task-entry-not-text", name=name, column=what, value=value)
    return value


def _texts(name: str, what: str, value: Any) -> tuple[str, ...]:
    """One text, or several, as a tuple."""
    texts = (value,) if isinstance(value, str) else tuple(value) if isinstance(value, Iterable) else None
    if texts is None or not all(isinstance(text, str) for text in texts):
        raise error("own-task-entry-not-texts", name=name, column=what, value=value)
    return texts
