"""Task: prompts with right and wrong next tokens, tokenized for one host, in three splits: train, validation, test.

1. `Task.from_prompts` takes a user's own lists, shuffles them once and splits them.
2. `Task.from_examples` takes splits as they are, two or three: of two the training part is divided (`divided`).
   `Task.from_tokens` takes ids, and `Task.of_prompt` makes a split of one prompt.
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
from swd_lens.base.errors import TaskError, encodable, quoted, seen
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.generators.words import SPLITS
from swd_lens.tasks.prompt import Prompt, as_text, decoded, is_chat, token_strings
from swd_lens.tasks.split import Bucket, TaskExample, TaskSplit, Unusable
from swd_lens.tasks.text import as_rows
from swd_lens.tasks.tokenize import DUPLICATE, Collector, TaskTokenizer

__all__ = ["Bucket", "Task", "TaskSplit"]

_SHOWN = 5  # examples of each split on a card


@with_torch_defaults
@dataclass(frozen=True)
class Task:
    """A task for one host: `train` gives scores and mean activations, `validation` chooses (which prefix, which threshold, when
    a search stops), `test` gives the numbers that are shown.

    Attributes:
        name: of the task.
        train, validation, test: the tokenized splits; no prompt is in two of them (but see `from_examples`).
        source: where the examples come from; it goes into every result.
        prepend_bos: whether every prompt begins with BOS.
        unused: prompts of the source that no split needed.
    """

    name: str
    train: TaskSplit
    validation: TaskSplit
    test: TaskSplit
    source: str
    prepend_bos: bool
    unused: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", encodable(self.name))
        # Results are made from splits, and are to say where their prompts come from.
        about = {"source": self.source, "prepend_bos": self.prepend_bos}
        for name in SPLITS:
            object.__setattr__(self, name, replace(getattr(self, name), **about))

    @seen
    def __repr__(self) -> str:
        sizes = ", ".join(f"{len(split)} {name}" for name, split in zip(SPLITS, self.splits, strict=True))
        return f"Task({self.name}: {sizes} ({self.counts()}); {self.source})"

    def _repr_html_(self) -> str:
        first = [replace(split, examples=split.examples[:_SHOWN], tokens=split.tokens[:_SHOWN]).table() for split in self.splits]
        shown = pd.concat(first, keys=list(SPLITS), names=["split"]).reset_index("split")
        train, validation, test = map(len, self.splits)
        words = f"{train} train, {validation} validation and {test} test prompts ({self.counts()}). The first of each:"
        about = {"source": self.source, "prepend_bos": self.prepend_bos, "d_vocab": self.train.d_vocab}
        return card(f"Task {self.name}", words, shown, folded_settings(about))

    @property
    def splits(self) -> tuple[TaskSplit, TaskSplit, TaskSplit]:
        """Train, validation, test."""
        return self.train, self.validation, self.test

    @property
    def dropped(self) -> dict[str, int]:
        """reason -> how many examples of all splits were dropped for it, the most frequent first."""
        return dict(sum((Counter(split.dropped) for split in self.splits), Counter[str]()).most_common())

    def counts(self) -> str:
        """The fate of the source's prompts in words: kept, dropped and why, not needed."""
        kept, dropped = sum(map(len, self.splits)), self.dropped
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
        validation: Sequence[TaskExample] | None = None,
        seed: int = 0,
        source: str = "the user's own examples",
        prepend_bos: bool | None = False,
        on_bad: str = "raise",
        metric: Callable[..., Any] | None = None,
    ) -> "Task":
        """Tokenize splits for a host. They are taken as they are: a prompt may be in several.

        Args:
            validation: None: the training part is divided. Of its different prompts, shuffled once, the last ones become
                validation: as many as `test` has, at most a third, at least one; every example of a prompt goes with it.
            seed: of that shuffle.
            prepend_bos: see `load_task`.
            on_bad: "raise", or "drop" to leave unusable examples out and count them.
            metric: see `from_prompts`.

        Raises:
            TaskError: the host has no tokenizer, a split is (or becomes) empty, a training part of one prompt is to be divided,
                or, with on_bad="raise", an answer or distractor is not exactly one token, answers overlap distractors, or a
                prompt is too long.
        """
        build = TaskBuilder(name, model, prepend_bos, on_bad=on_bad, metric=metric, repeats=True)
        if validation is None and train:  # without training examples the error is that there are none
            train, validation = divided(train, len(test), seed, f"task {name!r}")
        build.fill(train, validation or (), test)
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
        validation_fraction: float | int | None = None,
        test_fraction: float | int = 0.25,
        seed: int = 0,
        metric: Callable[..., Any] | None = None,
        prepend_bos: bool | None = None,
        on_bad: str = "raise",
    ) -> "Task":
        """A task of your own.

            task = Task.from_prompts(
                "capitals", model,
                prompts=["The capital of France is", "The capital of Japan is", "The capital of Cuba is"],
                answers=[" Paris", " Tokyo", " Havana"], distractors=[[" London", " Rome"]] * 3,
            )

        Args:
            name: of the task.
            model: the host, with a tokenizer.
            prompts: each up to the scoring position; the next token is the answer. A text, or messages (`[{"role": "user",
                "content": "..."}]`), which the tokenizer's chat template makes a text.
            answers, distractors: right and wrong next tokens of each prompt: a string, or a list of strings. Mind the leading
                space.
            corrupt: a corrupt prompt for each prompt.
            validation_fraction: this share of the prompts is the validation split; at least one is. None: as many as the test
                split has, at most half of the others.
            test_fraction: this share of the prompts, shuffled once, is the test split; at least one is.
            seed: of the shuffle.
            metric: metric(logits (batch, vocab) float32, examples) -> (batch,) takes the margin's place: larger is better, and
                it must be differentiable for attribution. Answers and distractors may then be left out; the function
                finds them in the examples, and they are not checked.
            prepend_bos: see `load_task`.
            on_bad: "raise", or "drop" to leave unusable examples and duplicate prompts out and count them.

        Raises:
            TaskError: something else than texts, lists of different lengths, fewer than three prompts, shares outside (0, 1) or
                that leave nothing to train on, a duplicate prompt, and all that `from_examples` refuses.
        """
        _check_fractions(validation_fraction, test_fraction)
        # Chats become texts; what is no list of prompts is refused below.
        texts: list[Any] = [
            [as_text(model, prompt, prepend_bos) for prompt in column]
            if isinstance(column, list | tuple) and not is_chat(column)
            else column
            for column in (prompts, corrupt)
        ]
        examples = _examples(name, texts[0], answers, distractors, texts[1], metric)
        again = 0
        if on_bad == "drop":  # before the split, so that all parts get their share
            different = {example.prompt: example for example in reversed(examples)}
            again, examples = len(examples) - len(different), list(reversed(different.values()))
        train, validation, test = _three_parts(name, examples, validation_fraction, test_fraction, seed)
        build = TaskBuilder(name, model, prepend_bos, on_bad=on_bad, metric=metric)
        build.fill(train, validation, test)
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
        validation_fraction: float | int | None = None,
        test_fraction: float | int = 0.25,
        seed: int = 0,
    ) -> "Task":
        """A task of token ids, for hosts without a tokenizer and for prompts that no text gives.

            prompts = [[3, 11, 4], [5, 11, 2], [2, 11, 4]]
            task = Task.from_tokens("sums", model, prompts, answers=[7, 7, 6], distractors=[8, [3, 4], 7])

        Args:
            name: of the task.
            model: the host.
            prompts: rows of ids, of any lengths, or a (rows, pos) tensor. Nothing is put before them; the last is the scoring
                position.
            answers, distractors: right and wrong next tokens of each prompt: an id, or a list of ids.
            validation_fraction, test_fraction, seed: see `from_prompts`.

        Raises:
            TaskError: lists of different lengths, fewer than three prompts, shares outside (0, 1) or that leave nothing to train
                on, a prompt that is there twice, an answer outside the vocabulary, or one that is also a distractor.
            TokenError: ids that this host cannot run, see `swd_lens.tasks.text.as_rows`.
        """
        _check_fractions(validation_fraction, test_fraction)
        rows = [as_rows(prompt, model)[0] for prompt in _listed(name, "prompts", prompts)]
        sides = [_listed(name, what, side, len(rows)) for what, side in (("answers", answers), ("distractors", distractors))]
        cases: dict[tuple[int, ...], tuple[Tensor, tuple[int, ...], tuple[int, ...]]] = {}
        for i, (row, right, wrong) in enumerate(zip(rows, *sides, strict=True)):
            location, ids = f"task {name!r}, prompt {i}", tuple(row.tolist())
            if ids in cases:
                raise TaskError(f"{location}: {Unusable(DUPLICATE, 'the same ids')}")
            cases[ids] = (row, *_sides(model, location, right, wrong))
        parts = _three_parts(name, list(cases.values()), validation_fraction, test_fraction, seed)
        train, validation, test = (
            split_of_ids(name, split, model, *zip(*part, strict=True)) for split, part in zip(SPLITS, parts, strict=True)
        )
        return cls(name, train, validation, test, f"the user's own token ids, seed {seed}", False)

    @staticmethod
    def of_prompt(model: Any, prompt: Any, answers: Any, distractors: Any, *, prepend_bos: bool | None = None) -> TaskSplit:
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
        right, wrong = _sides(model, location, answers, distractors)
        if read.text is not None:
            answer_texts, distractor_texts = (
                tuple(t for t in (side if isinstance(side, list | tuple) else [side]) if isinstance(t, str))
                for side in (answers, distractors)
            )
            # A BOS in the text was warned of when it was read.
            cautions = TaskTokenizer("one prompt", model, False).cautions
            cautions.see(TaskExample(read.text, answer_texts, distractor_texts), list(read.ids), right, wrong)
            cautions.warn("the prompt")
        split = split_of_ids("one prompt", "train", model, [read.row(model)], [right], [wrong])
        return replace(split, source="one prompt", prepend_bos=read.prepend_bos)


def divided(
    examples: Sequence[TaskExample], n: int, seed: int, where: str, *, kept: int = 0
) -> tuple[list[TaskExample], list[TaskExample]]:
    """A training part in two: train and validation, each in the order that it had. No prompt is in both.

    n: prompts of validation, at most a third of the different ones, at least one; seed: of the shuffle whose last prompts they
    are; where: names the part in an error; kept: so many first examples stay in train, as long as the others are enough. Raises
    TaskError: there is one prompt only.
    """
    different = list(dict.fromkeys(example.prompt for example in examples))
    if len(different) < 2:
        raise TaskError(
            f"{where} has one training prompt, which cannot be divided into train and validation; give a validation split "
            "of your own"
        )
    n = max(1, min(n, len(different) // 3))
    first = {example.prompt for example in examples[:kept]}
    free = [prompt for prompt in different if prompt not in first]
    drawn = free if len(free) >= n else different
    random.Random(seed).shuffle(drawn)
    chosen = set(drawn[-n:])
    train = [example for example in examples if example.prompt not in chosen]
    return train, [example for example in examples if example.prompt in chosen]


def _check_fractions(validation: float | None, test: float) -> None:
    if not 0 < test < 1:
        raise TaskError(f"test_fraction must lie between 0 and 1, got {test}")
    if validation is not None and not (0 < validation < 1 and validation + test < 1):
        raise TaskError(
            f"validation_fraction must lie between 0 and 1 and leave something to train on beside test_fraction={test}, "
            f"got {validation}"
        )


def _three_parts(
    name: str, cases: list[Any], validation_fraction: float | None, test_fraction: float, seed: int
) -> tuple[list[Any], list[Any], list[Any]]:
    """Train, validation and test of what is shuffled once; none is empty. Raises TaskError: fewer than three cases."""
    n = len(cases)
    if n < 3:
        raise TaskError(f"task {quoted(name)} has {n} prompts; train, validation and test need at least one each")
    shuffled = [*cases]
    random.Random(seed).shuffle(shuffled)
    n_test = min(max(1, round(n * test_fraction)), n - 2)
    others = n - n_test
    asked = min(n_test, others // 2) if validation_fraction is None else round(n * validation_fraction)
    end = n_test + min(max(1, asked), others - 1)
    return shuffled[end:], shuffled[n_test:end], shuffled[:n_test]


def split_of_ids(
    task: str,
    name: str,
    model: Any,
    prompts: Sequence[Tensor],
    answers: Sequence[tuple[int, ...]],
    distractors: Sequence[tuple[int, ...]],
) -> TaskSplit:
    """A split of ids, whose texts are what the ids read."""
    examples = tuple(
        TaskExample(decoded(model, row.tolist()), token_strings(model, right), token_strings(model, wrong), None, {"task": task})
        for row, right, wrong in zip(prompts, answers, distractors, strict=True)
    )
    return TaskSplit(name, examples, tuple(prompts), tuple(answers), tuple(distractors), int(model.cfg.d_vocab), task=task)


def _sides(model: Any, location: str, answers: Any, distractors: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of one prompt's answers and of its distractors, given as one or several texts or ids. Raises TaskError: none, one that
    is not one token, one outside the vocabulary, or one that is both."""
    sides: list[tuple[int, ...]] = []
    try:
        for role, given in (("an answer", answers), ("a distractor", distractors)):
            tokens = given.tolist() if isinstance(given, Tensor) else given
            tokens = list(tokens) if isinstance(tokens, list | tuple) else [tokens]
            ids: list[int] = []
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
            sides.append(tuple(dict.fromkeys(ids)))
        if both := set(sides[0]) & set(sides[1]):
            raise Unusable("an answer is also a distractor", f"id {min(both)}")
    except Unusable as why:
        raise TaskError(f"{location}: {why}") from None
    return sides[0], sides[1]


class TaskBuilder:
    """The three collectors of a task that is being made. on_bad, metric: see `Task.from_prompts`; repeats: a prompt may come
    again; else it is a duplicate, so that none is in two splits."""

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
        self.train, self.validation, self.test = (Collector(split, self.tokenizer, seen, on_bad, metric) for split in SPLITS)

    def fill(self, train: Iterable[TaskExample], validation: Iterable[TaskExample], test: Iterable[TaskExample]) -> None:
        """Offer all examples of all splits; validation comes last, so that what it shares with the others stays theirs."""
        self.train.fill(train)
        self.test.fill(test)
        self.validation.fill(validation)

    def task(self, source: str, unused: int = 0, dropped: Mapping[str, Counter[str]] | None = None) -> Task:
        """The task of what was collected. dropped: split -> reason -> how many examples were dropped before they came here."""
        dropped = dropped or {}
        self.tokenizer.unknown.warn(f"task {self.tokenizer.task!r}")
        self.tokenizer.cautions.warn(f"task {self.tokenizer.task!r}")
        train, validation, test = (
            collector.finish(dropped.get(collector.split)) for collector in (self.train, self.validation, self.test)
        )
        return Task(self.tokenizer.task, train, validation, test, source, self.tokenizer.prepend_bos, unused)


def _examples(
    name: str, prompts: Any, answers: Any, distractors: Any, corrupt: Any, metric: Callable[..., Any] | None
) -> list[TaskExample]:
    if metric is None and (answers is None or distractors is None):
        raise TaskError(f"task {quoted(name)} needs answers and distractors for every prompt, or a metric function")
    texts = _listed(name, "prompts", prompts)
    n = len(texts)
    right = [()] * n if answers is None else _listed(name, "answers", answers, n)
    wrong = [()] * n if distractors is None else _listed(name, "distractors", distractors, n)
    others = [None] * n if corrupt is None else _listed(name, "corrupt", corrupt, n)
    examples = []
    for i in range(n):
        text = _texts(name, f"prompt {i}", texts[i], one=True)[0]
        answer, distractor = (
            _texts(name, f"answers of prompt {i}", right[i]),
            _texts(name, f"distractors of prompt {i}", wrong[i]),
        )
        other = None if others[i] is None else _texts(name, f"corrupt prompt {i}", others[i], one=True)[0]
        examples.append(TaskExample(text, answer, distractor, other, {"task": name}))
    return examples


def _listed(name: str, what: str, values: Any, n: int | None = None) -> list[Any]:
    """Any iterable as a list, of n entries where n is given."""
    if isinstance(values, str) or not isinstance(values, Iterable):
        got = f"the string {values!r}" if isinstance(values, str) else repr(values)
        raise TaskError(f"task {quoted(name)}: {what} must be a list with one entry per prompt, got {got}")
    values = list(values)
    if n is not None and len(values) != n:
        raise TaskError(f"task {quoted(name)} has {n} prompts but {len(values)} entries in {what}")
    return values


def _texts(name: str, what: str, value: Any, *, one: bool = False) -> tuple[str, ...]:
    """One text, or several, as a tuple; with `one` a single text."""
    texts = (value,) if isinstance(value, str) or one else tuple(value) if isinstance(value, Iterable) else (None,)
    if not all(isinstance(text, str) for text in texts):
        needed = "a string" if one else "a string or a list of strings"
        raise TaskError(f"task {quoted(name)}: {what} must be {needed}, got {quoted(value)}")
    return texts
