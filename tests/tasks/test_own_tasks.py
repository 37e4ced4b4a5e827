"""Task.from_prompts: a user's own prompts, answers and distractors, or a metric function."""

import pytest
import torch

from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task
from swd_lens.tasks.task import _examples
from tests.tasks.test_task import FakeHost

NOUNS = ["cat", "dog", "he", "she", "the"]
PROMPTS = [f"{first} {second}" for first in NOUNS for second in NOUNS]
LISTS = {"answers": ["sat"] * 25, "distractors": [["ran", "the"]] * 25}


def first_logit(logits, examples):
    return logits[:, 5] - logits[:, 6]


def test_five_lines():
    task = Task.from_prompts(
        "mine",
        FakeHost(),
        prompts=["the cat", "the dog", "he", "she"],
        answers=["sat", "ran", "sat", ["ran", "sat"]],
        distractors=[["ran"], ["sat"], ["ran"], "dog"],
    )
    assert (len(task.train), len(task.test)) == (3, 1) and "(kept all 4)" in repr(task)
    answers = {e.prompt: (e.answers, e.distractors) for s in (task.train, task.test) for e in s.examples}
    assert answers["she"] == (("ran", "sat"), ("dog",)) and answers["the dog"] == (("ran",), ("sat",))


def test_splits_are_those_of_the_seed():
    def prompts(**options):
        task = Task.from_prompts("mine", FakeHost(), PROMPTS, **LISTS, **options)
        return [e.prompt for e in task.train.examples], [e.prompt for e in task.test.examples]

    train, test = prompts()
    assert (len(train), len(test)) == (19, 6) and not set(train) & set(test)
    assert prompts() == (train, test) and prompts(seed=1) != (train, test)
    assert [len(part) for part in prompts(test_fraction=0.001)] == [24, 1]
    assert [len(part) for part in prompts(test_fraction=0.999)] == [1, 24]


def test_any_iterable_will_do():
    lists = Task.from_prompts("mine", FakeHost(), PROMPTS, **LISTS, corrupt=PROMPTS[::-1])
    answers, distractors = (({text} for text in texts) for texts in (["sat"] * 25, ["ran"] * 25))
    drawn = Task.from_prompts("mine", FakeHost(), iter(PROMPTS), answers, distractors, corrupt=iter(PROMPTS[::-1]))
    assert [e.prompt for e in drawn.train.examples] == [e.prompt for e in lists.train.examples]
    assert [e.corrupt for e in drawn.test.examples] == [e.corrupt for e in lists.test.examples]


def test_duplicates_are_refused_or_dropped():
    with pytest.raises(TaskError, match=r"prompt 'he': duplicate prompt"):
        Task.from_prompts("mine", FakeHost(), ["he"] * 3, ["sat"] * 3, ["ran"] * 3)
    task = Task.from_prompts("mine", FakeHost(), ["he", "she", "he", "cat"], ["sat"] * 4, ["ran"] * 4, on_bad="drop")
    assert "(kept 3 of 4; dropped: 1 duplicate prompt)" in repr(task)


def test_a_metric_takes_the_margins_place():
    task = Task.from_prompts("mine", FakeHost(), PROMPTS, metric=first_logit, corrupt=PROMPTS[::-1])
    assert task.train.token_ids is None
    (bucket,) = task.train.buckets()
    logits = torch.randn(19, 11, dtype=torch.bfloat16)
    assert torch.equal(bucket.margin(logits), logits[:, 5].float() - logits[:, 6].float())
    assert bucket.correct(logits).isnan().all()
    with pytest.raises(TaskError, match="logits have 3 columns; give the whole vocabulary's 11"):
        bucket.margin(logits[:, :3])


def test_a_metric_sees_the_examples_of_its_rows():
    right = {prompt: i % 11 for i, prompt in enumerate(PROMPTS)}

    def by_prompt(logits, examples):
        return logits[range(len(examples)), [right[e.prompt] for e in examples]]

    task = Task.from_prompts("mine", FakeHost(), PROMPTS, metric=by_prompt)
    for bucket in task.train.buckets(batch_size=3):
        logits = torch.arange(11.0).repeat(len(bucket.index), 1)
        assert bucket.margin(logits).tolist() == [right[e.prompt] for e in bucket.examples]


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.zeros(()), r"torch.float32 of shape \(\)"),
        (torch.zeros(19, 2), r"torch.float32 of shape \(19, 2\)"),
        (torch.zeros(19, dtype=torch.int64), r"torch.int64 of shape \(19,\)"),
        (0.5, "it gave float"),
    ],
)
def test_a_metric_must_give_one_float_per_prompt(value, message):
    (bucket,) = Task.from_prompts("mine", FakeHost(), PROMPTS, metric=lambda *_: value).train.buckets()
    with pytest.raises(TaskError, match=rf"must give one float per prompt, a tensor of shape \(19,\); .*{message}"):
        bucket.margin(torch.zeros(19, 11))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"answers": ["sat"] * 24}, "has 25 prompts but 24 entries in answers"),
        ({"answers": "sat"}, "answers must be a list with one entry per prompt, got the string 'sat'"),
        ({"corrupt": ["he"]}, "25 prompts but 1 entries in corrupt"),
        ({"answers": None}, "needs answers and distractors for every prompt, or a metric function"),
        ({"answers": ["42"] * 25}, "an answer is not one token: '42' is 2 tokens .* did you mean ' 42'"),
        ({"distractors": [[]] * 25}, "no answers or no distractors: 1 answers, 0 distractors"),
        ({"test_fraction": 1}, "test_fraction must lie between 0 and 1, got 1"),
        ({"prompts": ["he"], "answers": ["sat"], "distractors": ["ran"]}, "has 1 prompts; .* need at least two"),
    ],
)
def test_bad_input_is_named(changes, message):
    with pytest.raises(TaskError, match=message):
        Task.from_prompts("mine", FakeHost(), **{"prompts": PROMPTS, **LISTS, **changes})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": [None, *PROMPTS[1:]]}, "prompt 0 must be a string, got None"),
        ({"prompts": 3}, "prompts must be a list with one entry per prompt, got 3"),
        ({"answers": ["sat", None, *["he"] * 23]}, "answers of prompt 1 .* got None"),
        ({"distractors": [[41]] * 25}, r"distractors of prompt 0 must be a string or a list of strings, got \[41\]"),
        ({"corrupt": [5] * 25}, "corrupt prompt 0 must be a string, got 5"),
    ],
)
def test_what_is_no_text_is_named(changes, message):
    with pytest.raises(TaskError, match=message):  # beartype, here alone, lets little of the kind reach from_prompts
        _examples("mine", **{"prompts": PROMPTS, **LISTS, "corrupt": None, "metric": None, **changes})
