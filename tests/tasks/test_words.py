"""Word lists: every piece of content belongs to one split."""

import random
import re
from itertools import pairwise

import pytest

from swd_lens.tasks.generators import FAMILIES, content_of, generate, training_document, words
from swd_lens.tasks.generators.words import SPLITS
from tests.tasks.test_generators import GPT2, names_of


def test_a_task_has_the_content_that_the_embedded_model_never_read_and_lists_hold_each_word_once():
    for family in FAMILIES:
        assert content_of(family) == {"train": "task train", "validation": "task validation", "test": "test"}
    assert content_of("capital") == {split: split for split in SPLITS}
    # The two parts are the text's "validation", which no training document has (tested below).
    for content in (words.name_pairs, words.object_places, words.start_years):
        parts = [set(content(part)) for part in words.TASK_PARTS]
        assert parts[0] | parts[1] == set(content("validation")) and not parts[0] & parts[1]
    assert [len(names_of(owner)) for owner in words.OWNERS] == [72, 10, 14, 6, 4]
    with pytest.raises(ValueError, match="split must be one of 'train', 'validation', 'test', got 'task train'"):
        generate("capital", "task train", 1)
    for group in (words.NAMES, words.PLACES, words.OBJECTS, words.ARGUMENTS, words.EVENTS):
        assert len(set(group)) == len(group)
    assert words.split_of("names", "Anna", "Mary") == words.split_of("names", "Anna", "Mary")
    share = sum(words.split_of("x", str(i)) == "test" for i in range(4000)) / 4000
    assert abs(share - 0.15) < 0.02


def test_training_text_never_has_held_out_content():
    rng = random.Random(0)
    for _ in range(1000):
        text = training_document("ioi", rng)
        names = sorted(set(re.findall(r"\b(?:" + "|".join(words.NAMES) + r")\b", text)))
        pairs = [(a, b) for i, a in enumerate(names) for b in names[i + 1 :]]
        assert all(words.split_of("names", *pair) == "train" for pair in pairs), text
        text = training_document("docstring", rng)
        arguments = re.search(r"def \w+\((?:self, )?(.*?)\)", text).group(1).split(", ")
        assert all(words.split_of("arguments", *pair) == "train" for pair in pairwise(arguments))
        start = re.search(r"\d{4}", training_document("greater_than", rng)).group()
        assert words.split_of("year", start) == "train"


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
