"""What makes a task another one than it looks."""

import warnings

import pytest

import swd_lens as swd
from swd_lens.base.errors import TextWarning
from swd_lens.tasks.cautions import Cautions
from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.tokenize import TaskTokenizer


@pytest.fixture(scope="module")
def model(default_model):
    return default_model


def told(model, prompts, answers, distractors, **how):
    """TextWarnings of a task."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        n = len(prompts)
        swd.Task.from_prompts("mine", model, prompts, [answers] * n, [distractors] * n, **how)
    return [str(each.message) for each in caught if each.category is TextWarning]


def test_a_prompt_with_bos_gets_no_second_one(model):
    prompts = ["<|bos|> Then Mary", " Then John", " Then Jane"]
    with pytest.warns(TextWarning, match=r"task 'mine': 1 prompts begin with '<\|bos\|>', .*: '<\|bos\|> Then Mary'"):
        task = swd.Task.from_prompts("mine", model, prompts, [" went"] * 3, [" gave"] * 3)
    assert sorted(tokens.tolist()[0] for split in task.splits for tokens in split.tokens) == [0, 0, 0]
    assert sorted(tokens.tolist().count(0) for split in task.splits for tokens in split.tokens) == [1, 1, 1]
    assert not told(model, prompts, " went", " gave", prepend_bos=False)


def test_an_answer_that_goes_on_the_last_word(model):
    (said,) = told(model, ["Then Mary", "Then John", "Then Anna"], "Jane", " gave")
    assert "go on with the last word of 3 prompts: 'Jane' behind 'Then " in said
    assert not told(model, ["Then Mary ,", "Then John ,", "Then Anna ,"], "Jane", " gave")  # no word that it could go on with
    assert not told(model, ["Then Mary", "Then John", "Then Anna"], " Jane", " gave")


@pytest.mark.parametrize(
    ("prompt", "answer"),
    [("from the year 1732 to the year 17", "41"), ("param_", "name"), ("猫は", "猫"), ("كتاب", "كتاب"), ("the", ",")],
)
def test_digits_code_and_scripts_without_spaces_are_not_told(model, prompt, answer):
    """Whatever the tokenizer makes of them: here every text is one token, with a space another one."""
    tokenizer = TaskTokenizer("mine", model)
    tokenizer.short = lambda text: (len(text),)
    cautions = Cautions(tokenizer)
    assert not cautions.goes_on_the_word(prompt, answer)
    assert cautions.goes_on_the_word("the year 17", "on")


def test_an_answer_that_the_prompt_gives_away(model):
    prompts = [f"{name} gave a drink to" for name in ("Mary", "John", "Anna")]
    (said,) = told(model, prompts, " drink", " store")
    assert "in 3 prompts an answer stands and no distractor does: ' drink' in" in said
    assert not told(model, prompts, " drink", " gave")
    assert not told(model, prompts, " store", " lake")


def test_one_prompt_is_told_as_a_task_is_and_none_where_a_metric_judges(model):
    with pytest.warns(TextWarning, match="the prompt: 1 prompts end in a space"):
        swd.Task.of_prompt(model, "Then Mary ", " went", " gave")
    with warnings.catch_warnings():
        warnings.simplefilter("error", TextWarning)
        swd.Task.of_prompt(model, "Then Mary", " went", " gave")
        swd.Task.of_prompt(model, [9, 8, 7], " went", 11)
    cautions = Cautions(TaskTokenizer("mine", model))
    cautions.see(TaskExample("Then Mary", (), ()), [1065, 204], (), ())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cautions.warn("mine")


def test_prompts_that_end_in_a_space_are_named_by_their_first(model):
    names = ["Mary", "John", "Jane", "Anna", "Paula"]
    (said,) = told(model, [f"Then {name} " for name in names], " went", " gave")
    assert said.startswith("task 'mine': 5 prompts end in a space: ") and said.count("'Then ") == 3 and " and 2 more" in said
