"""Undo: steps run last first, and an interrupted run resumes."""

from collections.abc import Callable

import pytest

from swd_lens.base.undo import Undo


def test_steps_run_last_first_and_leave_the_stack():
    done: list[int] = []
    undo = Undo()
    for i in range(3):
        undo.push(lambda i=i: done.append(i))
    assert undo and len(undo) == 3
    undo.run()
    undo.run()
    assert done == [2, 1, 0] and not undo


def interrupted_once(done: list[str]) -> Callable[[], None]:
    """A step that a Ctrl-C hits the first time."""
    interruptions = [KeyboardInterrupt()]

    def step() -> None:
        if interruptions:
            raise interruptions.pop()
        done.append("b")

    return step


def test_an_interrupted_run_goes_on_at_the_same_step_and_a_block_undoes_all_the_same():
    done: list[str] = []
    step = interrupted_once(done)
    undo = Undo()
    undo.push(lambda: done.append("a"))
    undo.push(step)
    with pytest.raises(KeyboardInterrupt):
        undo.run()
    assert done == [] and len(undo) == 2
    undo.run()
    assert done == ["b", "a"]
    done: list[str] = []
    step = interrupted_once(done)
    with pytest.raises(KeyboardInterrupt), Undo() as undo:
        undo.push(lambda: done.append("a"))
        undo.push(step)
    assert done == ["b", "a"] and not undo
