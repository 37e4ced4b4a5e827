"""Pieces of a sparse weight: where units start when most of a matrix's entries are nothing.

A unit of a few reads and writes is a small block of rank one. In a matrix that is sparse itself most entries are of one unit
alone, so that its block can be read off and taken off, after which others can be seen. Units need not be spanned by the weight's
rows or columns, as in span.py: of 64 units with 4 entries each and 64 outputs, one or two are not.

1. `from_pieces`: factors of a weight; None where it is not sparse, or shows no piece. What no piece explains starts as the rows
   of which most is left; then entries are exchanged until there are K (swaps.py).
2. `peeled`: in rounds, what is visible of the rest is taken off it, until a round leaves more than it found.
3. `visible_pieces`: large entries are corners, all looked at side by side. From a corner (i, j) on, its block (`Blocks`) should
   be W[i', j'] = W[i', j] W[i, j'] / W[i, j]. Rows and columns that agree in enough entries are the piece's. Many entries of the
   corner's own row and column are of another unit, too, so that a second look takes each read from all the piece's columns
   together, and each write from its rows. Of pieces that share an entry the larger is taken (`apart`).
4. `agreeing`: a row in which enough of a unit's columns ask for the same read is one that the unit reads; columns likewise.

Planted factors (128 x 64, 64 units, preset "best"), F1 and error from coordinates and from pieces: 4 + 4 entries .69, .09 and
1.00, .000; with noise .05 .69, .106 and .91, .053; 8 + 8 entries .80, .088 and 1.00, .000 (from the span .98, .004, in three
times the time). The search is in float32: it only says where units start.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.solver.metric import Metric
from swd_lens.solver.shapes import Dense, Read, Write
from swd_lens.solver.span import cut
from swd_lens.solver.swaps import swapped

# A weight is sparse if it has less than this share of its entries (`share_of_weight`): planted ones that can be peeled .05 to
# .18, others .24 and more; trained matrices .5 to .64, normal values 2 / pi.
SPARSE = 0.2
# Agreeing entries that a piece has at least, in each round: small ones are not seen by chance once the others are gone. Where it
# is LARGE, two of them in each row and column.
LEAST, LARGE = (9, 9, 6, 4, 4), 9
# Corners of each row and column, and rows and columns that a corner looks at: the largest.
CORNERS, SEEN = 2, 24
# An entry agrees if it is as foretold, up to this share and so many noise levels; and if that is more than could be nothing.
AGREES, NOISE_LEVELS, SAYS = 1e-4, 2.5, 1.2
# A row is of a piece if this share of what is foretold of it, in squares, agrees. For a unit that is known so many columns are
# enough, too, of its largest ones, which are asked.
BELONGS, ENOUGH, ASKED = 0.4, 3, 20
# Below this share of the weight's largest entry an entry is rounding.
ROUNDING = 1e-6
_TINY = 1e-30


def from_pieces(target: Dense, units: int, edges: int, metric: Metric) -> tuple[Read, Write] | None:
    """Read and write factor with `edges` entries, in the metric's coordinates; None where the weight shows no pieces."""
    if share_of_weight(target) > SPARSE:
        return None
    pieces = peeled(target.to(torch.float32), units)
    if pieces is None:
        return None
    read, write = (factor.to(target) for factor in pieces)
    rest, missing = target - read @ write, units - len(write)
    if missing > len(target):
        return None
    largest = rest.norm(dim=1).argsort(descending=True, stable=True)[:missing]
    single = target.new_zeros(len(target), len(largest))
    single[largest, torch.arange(len(largest), device=target.device)] = 1.0
    read, write = torch.cat([read, single], 1), torch.cat([write, rest[largest]])
    return swapped(*cut(read, write, edges), target, metric, edges)


def share_of_weight(target: Dense) -> float:
    """(sum |w|)^2 / sum w^2 as a share of the entries; small ones hardly count."""
    return float(target.abs().sum().square() / target.square().sum()) / target.numel()


def peeled(weight: Dense, most: int) -> tuple[Read, Write] | None:
    """Read and write vectors of at most so many units; None where no piece makes the weight smaller."""
    rounding = ROUNDING * float(weight.abs().max())
    rest, nothing = weight, ROUNDING * float(weight.norm())
    read, write = weight.new_zeros(len(weight), 0), weight.new_zeros(0, weight.shape[1])
    units, left = None, float(weight.norm())
    for least in LEAST:
        reads, writes = visible_pieces(rest, least, rounding)
        missing = most - len(write)
        read, write = torch.cat([read, reads[:, :missing]], 1), torch.cat([write, writes[:missing]])
        rest = weight - read @ write
        for _ in range(2):
            read = read + agreeing(rest, write, rounding) * (read == 0)
            rest = weight - read @ write
            write = write + agreeing(rest.T, read.T, rounding).T * (write == 0)
            rest = weight - read @ write
        if not float(rest.norm()) < left:
            break
        units, left = (read, write), float(rest.norm())
        if left <= nothing:
            break
    return units


@dataclass(frozen=True)
class Blocks:
    """One block per corner: entries of the weight in the largest rows of its column and the largest columns of its row."""

    rows: Int[Tensor, "corner row"]
    columns: Int[Tensor, "corner column"]
    entries: Float[Tensor, "corner row column"]
    own_row: Bool[Tensor, "corner row"]
    own_column: Bool[Tensor, "corner column"]

    @classmethod
    def at_corners(cls, rest: Dense, noise: float) -> "Blocks":
        """Corners are the largest entries of each row and of each column, where they are more than noise."""
        magnitude = rest.abs()
        chosen = torch.zeros_like(magnitude, dtype=torch.bool)
        for dim in (0, 1):
            chosen.scatter_(dim, magnitude.topk(min(CORNERS, magnitude.shape[dim]), dim=dim).indices, True)
        row, column = (chosen & (magnitude > NOISE_LEVELS * noise)).nonzero(as_tuple=True)
        rows = magnitude.topk(min(SEEN, rest.shape[0]), dim=0).indices.T[column]
        columns = magnitude.topk(min(SEEN, rest.shape[1]), dim=1).indices[row]
        entries = rest[rows[:, :, None], columns[:, None, :]]
        return cls(rows, columns, entries, rows == row[:, None], columns == column[:, None])

    def __getitem__(self, chosen: Int[Tensor, " chosen"]) -> "Blocks":
        own = self.own_row[chosen], self.own_column[chosen]
        return Blocks(self.rows[chosen], self.columns[chosen], self.entries[chosen], *own)

    def by_corner(self) -> tuple[Float[Tensor, "corner row"], Float[Tensor, "corner column"], Float[Tensor, "corner row column"]]:
        """Reads and writes as the corner's column and row have them, and by how many noise levels their product is off."""
        writes = (self.entries * self.own_row[:, :, None]).sum(1)
        corner = (writes * self.own_column).sum(1, keepdim=True)
        reads = (self.entries * self.own_column[:, None, :]).sum(2) / corner
        # By noise in the entry, in the corner, in its row and in its column.
        off = (1 + reads.square())[:, :, None] * (1 + (writes / corner).square())[:, None, :]
        return reads, writes, off.sqrt_()

    def by_majority(
        self,
        inside: Bool[Tensor, "corner row column"],
        reads: Float[Tensor, "corner row"],
        writes: Float[Tensor, "corner column"],
    ) -> tuple[Float[Tensor, "corner row"], Float[Tensor, "corner column"]]:
        """Reads as the piece's columns have them, in the median, and writes as its rows do."""
        unknown = torch.full_like(self.entries, torch.nan)
        of_row = inside.any(2) & (reads != 0)
        of_column = inside.any(1) & (writes != 0)
        by_row = torch.where(of_row[:, :, None], self.entries / reads[:, :, None], unknown)
        by_column = torch.where(of_column[:, None, :], self.entries / writes[:, None, :], unknown)
        return by_column.nanmedian(2).values, by_row.nanmedian(1).values

    def inside(
        self,
        reads: Float[Tensor, "corner row"],
        writes: Float[Tensor, "corner column"],
        unsure: Float[Tensor, "#corner #row #column"],
        least: int,
    ) -> Bool[Tensor, "corner row column"]:
        """Entries that agree with the piece, in rows and columns of which enough does; none, where `least` are not reached. The
        corner's own row and column agree with it always, and so say nothing of the others."""
        agrees, worth = _agree(self.entries, reads[:, :, None] * writes[:, None, :], unsure)
        elsewhere = ~self.own_row[:, :, None] & ~self.own_column[:, None, :]
        counts = (agrees & elsewhere).to(worth)
        worth = worth * elsewhere
        agreed, fewest = worth * counts, 2 if least >= LARGE else 1
        column_in = counts.sum(1) >= fewest
        row_in = column_in
        for _ in range(2):
            chosen = column_in.to(worth)[:, :, None]
            row_in = ((agreed @ chosen >= BELONGS * (worth @ chosen)) & (counts @ chosen >= fewest)).squeeze(2)
            chosen = row_in.to(worth)[:, None, :]
            column_in = ((chosen @ agreed >= BELONGS * (chosen @ worth)) & (chosen @ counts >= fewest)).squeeze(1)
        inside = agrees & (row_in | self.own_row)[:, :, None] & (column_in | self.own_column)[:, None, :]
        sides = torch.minimum(inside.any(1).sum(1), inside.any(2).sum(1))
        return inside & ((inside.sum((1, 2)) >= least) & (sides >= least**0.5))[:, None, None]

    def of_rank_one(
        self,
        inside: Bool[Tensor, "corner row column"],
        reads: Float[Tensor, "corner row"],
        writes: Float[Tensor, "corner column"],
    ) -> tuple[Float[Tensor, "corner row"], Float[Tensor, "corner column"]]:
        """Least squares on the entries inside, from these values on; 0 in rows and columns without any."""
        known = inside.to(self.entries)
        values = self.entries * known
        reads, writes = reads.nan_to_num(0.0), writes.nan_to_num(0.0)
        for _ in range(3):
            norms = (reads.square()[:, None, :] @ known).squeeze(1).clamp_min(_TINY)
            writes = (reads[:, None, :] @ values).squeeze(1) / norms
            norms = (known @ writes.square()[:, :, None]).squeeze(2).clamp_min(_TINY)
            reads = (values @ writes[:, :, None]).squeeze(2) / norms
        return reads, writes


def visible_pieces(rest: Dense, least: int, rounding: float) -> tuple[Float[Tensor, "d_in piece"], Float[Tensor, "piece d_out"]]:
    """Read and write vectors of pieces with `least` agreeing entries or more, the largest first."""
    noise = _noise(rest, rounding)
    blocks = Blocks.at_corners(rest, noise)
    reads, writes, off = blocks.by_corner()
    inside = blocks.inside(reads, writes, noise * off, least)
    visible = inside.any(2).any(1).nonzero()[:, 0]
    blocks = blocks[visible]
    reads, writes = blocks.by_majority(inside[visible], reads[visible], writes[visible])
    inside = blocks.inside(reads, writes, reads.new_full((1, 1, 1), noise), least)
    size = (inside * blocks.entries.square()).sum((1, 2))
    order = size.argsort(descending=True, stable=True)[: int(size.count_nonzero())]
    places = blocks.rows[order][:, :, None] * rest.shape[1] + blocks.columns[order][:, None, :]
    taken = order[apart(places, inside[order], rest.numel())]
    blocks = blocks[taken]
    reads, writes = blocks.of_rank_one(inside[taken], reads[taken], writes[taken])
    read, write = rest.new_zeros(len(taken), rest.shape[0]), rest.new_zeros(len(taken), rest.shape[1])
    return read.scatter_(1, blocks.rows, reads).T, write.scatter_(1, blocks.columns, writes)


def apart(
    places: Int[Tensor, "piece row column"], inside: Bool[Tensor, "piece row column"], entries: int
) -> Int[Tensor, " taken"]:
    """Indices of the pieces, best first, that share no entry inside with a better one that is taken."""
    piece, place = inside.nonzero()[:, 0], places[inside]
    taken, open_ = (torch.full((len(places),), state, device=places.device) for state in (False, True))
    while bool(open_.any()):
        asks = open_[piece]
        best = torch.full((entries,), len(places), device=places.device)
        best.scatter_reduce_(0, place[asks], piece[asks], "amin")
        outdone = asks & (best[place] < piece)
        new = open_.clone().index_fill_(0, piece[outdone], False)
        taken |= new
        covered = torch.zeros(entries, dtype=torch.bool, device=places.device)
        covered[place[new[piece]]] = True
        open_ = (open_ & ~new).index_fill_(0, piece[covered[place]], False)
    return taken.nonzero()[:, 0]


def agreeing(rest: Dense, write: Write, rounding: float) -> Read:
    """Reads, by least squares, where enough of a unit's columns ask for the same; else 0."""
    reads = rest.new_zeros(len(rest), len(write))
    asked = min(int((write != 0).sum(1).max()) if len(write) else 0, ASKED)
    if asked < 2:
        return reads
    columns = write.abs().topk(asked, dim=1).indices
    noise = _noise(rest, rounding)
    entries, writes = rest[:, columns], write.gather(1, columns)
    row, unit = (((entries.abs() > NOISE_LEVELS * noise) & (writes != 0)).sum(2) >= 2).nonzero(as_tuple=True)
    entries, writes = entries[row, unit], writes[unit]
    # What each column (the second index) would have each other one be.
    ratios = writes[:, None, :] / writes.where(writes != 0, torch.inf)[:, :, None]
    agrees, _ = _agree(entries[:, None, :], entries[:, :, None] * ratios, noise * (1 + ratios.square()).sqrt())
    squares, count = writes.square(), agrees.sum(2)
    agreed, best = (agrees * squares[:, None, :]).sum(2).where(count >= 2, 0.0).max(1)
    enough = (agreed >= BELONGS * squares.sum(1)) | (count.gather(1, best[:, None]).squeeze(1) >= ENOUGH)
    agreeing_columns = agrees[torch.arange(len(row), device=row.device), best]
    values = (agreeing_columns * entries * writes).sum(1) / (agreeing_columns * squares).sum(1).clamp_min(_TINY)
    reads[row[enough], unit[enough]] = values[enough]
    return reads


def _noise(rest: Dense, rounding: float) -> float:
    """Standard deviation of the entries that no unit explains, which are most; where these are exact zeros, the rounding."""
    return max(1.5 * float(rest.abs().median()), rounding)


def _agree(
    entries: Float[Tensor, "piece #row column"],
    foretold: Float[Tensor, "piece row column"],
    unsure: Float[Tensor, "#piece #row #column"],
) -> tuple[Bool[Tensor, "piece row column"], Float[Tensor, "piece row column"]]:
    """Entries that are as foretold, and their weight as evidence (squares); 0 where an entry could be noise."""
    tolerance = NOISE_LEVELS * unsure + AGREES * foretold.abs()
    says = foretold.abs() > SAYS * tolerance
    return says & ((entries - foretold).abs() <= tolerance), foretold.square().where(says, 0.0)
