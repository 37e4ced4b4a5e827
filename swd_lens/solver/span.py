"""The sparsest basis of a span: where units start when a weight is a product of sparse factors.

W = AB is (AR)(R^-1 B) for every invertible R, so W's columns only tell what A's columns span. Where A is sparse they are the
sparsest vectors of that span, and can be found (Spielman, Wang and Wright, Exact Recovery of Sparsely-Used Dictionaries, 2012).

1. `from_span`: the factors of a weight. The long side's vectors are the sparse ones, the other factor is least squares, and of
   both the K entries that are worth most stay (`cut`). None where the span has no sparse vectors, which a few show
   (`share_of_entries`): those of ordinary trained matrices have .34 to .39 of the entries (embedded model's MLPs), as in a
   random subspace; those of planted factors .03 to .14.
2. `sparsest_basis`: in rounds. Each coordinate of what is not yet spanned is a constraint; of what they give, vectors are taken,
   sparsest first, as far as they are independent. Then each is sought anew, from where it is, against the dual basis: a sparser
   vector with the same part outside the span of the others.
3. `sparse_vectors`: for each constraint c the vector Q y of least L1 norm with c . y = 1, all side by side, by ADMM; then again,
   with weights by which large entries count less (Candes, Wakin and Boyd, Enhancing Sparsity by Reweighted L1, 2008).

The search is in float32: it only says where the alternation starts.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.solver.shapes import Dense, Read, Write
from swd_lens.solver.support import first_largest, keep_exactly


@dataclass(frozen=True)
class Search:
    """Effort of `sparsest_basis`."""

    rounds: int = 6  # of constraints
    exchanges: int = 4  # of all vectors against the dual basis
    # first, later, exchanged: ADMM steps between changes of the weights, in the first round, in later ones, in an exchange
    first: tuple[int, ...] = (30,) * 6
    later: tuple[int, ...] = (30,) * 2
    exchanged: tuple[int, ...] = (20,) * 5
    constraints: int = 2  # in a round, per vector that is missing


WHOLE = Search()
# For a few units.
SMALL = Search(rounds=1, exchanges=0, first=(25,) * 4, constraints=8)

# A vector is independent of others if this share of it, in the orthonormal basis, lies outside their span.
INDEPENDENT = 0.1
# Singular values below this share of the largest are rounding.
RANK = 1e-4
# The span is searched where the long side is LONGER times the units (a random one has sparse vectors below), and PROBES sparse
# vectors have, on average, less than this share of the entries.
LONGER, PROBES, SPARSE = 1.75, 6, 0.15


def from_span(target: Dense, units: int, edges: int) -> tuple[Read, Write] | None:
    """Read and write factor with `edges` entries, or None where the span has no sparse vectors."""
    if target.shape[0] < target.shape[1]:
        factors = from_span(target.T, units, edges)
        return None if factors is None else (factors[1].T.contiguous(), factors[0].T.contiguous())
    if units > target.shape[1] or target.shape[0] < LONGER * units:
        return None
    # Coordinates of equal norm: the scale of inputs must not look like sparsity.
    norms = target.norm(dim=1, keepdim=True)
    basis = main_directions(target / norms.where(norms > 0, 1.0), units).to(torch.float32)
    if share_of_entries(basis) > SPARSE:
        return None
    vectors = (basis @ sparsest_basis(basis)).to(target.dtype) * norms
    read = target.new_zeros(len(target), units)
    read[:, : vectors.shape[1]] = vectors
    # A weight of lower rank: the other units start as its largest inputs.
    largest = target.norm(dim=1).argsort(descending=True, stable=True)[: units - vectors.shape[1]]
    read[largest, torch.arange(vectors.shape[1], units, device=read.device)] = 1.0
    write = torch.linalg.pinv(read) @ target
    return cut(read, write, edges)


def main_directions(target: Dense, most: int) -> Float[Tensor, "d_in rank"]:
    """Orthonormal basis of the columns' span; of its `most` largest directions, where it has more."""
    squares, right = torch.linalg.eigh(target.T @ target)
    rank = min(most, int((squares > RANK**2 * squares[-1]).sum()))
    first = len(squares) - rank
    return target @ (right[:, first:] / squares[first:].sqrt())


def cut(read: Read, write: Write, edges: int) -> tuple[Read, Write]:
    """The factors' `edges` entries that are worth most: an entry times the norm of the vector that it multiplies. Each unit keeps
    its largest on either side, without which it could not take part in the alternation."""
    read_worth, write_worth = read.abs() * write.norm(dim=1), write.abs() * read.norm(dim=0)[:, None]
    for worth, dim in ((read_worth, 0), (write_worth, 1)):
        worth.scatter_(dim, first_largest(worth, dim), float("inf"))
    kept = keep_exactly(torch.cat([read_worth.flatten(), write_worth.flatten()])[None], edges)
    of_read, of_write = kept.to(read).flatten().split([read.numel(), write.numel()])
    return read * of_read.view_as(read), write * of_write.view_as(write)


def share_of_entries(basis: Float[Tensor, "coordinate rank"]) -> float:
    """Share of the coordinates in a sparse vector of the span, mean of a few: (sum |v|)^2 / sum v^2; small ones hardly count."""
    strided = torch.arange(0, len(basis), max(len(basis) // PROBES, 1), device=basis.device)
    constraints = basis[strided[basis[strided].norm(dim=1) > INDEPENDENT]].T.contiguous()
    if constraints.shape[1] == 0:
        return 1.0
    vectors = basis @ sparse_vectors(basis, constraints, WHOLE.later)
    return float((vectors.abs().sum(0) / vectors.norm(dim=0)).square().mean()) / len(basis)


def sparsest_basis(basis: Float[Tensor, "coordinate rank"], search: Search = WHOLE) -> Float[Tensor, "rank rank"]:
    """Coefficients, in an orthonormal basis, of the sparsest vectors that span the same; each vector has norm 1. Fewer columns
    where the search ends before everything is spanned."""
    rank = basis.shape[1]
    chosen, spanned = basis.new_zeros(rank, 0), basis.new_zeros(rank, 0)
    for turn in range(search.rounds):
        missing = rank - chosen.shape[1]
        rest = basis.T - spanned @ (spanned.T @ basis.T)
        # Evenly among the coordinates that have something of the span.
        unspanned = (rest.norm(dim=0) > INDEPENDENT / 2).nonzero().squeeze(1)
        constraints = rest[:, unspanned[:: max(len(unspanned) // (search.constraints * missing + 4), 1)]]
        if missing == 0 or constraints.shape[1] == 0:
            break
        candidates = _unit_columns(sparse_vectors(basis, constraints, search.first if turn == 0 else search.later))
        l1_norms = (basis @ candidates).abs().sum(0)
        # The sparser half of the candidates, unless it is the last round.
        most = float("inf") if turn + 1 == search.rounds else float(l1_norms.median())
        taken, spanned = _independent(candidates, l1_norms, spanned, most)
        chosen = torch.cat([chosen, candidates[:, taken]], 1)
    for _ in range(search.exchanges if chosen.shape[1] == rank else 0):
        dual = torch.linalg.pinv(chosen).T.contiguous()
        candidates = torch.cat([_unit_columns(sparse_vectors(basis, dual, search.exchanged, chosen)), chosen], 1)
        l1_norms = (basis @ candidates).abs().sum(0)
        taken, _ = _independent(candidates, l1_norms, basis.new_zeros(rank, 0), float("inf"))
        if len(taken) < rank:
            break
        chosen = candidates[:, taken]
    return chosen


def sparse_vectors(
    basis: Float[Tensor, "coordinate rank"],
    constraints: Float[Tensor, "rank vector"],
    steps: tuple[int, ...],
    start: Float[Tensor, "rank vector"] | None = None,
) -> Float[Tensor, "rank vector"]:
    """y of small (reweighted) L1 norm ||Q y||_1 with c . y = 1, for each constraint c. steps: of ADMM, between changes of the
    weights; start: y to begin at, and whose entries weigh the first round."""
    size = constraints.square().sum(0)
    y = constraints / size if start is None else start / (constraints * start).sum(0)
    vectors = basis @ y
    dual = torch.zeros_like(vectors)
    scale = vectors.abs().mean(0)
    for turn, count in enumerate(steps):
        if turn > 0 or start is not None:
            weights = 1 / (vectors.abs() / vectors.square().mean(0).sqrt() + 0.3)
            threshold = scale * weights / weights.mean(0)
        else:
            threshold = scale.expand_as(vectors)
        for _ in range(count):
            moved = vectors + dual
            sparse = moved - moved.clamp(-threshold, threshold)
            y = basis.T @ (sparse - dual)
            y += constraints * ((1 - (constraints * y).sum(0)) / size)
            vectors = basis @ y
            dual += vectors - sparse
    return y


def _independent(
    candidates: Float[Tensor, "rank vector"], l1_norms: Float[Tensor, " vector"], spanned: Float[Tensor, "rank _"], most: float
) -> tuple[list[int], Float[Tensor, "rank _"]]:
    """Candidates up to an L1 norm, sparsest first, as far as they are independent of what is spanned and of each other (one at
    least, whatever its norm); and an orthonormal basis of all that is spanned then."""
    taken: list[int] = []
    known, rank = spanned.shape[1], len(candidates)
    rest = candidates - spanned @ (spanned.T @ candidates)
    new = candidates.new_zeros(rank, rank - known)
    sparse_enough = l1_norms.le(most).tolist()
    for i in l1_norms.argsort(stable=True).tolist():
        if known + len(taken) == rank or (taken and not sparse_enough[i]):
            break
        column = rest[:, i]
        norm = float(column.norm())
        if norm < INDEPENDENT:
            continue
        axis = torch.div(column, norm, out=new[:, len(taken)])
        rest.addr_(axis, axis @ rest, alpha=-1)
        taken.append(i)
    return taken, torch.cat([spanned, new[:, : len(taken)]], 1)


def _unit_columns(vectors: Float[Tensor, "rank vector"]) -> Float[Tensor, "rank vector"]:
    return vectors / vectors.norm(dim=0)
