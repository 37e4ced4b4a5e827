"""The families of tables.py: disjoint content, determinism, answers that follow; what a tokenizer cannot do is said.

How well a real model does them is tests/real/.
"""

import pytest

from swd_lens.base.errors import TaskError
from swd_lens.tasks import load_task
from swd_lens.tasks.generators import FAMILIES, GENERATED, corrupts, generate, tables
from swd_lens.tasks.generators.words import SPLITS

TABLES = tuple(family.name for family in tables.FAMILIES)


def test_the_four_families_of_the_embedded_model_come_first():
    assert FAMILIES == ("ioi", "docstring", "greater_than", "gendered_pronoun")
    assert GENERATED[4:] == ("capital", "agreement", "succession", "greater_digit") == TABLES and GENERATED[:4] == FAMILIES


@pytest.mark.parametrize("family", TABLES)
def test_prompts_are_different_seeded_and_as_many_as_a_task_asks_for(family):
    many = generate(family, "train", 600, seed=3)
    assert len({e.prompt for e in many}) == 600 and generate(family, "train", 20, seed=3) == many[:20]
    assert generate(family, "train", 20, seed=4) != many[:20]
    assert len(generate(family, "test", 200, templates="all")) == 200
    for example in many:
        assert not set(example.answers) & set(example.distractors)
        assert example.corrupt != example.prompt and "{" not in example.prompt
        assert example.prompt == example.prompt.strip()
    keys = {split: {e.meta["content"] for e in generate(family, split, 250)} for split in SPLITS}
    assert min(map(len, keys.values())) >= 5 and len(keys["train"]) >= 14 and len(keys["test"]) >= 9


def test_capitals_are_those_of_their_countries_and_further_corrupt_prompts_name_other_countries():
    for example in generate("capital", "test", 40):
        country = example.meta["content"]
        assert example.answers == (" " + tables.CAPITALS[country],) and country in example.prompt
        assert set(example.distractors) < {" " + city for city in tables.CAPITALS.values()}
        texts = [text for text, _ in zip(corrupts(example), range(5), strict=False)]
        assert all(country not in text.replace("Philippines", "") for text in (*texts, example.corrupt))
    assert len(set(tables.CAPITALS.values())) == len(tables.CAPITALS)


def test_verbs_agree_with_the_subject_and_not_with_the_noun_between():
    for example in generate("agreement", "train", 60):
        person = example.meta["content"]
        several = f"{person}s " in example.prompt
        assert example.answers == ((" are", " were", " have") if several else (" is", " was", " has"))
        last = example.prompt.split()[-1]
        assert last.endswith("s") is not several and last.removesuffix("s") in tables.THINGS
        swapped = example.prompt.replace(f"{person}s ", f"{person} ") if several else None
        assert example.corrupt == (swapped or example.prompt.replace(f"{person} ", f"{person}s "))


def test_successors_follow_days_and_months_go_round():
    answers = {}
    for split in SPLITS:
        for example in generate("succession", split, 200):
            answers[example.answers[0].strip()] = example.prompt
            items = next(items for items in (tables.DAYS, tables.MONTHS, tables.NUMBERS) if example.meta["content"] in items)
            before = items[items.index(example.meta["content"]) - 1]
            assert before in example.prompt and len(example.distractors) == len(items) - 1
    assert set(answers) == {*tables.DAYS, *tables.MONTHS, *tables.NUMBERS[3:]}


def test_last_digits_are_later_or_not():
    for example in generate("greater_digit", "test", 60):
        start = example.meta["content"]
        assert example.prompt.endswith(start[:-1]) and start in example.prompt
        assert [*example.distractors, *example.answers] == list("0123456789") and start[-1] == example.distractors[-1]
        assert example.corrupt == example.prompt.replace(start, start[:-1] + "0")


def test_the_embedded_model_says_what_its_vocabulary_does_not_allow(default_model):
    with pytest.raises(TaskError, match=r"no usable train example .*answer is not in the vocabulary \(\d+\)"):
        load_task("capital", default_model, n_train=4, n_test=4)
    with pytest.raises(TaskError, match=r"no usable train example .*is not in the vocabulary \(\d+\)"):
        load_task("agreement", default_model, n_train=4, n_test=4)
    with pytest.raises(TaskError, match=r"does not make a token of each digit .*use greater_than"):
        load_task("greater_digit", default_model, n_train=4, n_test=4)
    task = load_task("succession", default_model, n_train=20, n_test=8)
    assert {e.meta["content"] for e in (*task.train.examples, *task.test.examples)} <= set(tables.DAYS)
    assert "an answer is not in the vocabulary" in task.counts() and "words outside the vocabulary" in task.counts()
