"""screen: which sites and surfaces of the dense host a task needs, before anything is factorized.

1. An intervention sets the outputs of one site, or of all sites of a surface, to their means over training prompts, at the
   scoring position, at all positions, or at each its own; screen_runs.py runs them.
2. `Screen` says, for each task, how well the dense host does it, and what each intervention costs: margin kept and lost.
3. `skill` is how well a host does its tasks, alone.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, one_of
from swd_lens.base.errors import legible
from swd_lens.base.figures import heatmap, literal, new_figure
from swd_lens.base.record import PlainRecord, SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.interventions import Outcome
from swd_lens.circuits.screen_runs import ScreenRuns, replaceable
from swd_lens.hosts import host_of, require_no_dropout, sites_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern, base_kind, kind_order, split_name
from swd_lens.tasks.task import Task

POSITIONS = ("scoring", "all", "each")
WELL_DONE = 0.8  # share right, below which a circuit of the task says little
# Of the margin: where no single site costs as much, `Screen.choose` takes a surface.
_MATTERS = 0.1


# ---------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class TaskScreen(PlainRecord):
    """One task on the dense host, and under each intervention."""

    task: str
    prompts: int  # how many training prompts were run
    margin: float  # mean margin of the dense host, in logits; right: share of prompts that it does (NaN with a metric)
    right: float
    margins: Mapping[str, float]  # site or surface -> mean margin while its outputs are their means
    errors: Mapping[str, float]  # site or surface -> standard error of what that costs, over prompts
    rights: Mapping[str, float]  # site or surface -> share of prompts done

    def kept(self, name: str) -> float:
        """Share of the dense margin that is left without this site or surface; NaN where there is no positive margin."""
        return self.margins[name] / self.margin if self.margin > 0 else float("nan")

    def dropped(self, name: str) -> float:
        """Logits of margin that are lost without this site or surface."""
        return self.margin - self.margins[name]

    @property
    def remark(self) -> str:
        """A warning before looking at circuits of this task; empty where the host does it well."""
        return remark_of(self.margin, self.right)


def remark_of(margin: float | int, right: float | int) -> str:
    """A warning of a task that the dense host does with this margin, on this share of the prompts; empty where it does well."""
    if margin <= 0:
        return "the dense model does not do this task: its mean margin is not positive"
    if right < WELL_DONE:
        return f"the dense model does only {right:.0%} of the prompts: a circuit of this task says little"
    return ""


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class Screen(SavedRecord):
    """Sites and surfaces of a dense host that tasks need.

    Attributes:
        tasks: name -> `TaskScreen`.
        sites: names of the sites that were screened, in execution order.
        surfaces: label -> the names of its sites.
        settings: every choice that the numbers depend on.
    """

    WHAT = "a screen"

    tasks: Mapping[str, TaskScreen]
    sites: tuple[str, ...]
    surfaces: Mapping[str, tuple[str, ...]]
    settings: Mapping[str, Any]

    def title(self) -> str:
        return f"Screen of {', '.join(self.tasks)}: {len(self.sites)} sites, {len(self.surfaces)} surfaces"

    def __repr__(self) -> str:
        """The title, and for each task how well the host does it and what it needs most."""
        lines = [self.title()]
        for screened in self.tasks.values():
            right, what = "" if math.isnan(screened.right) else f", right {screened.right:.0%}", screened.remark
            if screened.margin > 0:
                label, _ = self._needed(screened)
                costs = f"{screened.dropped(label):.2f} ± {screened.errors[label]:.2f} logits ({1 - screened.kept(label):.0%})"
                what = f"needs {label} most: {costs} lost without it"
            lines.append(f"  {screened.task}: margin {screened.margin:.2f} logits{right}; {what}")
        return "\n".join(lines)

    def skill(self) -> pd.DataFrame:
        """How well the dense host does each task."""
        return _skill_table(self.tasks.values())

    def table(self, n: int | None = 5) -> pd.DataFrame:
        """For each task every surface, and the n sites that change its margin most (None: all sites)."""
        rows = []
        for screened in self.tasks.values():
            best = sorted(self.sites, key=lambda name: -abs(screened.dropped(name)))
            rows += [_row(screened, name) for name in (*self.surfaces, *best[:n])]
        return pd.DataFrame(rows)

    def needless(self) -> list[str]:
        """Tasks that the host does, and that no screened site or surface costs a tenth of the margin: circuits may be empty."""
        names = (*self.sites, *self.surfaces)
        return [
            task
            for task, screened in self.tasks.items()
            if screened.margin > 0 and max(map(screened.dropped, names)) < _MATTERS * screened.margin
        ]

    def choose(self) -> dict[str, list[str]]:
        """Label -> site names, for a study: the site that costs each task most, or, where none costs a tenth of the margin, the
        surface that does. Tasks that the host does not do choose nothing; `chosen` says whose choice each is."""
        return dict(self._needed(screened) for screened in self.tasks.values() if screened.margin > 0)

    def chosen(self) -> pd.DataFrame:
        """Whose `choose` is what: a row per task with the label of its site or surface, the sites, and what is kept and lost
        without them (logits, with its standard error); a task that the host does not do has none."""
        rows = []
        for screened in self.tasks.values():
            if screened.margin > 0:
                label, sites = self._needed(screened)
                rows.append(_row(screened, label) | {"sites": ", ".join(sites)})
            else:
                rows.append({"task": screened.task, "sites": ""})
        return pd.DataFrame(rows, columns=["task", "without", "sites", "kept", "lost (logits)", "±", "right"])

    def _needed(self, screened: TaskScreen) -> tuple[str, list[str]]:
        """Label and sites of what costs one task most: a site, or a surface where no site costs a tenth of the margin."""
        site = max(self.sites, key=screened.dropped)
        if self.surfaces and screened.dropped(site) < _MATTERS * abs(screened.margin):
            surface = max(self.surfaces, key=screened.dropped)
            return surface, list(self.surfaces[surface])
        return site, [site]

    def plot(self, tasks: Iterable[str] | None = None):
        """Draw the cost of each site to each task (None: all tasks), a heat map of layers by kind; a matplotlib Figure."""
        shown = [self.tasks[name] for name in (self.tasks if tasks is None else tasks)]
        kinds = sorted({split_name(name)[1] for name in self.sites}, key=kind_order)
        n_layers = 1 + max((split_name(name)[0] for name in self.sites), default=0)
        height = 0.6 + 0.22 * max(3, len(kinds))
        figure, axes = new_figure(max(1, len(shown)), width=1.6 + 0.22 * n_layers, height=height)
        for ax, screened in zip(axes[:, 0], shown, strict=False):
            values = [[float("nan")] * n_layers for _ in kinds]
            for name in self.sites:
                layer, kind = split_name(name)
                values[kinds.index(kind)][layer] = 1 - screened.kept(name)
            columns = [str(layer) for layer in range(n_layers)]
            heatmap(ax, values, label="margin lost", signed=True, largest=1.0, rows=kinds, columns=columns)
            title = f"{screened.task}: margin {screened.margin:.2f}, right {screened.right:.0%}"
            ax.set_title(literal(title), fontsize=9)
        return figure

    def parts(self) -> tuple[Any, ...]:
        places = {"scoring": "the scoring position", "all": "all positions", "each": "each position, its own mean"}
        where = places[self.settings["positions"]]
        note = f"kept: share of the margin left while the outputs are their means over the prompts, at {where}."
        return (self.skill(), "What each task needs most (.choose()):", self.chosen(), self.plot(), self.table(), note)


def _row(screened: TaskScreen, name: str) -> dict[str, Any]:
    return {
        "task": screened.task,
        "without": name,
        "kept": screened.kept(name),
        "lost (logits)": screened.dropped(name),
        "±": screened.errors[name],
        "right": screened.rights[name],
    }


def _skill_table(screened: Iterable[TaskScreen]) -> pd.DataFrame:
    columns = ["task", "prompts", "right", "mean margin", "remark"]
    return pd.DataFrame([(s.task, s.prompts, s.right, s.margin, s.remark) for s in screened], columns=columns)


# ---------------------------------------------------------------------------------------------- calls


@with_torch_defaults
def skill(model: Any, tasks: Task | Sequence[Task], *, batch_size: int = 64) -> pd.DataFrame:
    """How well the host does tasks, on their test prompts: share right, mean margin, and a remark where a circuit
    says little (ours).

    Args:
        model: the host, or one with units attached, which are then judged.
        tasks: one or several.
    """
    host = host_of(model)
    require_no_dropout(model)
    rows = []
    for task in [tasks] if isinstance(tasks, Task) else tasks:
        task.test.require_host(model)
        outcome = Outcome.of_host(host, task.test, batch_size)
        rows.append(_task_screen(task.name, outcome, (), outcome))
    return _skill_table(rows)


@with_torch_defaults
def screen(
    model: Any,
    tasks: Task | Sequence[Task],
    *,
    sites: Pattern = "all",
    surfaces: Mapping[str, Pattern] | None = None,
    positions: str = "scoring",
    n_prompts: int = 64,
    batch_size: int = 64,
    tokens_per_forward: int = 2_048,
    progress: bool = False,
) -> Screen:
    """Which sites and surfaces of a host its tasks need (ours: mean ablation of sites).

    Args:
        model: the dense host; it is left as it was.
        tasks: one or several; only training prompts are run.
        sites: which sites are screened one by one.
        surfaces: label -> sites that are replaced together; None = all sites of each kind.
        positions: "scoring": outputs are replaced at the scoring position, by their mean there; "all": at all positions, by their
            mean over them; "each": at all positions, each by its own mean over the prompts, which must have one length. What all
            prompts share at a position then stays, and only what differs between them is lost: see
            `swd_lens.tasks.aligned.aligned_prompts`.
        n_prompts: of each task's train split, from its beginning.
        batch_size: prompts at once; tokens_per_forward: prompts x positions x interventions at once, which bounds memory.

    Raises:
        UnknownSiteError: no such sites.
        ValueError: an unknown `positions`, numbers below 1, prompts of several lengths with "each", or units are attached.
        TaskError: prompts tokenized for another host.
    """
    host = host_of(model)
    require_no_dropout(model)
    one_of("positions", positions, POSITIONS)
    for name, n in (("n_prompts", n_prompts), ("batch_size", batch_size), ("tokens_per_forward", tokens_per_forward)):
        bounded(name, n, 1)
    of_sites = sites_of(host, sites)
    if surfaces is None:
        kinds = dict.fromkeys(base_kind(site.kind) for site in sorted(of_sites, key=lambda s: kind_order(s.kind)))
        by_kind = {kind: [site for site in of_sites if base_kind(site.kind) == kind] for kind in kinds}
        of_surfaces = {f"all {kind}": group for kind, group in by_kind.items() if len(group) > 1}
    else:
        of_surfaces = {label: sites_of(host, pattern) for label, pattern in surfaces.items()}
    interventions = {site.name: [site] for site in of_sites} | of_surfaces
    every = {site.name: site for group in interventions.values() for site in group}
    listed = [tasks] if isinstance(tasks, Task) else list(tasks)
    for task in listed:
        task.train.require_host(model)
        lengths = {len(tokens) for tokens in task.train.tokens[:n_prompts]}
        if positions == "each" and len(lengths) > 1:
            raise ValueError(
                f'positions="each" takes the mean of every position, which prompts of {min(lengths)} to {max(lengths)} '
                f"tokens do not share ({legible(task.name)}); swd_lens.tasks.aligned.aligned_prompts gives prompts of one "
                "length"
            )
    screened, fast_forward, hooks = {}, {}, standing_hooks(model)
    with torch.no_grad(), replaceable(host, list(every.values())) as outputs:
        for task in listed:
            runs = ScreenRuns(host, outputs, task.train.first(n_prompts), positions, batch_size, tokens_per_forward)
            dense, outcome = runs.screen(interventions, f"screen {task.name}" if progress else None)
            screened[task.name] = _task_screen(task.name, dense, interventions, outcome)
            fast_forward[task.name] = runs.fast_forward
    settings: dict[str, Any] = {"swd_lens": __version__, "model": str(model.cfg.model_name), "positions": positions}
    settings["prompts"] = {task.name: screened[task.name].prompts for task in listed}
    for name, of in (("sources", "source"), ("prepend_bos", "prepend_bos")):
        settings[name] = {task.name: getattr(task, of) for task in listed}
    settings |= {"fast_forward": fast_forward, **hooks}
    names = {label: tuple(site.name for site in group) for label, group in of_surfaces.items()}
    return Screen(screened, tuple(site.name for site in of_sites), names, settings)


def _task_screen(task: str, dense: Outcome, interventions: Iterable[str], outcome: Outcome) -> TaskScreen:
    """Numbers of a task; `outcome` has a row for each intervention."""
    places = {name: row for row, name in enumerate(interventions)}
    lost = dense.margins - outcome.margins
    spread = lost.std(1) / lost.shape[1] ** 0.5 if lost.shape[1] > 1 else torch.full((len(lost),), torch.nan)
    margins, errors = ({name: float(of[row]) for name, row in places.items()} for of in (outcome.q, spread))
    rights = {name: float(outcome.correct[row].mean()) for name, row in places.items()}
    return TaskScreen(task, dense.margins.shape[1], float(dense.q), float(dense.correct.mean()), margins, errors, rights)
