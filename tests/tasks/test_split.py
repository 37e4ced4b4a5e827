"""Buckets of prompts: margins by hand, every prompt once."""

from dataclasses import replace

import pytest
import torch

from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task, TaskExample
from swd_lens.tasks.split import Bucket
from tests.micro import random_split, split_of
from tests.tasks.test_task import GOOD, PROMPTS, FakeHost


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
    bucket.margin(logits.requires_grad_())[0].backward()
    assert logits.grad[0].nonzero().flatten().tolist() == [5, 70, 900] and not logits.grad[1].any()
    assert logits.grad[0, [5, 70, 900]].tolist() == [-0.5, 1, -0.5]


def test_corrupt_prompts_are_tokenized_and_come_with_their_rows():
    pair = [TaskExample("the cat", ("sat",), ("ran",), corrupt="the dog ran"), TaskExample("the", ("he",), ("she",))]
    task = Task.from_examples("mine", pair, [GOOD], FakeHost(), validation=[GOOD], prepend_bos=True)
    assert [None if ids is None else ids.tolist() for ids in task.train.corrupt] == [[1, 2, 4, 6], None]
    short, long = task.train.buckets()
    assert short.corrupt == (None,) and short.examples == (pair[1],)
    assert long.corrupt[0].tolist() == [1, 2, 4, 6] and long.examples == (pair[0],)
    (bucket,) = split_of([[0]], [[1]], [[2]], d_vocab=3).buckets()  # no example has one
    assert bucket.corrupt == (None,)


def test_buckets_hold_every_prompt_once_and_are_joined_at_the_end_of_their_rows():
    split = random_split(50)
    seen = []
    for bucket in split.buckets(batch_size=4):
        assert len(bucket.index) <= 4
        for i, tokens in zip(bucket.index.tolist(), bucket.tokens, strict=True):
            assert torch.equal(tokens, split.tokens[i])
            seen.append(i)
    assert sorted(seen) == list(range(50))
    split = random_split()
    buckets = list(split.buckets())
    joined = Bucket.joined(buckets)
    assert len(buckets) > 1 and sorted(joined.index.tolist()) == list(range(len(split)))
    for i, row, example in zip(joined.index.tolist(), joined.tokens, joined.examples, strict=True):
        n = len(split.tokens[i])
        assert torch.equal(row[-n:], split.tokens[i]) and not row[:-n].any() and example is split.examples[i]
    logits = torch.randn(len(split), split.d_vocab)
    for bucket in buckets:
        at = [joined.index.tolist().index(i) for i in bucket.index.tolist()]
        assert torch.equal(joined.margin(logits)[at], bucket.margin(logits[at]))


def test_a_metric_takes_the_margins_place():
    right = {prompt: i % 11 for i, prompt in enumerate(PROMPTS)}

    def by_prompt(logits, examples):
        return logits[range(len(examples)), [right[e.prompt] for e in examples]] - logits[:, 0]

    task = Task.from_prompts("mine", FakeHost(), PROMPTS, metric=by_prompt, corrupt=PROMPTS[::-1])
    assert task.train.token_ids is None
    (bucket,) = task.train.buckets()
    logits = torch.randn(13, 11, dtype=torch.bfloat16)
    assert torch.equal(bucket.margin(logits), by_prompt(logits.float(), bucket.examples))  # reckoned in float32
    assert bucket.correct(logits).isnan().all()
    with pytest.raises(TaskError, match="logits have 3 columns; give the whole vocabulary's 11"):
        bucket.margin(logits[:, :3])
    for bucket in task.train.buckets(batch_size=3):  # it sees the examples of its rows
        logits = torch.arange(11.0).repeat(len(bucket.index), 1)
        assert bucket.margin(logits).tolist() == [right[e.prompt] for e in bucket.examples]


def test_a_metric_must_give_one_float_per_prompt():
    for value, message in (
        (torch.zeros(()), r"torch.float32 of shape \(\)"),
        (torch.zeros(13, 2), r"torch.float32 of shape \(13, 2\)"),
        (torch.zeros(13, dtype=torch.int64), r"torch.int64 of shape \(13,\)"),
        (0.5, "it gave float"),
    ):
        (bucket,) = Task.from_prompts("mine", FakeHost(), PROMPTS, metric=lambda *_, value=value: value).train.buckets()
        with pytest.raises(TaskError, match=rf"must give one float per prompt, a tensor of shape \(13,\); .*{message}"):
            bucket.margin(torch.zeros(13, 11))


def test_two_splits_as_one_hold_the_prompts_of_both_in_their_order():
    first, second = split_of([[0], [1, 2]], [[3], [4]], [[5], [3]], d_vocab=6), split_of([[4, 4]], [[0]], [[1]], d_vocab=6)
    both = first.and_then(second)
    assert [tokens.tolist() for tokens in both.tokens] == [[0], [1, 2], [4, 4]]
    assert both.answer_ids == ((3,), (4,), (0,)) and both.distractor_ids == ((5,), (3,), (1,)) and len(both) == 3
    assert both.corrupt == () and [bucket.index.tolist() for bucket in both.buckets()] == [[0], [1, 2]]
    with_corrupt = replace(second, corrupt=(torch.tensor([2, 2]),))
    one, two, three = first.and_then(with_corrupt).corrupt
    assert one is two is None and three.tolist() == [2, 2]
