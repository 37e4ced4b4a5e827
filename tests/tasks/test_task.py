"""Tokenized tasks: buckets, margins, and every way a task can be unusable."""

import pytest
import torch
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import swd_lens as swd
from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task, TaskExample, load_task
from swd_lens.tasks.loaders import _check_numbers
from swd_lens.tasks.prompt import Prompt
from tests.micro import random_split, split_of

WORDS = ["<unk>", "<bos>", "the", "cat", "dog", "sat", "ran", "he", "she", "4", "2"]


class FakeHost:
    """Only what tokenizing needs: a tokenizer and a few numbers."""

    def __init__(self, words=tuple(WORDS), digits=r"\d", n_ctx=8):
        vocabulary = {word: i for i, word in enumerate(words)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        # Words, and every digit by itself: a tokenizer like Qwen's, as far as greater-than is concerned. With
        # digits=r"\d\d" they come in pairs.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Split(Regex(digits), "isolated")]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>")
        self.cfg = type("Cfg", (), {"d_vocab": len(words), "n_ctx": n_ctx, "model_name": "fake"})()


GOOD = TaskExample("the cat", ("sat",), ("ran",))


def test_margin_by_hand():
    split = split_of([[0], [1, 2]], [[0, 1], [2]], [[2], [0, 1]], d_vocab=3)
    buckets = list(split.buckets())
    assert [bucket.tokens.tolist() for bucket in buckets] == [[[0]], [[1, 2]]]
    logits = torch.tensor([[1.0, 3.0, 5.0]])
    # prompt 0: (1 + 3) / 2 - 5 = -3; its best answer (3) is below the distractor (5). prompt 1: 5 - (1 + 3) / 2 = 3.
    assert buckets[0].margin(logits).tolist() == [-3.0]
    assert buckets[0].correct(logits).tolist() == [0.0]
    assert buckets[1].margin(logits).tolist() == [3.0]
    assert buckets[1].correct(logits).tolist() == [1.0]


def test_only_the_answers_of_the_split_are_columns():
    split = split_of([[0], [1]], [[70], [3]], [[5, 900], [70]], d_vocab=1000)
    assert split.token_ids.tolist() == [3, 5, 70, 900]
    (bucket,) = split.buckets()
    assert bucket.answers.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert bucket.distractors.tolist() == [[0, 0.5, 0, 0.5], [0, 0, 1, 0]]
    logits = torch.randn(2, 1000, generator=torch.Generator().manual_seed(0))
    chosen = logits[:, bucket.token_ids]
    assert torch.equal(bucket.margin(logits), bucket.margin(chosen))
    assert torch.equal(bucket.correct(logits), bucket.correct(chosen))
    torch.testing.assert_close(bucket.margin(logits)[0], logits[0, 70] - logits[0, [5, 900]].mean())
    with pytest.raises(TaskError, match=r"logits have 7 columns; give the 4 of bucket.token_ids, or the whole .* 1000"):
        bucket.margin(logits[:, :7])


def test_gradients_pass_through_whole_and_chosen_logits():
    (bucket,) = split_of([[0]], [[2]], [[1]], d_vocab=4).buckets()
    logits = torch.zeros(1, 4, requires_grad=True)
    bucket.margin(logits).sum().backward()
    assert logits.grad.tolist() == [[0, -1, 1, 0]]


def test_corrupt_prompts_are_tokenized_and_come_with_their_rows():
    pair = [TaskExample("the cat", ("sat",), ("ran",), corrupt="the dog ran"), TaskExample("the", ("he",), ("she",))]
    task = Task.from_examples("mine", pair, [GOOD], FakeHost(), validation=[GOOD], prepend_bos=True)
    assert [None if ids is None else ids.tolist() for ids in task.train.corrupt] == [[1, 2, 4, 6], None]
    short, long = task.train.buckets()
    assert short.corrupt == (None,) and short.examples == (pair[1],)
    assert long.corrupt[0].tolist() == [1, 2, 4, 6] and long.examples == (pair[0],)
    (bucket,) = split_of([[0]], [[1]], [[2]], d_vocab=3).buckets()  # no example has one
    assert bucket.corrupt == (None,)


def test_buckets_hold_every_prompt_once_and_one_length_each():
    split = random_split(50)
    seen = []
    for bucket in split.buckets(batch_size=4):
        assert len(bucket.index) <= 4
        for i, tokens in zip(bucket.index.tolist(), bucket.tokens, strict=True):
            assert torch.equal(tokens, split.tokens[i])
            seen.append(i)
    assert sorted(seen) == list(range(50))


def test_tokens_answers_and_bos():
    task = Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), validation=[GOOD], prepend_bos=True)
    assert task.train.tokens[0].tolist() == [1, 2, 3]
    assert (task.train.answer_ids, task.train.distractor_ids) == (((5,),), ((6,),))
    assert "1 train, 1 validation, 1 test" in repr(task)
    assert [split.name for split in task.splits] == ["train", "validation", "test"] and task.test.task == "mine"
    assert task.splits == (task.train, task.validation, task.test)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (TaskExample("the cat", ("42",), ("ran",)), r"answer is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat",), ("42",)), r"distractor is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat", "ran"), ("ran",)), r"an answer is also a distractor: 'ran'"),
        (TaskExample("the cat", (), ("ran",)), r"no answers or no distractors: 0 answers, 1 distractors"),
        (TaskExample("the cat", ("zebra",), ("ran",)), r"answer is not in the vocabulary: 'zebra'"),
        (TaskExample("", ("sat",), ("ran",)), r"empty prompt"),
        (TaskExample("the \ud83d", ("sat",), ("ran",)), r"half of a character: 'the \\ud83d'"),
        (TaskExample("the", ("sat",), ("\ude00",)), r"half of a character"),
        (TaskExample("cat", ("sat",), ("ran",), corrupt=""), r"empty corrupt prompt"),
        (
            TaskExample("cat", ("sat",), ("ran",), corrupt="the " * 9),
            r"corrupt prompt longer than the context: 9 tokens",
        ),
        (TaskExample("the cat " * 5, ("sat",), ("ran",)), r"prompt longer than the context: 10 tokens, n_ctx is 8"),
    ],
)
def test_unusable_examples_are_refused_or_dropped_and_counted(bad, message):
    with pytest.raises(TaskError, match=message):
        Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost(), validation=[GOOD])
    task = Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost(), validation=[GOOD], on_bad="drop")
    assert len(task.train) == 1 and sum(task.train.dropped.values()) == 1
    (reason,) = task.train.dropped
    assert f"1 train, 1 validation, 1 test (kept 3 of 4; dropped: 1 {reason})" in repr(task)


def test_a_text_that_the_tokenizer_cannot_read_is_refused(default_model):
    """A lone surrogate was a TypeError of the tokenizers' library."""
    with pytest.raises(TaskError, match=r"this host's tokenizer cannot read 'half \\ud83d'"):
        Prompt.of(default_model, "half \ud83d", "generate")


def test_a_tokenizer_that_puts_a_space_before_every_text():
    host = FakeHost()
    words = ["<unk>", "\u2581", *(f"\u2581{word}" for word in ("a", "cat", "sat", "ran"))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    backend.pre_tokenizer = pre_tokenizers.Split("\u2581", "merged_with_next")
    host.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    example = TaskExample("a cat", (" sat",), (" ran",))
    assert len(host.tokenizer(" sat")["input_ids"]) == 2
    task = Task.from_examples("mine", [example], [example], host, validation=[example])
    assert (task.train.answer_ids, task.train.distractor_ids) == (((4,),), ((5,),))


def test_empty_tasks_are_refused():
    with pytest.raises(TaskError, match="has no train examples"):
        Task.from_examples("mine", [], [GOOD], FakeHost())
    digits = TaskExample("the cat", ("42",), ("ran",))
    with pytest.raises(TaskError, match=r"no usable test example .*an answer is not one token \(1\).*single tokens"):
        Task.from_examples("years", [GOOD], [digits], FakeHost(), validation=[GOOD], on_bad="drop")
    with pytest.raises(TaskError, match="has no validation examples"):
        Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), validation=[])
    host = FakeHost()
    host.tokenizer = None
    with pytest.raises(TaskError, match="needs a host with a tokenizer"):
        Task.from_examples("mine", [GOOD], [GOOD], host)
    with pytest.raises(ValueError, match="on_bad must be"):
        Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), on_bad="ignore")


@pytest.mark.filterwarnings("ignore:.*an answer stands:swd_lens.base.errors.TextWarning")
def test_a_training_part_is_divided_by_prompts():
    """Examples given in two splits: validation is a part of the training examples, and no prompt is on both sides."""
    words = ("the", "cat", "dog", "sat", "ran")
    texts = [f"{first} {second}" for first in words for second in words]
    train = [TaskExample(text, ("sat",), (wrong,)) for text in texts[:18] for wrong in ("ran", "he")]
    test = [TaskExample(text, ("sat",), ("ran",)) for text in texts[18:]]
    task = Task.from_examples("mine", train, test[:4], FakeHost())
    assert tuple(map(len, task.splits)) == (28, 8, 4)  # four prompts of two examples each
    of_train, of_validation = ([e for e in split.examples] for split in task.splits[:2])
    assert sorted([*of_train, *of_validation], key=train.index) == train
    assert of_train == sorted(of_train, key=train.index) and of_validation == sorted(of_validation, key=train.index)
    assert not {e.prompt for e in of_train} & {e.prompt for e in of_validation}
    assert len(Task.from_examples("mine", train, test, FakeHost()).validation) == 12  # a third of 18 prompts, not seven
    again, other = (Task.from_examples("mine", train, test[:4], FakeHost(), seed=seed) for seed in (0, 1))
    assert again.validation.examples == task.validation.examples != other.validation.examples
    assert tuple(map(len, Task.from_examples("mine", train[1:3], test, FakeHost()).splits)) == (1, 1, 7)
    with pytest.raises(
        TaskError, match=r"task 'mine' has one training prompt, which cannot be divided .* give a valid"
    ):
        Task.from_examples("mine", train[:2], test, FakeHost())


def test_load_task_names_what_exists():
    with pytest.raises(TaskError, match=r"'greater_then' is neither a task family .* Did you mean 'greater_than'\?"):
        load_task("greater_then", FakeHost())
    for n in ("n_train", "n_validation", "n_test"):
        with pytest.raises(TaskError, match=f"{n}=0"):
            load_task("ioi", FakeHost(), **{n: 0})
    with pytest.raises(TaskError, match=r"splits=.* belongs to Edge-Pruning folders; 'ioi' is split by n_train"):
        load_task("ioi", FakeHost(), splits=("a", "b"))
    with pytest.raises(TaskError, match="inclusive=True belongs to Edge-Pruning's greater-than"):
        load_task("greater_than", FakeHost(), inclusive=True)
    host = FakeHost()
    host.tokenizer.bos_token = None
    with pytest.raises(TaskError, match="this tokenizer has no BOS token; pass prepend_bos=False"):
        load_task("ioi", host, prepend_bos=True)


@pytest.mark.parametrize("n", [2.5, "3"])
def test_numbers_of_prompts_are_whole(n):
    with pytest.raises(TaskError, match=f"n_train must be a whole number, got {n!r}"):
        _check_numbers(n_train=n)  # beartype, here alone, lets nothing of the kind reach load_task


def test_greater_than_is_refused_where_digits_are_tokens_of_their_own():
    reason = r"several tokens of two digits \('41' -> \['4', '<unk>'\]\).* leaves greater-than out for Qwen"
    with pytest.raises(TaskError, match=reason):
        load_task("greater_than", FakeHost())
    example = TaskExample("the cat", ("42", "43"), ("01",))
    with pytest.raises(TaskError, match=reason):
        Task.from_examples("years", [example], [example], FakeHost(), validation=[example], on_bad="drop")


@pytest.mark.parametrize("family", ["ioi", "docstring", "greater_than", "gendered_pronoun"])
def test_families_on_the_embedded_model(default_model, family):
    task = load_task(family, default_model, n_train=60, n_validation=30, n_test=40)
    assert (len(task.train), len(task.validation), len(task.test)) == (60, 30, 40)
    assert task.prepend_bos and all(
        int(tokens[0]) == default_model.tokenizer.bos_token_id for tokens in task.train.tokens
    )


def test_tasks_are_the_same_every_time(default_model):
    first, second = (swd.load_task("ioi", default_model, n_train=10, n_test=5) for _ in range(2))
    assert first.train.examples == second.train.examples
    other = swd.load_task("ioi", default_model, n_train=10, n_test=5, seed=1)
    assert first.train.examples != other.train.examples
