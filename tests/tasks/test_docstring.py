"""Docstring: the answer is the argument after the last documented one."""

import re

from swd_lens.tasks.generators import generate


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
