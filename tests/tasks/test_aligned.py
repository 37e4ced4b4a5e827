"""Aligned prompts: one length, template and order; positions are named; groups are filled up with variants."""

import pytest

from swd_lens.base.errors import TaskError
from swd_lens.tasks import Task, load_task
from swd_lens.tasks.aligned import ANSWER, aligned_prompts, groups_of
from tests.tasks.test_task import FakeHost


@pytest.fixture(scope="module")
def task(default_model):
    return load_task("ioi", default_model, n_train=30, n_validation=4, n_test=4)


def test_a_group_has_one_length_template_and_order_and_is_filled_up(default_model, task):
    found = aligned_prompts(default_model, task, 6)
    first = task.train.examples[groups_of(task.train)[0]]
    assert len(found.split) == 6 and found.drawn > 0 and found.split.examples[0] == first
    for key in ("template", "order"):
        assert {example.meta[key] for example in found.split.examples} == {first.meta[key]}
    assert len({example.prompt for example in found.split.examples}) == 6 and found.tokens.shape[0] == 6
    assert sum(found.left_out.values()) + len(found.split) - found.drawn == len(task.train)
    assert any(ANSWER in role for role in found.roles) and len(found.typical) == len(found.roles) == found.tokens.shape[1]
    alone = aligned_prompts(default_model, task.train, 6, like=3, drawn=False)
    assert alone.drawn == 0 and alone.split.examples[0] == task.train.examples[3]


@pytest.mark.filterwarnings("ignore::swd_lens.base.errors.TextWarning")
def test_roles_are_the_tokens_that_all_share_or_what_they_answer():
    host = FakeHost()
    texts = [("the cat sat he", "cat", "dog"), ("the dog sat she", "dog", "cat"), ("the cat sat she", "cat", "dog")]
    split = Task.from_prompts("t", host, *zip(*texts, strict=True), on_bad="drop").train
    with pytest.raises(TaskError, match="n must be a whole number of at least 1, got 0"):
        aligned_prompts(host, split, 0)
    with pytest.raises(TaskError, match="like=9: the split has examples 0 to"):
        aligned_prompts(host, split, like=9)
    assert aligned_prompts(host, split).roles[0] == "the"
