"""similarity: which units of two factorizations are one another's counterparts, and how alike they are.

1. Two units are as alike as |cos(read, read')| |cos(write, write')|: the cosine of their rank-one matrices a b^T, at any scale
   and sign. Reads are compared under the Gram of the site's inputs, where one is given: directions that no input has do not
   count.
2. `match_units` pairs units one to one so that the sum of similarities is the largest there is (Hungarian; SciPy). Where one
   factorization has more units than the other, those that are left have no counterpart.
3. `edge_jaccard` counts the edges that two sets of units share when counterparts are taken for the same unit.

The number of a unit says nothing: the solver's unit i starts as coordinate i, so that two factorizations agree by number wherever
neither has moved.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from swd_lens.base.errors import AttachError
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.units.factors import Factors


@with_torch_defaults
@dataclass(frozen=True)
class UnitMatch:
    """Counterparts of the units of one factorization among those of another."""

    partner: Int[Tensor, " unit"]  # (unit,) the other's unit that each is matched with, -1 where it has none
    similarity: Float[Tensor, " unit"]  # (unit,) how alike they are, 0 to 1; 0 without a counterpart
    by_number: Float[Tensor, " unit"]  # (unit,) similarity to the other's unit of the same number; 0 where there is none

    def partners(self, units: Iterable[int]) -> list[int]:
        """Counterparts of these units, of those that have one."""
        return [int(self.partner[unit]) for unit in units if int(self.partner[unit]) >= 0]


def unit_similarity(
    units: Factors, others: Factors, gram: Float[Tensor, "d_in d_in"] | None = None
) -> Float[Tensor, "unit other"]:
    """|cos read| |cos write| of every pair of units, float64; 0 of a unit that reads or writes nothing.

    Args:
        units, others: factors of matrices of one shape.
        gram: (d_in, d_in) of the site's inputs, at any scale; None: all directions of inputs count the same.

    Raises AttachError: matrices of two shapes.
    """
    shapes = [(f.d_in, f.d_out) for f in (units, others)]
    if shapes[0] != shapes[1]:
        raise AttachError(f"units of a matrix {shapes[0]} cannot be compared with units of a matrix {shapes[1]}: give one site")
    (reads, other_reads), (writes, other_writes) = (
        [factor.detach().cpu().double() for factor in pair] for pair in ((units.read, others.read), (units.write, others.write))
    )
    metric = None if gram is None else gram.detach().cpu().double()

    def seen(vectors: Tensor) -> Tensor:
        return vectors if metric is None else metric @ vectors

    def inverse(squares: Tensor) -> Tensor:
        return torch.where(squares > 0, squares.clamp_min(1e-300).rsqrt(), 0.0)

    norms = [inverse((of * seen(of)).sum(0)) for of in (reads, other_reads)]
    read = (reads.T @ seen(other_reads)) * norms[0][:, None] * norms[1]
    norms = [inverse(of.square().sum(1)) for of in (writes, other_writes)]
    write = (writes @ other_writes.T) * norms[0][:, None] * norms[1]
    return (read * write).abs().clamp(max=1.0)


def match_units(units: Factors, others: Factors, gram: Float[Tensor, "d_in d_in"] | None = None) -> UnitMatch:
    """Pair the units of two factorizations one to one, as alike as can be in all; see `unit_similarity` for the arguments.
    Raises AttachError: matrices of two shapes."""
    similarity = unit_similarity(units, others, gram)
    own, theirs = (torch.from_numpy(of) for of in linear_sum_assignment(-similarity.numpy()))
    partner = torch.full((units.n_units,), -1, dtype=torch.int64)
    matched = torch.zeros(units.n_units, dtype=torch.float64)
    partner[own], matched[own] = theirs, similarity[own, theirs]
    by_number = torch.zeros(units.n_units, dtype=torch.float64)
    common = min(similarity.shape)
    by_number[:common] = similarity.diagonal()[:common]
    return UnitMatch(partner, matched, by_number)


def edge_jaccard(units: Factors, chosen: Iterable[int], others: Factors, theirs: Iterable[int], match: UnitMatch) -> float:
    """Share of edges (read and write nonzeros) that two sets of units have in common, |A and B| / |A or B|.

    An edge is common where its unit's counterpart is in the other set and has it, too. Two sets without edges share all: 1.

    Args:
        units, chosen: a factorization and some of its units.
        others, theirs: another one and some of its.
        match: counterparts of `units` among `others`.
    """
    chosen, inside, common = list(chosen), set(theirs), 0
    for unit in chosen:
        other = int(match.partner[unit])
        if other in inside:
            common += int(((units.read[:, unit] != 0) & (others.read[:, other] != 0)).sum())
            common += int(((units.write[unit] != 0) & (others.write[other] != 0)).sum())
    edges = sum(int(f.edges_per_unit[list(of)].sum()) for f, of in ((units, chosen), (others, inside)))
    return common / (edges - common) if edges else 1.0
