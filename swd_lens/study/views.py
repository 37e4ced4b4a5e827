"""The best units of a run, and where the heads look before and after a replacement: what it shows beside its numbers.

`unit_cards`: a task's best units, each with what a reader wants to know of it.

1. Per task, pick the surface that carries most of it under the sparsest SWD replacement.
2. Take its best units by score; their contexts on held-out text come from one pass per surface.
3. Where the site writes to the residual stream, add the direct logit effect of the write vector.

`attention_views`: one prompt per task.

1. For each task take one test prompt and the patterns of every head of the dense host.
2. Attach each surface's replacement once and take the patterns of all prompts again. What a replacement did to a head is
   KL(dense || replaced), averaged over destinations.
3. Show the dense host: all heads of a small model, else those that the replacements changed most.
4. For each surface that changes patterns show the heads that it changed most, dense beside replaced, with every KL.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit import WRITES_RESIDUAL, Context, Edges, LogitEffect, TaskRank, UnitCard, top_contexts
from swd_lens.analysis.audit.vectors import Readout, beginning_of
from swd_lens.base.divergence import kl
from swd_lens.base.record import checked
from swd_lens.circuits import Comparison
from swd_lens.hosts import find_sites, host_of, require_no_dropout
from swd_lens.hosts.sites import parse_unit, split_name
from swd_lens.study.section import AttentionView
from swd_lens.tasks.streams import as_stream
from swd_lens.tasks.task import Task
from swd_lens.units import attach
from swd_lens.units.factors import FactorSet

DENSE, REPLACED = "dense patterns", "replaced patterns"
_MOST_HEADS = 16  # all heads of a model with so many; of larger models the few that changed most
_FEW_HEADS, _PAIRS = 8, 3
_LONGEST = 64  # positions; of longer prompts the last ones
_MOST_VALUES = 250_000  # of all views together: about 1.5 MB in the page
_CHANGED = 1e-4  # a pattern that moves less is shown the same

Patterns = Mapping[str, Float[Tensor, "_dest _src"]]  # head -> where it looks, in the order of layers

# ---------------------------------------------------------------------------------------------- units


_CARD = {
    **dict.fromkeys(("task", "surface", "method", "unit"), str),
    **dict.fromkeys(("rank", "read_edges", "write_edges"), int),
    "score": float,
}


@dataclass(frozen=True, repr=False, kw_only=True)
class TaskUnit(UnitCard):
    """One of a task's best units.

    Attributes:
        unit, contexts, reads, writes, logits, tasks: see `UnitCard`; edges are counted only, and the only task is its own.
        task, surface, method: for which it is one of the best, and whose unit it is.
    """

    task: str
    surface: str
    method: str

    @property
    def rank(self) -> int:
        """Among all units of the surface, 1 the best."""
        return self.tasks[self.task].rank

    @property
    def score(self) -> float:
        """In logits of margin."""
        return self.tasks[self.task].score

    @property
    def read_edges(self) -> int:
        return self.reads.n if self.reads else 0

    @property
    def write_edges(self) -> int:
        return self.writes.n if self.writes else 0

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values, as run.json holds them: there ranks count from 0."""
        names = ("task", "surface", "method", "unit", "rank", "score", "read_edges", "write_edges")
        return {
            **{name: getattr(self, name) for name in names},
            "rank": self.rank - 1,
            "contexts": [context.as_dict() for context in self.contexts],
            "logits": self.logits and self.logits.as_dict(),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "TaskUnit":
        """Read what `as_dict` gave, back from JSON. Raises KeyError, TypeError, ValueError: it is something else."""
        rest = checked("TaskUnit", values, _CARD)
        parse_unit(rest["unit"])
        task, score, logits = rest.pop("task"), rest.pop("score"), rest.pop("logits")
        return cls(
            contexts=tuple(map(Context.from_dict, rest.pop("contexts"))),
            reads=Edges(rest.pop("read_edges")),
            writes=Edges(rest.pop("write_edges")),
            logits=logits and LogitEffect.from_dict(logits),
            tasks={task: TaskRank(score, rest.pop("rank") + 1)},
            task=task,
            **rest,
        )


def unit_cards(
    model: Any,
    factors: Mapping[str, tuple[str, FactorSet]],
    comparisons: Mapping[str, Comparison],
    tokens: Any,
    *,
    per_task: int = 3,
    n_contexts: int = 6,
    progress: bool = False,
) -> list[TaskUnit]:
    """Make cards in the order of tasks, then rank.

    Args:
        factors: surface -> (method, its factors): the replacement whose units are shown.
        comparisons: surface -> comparison that holds the method's scores and curves, by task.
        tokens: (rows, pos) held-out text for the contexts.
    """

    def carried(surface: str, task: str) -> float:
        return comparisons[surface][task].curves[factors[surface][0]].carried.logits

    tasks = list(next(iter(comparisons.values())))
    surface_of = {task: max(factors, key=lambda surface, task=task: carried(surface, task)) for task in tasks}
    cards: dict[str, list[TaskUnit]] = {}
    for surface in dict.fromkeys(surface_of.values()):
        method, replaced = factors[surface]
        scores = {task: comparisons[surface][task].scores[method] for task in tasks if surface_of[task] == surface}
        best = {task: of_task.ranking()[:per_task] for task, of_task in scores.items()}
        units = list(dict.fromkeys(unit for ranking in best.values() for unit in ranking))
        contexts = top_contexts(model, replaced, units, tokens, n=n_contexts, progress=progress) if units else {}
        writing = [site for site, _ in units if split_name(site)[1] in WRITES_RESIDUAL]
        readout = Readout(model, find_sites(model, writing), *beginning_of(as_stream(tokens, model))) if writing else None
        for task, ranking in best.items():
            cards[task] = [
                TaskUnit(
                    unit=f"{site}/{index}",
                    contexts=tuple(contexts[site, index]),
                    reads=Edges(int((replaced[site].read[:, index] != 0).sum())),
                    writes=Edges(int((replaced[site].write[index] != 0).sum())),
                    logits=readout.effects(site, replaced[site].write[index][None])[0]
                    if readout is not None and site in writing
                    else None,
                    tasks={task: TaskRank(float(scores[task].scores[site][index]), rank)},
                    task=task,
                    surface=surface,
                    method=method,
                )
                for rank, (site, index) in enumerate(ranking, 1)
            ]
    return [card for task in tasks for card in cards[task]]


# ---------------------------------------------------------------------------------------------- attention


def attention_views(model: Any, tasks: Sequence[Task], replacements: Mapping[str, tuple[str, FactorSet]]) -> list[AttentionView]:
    """Make views in the order of tasks: the dense host, then each surface that changes patterns.

    Args:
        tasks: one test prompt of each is shown.
        replacements: surface -> (method, its factors).

    Returns: Nothing where the host's forward shows no patterns (hook_pattern).
    """
    require_no_dropout(model)
    prompts = {task.name: _prompt(task) for task in tasks}
    dense = {task: _patterns(model, row) for task, row in prompts.items()}
    if not all(dense.values()):
        return []
    replaced: dict[str, dict[str, Patterns]] = {}
    for surface, (_, factors) in replacements.items():
        with attach(model, factors):
            replaced[surface] = {task: _patterns(model, row) for task, row in prompts.items()}
    methods = {surface: method for surface, (method, _) in replacements.items()}
    views: list[AttentionView] = []
    for task, row in prompts.items():
        changed = {
            surface: patterns[task]
            for surface, patterns in replaced.items()
            if any(float((patterns[task][head] - p).abs().max()) > _CHANGED for head, p in dense[task].items())
        }
        strings = [model.tokenizer.decode([token]) for token in row.tolist()]
        views += _views_of_task(task, strings, dense[task], changed, methods, _MOST_VALUES // max(1, len(tasks)))
    return views


def _prompt(task: Task) -> Int[Tensor, " pos"]:
    """The first test prompt that is short enough to be read; the shortest where none is."""
    rows = list(task.test.tokens)
    return next((row for row in rows if len(row) <= _LONGEST), min(rows, key=len))


def _patterns(model: Any, row: Int[Tensor, " pos"]) -> Patterns:
    """Patterns of all heads; none if some layer shows none."""
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    if not all(name in model.hook_dict for name in names):
        return {}
    by_hook: dict[str, Float[Tensor, "head dest src"]] = {}

    def keep(pattern: Tensor, hook: Any) -> None:
        by_hook[hook.name] = pattern[0].detach().float().cpu()

    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        host_of(model).run(row[None])
    if len(by_hook) < len(names):
        return {}
    return {f"L{layer}H{head}": p for layer, name in enumerate(names) for head, p in enumerate(by_hook[name])}


def _views_of_task(
    task: str, tokens: Sequence[str], dense: Patterns, changed: Mapping[str, Patterns], methods: Mapping[str, str], room: int
) -> list[AttentionView]:
    """The dense host's view and one per surface that changed patterns; `room`: values that they may have together."""
    divergences = {
        surface: {head: _pattern_kl(dense[head], replaced[head]) for head in dense} for surface, replaced in changed.items()
    }
    most = {head: max((of_head[head] for of_head in divergences.values()), default=0.0) for head in dense}
    fits = max(2, room // min(len(tokens), _LONGEST) ** 2)
    few = sorted(dense, key=lambda head: -most[head])[: min(_FEW_HEADS, fits)]
    heads = list(dense) if len(dense) <= min(_MOST_HEADS, fits) else [head for head in dense if head in few]
    cut = f" Shown are its last {_LONGEST} positions." if len(tokens) > _LONGEST else ""
    which = "All heads" if len(heads) == len(dense) else f"{len(heads)} of {len(dense)} heads"
    which += ", those that the replacements changed most" if len(heads) < len(dense) and changed else ""

    def view(kind: str, title: str, patterns: Patterns, caption: str, measures: Mapping[str, Any]) -> AttentionView:
        values = torch.stack(list(patterns.values()))[:, -_LONGEST:, -_LONGEST:]
        others = {"kind": kind, "title": title, "task": task, "caption": caption, "measures": measures}
        return AttentionView.of(values, list(tokens)[-_LONGEST:], list(patterns), **others)

    views = [view(DENSE, "the dense model", {h: dense[h] for h in heads}, f"{which}, on a test prompt.{cut}", {})]
    for surface, replaced in changed.items():
        # Of a small model every KL is worth a line; of a large one as many as are read.
        listed = sorted(dense, key=lambda head: -divergences[surface][head])[:_MOST_HEADS]
        shown = listed[: max(1, min(_PAIRS, fits // 2))]
        pairs = {f"{h}{star}": patterns[h] for h in shown for star, patterns in (("", dense), ("*", replaced))}
        caption = (
            f"Of {len(dense)} heads the {len(shown)} whose patterns change most when {surface} is replaced ({methods[surface]}); "
            f"each dense and, starred, in the replaced model.{cut}"
        )
        measures = {"KL(dense ‖ replaced), nats": {head: float(f"{divergences[surface][head]:.4g}") for head in listed}}
        views.append(view(REPLACED, f"{surface}, {methods[surface]}", pairs, caption, measures))
    return views


def _pattern_kl(dense: Float[Tensor, "dest src"], replaced: Float[Tensor, "dest src"]) -> float:
    """Measure KL(dense || replaced) of attention patterns in nats, mean over destinations; 0 log 0 = 0."""
    tiny = torch.finfo(torch.float32).tiny
    log_p, log_q = (pattern.double().clamp_min(tiny).log() for pattern in (dense, replaced))
    return float(kl(log_p, log_q).mean().clamp_min(0.0))
