"""The sparse two-factor solver: tensors in, `Factors` out.

1. `resolve` the preset and overrides to a SolveSpec (spec.py).
2. Validate weight, Gram, sparsity and units (validate.py); split the budget (budget.py).
3. Run Double Sparse Factorization in float32, without TF32 or autocast (dsf.py); supports by threshold.py.
4. Return `Factors` whose settings are everything that was used, and the entries really kept.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Any

import torch
from torch import Tensor

from ..factors import Factors
from . import dsf
from .budget import Budget, plan_budget, realised
from .dsf import OnIteration
from .spec import PRESETS, SolveSpec, resolve
from .validate import (
    BudgetError,
    GramError,
    SolveInputError,
    SparsityError,
    SpecError,
    UnitsError,
    WeightError,
    check_gram,
    check_sparsity,
    check_units,
    check_weight,
)

__all__ = [
    "PRESETS",
    "Budget",
    "BudgetError",
    "GramError",
    "SolveInputError",
    "SolveSpec",
    "SparsityError",
    "SpecError",
    "UnitsError",
    "WeightError",
    "plan_budget",
    "realised",
    "resolve",
    "solve",
]


def solve(
    weight: Tensor,
    gram: Tensor | None = None,
    sparsity: float | int = 0.5,
    *,
    preset: str = "paper",
    units: int | None = None,
    on_iteration: OnIteration | None = None,
    **overrides: Any,
) -> Factors:
    """Sparse factors W ≈ read @ write with nnz(read) + nnz(write) = K = (1 - sparsity) numel(W).

    Minimises tr((W - AB)^T G (W - AB)) heuristically: paper §swd-factorization and app. swd-optimization, method.md
    §5.2. Deterministic: the same inputs on the same machine and threads give the same bits.

    Args:
        weight: (d_in, d_out), any floating dtype; outputs are inputs @ weight. Solved in float32.
        gram: (d_in, d_in), E[h^T h] of the inputs at any scale; None (zero-data) means the identity.
        sparsity: s = 1 - K / numel(W), inside (0, 1).
        preset: a key of `PRESETS`; "paper" is the paper's solver with the reference code's rounding.
        units: width of the bottleneck; None means min(d_in, d_out), the only width the paper's solver defines.
        on_iteration: called as on_iteration(t, T) after outer iteration t = 1..T, for progress bars.
        **overrides: fields of `SolveSpec`, e.g. outer_iterations=8, rounding="exact".

    Returns:
        Factors on the weight's device; `settings` holds every value used and the entries kept, `weight` the float32 W.
        On very small matrices a unit may end without edges on one side; K is then not used up (see `valid_units`).

    Raises:
        SpecError: unknown preset or setting (the nearest names are given), or a setting outside its range.
        WeightError: not two-dimensional, not finite (the first entry is named), or all zeros.
        GramError: wrong size, not finite, not symmetric, negative diagonal, or not positive semi-definite.
        SparsityError: outside (0, 1).
        UnitsError: not min(d_in, d_out).
        BudgetError: too few edges; the largest feasible sparsity is named.
    """
    spec = resolve(preset, overrides)
    check_weight(weight)
    d_in, d_out = weight.shape
    if gram is not None:
        check_gram(gram, d_in)
    check_sparsity(sparsity)
    check_units(units, d_in, d_out)
    budget = plan_budget(d_in, d_out, sparsity, spec)

    dense = weight.detach().to(torch.float32)
    metric = None if gram is None else gram.detach().to(device=dense.device, dtype=torch.float32)
    with torch.no_grad(), _plain_float32(dense.device):
        read, write = dsf.factorize(dense, metric, budget, spec, on_iteration)

    settings = {
        "preset": preset,
        "sparsity": float(sparsity),
        "units": read.shape[1],
        "calibrated": gram is not None,
        **spec.as_dict(),
        "budget_square": budget.square,
        "budget_other": budget.other,
        "nonzeros_read": int(read.count_nonzero()),
        "nonzeros_write": int(write.count_nonzero()),
    }
    return Factors(read, write, settings, {"solver": "dsf", "version": _version()}, dense)


@contextmanager
def _plain_float32(device: torch.device) -> Iterator[None]:
    """Full float32 matrix products inside (the paper's setting): TF32 and autocast off, restored after."""
    restore = _highest_precision()
    try:
        with torch.autocast(device.type, enabled=False):
            yield
    finally:
        restore()


def _highest_precision() -> Callable[[], None]:
    """Set float32 matrix products to full precision; returns what undoes it.

    torch has two settings for this and refuses to read the first once the caller has written the second.
    """
    try:
        before = torch.get_float32_matmul_precision()
    except RuntimeError:
        backends = [torch.backends.cuda.matmul, torch.backends.mkldnn.matmul]  # pyright: ignore[reportAttributeAccessIssue]
        values = [backend.fp32_precision for backend in backends]
        for backend in backends:
            backend.fp32_precision = "ieee"

        def restore() -> None:
            for backend, value in zip(backends, values, strict=True):
                backend.fp32_precision = value

        return restore
    torch.set_float32_matmul_precision("highest")
    return lambda: torch.set_float32_matmul_precision(before)


def _version() -> str:
    try:
        return metadata.version("swd-lens")
    except metadata.PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown"
