"""The obvious versions: whole prompts, one by one, plain TransformerLens hooks, no fast_forward, no batches, no kept prefixes.

`able_split` has prompts that the toy model does well on. The other functions expect the factors to be attached (all but
`slow_means`, which takes a list of what `activations` gave).
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from swd_lens.circuits import intervention_hooks
from swd_lens.hosts.sites import hook_name
from swd_lens.tasks.task import TaskSplit
from swd_lens.units import attach


def able_split(n: int = 7, seed: int = 6, name: str = "test", same_lengths: bool = True, length: int | None = None) -> TaskSplit:
    """Prompts of 1 to 8 tokens; right is what the toy model says, wrong its second and its last choice; each with a
    corrupt prompt, of the same length or of another."""
    from tests.micro import random_split, toy_model  # not above: transformer_lens 4 has no HookedTransformer

    split, model = random_split(n, seed=seed, name=name, length=length), toy_model()
    generator = torch.Generator().manual_seed(99)
    lengths = [len(p) if same_lengths else 1 + i % 5 for i, p in enumerate(split.tokens)]
    with torch.no_grad():
        logits = torch.stack([model(prompt[None])[0, -1] for prompt in split.tokens])
    # What it says of this prompt more than of others: an empty circuit does not know it.
    order = (logits - logits.mean(0)).argsort(1, descending=True).tolist()
    return replace(
        split,
        answer_ids=tuple((o[0],) for o in order),
        distractor_ids=tuple((o[1], o[-1]) for o in order),
        corrupt=tuple(torch.randint(0, 20, (length,), generator=generator) for length in lengths),
    )


def carried_by(model: Any, factors: Any, scores: Any, split: TaskSplit) -> TaskSplit:
    """A task that these units carry: the same prompts, with what the model says of each, above all by these units beyond their
    means, as the right answer, and its opposite as the wrong one."""
    right, wrong = [], []
    with attach(model, factors), torch.no_grad():
        for prompt in split.tokens:
            empty = last_logits(model, prompt, intervention_hooks(scores, [], "keep"))
            full = last_logits(model, prompt)
            order = (full + 10 * (full - empty)).argsort().tolist()
            right.append((order[-1],))
            wrong.append((order[0], order[1]))
    return replace(split, answer_ids=tuple(right), distractor_ids=tuple(wrong))


def margin_of(logits: Tensor, split: Any, i: int) -> Tensor:
    """Mean right logit minus mean wrong logit of example i; or the split's metric."""
    if split.metric is not None:
        return split.metric(logits[None].float(), [split.examples[i]])[0]
    right, wrong = list(split.answer_ids[i]), list(split.distractor_ids[i])
    return logits[right].mean() - logits[wrong].mean()


def last_logits(model: Any, prompt: Tensor, hooks: Iterable = ()) -> Tensor:
    return model.run_with_hooks(prompt[None], fwd_hooks=list(hooks))[0, -1]


def activations(model: Any, sites: Iterable[str], prompt: Tensor) -> dict[str, Tensor]:
    """site -> (pos, unit)."""
    seen: dict[str, Tensor] = {}

    def watch(site: str) -> tuple[str, Any]:
        return hook_name(site), lambda z, hook: seen.update({site: z[0].detach()})

    with torch.no_grad():
        last_logits(model, prompt, [watch(site) for site in sites])
    return seen


def slow_means(found: list[dict[str, Tensor]], mean_over: str) -> dict[str, Tensor]:
    """site -> (unit,), or (pos, unit) with "per_position": the row -k is the mean over prompts of at least k tokens."""
    means = {}
    for site in found[0]:
        z = [one[site] for one in found]
        if mean_over == "scoring":
            means[site] = torch.stack([one[-1] for one in z]).mean(0)
        elif mean_over == "all_tokens":
            means[site] = torch.cat(z).mean(0)
        else:
            longest = max(len(one) for one in z)
            rows = [torch.stack([one[-back] for one in z if len(one) >= back]).mean(0) for back in range(longest, 0, -1)]
            means[site] = torch.stack(rows)
    return means


def rows_for(mean: Tensor, length: int) -> Tensor:
    """(pos, unit) for a prompt: one mean for all positions; or each its own, the first one's before the first."""
    if mean.ndim == 1:
        return mean.expand(length, -1)
    return torch.stack([mean[max(0, len(mean) - length + position)] for position in range(length)])


def replacing(site: str, mask: Tensor, value: Tensor, positions: str) -> tuple[str, Any]:
    """Put value (pos, unit) in place of the units in mask, at the last position or at all."""

    def hook_fn(z: Tensor, hook: Any) -> Tensor:
        z = z.clone()
        for position in range(z.shape[1]) if positions == "all" else [z.shape[1] - 1]:
            z[0, position, mask] = value[position, mask].to(z)
        return z

    return hook_name(site), hook_fn


def margin_with(
    model: Any, split: Any, i: int, masks: Mapping[str, Tensor], values: Mapping[str, Tensor], positions: str
) -> float:
    hooks = [replacing(site, mask, values[site], positions) for site, mask in masks.items()]
    with torch.no_grad():
        return float(margin_of(last_logits(model, split.tokens[i], hooks), split, i))


def gradient_at(
    model: Any, split: Any, i: int, site: str, z: Tensor | None = None, positions: str = "all"
) -> tuple[Tensor, Tensor]:
    """z (pos, unit) at one site and d margin / d z there, with z set to something else first if given."""
    kept: dict[str, Tensor] = {}

    def hook_fn(now: Tensor, hook: Any) -> Tensor:
        there = now.detach().clone()
        if z is not None:
            chosen = slice(None) if positions == "all" else slice(-1, None)
            there[0, chosen] = z[chosen].to(there)
        kept["z"] = there.requires_grad_(True)
        return kept["z"]

    margin = margin_of(last_logits(model, split.tokens[i], [(hook_name(site), hook_fn)]), split, i)
    return kept["z"][0].detach(), torch.autograd.grad(margin, kept["z"])[0][0]


def slow_contributions(
    model: Any, factors: Any, split: Any, i: int, score: str, positions: str, means: Mapping[str, Tensor], steps: int
) -> dict[str, Tensor]:
    """site -> (unit,): what each unit gave to the margin of example i."""
    chosen = slice(None) if positions == "all" else slice(-1, None)
    z = activations(model, factors, split.tokens[i])
    mu = {site: rows_for(means[site], len(z[site])) for site in factors}
    found = {}
    for site, f in factors.items():
        if score == "first_order":
            found[site] = (z[site] * gradient_at(model, split, i, site)[1])[chosen].sum(0)
        elif score == "attribution_patching":
            found[site] = ((z[site] - mu[site]) * gradient_at(model, split, i, site)[1])[chosen].sum(0)
        elif score == "integrated_gradients":
            total = torch.zeros_like(z[site])
            for step in range(steps):
                at = mu[site] + (step + 0.5) / steps * (z[site] - mu[site])
                total += gradient_at(model, split, i, site, at, positions)[1] / steps
            found[site] = ((z[site] - mu[site]) * total)[chosen].sum(0)
        elif score == "ablation":
            whole = float(margin_of(last_logits(model, split.tokens[i]).detach(), split, i))
            alone = torch.eye(f.n_units, dtype=torch.bool)
            found[site] = torch.tensor([whole - margin_with(model, split, i, {site: unit}, mu, positions) for unit in alone])
        else:  # direct_logit
            seen: dict[str, Tensor] = {}
            name = f"blocks.{model.cfg.n_layers - 1}.hook_resid_post"
            last_logits(model, split.tokens[i], [(name, lambda r, hook, seen=seen: seen.update(r=r[0, -1].detach()))])
            resid = seen["r"].requires_grad_(True)
            logits = model.unembed(model.ln_final(resid[None, None]))[0, 0]
            gradient = torch.autograd.grad(margin_of(logits, split, i), resid)[0]
            found[site] = z[site][-1] * (f.write @ gradient)
    return {site: value.detach() for site, value in found.items()}
