"""The controls of a study: what stands beside SWD on every surface, by the names that callers give.

1. Exact factorizations (`EXACT`): every matrix as a product without an error, made once per surface; those in `OF_TEXT` go by
   the calibration text.
2. The paper's solver with the paper's settings (`PAPER`), and what is pruned in place of being factorized (`PRUNED`): neurons and
   singular vectors with as few edges as SWD has. They are presets of the solver, and made at each sparsity of the study from the
   same calibration text. The paper's solver is solved in float64 where ours is, so that its supports are those of any machine.
3. Random-B, of several seeds: in the circuits only.
4. `controls_of` says which controls a study has: those that were asked for, or the usual ones, as far as they can be made.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from swd_lens.base.errors import error
from swd_lens.base.settings import AUTO
from swd_lens.hosts.sites import Site
from swd_lens.solver import DEFAULT_PRESET, PRESETS
from swd_lens.solver.budget import edges

# Control -> the method that it goes by; of solved ones its sparsity follows ("SWD (paper) s=0.5"), and the control is the preset.
EXACT = {"neurons": "neurons", "svd": "SVD", "svd_whitened": "SVD whitened", "svd_causal": "SVD causal"}
OF_TEXT = ("svd_whitened", "svd_causal")
PAPER = {"paper": "SWD (paper)"}
PRUNED = {"pruned": "Neurons pruned", "svd_pruned": "SVD pruned"}
SOLVED = {**PAPER, **PRUNED}
RANDOM_B, RANDOM_B_SEEDS = "Random-B", 3
CONTROLS = (*EXACT, *PRUNED, *PAPER, "random_b")
DEFAULT_CONTROLS = ("neurons", "svd", "pruned", "paper")

# Of the solver's settings those that say the same of every preset.
_COMMON = ("shrinkage", "precision")
_OF_SWD = {"preset", "units"} | {each.name for spec in PRESETS.values() for each in fields(spec)} - {*_COMMON}


@dataclass(frozen=True)
class SolvedMethod:
    """A method of a study that the solver makes.

    Attributes:
        options: of `factorize`.
        control: a key of SOLVED; None: what the study is about.
    """

    sparsity: float
    options: Mapping[str, Any]
    control: str | None = None

    def without_edges(self, sites: Iterable[Site]) -> Site | None:
        """The first site whose K is too small for the paper's solver, which needs more edges than ours; None where there is no
        such site, and of all other methods."""
        if self.control not in PAPER:
            return None
        return next((site for site in sites if edges(site.d_in, site.d_out, self.sparsity) < edges_needed(site)), None)


def edges_needed(site: Site) -> int:
    """The smallest K that the paper's solver, as a control, can make of this matrix."""
    spec = PRESETS["paper"]
    return spec.least_edges(site.d_in, site.d_out, spec.coordinates(site.d_in, site.d_out))


def controls_of(
    asked: Sequence[str] | None, sparsities: Sequence[float | int], options: Mapping[str, Any]
) -> tuple[str, ...]:
    """The controls of a study, in the order in which they were asked for.

    One that is the study's own solver (`preset="paper"` and control "paper") would be the same method twice, and is left out.

    Args:
        asked: None = the usual ones; without a sparsity those of them that need none.
        options: of `factorize` for SWD.

    Raises:
        ValueError: an unknown control, or one that is made at sparsities, and there is none.
    """
    controls = [name for name in DEFAULT_CONTROLS if sparsities or name not in SOLVED] if asked is None else asked
    if unknown := sorted(set(controls) - set(CONTROLS)):
        raise error("study-unknown-control", unknown=", ".join(map(repr, unknown)), controls=", ".join(CONTROLS))
    if not sparsities and (solved := [control for control in SOLVED if control in controls]):
        raise error("study-solved-without-sparsity", controls=", ".join(solved))
    return tuple(name for name in controls if name != options.get("preset", DEFAULT_PRESET))


def solved_controls(
    controls: Sequence[str], sparsities: Sequence[float | int], options: Mapping[str, Any]
) -> dict[str, SolvedMethod]:
    """Method -> how it is made, of the controls that the solver makes.

    Args:
        options: of `factorize` for SWD.
    """
    return {
        f"{name} s={sparsity:g}": SolvedMethod(float(sparsity), control_options(control, options), control)
        for control, name in SOLVED.items()
        if control in controls
        for sparsity in sparsities
    }


def control_options(control: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `factorize` for a control: those for SWD but its solver's own, which are no settings of another solver."""
    known = {each.name for each in fields(PRESETS[control])}
    kept = {
        name: value for name, value in options.items() if name not in _OF_SWD and (name not in _COMMON or name in known)
    }
    if control in PAPER:
        kept.pop("weigh_outputs", None)  # the paper's SWD is what it was
    own = {"pruned": {"basis": "neurons"}, "paper": {"precision": options.get("precision", AUTO)}}
    return {**kept, "preset": control, **own.get(control, {})}
