"""Several processes at one folder: whatever they do at once, nothing is lost and nobody sees half of anything.

A round: 2, 3 or 5 forked processes start together; each saves, loads, or makes a resumable call, on one folder (or file), which
is empty or holds something at the beginning. It is checked that

1. a writer ends well, or is refused (FolderInUseError; ResumeError, where the folder holds what the call would not make);
2. a reader gets all of something that one of them wrote (of `factorize`: some of its first sites, finished), or what was there
   before; FileNotFoundError, or the error that nothing is there yet, only where nothing was there before;
3. at the end the folder holds what one of the successful writers wrote, whole, and no leftovers.
"""

import os
import random
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.forks import Child, Died, Hang, Raised
from tests.fuzz import calls
from tests.fuzz.cases import Outcome
from tests.fuzz.values import Values, difference, values_of

SECONDS = 240  # a hang, also on a busy machine
SIZES = (2, 3, 5)


@dataclass(frozen=True)
class Shared:
    """A folder that several use.

    Attributes:
        writers: name -> what writes; its result is what it wrote.
        load: reads it.
        absent: errors that mean that nothing is there yet.
        growing: whether a reader may see the first part of a result.
        name: of the file below the round's folder; "" where the folder itself is the thing.
    """

    writers: dict[str, Callable[[Path], Any]]
    load: Callable[[Path], Any]
    absent: tuple[str, ...] = ("FileNotFoundError",)
    growing: bool = False
    name: str = ""


def _saves(name: str, *absent: str) -> Shared:
    saved = calls.SAVES[name]

    def writer(version: int) -> Callable[[Path], Any]:
        return lambda path: saved.save(path, version)

    return Shared(
        {f"save {version}": writer(version) for version in (0, 1)}, saved.load, absent or ("FileNotFoundError",), name=saved.name
    )


def _other_factorize(out: Path) -> Any:
    return calls.swd.factorize(calls.host(), "mlp_out", tokens=calls.HELD, out=out, **calls.QUICK)


def _learned(out: Path) -> Any:
    return calls.baselines.LearnedUnits.load(out)


_TUNED = {"finetune 0": calls.finetune, "finetune 1": lambda out: calls.finetune(out, 1)}
SHARED: dict[str, tuple[Shared, float]] = {
    "factors": (
        Shared(
            {
                "save 0": lambda path: calls.factors(0).save(path),
                "save 1": lambda path: calls.factors(1).save(path),
                "factorize": calls.factorize_calibrated,
                "factorize other": _other_factorize,
            },
            calls.swd.FactorSet.load,
            growing=True,
        ),
        6,
    ),
    "saved factors": (_saves("factors"), 3),
    "finetune": (Shared(_TUNED, lambda out: calls.swd.FactorSet.load(out / "factors")), 1),
    "transcoder": (
        Shared({"transcoder": calls.transcoder, "other": lambda out: calls.transcoder(out, 1)}, _learned, ("TrainError",)),
        1,
    ),
    "units": (_saves("transcoder units", "TrainError"), 1),
    "circuit": (_saves("circuit"), 1),
    "study": (_saves("study"), 1),
    "allocation": (_saves("allocation"), 0.5),
    "labels": (_saves("labels"), 0.5),
    "data_efficiency": (
        Shared(
            {"data_efficiency": calls.data_efficiency, "other": lambda out: calls.data_efficiency(out, 1)},
            lambda out: calls.DataEfficiency.load(out / "points.json"),
            growing=True,
        ),
        1,
    ),
    "replace_model": (
        Shared(
            {"replace": calls.replace_model, "other": lambda out: calls.replace_model(out, 1)},
            lambda out: calls.swd.FactorSet.load(out / "factors"),
            growing=True,
        ),
        0.5,
    ),
}
_READING, _SAVES = 0.15, 4  # seconds that a reader reads, and how often a save is made
_REFUSALS = ("FolderInUseError", "ResumeError")


class Rounds:
    """Rounds of several processes. A context manager: the folder goes at its end."""

    def __enter__(self) -> "Rounds":
        memory = Path("/dev/shm")
        self.folder = Path(tempfile.mkdtemp(prefix="swd-many-", dir=memory if os.access(memory, os.W_OK) else None))
        self._alone: dict[tuple[str, str], Values] = {}
        for name, (shared, _) in SHARED.items():  # before children are forked, which would do it each for itself
            for role in shared.writers:
                self._alone_values(name, role)
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_round(self, seed: int, number: int) -> Outcome:
        """One round; how many processes take part goes round with its number."""
        rng = random.Random(f"round {seed}/{number}")
        size = SIZES[number % len(SIZES)]
        name = rng.choices(list(SHARED), [weight for _, weight in SHARED.values()])[0]
        shared = SHARED[name][0]
        roles = [rng.choice([*shared.writers, "load"]) for _ in range(size)]
        roles[0] = rng.choice(list(shared.writers))  # one of them writes
        before = rng.choice([None, *shared.writers])
        case = self.folder / f"{number}"
        case.mkdir()
        try:
            outcome, text = self._round(name, shared, roles, before, case, rng)
        finally:
            shutil.rmtree(case, ignore_errors=True)
        return Outcome(number, f"{size} processes", f"{name}, {before} before: {', '.join(roles)}", outcome, text[:500])

    def _round(
        self, name: str, shared: Shared, roles: list[str], before: str | None, case: Path, rng: random.Random
    ) -> tuple[str, str]:
        path = case / "out" / shared.name
        known = {role: self._alone_values(name, role) for role in shared.writers}
        if before is not None:
            _quiet(lambda: shared.writers[before](path))
        starts = time.monotonic() + 0.02
        delays = [rng.random() * 0.05 for _ in roles]
        children = []
        for role, delay in zip(roles, delays, strict=True):
            work = (lambda: _read_often(shared, path)) if role == "load" else (lambda r=role: _written(shared, r, path))
            children.append(Child(lambda w=work, d=delay: _at(starts + d, w)))
        ended, succeeded, fault = [], [], ("", "")
        for role, child in zip(roles, children, strict=True):
            try:
                seen = child.wait(SECONDS)
            except Hang as end:
                fault = ("hang", f"{role}: {end}")
            except Died as end:
                fault = ("other exception", f"{role}: {end}")
            except Raised as raised:
                kind = raised.classes[0].__name__
                allowed = (*shared.absent,) if role == "load" and before is None else ()
                if kind not in (*allowed, *(_REFUSALS if role != "load" else ())):
                    fault = ("other exception", f"{role}: {raised.text} {raised.trace[-400:]}")
                ended.append(kind)
            else:
                if role == "load":
                    for values in seen:
                        if all(_differs(whole, values, shared.growing) for whole in known.values()):
                            fault = ("silent", f"a reader saw what nobody wrote: {difference(known[roles[0]], values)}")
                else:
                    succeeded.append(role)
        if fault[0]:
            return fault
        if not succeeded and before is None:
            if len(set(roles) - {"load"}) == 1 and all(kind in shared.absent for kind in ended):
                return "lost", "the only writer was refused"
            return "documented error", ""
        try:
            final = _loaded(shared, path)
        except Exception as raised:
            return "lost", f"unreadable at the end: {type(raised).__name__}: {raised}"
        possible = succeeded or [before]
        possible = [*possible, before] if before else possible
        if all(difference(known[str(role)], final) for role in possible):
            return (
                "lost",
                f"at the end: {difference(known[str(possible[0])], final)} ({', '.join(map(str, possible))} succeeded)",
            )
        left = [f.name for f in (case / "out").rglob(".*")]
        if left:
            return "other exception", f"left over: {left[:5]}"
        return ("documented error" if ended else "original"), ""

    def _alone_values(self, name: str, role: str) -> Values:
        """What the folder holds after this writer alone."""
        if (name, role) not in self._alone:
            shared, case = SHARED[name][0], self.folder / "alone"
            path = case / shared.name
            _quiet(lambda: shared.writers[role](path))
            self._alone[name, role] = _loaded(shared, path)
            shutil.rmtree(case)
        return self._alone[name, role]


def _quiet(function: Callable[[], Any]) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function()


def _loaded(shared: Shared, path: Path) -> Values:
    return _quiet(lambda: values_of(shared.load(path)))


def _read_often(shared: Shared, path: Path) -> list[Values]:
    """What is read while the others write; nothing where there is nothing yet, unless that stays so."""
    seen, end = [], time.monotonic() + _READING
    while not seen or time.monotonic() < end:
        try:
            values = _loaded(shared, path)
        except Exception as absent:
            if seen or time.monotonic() > end or type(absent).__name__ not in shared.absent:
                raise
            continue
        if values not in seen:
            seen.append(values)
    return seen


def _written(shared: Shared, role: str, path: Path) -> list[Values]:
    """Write; a save is repeated, so that others meet it."""
    for attempt in range(_SAVES if role.startswith("save") else 1):
        try:
            _quiet(lambda: shared.writers[role](path))
        except Exception as refusal:
            if attempt == 0 or type(refusal).__name__ not in _REFUSALS:
                raise
    return []


def _at(moment: float, work: Callable[[], list[Values]]) -> list[Values]:
    time.sleep(max(0.0, moment - time.monotonic()))
    return work()


def _differs(whole: Values, seen: Values, growing: bool) -> str:
    """Why this is not the whole (or, if it may be growing, a part of it); "" where it is."""
    if not growing:
        return difference(whole, seen)
    counted = {name for name in seen if name.endswith((".n", ".columns", "order")) or ".order." in name}
    part = {name: value for name, value in seen.items() if name not in counted}
    return difference({name: whole[name] for name in part if name in whole}, part)
