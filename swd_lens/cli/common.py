"""What the commands share: the app, options turned into hosts and token rows, results printed, errors told.

Progress goes to stderr, results to stdout. Errors that a user can mend are printed without a traceback, exit code 1; Ctrl-C
exits with 130 and leaves no half-written file.
"""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import typer
from rich.markup import escape

from swd_lens.base.files import plain
from swd_lens.cli.outline import new_app, status
from swd_lens.hosts import UnsupportedHostError
from swd_lens.hosts.embedded import load_default_model, text_tokens
from swd_lens.hosts.load import load_host
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks import pack_text

app = new_app()


# ---------------------------------------------------------------------------------------------- in


def load_model(name: str, kind: str, dtype: str = "float32", device_map: str | None = None) -> Any:
    if name == "default":
        if dtype != "float32" or device_map is not None:
            raise ValueError("--dtype and --device-map are for models of your own; the embedded one is small")
        return load_default_model(kind=kind)
    say(f"load {name}")
    return load_host(name, kind, dtype=dtype, device_map=device_map)


def text_rows(
    model: Any, name: str, file: Path | None, n_calibration: int, n_heldout: int, *, trained: bool = False
) -> tuple[Any, Any]:
    """Calibration rows (None for zero-data) and held-out rows that share no token with them; trained: rows to train on."""
    if file is None:
        if name != "default":
            why = "fidelity and unit contexts are measured on text (add --tokens 0 for zero-data factors)"
            if trained:
                why = "a baseline is trained on its first part and measured on its last"
            raise ValueError(f"--text FILE is needed: {why}")
        heldout = text_tokens(n_heldout, split="test")
        return (text_tokens(n_calibration, split="train") if n_calibration else None), heldout
    rows = pack_text(model, file.read_text(encoding="utf-8"))
    per_row = rows.shape[1]
    wanted = -(-n_heldout // per_row)
    if len(rows) < 2:
        raise ValueError(
            f"{file} gives {len(rows)} row(s) of {per_row} tokens; calibration and held-out text need at least one each"
        )
    heldout = rows[-min(wanted, len(rows) // 2) :]
    calibration = rows[: len(rows) - len(heldout)][: -(-n_calibration // per_row)] if n_calibration else None
    return calibration, heldout


def solver_options(preset: str, units: str | None, outer_iterations: int | None) -> dict[str, Any]:
    """What was asked of the solver; what was not asked stays with its defaults."""
    options: dict[str, Any] = {} if preset == DEFAULT_PRESET else {"preset": preset}
    if units is not None:
        options["units"] = int(units) if units.isdecimal() else units
    if outer_iterations is not None:
        options["outer_iterations"] = outer_iterations
    return options


def workers_of(given: str) -> int | str:
    """A number, or "ray"."""
    return int(given) if given.isdecimal() else given


def use_threads(threads: int | None) -> None:
    if threads is not None:
        torch.set_num_threads(threads)


# ---------------------------------------------------------------------------------------------- out


def print_json(value: Any) -> None:
    sys.stdout.write(json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


def say(step: str) -> None:
    status.print(f"[dim]·[/dim] {escape(step)}", highlight=False)


def show_progress() -> bool:
    return sys.stderr.isatty()


@contextmanager
def told(*, goes_on: bool = False) -> Iterator[None]:
    """Errors that a user can mend become one line and exit code 1; Ctrl-C becomes exit code 130.

    goes_on: the same command again takes up what was interrupted, which Ctrl-C then says.
    """
    warnings.filterwarnings("ignore", message="HookedTransformer is deprecated")
    try:
        yield
    except (ValueError, OSError, ImportError, UnsupportedHostError) as error:
        status.print(f"[bold red]error:[/bold red] {escape(str(error))}", highlight=False)
        raise typer.Exit(1) from None
    except KeyboardInterrupt:
        again = "; the same command again goes on from the last checkpoint" if goes_on else ""
        status.print(f"interrupted; nothing half-written was left behind{again}", soft_wrap=True)
        raise typer.Exit(130) from None
