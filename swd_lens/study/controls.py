"""The controls of a study: what stands beside SWD on every surface, by the names that callers give.

1. Exact factorizations (`EXACT`): every matrix as a product without an error, made once per surface; those in `OF_TEXT` go by
   the calibration text.
2. The paper's solver with the paper's settings (`PAPER`), and what is pruned in place of being factorized (`PRUNED`): neurons and
   singular vectors with as few edges as SWD has, or as few as keep the study's goal. They are presets of the solver, and made at
   each sparsity and for the goal of the study (`sizes_of`) from the same calibration text. The paper's solver is solved in
   float64 where ours is, so that its supports are those of any machine.
3. Random-B, of several seeds: in the circuits only.
4. `controls_of` says which controls a study has: those that were asked for, or the usual ones, as far as they can be made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from swd_lens.base.errors import legible
from swd_lens.base.settings import AUTO
from swd_lens.factorization.goal import Goal
from swd_lens.hosts.sites import Site
from swd_lens.solver import DEFAULT_PRESET, PRESETS
from swd_lens.solver.budget import edges
from swd_lens.train.baselines import exact

# Control -> the method that it goes by; of solved ones its size follows ("SWD (paper) s=0.5"), and the control is the preset.
EXACT = {name: control.title for name, control in exact.EXACT.items()}
OF_TEXT = tuple(name for name, control in exact.EXACT.items() if control.of_text)
PAPER = {"paper": "SWD (paper)"}
PRUNED = {"pruned": "Neurons pruned", "svd_pruned": "SVD pruned"}
SOLVED = {**PAPER, **PRUNED}
RANDOM_B, RANDOM_B_SEEDS = "Random-B", 3
CONTROLS = (*EXACT, *PRUNED, *PAPER, "random_b")
DEFAULT_CONTROLS = ("neurons", "svd", "pruned", "paper")

# Of the solver's settings those that say the same of every preset.
_COMMON = ("shrinkage", "precision")
_OF_SWD = {"preset", "units"} | {each.name for spec in PRESETS.values() for each in fields(spec)} - {*_COMMON}


def sizes_of(sparsities: Iterable[float | int], kl: float | None, ce: float | None) -> tuple[float | Goal, ...]:
    """List how large a study's factors are: of each sparsity, and as small as a goal allows. Raises ValueError: a goal that is
    not above 0."""
    return (*map(float, sparsities), *([] if kl is None and ce is None else [Goal(kl, ce)]))


@dataclass(frozen=True)
class SolvedMethod:
    """A method of a study that the solver makes."""

    size: float | Goal  # a sparsity, or a goal, for which the sparsest factors are searched
    options: Mapping[str, Any]  # of `factorize`
    control: str | None = None  # a key of SOLVED; None: what the study is about

    def without_edges(self, sites: Iterable[Site]) -> Site | None:
        """The first site whose K is too small for the paper's solver, which needs more edges than ours; None where there is no
        such site, and of all other methods."""
        if self.control not in PAPER or isinstance(self.size, Goal):
            return None
        return next((site for site in sites if edges(site.d_in, site.d_out, self.size) < edges_needed(site)), None)

    @property
    def role(self) -> str:
        """Its role in comparisons."""
        return "swd" if self.control is None else PRESETS[self.control].role

    @property
    def asked(self) -> dict[str, Any]:
        """Arguments of `factorize`, but for text."""
        if not isinstance(self.size, Goal):
            return {"sparsity": self.size, **self.options}
        # Without a word on how its units are made, `factorize` would look for the cheapest of all paths, pruned ones among them.
        ours = {} if self.control is not None or self.options.keys() & _OF_SWD else {"basis": AUTO}
        return {"kl": self.size.kl, "ce": self.size.ce, **ours, **self.options}


def edges_needed(site: Site) -> int:
    """The smallest K that the paper's solver, as a control, can make of this matrix."""
    spec = PRESETS["paper"]
    return spec.least_edges(site.d_in, site.d_out, spec.coordinates(site.d_in, site.d_out))


def swd_methods(sizes: Sequence[float | Goal], options: Mapping[str, Any]) -> dict[str, SolvedMethod]:
    """Method -> how it is made, of what a study is about. options: of `factorize`."""
    return {f"SWD {_label(size)}": SolvedMethod(size, options) for size in sizes}


def controls_of(asked: Sequence[str] | None, sizes: Sequence[float | Goal], options: Mapping[str, Any]) -> tuple[str, ...]:
    """The controls of a study, in the order in which they were asked for.

    One that is the study's own solver (`preset="paper"` and control "paper") would be the same method twice, and is left out.

    Args:
        asked: None = the usual ones; without a sparsity or a goal those of them that need none.
        options: of `factorize` for SWD.

    Raises ValueError: an unknown control, or one that is made at sparsities or for a goal, and there is neither.
    """
    controls = [name for name in DEFAULT_CONTROLS if sizes or name not in SOLVED] if asked is None else asked
    if unknown := sorted(set(controls) - set(CONTROLS)):
        raise ValueError(f"no control {legible(', '.join(map(repr, unknown)))}; there are {legible(', '.join(CONTROLS))}")
    if not sizes and (solved := [control for control in SOLVED if control in controls]):
        raise ValueError(
            f"controls {legible(', '.join(solved))} are made at the sparsities of the study, which has none: give sparsities="
        )
    return tuple(name for name in controls if name != options.get("preset", DEFAULT_PRESET))


def solved_controls(
    controls: Sequence[str], sizes: Sequence[float | Goal], options: Mapping[str, Any]
) -> dict[str, SolvedMethod]:
    """Method -> how it is made, of the controls that the solver makes. options: of `factorize` for SWD."""
    return {
        f"{name} {_label(size)}": SolvedMethod(size, control_options(control, options), control)
        for control, name in SOLVED.items()
        if control in controls
        for size in sizes
    }


def _label(size: float | Goal) -> str:
    """As the arguments say it: "s=0.5", "kl=0.001"."""
    if not isinstance(size, Goal):
        return f"s={size:g}"
    return " ".join(f"{name}={value:g}" for name, value in (("kl", size.kl), ("ce", size.ce)) if value is not None)


def control_options(control: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `factorize` for a control: those for SWD but its solver's own, which are no settings of another solver."""
    known = {each.name for each in fields(PRESETS[control])}
    kept = {name: value for name, value in options.items() if name not in _OF_SWD and (name not in _COMMON or name in known)}
    if control in PAPER:
        kept.pop("weigh_outputs", None)  # the paper's SWD is what it was
    own = {"pruned": {"basis": "neurons"}, "paper": {"precision": options.get("precision", AUTO)}}
    return {**kept, "preset": control, **own.get(control, {})}
