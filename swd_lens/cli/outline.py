"""The command line's frame: help, version, where results and progress are printed. Loads nothing of swd_lens but its version."""

from typing import Annotated

import typer
from rich.console import Console

from swd_lens.base._version import __version__

status, output = Console(stderr=True), Console()


def new_app() -> typer.Typer:
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
