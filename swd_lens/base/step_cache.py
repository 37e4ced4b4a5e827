"""StepCache: what a long call has finished, kept in its folder, so that the same call goes on from there after any interruption.

1. parts/call.json holds what decides the results of the call. Another call is refused, and every difference named; some
   settings may grow (a further task, a further sparsity): what is finished stays valid then.
2. A part is one sealed file, written atomically as soon as it is finished: values as JSON, or tensors with values beside them.
   Its name comes from its key, and the file says which key and call it belongs to.
3. What was written is read back: a call that goes on has the very values of one that was never interrupted.

Without a folder nothing is kept, and parts are just made.
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
Key = Sequence[str]
Value = TypeVar("Value")


class StepCache:
    """The finished parts of one call.

    Args:
        folder: of the call, which holds it (`swd_lens.base.writer.writing`); None keeps nothing.
        settings: what decides every part, as plain values by the name under which it is told to users.
        growing: name -> {entry: what decides it}; entries may be added, but not taken out or changed.
        overwrite: remove what another call, or this one, has finished there.

    Raises:
        ResumeError: the folder holds parts of another call, or damaged ones.
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
        if self.folder is None:
            return
        now = {"settings": _as_json(settings), "growing": _as_json(growing)}
        self._settings_hash = _digest(now["settings"])
        if overwrite:
            (self.folder / CALL).unlink(missing_ok=True)
        if not (self.folder / CALL).is_file():  # parts without it belong to nobody; other files are the user's
            for path in self.folder.glob("*"):
                if _OUR_NAME.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        else:
            remove_remains(self.folder)  # of a call that was killed
            then = read_sealed(self.folder / CALL, CALL_WHAT, ResumeError)
            with readable(self.folder / CALL, CALL_WHAT, ResumeError):
                changed = _differences(then["settings"], now["settings"])
                for name, entries in then["growing"].items():
                    changed += [f"{name}: {each}" for each in _differences(entries, now["growing"].get(name, {}), True)]
            if changed:
                raise ResumeError(
                    f"{folder} holds what another call has finished: {'; '.join(changed)}. Call as then to go on, give "
                    "another folder, or overwrite=True (--overwrite) to start again"
                )
            if then == now:
                return
        write_sealed(self.folder / CALL, now)

    def __contains__(self, key: Key) -> bool:
        return self.folder is not None and any(self._path(key, kind).is_file() for kind in ("json", "safetensors"))

    def values(
        self, key: Key, make: Callable[[], Mapping[str, Any]], read: Callable[[Mapping[str, Any]], Value]
    ) -> Value:
        """A part of plain values, made now or finished earlier.

        Args:
            read: makes the part of the values, as JSON gives them back (NaN is None there).

        Raises:
            ResumeError: the part is damaged.
        """
        if self.folder is None:
            return read(make())
        path = self._path(key, "json")
        if not path.is_file():
            write_sealed(path, {"part": self._about(key), "values": make()})
        values = read_sealed(path, WHAT, ResumeError)
        with readable(path, WHAT, ResumeError):
            self._require(values["part"], key, path)
            return read(values["values"])

    def tensors(
        self,
        key: Key,
        make: Callable[[], tuple[Mapping[str, Tensor], Mapping[str, Any]]],
        read: Callable[[Mapping[str, Tensor], Mapping[str, Any]], Value],
    ) -> Value:
        """A part of tensors (on the CPU) and plain values; see `values`."""
        if self.folder is None:
            return read(*make())
        path = self._path(key, "safetensors")
        if not path.is_file():
            tensors, values = make()
            about = {"part": self._about(key), "values": plain(values)}
            write_tensors(path, tensors, {"swd_lens": json.dumps(about, sort_keys=True)})
        tensors, metadata = read_tensors(path, WHAT, ResumeError)
        with readable(path, WHAT, ResumeError):
            about = json.loads(metadata["swd_lens"])
            self._require(about["part"], key, path)
            return read(tensors, about["values"])

    def _path(self, key: Key, kind: str) -> Path:
        assert self.folder is not None
        name = re.sub(r"[^A-Za-z0-9.=]+", "_", "-".join(key))[:80]
        return self.folder / f"{name}.{_digest(list(key))[:12]}.{kind}"

    def _about(self, key: Key) -> dict[str, Any]:
        return {"key": list(key), "settings": self._settings_hash}

    def _require(self, about: Any, key: Key, path: Path) -> None:
        if about != self._about(key):
            raise ResumeError(damaged(path, WHAT, "a part of another call"))


def _as_json(values: Any) -> Any:
    return json.loads(json.dumps(plain(values), default=str))


def _digest(values: Any) -> str:
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def _differences(then: Mapping[str, Any], now: Mapping[str, Any], may_grow: bool = False) -> list[str]:
    """One phrase per value that differs; hashes by their beginnings."""

    def short(value: Any) -> str:
        return value[:8] if isinstance(value, str) and re.fullmatch("[0-9a-f]{64}", value) else repr(value)

    names = [*then, *(name for name in now if name not in then and not may_grow)]
    return [
        f"{name} {short(then.get(name))} then, {short(now.get(name))} now"
        for name in names
        if then.get(name) != now.get(name) or (name in then) != (name in now)
    ]
