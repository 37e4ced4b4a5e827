"""load_task: what exists, our generators on the embedded model and GPT-2's tokenizer, the public files."""

import itertools
import json
import random
import re

import pytest

from swd_lens.base.errors import TaskError
from swd_lens.tasks import load_task
from swd_lens.tasks.generators import FAMILIES
from tests.tasks.test_task import FakeHost


@pytest.fixture(scope="module")
def gpt2(shared):
    from transformers import AutoTokenizer

    folder = shared / "tokenizers" / "gpt2"
    if not folder.is_dir():
        pytest.skip(f"needs GPT-2's tokenizer in {folder}, which is not there")
    host = FakeHost(n_ctx=1024)
    host.tokenizer = AutoTokenizer.from_pretrained(folder)
    host.cfg.d_vocab = 50257
    return host


# Sizes of train, validation and test, and what became of the file's prompts. Where there are fewer than 1000 different ones,
# train and validation share what test leaves.
COUNTS = {
    "ioi": ((600, 199, 200), "kept 999 of 1000; dropped: 1 duplicate prompt"),
    "docstring": ((600, 200, 200), "kept all 1000"),
    "greaterthan": ((591, 197, 200), "kept 988 of 1000; dropped: 12 duplicate prompt"),
}


@pytest.mark.parametrize("name", COUNTS)
def test_public_files(shared, gpt2, name):
    path = shared / "tasks" / f"autocircuit_{name}.json"
    task = load_task(path, gpt2)
    sizes, counts = COUNTS[name]
    assert tuple(map(len, task.splits)) == sizes and f" test ({counts});" in repr(task)
    train, validation, test = ([example.prompt for example in split.examples] for split in task.splits)
    assert len({*train, *validation, *test}) == sum(sizes)
    # The places of the shuffle: all but those of dropped examples.
    order = [prompt["clean"] for prompt in json.loads(path.read_text())["prompts"]]
    random.Random(42).shuffle(order)
    first = list(dict.fromkeys(order[: sizes[0]]))
    assert train[: len(first)] == first
    assert set(order[600:800]) - set(first) <= set(test)
    if name == "greaterthan":  # no place of the shuffle depends on how many prompts are to choose on
        few = load_task(path, gpt2, n_validation=50)
        assert len(few.train) == 600 and len(few.validation) == 50 and train[: len(first)] == first
        assert set(order[600:800]) - set(order[:600]) <= {e.prompt for e in few.test.examples}


@pytest.mark.quick_cases(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_families_reach_the_papers_numbers(gpt2, family):
    task = load_task(family, gpt2)
    assert tuple(map(len, task.splits)) == (600, 200, 200)
    small = load_task(family, gpt2, n_train=50, n_validation=30, n_test=20)
    for of_small, of_task, n in zip(small.splits, task.splits, (50, 30, 20), strict=True):
        assert of_small.examples == of_task.examples[:n]


@pytest.mark.parametrize("family", ["ioi", "gendered_pronoun"])
def test_generated_corrupt_prompts_are_as_long_as_theirs(gpt2, family):
    task = load_task(family, gpt2, n_train=200, n_test=200)
    for split in task.splits:
        assert [len(tokens) for tokens in split.corrupt] == [len(tokens) for tokens in split.tokens]


def test_generated_years_are_the_tokens_century_and_two_digits(gpt2):
    task = load_task("greater_than", gpt2, n_train=60, n_test=40)
    assert set(task.dropped) <= {"start year is not the tokens [century, two digits]", "final century is not a token of its own"}
    assert "start year is not the tokens [century, two digits]" in task.dropped
    for example, tokens in zip(task.test.examples, task.test.tokens, strict=True):
        start, century = re.findall(r"\d+", example.prompt)
        pieces = [gpt2.tokenizer.decode([i]) for i in tokens]
        assert (f" {century}", start[2:]) in itertools.pairwise(pieces) or start == example.prompt[:4]
        assert pieces[-1] == f" {century}"


def test_load_task_names_what_exists():
    with pytest.raises(TaskError, match=r"'greater_then' is neither a task family .* Did you mean 'greater_than'\?"):
        load_task("greater_then", FakeHost())
    for n in ("n_train", "n_validation", "n_test"):
        with pytest.raises(TaskError, match=f"{n} must be a whole number of at least 1, got 0"):
            load_task("ioi", FakeHost(), **{n: 0})
    with pytest.raises(TaskError, match=r"splits=.* belongs to Edge-Pruning folders; 'ioi' is split by n_train"):
        load_task("ioi", FakeHost(), splits=("a", "b"))
    with pytest.raises(TaskError, match="inclusive=True belongs to Edge-Pruning's greater-than"):
        load_task("greater_than", FakeHost(), inclusive=True)
    host = FakeHost()
    host.tokenizer.bos_token = None
    with pytest.raises(TaskError, match="this tokenizer has no BOS token; pass prepend_bos=False"):
        load_task("ioi", host, prepend_bos=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_families_on_the_embedded_model(default_model, family):
    task = load_task(family, default_model, n_train=60, n_validation=30, n_test=40)
    assert (len(task.train), len(task.validation), len(task.test)) == (60, 30, 40)
    assert task.prepend_bos and all(int(tokens[0]) == default_model.tokenizer.bos_token_id for tokens in task.train.tokens)
    few, other = (load_task(family, default_model, n_train=10, n_test=5, seed=seed) for seed in (0, 1))
    assert few.train.examples == task.train.examples[:10] != other.train.examples
