"""Damage cases: a thing on disk, damaged, is read as users read it; it ends in the original numbers or in its documented error.

1. kinds.py says what there is, how it is read, and which classes of errors its damage may have.
2. A case is a number below a seed: it chooses kind and damage, so that it can be replayed alone.
3. An error is documented if it has one of the classes, raised by a check of ours, and the path in it.
   FileNotFoundError is right for whatever was removed.
"""

import contextlib
import os
import random
import resource
import shutil
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tqdm import tqdm

from swd_lens.base.errors import UnsealedFileWarning
from tests.fuzz import calls
from tests.fuzz.damages import damage
from tests.fuzz.kinds import KINDS, Told
from tests.fuzz.values import Values, difference, values_of

SECONDS = 20  # of a case; it takes 0.2 at most
# What a case can end in; for "other values" see the docstring of the package.
OUTCOMES = ("original", "documented error", "other values", "silent", "other exception", "hang", "lost")
FAULTS = OUTCOMES[3:]


@dataclass(frozen=True)
class Outcome:
    """How a case ended.

    Attributes:
        number, kind, damage: which case it was; `damage` in words.
        outcome: one of OUTCOMES.
        text: what came out, where it is a fault.
    """

    number: int
    kind: str
    damage: str
    outcome: str
    text: str = ""


class Fixtures:
    """Every kind built once, with the values that it gives undamaged. A context manager: the folder goes at its end.

    Args:
        kinds: names of KINDS that cases are drawn from.
        keep: where damaged things are kept, by number.
    """

    def __init__(self, kinds: Sequence[str] = tuple(KINDS), keep: Path | None = None):
        self.kinds, self.keep = list(kinds), keep

    def __enter__(self) -> "Fixtures":
        memory = Path("/dev/shm")
        parent = memory if os.access(memory, os.W_OK) else None
        self.folder = Path(tempfile.mkdtemp(prefix="swd-fuzz-", dir=parent))
        self.originals: dict[str, Values] = {}
        self.others: dict[str, Values] = {}  # of version 1, where it can be read; a call refuses it
        for name in self.kinds:
            kind = KINDS[name]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                for version in (0, 1):
                    (self.path(name, version)).mkdir(parents=True)
                    kind.build(self.path(name, version), version)
                self.originals[name] = self._read(name, 0)
                with contextlib.suppress(ValueError):
                    self.others[name] = self._read(name, 1)
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def path(self, kind: str, version: int) -> Path:
        return self.folder / "built" / f"{self.kinds.index(kind)}.{version}"

    def _read(self, name: str, version: int) -> Values:
        kind, case = KINDS[name], self.folder / "original"
        shutil.copytree(self.path(name, version), case)
        try:
            if not kind.live:
                return values_of(kind.read(case))
            return values_of(_finish(kind.read(case), lambda: None))
        finally:
            shutil.rmtree(case)

    # ------------------------------------------------------------------ cases

    def drawn(self, seed: int, number: int) -> tuple[str, random.Random]:
        """The kind of a case, and the generator that draws its damage."""
        rng = random.Random(f"{seed}/{number}")
        return rng.choices(self.kinds, [KINDS[name].weight for name in self.kinds])[0], rng

    def try_case(self, seed: int, number: int) -> Outcome:
        """Try one case; to be called in a forked child, whose memory is limited."""
        name, rng = self.drawn(seed, number)
        kind, jail = KINDS[name], self.folder / f"case.{os.getpid()}"
        case, done = jail / "task", []
        shutil.copytree(self.path(name, 0), case)

        def harm() -> None:
            files = sorted(f.relative_to(case).as_posix() for f in case.glob(kind.names) if f.is_file() and f.name[0] != ".")
            others = case if kind.live else self.path(name, 1)
            done.append(damage(rng, case, others, files, kind.sealed))
            if self.keep is not None:
                shutil.copytree(case, self.keep / str(number), symlinks=True)

        def ended(outcome: str, text: str = "") -> Outcome:
            return Outcome(number, name, done[0].text if done else "", outcome, text[:500])

        _limit_memory()
        try:
            with warnings.catch_warnings(record=True) as warned, _time_limit():
                warnings.simplefilter("always")
                try:
                    if kind.live:
                        value = values_of(_finish(kind.read(case), harm))
                    else:
                        harm()
                        value = values_of(kind.read(case))
                except _TooLong:
                    return ended("hang", "no end")
                except Exception as raised:
                    gone = done[0].removed if done else False
                    fault = undocumented(raised, kind.errors, case, gone, not name.startswith("task"))
                    return ended("other exception", fault) if fault else ended("documented error")
            if outside := sorted(path.name for path in jail.iterdir() if path != case):
                return ended("other exception", f"wrote outside of the folder: {outside}")
            if not (changed := difference(self.originals[name], value)):
                return ended("original")
            whole = name in self.others and not difference(self.others[name], value)
            if done[0].rehashed or not kind.sealed or whole:
                return ended("other values")
            unsealed = any(issubclass(each.category, UnsealedFileWarning) for each in warned)
            return ended("silent", ("warned that there is no hash; " if unsealed else "") + changed)
        finally:
            shutil.rmtree(jail, ignore_errors=True)


def _finish(steps: Iterator[Any], between: Callable[[], None]) -> Any:
    """A generator's return value; `between` is done at its one yield."""
    next(steps)
    between()
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("two yields")


class _TooLong(BaseException):
    """A case did not end."""


@contextlib.contextmanager
def _time_limit() -> Iterator[None]:
    def stop(*_: Any) -> None:
        raise _TooLong

    former = signal.signal(signal.SIGALRM, stop)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


def _limit_memory(more: int = 3 << 30) -> None:
    """No case may take more than this beyond what the process has: a damaged number must not fill the machine."""
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_AS, (now + more, hard))


# ---------------------------------------------------------------------------------------------- documented errors


def undocumented(raised: BaseException, classes: Sequence[str], path: Path, gone: bool = False, by_path: bool = True) -> str:
    """ "" if this is a documented error of one of the classes that names the path; else what it is, with its place.

    Args:
        gone: whether a file is no longer there, or a folder stands in its place.
        by_path: whether the message holds the whole path; of the files of tasks it may be the name.
    """
    kind, message = type(raised).__name__, str(raised)
    if isinstance(raised, Told) and message.startswith("error: "):
        return ""
    known = kind in classes or (gone and isinstance(raised, OSError))
    frames = traceback.extract_tb(raised.__traceback__)
    # What the system says of a file that is not there, or is a folder, is clear enough; else a check of ours must say it.
    checked = (gone and isinstance(raised, OSError)) or (
        "/swd_lens/" in frames[-1].filename and (frames[-1].line or "").startswith("raise ")
    )
    # Factors whose hashes were made again are refused by the host that they do not fit, which names the site.
    named = str(path) in message or (not by_path and path.name in message) or kind == "AttachError"
    if known and checked and named:
        return ""
    reason = "" if known else "of another class: " if checked else ""
    reason = reason or ("" if checked else "of no check: ") or "without the path: "
    frames = [frame for frame in frames if "/swd_lens/" in frame.filename]
    spot = f" at {frames[-1].filename.rpartition('/swd_lens/')[2]}:{frames[-1].lineno}" if frames else ""
    return f"{reason}{kind}{spot}: {message[:300]}"


def prepare() -> None:
    """Make what all forked children share."""
    torch.set_num_threads(1)
    tqdm.monitor_interval = 0  # no thread may run where others are forked
    warnings.filterwarnings("ignore", message=".*deprecated.*")
    transformers.utils.logging.disable_progress_bar()
    calls.host()
