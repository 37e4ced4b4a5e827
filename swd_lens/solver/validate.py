"""What the solver refuses, each with its own error that names the value and the way out.

1. `check_weight`: two-dimensional, floating point, finite, not all zeros.
2. `check_gram`: (d_in, d_in), finite, symmetric, no negative diagonal, not all zeros.
3. `check_sparsity`: inside (0, 1).
4. `resolve_units`: a number of units, None, or "2x".

The budget is checked where it is made (budget.py), the hyper-parameters in spec.py. The checks take plain Tensors:
a shape annotation would refuse a wrong argument before these messages could.
"""

import math
import re

import torch
from torch import Tensor

# A Gram summed in float32 may be asymmetric by rounding; more than this share of its largest entry is a mistake.
SYMMETRY_TOLERANCE = 1e-4


class SolveInputError(ValueError):
    """Any argument that `solve` refuses; the subclasses say which."""


class WeightError(SolveInputError):
    """The weight is not a finite, non-zero, floating-point matrix."""


class GramError(SolveInputError):
    """The Gram does not fit the weight or is not a Gram matrix."""


class SparsityError(SolveInputError):
    """The sparsity is not a number inside (0, 1)."""


class BudgetError(SolveInputError):
    """The sparsity leaves too few edges for the factors."""


class UnitsError(SolveInputError):
    """The asked number of units is not one the preset can make."""


class SpecError(SolveInputError):
    """An unknown preset or setting, or a setting outside its range."""


def check_weight(weight: Tensor) -> None:
    """Raise WeightError unless weight is a (d_in, d_out) matrix of finite floats with a non-zero entry."""
    if weight.ndim != 2:
        raise WeightError(f"weight has shape {tuple(weight.shape)}; give a two-dimensional (d_in, d_out) matrix")
    if weight.numel() == 0:
        raise WeightError(f"weight has shape {tuple(weight.shape)}, which is empty; give a (d_in, d_out) matrix")
    if not weight.is_floating_point():
        raise WeightError(f"weight has dtype {weight.dtype}; give a floating-point matrix, e.g. weight.float()")
    if (bad := _first_non_finite(weight)) is not None:
        raise WeightError(f"weight{bad}: every entry must be finite in float32")
    if not bool(weight.any()):
        raise WeightError(f"weight {tuple(weight.shape)} is all zeros: there is nothing to factorize")


def check_gram(gram: Tensor, d_in: int) -> None:
    """Raise GramError unless gram can be E[h^T h] of d_in-dimensional inputs h (positive semi-definiteness is found
    out by the solver's own Cholesky factorization)."""
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        raise GramError(f"gram has shape {tuple(gram.shape)}, not square; give E[h^T h] of shape ({d_in}, {d_in})")
    if gram.shape[0] != d_in:
        raise GramError(
            f"gram has size {gram.shape[0]} but weight has d_in={d_in}; the Gram is of the inputs (weight is "
            "(d_in, d_out): transpose an nn.Linear.weight)"
        )
    if not gram.is_floating_point():
        raise GramError(f"gram has dtype {gram.dtype}; give a floating-point matrix, e.g. gram.float()")
    if (bad := _first_non_finite(gram)) is not None:
        raise GramError(f"gram{bad}: every entry must be finite in float32")
    _check_symmetric(gram)
    negative = (gram.diagonal() < 0).nonzero()
    if len(negative):
        j = int(negative[0])
        raise GramError(f"gram[{j}, {j}] = {float(gram[j, j]):g}: the diagonal, E[h_j^2], cannot be negative")
    if not bool(gram.diagonal().any()):
        raise GramError("gram has an all-zero diagonal: no input was ever active; give gram=None for zero-data")


def _check_symmetric(gram: Tensor) -> None:
    asymmetry = (gram - gram.T).abs()
    worst = int(asymmetry.argmax())
    i, j = divmod(worst, gram.shape[1])
    if float(asymmetry[i, j]) > SYMMETRY_TOLERANCE * float(gram.abs().max()):
        raise GramError(
            f"gram is not symmetric: gram[{i}, {j}] = {float(gram[i, j]):g} but gram[{j}, {i}] = "
            f"{float(gram[j, i]):g}; give h.T @ h, or (gram + gram.T) / 2 if this is rounding"
        )


def check_sparsity(sparsity: float | int) -> None:
    """Raise SparsityError unless 0 < sparsity < 1."""
    if not 0.0 < sparsity < 1.0:  # NaN fails this, too
        raise SparsityError(f"sparsity={sparsity}: give a number inside (0, 1); s = 1 - K / numel(W)")


def check_tokens(tokens: int | None) -> None:
    """Raise ValueError unless tokens is None or a positive whole number."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise ValueError(f"tokens={tokens!r}: give the number of tokens the Gram was averaged over, or None")


def resolve_units(units: int | float | str | None, d_in: int, d_out: int, *, any_width: bool) -> int:
    """The number of units meant: None = min(d_in, d_out), "2x" = twice that, or the number itself.

    Raises:
        UnitsError: not one of these, below 1, more than d_in * d_out, or (any_width false: the paper's solver) not
            min(d_in, d_out).
    """
    standard = min(d_in, d_out)
    number = standard if units is None else units
    if isinstance(units, str):
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)x", units.strip())
        if match is None:
            raise UnitsError(
                f'units={units!r}: give a number, None for min(d_in, d_out) = {standard}, or "2x" for twice that'
            )
        number = round(float(match[1]) * standard)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= d_in * d_out:
        raise UnitsError(
            f"units={units!r}: give a whole number from 1 to {d_in * d_out}, None for min(d_in, d_out) = {standard}, or "
            '"2x" for twice that'
        )
    if not any_width and number != standard:
        raise UnitsError(
            f"units={units!r}: the paper's solver is defined for min(d_in, d_out) = {standard} units; leave units=None, "
            'or take preset="best", which knows any number'
        )
    return number


def _first_non_finite(matrix: Tensor) -> str | None:
    bad = (~torch.isfinite(matrix.detach().to(torch.float32))).nonzero()
    if not len(bad):
        return None
    i, j = bad[0].tolist()
    value = float(matrix[i, j])
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"[{i}, {j}] is {'nan' if math.isnan(value) else value}{more}"
