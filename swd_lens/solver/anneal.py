"""The annealed solver: sparse factors by ADMM whose penalty rises over the alternations (presets best, quick, thorough).

W (d_in, d_out) ≈ A B with A = read (d_in, m), B = write (m, d_out), any number m of units. M = diag(v) W is the target in
the coordinates of the metric C (metric.py); the loss is tr((M - AB)^T C (M - AB)).

1. Budgets: the factor on the short side gets K n^2 / (2 (n^2 + K)) entries, n = min(d_in, d_out), the other the rest.
2. Start: each unit owns a coordinate of the short side (its factor is the identity there), or of the side that `basis` names;
   the other factor is M pruned to half its budget. Where units outnumber coordinates, M's entries are dealt at random to a
   coordinate's copies. Below, "short" is the side that units start on.
   A small matrix that is a product of sparse factors starts as its pieces (pieces.py) or as the sparsest basis of its span
   (span.py) instead, and the alternation begins late, or not at all, or again (`restarts`). Wherever it starts, there is
   another solution in which budgets move, units are born, and are exchanged in the end (`AnnealSpec.patient`); the lower
   error counts.
3. Alternate T times, short-side factor first. The penalty rho and the blend g of the full metric C_g = (1-g) I + g C
   rise, a small ridge falls. One block update, X dense, Z its sparse copy, D the dual:
     a. The held factor's rows are scaled to unit norm. X solves the ridge regression with + rho ||X - (Z - D)||^2.
     b. X <- X + D; the support is X's largest magnitudes; Z = X on it; D = X - Z. A second step holds the support.
     c. D belongs to its rho: when rho changes, D is rescaled by old / new.
   With `relaxation` r, X <- r X + (1 - r) Z before b; the factor that units do not start in has 1.5 - r / 2 for r, and one step.
   The write factor's regression is (A^T C_g A + rho I) X = rhs, the read factor's C_g X (B B^T) + rho X = rhs, which is
   solved in the eigenvectors of C and of B B^T (plainly, while g = 0). All updates write to the same buffers (workspace.py).
   A factor that grows begins with fewer entries than its budget, and has all of them in the end (`held_back`).
   With `balance` the factors' budgets move after each alternation to where one more entry is worth as much in either: X is in
   units of the loss in both, so that is one threshold for both (`rebalance`).
   With `births` units of little use are replaced a few times on the way (births.py).
4. Each unit always keeps its largest entry. In the last alternation the support is exact: these, then the largest ones up
   to K. Before, the threshold is a sample's quantile. Entries that only rounding tells apart count as equal.
5. Refine both factors on their supports against C (refine.py); undo the scaling of the inputs. With `rotations`, units of a small
   matrix are exchanged, a few at a time, while that lowers the error (rotate.py).

How it differs from the paper's solver (dsf.py): the penalty is annealed and the dual rescaled with it; the support is chosen
once per block (about a third less error in trials); the full Gram takes part in the alternation (28 % less on the golden
matrices) and in the refinement (6 % less). The sums are in tests/benchmarks/RESULTS.md; what each
setting was measured against is in spec.py and automatic.py.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.solver import wide
from swd_lens.solver.automatic import DOUBLE_UP_TO, automatic_rho_end
from swd_lens.solver.births import reinit_unused_units
from swd_lens.solver.budget import Budget
from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import Matrix, refine
from swd_lens.solver.rotate import rotated
from swd_lens.solver.shapes import Dense, Read, Write
from swd_lens.solver.spec import AUTO, AnnealSpec, OnIteration, Step
from swd_lens.solver.start import Block, is_product, share_out, start, start_from_product
from swd_lens.solver.support import first_largest, keep_exactly, kth_largest_estimate, magnitude_sample, tie_floor
from swd_lens.solver.wide import Solve
from swd_lens.solver.workspace import Workspace

# Norms of empty rows: divided by this they stay zero.
NORM_FLOOR = 1e-18

# Of a large factor's magnitudes, from which `rebalance` tells where budgets should move.
WORTH_SAMPLE = 8_192

# Share of the alternations after which budgets stay, after which all of them may be used, and between which units are born.
BALANCED = 0.9
GROWN = 0.8
BORN = (0.1, 0.88)


@dataclass(frozen=True)
class Phase:
    """Settings of one alternation."""

    blend: float  # blend, rho, ridge, steps: g, the penalty, the ridge, ADMM steps
    rho: float
    ridge: float
    steps: int
    balance: float  # how far budgets move
    held_back: float  # the share of its budget that a factor that grows has not yet
    last: bool  # whether it is the last

    @classmethod
    def at(cls, t: int, metric: Metric, spec: AnnealSpec) -> "Phase":
        """Alternation t, counted from 0."""
        progress = t / (spec.alternations - 1)
        calibrated = metric.matrix is not None
        assert not isinstance(spec.balance, str), "for_matrix decides it"
        return cls(
            blend=spec.gram_blend(progress) if calibrated else 0.0,
            rho=spec.rho(progress),
            ridge=spec.ridge(progress),
            steps=spec.inner_iterations,
            balance=float(spec.balance) if progress < BALANCED else 0.0,
            held_back=float(spec.held_back) * max(0.0, 1 - progress / GROWN),
            last=t + 1 == spec.alternations,
        )


def factorize(
    weight: Float[Tensor, "d_in d_out"],
    gram: Float[Tensor, "d_in d_in"] | None,
    units: int,
    budget: Budget,
    spec: AnnealSpec,
    shrinkage: float,
    on_iteration: OnIteration | None = None,
) -> tuple[Float[Tensor, "d_in unit"], Float[Tensor, "unit d_out"]]:
    """Read and write factor of a validated weight, in its dtype; gram None means G = I. Raises GramError: G is not positive
    semi-definite."""
    metric, target, scale = Metric.scaled(weight, gram, shrinkage)
    if spec.rho_end == AUTO:
        sparsity, least_share = 1 - budget.total / target.numel(), min(budget.square, budget.other) / budget.total
        calibrated = metric.matrix is not None
        spec = replace(spec, rho_end=automatic_rho_end(sparsity, least_share, shrinkage, calibrated=calibrated))
    read, write = start(target, units, budget, spec)
    first = start_from_product(read, write, target, metric, spec)
    patient = spec.patient() if is_product(target, spec) else [spec]
    again = 0 if first is None or first == spec.alternations else spec.restarts
    tries = [patient[0].changed({"rho_start": spec.rho_start * 2.0**n}) for n in range(1, again + 1)]
    tries += [*patient[1:], *([spec] if patient[0] != spec else [])]
    solutions = [solved(read.copy(), write.copy(), target, metric, each, None, first or 0) for each in tries]
    solutions.append(solved(read, write, target, metric, patient[0], on_iteration, first or 0))
    a, b = solutions[0] if not tries else min(solutions, key=lambda factors: metric.error(target, *factors))
    return metric.undo(a), b * scale


def solved(
    read: Block, write: Block, target: Dense, metric: Metric, spec: AnnealSpec, on_iteration: OnIteration | None, first: int
) -> tuple[Read, Write]:
    """Steps 3 to 5; the blocks are used up."""
    alternate(read, write, target, metric, spec, on_iteration, first)
    a, b = read.used_up(), write.used_up()
    a, b = refine(a, b, target, metric, spec.refine_rounds, spec.refine_steps)
    if spec.rotations and target.numel() <= DOUBLE_UP_TO:
        a, b = rotated(a, b, target, metric, spec.rotations, spec.seed)
        a, b = refine(a, b, target, metric, spec.refine_rounds, spec.refine_steps)
    return a, b


# ---------------------------------------------------------------------------------------------------- alternation


def alternate(
    read: Block,
    write: Block,
    target: Dense,
    metric: Metric,
    spec: AnnealSpec,
    on_iteration: OnIteration | None = None,
    first: int = 0,
) -> None:
    """Steps 3 and 4, in place, from alternation `first` on."""
    weighted = metric.weigh(target)
    blended = torch.empty_like(weighted) if metric.matrix is not None else target
    work = Workspace.of(read.factor, write.factor, buffers=3)
    blocks = [(read, lambda phase, goal: update_read(read, write.factor, goal, metric, phase, work))]
    blocks.append((write, lambda phase, goal: update_write(write, read.factor, goal, metric, phase, work)))
    if spec.starts_at_output(*target.shape):  # short side first
        blocks.reverse()

    def reached() -> float:
        return metric.error(target, read.factor, write.factor)

    if first == spec.alternations:  # the start is exact
        if on_iteration is not None:
            on_iteration(Step(first, first, reached))
        return
    rho_before, births = Phase.at(first, metric, spec).rho, births_at(spec)
    for t in range(first, spec.alternations):
        phase = Phase.at(t, metric, spec)
        goal = torch.lerp(target, weighted, phase.blend, out=blended) if phase.blend > 0 else target  # C_g M
        for block, update in blocks:
            block.dual *= rho_before / phase.rho
            update(phase, goal)
        level(read.factor, write.factor)
        if phase.balance:
            rebalance(read, write, phase.balance)
        if t in births:
            entries = round(read.budget / len(write.factor)), round(write.budget / len(write.factor))
            born = reinit_unused_units(read.factor, write.factor, target, metric, entries)
            read.dual[:, born], write.dual[born] = 0.0, 0.0
        rho_before = phase.rho
        if on_iteration is not None:
            on_iteration(Step(t + 1, spec.alternations, reached))


def level(read: Read, write: Write) -> None:
    """Bring each unit's two norms within a factor of four of each other, in place, by powers of four: no other bit changes.

    The penalty shrinks the factor that is updated, and the other grows to make up for it, a little in every alternation: after
    some hundred one of them would be below NORM_FLOOR, and its unit taken for empty (512 x 128, s = .75, 400 alternations: 110
    of 128 units, and a relative error of .83 instead of .32).
    """
    ratio = write.norm(dim=1) / read.norm(dim=0)
    quarter = ratio.where(ratio.isfinite() & (ratio > 0), 1.0).log2().div(4).round()
    scale = torch.exp2(2 * quarter)  # exponents are even: a unit's `canonical` scale is a root
    read.mul_(scale)
    write.div_(scale[:, None])


def births_at(spec: AnnealSpec) -> frozenset[int]:
    """Alternations, counted from 0, after which units are born."""
    first, last = BORN
    shares = (first + (last - first) * i / spec.births for i in range(spec.births))
    return frozenset(int(share * spec.alternations) for share in shares)


def rebalance(read: Block, write: Block, step: float) -> None:
    """Move the budgets a step towards where one threshold cuts both factors; the total stays, and an entry per unit in each."""
    assert read.worth is not None and write.worth is not None
    total = read.budget + write.budget
    samples = (read, read.worth), (write, write.worth)
    worth = torch.cat([sample for _, sample in samples])
    stands_for = torch.cat([torch.full_like(sample, block.factor.numel() / len(sample)) for block, sample in samples])
    order = worth.argsort(descending=True, stable=True)
    above = order[stands_for[order].cumsum(0) <= total]
    wanted = float(stands_for[above[above < len(read.worth)]].sum())
    share_out(read, write, round(read.budget + step * (wanted - read.budget)))


def update_write(block: Block, read: Read, goal: Dense, metric: Metric, phase: Phase, work: Workspace) -> None:
    """Step 3 for the write factor B: (A^T C_g A + rho I) X = A^T C_g M + rho (Z - D)."""
    spare = work.shaped(1, read)
    if wide.is_wide(read.shape[1], len(read)):
        weighted = metric.weigh(read, phase.blend, out=spare)
        norm = (read * weighted).sum(0).clamp_min_(0).sqrt().clamp_min_(NORM_FLOOR).unsqueeze(1)
        unit = torch.div(read, norm.T, out=spare)
        solve = wide.left_solver(metric, unit.clone(), goal, phase.blend, phase.ridge + phase.rho)
        _admm(block, norm, None, solve, phase, work, unit_dim=0)
        return
    sparse = wide.as_sparse(read.T) if wide.is_wide(read.shape[1], goal.shape[1]) else None
    if sparse is None:
        normal = read.T @ metric.weigh(read, phase.blend, out=spare)
    else:
        normal = wide.sparse_normal(sparse, read, metric, phase.blend)
    norm = normal.diagonal().clamp_min(0).sqrt().clamp_min_(NORM_FLOOR).unsqueeze(1)
    normal.div_(norm).div_(norm.T).diagonal().add_(phase.ridge)
    if sparse is None:
        inverse = torch.cholesky_inverse(wide.shifted_factor(normal, phase.rho))
        rhs = torch.mm(torch.div(read, norm.T, out=spare).T, goal, out=work.shaped(0, block.factor))
        _admm(block, norm, rhs, lambda right, out: (torch.mm(inverse, right, out=out), right), phase, work, unit_dim=0)
    else:
        rhs = work.shaped(0, block.factor).copy_(sparse @ goal).div_(norm)
        _admm(block, norm, rhs, wide.cholesky_solver(normal, phase.rho), phase, work, unit_dim=0)


def update_read(block: Block, write: Write, goal: Dense, metric: Metric, phase: Phase, work: Workspace) -> None:
    """Step 3 for the read factor A: C_g X (B B^T) + rho X = C_g M B^T + rho (Z - D)."""
    norm = write.norm(dim=1).clamp_min_(NORM_FLOOR)
    unit = torch.div(write, norm[:, None], out=work.shaped(1, write))
    if wide.is_wide(*write.shape):
        unit = unit.clone()  # the solver reads it in each step; the buffer is written to
        if phase.blend > 0:
            solve = wide.kronecker_solver(metric, unit, goal, phase.blend, phase.ridge, phase.rho)
        else:
            solve = wide.right_solver(unit, goal, phase.ridge + phase.rho)
        rhs = None
    else:
        sparse = wide.as_sparse(unit) if wide.is_wide(len(write), len(block.factor)) else None
        normal = unit @ unit.T if sparse is None else wide.sparse_normal(sparse, unit.T)
        normal.diagonal().add_(phase.ridge)
        if phase.blend > 0:
            solve = _kronecker_solver(metric, normal, phase)
        elif sparse is None:
            inverse = torch.cholesky_inverse(wide.shifted_factor(normal, phase.rho))
            solve = lambda right, out: (torch.mm(right, inverse, out=out), right)  # noqa: E731
        else:
            solve = wide.cholesky_right_solver(normal, phase.rho)
        rhs = work.shaped(0, block.factor)
        rhs = torch.mm(goal, unit.T, out=rhs) if sparse is None else rhs.copy_((sparse @ goal.T.contiguous()).T)
    _admm(block, norm.unsqueeze(0), rhs, solve, phase, work, unit_dim=1)


def _kronecker_solver(metric: Metric, normal: Float[Tensor, "unit unit"], phase: Phase) -> Solve:
    """Solves C_g X N + rho X = R: in the eigenvectors of C (left) and N (right) it is a division, entry by entry."""
    left_values, left = metric.eigen
    right_values, right = torch.linalg.eigh(normal)
    weighted = torch.outer((1 - phase.blend) + phase.blend * left_values, right_values)
    shrink = weighted.add_(phase.rho).reciprocal_()

    def solve(rhs: Matrix, out: Matrix) -> tuple[Matrix, Matrix]:
        torch.mm(torch.mm(left.T, rhs, out=out), right, out=rhs).mul_(shrink)
        return torch.mm(torch.mm(left, rhs, out=out), right.T, out=rhs), out

    return solve


def _admm(
    block: Block,
    norm: Float[Tensor, "unit 1"] | Float[Tensor, "1 unit"],
    rhs: Matrix | None,
    solve: Solve,
    phase: Phase,
    work: Workspace,
    unit_dim: int,
) -> None:
    """ADMM steps a and b on one block, in place; `norm` is the held factor's, along the units. rhs: in the first buffer; None:
    the solver has the goal."""
    factor, dual = block.factor.mul_(norm), block.dual
    free = [work.shaped(number, factor) for number in range(0 if rhs is None else 1, 3)]
    mask = factor  # replaced in the first step
    steps = phase.steps if block.relaxation >= 1 else 1
    for step in range(steps):
        right = torch.sub(factor, dual, out=free.pop()).mul_(phase.rho)
        if rhs is not None and step + 1 < steps:
            right.add_(rhs)
        elif rhs is not None:  # it is not needed again
            free.append(right)
            right = rhs.add_(right)
        dense, spare = solve(right, free.pop() if free else torch.empty_like(right))
        if block.relaxation != 1:
            dense.mul_(block.relaxation).add_(factor, alpha=1 - block.relaxation)
        dense.add_(dual)
        if step == 0:
            mask = _support(dense, norm > NORM_FLOOR, block.entries(phase.held_back), phase.last, unit_dim, spare)
            block.worth = magnitude_sample(dense, WORTH_SAMPLE) if phase.balance else None
        else:
            free.append(spare)
        torch.mul(dense, mask, out=factor)
        torch.sub(dense, factor, out=dual)
        free.append(dense)
    factor.div_(norm)


def _support(dense: Matrix, alive: Bool[Tensor, "_ _"], budget: int, exact: bool, unit_dim: int, out: Matrix) -> Matrix:
    """1 on the largest magnitudes and on each unit's largest, 0 elsewhere: about `budget` of them, or exactly.

    Without its largest entry a unit below the threshold would be empty, its other factor zero, and the unit lost for good.
    The exact support leaves out units that are lost already (`alive`, along the units: the held factor is not empty).
    """
    magnitude = torch.abs(dense, out=out)
    peak = magnitude.amax(1 - unit_dim, keepdim=True)
    if not exact:
        return magnitude.ge_(tie_floor(peak.clamp_max(kth_largest_estimate(dense, budget))))
    largest = first_largest(magnitude, 1 - unit_dim)
    magnitude.scatter_(1 - unit_dim, largest, torch.where(peak > 0, peak + peak.max(), 0.0)).mul_(alive)
    kept = keep_exactly(magnitude, budget)
    return magnitude.copy_(kept)
