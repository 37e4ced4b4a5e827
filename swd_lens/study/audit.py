"""audit: what makes a unit fire, and what it pushes the output towards.

1. `top_contexts` streams held-out text once and keeps, for each wanted unit, the n positions of largest |z|; memory does not
   grow with the text. The rows found are run once more to show z on the tokens around each position.
2. `logit_effect` sends a unit's write vector through the final normalization's weights and the unembedding: which tokens it
   promotes and which it suppresses when z is positive, with the norm's scale held fixed.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.factors import Factors
from swd_lens.hosts import Host, host_of, require_no_dropout
from swd_lens.hosts.seen import require_seen
from swd_lens.inject import attach
from swd_lens.sites import WRITES_RESIDUAL, Site, split_name
from swd_lens.tasks.text import as_rows


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
    factors: Any,
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
        factors: what to attach, see `swd_lens.attach`.
        units: (site, index) pairs.
        tokens: (rows, pos) ids of held-out text.
        before, after: tokens shown on either side of the position.

    Raises:
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    rows = as_rows(tokens, model)
    require_no_dropout(model)
    by_site: dict[str, list[int]] = {}
    for site, index in units:
        by_site.setdefault(site, []).append(index)
    host = host_of(model)
    with torch.no_grad(), attach(model, factors) as attachment:
        chosen = {site: by_site[site.name] for site in attachment.sites if site.name in by_site}
        peaks = _peaks(host, rows, chosen, n, batch_size)
        wanted = sorted({row for found in peaks.values() for row, _ in found})
        activations = _activations(host, rows[wanted], chosen)
    contexts: dict[tuple[str, int], list[Context]] = {}
    for (site, index), found in peaks.items():
        column = by_site[site].index(index)
        contexts[site, index] = [
            _context(model, rows[row], activations[site][wanted.index(row), :, column], pos, before, after)
            for row, pos in found
        ]
    return contexts


def _peaks(
    host: Host, rows: Int[Tensor, "rows pos"], chosen: Mapping[Site, list[int]], n: int, batch_size: int
) -> dict[tuple[str, int], list[tuple[int, int]]]:
    """Running top n of each unit's largest |z| per row: (row, pos), largest first."""
    best: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    for start in range(0, len(rows), batch_size):
        for site, z in _activations(host, rows[start : start + batch_size], chosen).items():
            value, pos = z.abs().max(1)
            row = torch.arange(start, start + len(value))[:, None].expand_as(pos)
            if site in best:
                value, row, pos = (torch.cat(pair) for pair in zip(best[site], (value, row, pos), strict=True))
            keep = torch.sort(value, dim=0, descending=True, stable=True).indices[:n]
            best[site] = (value.gather(0, keep), row.gather(0, keep), pos.gather(0, keep))
    return {
        (site.name, index): list(zip(row[:, column].tolist(), pos[:, column].tolist(), strict=True))
        for site, indices in chosen.items()
        for column, index in enumerate(indices)
        for _, row, pos in (best[site.name],)
    }


def _activations(
    host: Host, rows: Int[Tensor, "rows pos"], chosen: Mapping[Site, list[int]]
) -> dict[str, Float[Tensor, "rows pos _chosen"]]:
    found: dict[str, Tensor] = {}

    def reader(site: Site) -> Any:
        def read(z: Tensor, hook: Any) -> None:
            found[site.name] = z[..., chosen[site]].float().cpu()

        return read

    with host.model.hooks(fwd_hooks=[(site.hook_name, reader(site)) for site in chosen]):
        host.run(rows)
    require_seen(chosen, found, "units")
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
    norm, unembedding = host_of(model).readout()
    direction = f.write[index].to(unembedding.device)
    if str(model.cfg.normalization_type).startswith("LN"):  # LayerNorm takes the mean out, RMSNorm does not
        direction = direction - direction.mean()
    if norm is not None:
        direction = direction * norm.float()
    effect = (direction @ unembedding.float()).detach()
    effect = effect - effect.mean()
    top, bottom = effect.topk(n), (-effect).topk(n)
    name = model.tokenizer.decode
    return LogitEffect(
        tuple((name([i]), v) for i, v in zip(top.indices.tolist(), top.values.tolist(), strict=True)),
        tuple((name([i]), -v) for i, v in zip(bottom.indices.tolist(), bottom.values.tolist(), strict=True)),
    )
