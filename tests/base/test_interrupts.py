"""Ctrl-C where it would part what belongs together: it waits a moment, and comes exactly once."""

import gc
import signal
import threading
import time
from collections.abc import Callable
from contextlib import contextmanager

import pytest
import torch

from swd_lens.base import interrupts
from swd_lens.base.interrupts import Undo, hold_back_interrupts, joint, unparted
from swd_lens.base.surroundings import with_torch_defaults
from tests.base.test_surroundings import in_a_thread

HANDLER = signal.default_int_handler


@pytest.fixture(autouse=True)
def the_callers_handler():
    gc.collect()  # hosts that earlier tests dropped with their units
    with Undo() as undo:
        hold_back_interrupts(undo.push)
    assert signal.getsignal(signal.SIGINT) is HANDLER
    yield
    assert signal.getsignal(signal.SIGINT) is HANDLER


def ctrl_c(times=1):
    for _ in range(times):
        signal.raise_signal(signal.SIGINT)


@unparted
def two_steps(done, times=1):
    done.append("first")
    ctrl_c(times)
    done.append("second")


def test_an_interrupt_waits_until_an_unparted_function_has_ended():
    undo, done = Undo(), []
    hold_back_interrupts(undo.push)
    with pytest.raises(KeyboardInterrupt):
        two_steps(done, times=3)  # however many come while one waits, it is one
        while True:
            time.sleep(1)  # ended by the interrupt, not a second later
    assert done == ["first", "second"]
    undo.run()
    time.sleep(5 * interrupts._AGAIN)


def test_an_interrupt_that_still_waits_comes_when_the_handler_goes():
    done = []
    with pytest.raises(KeyboardInterrupt), Undo() as undo:
        hold_back_interrupts(undo.push)
        undo.push(lambda: two_steps(done))
    assert done == ["first", "second"] and not undo
    time.sleep(5 * interrupts._AGAIN)  # and not once more
    with Undo() as undo:  # elsewhere it comes at once
        hold_back_interrupts(undo.push)
        with pytest.raises(KeyboardInterrupt):
            ctrl_c()


def test_own_lines_of_a_joint_wait_and_what_it_calls_does_not():
    @joint
    def run(step):
        return step()

    frames = []
    run(lambda: frames.append(__import__("sys")._getframe()))
    inner = frames[0]
    assert not interrupts.is_unparted(inner) and interrupts.is_unparted(inner.f_back)


def test_contexts_that_a_call_leaves_are_not_parted():
    left = []

    class Mode:
        def __enter__(self):
            return self

        def __exit__(self, *_):
            ctrl_c()
            left.append("mode")

    @contextmanager
    def generated():
        try:
            yield
        finally:
            ctrl_c()
            left.append("generated")

    @with_torch_defaults
    def call():
        with generated(), Mode(), torch.no_grad():
            pass
        time.sleep(1)

    with pytest.raises(KeyboardInterrupt):
        call()
    assert left == ["mode", "generated"] and torch.is_grad_enabled()


def test_nothing_waits_for_ever(monkeypatch):
    monkeypatch.setattr(interrupts, "PATIENCE", 0.05)

    @unparted
    def endless():
        ctrl_c()
        while True:
            time.sleep(0.001)

    with Undo() as undo:
        hold_back_interrupts(undo.push)
        with pytest.raises(KeyboardInterrupt):
            endless()


def test_the_callers_own_handler_is_asked_and_one_that_was_set_meanwhile_stays():
    seen = []

    def own(number, frame):
        seen.append(number)

    signal.signal(signal.SIGINT, own)
    try:
        with Undo() as undo:
            hold_back_interrupts(undo.push)
            hold_back_interrupts(undo.push)
            ctrl_c()
        assert seen == [signal.SIGINT] and signal.getsignal(signal.SIGINT) is own
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # nothing in Python that could be asked
        with Undo() as undo:
            hold_back_interrupts(undo.push)
            assert not undo and signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, HANDLER)
    seen, undo = [], Undo()
    hold_back_interrupts(undo.push)
    ours = signal.getsignal(signal.SIGINT)
    try:
        signal.signal(signal.SIGINT, lambda number, frame: (seen.append(number), ours(number, frame)))
        meanwhile = signal.getsignal(signal.SIGINT)
        undo.run()
        assert signal.getsignal(signal.SIGINT) is meanwhile
        with Undo() as undo:
            hold_back_interrupts(undo.push)
            with pytest.raises(KeyboardInterrupt):  # ours, the one set meanwhile, ours of before, the caller's
                ctrl_c()
        assert len(seen) == 1
    finally:
        signal.signal(signal.SIGINT, HANDLER)


def test_other_threads_leave_the_handler_alone():
    undo = Undo()
    assert in_a_thread(lambda: hold_back_interrupts(undo.push)) is None and not undo
    hold_back_interrupts(undo.push)
    in_a_thread(undo.run)  # cannot take it away; the next call of the main thread does
    assert not undo and signal.getsignal(signal.SIGINT) is not HANDLER
    with Undo() as undo:
        hold_back_interrupts(undo.push)
    assert threading.current_thread() is threading.main_thread()
    undo = Undo()
    hold_back_interrupts(undo.push)
    del undo  # a host that was dropped with its units wants nothing
    with Undo() as undo:
        hold_back_interrupts(undo.push)


# ---------------------------------------------------------------------------------------------- undo


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
