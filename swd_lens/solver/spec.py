"""Every number the solver uses, in one frozen dataclass, with the paper's value and where it comes from.

1. `SolveSpec` holds the hyper-parameters; its defaults are the paper's.
2. `PRESETS` names complete specs; "paper" is the paper's solver with the reference code's rounding.
3. `resolve(preset, overrides)` makes the spec of one call; an unknown name lists the nearest ones.
"""

import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

from .validate import SpecError

ROUNDINGS = ("reference", "exact")
ARITHMETICS = ("reference", "clean")


@dataclass(frozen=True)
class SolveSpec:
    """Hyper-parameters of the Double Sparse Factorization solver (paper, app. swd-optimization; method.md §5.2).

    Raises:
        SpecError: a value outside its range; the message names field, value and range.
    """

    # Alternations T. Paper: 40 for the GPT-2 experiments, 8 for the single Qwen matrices. The penalty ramp needs
    # T > rho_ramp_tail.
    outer_iterations: int = 40

    # ADMM steps per block update. Paper: 5.
    inner_iterations: int = 5

    # During the first this many steps of a block the support is chosen anew, then held. Paper: 2.
    support_iterations: int = 2

    # ADMM penalty of every step but a block's first. Paper: 1 (natural: the block's Gram has a unit diagonal).
    rho: float | int = 1.0

    # A block's first step uses min(1, t / (T - tail)) ** power * rho: at t = 0 plain least squares, which forgets the
    # identity start; later the previous factor counts more and more. Paper: (t / (T - 3)) ** 3.
    rho_ramp_tail: int = 3
    rho_ramp_power: float | int = 3.0

    # Added to a block's Gram, in units of its mean diagonal. Paper: 1e-2. It also keeps the very first solve
    # (rho = 0) regular.
    ridge: float | int = 1e-2

    # Density of the square factor when W is square, and when it is not. Paper: 0.16 and 0.25; the rest of K is the
    # other factor's.
    square_density_square: float | int = 0.16
    square_density_rectangular: float | int = 0.25

    # The other factor starts as the rescaled target pruned to this share of its budget. Reference code: 1/2 (not in
    # the paper).
    start_share: float | int = 0.5

    # No factor may be sparser than this under rounding="reference" (K is then overshot). Reference code: 0.99.
    sparsity_cap: float | int = 0.99

    # Added to norms before dividing by them, so that dead inputs and empty units stay finite. Reference code: 1e-8.
    norm_floor: float | int = 1e-8

    # ADMM steps of the finalisation (write factor refitted on the full Gram, supports held), without ridge. Paper: 20.
    # 0 leaves it out.
    final_iterations: int = 20

    # Penalty of the finalisation. Paper: 1.
    final_rho: float | int = 1.0

    # "reference": entries strictly above a threshold whose index is rounded as the reference code rounds it, usually
    # one entry per factor below budget (method.md §0.3 proves that the paper's counts carry this). "exact": K is K.
    rounding: str = "reference"

    # "reference": the reference code's bits on the same machine and threads. "clean": Cholesky and scale-free floors,
    # faster, and the same bits for c * W or c * G with c a power of two. Equally good on average (dsf.py says more).
    arithmetic: str = "reference"

    def __post_init__(self) -> None:
        self._require_int("outer_iterations", self.rho_ramp_tail + 1)
        self._require_int("inner_iterations", 1)
        self._require_int("support_iterations", 1, self.inner_iterations)
        self._require_int("rho_ramp_tail", 0)
        self._require_int("final_iterations", 0)
        for name in ("rho", "rho_ramp_power", "ridge", "norm_floor", "final_rho"):
            self._require_number(name, math.inf)
        for name in ("square_density_square", "square_density_rectangular", "start_share", "sparsity_cap"):
            self._require_number(name, 1.0)
        self._require_one_of("rounding", ROUNDINGS)
        self._require_one_of("arithmetic", ARITHMETICS)

    def _require_int(self, name: str, low: int, high: int | None = None) -> None:
        value = getattr(self, name)
        is_int = isinstance(value, int) and not isinstance(value, bool)
        if not is_int or value < low or (high is not None and value > high):
            bound = f"of at least {low}" if high is None else f"from {low} to {high}"
            raise SpecError(f"{name}={value!r}: give a whole number {bound}")

    def _require_number(self, name: str, high: float) -> None:
        value = getattr(self, name)
        is_number = isinstance(value, float | int) and not isinstance(value, bool)
        if not is_number or not 0 < value <= high or math.isinf(value):
            bound = "a finite number above 0" if math.isinf(high) else f"a number above 0 and at most {high:g}"
            raise SpecError(f"{name}={value!r}: give {bound}")

    def _require_one_of(self, name: str, choices: tuple[str, ...]) -> None:
        value = getattr(self, name)
        if value not in choices:
            raise SpecError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")

    def square_density(self, d_in: int, d_out: int) -> float:
        """Density of the square factor for a matrix of this shape."""
        return float(self.square_density_square if d_in == d_out else self.square_density_rectangular)

    def rho_start(self, t: int) -> float:
        """Penalty of a block's first step at outer iteration t (zero-based): 0 at t = 0, rho from t = T - tail on."""
        ramp = min(1.0, t / (self.outer_iterations - self.rho_ramp_tail))
        return float(self.rho) * ramp ** float(self.rho_ramp_power)

    def as_dict(self) -> dict[str, Any]:
        """All values as plain JSON values, for Factors.settings."""
        return asdict(self)


PRESETS: Mapping[str, SolveSpec] = {"paper": SolveSpec()}


def resolve(preset: str, overrides: Mapping[str, Any]) -> SolveSpec:
    """The spec of a preset with some fields replaced.

    Args:
        preset: a key of `PRESETS`.
        overrides: fields of `SolveSpec` and their values.

    Raises:
        SpecError: no such preset or field (the nearest and all valid names are listed), or a value outside its range.
    """
    if preset not in PRESETS:
        raise SpecError(f"no preset {preset!r}; {_suggest(preset, PRESETS)}")
    known = [f.name for f in fields(SolveSpec)]
    for name in overrides:
        if name not in known:
            raise SpecError(f"solve has no setting {name!r}; {_suggest(name, known)}")
    return replace(PRESETS[preset], **overrides)


def _suggest(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    near = difflib.get_close_matches(str(name), names, n=3)
    hint = f"did you mean {' or '.join(near)}? " if near else ""
    return f"{hint}valid: {', '.join(names)}"
