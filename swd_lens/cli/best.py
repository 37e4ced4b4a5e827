"""circuit --best: the cheapest faithful circuit of each task, in place of a study of given methods and sparsities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base import __version__
from swd_lens.base.names import require_names
from swd_lens.base.sealed import read_sealed, write_sealed
from swd_lens.base.writer import writing
from swd_lens.cli.options import OutputOptions, say, say_memory_needed
from swd_lens.factorization.checkpoint import host_fingerprint, tokens_fingerprint
from swd_lens.factorization.estimate import estimate
from swd_lens.report.terminal import table
from swd_lens.study.best import OUTPUTS, BestCircuit, best_circuit
from swd_lens.study.resume import task_fingerprint
from swd_lens.tasks import Task

_QUESTION = "asked.json"


def best_circuits(
    model: Any,
    tasks: Sequence[Task],
    sites: Any,
    texts: tuple[Any, Any],
    how: dict[str, Any],
    *,
    out: Path,
    overwrite: bool,
    printed: OutputOptions,
) -> None:
    """Find, save and print the best circuit of each task; one that an earlier call found for the same question is taken over.

    Args:
        sites: "auto", or patterns.
        texts: calibration and held-out rows.
        how: kl and minutes.

    Raises:
        ValueError: two tasks of the same name, or one whose folder would be a file of ours.
    """
    require_names("task", [task.name for task in tasks])
    say_memory_needed(
        {"best circuit": estimate(model, OUTPUTS if sites == "auto" else sites, tokens=texts[0]).peak_bytes}
    )
    by_task: dict[str, BestCircuit] = {}
    with writing(out, "circuit"):
        for task in tasks:
            question = {"swd_lens": __version__, "host": host_fingerprint(model, model.cfg), "sites": sites, **how}
            question |= {"task": task_fingerprint(task), "text": [tokens_fingerprint(rows) for rows in texts]}
            folder = out / task.name
            if not overwrite and _answered(folder, question):
                say(f"{task.name}: taken over from {folder}")
                by_task[task.name] = BestCircuit.load(folder)
                continue
            say(f"the best circuit of {task.name}, in about {how['minutes']:g} minutes")
            best = best_circuit(model, task, sites, tokens=texts[0], heldout_tokens=texts[1], **how)
            best.save(folder)
            write_sealed(folder / _QUESTION, question)
            by_task[task.name] = best
    shown: list[Any] = []
    for best in by_task.values():
        shown += [table(f"{best.title()}: what was tried", _narrow(best.table())), best.in_words(), ""]
    files = f"Everything is in {out}, a folder per task: best.json, circuit.safetensors, factors/."
    printed.show({"folder": str(out), **{name: best.as_dict() for name, best in by_task.items()}}, *shown, files)


def _answered(folder: Path, question: dict[str, Any]) -> bool:
    """Whether the folder holds the answer to this very question."""
    if not all((folder / name).is_file() for name in (_QUESTION, "best.json")):
        return False
    held = read_sealed(folder / _QUESTION, "what a best circuit was asked for")
    return {name: held.get(name) for name in question} == question


def _narrow(tried: pd.DataFrame) -> pd.DataFrame:
    """What has room in a terminal of 80 columns; --json and best.json have the rest."""
    return tried.assign(KL=tried["KL"].map("{:.2g}".format)).filter(items=["method", "KL", "edges", "units", "outcome"])
