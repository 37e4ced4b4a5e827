"""IOI: the answer is the name that is said once."""

import re

from swd_lens.tasks.generators import generate, words


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
