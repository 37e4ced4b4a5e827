"""Where units start, before the annealed solver alternates (anneal.py, step 2).

1. `start`: each unit owns a coordinate of the short side, or of the side that the spec's basis names; the other factor is the
   target pruned to a share of its budget, dealt at random among a coordinate's copies. A rotated start turns the coordinates in
   random pairs first (`turned`).
2. `start_from_product`: a small matrix that is a product of sparse factors starts as its pieces, where it is sparse itself
   (pieces.py), or as the sparsest basis of its span (span.py), if that comes much nearer to it.
3. `is_product`: whether a small matrix shows by its own entries that it is one, and is worth patience wherever it starts.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.solver.automatic import DOUBLE_UP_TO, ONE_SIDED
from swd_lens.solver.budget import Budget
from swd_lens.solver.metric import Metric
from swd_lens.solver.pieces import from_pieces
from swd_lens.solver.refine import Matrix
from swd_lens.solver.span import from_span
from swd_lens.solver.spec import AnnealSpec
from swd_lens.solver.support import kth_largest, tie_floor
from swd_lens.solver.swaps import EXACT

# Units start from pieces or a span if their product has at most this share of the coordinates' error; below the smaller share the
# alternation begins late (AnnealSpec.late), and of EXACT factors it does not begin.
MUCH_NEARER, NEAR = 0.5, 0.2
# A product of sparse factors has rows and columns of which at most this share says anything (`is_product`): planted ones .09 to
# .45, with noise of a tenth .11 to .33; the embedded model's matrices and SmolLM2's smallest .50 and more, normal values 2 / pi.
SPARSE_PRODUCT = 0.45


@dataclass
class Block:
    """One factor while it is being solved for: Z = factor, D = dual, both of the factor's own shape, and its budget.

    Where budgets move there is also a sample of the last X's magnitudes: what entries are worth. One that grows has its budget
    by and by (AnnealSpec.held_back).

    D is kept in the coordinates in which the held factor's rows have unit norm. It is a gradient there, and so does not
    grow with that norm; scaled along with Z, each factor's norm would drive the other's dual, and at K of a few entries
    per unit the two blow up (400 x 420, s = .9: relMSE 2e9 instead of .34).
    """

    factor: Matrix
    dual: Matrix
    budget: int
    worth: Float[Tensor, " sample"] | None = None
    grows: bool = False
    relaxation: float = 1.0

    def copy(self) -> "Block":
        """A copy that can be solved for on its own."""
        return replace(self, factor=self.factor.clone(), dual=self.dual.clone())

    def entries(self, held_back: float | int) -> int:
        """Number of entries allowed while this share of a growing budget is held back."""
        return max(round(self.budget * (1 - held_back)), 1) if self.grows else self.budget

    def used_up(self) -> Matrix:
        """Take the factor out; the block then holds neither it nor its dual: at 17408 x 5120 each is a third of a gigabyte."""
        factor = self.factor
        self.factor = self.dual = factor.new_zeros(0, 0)
        return factor


def start(target: Float[Tensor, "d_in d_out"], units: int, budget: Budget, spec: AnnealSpec) -> tuple[Block, Block]:
    """Step 2: read and write block."""
    at_output = spec.starts_at_output(*target.shape)
    short_long = target.T if at_output else target
    directions = turned(short_long, spec.seed) if spec.start == "rotated" else None
    if directions is not None:
        short_long = directions.T @ short_long
    owner, copy = owners(short_long, units)
    if directions is None:
        square = torch.zeros(len(short_long), units, dtype=target.dtype, device=target.device)
        square[owner, torch.arange(units, device=target.device)] = 1.0
    else:
        square = directions[:, owner]
    # The target pruned to a share of the budget; each entry goes to one copy of its coordinate, drawn at random.
    magnitude = short_long.abs()
    pruned = short_long * (magnitude >= tie_floor(kth_largest(magnitude, max(int(budget.other * spec.start_share), 1))))
    other = pruned[owner]
    copies = torch.bincount(owner, minlength=len(short_long))
    if int(copies.max()) > 1:
        draw = torch.rand(short_long.shape, generator=torch.Generator().manual_seed(spec.seed), dtype=torch.float32)
        drawn = (draw.to(short_long.device) * copies[:, None]).long()
        other *= drawn[owner] == copy[:, None]
    # A unit that starts empty would stay so: it gets its coordinate's largest entry.
    empty = (~other.any(1)).nonzero().squeeze(1)
    largest = magnitude[owner[empty]].argmax(1)
    other[empty, largest] = short_long[owner[empty], largest]
    factors = (factor.T.contiguous() if at_output else factor for factor in (square, other))
    short, long = (
        Block(factor, torch.zeros_like(factor), kept) for factor, kept in zip(factors, (budget.square, budget.other), strict=True)
    )
    if not isinstance(spec.relaxation, str):  # for_matrix decides it
        short.relaxation, long.relaxation = float(spec.relaxation), 1.5 - spec.relaxation / 2
    from_short_side = len(short_long) <= short_long.shape[1]
    if from_short_side and budget.square >= ONE_SIDED * budget.total:
        long.grows, short.grows = True, units > len(short_long)
    return (long, short) if at_output else (short, long)


def turned(short_long: Float[Tensor, "short long"], seed: int) -> Float[Tensor, "short short"]:
    """An orthogonal matrix that turns coordinates in pairs: pairs and angles are drawn; of an odd number one stays. Two nonzeros
    per direction: a budget that has room for units that mix has room for it."""
    n = len(short_long)
    generator = torch.Generator().manual_seed(seed)
    first, second = torch.randperm(n, generator=generator)[: n // 2 * 2].view(2, -1)
    angles = torch.rand(n // 2, generator=generator, dtype=torch.float64) * math.pi
    directions = torch.eye(n, dtype=torch.float64)
    directions[first, first] = directions[second, second] = angles.cos()
    directions[first, second], directions[second, first] = -angles.sin(), angles.sin()
    return directions.to(short_long)


def start_from_product(
    read: Block, write: Block, target: Float[Tensor, "d_in d_out"], metric: Metric, spec: AnnealSpec
) -> int | None:
    """Step 2 for a product of sparse factors, in place, and the alternation to begin with; None where nothing is much nearer."""
    if not _may_be_product(target, spec):
        return None
    units, total = len(write.factor), read.budget + write.budget
    for propose in (lambda: from_pieces(target, units, total, metric), lambda: from_span(target, units, total)):
        factors = propose()
        if factors is None:
            continue
        of_coordinates, error = (metric.error(target, a, b) for a, b in ((read.factor, write.factor), factors))
        if error > MUCH_NEARER**2 * of_coordinates:
            continue
        read.factor.copy_(factors[0])
        write.factor.copy_(factors[1])
        share_out(read, write, int(factors[0].count_nonzero()))
        read.grows = write.grows = False
        if error < EXACT:
            return spec.alternations
        return round(spec.late * spec.alternations) if error < NEAR**2 * of_coordinates else 0
    return None


def is_product(target: Float[Tensor, "d_in d_out"], spec: AnnealSpec) -> bool:
    """Whether rows and columns of a small matrix are sparse, as of a product of sparse factors, with noise or without. Of each
    side the mean share (sum |w|)^2 / (n sum w^2), each vector by its sum of squares: inputs of great scale make a matrix sparse,
    but not its rows."""

    def share(vectors: Matrix) -> float:
        return float(vectors.abs().sum(1).square().sum() / vectors.square().sum()) / vectors.shape[1]

    return _may_be_product(target, spec) and max(share(target), share(target.T)) <= SPARSE_PRODUCT


def _may_be_product(target: Float[Tensor, "d_in d_out"], spec: AnnealSpec) -> bool:
    return spec.start == "auto" and spec.basis == "paper" and target.numel() <= DOUBLE_UP_TO


def share_out(read: Block, write: Block, reads: int) -> None:
    """Give the read factor this many of both budgets' entries, or the nearest number that fits both factors and every unit."""
    units, total = len(write.factor), read.budget + write.budget
    least, most = max(units, total - write.factor.numel()), min(total - units, read.factor.numel())
    read.budget = min(max(reads, least), most)
    write.budget = total - read.budget


def owners(short_long: Float[Tensor, "short long"], units: int) -> tuple[Int[Tensor, " unit"], Int[Tensor, " unit"]]:
    """The short-side coordinate each unit starts from, and which of that coordinate's copies it is. All coordinates get
    floor(units / n) copies, those of largest norm the remaining ones; the copies follow one another in blocks of n."""
    n = len(short_long)
    everyone = torch.arange(n, device=short_long.device)
    strongest = short_long.norm(dim=1).sort(descending=True, stable=True).indices[: units % n].sort().values
    owner = torch.cat([everyone] * (units // n) + [strongest])
    copy = torch.arange(units, device=short_long.device) // n
    return owner, copy
