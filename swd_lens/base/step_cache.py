"""StepCache: keeps the finished steps of a long call in its folder, so that the same call resumes there after any interruption.

1. A `CallFile` says which call a folder belongs to: it holds what decides the results. Another call is refused, and every
   difference named; some settings may grow (a further task, a further sparsity), and what is finished stays valid then.
2. A step (a part) is one sealed file, written atomically as soon as it is finished: values as JSON, or tensors with values beside
   them. The file says which key and which call it belongs to.
3. What was written is read back: a call that resumes has the very values of one that was never interrupted.

Trainings keep a log and one checkpoint in place of many steps (train/folder.py), in the same files. Without a folder a StepCache
keeps nothing, and steps are just made.
"""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from swd_lens.base.errors import ResumeError
from swd_lens.base.files import plain, remove_remains
from swd_lens.base.sealed import damaged, read_sealed, read_tensors, readable, write_sealed, write_tensors

FOLDER, CALL = "parts", "call.json"
_OUR_NAME = re.compile(r".*\.[0-9a-f]{12}\.(json|safetensors)")
WHAT, CALL_WHAT = "a finished part", "the settings of a call"
HOW_TO_RESUME = "Rerun with the original settings to resume, give another folder, or overwrite=True (--overwrite) to start again"
# Hash among the settings of a call -> what messages call it; other settings name themselves.
WORDS = {
    "host_sha256": "the host",
    "weight_sha256": "its weight",
    "factors_sha256": "the factors",
    "upstream_sha256": "factors of the earlier sites",
    "tokens_sha256": "the tokens",
    "heldout_sha256": "the held-out tokens",
}
Key = Sequence[str]
Value = TypeVar("Value")


class CallFile:
    """The sealed file that says which call a folder belongs to, and the files of that call.

    Args:
        folder: of the call.
        name: of the file in it.
        settings: what decides every result, as plain values by the name under which users read it.
        growing: name -> {entry: what decides it}; entries may be added, but not removed or changed.
        what: the kind of file, for messages.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        settings: Mapping[str, Any],
        growing: Mapping[str, Mapping[str, Any]] = {},
        *,
        what: str = CALL_WHAT,
    ):
        self.folder, self.path, self.what = folder, folder / name, what
        self.settings, self.growing = (json.loads(json.dumps(plain(v), default=str)) for v in (settings, growing))
        self.digest = _digest(self.settings)

    def read(self) -> dict[str, Any] | None:
        """The values in the file; None where there is no file. Raises ResumeError: it is of another call (every difference is
        named), or damaged."""
        try:
            then = read_sealed(self.path, self.what, ResumeError)
        except FileNotFoundError:
            return None
        with readable(self.path, self.what, ResumeError):
            changed = differences(then["settings"], self.settings)
            for name, entries in then["growing"].items():
                grown = differences(entries, self.growing.get(name, {}), may_grow=True)
                changed += [f"{name}: {each}" for each in grown]
        if changed:
            raise ResumeError(f"{self.folder} holds another run: {'; '.join(changed)}. {HOW_TO_RESUME}")
        return then

    def write(self, **more: Any) -> None:
        """Write the settings, and further values beside them."""
        write_sealed(self.path, {"settings": self.settings, "growing": self.growing, **more})

    def write_tensors(self, path: Path, key: Key, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Write tensors and plain values as a step of this call; an earlier file is replaced."""
        about = json.dumps({"part": self._part(key), "values": values}, sort_keys=True)
        write_tensors(path, tensors, {"swd_lens": about})

    def read_tensors(self, path: Path, key: Key, what: str = WHAT) -> tuple[dict[str, Tensor], Any]:
        """Read what `write_tensors` wrote. Raises ResumeError: it is of another call or key, or damaged."""
        tensors, metadata = read_tensors(path, what, ResumeError)
        with readable(path, what, ResumeError):
            about = json.loads(metadata["swd_lens"])
        return tensors, self._values_of(about, path, key, what)

    def _values_of(self, about: Any, path: Path, key: Key, what: str) -> Any:
        with readable(path, what, ResumeError):
            if about["part"] != self._part(key):
                raise ResumeError(damaged(path, what, "a part of another call"))
            return about["values"]

    def _part(self, key: Key) -> dict[str, Any]:
        return {"key": list(key), "settings": self.digest}


class StepCache:
    """The finished steps of one call.

    Args:
        folder: of the call, which holds it (`swd_lens.base.writer.writing`); None keeps nothing.
        settings, growing: see `CallFile`.
        overwrite: remove what another call, or this one, has finished there.

    Raises ResumeError: the folder holds steps of another call, or damaged ones.
    """

    def __init__(
        self,
        folder: Path | None,
        settings: Mapping[str, Any] = {},
        growing: Mapping[str, Mapping[str, Any]] = {},
        *,
        overwrite: bool = False,
    ):
        self.folder = None if folder is None else folder / FOLDER
        if folder is None or self.folder is None:
            return
        self.call = CallFile(folder, f"{FOLDER}/{CALL}", settings, growing)
        if overwrite:
            self.call.path.unlink(missing_ok=True)
        if self.call.path.is_file():
            remove_remains(self.folder)  # of a call that was killed
        else:
            for path in self.folder.glob("*"):  # steps without it belong to nobody; other files are the user's
                if _OUR_NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        then = self.call.read()
        if then != {"settings": self.call.settings, "growing": self.call.growing}:
            self.call.write()

    def __contains__(self, key: Key) -> bool:
        return self.folder is not None and any(self._path(key, kind).is_file() for kind in ("json", "safetensors"))

    def values(self, key: Key, make: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Value]) -> Value:
        """A step of plain values, made now or finished earlier. read: builds the result from the values, as JSON gives them
        back (NaN is None there). Raises ResumeError: the step is damaged."""
        if self.folder is None:
            return read(make())
        path = self._path(key, "json")
        if not path.is_file():
            write_sealed(path, {"part": self.call._part(key), "values": make()})
        values = self.call._values_of(read_sealed(path, WHAT, ResumeError), path, key, WHAT)
        with readable(path, WHAT, ResumeError):
            return read(values)

    def tensors(
        self,
        key: Key,
        make: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
        read: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Value],
    ) -> Value:
        """A step of tensors (on the CPU) and plain values; see `values`."""
        if self.folder is None:
            return read(*make())
        path = self._path(key, "safetensors")
        if not path.is_file():
            tensors, values = make()
            self.call.write_tensors(path, key, tensors, plain(values))
        tensors, values = self.call.read_tensors(path, key)
        with readable(path, WHAT, ResumeError):
            return read(tensors, values)

    def _path(self, key: Key, kind: str) -> Path:
        assert self.folder is not None
        name = re.sub(r"[^A-Za-z0-9.=]+", "_", "-".join(key))[:80]
        return self.folder / f"{name}.{_digest(list(key))[:12]}.{kind}"


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def differences(then: Mapping[str, Any], now: Mapping[str, Any], *, may_grow: bool = False) -> list[str]:
    """One phrase per value that differs; hashes are shown by their beginnings. may_grow: names that are new are no difference."""

    def short(value: Any) -> str:
        return value[:8] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else repr(value)

    names = [*then, *(name for name in now if name not in then and not may_grow)]
    return [
        f"{WORDS.get(name, name)} {short(then.get(name))} then, {short(now.get(name))} now"
        for name in names
        if then.get(name) != now.get(name) or (name in then) != (name in now)
    ]
