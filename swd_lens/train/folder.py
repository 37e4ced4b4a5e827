"""The folder of a run: what it is, how far it is, its log, its factors.

    run.json                what decides the bits of the run (the recipe), and, once it is finished, its result
    checkpoint.safetensors  values and moments after some step; replaced by a rename, removed at the end
    log.jsonl               one line per step, no clock in it: the same run writes the same lines
    ...                     the result: a FactorSet in factors/, units in weights/ and units.json, or a model in model/
    .writer                 which call writes here; gone when the run is finished

1. `check` compares recipes. Another run is refused, every difference named; a finished one is taken over.
2. An interrupted one goes on from its checkpoint: later log lines are cut, and written again by the steps repeated.
3. Of two calls at once the later one takes the folder over, and the earlier one stops at its next line of log: a lock would
   outlive a kill, or a notebook's traceback.
"""

import json
import math
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.base.files import atomic, write_json, write_text
from swd_lens.factorization.checkpoint import differences

RUN, LOG = "run.json", "log.jsonl"
_CHECKPOINT, _WRITER = "checkpoint.safetensors", ".writer"
_HASHES = {
    "host_sha256": "the host",
    "factors_sha256": "the factors",
    "tokens_sha256": "the tokens",
    "heldout_sha256": "the held-out tokens",
}


class TrainingFolder:
    """The folder of any training run: run.json, checkpoint.safetensors, log.jsonl, and whatever its result is.

    Args:
        path: the folder, made by `start`.
        recipe: of the run that is called for; plain values.
        call: the function that trains, as errors name it.
        result: what stands there at the end, beside the run's own files.
    """

    def __init__(self, path: Path, recipe: Mapping[str, Any], call: str, result: Sequence[str]):
        self.path, self.call, self.result = path, call, tuple(result)
        self._writer = uuid.uuid4().hex
        self.recipe: dict[str, Any] = json.loads(json.dumps(recipe))  # as it will be read again

    # ------------------------------------------------------------------ what is there

    def check(self) -> bool:
        """Whether this very run is finished there.

        Raises:
            ResumeError: it holds another run, or something else.
        """
        try:
            run = json.loads((self.path / RUN).read_text(encoding="utf-8"))
            recipe = dict(run["recipe"])
        except FileNotFoundError:
            if others := [name for name in (LOG, _CHECKPOINT, *self.result) if (self.path / name).exists()]:
                raise error(
                    "finetune-into-another-folder", path=self.path, others=", ".join(others), run=RUN, call=self.call
                ) from None
            return False
        except (ValueError, KeyError, TypeError) as cause:
            raise error("finetune-damaged-folder", path=self.path, file=RUN, reason=cause, call=self.call) from cause
        if changed := differences(recipe, self.recipe, _HASHES):
            raise error("finetune-another-run", path=self.path, changed="; ".join(changed), call=self.call)
        return bool(run.get("finished"))

    def last_step(self) -> int:
        """Of the checkpoint; 0 where there is none."""
        return int(self._meta()["step"]) if (self.path / _CHECKPOINT).is_file() else 0

    def kept(self, what: str) -> str:
        """What the checkpoint holds, in words: "step 300" for what="step"."""
        step = self.last_step()
        return f"{what} {step}" if step else "no checkpoint yet"

    def resume(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """The checkpoint's tensors and what was saved with them."""
        with safe_open(self.path / _CHECKPOINT, framework="pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}, self._meta()  # noqa: SIM118 - no dict

    def lines(self, last: float | int = math.inf) -> list[dict[str, Any]]:
        """The log, as far as its lines are whole, up to the first line of a step after the last one asked for."""
        lines = []
        if (self.path / LOG).is_file():
            for text in (self.path / LOG).read_text(encoding="utf-8").splitlines():
                try:
                    line = json.loads(text)
                except ValueError:  # cut short by a kill
                    break
                if line["step"] > last:
                    break
                lines.append(line)
        return lines

    def _meta(self) -> dict[str, Any]:
        try:
            with safe_open(self.path / _CHECKPOINT, framework="pt") as file:
                return json.loads(file.metadata()["state"])
        except Exception as cause:  # safetensors has its own kinds of error
            raise error(
                "finetune-damaged-folder", path=self.path, file=_CHECKPOINT, reason=cause, call=self.call
            ) from cause

    # ------------------------------------------------------------------ writing

    def start(self, step: int) -> None:
        """Begin after this step (0: anew): the log is cut there."""
        self.path.mkdir(parents=True, exist_ok=True)
        write_text(self.path / _WRITER, self._writer)
        if step == 0:
            (self.path / _CHECKPOINT).unlink(missing_ok=True)
            write_json(self.path / RUN, {"recipe": self.recipe, "finished": False})
        lines = self.lines(step) if step else []
        write_text(self.path / LOG, "".join(json.dumps(line) + "\n" for line in lines))

    def log(self, entry: Mapping[str, Any]) -> None:
        """One line more.

        Raises:
            ResumeError: another call has taken the folder over.
        """
        self._require_own()
        with open(self.path / LOG, "a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def save(self, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
        """Replace the checkpoint; state must hold "step".

        Raises:
            ResumeError: another call has taken the folder over.
        """
        self._require_own()
        without_remains(self.path / _CHECKPOINT)
        with atomic(self.path / _CHECKPOINT) as temporary:
            on_cpu = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
            save_file(on_cpu, temporary, metadata={"state": json.dumps(state)})

    def end(self, result: Mapping[str, Any]) -> None:
        """The word that the result is there; then the checkpoint goes."""
        self._require_own()
        write_json(self.path / RUN, {"recipe": self.recipe, "finished": True, "result": dict(result)})
        for name in (_CHECKPOINT, _WRITER):
            (self.path / name).unlink(missing_ok=True)

    def _require_own(self) -> None:
        path = self.path / _WRITER
        if not path.is_file() or path.read_text(encoding="utf-8") != self._writer:
            raise error("learned-taken-over", call=self.call, path=self.path)


def without_remains(path: Path) -> None:
    """Remove what `atomic` began to write for this file when its process was killed."""
    for left in path.parent.glob(f".{path.name}.*.part"):
        left.unlink(missing_ok=True)
