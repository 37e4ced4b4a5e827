"""localization: how much an edit of a task's units moves that task, and how much it moves others, against random units.

1. Of each task the best units by score on its training prompts. The edit sets them to their mean over those prompts (or to zero).
2. Every edit is measured on the test prompts of every task: the margin that it takes off, as a share of the dense host's margin
   there, so that tasks of large and small margins compare.
3. `selectivity` of an edit: its share of its own task less the mean magnitude of its shares of the others.
4. Random units, as many per edit, are edited in the same way; the rank of a task's edit among them is its p-value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from swd_lens.base import __version__
from swd_lens.base.checks import bounded, require_names
from swd_lens.base.errors import legible
from swd_lens.base.figures import heatmap, new_figure
from swd_lens.base.progress import tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import Circuit, attribute, evaluate_circuits
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.interventions import Outcome
from swd_lens.hosts import host_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task
from swd_lens.units import UnitSet
from swd_lens.units.keys import read_units

RANDOM = 99


@dataclass(frozen=True, repr=False, eq=False)
class EditLocalization(SavedRecord):
    """Effects of each task's edit on every task, beside random units.

    Attributes:
        units: task -> names of the units that its edit changes.
        margins: task -> mean margin of the dense host on its test prompts, logits.
        effects: a row per edit and task: "edit" (a task's name, or "random 0", ...), "task", "drop" (logits that the edit takes
            off the margin with all units), "share" (of the dense margin).
        settings: everything that was used.
    """

    WHAT = "an edit localization"
    derived = ("selectivities", "p")

    units: dict[str, list[str]]
    margins: dict[str, float]
    effects: pd.DataFrame
    settings: Mapping[str, Any]

    @property
    def selectivities(self) -> dict[str, float]:
        """Task -> selectivity of its edit."""
        return {task: float(self._selectivity(task, [task])[0]) for task in self.units}

    @property
    def p(self) -> dict[str, float]:
        """Task -> rank of its edit's selectivity among those of random units: (1 + as selective ones) / (random + 1)."""
        random = [name for name in self.effects["edit"].drop_duplicates() if name not in self.units]
        found = {}
        for task, own in self.selectivities.items():
            as_good = sum(value >= own for value in self._selectivity(task, random))
            found[task] = (1 + as_good) / (len(random) + 1)
        return found

    def _selectivity(self, task: str, edits: Sequence[str]) -> list[float]:
        """Selectivity of these edits, taken as edits of a task."""
        shares = self.effects.pivot(index="edit", columns="task", values="share").loc[list(edits)]
        others = shares.drop(columns=task).abs().mean(axis=1)
        return (shares[task] - others).tolist()

    def table(self) -> pd.DataFrame:
        """One row per task's edit: its units, drop and share of its own task, mean share of others, selectivity, p, and the mean
        selectivity of random units there.
        """
        random = [name for name in self.effects["edit"].drop_duplicates() if name not in self.units]
        rows, p, selectivities = [], self.p, self.selectivities
        for task in self.units:
            of_edit = self.effects[self.effects["edit"] == task].set_index("task")
            own = of_edit.loc[task]
            row = {"task": task, "units": ", ".join(self.units[task]), "drop": own["drop"], "share": own["share"]}
            row |= {"share of others": of_edit["share"].drop(task).abs().mean(), "selectivity": selectivities[task], "p": p[task]}
            rows.append(row | {"random selectivity": sum(self._selectivity(task, random)) / len(random)})
        return pd.DataFrame(rows)

    def plot(self):
        """Shares of every task's margin that every task's edit takes off, as a map; a matplotlib Figure."""
        names = list(self.units)
        own = self.effects[self.effects["edit"].isin(names)]
        shares = own.pivot(index="edit", columns="task", values="share").loc[names, names]
        figure, axes = new_figure(width=2.2 + 0.9 * len(names), height=1.6 + 0.5 * len(names))
        ax = axes[0, 0]
        heatmap(ax, shares, label="share of the margin", signed=True, rows=names, columns=names)
        ax.set(xlabel="task", ylabel="edited units of")
        return figure

    def __repr__(self) -> str:
        said = ", ".join(f"{task} {value:+.2f} (p = {self.p[task]:.2g})" for task, value in self.selectivities.items())
        return legible(f"EditLocalization(selectivity {said})")


@with_torch_defaults
def localize(
    model: Any,
    factors: Any,
    tasks: Sequence[Task],
    *,
    units: int | Mapping[str, Any] = 1,
    random: int = RANDOM,
    ablation: str = "mean",
    seed: int = 0,
    progress: bool = False,
    **attribution: Any,
) -> EditLocalization:
    """Edit each task's units, measure every task, and hold the effects against those of random units.

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`.
        tasks: two or more, tokenized for this host.
        units: how many of each task's best units its edit changes together; or task name -> units of your own choice.
        random: sets of random units (of those that read and write), of the largest edit's number of units.
        ablation: "mean" or "zero": what edited units are set to.
        seed: of the draw.
        attribution: of `swd_lens.attribute`.

    Raises:
        ValueError: fewer than two tasks, two of the same name, units of a task that there is not, fewer units than an edit
            changes or than can be drawn, or a dense margin that is not positive: no share of it means anything.
        TaskError: prompts of another host.

    Source: ours.
    """
    if len(tasks) < 2:
        raise ValueError(f"localization sets a task beside others; give two tasks or more, got {len(tasks)}")
    require_names("task", [task.name for task in tasks])
    bounded("random", random, 1)
    own, dense = UnitSet.of(model, factors), DenseCache()
    bar = tqdm(tasks, desc="localization", unit="task", disable=not progress, leave=False)
    scores = {task.name: attribute(model, own, task, dense=dense, **attribution) for task in bar}
    if isinstance(units, Mapping):
        if units.keys() != scores.keys():
            raise ValueError(f"units= names {', '.join(map(legible, units))}; the tasks are {', '.join(map(legible, scores))}")
        chosen = {name: read_units(units[name], of_task.scores) for name, of_task in scores.items()}
    else:
        bounded("units", units, 1, min(of_task.n_units for of_task in scores.values()))
        chosen = {name: of_task.ranking()[:units] for name, of_task in scores.items()}
    edits = {name: Circuit.of(own, scores[name], of).units for name, of in chosen.items()}
    # Sets of random units that read and write.
    size = max(map(len, edits.values()))
    valid = [(site, unit) for site, edges in own.active_edges.items() for unit in edges.nonzero()[:, 0].tolist()]
    if len(valid) < size:
        raise ValueError(f"an edit changes {size} units, and only {len(valid)} read and write: no random ones can be drawn")
    generator = torch.Generator().manual_seed(seed)
    draws = [torch.randperm(len(valid), generator=generator)[:size].tolist() for _ in range(random)]
    edits |= {f"random {i}": tuple(valid[place] for place in places) for i, places in enumerate(draws)}
    rows, margins = [], {}
    for task in tasks:
        margins[task.name] = float(Outcome.of_host(host_of(model), task.test, 256).q)
        if not margins[task.name] > 0:
            raise ValueError(
                f"the host's mean margin of {legible(task.name)} is {margins[task.name]:.2f}: it does not do the task"
            )
        circuits = {name: Circuit.of(own, scores[task.name], list(of)) for name, of in edits.items()}
        measured = evaluate_circuits(model, own, task.test, circuits, ablation=ablation, dense=dense)
        for name, drop in zip(measured["circuit"], measured["drop"], strict=True):
            rows.append({"edit": name, "task": task.name, "drop": drop, "share": drop / margins[task.name]})
    settings = {"model": str(model.cfg.model_name), "swd_lens": __version__, "ablation": ablation, "random": random, "seed": seed}
    settings |= {"factors": own.identities, "attribution": dict(attribution), **standing_hooks(model)}
    named = {name: [f"{site}/{unit}" for site, unit in edits[name]] for name in chosen}
    return EditLocalization(named, margins, pd.DataFrame(rows), settings)
