"""Forked children: an answer comes whole or not at all."""

import time

import pytest

from tests.forks import Child, Died, Hang, Raised, run


def test_what_a_function_returns_or_raises_comes_back():
    answer = b"a" * (1 << 20)  # more than a pipe holds
    assert run(lambda: answer) == answer
    with pytest.raises(Raised, match="ValueError: no"):
        run(_refuse)


def test_a_child_killed_while_it_answers_died():
    child = Child(lambda: b"a" * (1 << 20))
    time.sleep(0.5)  # the pipe is full: it waits for its reader with a part of the answer sent
    child.kill()
    with pytest.raises(Died, match="signal 9"):
        child.wait(10)


def test_a_child_that_does_not_answer_is_killed():
    with pytest.raises(Hang):
        run(lambda: time.sleep(60), seconds=0.2)


def _refuse() -> None:
    raise ValueError("no")
