"""Held-out scores of the embedded model.

1. `family_scores`: prompts of one family; accuracy (best answer above every distractor), top-1, margin in logits,
   probability on right minus wrong continuations (softmax over the whole vocabulary).
2. `all_scores`: every family on validation and test content, seen and unseen templates; cross-entropy of filler text.
3. `ablation_table`: what replacing each attention or MLP layer's output by its mean does to each task.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.hosts.embedded.corpus import KINDS, MIX, Packer
from swd_lens.tasks.generators import FAMILIES, generate
from swd_lens.tasks.split import TaskExample
from swd_lens.tasks.text import same_length

Forward = Callable[[Int[Tensor, "batch pos"]], Float[Tensor, "batch pos vocab"]]
N_PROMPTS = 1000  # standard error of an accuracy of .98: .0044
FILLER = {kind: float(kind == "filler") for kind in KINDS}  # a mixture of nothing else
Scores = dict[str, float | int]


@torch.no_grad()
def last_logits(forward: Forward, packer: Packer, examples: list[TaskExample]) -> Float[Tensor, "example vocab"]:
    """Logits after each prompt (BOS first); prompts of equal length run together, so nothing is padded."""
    rows = [[packer.bos, *packer.encode(example.prompt)] for example in examples]
    logits = None
    for chunk in same_length([len(row) for row in rows], lambda _: 128):
        last = forward(torch.tensor([rows[i] for i in chunk]))[:, -1].float()
        logits = torch.empty(len(rows), last.shape[1]) if logits is None else logits
        logits[chunk] = last
    assert logits is not None
    return logits


def score_logits(logits: Float[Tensor, "example vocab"], packer: Packer, examples: list[TaskExample]) -> Scores:
    """Means over examples of accuracy, top1, margin (logits) and probability on right minus wrong tokens."""
    vocabulary = packer.tokenizer.get_vocab()
    rows = []
    for row, example in zip(logits, examples, strict=True):
        right = torch.tensor([vocabulary[word] for word in example.answers])
        wrong = torch.tensor([vocabulary[word] for word in example.distractors])
        probability = row.softmax(0)
        rows.append(
            [
                float(row[right].max() > row[wrong].max()),
                float(row.argmax() in right),
                float(row[right].mean() - row[wrong].mean()),
                float(probability[right].sum() - probability[wrong].sum()),
            ]
        )
    means = torch.tensor(rows).mean(0).tolist()
    return {"n": len(rows), **dict(zip(("accuracy", "top1", "margin", "probability"), means, strict=True))}


def family_scores(forward: Forward, packer: Packer, family: str, split: str, templates: str, n: int) -> Scores:
    """`score_logits` of `n` prompts of a family."""
    examples = generate(family, split, n, templates=templates)
    return score_logits(last_logits(forward, packer, examples), packer, examples)


@torch.no_grad()
def cross_entropy(forward: Forward, packer: Packer, mix: dict[str, float], seed: int = 0, n_rows: int = 64) -> float:
    """Cross-entropy (nats per token) on packed rows that training never drew, of this mixture and the packer's split."""
    rows = packer.plain_rows(seed, n_rows, mix)
    logits = forward(rows)[:, :-1]
    return float(torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten()))


def all_scores(
    forward: Forward, packer: Packer, n: int = N_PROMPTS, splits: tuple[str, ...] = ("validation", "test")
) -> dict[str, dict[str, Any]]:
    """Nested dict: scores[split][templates][family] = Scores, and scores[split]["filler_ce"]."""
    scores: dict[str, dict[str, Any]] = {}
    for split in splits:
        held_out = Packer(packer.tokenizer, split)
        scores[split] = {
            templates: {f: family_scores(forward, packer, f, split, templates, n) for f in FAMILIES}
            for templates in ("seen", "unseen")
        }
        scores[split]["filler_ce"] = cross_entropy(forward, held_out, FILLER)
        scores[split]["mixture_ce"] = cross_entropy(forward, held_out, MIX)
    return scores


@torch.no_grad()
def ablation_table(model: Any, packer: Packer, split: str = "validation", n: int = 200) -> dict[str, dict[str, Scores]]:
    """Scores of each family with one layer's output replaced by its mean.

    Args:
        model: the embedded model, or another with its hooks.
        packer: gives token ids.
        split, n: which prompts (seen templates).

    Returns:
        table[family][layer]: layer is "none", "attn.L" or "mlp.L". The mean is over the family's prompts and all their
        positions except BOS, and replaces the output at all positions except BOS.
    """
    table: dict[str, dict[str, Scores]] = {}
    for family in FAMILIES:
        examples = generate(family, split, n)
        means = _mean_outputs(model, packer, examples)
        table[family] = {"none": score_logits(last_logits(model, packer, examples), packer, examples)}
        for name, mean in means.items():

            def replace(value: Tensor, hook: object, mean: Tensor = mean) -> Tensor:
                return torch.cat((value[:, :1], mean.expand_as(value[:, 1:])), 1)

            with model.hooks(fwd_hooks=[(_hook_name(name), replace)]):
                table[family][name] = score_logits(last_logits(model, packer, examples), packer, examples)
    return table


def _hook_name(layer: str) -> str:
    kind, index = layer.split(".")
    return f"blocks.{index}.hook_{kind}_out"


def _mean_outputs(model: Any, packer: Packer, examples: list[TaskExample]) -> dict[str, Tensor]:
    """Mean output of every attention and MLP layer over all prompt tokens but BOS."""
    layers = [f"{kind}.{layer}" for layer in range(model.cfg.n_layers) for kind in ("attn", "mlp")]
    totals, count = {layer: torch.zeros(model.cfg.d_model) for layer in layers}, 0
    for example in examples:
        tokens = torch.tensor([[packer.bos, *packer.encode(example.prompt)]])
        _, cache = model.run_with_cache(tokens, names_filter=[_hook_name(layer) for layer in layers])
        for layer in layers:
            totals[layer] += cache[_hook_name(layer)][0, 1:].sum(0)
        count += tokens.shape[1] - 1
    return {layer: total / count for layer, total in totals.items()}
