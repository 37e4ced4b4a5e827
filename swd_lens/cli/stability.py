"""stability: whether a task's units stay the same when what should not matter is changed."""

from pathlib import Path
from typing import Annotated, Any

from typer import Option

from swd_lens.cli.options import (
    LargeModelOptions,
    OutputOptions,
    OverwriteOption,
    SolverOptions,
    SparsityOption,
    TextOptions,
    app,
    command,
    plan,
    say,
    say_memory_needed,
)
from swd_lens.factorization.estimate import estimate
from swd_lens.report.terminal import table
from swd_lens.study.stability import FILE, NULLS, RUNS
from swd_lens.study.stability import stability as stability_of
from swd_lens.study.variations import AXES
from swd_lens.tasks import load_task


@command(app, goes_on=True)
def stability(
    *,
    out: Annotated[Path, Option(help="Folder for the runs and the card.")],
    site: Annotated[str, Option("--site", help="One matrix, e.g. blocks.8.mlp_out.")],
    task: Annotated[str, Option("--task", help="Task family or path to a task file.")],
    model_options: LargeModelOptions,
    text: TextOptions,
    sparsity: SparsityOption = 0.75,
    runs: Annotated[int, Option("--runs", help="Runs beside the base, round the axes.", min=2)] = RUNS,
    nulls: Annotated[int, Option("--nulls", help="Null runs.", min=0)] = NULLS,
    vary: Annotated[list[str] | None, Option("--vary", help=f"Axes; repeatable: {', '.join(AXES)}. [default: all]")] = None,
    n_train: Annotated[int, Option(help="Training prompts.", min=4)] = 200,
    n_test: Annotated[int, Option(help="Test prompts, and as many validation prompts.", min=4)] = 100,
    overwrite: OverwriteOption = False,
    solver: SolverOptions,
    printed: OutputOptions,
) -> None:
    """Whether the units that carry a task stay the same when start, text, prompts, sparsity and more change."""
    plan("load", "read", "measure")
    model = model_options.load([site])
    say(f"read {task} and text")
    of_task = load_task(task, model, n_train=n_train, n_test=n_test)
    rows, other = text.rows(model, model_options)
    if rows is None:
        raise ValueError("--tokens 0: stability draws halves of the text; give --tokens")
    how: dict[str, Any] = {"sparsity": sparsity, **solver.arguments()}
    say_memory_needed({"factorize": estimate(model, site, tokens=rows, **how).peak_bytes})
    say(f"measure {runs} runs and {nulls} null runs of {site}")
    asked: dict[str, Any] = {"n": runs, "nulls": nulls, "out": out, "overwrite": overwrite, **how}
    asked |= {"vary": vary} if vary else {}
    card = stability_of(model, site, of_task, tokens=rows, corpora={"other text": other}, **asked)
    printed.show(
        card.as_dict(),
        table(f"Stability of {of_task.name} at {card.site}", card.table()),
        table("By axis (means)", card.by_axis().drop(columns=["similarity of claimed", "contribution"])),
        card.verdict,
        *card.notes(),
        f"The card is {out / FILE}.",
    )
