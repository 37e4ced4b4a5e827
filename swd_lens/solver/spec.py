"""Solver settings with their bounds, the presets, and what a solver says of its progress.

1. `SolveSpec` is what all solvers' settings share; `DsfSpec` holds the paper's solver's (its defaults are the paper's),
   `AnnealSpec` ours, `PruneSpec` and `SvdPruneSpec` those of pruning alone, of W and of its singular vectors.
2. `PRESETS` names complete specs: "best" (the default), "quick", "thorough", "deep", "paper", "pruned" and "svd_pruned". What
   they leave to the matrix ("auto") is decided by its shape (`for_matrix`), its Gram and its budgets (`automatic_rho_end`,
   `automatic_shrinkage`).
3. `resolve(preset, overrides)` makes the spec of one call; an unknown name lists the nearest ones.
4. A `Step` is what a solver tells its caller after each outer iteration.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, ClassVar

from swd_lens.base.errors import SpecError, error
from swd_lens.base.settings import AUTO, AnySettings, Bounds, Settings, nearest, setting

# Shrinkage "auto" is d_in / tokens, at most this (solver.md, point 6). Real text through an encoder layer, d_in 384 and
# 1,536: at 1,024, 4,096 and 16,384 tokens it lowers the held-out error by 23, 7 and 1 % (geometric means).
MOST_SHRINKAGE = 0.3

PRECISIONS = ("float32", "float64", AUTO)

# Whose coordinates units start as: those of the matrix's short side, of its inputs (neurons, at mlp_out), or of its outputs.
BASES = ("paper", "input", "output")

# Precision "auto" is float64 for matrices of at most this many entries (256 x 512). Choosing supports amplifies rounding: in
# float32 another processor or number of threads ends with half of the entries elsewhere, in float64 with the same ones (16
# factorizations of the embedded model: no support entry differs, products differ by 1e-13). The price is 1.5 to 2 times the time,
# and twice the memory.
DOUBLE_UP_TO = 2**17

# A unit that starts as one of a named side's coordinates keeps that one and a few more beside it. Of K; what it buys and costs
# is in tests/benchmarks/RESULTS.md (bases): more lowers the error and makes a task's circuit dearer.
NAMED_SIDE_SHARE = 0.03

# Alternations "auto", in float32 and in float64, where each takes about twice the time. Each doubling lowers the error by 8 to
# 15 %. Golden rows (float32), with the penalty's end at .5: 56 have .575 of the reference's error in .25 of its time, 72 .550 in
# .31; with twice the units .39 in .72 and .36 in .90. With today's end 72 have .542 and .348. The embedded model's attn_o at
# s = .5 (float64): 72 have .89 of the error of 56.
ALTERNATIONS = {"float32": 72, "float64": 56}

# Without a Gram one costs two thirds, so that these take the time of 72 with one. Golden rows with twice the units: 72 have .713
# of the reference's error in .64 of its time, 108 .673 in .93.
ALTERNATIONS_ZERO_DATA = 108  # in float32

# The penalty's end "auto": `automatic_rho_end`, between these two, with a Gram and without one.
RHO_END_CALIBRATED = (0.4, 0.5)
RHO_END_ZERO_DATA = (0.7, 0.8)
ONE_SIDED = 0.05  # the share of K that a factor has where nearly all entries are the other's


class SolveSpec(Settings):
    """What the settings of every solver can do beside checking themselves."""

    error = SpecError
    solver: ClassVar[str]
    any_width: ClassVar[bool] = False  # whether units may be more or fewer than the coordinates that they start as
    precision: str

    def precision_for(self, d_in: int, d_out: int) -> str:
        """The dtype, "float32" or "float64", in which a matrix of this shape is solved."""
        if self.precision != AUTO:
            return self.precision
        return "float64" if d_in * d_out <= DOUBLE_UP_TO else "float32"

    def for_matrix(self: AnySettings, d_in: int, d_out: int, *, calibrated: bool) -> AnySettings:
        """The same settings with the number of alternations decided for a matrix of this shape, with a Gram or without."""
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


@dataclass(frozen=True)
class DsfSpec(SolveSpec):
    """Hyper-parameters of the Double Sparse Factorization solver (paper, app. swd-optimization; method.md §5.2).

    Raises:
        SpecError: a value outside its range; the message names field, value and range.
    """

    solver: ClassVar[str] = "dsf"

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
class AnnealSpec(SolveSpec):
    """Hyper-parameters of the annealed solver (anneal.py). Measured on the golden matrices; see tests/benchmarks/RESULTS.md.

    Raises:
        SpecError: a value outside its range; the message names field, value and range.
    """

    solver: ClassVar[str] = "anneal"
    any_width: ClassVar[bool] = True

    # Alternations T. "auto": ALTERNATIONS of the precision in which the matrix is solved, or ALTERNATIONS_ZERO_DATA.
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

    # The alternation sees only the Gram's diagonal until this share of its iterations, then the full Gram by and by
    # (linearly, to all of it at the end). Golden rows, 56 alternations: .576 of the reference's error; 1 (leave it to the
    # refinement) .80, 0 .568 for a fifth more time.
    gram_from: float | int = setting(0.5, at_least=0, at_most=1)

    # Whose coordinates units start as, one each where `units` is not given (BASES). They may stay that, or mix.
    basis: str = setting("paper", one_of=BASES)

    # The other factor starts as the rescaled target pruned to this share of its budget.
    start_share: float | int = setting(0.5, above=0, at_most=1)

    # "auto": a small matrix that is a product of sparse factors starts as its pieces (pieces.py) or its sparsest basis (span.py).
    start: str = setting("auto", one_of=("auto", "coordinates"))

    # The share of the alternations that is left out where such a start is near. Planted factors with noise (4 + 4 entries, six
    # seeds), "best": 1 has F1 .927 and error .0514, .7 .930 and .0508, 0 .935 and .0497 in half as much time again. "deep" has
    # .951 with .7, .953 with 0.
    late: float | int = setting(0.7, at_least=0, at_most=1)

    # Share of K that the factor between units and the coordinates that they start as gets. "auto": n^2 / (2 (n^2 + K)) for
    # n of them on the short side (on the golden rows with s = .5 and .75, .8 of it is 0 to 10 % worse, 1.25 of it between
    # 3 % better and 1 % worse); NAMED_SIDE_SHARE where `basis` names a side, as units are to stay what they start as.
    square_share: float | int | str = setting(AUTO, above=0, at_most=1)

    # How far the budgets move, in each alternation, to where one more entry is worth as much in either factor; 0: they stay at
    # `square_share`. Planted factors (tests/benchmarks/planted.py) are found with it where they are not without; golden attn_out
    # at s = .5 and .75 (.5): 3 and 1 % less error with 56 alternations, 6 and 3 % with 160.
    balance: float | int = setting(0.0, at_least=0, at_most=1)

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

    # How far the Gram is shrunk towards the identity (metric.py). "auto": d_in / tokens, at most MOST_SHRINKAGE, where the
    # number of tokens is known, else 0.
    shrinkage: float | int | str = setting(AUTO, at_least=0, at_most=1)

    # Chooses which copy of a unit starts with which entry, when there are more units than coordinates; else unused.
    seed: int = setting(0, at_least=0)

    # "float32", "float64" (twice the time, the same supports on any processor), or "auto": float64 for small matrices
    # (DOUBLE_UP_TO).
    precision: str = setting(AUTO, one_of=PRECISIONS)

    def for_matrix(self, d_in: int, d_out: int, *, calibrated: bool) -> "AnnealSpec":
        if self.outer_iterations != AUTO:
            return self
        precision = self.precision_for(d_in, d_out)
        blind = precision == "float32" and not calibrated
        return replace(self, outer_iterations=ALTERNATIONS_ZERO_DATA if blind else ALTERNATIONS[precision])

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
        if self.gram_from >= 1:
            return 0.0
        return max(0.0, (progress - self.gram_from) / (1 - self.gram_from))

    def shrinkage_for(self, tokens: int | None, d_in: int) -> float:
        return automatic_shrinkage(self.shrinkage, tokens, d_in)


@dataclass(frozen=True)
class PruneSpec(SolveSpec):
    """Hyper-parameters of pruning (prune.py): W itself made sparse, its coordinates as units.

    Raises:
        SpecError: a value outside its range; the message names field, value and range.
    """

    solver: ClassVar[str] = "prune"

    # Whose coordinates the units are. The product is the same for each but for a few edges; "paper" is the short side.
    basis: str = setting("input", one_of=BASES)

    # Conjugate-gradient steps of the least squares on the support.
    refine_steps: int = setting(24, at_least=0)

    # See `AnnealSpec`.
    shrinkage: float | int | str = setting(AUTO, at_least=0, at_most=1)
    precision: str = setting(AUTO, one_of=PRECISIONS)

    def shrinkage_for(self, tokens: int | None, d_in: int) -> float:
        return automatic_shrinkage(self.shrinkage, tokens, d_in)


@dataclass(frozen=True)
class SvdPruneSpec(SolveSpec):
    """Hyper-parameters of pruning the singular vectors (svd_prune.py).

    Raises:
        SpecError: a value outside its range; the message names field, value and range.
    """

    solver: ClassVar[str] = "svd_prune"

    # Least squares of both factors on their supports (refine.py): rounds, and conjugate-gradient steps per factor and round.
    refine_rounds: int = setting(12, at_least=0)
    refine_steps: int = setting(8, at_least=1)

    # See `AnnealSpec`.
    shrinkage: float | int | str = setting(AUTO, at_least=0, at_most=1)
    precision: str = setting(AUTO, one_of=PRECISIONS)

    def shrinkage_for(self, tokens: int | None, d_in: int) -> float:
        return automatic_shrinkage(self.shrinkage, tokens, d_in)


AnySpec = DsfSpec | AnnealSpec | PruneSpec | SvdPruneSpec

PRESETS: Mapping[str, AnySpec] = {
    "best": AnnealSpec(),
    "quick": AnnealSpec(outer_iterations=32),
    "thorough": AnnealSpec(outer_iterations=200),
    # Nine times the time of "best"; on planted factors of 128 x 64, whose rotations help, twenty to two hundred times (1 to
    # 11 s), unless their pieces are exact. Golden rows: .434 of the reference's error. With the penalty's end at .5 for every s
    # it is .436, with births and without; without, twice the units have .219, 400 alternations .447, 640 .428. Small
    # matrices (64 x 32 to 12 x 40) have 1.2 to 1.35 times the error without births. inner_iterations=3 is 6 % worse on attn_out,
    # rho_end=.35 8 % worse on mlp_in at s = .75 and 2 % better on others. Entries exchanged at the end (those that would lower
    # the error most enter, the least leave, values refitted, 30 turns) take off 3 % of attn_out at s = .5, .2 % at s = .75, 1 %
    # of mlp_in at s = .75, .3 % of mlp_out at s = .5: too little for what it costs.
    "deep": AnnealSpec(
        outer_iterations=480,
        rho_start=0.05,
        balance=0.5,
        late=0.0,
        births=30,
        restarts=1,
        rotations=1600,
        refine_rounds=12,
    ),
    "paper": DsfSpec(),
    "pruned": PruneSpec(),
    "svd_pruned": SvdPruneSpec(),
}
DEFAULT_PRESET = "best"


def automatic_shrinkage(shrinkage: float | int | str, tokens: int | None, d_in: int) -> float:
    """A share that is given, or "auto": d_in / tokens, at most MOST_SHRINKAGE; 0 where their number is not known."""
    if not isinstance(shrinkage, str):
        return float(shrinkage)
    return 0.0 if tokens is None else min(MOST_SHRINKAGE, d_in / max(tokens, 1))


def automatic_rho_end(sparsity: float, least_share: float, shrinkage: float, *, calibrated: bool) -> float:
    """The penalty's end "auto", lower where factors are dense and the Gram is trusted.

    Up to s = .5 the lower one, from s = .75 on the upper one, between them linearly; a Gram that is shrunk as far as it may be
    (MOST_SHRINKAGE) has the upper one at every s, one that is shrunk less stands between; so has a factor with fewer than
    ONE_SIDED of all entries.

    Golden rows, 72 alternations, error over that of .5: s = .5 .973 with .4 and .998 with .3; s = .25 .984 with .4; s = .625 .996
    with .4; s = .75 1.03 with .35, 1.02 with .6; s = .875 1.01 with .4, .995 with .6. Shrunk by .1, at s = .5: .993 with .4 and
    with .45; by .3 1.03 with .4. mlp_out from its inputs (.03 of K) at s = .5: 1.03 with .4. Without a Gram .7 has .994 of the
    error of .8 at s = .5, 1.001 of it at .75. The embedded model at s = .5: .973 with .4.

    Args:
        least_share: of K, that the factor of fewer entries has.
        shrinkage: of the Gram; without one it does not matter.
    """
    lower, upper = RHO_END_CALIBRATED if calibrated else RHO_END_ZERO_DATA
    trusted_less = shrinkage / MOST_SHRINKAGE if calibrated else 0.0
    rise = min(max((sparsity - 0.5) / 0.25, trusted_less, 0.0), 1.0)
    return lower + (upper - lower) * (1.0 if least_share < ONE_SIDED else rise)


def resolve(preset: str, overrides: Mapping[str, Any]) -> AnySpec:
    """The spec of a preset with some fields replaced.

    Args:
        preset: a key of `PRESETS`.
        overrides: fields of the preset's spec and their values.

    Raises:
        SpecError: no such preset or field (the nearest and all valid names are listed), or a value outside its range.
    """
    if preset not in PRESETS:
        raise error("solver-unknown-preset", preset=preset, hint=nearest(preset, sorted(PRESETS)))
    spec = PRESETS[preset]
    known = sorted(each.name for each in fields(spec))
    for name in overrides:
        if name not in known:
            others = [repr(key) for key, other in PRESETS.items() if name in {each.name for each in fields(other)}]
            elsewhere = f"; preset {' or '.join(others)} has it" if others else ""
            raise error(
                "solver-unknown-setting", preset=preset, name=name, hint=nearest(name, known), elsewhere=elsewhere
            )
    return spec.changed(overrides)


@dataclass(frozen=True)
class Step:
    """Outer iteration `iteration` (from 1) of `total` is done.

    Attributes:
        relmse: computes the relMSE reached so far, under the Gram the solver sees (a product of the factors: call it
            every few seconds, not every time). Valid during the callback only.
    """

    iteration: int
    total: int
    relmse: Callable[[], float]


OnIteration = Callable[[Step], None]
