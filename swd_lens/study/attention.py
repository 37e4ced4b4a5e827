"""attention_views: where the heads look, on one prompt per task, before and after a replacement.

1. For each task take one test prompt and the patterns of every head of the dense host.
2. Attach each surface's replacement once and take the patterns of all prompts again. What a replacement did to a head is
   KL(dense || replaced), averaged over destinations.
3. Show the dense host: all heads of a small model, else those that the replacements changed most.
4. For each surface that changes patterns show the heads that it changed most, dense beside replaced, with every KL.

An `AttentionView` is plain data: positions, names and values. Whatever has the same shape (contributions of a QK pair, with
signs) is one, too.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.divergence import kl
from swd_lens.base.record import PlainRecord
from swd_lens.hosts import host_of, require_no_dropout
from swd_lens.tasks.task import Task
from swd_lens.units import attach
from swd_lens.units.factors import FactorSet

DENSE, REPLACED = "dense patterns", "replaced patterns"
DIGITS = 4  # of a value: finer than any screen shows
_MOST_HEADS = 16  # all heads of a model with so many; of larger models the few that changed most
_FEW_HEADS, _PAIRS = 8, 3
_LONGEST = 64  # positions; of longer prompts the last ones
_MOST_VALUES = 250_000  # of all views together: about 1.5 MB in the page
_CHANGED = 1e-4  # a pattern that moves less is shown the same

Patterns = Mapping[str, Float[Tensor, "_dest _src"]]  # head -> where it looks, in the order of layers


@dataclass(frozen=True)
class AttentionView(PlainRecord):
    """Values of several heads (or pairs of units) over the positions of one prompt.

    Attributes:
        kind: what the values are: "dense patterns", "replaced patterns", or a name of one's own.
        title: heading of the panel.
        task: whose prompt it is; "" for none. Views of a task stand together.
        tokens: strings of the positions.
        names: of the heads.
        values: (head, dest, src), rounded to DIGITS.
        signed: values below zero mean something (contributions, differences); else they are probabilities.
        caption: what to look at, in a sentence or two.
        measures: what was measured -> head -> number; also of heads that are not drawn.

    Raises:
        ValueError: tokens or names do not fit the values, or a value is not finite.
    """

    kind: str
    title: str
    task: str
    tokens: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[tuple[tuple[float, ...], ...], ...]
    signed: bool = False
    caption: str = ""
    measures: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        n, names = len(self.tokens), len(self.names)
        if len(self.values) != names or any(len(row) != n for head in self.values for row in (head, *head)):
            shape = (len(self.values), *(len(side) for head in self.values[:1] for side in (head, *head[:1])))
            raise ValueError(f"values are {shape} (head, dest, src), but there are {names} names and {n} tokens")
        if not all(isfinite(value) for head in self.values for row in head for value in row):
            raise ValueError("values must be finite; give zeros where nothing is seen")

    @classmethod
    def of(
        cls, values: Float[Tensor, "head dest src"], tokens: Sequence[str], names: Sequence[str], **others: Any
    ) -> "AttentionView":
        """A view of a tensor; raises ValueError as the class does."""
        rounded = tuple(tuple(tuple(round(v, DIGITS) for v in row) for row in head) for head in values.tolist())
        return cls(values=rounded, tokens=tuple(tokens), names=tuple(names), **others)

    def tensor(self) -> Float[Tensor, "head dest src"]:
        """The values as a tensor."""
        return torch.tensor(self.values, dtype=torch.float32).reshape(len(self.names), len(self.tokens), -1)


def attention_views(
    model: Any, tasks: Sequence[Task], replacements: Mapping[str, tuple[str, FactorSet]]
) -> list[AttentionView]:
    """Views in the order of tasks: the dense host, then each surface that changes patterns.

    Args:
        tasks: one test prompt of each is shown.
        replacements: surface -> (method, its factors).

    Returns:
        Nothing where the host's forward shows no patterns (hook_pattern).
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
    task: str,
    tokens: Sequence[str],
    dense: Patterns,
    changed: Mapping[str, Patterns],
    methods: Mapping[str, str],
    room: int,
) -> list[AttentionView]:
    """The dense host's view and one per surface that changed patterns; `room`: values that they may have together."""
    divergences = {
        surface: {head: _pattern_kl(dense[head], replaced[head]) for head in dense}
        for surface, replaced in changed.items()
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
    """KL(dense || replaced) in nats, mean over destinations; 0 log 0 = 0."""
    tiny = torch.finfo(torch.float32).tiny
    log_p, log_q = (pattern.double().clamp_min(tiny).log() for pattern in (dense, replaced))
    return float(kl(log_p, log_q).mean().clamp_min(0.0))
