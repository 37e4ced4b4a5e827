"""factorize, replace and estimate: matrices into factors, one kind of matrix or the whole model."""

import re
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
import typer
from rich.markup import escape

from swd_lens.circuits import fidelity
from swd_lens.cli.common import (
    app,
    load_model,
    print_json,
    say,
    show_progress,
    solver_options,
    text_rows,
    told,
    use_threads,
    workers_of,
)
from swd_lens.cli.options import (
    CalibrationOption,
    DeviceMapOption,
    DtypeOption,
    HeldoutOption,
    HostOption,
    IterationsOption,
    JsonOption,
    ModelOption,
    OverwriteOption,
    PresetOption,
    SitesOption,
    SparsityOption,
    TextOption,
    ThreadsOption,
    TokensOption,
    UnitsOption,
    WorkersOption,
)
from swd_lens.cli.outline import output
from swd_lens.factorization.factorize import factorize as factorize_model
from swd_lens.factorization.resources import estimate as estimate_cost
from swd_lens.hosts import find_sites
from swd_lens.report.terminal import table
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.study.replacement import BUDGETS, DEFAULT, replace_model
from swd_lens.units.factors import FactorSet


@app.command()
def factorize(
    out: Annotated[Path, typer.Option(help="Folder for the factors.")],
    sites: SitesOption,
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    sparsity: SparsityOption = 0.5,
    text: TextOption = None,
    tokens: TokensOption = 16_384,
    heldout_tokens: HeldoutOption = 16_384,
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    calibration: CalibrationOption = "sequential",
    workers: WorkersOption = "1",
    shard: Annotated[
        str | None,
        typer.Option(
            help="'2/8': the second eighth of the matrices, for batch schedulers; the same command without it puts all together."
        ),
    ] = None,
    dtype: DtypeOption = "float32",
    device_map: DeviceMapOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Factorize matrices of a model into sparse read and write factors; each is saved when finished.

    The same command again after an interruption goes on with the matrices that are missing.
    """
    with told():
        use_threads(threads)
        model = load_model(model_name, host, dtype, device_map)
        find_sites(model, sites)  # a wrong name should fail before the text is read
        rows_in, heldout = text_rows(model, model_name, text, tokens, heldout_tokens)
        solver = solver_options(preset, units, outer_iterations)
        say(f"factorize {', '.join(sites)} at s={sparsity:g}")
        factors = factorize_model(
            model,
            sites,
            sparsity=sparsity,
            tokens=rows_in,
            calibration=calibration,
            workers=workers_of(workers),
            shard=shard,
            progress=show_progress(),
            out=out,
            overwrite=overwrite,
            **solver,
        )
        if shard is not None and as_json:
            print_json({"folder": str(out), "shard": shard, "provenance": factors.provenance, "sites": _sites(factors)})
            return
        if shard is not None:
            output.print(
                escape(f"Shard {shard}: {', '.join(factors)}. The same command without --shard puts all together.")
            )
            return
        say("fidelity on held-out text")
        measured = fidelity(model, factors, heldout)
        rows = [row | {"relMSE (held-out)": measured.relmse[row["site"]]} for row in _sites(factors)]
        if as_json:
            print_json(
                {"folder": str(out), "provenance": factors.provenance, "sites": rows, "fidelity": measured.as_dict()}
            )
            return
        output.print(table("Factors", pd.DataFrame(rows)))
        output.print(table("Fidelity on held-out text", measured.table()))
        output.print(escape(f"Saved to {out}. Load with swd_lens.FactorSet.load({str(out)!r})."))


@app.command()
def replace(
    out: Annotated[Path, typer.Option(help="Folder for budgets, factors, fine-tuning, numbers and samples.")],
    sites: SitesOption = ["all"],  # noqa: B006 - typer copies it
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    sparsity: SparsityOption = 0.685,
    budgets: Annotated[
        str | None,
        typer.Option(help=f"One s for all matrices, or the same total allocated: {', '.join(BUDGETS)}. [default: kl]"),
    ] = None,
    text: TextOption = None,
    tokens: TokensOption = 16_384,
    finetune: Annotated[
        str, typer.Option(help="Preset of the fine-tuning: best, paper, none, or the one that goes with --preset.")
    ] = DEFAULT,
    finetune_tokens: Annotated[
        int | None, typer.Option(help="Unique tokens to fine-tune on. [default: the calibration tokens]", min=2)
    ] = None,
    heldout_tokens: HeldoutOption = 32_768,
    prompt: Annotated[
        list[str] | None, typer.Option(help="To be continued, dense and replaced; repeatable. [default: held-out text]")
    ] = None,
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    calibration: Annotated[
        str | None, typer.Option(help="As for factorize. [default: corrected; with --preset paper: sequential]")
    ] = None,
    workers: WorkersOption = "1",
    dtype: DtypeOption = "float32",
    device_map: DeviceMapOption = None,
    overwrite: OverwriteOption = False,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Replace a whole surface, fine-tune the values on their fixed supports, and say what is left of the model.

    The same command again after an interruption goes on where it stopped.
    """
    with told():
        use_threads(threads)
        model = load_model(model_name, host, dtype, device_map)
        find_sites(model, sites)
        if finetune != "none" and not (finetune_tokens or tokens):
            raise ValueError("--tokens 0 leaves nothing to fine-tune on; give --finetune-tokens, or --finetune none")
        wanted = max(tokens, finetune_tokens or 0)
        rows, heldout = text_rows(model, model_name, text, wanted, heldout_tokens)
        say(f"replace {', '.join(sites)} at s={sparsity:g}")
        made = replace_model(
            model,
            sites,
            sparsity=sparsity,
            budgets=budgets,
            tokens=_first(rows, tokens),
            heldout=heldout,
            finetune=None if finetune == "none" else finetune,
            finetune_tokens=None if finetune_tokens is None else _first(rows, finetune_tokens),
            prompts=list(prompt) if prompt else heldout[:3, : heldout.shape[1] // 4],
            calibration=calibration,
            workers=workers_of(workers),
            out=out,
            overwrite=overwrite,
            progress=show_progress(),
            **solver_options(preset, units, outer_iterations),
        )
        if as_json:
            print_json({"folder": str(out), **made.as_dict()})
            return
        if made.allocation is not None:
            rows = _narrow(made.allocation.table(), ("numel",)).rename(
                columns=lambda name: name.replace(" allocated", "")
            )
            output.print(table("Budgets", rows.rename(columns={"K uniform": "uniform"}).round({"s": 3})))
        measured = _narrow(made.table(), ("sites", "s", "CE dense", "CE", "mean relMSE"))
        output.print(table("Fidelity on held-out text", measured.rename(columns={"top-1 agreement": "top-1"})))
        if made.recovered is not None:
            output.print(f"Fine-tuning recovered {made.recovered:.1%} of the CE increase.", highlight=False)
        if made.samples is not None:
            output.print(escape(made.samples.side_by_side(output.width)), highlight=False)
        tuned = "" if made.finetuned is None else "finetune/ (log.jsonl, factors/), "
        output.print(escape(f"Everything is in {out}: factors/, {tuned}replacement.json."))


@app.command()
def estimate(
    sites: SitesOption = ["all"],  # noqa: B006 - typer copies it
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    shape: Annotated[
        list[str] | None,
        typer.Option(help="'17408x5120', d_in by d_out, in place of a model; repeatable."),
    ] = None,
    sparsity: SparsityOption = 0.5,
    tokens: TokensOption = 16_384,
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    calibration: CalibrationOption = "sequential",
    threads: ThreadsOption = None,
) -> None:
    """Memory and time that factorize will take, of a model or of shapes alone."""
    with told():
        use_threads(threads)
        what: Any = _shapes(shape) if shape else load_model(model_name, host)
        solver = solver_options(preset, units, outer_iterations)
        made = estimate_cost(
            what,
            tuple(sites) if sites != ["all"] else "all",
            sparsity=sparsity,
            tokens=tokens,
            calibration=calibration,
            **solver,
        )
        output.print(escape(repr(made)), highlight=False, soft_wrap=True)


def _narrow(wide: pd.DataFrame, left_out: tuple[str, ...]) -> pd.DataFrame:
    """What has room in a terminal of 80 columns; --json and replacement.json have the rest."""
    names = [name for name in wide.columns if name not in left_out and not re.match(r"share|(KL|relMSE) uniform", name)]
    return wide.filter(items=names)


def _sites(factors: FactorSet) -> list[dict[str, Any]]:
    return [
        {"site": name, "units": f.n_units, "edges": f.edges, "sparsity": f.sparsity}
        | {"relMSE (calibration)": f.provenance["relmse"]}
        for name, f in factors.items()
    ]


def _first(rows: Any, n_tokens: int) -> Any:
    """The first rows of at least so many tokens; None for none (zero-data)."""
    return rows[: -(-n_tokens // rows.shape[1])] if n_tokens else None


def _shapes(given: list[str]) -> dict[str, tuple[int, int]]:
    found = {}
    for one in given:
        parts = one.lower().split("x")
        if len(parts) != 2 or not all(part.isdecimal() for part in parts):
            raise ValueError(f"--shape {one!r}: give d_in by d_out, as in 17408x5120")
        again = sum(name.partition(" #")[0] == one for name in found)
        found[f"{one} #{again + 1}" if again else one] = (int(parts[0]), int(parts[1]))
    return found
