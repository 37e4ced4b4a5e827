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
from math import nan
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

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


@dataclass(frozen=True)
class AttentionView:
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
    """

    kind: str
    title: str
    task: str
    tokens: tuple[str, ...]
    names: tuple[str, ...]
    values: tuple[tuple[tuple[float | int, ...], ...], ...]
    signed: bool = False
    caption: str = ""
    measures: Mapping[str, Mapping[str, float | int]] = field(default_factory=dict)

    @classmethod
    def of(
        cls, values: Float[Tensor, "head dest src"], tokens: Sequence[str], names: Sequence[str], **others: Any
    ) -> "AttentionView":
        """A view of a tensor.

        Raises:
            ValueError: tokens or names do not fit the values, or a value is not finite.
        """
        heads, dest, src = values.shape
        if not (len(names) == heads and len(tokens) == dest == src):
            raise ValueError(
                f"values are {tuple(values.shape)} (head, dest, src), but there are {len(names)} names and {len(tokens)} tokens"
            )
        if not bool(torch.isfinite(values).all()):
            raise ValueError("values must be finite; give zeros where nothing is seen")
        rounded = tuple(tuple(tuple(round(v, DIGITS) for v in row) for row in head) for head in values.tolist())
        return cls(values=rounded, tokens=tuple(tokens), names=tuple(names), **others)

    def tensor(self) -> Float[Tensor, "head dest src"]:
        """The values as a tensor."""
        return torch.tensor(self.values, dtype=torch.float32).reshape(len(self.names), len(self.tokens), -1)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "AttentionView":
        """What `dataclasses.asdict` gave, back from JSON. Raises KeyError, TypeError or ValueError where it is something else."""
        tensor = torch.tensor(values["values"], dtype=torch.float64)
        rest = {key: value for key, value in values.items() if key not in ("values", "tokens", "names", "measures")}
        # JSON knows no NaN.
        measures = {
            what: {head: nan if number is None else number for head, number in its.items()}
            for what, its in values["measures"].items()
        }
        return cls.of(tensor, values["tokens"], values["names"], measures=measures, **rest)


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
    replaced: dict[str, dict[str, dict[str, Tensor]]] = {}
    for surface, (_, factors) in replacements.items():
        with attach(model, factors):
            replaced[surface] = {task: _patterns(model, row) for task, row in prompts.items()}
    room = _MOST_VALUES // max(1, len(tasks))
    methods = {surface: method for surface, (method, _) in replacements.items()}
    views = []
    for task, row in prompts.items():
        strings = [model.tokenizer.decode([token]) for token in row.tolist()]
        changed = {surface: found[task] for surface, found in replaced.items() if _moved(dense[task], found[task])}
        views += _views_of(task, strings, dense[task], changed, methods, room)
    return views


def _prompt(task: Task) -> Int[Tensor, " pos"]:
    """The first test prompt that is short enough to be read; the shortest where none is."""
    rows = list(task.test.tokens)
    return next((row for row in rows if len(row) <= _LONGEST), min(rows, key=len))


def _patterns(model: Any, row: Int[Tensor, " pos"]) -> dict[str, Float[Tensor, "_dest _src"]]:
    """Head -> its pattern, in the order of layers; empty if some layer shows none."""
    host, found = host_of(model), {}
    names = [f"blocks.{layer}.attn.hook_pattern" for layer in range(model.cfg.n_layers)]
    if not all(name in model.hook_dict for name in names):
        return {}

    def keep(pattern: Tensor, hook: Any) -> None:
        found[hook.name] = pattern[0].detach().float().cpu()

    with torch.no_grad(), model.hooks(fwd_hooks=[(name, keep) for name in names]):
        host.run(row[None])
    if len(found) < len(names):
        return {}
    return {f"L{layer}H{head}": one for layer, name in enumerate(names) for head, one in enumerate(found[name])}


def _moved(dense: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return any(float((other[head] - pattern).abs().max()) > _CHANGED for head, pattern in dense.items())


def _kl(dense: Float[Tensor, "dest src"], other: Float[Tensor, "dest src"]) -> float:
    """KL(dense || other) in nats, mean over destinations; 0 log 0 = 0."""
    tiny = torch.finfo(torch.float32).tiny
    log = dense.double().clamp_min(tiny).log() - other.double().clamp_min(tiny).log()
    return float((dense.double() * log).sum(-1).mean().clamp_min(0.0))


def _views_of(
    task: str,
    tokens: Sequence[str],
    dense: Mapping[str, Tensor],
    changed: Mapping[str, Mapping[str, Tensor]],
    methods: Mapping[str, str],
    room: int,
) -> list[AttentionView]:
    kl = {surface: {head: _kl(dense[head], found[head]) for head in dense} for surface, found in changed.items()}
    most = {head: max((its[head] for its in kl.values()), default=0.0) for head in dense}
    fits = max(2, room // min(len(tokens), _LONGEST) ** 2)
    few = sorted(dense, key=lambda head: -most[head])[: min(_FEW_HEADS, fits)]
    heads = list(dense) if len(dense) <= min(_MOST_HEADS, fits) else [head for head in dense if head in few]
    cut = f" Shown are its last {_LONGEST} positions." if len(tokens) > _LONGEST else ""
    which = "All heads" if len(heads) == len(dense) else f"{len(heads)} of {len(dense)} heads"
    which += ", those that the replacements changed most" if len(heads) < len(dense) and changed else ""
    views = [
        _view(DENSE, "the dense model", task, tokens, {h: dense[h] for h in heads}, f"{which}, on a test prompt.{cut}")
    ]
    for surface, found in changed.items():
        method = methods[surface]
        # Of a small model every KL is worth a line; of a large one as many as are read.
        listed = sorted(dense, key=lambda head: -kl[surface][head])[:_MOST_HEADS]
        shown = listed[: max(1, min(_PAIRS, fits // 2))]
        pairs = {f"{h}{star}": its[h] for h in shown for star, its in (("", dense), ("*", found))}
        caption = (
            f"Of {len(dense)} heads the {len(shown)} whose patterns change most when {surface} is replaced ({method}); each "
            f"dense and, starred, in the replaced model.{cut}"
        )
        measures = {"KL(dense ‖ replaced), nats": {head: float(f"{kl[surface][head]:.4g}") for head in listed}}
        views.append(_view(REPLACED, f"{surface}, {method}", task, tokens, pairs, caption, measures))
    return views


def _view(
    kind: str,
    title: str,
    task: str,
    tokens: Sequence[str],
    patterns: Mapping[str, Tensor],
    caption: str,
    measures: Mapping[str, Mapping[str, float]] | None = None,
) -> AttentionView:
    values = torch.stack(list(patterns.values()))[:, -_LONGEST:, -_LONGEST:]
    others = {"kind": kind, "title": title, "task": task, "caption": caption, "measures": measures or {}}
    return AttentionView.of(values, list(tokens)[-_LONGEST:], list(patterns), **others)
