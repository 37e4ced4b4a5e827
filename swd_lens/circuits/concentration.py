"""concentration: how few edges carry what a replacement does to the next token, on text alone.

Where the units of a site spread every effect over many of them, each task's circuit is dear; this says so before there is a task.

1. Predictions (`text_predictions`): contexts of one length are drawn from a text; the answer is the token that follows, the
   distractor the dense host's likeliest other one. Where the host begins with BOS, so does every context, as every prompt does.
2. Every unit's contribution to every margin, z dg/dz at the last position, as circuits are scored (contributions.py).
3. Of each prediction: units by descending contribution, and the edges of the first ones that together have `share` of what all
   positive contributions add up to.
4. The geometric mean over predictions, with the standard error of its logarithm.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from swd_lens.base.record import Record
from swd_lens.base.shares import fewest_with
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.ablation import Means
from swd_lens.circuits.contributions import TrainingPass, first_order
from swd_lens.circuits.fast_forward import find_fast_forward
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.tasks.counting import excluded
from swd_lens.tasks.encoding import begins_with_bos
from swd_lens.tasks.task import TaskSplit, split_of_ids
from swd_lens.tasks.text import as_rows
from swd_lens.units import attach

_BATCH = 64  # predictions of a forward


@dataclass(frozen=True)
class Concentration(Record):
    """How few edges carry a replacement's effect on the next token.

    Attributes:
        edges, units: geometric means over predictions, of the fewest units that have the share.
        log_se: standard error of the logarithm of `edges`, predictions being the observations.
        share: of the positive contributions.
        n_predictions: how many were looked at; those to which no unit contributes are left out.
        settings: context length and seed, whether contexts begin with BOS, and how many predictions were left out, if any.
    """

    edges: float
    units: float
    log_se: float
    share: float
    n_predictions: int
    settings: Mapping[str, Any]

    def title(self) -> str:
        return (
            f"Concentration: {self.units:.1f} units with {self.edges:,.0f} edges (times or over {math.exp(self.log_se):.2f}) "
            f"have {self.share:.0%} of the effect on a next token, in the geometric mean of {self.n_predictions} predictions"
        )


@with_torch_defaults
def concentration(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    share: float | int = 0.5,
    n_predictions: int = 256,
    context: int = 24,
    seed: int = 0,
    exclude: Any = None,
) -> Concentration:
    """How few edges carry what these units do to the next token of a text (ours).

    Low is good: one unit has the effect, or few sparse ones. Compare replacements of the same sites at about the same CE.

    Args:
        model: the host, with these sites not attached.
        factors: the replacement, see `swd_lens.attach`.
        tokens: (rows, pos) ids, of at least `context` + 1 tokens a row.
        share: of the positive contributions, between 0 and 1.
        n_predictions: how many contexts are drawn; all where the text has fewer.
        context: tokens of text before each prediction; a BOS stands before them where the host begins with one.
        exclude: "special" (the tokenizer's special tokens) or ids: predictions that are read at such a token, and predictions of
            such a token, are left out.

    Raises:
        ValueError: a share outside (0, 1), rows too short, fewer than two predictions, or units that contribute to none.
        AttachError, UnsupportedHostError: see `swd_lens.attribute`.
    """
    if not 0 < share < 1:
        raise ValueError(f"share must be in (0, 1), such as 0.5, got {share}")
    require_no_dropout(model)
    require_gradients(model)
    split, about = text_predictions(model, tokens, n_predictions, context, seed, exclude)
    host, of_parts = host_of(model), []
    with attach(model, factors) as attachment:
        units, sites = attachment.factors, attachment.sites
        fast_forward = find_fast_forward(host, sites, units, split, "scoring", known=False, dense=None)
        means = Means(host, sites, split, "scoring", "scoring", _BATCH)
        training = TrainingPass(host, units, fast_forward, means, steps=1)
        edges = torch.cat([units[site.name].edges_per_unit.cpu() for site in sites])
        for bucket in split.buckets(_BATCH):
            of_site = first_order(training, bucket)
            positive = torch.cat([of_site[site.name] for site in sites], 1).clamp(min=0)
            of_parts.append(fewest_with(float(share), positive, edges).double())
    costs = torch.cat(of_parts)  # (prediction, 2): edges and units; 0 where no unit contributes
    costs = costs[costs[:, 0] > 0]
    if len(costs) < 2:
        raise ValueError(
            f"these units add to at most one of {len(split)} next tokens, so nothing can be said; swd.screen says which "
            "sites do something"
        )
    logs = costs.log()
    n_edges, n_units = logs.mean(0).exp().tolist()
    settings = {"context": context, "seed": seed, **about}
    return Concentration(n_edges, n_units, float(logs[:, 0].std() / len(logs) ** 0.5), float(share), len(logs), settings)


def text_predictions(
    model: Any, tokens: Any, n: int, context: int, seed: int, exclude: Any = None
) -> tuple[TaskSplit, dict[str, Any]]:
    """Contexts of a text as prompts: the next token against the dense host's likeliest other one. And what to say of them.
    Raises ValueError: rows shorter than a context and its next token, or fewer than two different contexts."""
    rows, counting = as_rows(tokens, model), excluded(exclude, model)
    with_bos = begins_with_bos(model)
    start = [model.tokenizer.bos_token_id] if with_bos else []
    if with_bos and bool((rows[:, 0] == start[0]).all()):
        rows = rows[:, 1:]  # contexts get their own
    if context < 1 or rows.shape[1] < context + 1:
        raise ValueError(
            f"a context of {context} tokens and the token after it do not fit into rows of {rows.shape[1]}; give a "
            "context of at least 1 token, and longer rows"
        )
    windows = rows.unfold(1, context + 1, context + 1).flatten(0, 1)
    about: dict[str, Any] = {"prepend_bos": with_bos}
    if (counted := counting.of(windows)) is not None:
        that_count = counted[:, -2:].all(1)
        about |= {"exclude": list(counting.asked) if isinstance(counting.asked, tuple) else counting.asked}
        about |= {"predictions_left_out": int((~that_count).sum())}
        windows = windows[that_count]
    windows = torch.cat([torch.tensor(start, dtype=torch.int64).expand(len(windows), -1), windows], 1)
    drawn = windows[torch.randperm(len(windows), generator=torch.Generator().manual_seed(seed))]
    different: dict[tuple[int, ...], list[int]] = {}  # of equal contexts the first
    for window in drawn.tolist():
        different.setdefault(tuple(window[:-1]), window)
    chosen = torch.tensor(list(different.values())[:n])
    if len(chosen) < 2:
        raise ValueError(
            f"the text has {len(chosen)} different contexts, and a mean needs two; give more tokens, or a shorter context"
        )
    prompts, answers = chosen[:, :-1], chosen[:, -1]
    with torch.no_grad():
        logits = torch.cat([host_of(model).last_logits(part).float().cpu() for part in prompts.split(_BATCH)])
    others = logits.scatter(1, answers[:, None], float("-inf")).argmax(1)
    right, wrong = ([(token,) for token in of.tolist()] for of in (answers, others))
    return split_of_ids("text", "test", model, list(prompts), right, wrong), about
