"""demo and circuit: the whole road, ending in a report (`run_study` does the work); report: the report again, from the folder.

circuit --best: the cheapest faithful circuit of each task, in place of a study of given methods and sparsities.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
from typer import Argument, Option

from swd_lens.base import __version__
from swd_lens.base.checks import one_of, require_names
from swd_lens.base.errors import TokenError, legible
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.step_cache import FOLDER, StepCache
from swd_lens.base.writer import require_writable_file, writing
from swd_lens.circuits.screen import Screen, screen
from swd_lens.cli import status
from swd_lens.cli.options import (
    CeOption,
    HostOption,
    KlOption,
    LargeModelOptions,
    ModelOptions,
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
from swd_lens.factorization.estimate import estimate
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites
from swd_lens.hosts.embedded import load_default_model, text_tokens
from swd_lens.hosts.recording import standing_hooks
from swd_lens.report import write_report
from swd_lens.report.terminal import run_tables, table
from swd_lens.study import Run, run_study
from swd_lens.study.best import KL as DEFAULT_KL
from swd_lens.study.best import OUTPUTS, BestCircuit, best_circuit
from swd_lens.study.controls import CONTROLS, DEFAULT_CONTROLS, RANDOM_B_SEEDS, controls_of, sizes_of
from swd_lens.study.inside import look_inside
from swd_lens.study.memory import memory_of
from swd_lens.study.replacement import FACTORS, FINETUNED
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
        began = time.perf_counter()
        say("look inside: query-key pairs, a graph of units, paths")
        # Sparser units are fewer and stronger in a head: a pair of them matters.
        how: dict[str, Any] = {"sparsity": 0.75, "tokens": calibration, "progress": True}
        factors: dict[str, Any] = dict(factorize(exact, "attn_qkv", out=out / FOLDER / "attn_qkv", **how))
        for surface in ("all attn_o", "all mlp_out"):
            factors |= dict(run.sparsest(surface).factors)
        views, sections = look_inside(model, factors, tasks, graph_task="gendered_pronoun", path_task="greater_than")
        say("trust: nulls, worst cases, the dense model, one matrix varied")
        how = {"vary": last, "calibration_tokens": calibration, "out": out / FOLDER / "stability"}
        trust = look_at_trust(model, run, tasks, text_tokens(2_048, split="test"), **how)
        seconds = run.seconds + time.perf_counter() - began
        run = replace(run, attention=[*run.attention, *views], extras=[trust, *sections], seconds=seconds)
        _deliver(run, out, printed)


@dataclass(frozen=True)
class PromptOptions:
    """The tasks, and how many prompts each has."""

    task: Annotated[list[str], Option("--task", help="Task family or path to an auto-circuit JSON file; repeatable.")]
    n_train: Annotated[int, Option(help="Prompts of each task that score units.", min=1)] = 600
    n_validation: Annotated[
        int | None, Option(help="Prompts of each task that choose between circuits. [default: as many as --n-test]", min=1)
    ] = None
    n_test: Annotated[int, Option(help="Prompts of each task that judge circuits.", min=1)] = 200

    def read(self, model: Any) -> list[Task]:
        say(f"read {', '.join(self.task)} and text")
        sizes: dict[str, Any] = {"n_train": self.n_train, "n_validation": self.n_validation, "n_test": self.n_test}
        return [load_task(name, model, **sizes) for name in self.task]


@dataclass(frozen=True)
class MethodOptions:
    """The methods that a study compares."""

    factors: Annotated[
        list[Path] | None,
        Option(help="Folder of finished factors, or of what finetune or replace left (then the tuned ones); repeatable."),
    ] = None
    sparsity: Annotated[
        list[float] | None,
        Option("--sparsity", "-s", help="s in (0, 1); repeatable. [default: 0.5 0.75; with --factors or a goal none]"),
    ] = None
    kl: KlOption = None
    ce: CeOption = None
    controls: Annotated[
        str | None,
        Option(
            help=f"What stands beside SWD, with commas: {', '.join(CONTROLS)}; or 'none'. "
            f"[default: {','.join(DEFAULT_CONTROLS)}, as far as they can be made]"
        ),
    ] = None
    random_b_seeds: Annotated[int, Option(help="Of --controls random_b; the paper has 10.", min=1)] = RANDOM_B_SEEDS
    beside: Annotated[
        list[Path] | None, Option(help="Folder of train-baseline, compared beside SWD in the circuits; repeatable.")
    ] = None

    def arguments(self) -> dict[str, Any]:
        """Those of `run_study` that its forecast of memory takes, too."""
        finished = _labelled("--factors", self.factors or [], finished_factors)
        asked = (
            None if self.controls is None else [] if self.controls == "none" else [n.strip() for n in self.controls.split(",")]
        )
        for name in asked or ():
            one_of("--controls (or 'none')", name, CONTROLS)
        made = tuple(self.sparsity or (() if finished or (self.kl, self.ce) != (None, None) else (0.5, 0.75)))
        return {"sparsities": made, "kl": self.kl, "ce": self.ce, "factors": finished, "controls": asked}

    def refuse_beside_best(self, text: TextOptions, others: Mapping[str, Any]) -> None:
        """Refuse options of a study, and zero-data factors, where --best chooses."""
        of_a_study = {
            "--factors": self.factors,
            "--sparsity": self.sparsity,
            "--controls": self.controls,
            "--beside": self.beside,
        }
        if given := [name for name, value in (of_a_study | {"--ce": self.ce} | dict(others)).items() if value]:
            raise ValueError(
                f"--best chooses how units are made and beside what they stand; leave out {legible(', '.join(given))}, or "
                "leave out --best"
            )
        if not text.tokens:
            raise TokenError(
                "a goal (kl= or ce=) needs tokens: factors are fitted on a part of the text and judged on another one"
            )


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
    prompts: PromptOptions,
    model_options: LargeModelOptions,
    text: TextOptions,
    methods: MethodOptions,
    positions: Annotated[list[str], Option(help="'scoring' (paper), 'all', or both by repeating.")] = ["scoring"],  # noqa: B006 - typer copies it
    ablation: Annotated[list[str], Option(help="In a unit's place: 'mean' (paper), 'zero', or both.")] = ["mean"],  # noqa: B006 - typer copies it
    best: Annotated[
        bool,
        Option(
            "--best",
            help="In place of a study: search for the circuit of the fewest edges, over methods and sparsities. --sites is "
            "then 'auto' unless given.",
        ),
    ] = False,
    minutes: Annotated[float, Option(help="Of --best: about how long the search of a task may take.")] = 10.0,
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
    if best:
        changed = {"--positions": positions != ["scoring"], "--ablation": ablation != ["mean"]}
        methods.refuse_beside_best(text, changed | {"options of the solver": solver.arguments()})
        how = {"kl": DEFAULT_KL if methods.kl is None else methods.kl, "minutes": minutes, "overwrite": overwrite}
        _best_circuits(out, sites or ["auto"], prompts, model_options, text, how, printed)
        return
    if not sites and not methods.factors:
        raise ValueError("name what to study: --sites, finished factors (--factors), or both")
    baselines = _labelled("--beside", methods.beside or [], trained_units)
    how = {"positions": positions, "ablation": ablation, "random_b_seeds": methods.random_b_seeds, "beside": baselines}
    study = {**methods.arguments(), **solver.arguments()}
    with writing(out, "circuit"):
        _deliver(_studied(out, sites or [], prompts, model_options, text, study, how, overwrite), out, printed)


def _best_circuits(
    out: Path,
    sites: list[str],
    prompts: PromptOptions,
    model_options: ModelOptions,
    text: TextOptions,
    how: dict[str, Any],
    printed: OutputOptions,
) -> None:
    """Find, save and print the best circuit of each task; a search that an earlier call began or finished goes on there.

    Args:
        sites: patterns, or ["auto"].
        how: kl, minutes and overwrite.

    Raises:
        ValueError: two tasks of the same name, or one whose folder would be a file of ours.
        ResumeError: a task's folder holds another search.
    """
    plan("load", "read", "the", complete=False)
    auto = sites == ["auto"]
    model = model_options.load(None if auto else sites)
    tasks, (tokens, heldout) = prompts.read(model), text.rows(model, model_options)
    require_names("task", [task.name for task in tasks])
    say_memory_needed({"best circuit": estimate(model, OUTPUTS if auto else sites, tokens=tokens).peak_bytes})
    by_task: dict[str, BestCircuit] = {}
    with writing(out, "circuit"):
        for task in tasks:
            say(f"the best circuit of {task.name}, in about {how['minutes']:g} minutes")
            given = {"tokens": tokens, "heldout_tokens": heldout, "out": out / task.name}
            by_task[task.name] = best_circuit(model, task, "auto" if auto else sites, **given, **how)
    shown: list[Any] = []
    for best in by_task.values():
        # What has room in a terminal of 80 columns; --json and best.json have the rest.
        tried = best.tried.assign(KL=best.tried["KL"].map("{:.2g}".format))
        tried = tried.filter(items=["method", "KL", "edges", "units", "outcome"])
        shown += [table(f"{best.title()}: what was tried", tried), best.in_words(), ""]
    files = f"Everything is in {out}, a folder per task: best.json, circuit.safetensors, factors/."
    printed.show({"folder": str(out), **{name: best.as_dict() for name, best in by_task.items()}}, *shown, files)


def _studied(
    out: Path,
    sites: list[str],
    prompts: PromptOptions,
    model_options: ModelOptions,
    text: TextOptions,
    study: dict[str, Any],
    how: dict[str, Any],
    overwrite: bool,
) -> Run:
    """Screen the sites, say what the study will take, and run it.

    Args:
        sites: patterns, or "auto"; empty: those of finished factors.
        study: arguments of `run_study` that its forecast of memory takes, too; how: further ones.
    """
    auto, finished, baselines = sites == ["auto"], study["factors"], how["beside"]
    sizes = sizes_of(study["sparsities"], study["kl"], study["ce"])
    beside_swd = controls_of(study["controls"], sizes, study)
    # One surface, unless the screen chooses, or finished factors bring their own.
    known = [] if auto or finished else [*study_steps(1, len(sizes), beside_swd, saved=True), "write"]
    steps = plan("load", "read", "screen", *known, complete=bool(known))
    model = model_options.load(None if auto or not sites else sites)
    of_factors = [surface_of(model, each) for each in finished.values()]
    replaced = sorted({site for names in of_factors for site in names})
    if sites and not auto:
        for label, units in baselines.items():  # before anything is run, or kept
            require_surface(model, label, units, find_sites(model, sites))
    tasks, (tokens, heldout) = prompts.read(model), text.rows(model, model_options)
    screened = _screened(model, tasks, "all" if auto else [*sites, *replaced], out / "screen", overwrite)
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
    asked: dict[str, Any] = {"calibration_tokens": tokens, "heldout_tokens": heldout, "out": out, "overwrite": overwrite}
    run = run_study(model, surfaces, tasks, on_step=steps, progress=True, **asked, **how, **study)
    return replace(run, screen=screened)


def _screened(model: Any, tasks: Sequence[Task], sites: Any, kept: Path, overwrite: bool) -> Screen:
    """Screen which of the sites the tasks need, and print it before anything is factorized; kept for a later call."""
    say("screen the sites: what do the tasks lose where an output is its mean?")
    question: dict[str, Any] = {"swd_lens": __version__, "prompts": _SCREENED, **standing_hooks(model)}
    question |= {"host": host_fingerprint(model), "sites": [site.name for site in find_sites(model, sites)]}
    question |= {"tasks": {task.name: splits_fingerprint(task.splits) for task in tasks}}
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
