"""Undo: a stack of steps that give back what was changed.

1. Before something is changed, the step that gives it back is pushed, so that no interruption finds a change without one.
2. `run` takes the last step first. A step leaves the stack only when it is done: an interrupted run can be called again, and
   every step must bear being run twice.
3. As a context manager it runs at the end of the block, whatever ended it; a Ctrl-C during the run does not stop it halfway.
"""

from collections.abc import Callable
from types import TracebackType

Step = Callable[[], None]
Push = Callable[[Step], None]


class Undo:
    """Steps back, last first; true while some are left."""

    def __init__(self) -> None:
        self._steps: list[Step] = []

    def push(self, step: Step) -> None:
        """Add the step that gives back what is changed next."""
        self._steps.append(step)

    def run(self) -> None:
        """Run all steps, the last first, until none is left."""
        while self._steps:
            self._steps[-1]()
            self._steps.pop()

    def __len__(self) -> int:
        return len(self._steps)

    def __enter__(self) -> "Undo":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.run()
        finally:  # a Ctrl-C may hit the first run; what is done is not done again
            self.run()
