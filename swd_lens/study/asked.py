"""What a study was asked for, as what decides its parts: hosts, texts, tasks and units by their hashes, settings by their values.

1. `settings_of_parts`: what decides every part; a folder that holds parts of other ones is another study's.
2. `growing_parts`: what may be added to a study that is there, each entry with what decides it.
3. `start_again` clears a folder for a new study.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from swd_lens.base._version import __version__
from swd_lens.base.errors import error
from swd_lens.base.parts import CALL, FOLDER
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts.standing import standing_hooks
from swd_lens.study.run_file import NAME
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import UnitSet
from swd_lens.units.index import remove_set, writing_factors


def settings_of_parts(
    model: Any, calibration_model: Any, text: TokenStream | None, heldout: Any, solver: Mapping[str, Any]
) -> dict[str, Any]:
    """What decides every part of a study."""
    asked = {"swd_lens": __version__, "the host": host_fingerprint(model, model.cfg), **standing_hooks(model)}
    if calibration_model is not None:
        asked["the calibration host"] = host_fingerprint(calibration_model, calibration_model.cfg)
    asked["calibration tokens"] = None if text is None else text.fingerprint()
    asked["held-out tokens"] = as_stream(heldout, model).fingerprint()
    return asked | {"solver": dict(solver)}


def growing_parts(
    model: Any,
    surfaces: Mapping[str, Sequence[str]],
    tasks: Sequence[Task],
    units: Mapping[str, Mapping[str, Any]],
    names: Mapping[str, Iterable[Any]],
) -> dict[str, dict[str, Any]]:
    """What may be added to a study.

    Args:
        surfaces: label -> names of its sites.
        units: argument -> label -> units that came from elsewhere.
        names: argument -> what it names.
    """
    return {
        "surfaces": {label: list(sites) for label, sites in surfaces.items()},
        "tasks": {task.name: task_fingerprint(task) for task in tasks},
        **{what: {label: _identity(model, each) for label, each in given.items()} for what, given in units.items()},
        **{what: {str(name): True for name in given} for what, given in names.items()},
    }


def task_fingerprint(task: Task) -> str:
    """SHA-256 over the prompts, answers and distractors of both splits; of a metric of its own, over its name."""
    digest = hashlib.sha256()
    for split in (task.train, task.test):
        digest.update(repr((split.name, split.prepend_bos, split.answer_ids, split.distractor_ids)).encode())
        digest.update(repr([_ids(tokens) for tokens in (*split.tokens, *split.corrupt)]).encode())
        digest.update(_name_of_metric(split).encode())
    return digest.hexdigest()


def _ids(tokens: Tensor | None) -> list[int] | None:
    return None if tokens is None else tokens.tolist()


def _name_of_metric(split: TaskSplit) -> str:
    return "" if split.metric is None else getattr(split.metric, "__qualname__", type(split.metric).__qualname__)


def _identity(model: Any, units: Any) -> str:
    of_units = UnitSet.of(model, units)
    return hashlib.sha256(repr(sorted(of_units.identities.items())).encode()).hexdigest()


# ---------------------------------------------------------------------------------------------- the folder


def require_own(folder: Path) -> None:
    """Do nothing unless the folder holds a run without its parts: nobody can go on with that, or knows how it was made.

    Raises:
        ResumeError: it does.
    """
    if (folder / NAME).exists() and not (folder / FOLDER / CALL).exists():
        raise error("parts-of-another-call", folder=folder, changed=f"{NAME} of a run without its parts")


def start_again(folder: Path, factors: Iterable[str]) -> None:
    """Remove a run from its folder, and what stands where the factors of a new one will: first what names the others."""
    (folder / FOLDER / CALL).unlink(missing_ok=True)
    (folder / NAME).unlink(missing_ok=True)
    for name in factors:
        if (folder / name).is_dir():
            with writing_factors(folder / name, "run_study"):
                remove_set(folder / name)
