"""factorize, replace and estimate: matrices into factors, one kind of matrix or the whole model."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from typer import Option

from swd_lens.base.errors import quoted
from swd_lens.base.writer import require_writable
from swd_lens.circuits import fidelity
from swd_lens.cli import output
from swd_lens.cli.options import (
    CalibrationOption,
    CeOption,
    HeldoutOption,
    KlOption,
    LargeModelOptions,
    ModelOptions,
    OutputOptions,
    OverwriteOption,
    SitesOption,
    SolverOptions,
    SparsityOption,
    TextOptions,
    ThreadsOption,
    TokensOption,
    WorkersOption,
    app,
    command,
    first_rows,
    number_or_word,
    plan,
    say,
    say_memory_needed,
    show,
)
from swd_lens.factorization.estimate import estimate as estimate_cost
from swd_lens.factorization.factorize import factorize as factorize_model
from swd_lens.report.terminal import table
from swd_lens.study.memory import memory_of_replacement
from swd_lens.study.replacement import BUDGETS, DEFAULT, ModelReplacement, replace_model
from swd_lens.train.finetune.run import DEFAULT_PRESET as FINETUNING
from swd_lens.train.finetune.spec import resolve as resolve_finetuning


@command(app, goes_on=True)
def factorize(
    *,
    out: Annotated[Path, Option(help="Folder for the factors.")],
    sites: SitesOption,
    model_options: LargeModelOptions,
    sparsity: Annotated[
        float | None,
        Option("--sparsity", "-s", help="s in (0, 1): the fraction of edges removed. [default: 0.5; with a goal none]"),
    ] = None,
    kl: KlOption = None,
    ce: CeOption = None,
    text: TextOptions,
    solver: SolverOptions,
    calibration: CalibrationOption = "sequential",
    workers: WorkersOption = "1",
    shard: Annotated[
        str | None,
        Option(
            help="'2/8': the second eighth of the matrices, for batch schedulers; the same command without it puts all together."
        ),
    ] = None,
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """Factorize matrices of a model into sparse read and write factors; each is saved when finished.

    With --kl or --ce the sparsity is searched for, and how factors are made, too, unless --preset, --units or --basis says it.
    The same command again after an interruption goes on with the matrices, or trials, that are missing.
    """
    require_writable(out)
    plan("load", "factorize", *["fidelity"] * (shard is None))
    model = model_options.load(sites)
    tokens, heldout = text.rows(model, model_options)
    goals = {name: value for name, value in (("KL", kl), ("CE delta", ce)) if value is not None}
    s = sparsity if sparsity is not None or goals else 0.5
    cost = estimate_cost(model, sites, sparsity=s or 0.5, tokens=tokens, calibration=calibration, **solver.arguments())
    say_memory_needed({"factorize": cost.peak_bytes})
    to = " and ".join(f"{name} at most {value:g}" for name, value in goals.items()) if s is None else f"s={s:g}"
    say(f"factorize {', '.join(sites)} at {to}")
    factors = factorize_model(
        model,
        sites,
        sparsity=s,
        kl=kl,
        ce=ce,
        tokens=tokens,
        calibration=calibration if text.tokens else "zero-data",
        workers=number_or_word(workers),
        shard=shard,
        progress=True,
        out=out,
        overwrite=overwrite,
        **solver.arguments(),
    )
    rows: list[dict[str, Any]] = [
        {"site": name, "units": f.n_units, "edges": f.edges, "sparsity": f.sparsity}
        | {"first positions": f.provenance.get("first_position_share")}
        | {"relMSE (calibration)": f.provenance["relmse"]}
        for name, f in factors.items()
    ]
    values = {"folder": str(out), "provenance": factors.provenance, "sites": rows}
    if shard is not None:
        made = f"Shard {shard}: {', '.join(factors)}. The same command without --shard puts all together."
        printed.show({**values, "shard": shard}, made)
        return
    say("fidelity on held-out text")
    measured = fidelity(model, factors, heldout, progress=True)
    for row in rows:
        row["relMSE (held-out)"] = measured.relmse[row["site"]]
    printed.show(
        {**values, "fidelity": measured.as_dict()},
        *([table("Tried", _narrow(factors.tried, ("KL se", "CE delta se")))] if goals else []),
        table("Factors", pd.DataFrame(rows)),
        table("Fidelity on held-out text", measured.table()),
        f"Saved to {out}. Load with swd_lens.FactorSet.load({str(out)!r}).",
    )


@dataclass(frozen=True)
class ReplaceTextOptions(TextOptions):
    """As for the others, but a whole model is judged on more text."""

    heldout_tokens: HeldoutOption = 32_768


@command(app, goes_on=True)
def replace(
    *,
    out: Annotated[Path, Option(help="Folder for budgets, factors, fine-tuning, numbers and samples.")],
    sites: SitesOption = ["all"],  # noqa: B006 - typer copies it
    model_options: LargeModelOptions,
    sparsity: SparsityOption = 0.685,
    budgets: Annotated[
        str | None, Option(help=f"One s for all matrices, or the same total allocated: {', '.join(BUDGETS)}. [default: kl]")
    ] = None,
    text: ReplaceTextOptions,
    finetune: Annotated[
        str, Option(help="Preset of the fine-tuning: best, paper, none, or the one that goes with --preset.")
    ] = DEFAULT,
    finetune_tokens: Annotated[
        int | None, Option(help="Unique tokens to fine-tune on. [default: the calibration tokens]", min=2)
    ] = None,
    prompt: Annotated[
        list[str] | None, Option(help="To be continued, dense and replaced; repeatable. [default: held-out text]")
    ] = None,
    solver: SolverOptions,
    calibration: Annotated[
        str | None, Option(help="As for factorize. [default: corrected; with --preset paper: sequential]")
    ] = None,
    workers: WorkersOption = "1",
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """Replace a whole surface, fine-tune the values on their fixed supports, and say what is left of the model.

    The same command again after an interruption goes on where it stopped.
    """
    steps = plan("load", complete=False)
    model = model_options.load(sites)
    if finetune != "none" and not (finetune_tokens or text.tokens):
        raise ValueError("--tokens 0 leaves nothing to fine-tune on; give --finetune-tokens, or --finetune none")
    rows, heldout = text.rows(model, model_options, max(text.tokens, finetune_tokens or 0))
    fitted_on = first_rows(rows, text.tokens)
    recipe = FINETUNING if finetune == DEFAULT else finetune
    needed = memory_of_replacement(
        model,
        sites,
        tokens=fitted_on,
        calibration=calibration or ("sequential" if solver.preset == "paper" else "corrected"),
        sparsity=sparsity,
        tuned_rows=0 if finetune == "none" else resolve_finetuning(recipe, {}).batch_size,
        row_length=heldout.shape[1],
        **solver.arguments(),
    )
    say_memory_needed(needed)
    replacement = replace_model(
        model,
        sites,
        sparsity=sparsity,
        budgets=budgets,
        tokens=fitted_on,
        heldout=heldout,
        finetune=None if finetune == "none" else finetune,
        finetune_tokens=None if finetune_tokens is None else first_rows(rows, finetune_tokens),
        prompts=list(prompt) if prompt else heldout[:3, : heldout.shape[1] // 4],
        calibration=calibration if text.tokens else "zero-data",
        workers=number_or_word(workers),
        out=out,
        overwrite=overwrite,
        on_step=steps,
        progress=True,
        **solver.arguments(),
    )
    shown = _tables_of(replacement)
    tuned = "" if replacement.finetuned is None else "finetune/ (log.jsonl, factors/), "
    shown.append(f"Everything is in {out}: factors/, {tuned}replacement.json.")
    printed.show({"folder": str(out), **replacement.as_dict()}, *shown)


def _tables_of(replacement: ModelReplacement) -> list[Any]:
    """Budgets, fidelity and samples of a replaced model, as far as there are any, for the terminal."""
    shown: list[Any] = []
    if replacement.allocation is not None:
        allocated = _narrow(replacement.allocation.table(), ("numel",))
        allocated = allocated.rename(columns=lambda name: name.replace(" allocated", ""))
        shown.append(table("Budgets", allocated.rename(columns={"K uniform": "uniform"}).round({"s": 3})))
    measured = _narrow(replacement.table(), ("sites", "s", "CE dense", "CE", "mean relMSE"))
    shown.append(table("Fidelity on held-out text", measured.rename(columns={"top-1 agreement": "top-1"})))
    if replacement.recovered is not None:
        shown.append(f"Fine-tuning recovered {replacement.recovered:.1%} of the CE increase.")
    if replacement.samples is not None:
        shown.append(replacement.samples.side_by_side(output.width))
    return shown


@command(app)
def estimate(
    *,
    sites: SitesOption = ["all"],  # noqa: B006 - typer copies it
    model_options: ModelOptions,
    shape: Annotated[list[str] | None, Option(help="'17408x5120', d_in by d_out, in place of a model; repeatable.")] = None,
    sparsity: SparsityOption = 0.5,
    tokens: TokensOption = 16_384,
    solver: SolverOptions,
    calibration: CalibrationOption = "sequential",
    threads: ThreadsOption = None,
) -> None:
    """Memory and time that factorize will take, of a model or of shapes alone."""
    shapes: dict[str, tuple[int, int]] = {}
    for text in shape or ():
        parts = text.lower().split("x")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"--shape {quoted(text)}: give d_in by d_out, as in 17408x5120")
        equal = sum(name.partition(" #")[0] == text for name in shapes)  # told apart by a number
        shapes[f"{text} #{equal + 1}" if equal else text] = (int(parts[0]), int(parts[1]))
    cost = estimate_cost(
        shapes or model_options.load(),
        tuple(sites) if sites != ["all"] else "all",
        sparsity=sparsity,
        tokens=tokens,
        calibration=calibration,
        **solver.arguments(),
    )
    show(False, {}, repr(cost), unbroken=True)


def _narrow(wide: pd.DataFrame, left_out: tuple[str, ...]) -> pd.DataFrame:
    """Keep what has room in a terminal of 80 columns; --json and replacement.json have the rest."""
    names = [name for name in wide.columns if name not in left_out and not re.match(r"share|(KL|relMSE) uniform", name)]
    return wide.filter(items=names)
