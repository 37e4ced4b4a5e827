"""demo and circuit: the whole road, ending in a report (`run_study` does the work); report: the report again, from the folder."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.markup import escape

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
)
from swd_lens.cli.options import (
    HeldoutOption,
    HostOption,
    IterationsOption,
    JsonOption,
    ModelOption,
    PresetOption,
    SitesOption,
    TextOption,
    ThreadsOption,
    TokensOption,
    UnitsOption,
)
from swd_lens.cli.outline import output
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import load_default_model, text_tokens
from swd_lens.report import write_report
from swd_lens.report.terminal import print_run
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.study import Run, run_study
from swd_lens.study.inside import look_inside
from swd_lens.study.run import CONTROLS
from swd_lens.tasks import Task, load_task
from swd_lens.tasks.generators import FAMILIES
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import FactorSet


@app.command()
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, the numbers and the factors.")] = Path("swd-demo"),
    host: HostOption = "auto",
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """The whole road on the embedded model: factors, hooked units, fidelity, circuits of four tasks, a report. Offline."""
    with told():
        use_threads(threads)
        model = load_default_model(kind=host)
        last = model.cfg.n_layers - 1
        # One matrix, then a kind of matrix in every layer. Names are copied by attention, so attn_o is there beside the MLPs.
        surfaces = {
            f"blocks.{last}.mlp_out": f"blocks.{last}.mlp_out",
            "all attn_o": "attn_o",
            "all mlp_out": "mlp_out",
        }
        tasks = [load_task(name, model, n_train=150, n_test=150) for name in FAMILIES]
        run = run_study(
            model,
            surfaces,
            tasks,
            sparsities=(0.5, 0.75),
            calibration_tokens=text_tokens(16_384, split="train"),
            heldout_tokens=text_tokens(16_384, split="test"),
            # In float64, both kinds of host get the same factors: choosing supports amplifies the rounding of float32.
            calibration_model=load_default_model(kind=host, dtype=torch.float64),
            on_step=say,
            progress=show_progress(),
        )
        deliver(_with_a_look_inside(run, model, host, tasks), out, as_json)


def _with_a_look_inside(run: Run, model: Any, host: str, tasks: Sequence[Task]) -> Run:
    """The demo's run with sections on query-key pairs, a graph of units and their paths."""
    began = time.perf_counter()
    say("look inside: query-key pairs, a graph of units, paths")
    in_float64 = load_default_model(kind=host, dtype=torch.float64)
    text = text_tokens(16_384, split="train")
    # Sparser units are fewer and stronger in a head: a pair of them matters.
    factors = dict(factorize(in_float64, "attn_qkv", sparsity=0.75, tokens=text, progress=show_progress()))
    for r in run.replacements:
        if r.method == "SWD s=0.75" and isinstance(r.factors, FactorSet) and len(r.factors) > 1:
            factors |= dict(r.factors)
    views, sections = look_inside(model, factors, tasks, graph_task="gendered_pronoun", path_task="greater_than")
    spent = run.seconds + time.perf_counter() - began
    return replace(run, attention=[*run.attention, *views], extras=sections, seconds=spent)


@app.command()
def circuit(
    out: Annotated[Path, typer.Option(help="Folder for the report, the numbers and the factors.")],
    sites: SitesOption,
    task: Annotated[
        list[str], typer.Option("--task", help="Task family or path to an auto-circuit JSON file; repeatable.")
    ],
    model_name: ModelOption = "default",
    host: HostOption = "auto",
    sparsity: Annotated[
        list[float] | None, typer.Option("--sparsity", "-s", help="s in (0, 1); repeatable. [default: 0.5 0.75]")
    ] = None,
    text: TextOption = None,
    tokens: TokensOption = 16_384,
    heldout_tokens: HeldoutOption = 16_384,
    n_train: Annotated[int, typer.Option(help="Prompts that score units.", min=1)] = 600,
    n_test: Annotated[int, typer.Option(help="Prompts that judge circuits.", min=1)] = 200,
    positions: Annotated[str, typer.Option(help="'scoring' (paper) or 'all'.")] = "scoring",
    ablation: Annotated[str, typer.Option(help="What replaces a unit: its 'mean' (paper) or 'zero'.")] = "mean",
    controls: Annotated[
        str, typer.Option(help="Exact factorizations beside SWD: svd, random_b (3 seeds), 'svd,random_b', or 'none'.")
    ] = "svd",
    beside: Annotated[
        list[Path] | None,
        typer.Option(help="Folder of train-baseline, compared beside SWD in the circuits; repeatable."),
    ] = None,
    preset: PresetOption = DEFAULT_PRESET,
    units: UnitsOption = None,
    outer_iterations: IterationsOption = None,
    as_json: JsonOption = False,
    threads: ThreadsOption = None,
) -> None:
    """Factors, fidelity, circuits and a report for a model of your own: what the demo does, on your matrices and tasks."""
    with told():
        use_threads(threads)
        if positions not in ("scoring", "all"):
            raise ValueError(f"--positions must be 'scoring' or 'all', got {positions!r}")
        if ablation not in ("mean", "zero"):
            raise ValueError(f"--ablation must be 'mean' or 'zero', got {ablation!r}")
        others = _labelled(beside or [])
        chosen = [] if controls == "none" else [name.strip() for name in controls.split(",")]
        if unknown := [name for name in chosen if name not in CONTROLS]:
            raise ValueError(f"--controls takes {', '.join(CONTROLS)} or none, got {', '.join(map(repr, unknown))}")
        model = load_model(model_name, host)
        find_sites(model, sites)
        tasks = [load_task(name, model, n_train=n_train, n_test=n_test) for name in task]
        calibration, heldout = text_rows(model, model_name, text, tokens, heldout_tokens)
        solver = solver_options(preset, units, outer_iterations)
        run = run_study(
            model,
            {", ".join(sites): sites},
            tasks,
            sparsities=tuple(sparsity or (0.5, 0.75)),
            calibration_tokens=calibration,
            heldout_tokens=heldout,
            positions=positions,
            ablation=ablation,
            controls=chosen,
            beside=others,
            on_step=say,
            progress=show_progress(),
            **solver,
        )
        deliver(run, out, as_json)


def _labelled(folders: Sequence[Path]) -> dict[str, LearnedUnits]:
    """Units of finished trainings, by what they are and where they lie."""
    found = {}
    for folder in folders:
        units = LearnedUnits.load(folder)
        label = f"{units.provenance['method']} ({folder.resolve().name})"
        if label in found:
            raise ValueError(f"--beside {folder}: another folder gives {label}, too; rename one of them")
        found[label] = units
    return found


@app.command()
def report(
    folder: Annotated[
        Path,
        typer.Argument(metavar="RUN", help="Folder that `swd-lens demo`, `swd-lens circuit` or Run.save wrote."),
    ],
    out: Annotated[Path | None, typer.Option(help="HTML file to write; RUN/report.html where not given.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the run's numbers as JSON instead of tables.")] = False,
) -> None:
    """The report of a finished run, made again from its run.json and factors/. Loads no model; takes seconds."""
    with told():
        run = Run.load(folder)
        path = write_report(run, folder / "report.html" if out is None else out)
        if as_json:
            print_json({"report": str(path), **run.as_dict()})
            return
        print_run(output, run)
        size = f"{path.stat().st_size / 1e6:.1f} MB"
        # Unbroken, so that the path can be copied.
        output.print(f"The report is in {escape(str(path))} ({size}).", highlight=False, soft_wrap=True)


def deliver(run: Run, out: Path, as_json: bool) -> None:
    say("write the report")
    run.save(out)
    path = write_report(run, out / "report.html")
    if as_json:
        print_json({"report": str(path), **run.as_dict()})
        return
    print_run(output, run)
    output.print(f"Done in {run.seconds:.0f} s. Everything is in {escape(str(out))}:", highlight=False)
    for name, what in (("report.html", "the report"), ("run.json", "every number"), ("factors/", "the SWD factors")):
        output.print(f"  {name:<12} {what}", highlight=False)
