"""swd-lens: the command line. Each command walks part of the same road and prints tables, or JSON with --json.

1. `main` prints help and version from COMMANDS, without loading torch; for a command it loads the modules that have it, and has
   the allocator keep what is freed.
2. Options (options.py) become a host, token rows and arguments of the solver.
3. The commands (circuits.py, graph.py, stability.py, truth.py, ...) call functions; progress goes to stderr, results to
   stdout.
4. Files are written whole, the report last. Errors are printed in one line, without a traceback; exit code 1. Ctrl-C
   exits with 130 and leaves no half-written file; the same command goes on from there when called again.
"""

import sys
from importlib import import_module
from typing import Annotated, Any

import typer
from rich.console import Console

from swd_lens.base import __version__

# Command -> the first line of its help. The commands themselves are in the modules of _MODULES.
COMMANDS = {
    "demo": "The whole road on the embedded model: factors, hooked units, fidelity, circuits of three tasks, a report. Offline.",
    "circuit": "Factors, fidelity, circuits and a report for a model of your own: what the demo does, on your matrices and "
    "tasks.",
    "graph": "A task's circuit as a graph of units that opens in a browser: from a model's name to a page, in minutes.",
    "stability": "Whether the units that carry a task stay the same when start, text, prompts, sparsity and more change.",
    "paper": "The paper's tables and figures, each by one command: ITEM, all, or a report of what a folder holds.",
    "truth": "Matrices and hosts whose units are known, taken apart by SWD and what it is compared with. Offline.",
    "report": "The report of a finished run, made again from its run.json and factors/. Loads no model; takes seconds.",
    "factorize": "Factorize matrices of a model into sparse read and write factors; each is saved when finished.",
    "replace": "Replace a whole surface, fine-tune the values on their fixed supports, and say what is left of the model.",
    "finetune": "Fine-tune the values of finished factors on their fixed supports, in one process or many (accelerate launch).",
    "estimate": "Memory and time that factorize will take, of a model or of shapes alone.",
    "train-baseline": "Train what SWD is compared with: transcoders, VPD, sparse pretraining.",
}
_MODULES = ("circuits", "graph", "stability", "matrices", "baselines", "paper", "truth")

status, output = Console(stderr=True), Console()


def main() -> None:
    """Entry point of the console script."""
    words = [argument for argument in sys.argv[1:] if not argument.startswith("-")]
    try:
        if words and words[0] in COMMANDS:
            app = _all_commands()
            from swd_lens.base.machine import keep_freed_memory  # not sooner: it loads torch

            keep_freed_memory()
        else:  # help, version, and the answer to a command that there is not
            app = new_app()
            for name, line in COMMANDS.items():
                app.command(name, help=line)(lambda: None)
        app()
    except KeyboardInterrupt:  # before a command has begun, or after it has ended
        status.print("interrupted")
        sys.exit(130)


def new_app() -> typer.Typer:
    """An app without commands: its help and its version."""
    app = typer.Typer(
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        help="Pretrained weights become circuit units.",
    )
    app.callback(invoke_without_command=True)(_version)
    return app


def _version(show: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    if show:
        output.print(f"swd-lens {__version__}")
        raise typer.Exit


def _all_commands() -> typer.Typer:
    for module in _MODULES:
        import_module(f"{__name__}.{module}")
    return import_module(f"{__name__}.options").app


def __getattr__(name: str) -> Any:
    """`app`, with all commands, and the modules that have them: loaded when first asked for."""
    if name == "app":
        return _all_commands()
    if name in _MODULES:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
