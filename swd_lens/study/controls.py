"""The controls of a study: what stands beside SWD on every surface, by the names that callers give.

1. Exact factorizations (`EXACT`): every matrix as a product without an error, made once per surface.
2. Pruned ones (`PRUNED`): neurons and singular vectors with as few edges as SWD has. They are presets of the solver, and made at
   each sparsity of the study from the same calibration text.
3. Random-B, of several seeds: in the circuits only.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from swd_lens.base.errors import error
from swd_lens.base.settings import AUTO
from swd_lens.solver import PRESETS

# Control -> the method that it goes by; of pruned ones its sparsity follows ("SVD pruned s=0.5").
EXACT = {"neurons": "neurons", "svd": "SVD"}
PRUNED = {"pruned": "Neurons pruned", "svd_pruned": "SVD pruned"}
RANDOM_B, RANDOM_B_SEEDS = "Random-B", 3
CONTROLS = (*EXACT, *PRUNED, "random_b")
DEFAULT_CONTROLS = tuple(EXACT)

# Of the solver's settings those that say the same of every preset.
_COMMON = ("shrinkage", "precision")
_OF_SWD = {"preset", "units"} | {each.name for spec in PRESETS.values() for each in fields(spec)} - {*_COMMON}


def check_controls(controls: Sequence[str], sparsities: Sequence[float | int]) -> None:
    """Do nothing if there are such controls, and sparsities at which to make them.

    Raises:
        ValueError: an unknown control, or a pruned one without a sparsity.
    """
    if unknown := sorted(set(controls) - set(CONTROLS)):
        raise error("study-unknown-control", unknown=", ".join(map(repr, unknown)), controls=", ".join(CONTROLS))
    if not sparsities and (pruned := [control for control in PRUNED if control in controls]):
        raise error("study-pruned-without-sparsity", controls=", ".join(pruned))


def pruned_methods(
    controls: Sequence[str], sparsities: Sequence[float | int], options: Mapping[str, Any]
) -> dict[str, tuple[float, Mapping[str, Any]]]:
    """Method -> sparsity and options of `factorize`, of the pruned controls that were asked for.

    Args:
        options: of `factorize` for SWD.
    """
    return {
        f"{name} s={sparsity:g}": (float(sparsity), pruned_options(control, options))
        for control, name in PRUNED.items()
        if control in controls
        for sparsity in sparsities
    }


def pruned_options(control: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of `factorize` for a pruned control: those for SWD but its solver's own, which are no settings of pruning."""
    others = {name: value for name, value in options.items() if name not in _OF_SWD}
    return {**others, "preset": control} | ({"basis": AUTO} if control == "pruned" else {})
