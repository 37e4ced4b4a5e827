"""Tokenized tasks: buckets, margins, and every way a task can be unusable."""

import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import swd_lens as swd
from swd_lens.tasks import Task, TaskError, TaskExample, load_task
from swd_lens.tasks.loaders import read_auto_circuit
from tests.micro import random_split, split_of

WORDS = ["<unk>", "<bos>", "the", "cat", "dog", "sat", "ran", "he", "she", "4", "2"]


class FakeHost:
    """Only what tokenizing needs: a tokenizer and a few numbers."""

    def __init__(self, words=tuple(WORDS)):
        vocabulary = {word: i for i, word in enumerate(words)}
        backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
        # Words, and every digit by itself: a tokenizer like Qwen's, as far as greater-than is concerned.
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [pre_tokenizers.Whitespace(), pre_tokenizers.Digits(individual_digits=True)]
        )
        self.tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", bos_token="<bos>")
        self.cfg = type("Cfg", (), {"d_vocab": len(words), "n_ctx": 8, "model_name": "fake"})()


GOOD = TaskExample("the cat", ("sat",), ("ran",))


def test_margin_by_hand():
    split = split_of([[0], [1, 2]], [[0, 1], [2]], [[2], [0, 1]], d_vocab=3)
    buckets = list(split.buckets())
    assert [bucket.tokens.tolist() for bucket in buckets] == [[[0]], [[1, 2]]]
    logits = torch.tensor([[1.0, 3.0, 5.0]])
    # prompt 0: (1 + 3) / 2 - 5 = -3; its best answer (3) is below the distractor (5). prompt 1: 5 - (1 + 3) / 2 = 3.
    assert buckets[0].margin(logits).tolist() == [-3.0]
    assert buckets[0].correct(logits).tolist() == [False]
    assert buckets[1].margin(logits).tolist() == [3.0]
    assert buckets[1].correct(logits).tolist() == [True]


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
    task = Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), prepend_bos=True)
    assert task.train.tokens[0].tolist() == [1, 2, 3]
    assert (task.train.answer_ids, task.train.distractor_ids) == (((5,),), ((6,),))
    assert "1 train, 1 test" in repr(task)
    assert (task.train.name, task.test.name) == ("train", "test") and task.test.task == "mine"


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (TaskExample("the cat", ("42",), ("ran",)), r"answer is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat",), ("42",)), r"distractor is not one token: '42' is 2 tokens"),
        (TaskExample("the cat", ("sat", "ran"), ("ran",)), r"an answer is also a distractor: 'ran'"),
        (TaskExample("the cat", (), ("ran",)), r"no answers or no distractors: 0 answers, 1 distractors"),
        (TaskExample("the cat", ("zebra",), ("ran",)), r"answer is not in the vocabulary: 'zebra'"),
        (TaskExample("", ("sat",), ("ran",)), r"empty prompt"),
        (TaskExample("the cat " * 5, ("sat",), ("ran",)), r"prompt longer than the context: 10 tokens, n_ctx is 8"),
    ],
)
def test_unusable_examples_are_refused_or_dropped_and_counted(bad, message):
    with pytest.raises(TaskError, match=message):
        Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost())
    task = Task.from_examples("mine", [GOOD, bad], [GOOD], FakeHost(), on_bad="drop")
    assert len(task.train) == 1 and sum(task.train.dropped.values()) == 1
    assert "dropped" in repr(task)


def test_empty_tasks_are_refused():
    with pytest.raises(TaskError, match="has no train examples"):
        Task.from_examples("mine", [], [GOOD], FakeHost())
    digits = TaskExample("the cat", ("42",), ("ran",))
    with pytest.raises(TaskError, match=r"no usable test example .*answer is not one token \(1\).*digit-by-digit"):
        Task.from_examples("years", [GOOD], [digits], FakeHost(), on_bad="drop")
    host = FakeHost()
    host.tokenizer = None
    with pytest.raises(TaskError, match="needs a host with a tokenizer"):
        Task.from_examples("mine", [GOOD], [GOOD], host)
    with pytest.raises(ValueError, match="on_bad must be"):
        Task.from_examples("mine", [GOOD], [GOOD], FakeHost(), on_bad="ignore")


def test_load_task_names_what_exists():
    with pytest.raises(TaskError, match=r"'greater_then' is neither a task family .* Did you mean 'greater_than'\?"):
        load_task("greater_then", FakeHost())
    with pytest.raises(TaskError, match="n_train=0"):
        load_task("ioi", FakeHost(), n_train=0)


def test_auto_circuit_files(tmp_path):
    prompt = {"clean": "the cat", "corrupt": "the dog", "answers": ["sat"], "wrong_answers": ["ran"]}
    path = tmp_path / "mine.json"
    path.write_text(
        json.dumps({"prompts": [prompt, prompt, {**prompt, "clean": "the dog"}, {**prompt, "clean": "cat"}]})
    )
    assert [example.prompt for example in read_auto_circuit(path)] == [
        "the cat",
        "the dog",
        "cat",
    ]  # the duplicate is kept once
    task = load_task(path, FakeHost(), n_train=600, n_test=200)
    assert (len(task.train), len(task.test)) == (2, 1)  # three prompts, in the asked proportion
    again = load_task(path, FakeHost(), n_train=600, n_test=200)
    assert task.train.examples == again.train.examples
    path.write_text("no json")
    with pytest.raises(TaskError, match="not an auto-circuit task file"):
        load_task(path, FakeHost())
    path.write_text(json.dumps({"prompts": [prompt, {"clean": "x"}]}))
    with pytest.raises(TaskError, match='prompt 1 lacks "clean", "answers" or "wrong_answers"'):
        load_task(path, FakeHost())
    path.write_text(json.dumps({"prompts": [{**prompt, "answers": [5]}]}))
    with pytest.raises(TaskError, match="prompt 0 holds token ids"):
        load_task(path, FakeHost())


@pytest.mark.parametrize("name", ["ioi", "docstring", "greaterthan"])
def test_public_files_with_gpt2s_tokenizer(shared, name):
    from transformers import AutoTokenizer

    host = FakeHost()
    host.tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    host.cfg.d_vocab, host.cfg.n_ctx = 50257, 1024
    task = load_task(shared / "tasks" / f"autocircuit_{name}.json", host)
    assert (len(task.train), len(task.test)) == (600, 200)  # the paper's split sizes; nothing dropped
    prompts = {example.prompt for example in task.train.examples}
    assert not prompts & {example.prompt for example in task.test.examples}


@pytest.mark.parametrize("family", ["ioi", "docstring", "greater_than", "gendered_pronoun"])
def test_families_with_gpt2s_tokenizer(shared, family):
    from transformers import AutoTokenizer

    host = FakeHost()
    host.tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / "gpt2")
    host.cfg.d_vocab, host.cfg.n_ctx = 50257, 1024
    task = load_task(family, host, n_train=100, n_test=50)
    assert len(task.train) + sum(task.train.dropped.values()) == 100
    assert len(task.train) >= 80 and len(task.test) >= 40


@pytest.mark.parametrize("family", ["ioi", "docstring", "greater_than", "gendered_pronoun"])
def test_families_on_the_embedded_model(default_model, family):
    task = load_task(family, default_model, n_train=60, n_test=40)
    assert (len(task.train), len(task.test)) == (60, 40)
    assert task.prepend_bos and all(
        int(tokens[0]) == default_model.tokenizer.bos_token_id for tokens in task.train.tokens
    )
    contents = [{example.meta["content"] for example in split.examples} for split in (task.train, task.test)]
    assert not contents[0] & contents[1]


def test_tasks_are_the_same_every_time(default_model):
    first, second = (swd.load_task("ioi", default_model, n_train=10, n_test=5) for _ in range(2))
    assert first.train.examples == second.train.examples
    other = swd.load_task("ioi", default_model, n_train=10, n_test=5, seed=1)
    assert first.train.examples != other.train.examples
