"""truth: matrices whose units are known, taken apart by every method; one command, one table."""

from pathlib import Path
from typing import Annotated

from typer import Option

from swd_lens.cli.options import OutputOptions, OverwriteOption, app, command, say
from swd_lens.report.terminal import table
from swd_lens.truth import METHODS, run_truth
from swd_lens.truth.run import PARTS


@command(app, goes_on=True)
def truth(
    *,
    parts: Annotated[list[str] | None, Option("--part", help=f"{', '.join(PARTS)}; repeatable. Default: all.")] = None,
    cases: Annotated[
        list[str] | None, Option("--case", help="A case of the parts, by its name in the table; repeatable.")
    ] = None,
    methods: Annotated[list[str] | None, Option("--method", help=f"{', '.join(METHODS)}; repeatable. Default: all.")] = None,
    seeds: Annotated[int, Option(help="Matrices per planted case.", min=1)] = 2,
    out: Annotated[Path | None, Option(help="Folder for finished answers and truth.json; without it nothing is kept.")] = None,
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """Matrices and hosts whose units are known, taken apart by SWD and what it is compared with. Offline."""
    say("take apart matrices whose units are known")
    chosen = tuple(parts or PARTS)
    found = run_truth(chosen, methods=methods or None, cases=cases or None, seeds=seeds, out=out, overwrite=overwrite)
    # Two digits and no numbers of units or seconds: what a terminal of 80 columns has room for.
    parts_of = {part: found.table(part).round(2).drop(columns=["units", "seconds"], errors="ignore") for part in chosen}
    shown = [table(f"Known units: {part}", rows) for part, rows in parts_of.items() if len(rows)]
    files = [] if out is None else [f"Everything is in {out / 'truth.json'}."]
    printed.show(found.as_dict(), *shown, found.in_words(), *files)
