"""What killed processes leave behind."""

import os
import signal
from pathlib import Path

import pytest

from swd_lens.base.files import workplace_beside
from tests.forks import Died, run


def left_by_a_killed_process(path: Path) -> Path:
    """The workplace beside a file that a process had, with half a file in it, when it was killed."""
    before = set(path.parent.glob(".*.part"))

    def begin() -> None:
        with workplace_beside(path) as workplace:
            (workplace / path.name).write_bytes(b"half a file")
            os.kill(os.getpid(), signal.SIGKILL)

    with pytest.raises(Died, match=f"signal {signal.SIGKILL:d}"):
        run(begin)
    (left,) = set(path.parent.glob(".*.part")) - before
    return left
