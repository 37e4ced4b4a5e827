"""circuit --best: the cheapest faithful circuit of each task, in place of a study of given methods and sparsities."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from swd_lens.base.checks import require_names
from swd_lens.base.writer import writing
from swd_lens.cli.options import OutputOptions, say, say_memory_needed
from swd_lens.factorization.estimate import estimate
from swd_lens.report.terminal import table
from swd_lens.study.best import OUTPUTS, BestCircuit, best_circuit
from swd_lens.tasks import Task


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
    """Find, save and print the best circuit of each task; a search that an earlier call began or finished goes on there.

    Args:
        sites: "auto", or patterns.
        texts: calibration and held-out rows.
        how: kl and minutes.

    Raises:
        ValueError: two tasks of the same name, or one whose folder would be a file of ours.
        ResumeError: a task's folder holds another search.
    """
    require_names("task", [task.name for task in tasks])
    say_memory_needed({"best circuit": estimate(model, OUTPUTS if sites == "auto" else sites, tokens=texts[0]).peak_bytes})
    by_task: dict[str, BestCircuit] = {}
    with writing(out, "circuit"):
        for task in tasks:
            say(f"the best circuit of {task.name}, in about {how['minutes']:g} minutes")
            options = {**how, "out": out / task.name, "overwrite": overwrite}
            by_task[task.name] = best_circuit(model, task, sites, tokens=texts[0], heldout_tokens=texts[1], **options)
    shown: list[Any] = []
    for best in by_task.values():
        shown += [table(f"{best.title()}: what was tried", _narrow(best.table())), best.in_words(), ""]
    files = f"Everything is in {out}, a folder per task: best.json, circuit.safetensors, factors/."
    printed.show({"folder": str(out), **{name: best.as_dict() for name, best in by_task.items()}}, *shown, files)


def _narrow(tried: pd.DataFrame) -> pd.DataFrame:
    """Keep what has room in a terminal of 80 columns; --json and best.json have the rest."""
    return tried.assign(KL=tried["KL"].map("{:.2g}".format)).filter(items=["method", "KL", "edges", "units", "outcome"])
