"""audit: what makes a unit fire, and what it pushes the output towards.

1. `top_contexts` streams held-out text once and keeps, for each wanted unit, the n positions of largest |z|; memory does not
   grow with the text. The rows found are run once more to show z on the tokens around each position.
2. `logit_effect` sends a unit's write vector through the final LayerNorm's weights and the unembedding: which tokens it
   promotes and which it suppresses when z is positive, frozen normalisation assumed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.factors import Factors
from swd_lens.inject import attach
from swd_lens.sites import hook_name, split_name
from swd_lens.tasks.text import as_rows

# Kinds of sites whose output is added to the residual stream as it is.
WRITES_RESIDUAL = ("mlp_out", "attn_o")


@dataclass(frozen=True)
class Context:
    """One place where a unit fires.

    Attributes:
        tokens: the token strings of the window.
        z: the unit's activation on each of them.
        peak: index in the window of the position that was ranked.
    """

    tokens: tuple[str, ...]
    z: tuple[float, ...]
    peak: int


@dataclass(frozen=True)
class LogitEffect:
    """Tokens a write vector promotes and suppresses for z > 0, strongest first, with the change in centred logits per unit z."""

    promoted: tuple[tuple[str, float], ...]
    suppressed: tuple[tuple[str, float], ...]


def top_contexts(
    model: Any,
    factors: Factors | Mapping[str, Factors],
    units: Sequence[tuple[str, int]],
    tokens: Any,
    *,
    n: int = 20,
    before: int = 14,
    after: int = 2,
    batch_size: int = 64,
) -> dict[tuple[str, int], list[Context]]:
    """The n positions of largest |z| per unit, at most one per row of text (paper app. E.1: 20 by |z|).

    Args:
        units: (site, index) pairs.
        tokens: (rows, pos) ids of held-out text.
        before, after: tokens shown on either side of the position.
    """
    rows = as_rows(tokens, model)
    by_site: dict[str, list[int]] = {}
    for site, index in units:
        by_site.setdefault(site, []).append(index)
    with torch.no_grad(), attach(model, factors):
        peaks = _peaks(model, rows, by_site, n, batch_size)
        wanted = sorted({row for found in peaks.values() for row, _ in found})
        activations = _activations(model, rows[wanted], by_site)
    contexts: dict[tuple[str, int], list[Context]] = {}
    for (site, index), found in peaks.items():
        column = by_site[site].index(index)
        contexts[site, index] = [
            _context(model, rows[row], activations[site][wanted.index(row), :, column], pos, before, after)
            for row, pos in found
        ]
    return contexts


def _peaks(
    model: Any, rows: Int[Tensor, "rows pos"], by_site: Mapping[str, list[int]], n: int, batch_size: int
) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Running top n of each unit's largest |z| per row: (row, pos), largest first."""
    best: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for start in range(0, len(rows), batch_size):
        for site, z in _activations(model, rows[start : start + batch_size], by_site).items():
            value, pos = z.abs().max(1)
            row = torch.arange(start, start + len(value))[:, None].expand_as(pos)
            if site in best:
                value, row, pos = (torch.cat(pair) for pair in zip(best[site], (value, row, pos), strict=True))
            keep = torch.sort(value, dim=0, descending=True, stable=True).indices[:n]
            best[site] = (value.gather(0, keep), row.gather(0, keep), pos.gather(0, keep))
    return {
        (site, index): list(zip(row[:, column].tolist(), pos[:, column].tolist(), strict=True))
        for site, (_, row, pos) in best.items()
        for column, index in enumerate(by_site[site])
    }


def _activations(
    model: Any, rows: Int[Tensor, "rows pos"], by_site: Mapping[str, list[int]]
) -> dict[str, Float[Tensor, "rows pos _chosen"]]:
    found: dict[str, Tensor] = {}

    def reader(site: str) -> Any:
        def read(z: Tensor, hook: Any) -> None:
            found[site] = z[..., by_site[site]].float().cpu()

        return read

    rows = rows.to(model.cfg.device)
    with model.hooks(fwd_hooks=[(hook_name(site), reader(site)) for site in by_site]):
        model(rows, return_type=None, attention_mask=torch.ones_like(rows))
    return found


def _context(
    model: Any, row: Int[Tensor, " pos"], z: Float[Tensor, " pos"], pos: int, before: int, after: int
) -> Context:
    start, stop = max(0, pos - before), min(len(row), pos + after + 1)
    strings = tuple(model.tokenizer.decode([token]) for token in row[start:stop].tolist())
    return Context(strings, tuple(z[start:stop].tolist()), pos - start)


def logit_effect(
    model: Any, factors: Factors | Mapping[str, Factors], unit: tuple[str, int], *, n: int = 8
) -> LogitEffect:
    """Direct effect of a unit's write vector on the logits, for a site that writes to the residual stream.

    Raises:
        ValueError: the site does not write to the residual stream (its write vectors have no direct logit effect).
    """
    site, index = unit
    if split_name(site)[1] not in WRITES_RESIDUAL:
        raise ValueError(
            f"{site} does not write to the residual stream; logit_effect takes units of mlp_out and attn_o"
        )
    f = factors if isinstance(factors, Factors) else factors[site]
    write = f.write[index].to(model.W_U.device)
    direction = write - write.mean()
    if getattr(getattr(model, "ln_final", None), "w", None) is not None:
        direction = direction * model.ln_final.w.float()
    effect = (direction @ model.W_U.float()).detach()
    effect = effect - effect.mean()
    top, bottom = effect.topk(n), (-effect).topk(n)
    name = model.tokenizer.decode
    return LogitEffect(
        tuple((name([i]), v) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        tuple((name([i]), -v) for i, v in zip(bottom.indices.tolist(), bottom.values.tolist(), strict=True)),
    )
