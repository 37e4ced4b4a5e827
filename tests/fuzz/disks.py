"""Disks: full ones, read-only ones, impossible outs and modes; each must end in the result or an OSError that names the path.

1. Full: the folder is a small tmpfs (where mounting is not permitted: files may not grow beyond a limit). Afterwards there is
   room, and the same call gives the undisturbed result. What was saved there before stays readable.
2. Read-only: a bind mount, or /proc where mounting is not permitted. Refused before any work: the host has not run.
3. Impossible: a file, a path below a file, a dangling link, a name that is too long.
4. umask: every file has the mode that the user's umask gives.
5. No locks: flock fails. Refused before any work, or (single files) written; with SWD_LENS_LOCK=0 the undisturbed result.
"""

import contextlib
import errno
import fcntl
import os
import random
import resource
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tests.forks import Died, Hang, Raised, run
from tests.fuzz import calls
from tests.fuzz.cases import Outcome
from tests.fuzz.kills import _quietly
from tests.fuzz.values import Values, difference, values_of

SECONDS = 240  # a hang, also on a busy machine
KINDS = ("full disk", "full disk, saved over", "read-only", "impossible out", "umask", "no locks")
# Without an out of their own, with processes, or of another host: what is left are commands whose work would be in vain.
_WITHOUT = ("allocate", "run_study", "factorize, workers=2", "factorize, bridge", "finetune, bridge")
_CALLS = [name for name in calls.CALLS if name not in _WITHOUT]


class Disks:
    """Disks in trouble. A context manager: folders and mounts go at its end."""

    def __enter__(self) -> "Disks":
        self.folder = Path(tempfile.mkdtemp(prefix="swd-disk-"))
        self._whole: dict[str, Values] = {}
        for name in (*_CALLS, *calls.SAVES):  # before children are forked, which would do it each for itself
            self._original(name)
            if name in calls.SAVES:
                self._original(name, 1)
        return self

    def __exit__(self, *error: Any) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def try_disk(self, seed: int, number: int) -> Outcome:
        """One call on one disk."""
        rng = random.Random(f"disk {seed}/{number}")
        kind = KINDS[number % len(KINDS)]
        name = rng.choice(list(calls.SAVES) if kind == "full disk, saved over" else [*_CALLS, *_CALLS, *calls.SAVES])
        case = self.folder / f"{number}"
        case.mkdir()
        try:
            how, outcome, text = getattr(self, f"_{kind.replace(', ', '_').replace(' ', '_').replace('-', '_')}")(name, case, rng)
        finally:
            shutil.rmtree(case, ignore_errors=True)
        return Outcome(number, kind, f"{name}: {how}", outcome, text[:500])

    # ------------------------------------------------------------------ full

    def _full_disk(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        size = rng.choice((4, 8, 16, 32, 64, 128)) * 1024
        with _small(case / "disk", size) as (disk, limit, grow):
            how = f"{size} bytes"
            ended = _ended(lambda: limit(lambda: self._done(name, disk / "out", case)), disk)
            if ended[0] not in ("original", "documented error"):
                return how, *ended
            grow()
            try:
                values = run(lambda: self._done(name, disk / "out", case), SECONDS)
            except (Raised, Died, Hang) as end:
                return how, "lost", f"with room again: {end}"
            if changed := difference(self._original(name), values):
                return how, "silent", f"with room again: {changed}"
            if left := [f.name for f in (disk / "out").rglob(".*")]:
                return how, "other exception", f"left over: {left[:5]}"
        return how, *ended

    def _full_disk_saved_over(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        saved = calls.SAVES[name]
        with _small(case / "disk", 1 << 20) as (disk, limit, _):
            path = disk / "out" / saved.name
            saved.save(path, 0)
            old = values_of(saved.load(path))
            free = shutil.disk_usage(disk).free
            left = rng.choice((0, 1, 2, 4)) * 4096
            (disk / "filler").write_bytes(b"x" * max(0, free - left))
            ended = _ended(lambda: limit(lambda: saved.save(path, 1)), disk)
            if ended[0] not in ("original", "documented error"):
                return f"{left} bytes free", *ended
            try:
                values = values_of(saved.load(path))
            except Exception as raised:
                return f"{left} bytes free", "lost", f"{type(raised).__name__}: {raised}"
            if difference(old, values) and difference(self._original(name, 1), values):
                return f"{left} bytes free", "silent", f"neither old nor new: {difference(old, values)}"
            if names := [f.name for f in (disk / "out").rglob(".*")]:
                return f"{left} bytes free", "other exception", f"left over: {names[:5]}"
        return f"{left} bytes free", *ended

    # ------------------------------------------------------------------ read-only, impossible

    def _read_only(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        disk = case / "disk"
        disk.mkdir()
        mounted = _mount("--bind", str(disk), str(disk)) and _mount("-o", "remount,ro,bind", str(disk))
        out = disk / "out" if mounted else Path("/proc/out")
        try:
            how = "a read-only mount" if mounted else "/proc"
            return how, *_ended(lambda: self._done(name, out, case, idle=True), out, fails=True)
        finally:
            if mounted:
                _unmount(disk)

    def _impossible_out(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        (case / "file").write_text("mine")
        (case / "link").symlink_to(case / "file" / "nowhere")
        how = rng.choice(("a file", "below a file", "a link to nowhere", "a name too long", "a null byte"))
        out = {
            "a file": case / "file",
            "below a file": case / "file" / "deep" / "out",
            "a link to nowhere": case / "link",
            "a name too long": case / ("x" * 300),
            "a null byte": case / "a\0b",
        }[how]
        if name in calls.SAVES and calls.SAVES[name].name:
            out = out / "x" if how == "a file" else out
        ended = _ended(lambda: self._done(name, out, case, idle=True), out, fails=True)
        if (case / "file").read_text() != "mine":
            return how, "lost", "the file was written over"
        return how, *ended

    def _umask(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        mask = rng.choice((0o022, 0o077, 0o002, 0o027))

        def masked() -> list[str]:
            os.umask(mask)
            self._done(name, case / "out", case)
            wrong = []
            for path in [case / "out", *(case / "out").rglob("*")]:
                mode, wanted = path.stat().st_mode & 0o777, (0o777 if path.is_dir() else 0o666) & ~mask
                if mode != wanted:
                    wrong.append(f"{path.relative_to(case)} is {mode:o}, not {wanted:o}")
            return wrong

        try:
            wrong = run(masked, SECONDS)
        except (Raised, Died, Hang) as end:
            return f"{mask:o}", "other exception", str(end)
        return f"{mask:o}", "silent" if wrong else "original", "; ".join(wrong[:3])

    # ------------------------------------------------------------------ no locks

    def _no_locks(self, name: str, case: Path, rng: random.Random) -> tuple[str, str, str]:
        code = rng.choice((errno.ENOLCK, errno.EOPNOTSUPP, errno.EIO, errno.ENOSYS))
        how, out = errno.errorcode[code], case / "out"

        def unlocked(*_: Any) -> None:
            raise OSError(code, os.strerror(code))

        def done(**named: Any) -> Values:  # in a child
            fcntl.flock = unlocked
            return self._done(name, out, case, **named)

        ended = _ended(lambda: done(idle=True), out)
        if ended[0] not in ("original", "documented error"):
            return how, *ended
        if ended[0] == "documented error" and out.exists():
            return how, "other exception", "refused, and something was made"

        def wanted() -> Values:
            os.environ["SWD_LENS_LOCK"] = "0"
            return done()

        try:
            values = run(wanted, SECONDS)
        except (Raised, Died, Hang) as end:
            return how, "lost", f"with SWD_LENS_LOCK=0: {end}"
        if changed := difference(self._original(name), values):
            return how, "silent", f"with SWD_LENS_LOCK=0: {changed}"
        if left := [f.name for f in out.rglob(".*")]:
            return how, "other exception", f"left over: {left[:5]}"
        return how, *ended

    # ------------------------------------------------------------------ what is done

    def _done(self, name: str, out: Path, case: Path, version: int = 0, idle: bool = False) -> Values:
        """Make the call, or save and load; `idle`: an error before which the host has run is one that came too late."""
        runs: list[int] = []
        handle = calls.host().blocks[0].register_forward_pre_hook(lambda *_: runs.append(1)) if idle else None
        try:
            if name in calls.CALLS:
                return _quietly(calls.CALLS[name], out, case)
            saved = calls.SAVES[name]
            saved.save(out / saved.name, version)
            return values_of(saved.load(out / saved.name))
        except OSError as raised:
            if runs and name in calls.CALLS:
                raise RuntimeError(f"only after {len(runs)} runs of the host: {raised}") from raised
            raise
        finally:
            if handle is not None:
                handle.remove()

    def _original(self, name: str, version: int = 0) -> Values:
        key = f"{name}/{version}"
        if key not in self._whole:
            case = self.folder / "whole"
            case.mkdir()
            self._whole[key] = self._done(name, case / "out", case, version)
            shutil.rmtree(case)
        return self._whole[key]


def _ended(function: Callable[[], Any], path: Path, fails: bool = False) -> tuple[str, str]:
    """How a call on a bad disk ended."""
    try:
        run(function, SECONDS)
    except Hang as end:
        return "hang", str(end)
    except Died as end:
        return "other exception", str(end)
    except Raised as raised:
        kinds = [kind.__name__ for kind in raised.classes]
        text = raised.text.replace("\0", "").replace("\\x00", "")
        if "OSError" not in kinds and not ("\0" in str(path) and "ValueError" in kinds):
            return "other exception", f"{raised.text} {raised.trace[-300:]}"
        if str(path).replace("\0", "") not in text and str(path.parent) not in text:
            return "other exception", f"without the path: {raised.text}"
        return "documented error", ""
    return ("silent", "it claims to have written") if fails else ("original", "")


# ---------------------------------------------------------------------------------------------- disks


@contextlib.contextmanager
def _small(folder: Path, size: int) -> Iterator[tuple[Path, Callable[..., Any], Callable[[], Any]]]:
    """A small disk, a function that runs another under its limit, and one that makes it large."""
    folder.mkdir()
    if _mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)):
        try:
            yield folder, lambda function: function(), lambda: _mount("-o", "remount,size=16m", str(folder))
        finally:
            _unmount(folder)
        return

    def limited(function: Callable[[], Any]) -> Any:  # of one file, in the child that calls this
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (size // 8, resource.RLIM_INFINITY))
        return function()

    yield folder, limited, lambda: None


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True).returncode == 0


def _unmount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], capture_output=True)
