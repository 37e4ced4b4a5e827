"""TrainingFolder: keeps a training's recipe, progress, log and result.

    run.json                what decides the bits of the run (the recipe), and, once it is finished, its result
    checkpoint.safetensors  values and moments after some step; replaced by a rename, removed at the end
    log.jsonl               one line per step, no clock in it: the same run writes the same lines
    ...                     the result: a FactorSet in factors/, units in weights/ and units.json, or a model in model/

1. `opened` holds the folder for one call (base/writer.py) and compares recipes (base/step_cache.py). Another run is refused,
   every difference named; a finished one is returned as it is.
2. An interrupted run resumes from its checkpoint: later log lines are cut, and written again as the steps are repeated.
3. Nothing that changed on the disk is taken for what was written (base/sealed.py): run.json and the checkpoint carry their
   hashes, the checkpoint those of its recipe and of the log up to its step, a finished run.json those of the log and the result.
"""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from swd_lens.base.errors import ResumeError, TrainError
from swd_lens.base.files import naming, write_text
from swd_lens.base.sealed import altered, hashes_of, read_sealed, readable, require_hashes
from swd_lens.base.step_cache import HOW_TO_RESUME, CallFile
from swd_lens.base.writer import HOLDER, LOCK, require_writable, writing
from swd_lens.train.rows import Processes, launched

RUN, LOG, CHECKPOINT = "run.json", "log.jsonl", "checkpoint.safetensors"
WHAT = "a training run"
_KEY = ("checkpoint",)


@dataclass(frozen=True)
class Checkpoint:
    """The state of an interrupted run: the last step, what was saved after it, and the log up to there."""

    path: Path
    step: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Any]
    lines: list[dict[str, Any]]


class TrainingFolder:
    """The folder of any training run, made by `opened`: run.json, checkpoint.safetensors, log.jsonl, and whatever its result is.

    recipe: what decides the bits of the run that is called for, plain values; call: the function that trains, as errors name it;
    result: files that stand there at the end, beside the run's own.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], call: str, result: Sequence[str]):
        self.path, self.call, self.result = path, call, tuple(result)
        self._run = CallFile(path, RUN, recipe, what=WHAT)
        self.recipe: dict[str, Any] = self._run.settings
        self._log_digest = hashlib.sha256()
        self._saved = 0

    @contextmanager
    def opened(self, overwrite: bool, n_bytes: int = 0, processes: Processes | None = None) -> Iterator[bool]:
        """Hold the folder while the block runs (a finished run is only read); yields whether this very run is finished there.

        overwrite: start again, in place of the run that the folder holds; n_bytes: about how much will be written; processes:
        where training is shared by several, the main one holds the folder. None: each process that a launcher started trains for
        itself; the first has the folder, the others wait for it and find a finished run.

        Raises ResumeError: it holds another run, something else, or a finished run whose files have changed; FolderInUseError:
        another call holds it; OSError: it cannot be written.
        """
        if processes is None and overwrite and launched():
            raise TrainError(
                f"{self.call} with overwrite=True was started by a launcher in several processes, each of which would "
                f"start {self.path} again. Remove the folder before, or call {self.call} in one process"
            )
        if not self.path.is_dir():
            require_writable(self.path, n_bytes)
        if not overwrite and self.check():
            if any((self.path / name).exists() for name in (CHECKPOINT, LOCK, HOLDER)):  # of a kill at the very end
                with suppress(OSError), writing(self.path, self.call):
                    (self.path / CHECKPOINT).unlink(missing_ok=True)
            yield True
            return
        finished = False
        with ExitStack() as held:
            if processes is None or processes.main:
                waiting = processes is None and launched()
                held.enter_context(writing(self.path, self.call, n_bytes, wait=waiting, alone=True))
                finished = not overwrite and self.check()  # another call may have ended meanwhile
                if overwrite:
                    self.begin()
            if processes is not None:
                finished = processes.agreed(finished)
            yield finished

    def check(self) -> bool:
        """Whether this very run is finished there; what it wrote at the end is as it was. Raises ResumeError: it holds another
        run, something else, or other files than were written."""
        run = self._run.read()
        if run is None:
            names = {part for file in self.result for part in (Path(file).parts[0], Path(file).name)}
            if others := [name for name in (LOG, CHECKPOINT, *names) if (self.path / name).exists()]:
                raise ResumeError(
                    f"{self.path} holds {', '.join(others)} without {RUN}: it is no folder of {self.call}. {HOW_TO_RESUME}"
                )
            return False
        with readable(self._run.path, WHAT, ResumeError):
            if run["finished"]:
                require_hashes(self.path, run["files"], WHAT, ResumeError)
            return bool(run["finished"])

    def outcome(self) -> dict[str, Any]:
        """The result as `end` was given it. Raises ResumeError: the run does not say."""
        run = read_sealed(self._run.path, WHAT, ResumeError)
        with readable(self._run.path, WHAT, ResumeError):
            return dict(run["result"])

    def checkpoint(self) -> Checkpoint | None:
        """The state that an interrupted run resumes from; None where it begins. Raises ResumeError: the checkpoint, or the log
        up to it, is not what was written."""
        path = self.path / CHECKPOINT
        if not path.is_file():
            return None
        tensors, values = self._run.read_tensors(path, _KEY, WHAT)
        with readable(path, WHAT, ResumeError):
            self._saved, log = int(values["step"]), values["log"]
        lines = [line for line in self.lines() if line["step"] <= self._saved]
        if log != hashlib.sha256(_text(lines)).hexdigest():
            raise ResumeError(altered(self.path / LOG, f"the log of {WHAT}"))
        return Checkpoint(path, self._saved, tensors, values, lines)

    def kept(self, what: str) -> str:
        """The checkpoint in words: "step 300" for what="step"."""
        return f"{what} {self._saved}" if self._saved else "no checkpoint yet"

    def lines(self) -> list[dict[str, Any]]:
        """The log, as far as its lines are whole."""
        lines = []
        if (self.path / LOG).is_file():
            for text in (self.path / LOG).read_bytes().splitlines():
                try:
                    line = json.loads(text)
                    line["step"] = int(line["step"])
                except (ValueError, TypeError, KeyError, OverflowError, RecursionError):  # cut by a kill, or damaged
                    break
                lines.append(line)
        return lines

    def begin(self, kept: Sequence[Mapping[str, Any]] | None = None) -> None:
        """Begin with this log of a checkpoint's steps; None: anew, whatever was there."""
        if kept is None:
            (self.path / CHECKPOINT).unlink(missing_ok=True)
            self._saved = 0
            self._run.write(finished=False)
        text = _text(kept or ())
        self._log_digest = hashlib.sha256(text)
        write_text(self.path / LOG, text.decode())

    def log(self, entry: Mapping[str, Any]) -> None:
        """Add a line to the log. Raises OSError: the disk is full; what was written before is kept."""
        text = _text([entry])
        self._log_digest.update(text)
        with naming(self.path / LOG), open(self.path / LOG, "ab") as file:
            file.write(text)

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; state must hold "step". Raises OSError: the disk is full; the checkpoint before is kept."""
        with open(self.path / LOG, "ab") as file:
            os.fsync(file.fileno())  # no checkpoint is on the disk without its log
        values = {**state, "log": self._log_digest.hexdigest()}
        self._run.write_tensors(self.path / CHECKPOINT, _KEY, tensors, values)
        self._saved = int(state["step"])

    def end(self, result: Mapping[str, Any], files: Iterable[str]) -> None:
        """Note that the result is there, and in which files; then remove the checkpoint."""
        self._run.write(finished=True, result=dict(result), files=hashes_of(self.path, (LOG, *files)))
        (self.path / CHECKPOINT).unlink(missing_ok=True)


def require_possible(out: str | Path | None) -> None:
    """Refuse, before any work, a folder that cannot be written. One that holds a run may be finished, and read-only. Raises
    OSError: it is a file, lies below one, or cannot be written."""
    if out is not None and not (Path(out) / RUN).is_file():
        require_writable(out)


def _text(lines: Iterable[Mapping[str, Any]]) -> bytes:
    return "".join(json.dumps(line) + "\n" for line in lines).encode()
