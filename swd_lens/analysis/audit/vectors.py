"""A unit's read and write vectors: its edges by name, its neighbours, and its direct effect on the logits.

1. `read_vectors` and `write_vectors` of a site's units: Factors show them; a coder (transcoder, SAE) does where it has W_enc and
   W_dec and they stand at the site's input and output; otherwise its units have no edges that could be named.
2. `Ends` names the coordinates of a site's input and output; `edges_of` lists the strongest edges of a vector under these names.
3. `nearest_writes`: the units of a site that write in nearly the same direction.
4. `Readout`: which tokens a write vector promotes and suppresses. The vector goes through the norms between its site and the
   unembedding (a linear `Passage`), their scales, by the norms' own formula, held at their mean over a text. Times the
   unembedding, less the mean over the vocabulary, that is the mean change of each token's centred logit per unit of z.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.analysis.audit.contexts import TokenNames
from swd_lens.base.record import PlainRecord
from swd_lens.hosts import host_of, sites_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import inverse_scale, norms_behind
from swd_lens.hosts.sites import WRITES_RESIDUAL, Site, Span, split_name
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units.coder import CoderUnits, Units
from swd_lens.units.factors import Factors

N_TOKENS = 8_192  # of the text, from its beginning
_AT_ONCE = 2_048  # tokens of a forward
_BLOCK = 512  # rows of a cosine matrix at a time
_LOGITS_AT_ONCE = 2**22


@dataclass(frozen=True)
class Passage:
    """From a site's output to what the unembedding reads: through each norm, then times `inverse`."""

    # (d_model,) of each norm on the way, None where it is one (or folded into the next matrix)
    weights: tuple[Float[Tensor, " d_model"] | None, ...]
    centred: bool  # whether these norms take the mean out
    inverse: float  # mean over positions of 1 / scale, of both norms together


def beginning_of(stream: TokenStream) -> tuple[Int[Tensor, "rows pos"], Bool[Tensor, "rows pos"] | None]:
    """The first rows of a text, N_TOKENS tokens or one row, and which of their positions count."""
    rows = next(iter(stream.batches(max(1, N_TOKENS // stream.row_length))))
    return rows, stream.counted(rows, 0)


def read_vectors(units: Units) -> Float[Tensor, "d_in unit"] | None:
    """The read vectors of a site's units, float32 on the CPU; None where they cannot be seen."""
    if isinstance(units, Factors):
        return units.read.detach().cpu()
    weights = units.read_weights if isinstance(units, CoderUnits) and units.reads == "input" else None
    return None if weights is None else weights.detach().float().cpu()


def write_vectors(units: Units) -> Float[Tensor, "unit d_out"] | None:
    """The write vectors of a site's units, float32 on the CPU; None where they cannot be seen."""
    if isinstance(units, Factors):
        return units.write.detach().cpu()
    weights = units.write_weights if isinstance(units, CoderUnits) and units.writes == "output" else None
    return None if weights is None else weights.detach().float().cpu()


@dataclass(frozen=True)
class Edges:
    """One side of a unit.

    Attributes:
        n: how many edges (nonzeros).
        strongest: (name of the end, weight), largest |weight| first; none where they were only counted.
        heads: share of the squared norm per head, largest first; empty where the end has no heads.
    """

    n: int
    strongest: tuple[tuple[str, float], ...] = ()
    heads: Mapping[str, float] = field(default_factory=dict)

    def table(self) -> pd.DataFrame:
        return pd.DataFrame(self.strongest, columns=["end", "weight"])


def edges_of(vector: Float[Tensor, " d"], spans: Sequence[Span], n: int = 10) -> Edges:
    """The n strongest edges of a read or write vector."""
    ends = vector.nonzero()[:, 0]
    order = ends[vector[ends].abs().sort(dim=0, descending=True, stable=True).indices[:n]]
    names = [f"{spans[0].name} {i}" for i in order.tolist()]
    heads: dict[str, float] = {}
    if len(spans) > 1:
        inside = [next(span for span in spans if span.start <= i < span.start + span.size) for i in order.tolist()]
        names = [f"{span.name} / dim {i - span.start}" for span, i in zip(inside, order.tolist(), strict=True)]
        energy = vector.double().square()
        total = float(energy.sum()) or 1.0
        shares = {span.name: float(energy[span.start : span.start + span.size].sum()) / total for span in spans}
        heads = {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}
    return Edges(len(ends), tuple(zip(names, vector[order].tolist(), strict=True)), heads)


def nearest_writes(write: Float[Tensor, "unit d_out"], k: int) -> tuple[Int[Tensor, "unit _k"], Float[Tensor, "unit _k"]]:
    """Per unit the k others of largest |cosine| between write vectors, and the cosines; dead units have cosine 0."""
    unit = write / write.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    others, cosines = [], []
    for rows in torch.arange(len(write)).split(_BLOCK):
        cosine = unit[rows] @ unit.T
        nearest = strongest_others(cosine, rows, k)
        others.append(nearest)
        cosines.append(cosine.gather(1, nearest))
    return torch.cat(others), torch.cat(cosines)


def strongest_others(values: Float[Tensor, "some unit"], own: Int[Tensor, " some"], k: int) -> Int[Tensor, "some _k"]:
    """Columns of the k largest |value| per row, the row's own column left out."""
    size = values.abs().scatter(1, own[:, None], -1.0)
    return size.sort(dim=1, descending=True, stable=True).indices[:, : min(k, values.shape[1] - 1)]


@dataclass(frozen=True)
class LogitEffect(PlainRecord):
    """Tokens a write vector promotes and suppresses for z > 0, strongest first, with the change in centred logits per unit of z,
    at the mean scale of the final norm over a text.
    """

    promoted: tuple[tuple[str, float], ...]
    suppressed: tuple[tuple[str, float], ...]


class Readout:
    """The way from the sites of a host to its logits.

    Args:
        rows: (rows, pos) ids of the text over which the norms' scales are averaged.
        counted: the positions that count; None: all.

    Raises:
        UnsupportedHostError: a host without next-token logits.
    """

    def __init__(
        self,
        model: Any,
        sites: Iterable[Site],
        rows: Int[Tensor, "rows pos"],
        counted: Bool[Tensor, "rows pos"] | None = None,
        names: TokenNames | None = None,
    ):
        host, facts = host_of(model), facts_of(model)
        final_weight, self.unembedding = host.readout()
        self.names = names or TokenNames(model)
        writing = [site for site in sites if site.kind in WRITES_RESIDUAL]
        behind = {site: norm for site in writing if (norm := host.norm_behind(site)) is not None}
        # Scales of the norms on the way, from a run of the rows without their logits.
        final_parts: list[Tensor] = []
        parts: dict[str, list[Tensor]] = {site.name: [] for site in behind}
        with torch.no_grad():
            for part in rows.split(max(1, _AT_ONCE // rows.shape[1])):
                with norms_behind(host, list(behind)) as seen:
                    stream = host.residual(part, len(host.model.blocks))
                final_parts.append(inverse_scale(facts, stream).cpu())  # 1 where the host has no final norm
                for site, (x, _) in seen.items():
                    parts[site].append(inverse_scale(facts, x).cpu().reshape(-1, rows.shape[1]))
        self.passages: dict[str, Passage] = {}  # of the sites that write to the residual stream
        final = torch.cat(final_parts) if writing else torch.empty(0)
        for site in writing:
            both = final * torch.cat(parts[site.name]) if site in behind else final
            mean = float(both.mean() if counted is None else both[counted].mean())
            first = [host.norm_affine(behind[site]).scale] if site in behind else []
            self.passages[site.name] = Passage((*first, final_weight), facts.norm == "layer", mean)

    def effects(self, site: str, write: Float[Tensor, "some d_model"], n: int = 8) -> list[LogitEffect]:
        """One per write vector of a site, with the n tokens on either side."""
        unembedding, passage = self.unembedding.detach().float(), self.passages[site]
        effects = []
        for part in write.split(max(1, _LOGITS_AT_ONCE // unembedding.shape[1])):
            read = part.to(unembedding.device)
            for weight in passage.weights:
                read = read - read.mean(1, keepdim=True) if passage.centred else read
                read = read if weight is None else read * weight.to(read)
            logits = (read * passage.inverse) @ unembedding
            logits = logits - logits.mean(1, keepdim=True)
            n = min(n, logits.shape[1])
            top, bottom = logits.topk(n), (-logits).topk(n)
            for row in range(len(part)):
                promoted = self._named(top.indices[row], top.values[row])
                effects.append(LogitEffect(promoted, self._named(bottom.indices[row], -bottom.values[row])))
        return effects

    def _named(self, tokens: Tensor, values: Tensor) -> tuple[tuple[str, float], ...]:
        return tuple((self.names(i), value) for i, value in zip(tokens.tolist(), values.tolist(), strict=True))


def logit_effect(
    model: Any, factors: Factors | Mapping[str, Units], unit: tuple[str, int], tokens: Any, *, n: int = 8
) -> LogitEffect:
    """Direct effect of a unit's write vector on the logits, for a site that writes to the residual stream.

    Args:
        tokens: (rows, pos) ids of text, or a `TokenStream`: scales of norms are averaged over its beginning.

    Raises:
        ValueError: the site does not write to the residual stream (its write vectors have no direct logit effect).
        UnsupportedHostError: a host without next-token logits.
    """
    site, index = unit
    if split_name(site)[1] not in WRITES_RESIDUAL:
        raise ValueError(f"{site} does not write to the residual stream; logit_effect takes units of mlp_out and attn_o")
    write = write_vectors(factors if isinstance(factors, Factors) else factors[site])
    if write is None:
        raise ValueError(f"the units of {site} show no write vectors, so they have no direct logit effect")
    readout = Readout(model, sites_of(host_of(model), site), *beginning_of(as_stream(tokens, model)))
    return readout.effects(site, write[index][None], n)[0]
