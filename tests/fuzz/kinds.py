"""Every kind of file and folder that is written and read again: how it is made, how it is read, which errors its damage has."""

import contextlib
import io
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import swd_lens as swd
from swd_lens.base.step_cache import StepCache
from swd_lens.factorization.checkpoint import Checkpoint
from swd_lens.factorization.residuals import Residuals
from swd_lens.tasks import load_task
from swd_lens.train.engine import Engine
from tests.fuzz import calls


@dataclass(frozen=True)
class Kind:
    """A kind of file or folder.

    Attributes:
        build: makes version 0 or 1 in a folder.
        read: what a user does with it: load, or the same call again.
        errors: names of the classes that say it is damaged.
        weight: how often it is tried.
        sealed: whether it carries hashes; files that users write, and those of earlier versions, do not.
        names: pattern of the files that are damaged.
        live: `read` is a generator: the damage is done at its yield, and its return value is what counts.
    """

    build: Callable[[Path, int], Any]
    read: Callable[[Path], Any]
    errors: tuple[str, ...] = ("ValueError",)
    weight: float = 3.0
    sealed: bool = True
    names: str = "**/*"
    live: bool = False


class _Stop(BaseException):
    """The interruption that leaves a half-done folder."""


def _interrupted(call: Callable[..., Any], owner: Any, name: str, after: int) -> Callable[[Path, int], None]:
    """Makes a folder with the call, stopped at the n-th call of a method."""

    def build(folder: Path, version: int) -> None:
        whole, count = getattr(owner, name), 0

        def stopping(*args: Any, **named: Any) -> Any:
            nonlocal count
            count += 1
            if count > after:
                raise _Stop
            return whole(*args, **named)

        with mock.patch.object(owner, name, stopping), contextlib.suppress(_Stop):
            call(folder, *([version] if version else []))
        assert count > after, "never reached"

    return build


def _version(call: Callable[..., Any]) -> Callable[[Path, int], None]:
    return lambda folder, version: call(folder, *([version] if version else []))


def _saved(name: str, *errors: str, weight: float = 3.0) -> Kind:
    saved = calls.SAVES[name]
    return Kind(
        lambda folder, version: saved.save(folder / saved.name, version),
        lambda folder: saved.load(folder / saved.name),
        errors or ("ValueError",),
        weight,
    )


def _shards(folder: Path, version: int) -> None:
    settings = {**calls.QUICK, "tokens": calls.random_tokens(12, 10, seed=version), "calibration": "dense"}
    for shard in ("1/2", "2/2"):
        swd.factorize(calls.host(), "all", shard=shard, out=folder, **settings)


def _residuals(folder: Path) -> Iterator[Any]:
    with Residuals(calls.host(), calls.TEXT, batch_size=4, folder=folder) as kept:
        kept.advance(1)
        yield
        rows = [(tokens, None if start is None else start.residual) for tokens, start in kept.batches()]
        return rows


def _rows(folder: Path, version: int) -> None:
    lines = [
        {"prompt": f"the {noun}", "answers": "sat", "distractors": ["ran"], "corrupt": "the dog"}
        for noun in ("cat", "dog", "he", "she")
    ]
    (folder / "task.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")


def _auto_circuit(folder: Path, version: int) -> None:
    prompt = {"corrupt": "the dog", "answers": ["sat"], "wrong_answers": ["ran"]}
    prompts = [{**prompt, "clean": f"the {noun}"} for noun in ("cat", "dog", "he", "she")]
    (folder / "task.json").write_text(json.dumps({"prompts": prompts}))


def _edge_pruning(folder: Path, version: int) -> None:
    import datasets

    def split(nouns: str) -> Any:
        row = {"corr_prefix": "the dog", "pronoun": "he", "corr_pronoun": "she"}
        return datasets.Dataset.from_list([{**row, "prefix": f"the {noun}"} for noun in nouns.split()])

    datasets.disable_progress_bars()
    datasets.DatasetDict({"train": split("cat he"), "test": split("dog she")}).save_to_disk(str(folder / "task"))


@cache
def _word_host() -> Any:
    from tests.tasks.test_task import FakeHost

    return FakeHost()


def _task(name: str) -> Callable[[Path], Any]:
    def read(folder: Path) -> Any:
        task = load_task(folder / name, _word_host())
        return [(e.prompt, e.answers, e.distractors) for split in task.splits for e in split.examples]

    return read


class Told(Exception):
    """The command line said what is wrong, in its own form, and ended with 1."""


def _report(folder: Path) -> Any:
    """`swd-lens report`: tables in the terminal and a page."""
    from swd_lens.cli import main

    said = io.StringIO()
    arguments = mock.patch.object(sys, "argv", ["swd-lens", "report", str(folder)])
    with arguments, contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(said):
        try:
            main()
        except SystemExit as end:
            if end.code not in (0, None):
                raise Told(said.getvalue()) from None
    return calls.SAVES["study"].load(folder)


_RUN, _FACTORS, _UNITS = "ResumeError", "FactorFileError", "TrainError"
KINDS: dict[str, Kind] = {
    "factors": Kind(calls.SAVES["factors"].save, swd.FactorSet.load, (_FACTORS,), 8),
    "factorize, finished": Kind(_version(calls.factorize_calibrated), calls.factorize_calibrated, (_RUN,), 3),
    "factorize, interrupted": Kind(
        _interrupted(calls.factorize_calibrated, Checkpoint, "add", 2), calls.factorize_calibrated, (_RUN,), 1
    ),
    "factorize, shards": Kind(_shards, calls.factorize_shards, (_RUN,), 2),
    "circuit": _saved("circuit", weight=4),
    "transcoder units": _saved("transcoder units", _UNITS),
    "VPD units": _saved("VPD units", _UNITS),
    "transcoder, finished": Kind(_version(calls.transcoder), calls.transcoder, (_RUN, _UNITS)),
    "transcoder, interrupted": Kind(_interrupted(calls.transcoder, Engine, "advance", 3), calls.transcoder, (_RUN, _UNITS)),
    "vpd_recon, finished": Kind(_version(calls.vpd_recon), calls.vpd_recon, (_RUN, _UNITS), 2),
    "vpd_recon, interrupted": Kind(_interrupted(calls.vpd_recon, Engine, "advance", 3), calls.vpd_recon, (_RUN, _UNITS), 1),
    "vpd_kl, interrupted": Kind(_interrupted(calls.vpd_kl, Engine, "advance", 3), calls.vpd_kl, (_RUN, _UNITS), 1),
    "finetune, finished": Kind(_version(calls.finetune), calls.finetune, (_RUN, _FACTORS)),
    "finetune, interrupted": Kind(_interrupted(calls.finetune, Engine, "advance", 3), calls.finetune, (_RUN, "FinetuneError"), 2),
    "sparse_pretrain, finished": Kind(_version(calls.sparse_pretrain), calls.sparse_pretrain, (_RUN, _UNITS)),
    "sparse_pretrain, interrupted": Kind(
        _interrupted(calls.sparse_pretrain, Engine, "advance", 3), calls.sparse_pretrain, (_RUN, _UNITS), 1
    ),
    "replace_model": Kind(_version(calls.replace_model), calls.replace_model, (_RUN, _FACTORS, "AttachError"), 1),
    "replace_model, interrupted": Kind(
        _interrupted(calls.replace_model, Engine, "advance", 3), calls.replace_model, (_RUN, _FACTORS, "FinetuneError"), 1
    ),
    "residuals in use": Kind(lambda folder, version: None, _residuals, ("OSError", "ValueError"), 1, live=True),
    # FileNotFoundError: a method that has another name goes with a folder of that name.
    "study": _saved("study", "ValueError", "FileNotFoundError", _FACTORS, weight=4),
    "study, report": Kind(
        lambda folder, version: calls.SAVES["study"].save(folder, version), _report, ("Told",), 0.3, names="run.json"
    ),
    "allocation": _saved("allocation"),
    "efficiency": _saved("efficiency"),
    "run_study, finished": Kind(_version(calls.study_in_parts), calls.study_in_parts, (_RUN,), 1),
    "run_study, interrupted": Kind(_interrupted(calls.study_in_parts, StepCache, "tensors", 3), calls.study_in_parts, (_RUN,), 1),
    "data_efficiency, resumed": Kind(_version(calls.data_efficiency), calls.data_efficiency, ("ValueError", _RUN), 1),
    "graph": _saved("graph"),
    "edit": _saved("edit", "EditError"),
    "labels": _saved("labels"),
    "units.jsonl": _saved("units.jsonl"),
    "task, JSON lines": Kind(_rows, _task("task.jsonl"), ("TaskError",), 2, sealed=False),
    "task, auto-circuit": Kind(_auto_circuit, _task("task.json"), ("TaskError",), 2, sealed=False),
    "task, Edge-Pruning": Kind(_edge_pruning, _task("task"), ("TaskError",), 0.5, sealed=False),
}
