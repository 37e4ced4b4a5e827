"""Solver settings with their bounds, and what a solver says of its progress.

1. `SolveSpec` is what all solvers' settings share; `DsfSpec` holds the paper's solver's (its defaults are the paper's),
   `AnnealSpec` ours, `PruneSpec` and `SvdPruneSpec` those of pruning alone, of W and of its singular vectors.
2. What they leave to the matrix ("auto") is decided by rule (automatic.py). `PRESETS` are complete settings by name;
   `resolve` makes the settings of one call.
3. A `Step` is what a solver tells its caller after each outer iteration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, ClassVar

from swd_lens.base.errors import SpecError, quoted
from swd_lens.base.settings import AUTO, AnySettings, Bounds, Settings, nearest, setting
from swd_lens.solver.automatic import (
    BALANCES,
    DOUBLE_UP_TO,
    GRAM_AT_FIRST,
    GRAM_FROM,
    PATIENCE,
    RELAXATION,
    automatic_alternations,
    automatic_balance,
    automatic_shrinkage,
)

PRECISIONS = ("float32", "float64", AUTO)

# Whose coordinates units start as: those of the matrix's short side, of its inputs (neurons, at mlp_out), or of its outputs.
BASES = ("paper", "input", "output")


class SolveSpec(Settings):
    """Base of the settings of all solvers."""

    error = SpecError
    solver: ClassVar[str]
    role: ClassVar[str] = "swd"  # in comparisons; "paper" or "control" of what stands beside it
    any_width: ClassVar[bool] = False  # whether units may be more or fewer than the coordinates that they start as
    precision: str

    def precision_for(self, d_in: int, d_out: int) -> str:
        """The dtype, "float32" or "float64", in which a matrix of this shape is solved."""
        if self.precision != AUTO:
            return self.precision
        return "float64" if d_in * d_out <= DOUBLE_UP_TO else "float32"

    def for_matrix(self: AnySettings, d_in: int, d_out: int, units: int, *, calibrated: bool) -> AnySettings:
        """Decide what is left open ("auto") for a matrix of this shape and so many units, with a Gram or without."""
        return self

    def shrinkage_for(self, tokens: int | None, d_in: int) -> float:
        """How far the Gram of `tokens` tokens is shrunk towards the identity; 0 where a solver knows no shrinkage."""
        return 0.0

    def starts_at_output(self, d_in: int, d_out: int) -> bool:
        """Whether units start as outputs of a matrix of this shape; else as inputs."""
        basis = getattr(self, "basis", "paper")
        return basis == "output" or (basis == "paper" and d_in > d_out)

    def coordinates(self, d_in: int, d_out: int) -> int:
        """How many coordinates units start as, which is the number of units where none is given."""
        return d_out if self.starts_at_output(d_in, d_out) else d_in

    def least_edges(self, d_in: int, d_out: int, units: int) -> int:
        """The smallest K that the solver can make of a matrix of this shape."""
        return 2 * units  # one read and one write edge each


@dataclass(frozen=True, kw_only=True)
class ShrinkingSpec(SolveSpec):
    """Settings that every solver but the paper's has."""

    # How far the Gram is shrunk towards the identity (metric.py). "auto": d_in / tokens, at most MOST_SHRINKAGE, where the
    # number of tokens is known, else 0.
    shrinkage: float | int | str = setting(AUTO, at_least=0, at_most=1)

    # "float32", "float64" (twice the time, the same supports on any processor), or "auto": float64 for small matrices
    # (DOUBLE_UP_TO).
    precision: str = setting(AUTO, one_of=PRECISIONS)

    def shrinkage_for(self, tokens: int | None, d_in: int) -> float:
        return automatic_shrinkage(self.shrinkage, tokens, d_in)


@dataclass(frozen=True)
class DsfSpec(SolveSpec):
    """Hyper-parameters of the Double Sparse Factorization solver (paper, app. swd-optimization; method.md §5.2). Raises
    SpecError: a value outside its range; the message names field, value and range."""

    solver: ClassVar[str] = "dsf"
    role: ClassVar[str] = "paper"

    # Alternations T. Paper: 40 for the GPT-2 experiments, 8 for the single Qwen matrices. The penalty ramp needs
    # T > rho_ramp_tail.
    outer_iterations: int = 40

    # ADMM steps per block update. Paper: 5.
    inner_iterations: int = setting(5, at_least=1)

    # During the first this many steps of a block the support is chosen anew, then held. Paper: 2.
    support_iterations: int = 2

    # ADMM penalty of every step but a block's first. Paper: 1 (natural: the block's Gram has a unit diagonal).
    rho: float | int = setting(1.0, above=0)

    # A block's first step uses min(1, t / (T - tail)) ** power * rho: at t = 0 plain least squares, which forgets the
    # identity start; later the previous factor counts more and more. Paper: (t / (T - 3)) ** 3.
    rho_ramp_tail: int = setting(3, at_least=0)
    rho_ramp_power: float | int = setting(3.0, above=0)

    # Added to a block's Gram, in units of its mean diagonal. Paper: 1e-2. It also keeps the very first solve
    # (rho = 0) regular.
    ridge: float | int = setting(1e-2, above=0)

    # Density of the square factor when W is square, and when it is not. Paper: 0.16 and 0.25; the rest of K is the
    # other factor's.
    square_density_square: float | int = setting(0.16, above=0, at_most=1)
    square_density_rectangular: float | int = setting(0.25, above=0, at_most=1)

    # The other factor starts as the rescaled target pruned to this share of its budget. Reference code: 1/2 (not in
    # the paper).
    start_share: float | int = setting(0.5, above=0, at_most=1)

    # No factor may be sparser than this under rounding="reference" (K is then overshot). Reference code: 0.99.
    sparsity_cap: float | int = setting(0.99, above=0, at_most=1)

    # Added to norms before dividing by them, so that dead inputs and empty units stay finite. Reference code: 1e-8.
    norm_floor: float | int = setting(1e-8, above=0)

    # ADMM steps of the finalisation (write factor refitted on the full Gram, supports held), without ridge. Paper: 20.
    # 0 leaves it out.
    final_iterations: int = setting(20, at_least=0)

    # Penalty of the finalisation. Paper: 1.
    final_rho: float | int = setting(1.0, above=0)

    # "reference": entries strictly above a threshold whose index is rounded as the reference code rounds it, usually
    # one entry per factor below budget (method.md §0.3 proves that the paper's counts carry this). "exact": K is K.
    rounding: str = setting("reference", one_of=("reference", "exact"))

    # "reference": the reference code's bits on the same machine and threads. "clean": Cholesky and scale-free floors,
    # faster, and the same bits for c * W or c * G with c a power of two. Equally good on average (dsf.py says more).
    arithmetic: str = setting("reference", one_of=("reference", "clean"))

    # "float32": the paper's. "float64" takes twice the time and gives the same supports on any processor; "auto": float64
    # for small matrices (DOUBLE_UP_TO).
    precision: str = setting("float32", one_of=PRECISIONS)

    def __post_init__(self) -> None:
        super().__post_init__()
        # Bounded by other settings.
        self._check("outer_iterations", self.outer_iterations, Bounds(at_least=self.rho_ramp_tail + 1), int)
        steps = Bounds(at_least=1, at_most=self.inner_iterations)
        self._check("support_iterations", self.support_iterations, steps, int)

    def square_density(self, d_in: int, d_out: int) -> float:
        """Density of the square factor for a matrix of this shape."""
        return float(self.square_density_square if d_in == d_out else self.square_density_rectangular)

    def least_edges(self, d_in: int, d_out: int, units: int) -> int:
        square = max(int(units**2 * self.square_density(d_in, d_out)), units)
        return square + units + 1  # one entry per unit in the other factor; one more for what 1 - s rounds off

    def rho_start(self, t: int) -> float:
        """Penalty of a block's first step at outer iteration t (zero-based): 0 at t = 0, rho from t = T - tail on."""
        ramp = min(1.0, t / (self.outer_iterations - self.rho_ramp_tail))
        return float(self.rho) * ramp ** float(self.rho_ramp_power)


@dataclass(frozen=True)
class AnnealSpec(ShrinkingSpec):
    """Hyper-parameters of the annealed solver (anneal.py). Measured on the golden matrices; see tests/benchmarks/RESULTS.md.
    Raises SpecError: a value outside its range; the message names field, value and range."""

    solver: ClassVar[str] = "anneal"
    any_width: ClassVar[bool] = True

    # Alternations T. "auto": `automatic_alternations`.
    outer_iterations: int | str = setting(AUTO, at_least=2)

    # ADMM steps per block update; the support is chosen in the first. Golden rows, 56 alternations: one .66 of the reference's
    # error, two .576, three .581. Choosing the support again in the second was about 50 % worse in trials.
    inner_iterations: int = setting(2, at_least=1)

    # The ADMM penalty rises geometrically from the first to the last alternation. Its unit is the block's own Gram,
    # whose diagonal is 1. Starting at .03 or .3, or ending at .2 or 1, was worse by 4 to 30 % in trials. The end "auto":
    # `automatic_rho_end`.
    rho_start: float | int = setting(0.1, above=0)
    rho_end: float | int | str = setting(AUTO, above=0)

    # Ridge added to a block's Gram, falling geometrically. At the start it calms the first solves; left at .01 to the
    # end it costs 5 % at s = .5.
    ridge_start: float | int = setting(1e-2, above=0)
    ridge_end: float | int = setting(5e-4, above=0)

    # The alternation sees only the Gram's diagonal until this share of its iterations, then a share of the full Gram at once, and
    # by and by (linearly) all of it. "auto": GRAM_FROM, GRAM_AT_FIRST.
    gram_from: float | int | str = setting(AUTO, at_least=0, at_most=1)
    gram_at_first: float | int | str = setting(AUTO, at_least=0, at_most=1)

    # Whose coordinates units start as, one each where `units` is not given (BASES). They may stay that, or mix.
    basis: str = setting("paper", one_of=BASES)

    # The other factor starts as the rescaled target pruned to this share of its budget.
    start_share: float | int = setting(0.5, above=0, at_most=1)

    # "auto": a small matrix that is a product of sparse factors starts as its pieces (pieces.py) or its sparsest basis (span.py),
    # and has PATIENCE. "coordinates": none of it.
    # "rotated": coordinates are turned in pairs drawn by `seed` first, so that no unit starts as one; it is there to ask what of
    # the units the start plants (`swd_lens.study.stability`).
    start: str = setting("auto", one_of=("auto", "coordinates", "rotated"))

    # The share of the alternations that is left out where such a start is near. Planted factors with noise (4 + 4 entries, six
    # seeds), "best": 1 has F1 .927 and error .0514, .7 .930 and .0508, 0 .935 and .0497 in half as much time again. "deep" has
    # .951 with .7, .953 with 0.
    late: float | int = setting(0.7, at_least=0, at_most=1)

    # Share of K that the factor between units and the coordinates that they start as gets. "auto": n^2 / (2 (n^2 + K)) for
    # n of them on the short side (on the golden rows with s = .5 and .75, .8 of it is 0 to 10 % worse, 1.25 of it between
    # 3 % better and 1 % worse); NAMED_SIDE_SHARE where `basis` names a side, as units are to stay what they start as.
    square_share: float | int | str = setting(AUTO, above=0, at_most=1)

    # How far ADMM over-relaxes the factor between units and the coordinates that they start as; where this is above 1 the other
    # is damped by half as much, and takes one step. "auto": RELAXATION where `basis` names the long side, no share is
    # given, and the matrix is large enough for float32.
    relaxation: float | int | str = setting(AUTO, at_least=1, below=2)

    # The share of its budget that a factor is without at first; it has all of it after GROWN of the alternations. The factor of
    # coordinates (both, where units outnumber them) grows so, but not beside one of fewer than ONE_SIDED of all entries (2 to 4 %
    # worse), nor where units start as the long side's (the embedded model's MLP from neurons, .15 of K: 4 % worse; with a quarter
    # more units 6 %). Golden rows without mlp_out, "best": .97 of the error of 0, twice the units .90, "thorough" .97, without a
    # Gram .98 and .92; the embedded model's 16 matrices .93 at s = .5, .97 at .75. More at first than in the end is worse: half
    # as much again 10 %.
    held_back: float | int = setting(0.3, at_least=0, below=1)

    # How far the budgets move, in each alternation, to where one more entry is worth as much in either factor; 0: they stay at
    # `square_share`. Planted factors (tests/benchmarks/planted.py) are found with it where they are not without. "auto":
    # `automatic_balance` where units are as many as the short side's coordinates and start as these, and no share is given, else
    # 0 (twice as many units of four square matrices, .1: 2 to 5 % less error at s = .5, 0 to 8 % more at .75).
    balance: float | int | str = setting(AUTO, at_least=0, at_most=1)

    # How many times the alternation begins again from such a start, each time with twice the penalty; the lowest error counts.
    # Planted factors with noise, 400 alternations: F1 .953 without, .959 with one (six seeds).
    restarts: int = setting(0, at_least=0)

    # How many times units of little use are replaced by pieces of the residual on the way (births.py).
    births: int = setting(0, at_least=0)

    # How many times, at most, a few units of a small matrix are exchanged for a sparser basis of what they stand for (rotate.py).
    rotations: int = setting(0, at_least=0)

    # Refinement of both factors on fixed supports (refine.py): rounds, and conjugate-gradient steps per factor and round.
    refine_rounds: int = setting(3, at_least=0)
    refine_steps: int = setting(8, at_least=1)

    # Chooses which copy of a unit starts with which entry, when there are more units than coordinates, and the turns of a rotated
    # start; else unused.
    seed: int = setting(0, at_least=0)

    def for_matrix(self, d_in: int, d_out: int, units: int, *, calibrated: bool) -> "AnnealSpec":
        precision = self.precision_for(d_in, d_out)
        standard = self.basis == "paper" and self.square_share == AUTO and units == min(d_in, d_out)
        # The named side is the long one, whose coordinates the units are to keep.
        long_side = self.basis != "paper" and self.square_share == AUTO and units > min(d_in, d_out)
        relaxed = long_side and self.relaxation == AUTO and precision == "float32"
        automatic = {
            "outer_iterations": automatic_alternations(precision, calibrated=calibrated, relaxed=relaxed),
            "relaxation": RELAXATION if relaxed else 1.0,
            "gram_from": GRAM_FROM[precision],
            "gram_at_first": GRAM_AT_FIRST[precision],
            "balance": automatic_balance(d_in, d_out, precision) if standard else 0.0,
        }
        return self.changed({name: value for name, value in automatic.items() if getattr(self, name) == AUTO})

    def patient(self) -> list["AnnealSpec"]:
        """These settings with at least PATIENCE, for a small matrix that is a product of sparse factors (`is_product`): one for
        each of BALANCES, or with the budgets that were given."""
        patient = self.changed({name: max(getattr(self, name), least) for name, least in PATIENCE.items()})
        if self.square_share != AUTO:
            return [patient]
        return [patient.changed({"balance": max(self.balance, balance)}) for balance in BALANCES]

    @property
    def alternations(self) -> int:
        """T, which `for_matrix` has decided."""
        assert not isinstance(self.outer_iterations, str), "for_matrix decides it"
        return self.outer_iterations

    def rho(self, progress: float) -> float:
        """Penalty at `progress` (0 at the first alternation, 1 at the last), once its end is decided (`automatic_rho_end`)."""
        assert not isinstance(self.rho_end, str), "automatic_rho_end decides it"
        return float(self.rho_start * (self.rho_end / self.rho_start) ** progress)

    def ridge(self, progress: float) -> float:
        """Ridge at `progress`."""
        return float(self.ridge_start * (self.ridge_end / self.ridge_start) ** progress)

    def gram_blend(self, progress: float) -> float:
        """Share of the full Gram at `progress`; the rest is its diagonal."""
        start, first = self.gram_from, self.gram_at_first
        assert not isinstance(start, str) and not isinstance(first, str), "for_matrix decides them"
        if start >= 1 or progress < start:
            return 0.0
        return float(first + (1 - first) * (progress - start) / (1 - start))


@dataclass(frozen=True)
class PruneSpec(ShrinkingSpec):
    """Hyper-parameters of pruning (prune.py): W itself made sparse, its coordinates as units. Raises SpecError: a value
    outside its range; the message names field, value and range."""

    solver: ClassVar[str] = "prune"
    role: ClassVar[str] = "control"

    # Whose coordinates the units are. The product is the same for each but for a few edges; "paper" is the short side.
    basis: str = setting("input", one_of=BASES)

    # Conjugate-gradient steps of the least squares on the support.
    refine_steps: int = setting(24, at_least=0)

    # How many times the entries that are worth least are exchanged for those that lower the error most, in either factor
    # (swaps.py): between pruned neurons and factors of their own. The embedded model's blocks.3.mlp_out, s = .75: relMSE .0040
    # without, .0027 with 5 (194 units of one neuron, for 504), .0024 with 29 (152); units that start as neurons (.05 of K) .0017.
    swaps: int = setting(0, at_least=0)


@dataclass(frozen=True)
class SvdPruneSpec(ShrinkingSpec):
    """Hyper-parameters of pruning the singular vectors (svd_prune.py). Raises SpecError: a value outside its range; the
    message names field, value and range."""

    solver: ClassVar[str] = "svd_prune"
    role: ClassVar[str] = "control"

    # Least squares of both factors on their supports (refine.py): rounds, and conjugate-gradient steps per factor and round.
    refine_rounds: int = setting(12, at_least=0)
    refine_steps: int = setting(8, at_least=1)


@dataclass(frozen=True)
class Step:
    """Outer iteration `iteration` (from 1) of `total` is done. relmse: computes the relMSE reached so far, under the Gram the
    solver sees (a product of the factors: call it every few seconds, not every time). Valid during the callback only."""

    iteration: int
    total: int
    relmse: Callable[[], float]


OnIteration = Callable[[Step], None]


AnySpec = DsfSpec | AnnealSpec | PruneSpec | SvdPruneSpec

PRESETS: Mapping[str, AnySpec] = {
    "best": AnnealSpec(),
    "quick": AnnealSpec(outer_iterations=32),
    "thorough": AnnealSpec(outer_iterations=200),
    # Eight to ten times the time of "best" (calculated); on planted factors of 128 x 64, whose rotations help, twenty to two
    # hundred times (1 to 11 s), unless their pieces are exact. Golden rows: .409 of the reference's error, for .526 of "best",
    # where both saw the full Gram from half of the alternations on, by and by; from .7 on attention's rows have 1 % more in .82
    # of the time. .434 with held_back=0 and rho_start=.05, attn_out 2 % more with rho_start=.07, three rows 4 % with .15.
    # Small matrices (64 x 32 to 12 x 40) have 1.2 to 1.35 times the error without births. Before budgets grew: 400 alternations
    # .447 of the reference's error, 640 .428; inner_iterations=3 6 % worse on attn_out, rho_end=.35 8 % worse on mlp_in at
    # s = .75 and 2 % better on others; entries exchanged at the end (those that would lower the error most enter, the least
    # leave, values refitted, 30 turns) 3 % better on attn_out at s = .5, .2 to 1 % on others.
    "deep": AnnealSpec(outer_iterations=480, balance=0.5, late=0.0, births=30, restarts=1, rotations=1600, refine_rounds=12),
    "paper": DsfSpec(),
    "pruned": PruneSpec(),
    "svd_pruned": SvdPruneSpec(),
}
DEFAULT_PRESET = "best"


def resolve(preset: str, overrides: Mapping[str, Any]) -> AnySpec:
    """The spec of a preset with some fields replaced. Raises SpecError: no such preset or field (the nearest and all valid names
    are listed), or a value outside its range."""
    if preset not in PRESETS:
        raise SpecError(f"no preset {quoted(preset)}; {nearest(preset, sorted(PRESETS))}")
    spec = PRESETS[preset]
    known = sorted(each.name for each in fields(spec))
    for name in overrides:
        if name not in known:
            others = [repr(key) for key, other in PRESETS.items() if name in {each.name for each in fields(other)}]
            elsewhere = f"; preset {' or '.join(others)} has it" if others else ""
            raise SpecError(f"preset {quoted(preset)} has no setting {quoted(name)}; {nearest(name, known)}{elsewhere}")
    return spec.changed(overrides)
