"""How near found units come to the true ones, of one matrix, and how well scores tell a known circuit from the rest.

1. `TrueUnits`: the read and write vectors that a matrix was made of.
2. `support_f1` matches units one to one by the entries that they share, and counts entries; `mmcs` asks of each true unit how
   near the nearest found rank-one piece points (mean max cosine similarity).
3. `column_mmcs` gives the two numbers of the decomposition papers, for matrices whose true units are their rows.
4. `trimmed`: dense factors with as many entries as a sparse answer may have, so that supports can be compared.
5. `auroc`, and `circuit_aurocs`, which asks it of the units and of the edges of a circuit.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float
from scipy.optimize import linear_sum_assignment
from scipy.stats import rankdata
from torch import Tensor

from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.solver import canonical


@with_torch_defaults
@dataclass(frozen=True)
class TrueUnits:
    """The factors that a matrix was made of.

    Attributes:
        read, write: (d_in, unit) and (unit, d_out); their nonzeros are the true edges.
    """

    read: Float[Tensor, "d_in unit"]
    write: Float[Tensor, "unit d_out"]

    @property
    def edges(self) -> int:
        """Nonzeros of both factors."""
        return int(self.read.count_nonzero() + self.write.count_nonzero())

    @property
    def n_units(self) -> int:
        return self.read.shape[1]


@with_torch_defaults
def support_f1(truth: TrueUnits, read: Float[Tensor, "d_in found"], write: Float[Tensor, "found d_out"]) -> float:
    """F1 of the entries of read and write factor, units matched one to one by the entries that they share; 1: all are found.

    Source: ours (evidence.md §5). Order, sign and scale of units do not count.
    """
    shared = (truth.read != 0).double().T @ (read != 0).double() + (truth.write != 0).double() @ (write != 0).double().T
    found = int(read.count_nonzero() + write.count_nonzero())
    return 2 * float(shared[linear_sum_assignment(-shared.numpy())].sum()) / (found + truth.edges)


@with_torch_defaults
def mmcs(truth: TrueUnits, read: Float[Tensor, "d_in found"], write: Float[Tensor, "found d_out"]) -> float:
    """Mean over true units of the largest |cosine| of a found rank-one piece read_i write_i with theirs; 1: all are found.

    Source: mean max cosine similarity by Sharkey, Braun and Millidge (2022); ours of rank-one pieces.
    """
    return float(_cosines(truth, read, write).amax(1).mean())


def _cosines(truth: TrueUnits, read: Tensor, write: Tensor) -> Float[Tensor, "unit found"]:
    normed = torch.nn.functional.normalize
    reads = normed(truth.read.double(), dim=0).T @ normed(read.double(), dim=0)
    return (reads * (normed(truth.write.double(), dim=1) @ normed(write.double(), dim=1).T)).abs()


@with_torch_defaults
def column_mmcs(
    weight: Float[Tensor, "d_in d_out"], read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"]
) -> tuple[float, float]:
    """MMCS and ML2R of the decomposition papers, for a matrix whose true units are its inputs' rows.

    For each input j: the largest cosine of a piece's row j, read[j, c] write[c], with W's row j; and the ratio of their norms for
    the piece that has it. The means over inputs. A piece counts for every input that it reads, so that few pieces can score
    high: `mmcs` beside it asks for the whole piece.

    Returns:
        (MMCS, ML2R), 1 and 1 where every input has a piece of its own.

    Source: Bushnaq, Braun and Sharkey, Stochastic Parameter Decomposition, 2025, section on the toy model of superposition.
    """
    rows, writes = weight.double(), write.double()
    along = read.double().sign() * (torch.nn.functional.normalize(rows, dim=1) @ torch.nn.functional.normalize(writes, dim=1).T)
    best = along.max(1)
    norms = (read.double().abs() * writes.norm(dim=1)).gather(1, best.indices[:, None]).squeeze(1)
    return float(best.values.mean()), float((norms / rows.norm(dim=1)).mean())


@with_torch_defaults
def relative_error(weight: Float[Tensor, "d_in d_out"], read: Tensor, write: Tensor, gram: Tensor | None = None) -> float:
    """||W - read write|| / ||W||, under the Gram of the inputs where there is one."""

    def norm(matrix: Tensor) -> float:
        weighed = matrix if gram is None else gram.double() @ matrix
        return float((matrix * weighed).sum().clamp_min(0).sqrt())

    return norm(weight.double() - read.double() @ write.double()) / norm(weight.double())


@with_torch_defaults
def trimmed(read: Float[Tensor, "d_in unit"], write: Float[Tensor, "unit d_out"], edges: int) -> tuple[Tensor, Tensor]:
    """Keep the `edges` largest entries of both factors together, each unit's vectors brought to equal norms; the rest is zero."""
    read, write = canonical(read, write)
    if int(read.count_nonzero() + write.count_nonzero()) <= edges:
        return read, write
    values = torch.cat([read.flatten(), write.flatten()])
    kept = torch.zeros_like(values)
    largest = values.abs().topk(edges).indices
    kept[largest] = values[largest]
    return kept[: read.numel()].view_as(read), kept[read.numel() :].view_as(write)


@with_torch_defaults
def auroc(inside: Collection[float], outside: Collection[float]) -> float:
    """The chance that a score of `inside` is above one of `outside`, ties counting half; NaN where one of them is empty."""
    n, m = len(inside), len(outside)
    if not n or not m:
        return math.nan
    ranks = rankdata([*inside, *outside])
    return float((ranks[:n].sum() - n * (n + 1) / 2) / (n * m))


@with_torch_defaults
def circuit_aurocs(
    truths: Mapping[str, TrueUnits],
    circuit: Mapping[str, Collection[int]],
    found: Mapping[str, tuple[Tensor, Tensor]],
    scores: Mapping[str, Float[Tensor, " _found"]],
) -> tuple[float, float]:
    """AUROC of scores against a known circuit, over units and over edges of all sites together.

    A found unit is of the circuit if the true unit that it is matched to is: by the largest |cosine|, one to one. A true unit of
    the circuit that nothing is matched to was missed, and stands below every score. An edge is a nonzero entry of a found unit;
    it is of the circuit if the matched true unit is and has that entry. Its score is the unit's times the entry's share of its
    vector's largest. True edges of the circuit that were not found stand below every score, too.

    Args:
        truths: site -> its true units.
        circuit: site -> numbers of those that the task needs.
        found: site -> read (d_in, found) and write (found, d_out).
        scores: site -> one per found unit.

    Returns:
        (of units, of edges)

    Source: ours.
    """
    units: tuple[list[float], list[float]] = ([], [])
    edges: tuple[list[float], list[float]] = ([], [])
    for site, truth in truths.items():
        read, write = found[site]
        ours, theirs = linear_sum_assignment(-_cosines(truth, read, write).numpy())
        true_of = dict(zip(theirs.tolist(), ours.tolist(), strict=True))
        needed = set(circuit.get(site, ()))
        missed = {unit: {entry for entry, _ in _shares(truth.read[:, unit], truth.write[unit])} for unit in needed}
        for unit, score in enumerate(scores[site].tolist()):
            true = true_of.get(unit)
            units[true not in needed].append(score)
            wanted = missed.get(true, set()) if true is not None else set()
            for entry, share in _shares(read[:, unit], write[unit]):
                edges[entry not in wanted].append(score * share)
                wanted.discard(entry)
        units[0].extend([-math.inf] * len(needed - set(ours.tolist())))
        edges[0].extend([-math.inf] * sum(map(len, missed.values())))
    return auroc(*units), auroc(*edges)


def _shares(read: Tensor, write: Tensor) -> list[tuple[tuple[str, int], float]]:
    """A unit's entries, and each one's size as a share of its vector's largest."""
    return [
        ((side, i), float(vector[i].abs() / vector.abs().max()))
        for side, vector in (("read", read), ("write", write))
        for i in vector.nonzero().flatten().tolist()
    ]
