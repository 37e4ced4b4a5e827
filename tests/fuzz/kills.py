"""Kills: SIGKILL at a random moment, then the same call again; what it gives is that of an undisturbed run, to the bit.

1. A call of calls.py runs in a forked child and is killed: after a random part of its time, or at a random one of its operations
   on files (files opened for writing, renames, removals, folders made; Python's audit events count them), which can be replayed.
2. Up to two further attempts are killed as well. The last one runs through: its values must be those of an undisturbed run,
   the files that are left must have the same names, the temporary folder must be empty, and no process may be left.
3. `save` of an object over another version is killed likewise: what is loaded then is all of the old one or all of the new one.
"""

import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.forks import Child, Died, Hang, Raised, run
from tests.fuzz import calls
from tests.fuzz.cases import Outcome
from tests.fuzz.values import Values, difference, values_of

SECONDS = 240  # a hang, also on a busy machine
# How often each is killed; workers=2 starts processes that import torch, which takes long.
_WEIGHTS = {"factorize, workers=2": 0.3, "allocate": 0.5, "run_study": 1.0, "run_study, in parts": 1.0}
_EVENTS = ("open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.truncate")
_SAVE = "save: "


@dataclass(frozen=True)
class Undisturbed:
    """A call that nothing disturbed.

    Attributes:
        values: of its result.
        files: names of what it left.
        seconds: that it took.
        n_events: how many operations on files it did.
    """

    values: Values
    files: list[str]
    seconds: float
    n_events: int


class Kills:
    """The calls, run once undisturbed. A context manager: the folder goes at its end."""

    names = (*calls.CALLS, *(f"{_SAVE}{name}" for name in calls.SAVES))

    def __enter__(self) -> "Kills":
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="swd-kill-", dir=memory if os.access(memory, os.W_OK) else None))
        self._undisturbed: dict[str, Undisturbed] = {}
        self._versions: dict[str, tuple[Values, Values]] = {}
        calls.on_a_bridge()
        # Before children are forked, which would do it each for itself; saves first: `run_study` saves a run that is there.
        for name in reversed(self.names):
            if name != "factorize, workers=2":
                self._old_and_new(name) if name.startswith(_SAVE) else self._whole(name)
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_kill(self, seed: int, number: int) -> Outcome:
        """Kill one call, as seed and number say."""
        rng = random.Random(f"kill {seed}/{number}")
        # Half of all are calls, half are saves, which are so short.
        some = list(calls.CALLS) if rng.random() < 0.7 else [f"{_SAVE}{name}" for name in calls.SAVES]
        name = rng.choices(some, [_WEIGHTS.get(each, 2.0) for each in some])[0]
        case = self.folder / f"{number}"
        case.mkdir()
        try:
            how, outcome, text = (self._save if name.startswith(_SAVE) else self._call)(name, rng, case)
            return Outcome(number, f"kill, {name}", how, outcome, text[:500])
        finally:
            shutil.rmtree(case, ignore_errors=True)

    # ------------------------------------------------------------------ calls

    def _call(self, name: str, rng: random.Random, case: Path) -> tuple[str, str, str]:
        call, whole = calls.CALLS[name], self._whole(name)
        out, hows = case / "out", []
        for _ in range(rng.choice((1, 1, 2, 3))):
            hows.append(self._killed(lambda: call(out), rng, whole.seconds, whole.n_events, case))
        how = "; ".join(hows)
        if name.startswith("factorize") and (out / "factors.json").exists() and (fault := _unreadable(out)):
            return how, "lost", f"not a FactorSet after the kill: {fault}"
        try:
            values = run(lambda: _quietly(call, out, case), SECONDS)
        except (Hang, Died) as end:
            return how, "hang" if isinstance(end, Hang) else "other exception", str(end)
        except Raised as raised:
            return how, "lost", raised.text
        if changed := difference(whole.values, values):
            return how, "silent", changed
        if left := sorted(set(_files(out)) ^ set(whole.files)):
            return how, "other exception", f"left over or missing after success: {left[:5]}"
        if left := _temporary(case):
            return how, "other exception", f"left in the temporary folder: {left[:5]}"
        if left := _processes(case):
            return how, "other exception", f"processes still at work: {left}"
        return how, "original", ""

    def _whole(self, name: str) -> Undisturbed:
        if name not in self._undisturbed:
            case = self.folder / f"whole.{os.getpid()}"
            case.mkdir()
            started = time.monotonic()
            values, n_events = run(lambda: _counted(calls.CALLS[name], case / "out", case), SECONDS)
            seconds = time.monotonic() - started
            self._undisturbed[name] = Undisturbed(values, _files(case / "out"), seconds, n_events)
            shutil.rmtree(case)
        return self._undisturbed[name]

    def _killed(self, function: Callable[[], Any], rng: random.Random, seconds: float, n_events: int, case: Path) -> str:
        """Run it and kill it at a moment drawn from the generator; says when."""
        if rng.random() < 0.5:
            event = rng.randint(1, max(1, n_events))
            child = Child(lambda: _quietly(lambda _: function(), case, case, killed_at=event))
            with suppress(Died, Raised):
                child.wait(SECONDS)
            return f"killed at operation {event} of {n_events}"
        share = rng.random()
        child = Child(lambda: _quietly(lambda _: function(), case, case))
        time.sleep(share * seconds)
        child.kill()
        with suppress(Died, Raised):
            child.wait(SECONDS)
        return f"killed after {share:.2f} of {seconds:.2f} s"

    # ------------------------------------------------------------------ saves

    def _save(self, name: str, rng: random.Random, case: Path) -> tuple[str, str, str]:
        saved = calls.SAVES[name.removeprefix(_SAVE)]
        path = case / "out" / saved.name
        old, new = self._old_and_new(name)
        fresh = rng.random() < 0.3
        if not fresh:
            saved.save(path, 0)
        n_events = self._n_events(name)
        how = self._killed(lambda: saved.save(path, 1), rng, 0.02, n_events, case) + (", nothing there" if fresh else "")
        try:
            values = run(lambda: values_of(saved.load(path)), SECONDS)
        except Raised as raised:
            if not fresh:
                return how, "lost", f"neither the old nor the new one: {raised.text}"
        except (Hang, Died) as end:
            return how, "hang" if isinstance(end, Hang) else "other exception", str(end)
        else:
            if difference(new, values) and (fresh or difference(old, values)):
                return how, "silent", f"neither the old nor the new one: {difference(new, values)}"
        try:
            values = run(lambda: _loaded_again(saved, path), SECONDS)
        except (Hang, Died, Raised) as end:
            return how, "other exception", f"saved again: {end}"
        if changed := difference(new, values):
            return how, "silent", f"saved again: {changed}"
        if left := [each for each in _files(case / "out") if ".part" in each or each.rpartition("/")[2].startswith(".")]:
            return how, "other exception", f"left over after success: {left[:5]}"
        return how, "original", ""

    def _old_and_new(self, name: str) -> tuple[Values, Values]:
        if name not in self._versions:
            saved, both = calls.SAVES[name.removeprefix(_SAVE)], []
            for version in (0, 1):
                case = self.folder / "versions"
                saved.save(case / saved.name, version)
                both.append(values_of(saved.load(case / saved.name)))
                shutil.rmtree(case)
            self._versions[name] = (both[0], both[1])
        return self._versions[name]

    def _n_events(self, name: str) -> int:
        if name not in self._undisturbed:
            saved, case = calls.SAVES[name.removeprefix(_SAVE)], self.folder / f"counted.{os.getpid()}"
            saved.save(case / saved.name, 0)
            _, n_events = run(lambda: _counted(lambda path: saved.save(path, 1), case / saved.name, case), SECONDS)
            shutil.rmtree(case)
            self._undisturbed[name] = Undisturbed({}, [], 0.02, n_events)
        return self._undisturbed[name].n_events


def _loaded_again(saved: calls.Saved, path: Path) -> Values:
    saved.save(path, 1)
    return values_of(saved.load(path))


# ---------------------------------------------------------------------------------------------- in the child


def _quietly(call: Callable[[Path], Any], out: Path, case: Path, killed_at: int = 0) -> Values:
    """The values of a call, in a child: temporary files below the case's folder, killed at an operation if so asked."""
    temporary = case / "tmp"
    temporary.mkdir(exist_ok=True)
    os.environ["TMPDIR"] = str(temporary)
    tempfile.tempdir = None
    if killed_at:
        _count(killed_at)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        value = call(out)
        return values_of(value) if value is not None else {}


def _counted(call: Callable[[Path], Any], out: Path, case: Path) -> tuple[Values, int]:
    seen = _count(0)
    return _quietly(call, out, case), seen[0]


def _count(killed_at: int) -> list[int]:
    """Count this process's operations on files from now on, and end it at one of them; the count is in a list of one."""
    seen = [0]

    def hook(event: str, arguments: Any) -> None:
        if event not in _EVENTS:
            return
        if event == "open":
            flags = arguments[2]
            if not isinstance(flags, int) or not flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                return
        seen[0] += 1
        if seen[0] == killed_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)
    return seen


# ---------------------------------------------------------------------------------------------- what is left


def _files(out: Path) -> list[str]:
    return sorted(path.relative_to(out).as_posix() for path in out.rglob("*")) if out.is_dir() else []


def _temporary(case: Path) -> list[str]:
    return sorted(path.name for path in (case / "tmp").iterdir()) if (case / "tmp").is_dir() else []


def _processes(case: Path) -> list[str]:
    """Processes whose temporary folder is the case's; they are given ten seconds to notice that they are alone."""
    end = time.monotonic() + 10
    while True:
        left = []
        for process in psutil.process_iter(["pid"]):
            with suppress(psutil.Error):
                if process.pid != os.getpid() and process.environ().get("TMPDIR") == str(case / "tmp"):
                    left.append(f"{process.pid} {process.name()}")
        if not left or time.monotonic() > end:
            return left
        time.sleep(0.2)


def _unreadable(out: Path) -> str:
    """Why the folder is no FactorSet; "" where it is one."""
    try:
        run(lambda: values_of(calls.swd.FactorSet.load(out)), SECONDS)
    except (Hang, Died, Raised) as end:
        return str(end)
    return ""
