"""solve: one matrix, given as tensors, to Factors; the solver's answer with what makes it a file and a unit source."""

from importlib import metadata
from typing import Any

from torch import Tensor

from swd_lens import solver
from swd_lens.solver import DEFAULT_PRESET, OnIteration
from swd_lens.units.factors import Factors


def solve(
    weight: Tensor,
    gram: Tensor | None = None,
    sparsity: float | int = 0.5,
    *,
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    tokens: int | None = None,
    on_iteration: OnIteration | None = None,
    **overrides: Any,
) -> Factors:
    """Sparse factors W ≈ read @ write of a matrix with K = (1 - sparsity) numel(W) nonzeros.

    Args and errors are those of `swd_lens.solver.solve`: weight (d_in, d_out), gram (d_in, d_in) or None for zero-data,
    preset "best", "quick", "thorough" or "paper".

    Returns:
        Factors on the weight's device; `settings` holds every value used and the entries kept, `weight` the float32 W.
    """
    solution = solver.solve(
        weight, gram, sparsity, preset=preset, units=units, tokens=tokens, on_iteration=on_iteration, **overrides
    )
    provenance = {"solver": solution.solver, "version": _version()}
    return Factors(solution.read, solution.write, solution.settings, provenance, solution.weight)


def _version() -> str:
    try:
        return metadata.version("swd-lens")
    except metadata.PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown"
