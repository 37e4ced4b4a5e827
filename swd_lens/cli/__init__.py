"""swd-lens: the command line. Each command walks part of the same road and prints tables, or JSON with --json.

    swd-lens demo       the whole road on the embedded model, offline, ending in a report
    swd-lens factorize  SWD factors of your model's matrices, saved to a folder, with their fidelity
    swd-lens replace    a whole surface: budgets, factors, fine-tuning, fidelity before and after, samples
    swd-lens circuit    factors, fidelity, circuits and a report for your model and tasks
    swd-lens report     the report of such a run again, from its folder; no model is needed
    swd-lens train-baseline METHOD
                        a transcoder, VPD or a sparsely pretrained model, to compare with
    swd-lens estimate   memory and time of a factorization, before it starts

0. `main` prints help and version from the table below, without loading torch; for a command it loads the modules that have it.
1. Options (options.py) become a host, token rows and tasks (common.py).
2. The commands (circuits.py, matrices.py, baselines.py) call one function each; progress goes to stderr, results to stdout.
3. Files are written whole, the report last. Errors that a user can mend are printed without a traceback; exit code 1. Ctrl-C
   exits with 130 and leaves no half-written file; `factorize`, `replace` and `train-baseline` go on from there when called again.
"""

import sys
from importlib import import_module
from typing import Any

import typer

# Command -> the first line of its help. The commands themselves are in circuits.py, matrices.py and baselines.py.
COMMANDS = {
    "demo": "The whole road on the embedded model: factors, hooked units, fidelity, circuits of four tasks, a report. Offline.",
    "circuit": "Factors, fidelity, circuits and a report for a model of your own: what the demo does, on your matrices and "
    "tasks.",
    "report": "The report of a finished run, made again from its run.json and factors/. Loads no model; takes seconds.",
    "factorize": "Factorize matrices of a model into sparse read and write factors; each is saved when finished.",
    "replace": "Replace a whole surface, fine-tune the values on their fixed supports, and say what is left of the model.",
    "estimate": "Memory and time that factorize will take, of a model or of shapes alone.",
    "train-baseline": "Train what SWD is compared with: transcoders, VPD, sparse pretraining.",
}
_MODULES = ("circuits", "matrices", "baselines")


def main() -> None:
    """Entry point of the console script."""
    named = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    (_whole_app() if named and named[0] in COMMANDS else _outline())()


def __getattr__(name: str) -> Any:
    """`app`, all commands in it, and the modules that have them: loaded when first asked for."""
    if name == "app":
        return _whole_app()
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _whole_app() -> typer.Typer:
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return import_module(f"{__name__}.common").app


def _outline() -> typer.Typer:
    """The app's help, its version, and its answer to a command that there is not."""
    from swd_lens.cli.outline import new_app

    app = new_app()
    for name, line in COMMANDS.items():
        app.command(name, help=line)(lambda: None)
    return app
