"""Pronouns follow from names."""

import random
import re

from swd_lens.tasks.generators import generate, training_document, words


def test_pronoun_follows_from_the_name_and_test_names_are_in_no_training_question():
    test_names = {e.meta["content"] for e in generate("gendered_pronoun", "test", 400)}
    assert len(test_names) >= 12
    for e in generate("gendered_pronoun", "test", 200, templates="all"):
        female = e.meta["content"] in words.FEMALE
        assert (e.answers, e.distractors) == (((" she",), (" he",)) if female else ((" he",), (" she",)))
    rng = random.Random(0)
    questions = " ".join(training_document("gendered_pronoun", rng) for _ in range(3000))
    assert not any(re.search(rf"\b{name}\b", questions) for name in test_names)
