"""A unit's read and write edges, strongest first, under the names of their ends; and its neighbours by what they write.

Factors show their edges. A coder (transcoder, SAE) does where it has W_enc and W_dec and they stand at the site's input and
output; otherwise its units have no edges that could be named.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit.names import Span
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors

_BLOCK = 512  # rows of a cosine matrix at a time


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


def read_vectors(units: Any) -> Float[Tensor, "d_in unit"] | None:
    """What the units read of the site's input, on the CPU; None where that cannot be seen."""
    if isinstance(units, Factors):
        return units.read.detach().cpu()
    encoder = getattr(units.coder, "W_enc", None) if isinstance(units, CoderUnits) else None
    if not isinstance(encoder, Tensor) or not (units.reads == "input" and encoder.shape == (units.d_in, units.n_units)):
        return None
    return encoder.detach().float().cpu()


def write_vectors(units: Any) -> Float[Tensor, "unit d_out"] | None:
    """What the units write to the site's output, on the CPU; None where that cannot be seen."""
    if isinstance(units, Factors):
        return units.write.detach().cpu()
    decoder = getattr(units.coder, "W_dec", None) if isinstance(units, CoderUnits) else None
    if not isinstance(decoder, Tensor) or not (
        units.writes == "output" and decoder.shape == (units.n_units, units.d_out)
    ):
        return None
    return decoder.detach().float().cpu()


def edges_of(vector: Float[Tensor, " d"], spans: Sequence[Span], n: int = 10) -> Edges:
    """The n strongest edges of a read or write vector."""
    ends = vector.nonzero()[:, 0]
    order = ends[vector[ends].abs().sort(dim=0, descending=True, stable=True).indices[:n]]
    strongest = tuple((_name(int(i), spans), float(vector[i])) for i in order)
    heads: dict[str, float] = {}
    if len(spans) > 1:
        energy = vector.double().square()
        total = float(energy.sum()) or 1.0
        shares = {span.name: float(energy[span.start : span.start + span.size].sum()) / total for span in spans}
        heads = {name: share for name, share in sorted(shares.items(), key=lambda item: -item[1]) if share > 0}
    return Edges(len(ends), strongest, heads)


def _name(index: int, spans: Sequence[Span]) -> str:
    if len(spans) == 1:
        return f"{spans[0].name} {index}"
    span = next(span for span in spans if span.start <= index < span.start + span.size)
    return f"{span.name} / dim {index - span.start}"


def nearest_writes(
    write: Float[Tensor, "unit d_out"], k: int
) -> tuple[Int[Tensor, "unit _k"], Float[Tensor, "unit _k"]]:
    """Per unit the k others of largest |cosine| between write vectors, and the cosines; dead units have cosine 0."""
    unit = write / write.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float32).tiny)
    others, cosines = [], []
    for rows in torch.arange(len(write)).split(_BLOCK):
        cosine = unit[rows] @ unit.T
        found = strongest_others(cosine, rows, k)
        others.append(found)
        cosines.append(cosine.gather(1, found))
    return torch.cat(others), torch.cat(cosines)


def strongest_others(values: Float[Tensor, "some unit"], own: Int[Tensor, " some"], k: int) -> Int[Tensor, "some _k"]:
    """Columns of the k largest |value| per row, the row's own column left out."""
    size = values.abs().scatter(1, own[:, None], -1.0)
    return size.sort(dim=1, descending=True, stable=True).indices[:, : min(k, values.shape[1] - 1)]
