"""solve: one matrix, given as tensors, to Factors: the solver's answer with what makes it a file and a unit source."""

from typing import Any

from torch import Tensor

from swd_lens import solver
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.solve_task import made_by
from swd_lens.solver import DEFAULT_PRESET, OnIteration
from swd_lens.units.factors import Factors


@with_torch_defaults
def solve(
    weight: Tensor,
    gram: Tensor | None = None,
    sparsity: float | int = 0.5,
    *,
    edges: int | None = None,
    preset: str = DEFAULT_PRESET,
    units: int | float | str | None = None,
    tokens: int | None = None,
    output_gram: Tensor | None = None,
    on_iteration: OnIteration | None = None,
    **overrides: Any,
) -> Factors:
    """Sparse factors W ≈ read @ write of a matrix with K = (1 - sparsity) numel(W) nonzeros.

    Args and errors are those of `swd_lens.solver.solve`: weight (d_in, d_out), gram (d_in, d_in) or None for zero-data, edges K
    itself in place of sparsity, output_gram (d_out, d_out) of the loss's gradients at the outputs or None (all outputs count the
    same), preset "best", "quick", "thorough", "deep", "paper", "pruned" or "svd_pruned".

    Returns:
        Factors on the weight's device; `settings` holds every value used and the entries kept, `weight` the float32 W.
    """
    how: dict[str, Any] = {"edges": edges, "preset": preset, "units": units, "tokens": tokens, **overrides}
    found = solver.solve(weight, gram, sparsity, output_gram=output_gram, on_iteration=on_iteration, **how)
    return Factors(found.read, found.write, found.settings, made_by(found.solver), found.weight)
