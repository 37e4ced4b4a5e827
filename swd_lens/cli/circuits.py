"""demo and circuit: the whole road, ending in a report (`run_study` does the work); report: the report again, from the folder."""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Option

from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.errors import TokenError, legible
from swd_lens.base.step_cache import FOLDER, StepCache
from swd_lens.base.writer import require_writable_file, writing
from swd_lens.circuits.screen import Screen, screen
from swd_lens.cli import status
from swd_lens.cli.best import best_circuits
from swd_lens.cli.options import (
    CeOption,
    HostOption,
    KlOption,
    LargeModelOptions,
    OutputOptions,
    OverwriteOption,
    SolverOptions,
    TextOptions,
    app,
    command,
    plan,
    say,
    say_memory_needed,
    show,
)
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import load_default_model, text_tokens
from swd_lens.hosts.recording import standing_hooks
from swd_lens.report import write_report
from swd_lens.report.terminal import run_tables, table
from swd_lens.study import Run, run_study
from swd_lens.study.best import KL as DEFAULT_KL
from swd_lens.study.controls import CONTROLS, DEFAULT_CONTROLS, RANDOM_B_SEEDS, controls_of, sizes_of
from swd_lens.study.inside import look_inside
from swd_lens.study.replacement import FACTORS, FINETUNED
from swd_lens.study.resume import memory_of, task_fingerprint
from swd_lens.study.run_study import require_surface, study_steps, surface_of
from swd_lens.study.trust import look_at_trust
from swd_lens.tasks import Task, load_task
from swd_lens.train.baselines import LearnedUnits
from swd_lens.units.factors import FactorSet
from swd_lens.units.index import INDEX

_SHOWN = ("ioi", "greater_than", "gendered_pronoun")  # tasks of the demo: those of short prompts
_SCREENED = 32  # training prompts of each task


@command(app, goes_on=True)
def demo(
    *,
    out: Annotated[Path, Option(help="Folder for the report, the numbers and the factors.")] = Path("swd-demo"),
    host: HostOption = "auto",
    overwrite: OverwriteOption = False,
    printed: OutputOptions,
) -> None:
    """The whole road on the embedded model: factors, hooked units, fidelity, circuits of three tasks, a report. Offline."""
    steps = plan("load", *study_steps(3, 1, DEFAULT_CONTROLS, saved=True), "look", "trust", "write")
    with writing(out, "demo"):
        say("load the embedded model, tasks and text")
        model = load_default_model(kind=host)
        last = f"blocks.{model.cfg.n_layers - 1}.mlp_out"
        tasks = [load_task(name, model, n_train=100, n_test=100) for name in _SHOWN]
        # In float64, both kinds of host get the same factors: choosing supports amplifies the rounding of float32.
        exact = load_default_model(kind=host, dtype=torch.float64)
        # One matrix, then a kind of matrix in every layer. Names are copied by attention, so attn_o is there beside the MLPs.
        surfaces = {last: last, "all attn_o": "attn_o", "all mlp_out": "mlp_out"}
        calibration = text_tokens(16_384, split="train")
        say_memory_needed(memory_of(exact, surfaces, tasks, sparsities=(0.75,), calibration_tokens=calibration))
        run = run_study(
            model,
            surfaces,
            tasks,
            sparsities=(0.75,),
            calibration_tokens=calibration,
            heldout_tokens=text_tokens(8_192, split="test"),
            calibration_model=exact,
            out=out,
            overwrite=overwrite,
            on_step=steps,
            progress=True,
        )
        run = _with_look_inside(run, model, exact, tasks, out / FOLDER / "attn_qkv")
        _deliver(_with_trust(run, model, tasks, last, out / FOLDER / "stability"), out, printed)


def _with_look_inside(run: Run, model: Any, exact: Any, tasks: Sequence[Task], kept: Path) -> Run:
    """The demo's run with sections on query-key pairs, a graph of units and their paths."""
    began = time.perf_counter()
    say("look inside: query-key pairs, a graph of units, paths")
    # Sparser units are fewer and stronger in a head: a pair of them matters.
    text = text_tokens(16_384, split="train")
    factors: dict[str, Any] = dict(factorize(exact, "attn_qkv", sparsity=0.75, tokens=text, out=kept, progress=True))
    for surface in ("all attn_o", "all mlp_out"):
        factors |= dict(run.sparsest(surface).factors)
    views, sections = look_inside(model, factors, tasks, graph_task="gendered_pronoun", path_task="greater_than")
    seconds = run.seconds + time.perf_counter() - began
    return replace(run, attention=[*run.attention, *views], extras=sections, seconds=seconds)


def _with_trust(run: Run, model: Any, tasks: Sequence[Task], site: str, kept: Path) -> Run:
    """The demo's run with a section on how far its circuits can be trusted; the card is of the smallest circuit in the site."""
    began = time.perf_counter()
    say("trust: nulls, worst cases, the dense model, one matrix varied")
    calibration, heldout = text_tokens(16_384, split="train"), text_tokens(2_048, split="test")
    section = look_at_trust(model, run, tasks, heldout, vary=site, calibration_tokens=calibration, out=kept)
    return replace(run, extras=[section, *run.extras], seconds=run.seconds + time.perf_counter() - began)


@command(app, goes_on=True)
def circuit(
    *,
    out: Annotated[Path, Option(help="Folder for the report, the numbers and the factors.")],
    sites: Annotated[
        list[str] | None,
        Option(
            "--sites",
            help="Pattern of sites; repeatable. Or 'auto': those that the tasks need most. [default: those of --factors]",
        ),
    ] = None,
    factors: Annotated[
        list[Path] | None,
        Option(help="Folder of finished factors, or of what finetune or replace left (then the tuned ones); repeatable."),
    ] = None,
    task: Annotated[list[str], Option("--task", help="Task family or path to an auto-circuit JSON file; repeatable.")],
    model_options: LargeModelOptions,
    sparsity: Annotated[
        list[float] | None,
        Option("--sparsity", "-s", help="s in (0, 1); repeatable. [default: 0.5 0.75; with --factors or a goal none]"),
    ] = None,
    text: TextOptions,
    n_train: Annotated[int, Option(help="Prompts of each task that score units.", min=1)] = 600,
    n_validation: Annotated[
        int | None, Option(help="Prompts of each task that choose between circuits. [default: as many as --n-test]", min=1)
    ] = None,
    n_test: Annotated[int, Option(help="Prompts of each task that judge circuits.", min=1)] = 200,
    positions: Annotated[list[str], Option(help="'scoring' (paper), 'all', or both by repeating.")] = ["scoring"],  # noqa: B006 - typer copies it
    ablation: Annotated[list[str], Option(help="In a unit's place: 'mean' (paper), 'zero', or both.")] = ["mean"],  # noqa: B006 - typer copies it
    controls: Annotated[
        str | None,
        Option(
            help=f"What stands beside SWD, with commas: {', '.join(CONTROLS)}; or 'none'. "
            f"[default: {','.join(DEFAULT_CONTROLS)}, as far as they can be made]"
        ),
    ] = None,
    random_b_seeds: Annotated[int, Option(help="Of --controls random_b; the paper has 10.", min=1)] = RANDOM_B_SEEDS,
    best: Annotated[
        bool,
        Option(
            "--best",
            help="In place of a study: search for the circuit of the fewest edges, over methods and sparsities. --sites is "
            "then 'auto' unless given.",
        ),
    ] = False,
    kl: KlOption = None,
    ce: CeOption = None,
    minutes: Annotated[float, Option(help="Of --best: about how long the search of a task may take.")] = 10.0,
    beside: Annotated[
        list[Path] | None, Option(help="Folder of train-baseline, compared beside SWD in the circuits; repeatable.")
    ] = None,
    overwrite: OverwriteOption = False,
    solver: SolverOptions,
    printed: OutputOptions,
) -> None:
    """Factors, fidelity, circuits and a report for a model of your own: what the demo does, on your matrices and tasks.

    With --best the cheapest faithful circuit of each task, whatever it is of, and the table of what was tried.
    """
    for where in positions:
        one_of("--positions", where, ("scoring", "all"))
    for value in ablation:
        one_of("--ablation", value, ("mean", "zero"))
    prompts = {"n_train": n_train, "n_validation": n_validation, "n_test": n_test}
    auto = sites == ["auto"]
    if best:
        of_a_study = {"--factors": factors, "--sparsity": sparsity, "--controls": controls, "--beside": beside}
        of_a_study |= {"--ce": ce, "--positions": positions != ["scoring"], "--ablation": ablation != ["mean"]}
        _refuse_beside_best(of_a_study | {"options of the solver": solver.arguments()}, text)
        plan("load", "read", "the", complete=False)
        model = model_options.load(None if auto else sites)
        tasks = _read_tasks(task, model, prompts)
        how = {"kl": DEFAULT_KL if kl is None else kl, "minutes": minutes}
        texts = text.rows(model, model_options)
        where = "auto" if auto or not sites else sites
        best_circuits(model, tasks, where, texts, how, out=out, overwrite=overwrite, printed=printed)
        return
    if not sites and not factors:
        raise ValueError("name what to study: --sites, finished factors (--factors), or both")
    finished = _labelled("--factors", factors or [], finished_factors)
    baselines = _labelled("--beside", beside or [], trained_units)
    asked = None if controls is None else [] if controls == "none" else [name.strip() for name in controls.split(",")]
    for name in asked or ():
        one_of("--controls (or 'none')", name, CONTROLS)
    made = tuple(sparsity or (() if finished or (kl, ce) != (None, None) else (0.5, 0.75)))
    # What both the forecast of memory and the study are of.
    study: dict[str, Any] = {"sparsities": made, "kl": kl, "ce": ce, "factors": finished, "controls": asked}
    study |= solver.arguments()
    sizes = sizes_of(made, kl, ce)
    beside_swd = controls_of(asked, sizes, solver.arguments())
    # One surface, unless the screen chooses, or finished factors bring their own.
    known = [] if auto or finished else [*study_steps(1, len(sizes), beside_swd, saved=True), "write"]
    steps = plan("load", "read", "screen", *known, complete=bool(known))
    with writing(out, "circuit"):
        model = model_options.load(None if auto else sites)
        of_factors = [surface_of(model, each) for each in finished.values()]
        replaced = sorted({site for names in of_factors for site in names})
        if sites and not auto:
            for label, units in baselines.items():  # before anything is run, or kept
                require_surface(model, label, units, find_sites(model, sites))
        tasks = _read_tasks(task, model, prompts)
        tokens, heldout = text.rows(model, model_options)
        screened = _screened(model, tasks, "all" if auto else [*(sites or ()), *replaced], out / "screen", overwrite)
        surfaces: dict[str, Any] = screened.choose() if auto else {", ".join(sites): sites} if sites else {}
        if not surfaces and not finished:
            raise ValueError(
                f"--sites auto: the model does none of these tasks ({legible(', '.join(screened.tasks))}), so no site "
                "matters to them; name sites"
            )
        read: dict[str, Any] = {"calibration_tokens": tokens, "heldout_length": heldout.shape[1], "n_beside": len(baselines)}
        say_memory_needed(memory_of(model, surfaces or {"": replaced}, tasks, **read, **study))
        if not known:
            named = [[site.name for site in find_sites(model, pattern)] for pattern in surfaces.values()]
            n_surfaces = len({tuple(names) for names in (*named, *of_factors)})
            steps.follow([*study_steps(n_surfaces, len(sizes), beside_swd, saved=True), "write"])
        run = run_study(
            model,
            surfaces,
            tasks,
            calibration_tokens=tokens,
            heldout_tokens=heldout,
            positions=positions,
            ablation=ablation,
            random_b_seeds=random_b_seeds,
            beside=baselines,
            out=out,
            overwrite=overwrite,
            on_step=steps,
            progress=True,
            **study,
        )
        _deliver(replace(run, screen=screened), out, printed)


def _refuse_beside_best(of_a_study: Mapping[str, Any], text: TextOptions) -> None:
    """Refuse options of a study, and zero-data factors, where --best chooses."""
    if given := [name for name, value in of_a_study.items() if value]:
        raise ValueError(
            f"--best chooses how units are made and beside what they stand; leave out {legible(', '.join(given))}, or "
            "leave out --best"
        )
    if not text.tokens:
        raise TokenError("a goal (kl= or ce=) needs tokens: factors are fitted on a part of the text and judged on another one")


def _read_tasks(names: Sequence[str], model: Any, sizes: Mapping[str, Any]) -> list[Task]:
    say(f"read {', '.join(names)} and text")
    return [load_task(name, model, **sizes) for name in names]


def _screened(model: Any, tasks: Sequence[Task], sites: Any, kept: Path, overwrite: bool) -> Screen:
    """Screen which of the sites the tasks need, and print it before anything is factorized; kept for a later call."""
    say("screen the sites: what do the tasks lose where an output is its mean?")
    question: dict[str, Any] = {"swd_lens": __version__, "prompts": _SCREENED, **standing_hooks(model)}
    question |= {"host": host_fingerprint(model, model.cfg), "sites": [site.name for site in find_sites(model, sites)]}
    question |= {"tasks": {task.name: task_fingerprint(task) for task in tasks}}
    screened = StepCache(kept, overwrite=overwrite).values(
        ("screen", json.dumps(question)),
        lambda: screen(model, tasks, sites=sites, n_prompts=_SCREENED, progress=True).as_dict(),
        Screen.from_dict,
    )
    status.print(table("The dense model on training prompts", screened.skill().drop(columns="remark")))
    for name, of_task in screened.tasks.items():
        if of_task.remark:
            say(f"note: {name}: {of_task.remark}")
    if needless := screened.needless():
        named = ", ".join(needless)
        say(
            f"note: none of these sites costs {named} a tenth of the margin: circuits may be empty; --sites auto looks everywhere"
        )
    status.print(table("The margin without a site or surface", screened.table(n=3)))
    return screened


def _labelled(option: str, folders: Sequence[Path], read: Callable[[Path], tuple[str, Any]]) -> dict[str, Any]:
    """Read the folders, by what they hold and where it lies."""
    by_label: dict[str, Any] = {}
    for folder in folders:
        label, content = read(folder)
        if label in by_label:
            raise ValueError(
                f"{legible(option)} {legible(folder)}: another folder gives {legible(label)}, too; rename one of them"
            )
        by_label[label] = content
    return by_label


def trained_units(folder: Path) -> tuple[str, LearnedUnits]:
    """Read the units of a finished training, and how they are called."""
    units = LearnedUnits.load(folder)
    return f"{units.provenance['method']} ({folder.resolve().name})", units


def finished_factors(folder: Path) -> tuple[str, FactorSet]:
    """Read the factors in a folder, or, where finetune or replace_model wrote it, those that they left there last."""
    places = [folder, folder / FINETUNED / FACTORS, folder / FACTORS]
    factors = FactorSet.load(next((place for place in places if (place / INDEX).is_file()), folder))
    tuned = ", tuned" if "finetune" in factors.provenance else ""
    names = [part for part in folder.resolve().parts if part not in (FACTORS, FINETUNED)]
    return f"SWD s={factors.sparsity:.3g}{tuned} ({names[-1]})", factors


def _deliver(run: Run, out: Path, printed: OutputOptions) -> None:
    """Write factors, numbers and report, and print the tables."""
    say("write the report")
    run.save(out)
    path = write_report(run, out / "report.html")
    files = {
        "report.html": "the report",
        "run.json": "every number",
        "factors/": "the SWD factors",
        "parts/": "what later calls take over",
    }
    printed.show(
        {"report": str(path), **run.as_dict()},
        *run_tables(run),
        f"Done in {run.seconds:.0f} s. Everything is in {out}:",
        *(f"  {name:<12} {content}" for name, content in files.items()),
    )


@command(app)
def report(
    folder: Annotated[Path, Argument(metavar="RUN", help="Folder that `swd-lens demo`, `swd-lens circuit` or Run.save wrote.")],
    *,
    out: Annotated[Path | None, Option(help="HTML file to write; RUN/report.html where not given.")] = None,
    as_json: Annotated[bool, Option("--json", help="Print the run's numbers as JSON instead of tables.")] = False,
) -> None:
    """The report of a finished run, made again from its run.json and factors/. Loads no model; takes seconds."""
    path = folder / "report.html" if out is None else out
    require_writable_file(path)
    run = Run.load(folder)
    write_report(run, path)
    line = f"The report is in {path} ({path.stat().st_size / 1e6:.1f} MB)."
    show(as_json, {"report": str(path), **run.as_dict()}, *run_tables(run), line, unbroken=True)
