"""The four task families: content splits, determinism, answers that follow from the prompt, GPT-2's tokens."""

import itertools
import random
import re
from itertools import pairwise
from pathlib import Path

import pytest

from swd_lens.tasks.generators import (
    FAMILIES,
    GENERATED,
    TEMPLATES,
    content_of,
    corrupts,
    generate,
    greater_than,
    training_document,
    words,
)
from swd_lens.tasks.generators.words import SPLITS

GPT2 = Path(__file__).parents[3] / "shared" / "tokenizers" / "gpt2"
EVERY = [(family, split, templates) for family in FAMILIES for split in SPLITS for templates in ("seen", "unseen")]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("key", ["content", "content_2"])
def test_splits_share_no_content(family, key):
    keys = {
        split: {e.meta[key] for t in TEMPLATES for e in generate(family, split, 300, templates=t) if key in e.meta}
        for split in SPLITS
    }
    assert not keys["train"] & keys["test"]
    assert not keys["train"] & keys["validation"]
    assert not keys["validation"] & keys["test"]
    if key == "content":
        assert min(map(len, keys.values())) >= 10


@pytest.mark.parametrize("family", GENERATED)
def test_the_splits_of_a_task_share_no_content_and_no_prompt_whatever_the_seeds(family):
    """Names, places, years, ...: whatever a generator divides, between any two splits of tasks of any two seeds."""
    content, keys = content_of(family), ("content", "content_2")
    drawn = {
        split: [e for seed in range(4) for e in generate(family, owner, 150, seed=seed)]
        for split, owner in content.items()
    }
    for one, other in itertools.combinations(drawn, 2):
        for key in keys:
            assert not {e.meta[key] for e in drawn[one] if key in e.meta} & {e.meta.get(key) for e in drawn[other]}
        assert not {e.prompt for e in drawn[one]} & {e.prompt for e in drawn[other]}
    for split, examples in drawn.items():
        assert len({e.meta["content"] for e in examples}) >= 4
        assert generate(family, content[split], 150, seed=3) == examples[-150:]
        if family == "docstring":  # every two neighbours, also those of the corrupt prompts
            for text in (text for e in examples for text in (e.prompt, e.corrupt)):
                arguments = re.search(r"def \w+\((?:self, |cls, )?(.*?)\)", text).group(1).split(", ")
                assert all(content[split] in words.owners_of("arguments", *pair) for pair in pairwise(arguments))
        if family == "gendered_pronoun":
            others = {name for s, owner in content.items() if s != split for name in names_of(owner)}
            assert not any(re.search(rf"\b({'|'.join(others)})\b", f"{e.prompt} {e.corrupt}") for e in examples)


def names_of(owner):
    return [name for gender in ("she", "he") for name in words.pronoun_names(owner, gender)]


def test_a_task_has_the_content_that_the_embedded_model_never_read():
    for family in FAMILIES:
        assert content_of(family) == {"train": "task train", "validation": "task validation", "test": "test"}
    assert content_of("capital") == {split: split for split in SPLITS}
    # The two parts are the text's "validation", which no training document has (tested below).
    parts = [set(words.name_pairs(part)) for part in words.TASK_PARTS]
    assert parts[0] | parts[1] == set(words.name_pairs("validation")) and not parts[0] & parts[1]
    parts = [set(words.object_places(part)) for part in words.TASK_PARTS]
    assert parts[0] | parts[1] == set(words.object_places("validation")) and not parts[0] & parts[1]
    parts = [words.start_years(part) for part in words.TASK_PARTS]
    assert sorted(parts[0] + parts[1]) == sorted(words.start_years("validation"))
    assert [len(names_of(owner)) for owner in words.OWNERS] == [72, 10, 14, 6, 4]
    with pytest.raises(ValueError, match="split must be one of 'train', 'validation', 'test', got 'task train'"):
        generate("capital", "task train", 1)


def test_seen_and_unseen_templates_are_different_sentences():
    for family in FAMILIES:
        templates = {
            kind: {e.meta["template"] for e in generate(family, "test", 400, templates=kind)}
            for kind in ("seen", "unseen")
        }
        assert all(template.startswith("seen") for template in templates["seen"])
        assert all(template.startswith("unseen") for template in templates["unseen"])
        assert len(templates["unseen"]) >= 3
        both = {e.meta["template"].split("-")[0] for e in generate(family, "test", 40, templates="all")}
        assert both == {"seen", "unseen"}


@pytest.mark.parametrize(("family", "split", "templates"), EVERY)
def test_prompts_are_different_and_a_smaller_request_is_a_prefix(family, split, templates):
    many = generate(family, split, 600, seed=3, templates=templates)
    assert len({e.prompt for e in many}) == 600
    assert generate(family, split, 20, seed=3, templates=templates) == many[:20]
    assert generate(family, split, 20, seed=4, templates=templates) != many[:20]


def test_prompts_are_the_same_in_every_process_and_version():
    # Pinned: the embedded model's reported scores are about exactly these prompts.
    first = {family: generate(family, "test", 1)[0] for family in FAMILIES}
    assert first["ioi"].prompt == (
        "Here at the museum Mary and Rebecca eat lunch, and today Rebecca showed the new spoon to"
    )
    assert first["docstring"].prompt == (
        'def load(self, batch, score, object, label, limit, matrix):\n    """open the gentle cup\n\n'
        "    :arg label: kind newspaper\n    :arg limit: funny park\n    :arg"
    )
    assert first["greater_than"].prompt == "Only one drought was so long: it opened in 1420, and the end came in 14"
    assert first["gendered_pronoun"].prompt == "Ronald isn't a nice judge, is"


def test_ioi_answer_is_the_name_said_once():
    for e in generate("ioi", "test", 200, templates="all"):
        (answer,), (distractor,) = e.answers, e.distractors
        said = re.findall("|".join(words.NAMES), e.prompt)
        assert said.count(answer.strip()) == 1
        assert said.count(distractor.strip()) == 2
        corrupt = re.findall("|".join(words.NAMES), e.corrupt)
        assert len(corrupt) == len(set(corrupt)) == 3
        first_is_answer = said[0] == answer.strip()
        assert e.meta["order"] == ("ABBA" if first_is_answer else "BABA")


@pytest.mark.parametrize("family", ["ioi", "gendered_pronoun"])
def test_further_corrupt_prompts_differ_in_the_names_alone(family):
    people = {*words.FEMALE, *words.MALE}

    def parts(text):
        said = [word.strip(".,") for word in text.split()]
        return [word for word in said if word in people], [word for word in said if word not in people]

    for split, templates in itertools.product(SPLITS, ("seen", "unseen")):
        for example in generate(family, split, 150, templates=templates):
            further = list(itertools.islice(corrupts(example), 3))
            assert further == list(itertools.islice(corrupts(example), 3))
            for text in (example.corrupt, *further):
                (names, rest), (clean, its_rest) = parts(text), parts(example.prompt)
                assert rest == its_rest and len(names) == len(clean)
                assert len({*names}) == 3 if family == "ioi" else not {*names} & {*clean}
    assert list(corrupts(generate("docstring", "train", 1)[0])) == []


def test_docstring_answer_is_the_next_argument():
    for e in generate("docstring", "test", 200, templates="all"):
        arguments = re.search(r"def \w+\((?:self, |cls, )?(.*?)\)", e.prompt).group(1).split(", ")
        documented = re.findall(r":(?:param|arg) (\w+):", e.prompt)
        assert len(arguments) == 6
        assert len(documented) == 2
        assert e.answers == (" " + arguments[arguments.index(documented[-1]) + 1],)
        assert len(set(e.distractors)) == 13
        assert {" " + a for a in arguments} - set(e.answers) <= set(e.distractors)
        assert not set(e.answers) & set(e.distractors)
        assert not any(re.search(rf"\b{a}\b", e.corrupt.split(")")[0]) for a in arguments)


def test_greater_than_sides_are_strict():
    for e in generate("greater_than", "test", 200, templates="all"):
        start, century = re.findall(r"\d+", e.prompt)
        assert start == e.meta["content"]
        assert e.prompt.endswith(century)
        assert start.startswith(century)
        year = int(start[2:])
        assert [int(a) for a in e.answers] == list(range(year + 1, 100))
        assert [int(d) for d in e.distractors] == list(range(year))
        assert f"{century}01" in e.corrupt


def test_pronoun_follows_from_the_name_and_test_names_are_in_no_training_question():
    test_names = {e.meta["content"] for e in generate("gendered_pronoun", "test", 400)}
    assert len(test_names) >= 12
    for e in generate("gendered_pronoun", "test", 200, templates="all"):
        female = e.meta["content"] in words.FEMALE
        assert (e.answers, e.distractors) == (((" she",), (" he",)) if female else ((" he",), (" she",)))
    rng = random.Random(0)
    questions = " ".join(training_document("gendered_pronoun", rng) for _ in range(3000))
    assert not any(re.search(rf"\b{name}\b", questions) for name in test_names)


def test_training_text_never_has_held_out_content():
    rng = random.Random(0)
    for _ in range(2000):
        text = training_document("ioi", rng)
        names = sorted(set(re.findall(r"\b(?:" + "|".join(words.NAMES) + r")\b", text)))
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        assert all(words.split_of("names", *pair) == "train" for pair in pairs), text
        text = training_document("docstring", rng)
        arguments = re.search(r"def \w+\((?:self, )?(.*?)\)", text).group(1).split(", ")
        assert all(words.split_of("arguments", *pair) == "train" for pair in pairwise(arguments))
        start = re.search(r"\d{4}", training_document("greater_than", rng)).group()
        assert words.split_of("year", start) == "train"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("io", "test", 5), "family must be one of 'ioi', 'docstring', 'greater_than', 'gendered_pronoun', "),
        (("ioi", "dev", 5), "split must be one of 'train', 'validation', 'test', "),
        (("ioi", "test", 0), "n must be a whole number of at least 1, got 0"),
        (("ioi", "test", 5, 0, "new"), "templates must be one of 'seen', 'unseen', 'all', got 'new'"),
    ],
)
def test_bad_requests_say_what_is_valid(arguments, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        generate(*arguments)


def test_single_tokens_under_gpt2():
    if not GPT2.is_dir():
        pytest.skip(f"no GPT-2 tokenizer at {GPT2}")
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(str(GPT2), local_files_only=True)

    def one(text: str) -> bool:
        return len(tokenizer.encode(text, add_special_tokens=False)) == 1

    lists = (words.NAMES, words.PLACES, words.OBJECTS, words.ARGUMENTS, words.EVENTS, words.ADJECTIVES, words.ROLES)
    assert [word for group in lists for word in group if not one(" " + word)] == []
    for family in FAMILIES:
        for e in generate(family, "test", 100, templates="all"):
            assert [text for text in (*e.answers, *e.distractors) if not one(text)] == []
    # the caveat of greater_than's docstring: most start years, not all, are split CC + YY
    years = [str(year) for split in SPLITS for year in words.start_years(split)]
    pieces = [[tokenizer.decode([i]) for i in tokenizer.encode(" " + year)] for year in years]
    split = [piece == [" " + year[:2], year[2:]] for piece, year in zip(pieces, years, strict=True)]
    assert 0.8 < sum(split) / len(split) < 1


def test_lists_hold_each_word_once():
    for group in (words.NAMES, words.PLACES, words.OBJECTS, words.ARGUMENTS, words.EVENTS):
        assert len(set(group)) == len(group)
    assert words.split_of("names", "Anna", "Mary") == words.split_of("names", "Anna", "Mary")
    share = sum(words.split_of("x", str(i)) == "test" for i in range(4000)) / 4000
    assert abs(share - 0.15) < 0.02


def test_asking_for_more_prompts_than_there_are_says_how_many(monkeypatch):
    monkeypatch.setattr(greater_than, "EVENTS", ("war",))
    with pytest.raises(ValueError, match=r"greater_than/test/unseen has about 4\d\d different prompts; n is 10000"):
        generate("greater_than", "test", 10_000, templates="unseen")
