"""task_graph: the graph of a task, across layers and positions: the mean of the graphs of aligned prompts.

1. Aligned prompts have one length and template (tasks/aligned.py), so that a node is the same unit at the same role in each.
2. For every prompt a run is frozen and all weights are found, as unit_graph does, at the top the task's margin with that prompt's
   own answers. Means are updated prompt by prompt; memory does not grow with their number.
3. The mean of z_i * w is the edge's contribution, the mean of z the node's activation: what adds up for every prompt adds up for
   the means. How much a contribution differs between prompts stands beside it (`varies`).
4. Influence and pruning are those of the means (pruning.py).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.graph.build import activations_of, drawn_units, frozen_run, kept_edges, made_with, nodes_of, require_edges
from swd_lens.analysis.graph.edges import LOGIT, TOKEN, Contrast, Layout, layout_of, weights
from swd_lens.analysis.graph.pruning import pruned
from swd_lens.analysis.graph.result import UnitGraph
from swd_lens.base.checks import one_of
from swd_lens.base.errors import legible
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import require_gradients, require_no_dropout
from swd_lens.hosts.sites import Site
from swd_lens.tasks.aligned import Aligned, aligned_prompts
from swd_lens.tasks.split import TaskSplit
from swd_lens.units import UnitSet, attach

# What stands at the top -> its nodes: a name, and whether answers and wrong answers are in it.
TOPS = {
    "margin": (("margin", "margin: answer − wrong answer", True, True),),
    "answers": (("answer", "[answer]", True, False), ("wrong answer", "[wrong answer]", False, True)),
}


@with_torch_defaults
def task_graph(
    model: Any,
    factors: Any,
    units: Any,
    task: Any,
    *,
    prompts: int = 16,
    top: str = "margin",
    attention: str = "frozen",
    keep: int | None = 120,
    min_weight: float | int = 0.0,
    per_node: int | None = None,
    isolated: bool = False,
    labels: Mapping[str, str] | None = None,
    progress: bool = False,
) -> UnitGraph:
    """The graph of a task: contributions averaged over aligned prompts (ours).

        graph = swd.task_graph(model, factors, circuit, task)
        graph.table(10)                              # the strongest edges, and how much each varies between prompts

    At the top stands the margin, the mean logit of the answers less that of the wrong answers, because that is what a task is
    judged and its units are scored by; answers differ from prompt to prompt, so that a token's logit has no mean that says
    anything. Positions are called by their role: the token that all prompts have there, "[answer]", "[wrong answer]", or the
    most frequent one. Nodes, edges, rest and influence are those of `unit_graph`, of the means: mean contributions and mean rest
    add up to the mean activation. `weight` is a mean as well; a contribution is not the product of two means.

    Args:
        factors, units, keep, min_weight, per_node, isolated, labels: see `unit_graph`.
        task: its training prompts, a split, or what `swd_lens.tasks.aligned.aligned_prompts` gave. The largest group of one
            length and template is taken; how many others there are, and why, is in `settings["task_left_out"]`.
        prompts: at most so many. Where ioi and gendered_pronoun have fewer of one template, more are drawn with other names.
        top: "margin", or "answers": two nodes, the answers and the wrong answers, each less the mean over the vocabulary.
        attention: "frozen": patterns of each prompt carry values across positions. "none": within the last position.

    Returns:
        UnitGraph, with `varies` for every edge and settings["task_prompts"], their number.

    Raises:
        ValueError: a task with a metric of its own, which has no answers; and see `unit_graph`.
        TaskError: prompts of another host.
        TypeError, UnsupportedHostError, AttachError: see `unit_graph`.
    """
    one_of("attention", attention, ("none", "frozen"))
    one_of("top", top, TOPS)
    kept = kept_edges(keep, per_node, min_weight, isolated)
    attached = UnitSet.of(model, factors)
    drawn, scores = drawn_units(attached, units)
    aligned = task if isinstance(task, Aligned) else aligned_prompts(model, task, prompts)
    split = aligned.split
    if split.metric is not None:
        raise ValueError(
            f"task {legible(split.task)} has a metric of its own: it names no answers and wrong answers, whose margin could "
            "stand at the top"
        )
    require_no_dropout(model)
    require_gradients(model)
    means, layout, kinds = _Means(), None, None
    with torch.no_grad(), attach(model, attached):
        for i in tqdm(range(len(split)), desc="graph of each prompt", disable=not progress, leave=False):
            layout = _of_prompt(attached, drawn, split, i, top, across=attention == "frozen")
            weight, kinds = weights(layout)
            means.add(layout, weight)
    assert layout is not None and kinds is not None
    require_edges(kinds, drawn)
    # The tokens that stand for each node at the top: those of its answers (or wrong answers), over all prompts.
    sides = [split.answer_ids if right else split.distractor_ids for _, _, right, _ in TOPS[top]]
    settings = made_with(attached, drawn, None) | kept
    settings |= {
        **{"prompt": aligned.text, "tokens": list(aligned.roles), "token_ids": aligned.typical},
        **{"prepend_bos": split.prepend_bos, "attention": attention, "targets": None, "normalize": "none"},
        "answers": [torch.tensor([i for ids in side for i in ids]).mode().values.item() for side in sides],
        **{"norm": "of the run", "mlp": "slope at the run", "task": split.task, "task_prompts": len(split)},
        **{"task_drawn": aligned.drawn, "task_left_out": dict(aligned.left_out), "task_split": split.name},
        **{"task_source": split.source, "top": top},
    }
    rows = nodes_of(model, layout, aligned.typical, scores, labels or {}, attached.heads)
    nodes = _named(rows, aligned.roles, settings, means)
    return pruned(nodes, means.weight, kinds, settings, means.contribution, means.varies)


def _of_prompt(
    attached: UnitSet, drawn: Mapping[Site, Sequence[int]], split: TaskSplit, i: int, top: str, *, across: bool
) -> Layout:
    """The nodes of one prompt, with its own answers at the top, and its held run."""
    run = frozen_run(attached, drawn, split.tokens[i].tolist(), drawn if across else (), drawn)
    right, wrong = split.answer_ids[i], split.distractor_ids[i]
    contrasts = [
        Contrast(right, wrong) if with_right and with_wrong else Contrast(right if with_right else wrong)
        for _, _, with_right, with_wrong in TOPS[top]
    ]
    return layout_of(attached, drawn, run if across else run.last(), answers=contrasts, static=False)


def _named(nodes: pd.DataFrame, roles: Sequence[str], settings: Mapping[str, Any], means: "_Means") -> pd.DataFrame:
    """The nodes of one prompt, called by their roles and with mean activations."""
    nodes = nodes.assign(activation=means.z.double().numpy())
    tokens = nodes["kind"] == TOKEN
    nodes.loc[tokens, "label"] = [roles[position] for position in nodes.loc[tokens, "position"]]
    of_top = zip(nodes.index[nodes["kind"] == LOGIT], TOPS[settings["top"]], strict=True)
    for i, (row, (name, label, _, _)) in enumerate(of_top):
        nodes.loc[row, ["node", "label"]] = [name, label]
        nodes.loc[row, "token"] = settings["answers"][i]
        nodes.loc[row, "probability"] = float(means.chances[i])
    return nodes


@dataclass
class _Means:
    """Running means over prompts; a mean moves by (new - old) / n, which in float32 loses nothing that a sum would lose."""

    n: int = 0
    z: Tensor = field(default_factory=lambda: torch.zeros(()))
    chances: Tensor = field(default_factory=lambda: torch.zeros(()))  # of each top node's tokens together
    weight: Tensor = field(default_factory=lambda: torch.zeros(()))
    contribution: Tensor = field(default_factory=lambda: torch.zeros(()))
    squares: Tensor = field(default_factory=lambda: torch.zeros(()))

    def add(self, layout: Layout, weight: Float[Tensor, "node node"]) -> None:
        self.n += 1
        z = torch.cat([activations_of(layout, group) for group in layout.groups])
        contrasts = [contrast for group in layout.groups if group.kind == LOGIT for contrast in group.contrasts]
        chances = torch.stack([layout.run.probabilities[list(contrast.right)].sum() for contrast in contrasts])
        contribution = z[:, None] * weight
        new = {"z": z, "chances": chances, "weight": weight, "contribution": contribution}
        for name, value in (new | {"squares": contribution.square()}).items():
            mean = getattr(self, name)
            setattr(self, name, value.clone() if self.n == 1 else mean.add_((value - mean).div_(self.n)))

    @property
    def varies(self) -> Float[Tensor, "node node"]:
        """The share of the second moment that is variance: 0 where all prompts agree, 1 where the mean is 0."""
        return (1 - self.contribution.square() / self.squares.clamp(min=1e-30)).clamp(0, 1).where(self.squares > 0, 0.0)
