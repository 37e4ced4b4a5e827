"""`Undo`, a stack of steps that give back what was changed.

1. Before something is changed, the step that gives it back is pushed, so that no interruption finds a change without one.
2. `run` takes the last step first. A step leaves the stack only when it is done: an interrupted run can be called again, and
   every step must bear being run twice.
3. As a context manager it runs at the end of the block, whatever ended it; `if_broken` is a block that runs it only where an
   exception ends the block. Where interrupts are held back (interrupts.py), Ctrl-C waits until all of it is done.
"""

from types import TracebackType

from swd_lens.base.interrupts import Step, unparted


class Undo:
    """A stack of steps that undo changes, the last first; true while some are left."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def push(self, step: Step) -> None:
        """Add the step that gives back what is changed next."""
        self._steps.append(step)

    @unparted
    def run(self) -> None:
        """Run all steps, the last first, until none is left."""
        while self._steps:
            self._steps[-1]()
            self._steps.pop()

    def if_broken(self) -> "IfBroken":
        """A block: an exception that ends it runs the steps, otherwise they stay."""
        return IfBroken(self)

    @unparted
    def __len__(self) -> int:
        return len(self._steps)

    def __enter__(self) -> "Undo":
        return self

    @unparted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            self.run()
        finally:  # where nothing holds an interrupt back it may hit the first run; what is done is not done again
            self.run()


class IfBroken:
    """See `Undo.if_broken`."""

    def __init__(self, undo: Undo):
        self.undo = undo

    def __enter__(self) -> None:
        return None

    @unparted
    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:
            self.undo.__exit__(kind, error, trace)
