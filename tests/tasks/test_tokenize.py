"""Examples become token ids: every way in which one is unusable."""

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task, TaskExample, load_task
from swd_lens.tasks.prompt import Prompt
from tests.tasks.test_task import GOOD, FakeHost


def test_unusable_examples_are_refused_or_dropped_and_counted():
    for bad, message in (
        (TaskExample("the cat", ("42",), ("ran",)), r"answer is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat",), ("42",)), r"distractor is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat", "ran"), ("ran",)), r"an answer is also a distractor: 'ran'"),
        (TaskExample("the cat", (), ("ran",)), r"no answers or no distractors: 0 answers, 1 distractors"),
        (TaskExample("the cat", ("zebra",), ("ran",)), r"answer is not in the vocabulary: 'zebra'"),
        (TaskExample("", ("sat",), ("ran",)), r"empty prompt"),
        (TaskExample("the \ud83d", ("sat",), ("ran",)), r"half of a character: 'the \\ud83d'"),
        (TaskExample("the", ("sat",), ("\ude00",)), r"half of a character"),
        (TaskExample("cat", ("sat",), ("ran",), corrupt=""), r"empty corrupt prompt"),
        (TaskExample("cat", ("sat",), ("ran",), corrupt="the " * 9), r"corrupt prompt longer than the context: 9 tokens"),
        (TaskExample("the cat " * 5, ("sat",), ("ran",)), r"prompt longer than the context: 10 tokens, n_ctx is 8"),
    ):
        with pytest.raises(TaskError, match=message):
            Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost(), validation=[GOOD])
        task = Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost(), validation=[GOOD], on_bad="drop")
        assert len(task.train) == 1 and sum(task.train.dropped.values()) == 1
        (reason,) = task.train.dropped
        assert f"1 train, 1 validation, 1 test (kept 3 of 4; dropped: 1 {reason})" in repr(task)


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


def test_what_the_tokenizer_cannot_read_or_makes_several_tokens_of_is_refused(default_model):
    reason = r"several tokens of two digits \('41' -> \['4', '<unk>'\]\).* leaves greater-than out for Qwen"
    with pytest.raises(TaskError, match=reason):
        load_task("greater_than", FakeHost())
    example = TaskExample("the cat", ("42", "43"), ("01",))
    with pytest.raises(TaskError, match=reason):
        Task.from_examples("years", [example], [example], FakeHost(), validation=[example], on_bad="drop")
    with pytest.raises(TaskError, match=r"this host's tokenizer cannot read 'half \\ud83d'"):
        Prompt.of(default_model, "half \ud83d", "generate")
