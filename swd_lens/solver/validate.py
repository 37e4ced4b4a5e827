"""Checks of the solver's arguments, each with its own error that names the value and the way out.

1. `check_weight`: a dense tensor with values, two-dimensional, floating point, finite, not all zeros.
2. `check_gram`: the same, (d_in, d_in), or (d_out, d_out) of gradients at the outputs, symmetric, no negative diagonal.
3. `check_sparsity`: a number inside (0, 1).
4. `resolve_units`: a number of units, None, or "2x".

The budget is checked where it is made (budget.py), the hyper-parameters in spec.py. The checks take plain Tensors:
a shape annotation would refuse a wrong argument before these messages could.
"""

import math
import re
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from swd_lens.base.checks import bounded
from swd_lens.base.errors import GramError, SparsityError, UnitsError, WeightError, quoted
from swd_lens.solver.spec import SolveSpec

# A Gram summed in float32 may be asymmetric by rounding; more than this share of its largest entry is a mistake.
SYMMETRY_TOLERANCE = 1e-4


def check_weight(weight: Any) -> None:
    """Raise WeightError unless weight is a dense (d_in, d_out) matrix of finite floats with a non-zero entry."""
    _check_dense("weight", weight, WeightError)
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


def check_gram(gram: Any, size: int, name: str = "gram") -> None:
    """Raise GramError unless gram can be E[h^T h] of h with `size` entries: the inputs or (name "output_gram") the loss's
    gradients at the outputs. That it is positive semi-definite is checked where it is scaled (metric.py)."""
    of_inputs = name == "gram"
    _check_dense(name, gram, GramError)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        moment = "E[h^T h]" if of_inputs else "E[g^T g]"
        raise GramError(f"{name} has shape {tuple(gram.shape)}, not square; give {moment} of shape ({size}, {size})")
    if gram.shape[0] != size:
        if of_inputs:
            raise GramError(
                f"gram has size {gram.shape[0]} but weight has d_in={size}; the Gram is of the inputs (weight is (d_in, "
                "d_out): transpose an nn.Linear.weight)"
            )
        raise GramError(
            f"output_gram has size {gram.shape[0]} but weight has d_out={size}; it is of the loss's gradients at the "
            "outputs (weight is (d_in, d_out): transpose an nn.Linear.weight)"
        )
    if not gram.is_floating_point():
        raise GramError(f"{name} has dtype {gram.dtype}; give a floating-point matrix, e.g. {name}.float()")
    if (bad := _first_non_finite(gram)) is not None:
        raise GramError(f"{name}{bad}: every entry must be finite in float32")
    asymmetry = (gram - gram.T).abs()
    i, j = divmod(int(asymmetry.argmax()), gram.shape[1])
    if float(asymmetry[i, j]) > SYMMETRY_TOLERANCE * float(gram.abs().max()):
        value, mirrored = float(gram[i, j]), float(gram[j, i])
        raise GramError(
            f"{name} is not symmetric: {name}[{i}, {j}] = {value:g} but {name}[{j}, {i}] = {mirrored:g}; give h.T @ h, or "
            f"({name} + {name}.T) / 2 if this is rounding"
        )
    negative = (gram.diagonal() < 0).nonzero()
    if len(negative):
        j = int(negative[0])
        raise GramError(f"{name}[{j}, {j}] = {float(gram[j, j]):g}: the diagonal, a mean square, cannot be negative")
    if not bool(gram.diagonal().any()):
        raise (
            GramError("gram has an all-zero diagonal: no input was ever active; give gram=None for zero-data")
            if of_inputs
            else GramError("output_gram has an all-zero diagonal: the loss depends on no output; give output_gram=None")
        )


def _check_dense(name: str, matrix: Any, raised_as: type[Exception]) -> None:
    if not isinstance(matrix, Tensor):
        raise raised_as(f"{name} is a {type(matrix).__name__}; give a torch.Tensor, e.g. torch.as_tensor({name})")
    if matrix.layout != torch.strided or matrix.is_nested or matrix.is_meta:
        kind = "on the meta device" if matrix.is_meta else "nested" if matrix.is_nested else f"{matrix.layout}"
        raise raised_as(f"{name} is {kind}; give a dense matrix with its values, e.g. {name}.to_dense()")


def check_sparsity(sparsity: Any) -> None:
    """Raise SparsityError unless sparsity is a number with 0 < sparsity < 1."""
    if not is_number(sparsity) or not 0.0 < sparsity < 1.0:  # NaN fails this, too
        raise SparsityError(f"sparsity={quoted(sparsity)}: give a number inside (0, 1); s = 1 - K / numel(W)")


def sparsity_of(edges: Any, numel: int, spec: SolveSpec) -> float:
    """1 - K / numel(W), below zero where K is more. Raises SparsityError: no whole number of at least 2, or numel(W) and more
    where the solver needs fewer."""
    bounded("edges", edges, 2, error=SparsityError)
    if edges >= numel and not spec.any_width:
        raise SparsityError(
            f"edges={edges:,}: the weight has {numel:,} entries, and this solver (preset) makes factors of fewer; the annealed "
            'one (preset="best") takes more'
        )
    return 1 - edges / numel


def is_number(value: Any) -> bool:
    """Whether it is a real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_tokens(tokens: int | None) -> None:
    """Raise ValueError unless tokens is None or a positive whole number: how many the Gram was averaged over."""
    if tokens is not None:
        bounded("tokens", tokens, 1)


def resolve_units(units: int | float | str | None, d_in: int, d_out: int, spec: SolveSpec) -> int:
    """The number of units meant: None = one per coordinate that they start as, "2x" = twice that, or the number itself. Raises
    UnitsError: not one of these, below 1, more than d_in * d_out, or not the standard number where the solver knows no other."""
    standard = spec.coordinates(d_in, d_out)
    number = standard if units is None else units
    if isinstance(units, str):
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)x", units.strip())
        if match is None:
            raise UnitsError(
                f"units={quoted(units)}: give a number, None for {standard}, one per coordinate that units start as, or "
                '"2x" for twice that'
            )
        number = round(float(match[1]) * standard)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= d_in * d_out:
        raise UnitsError(
            f"units={quoted(units)}: give a whole number from 1 to {d_in * d_out}, None for min(d_in, d_out) = "
            f'{standard}, or "2x" for twice that'
        )
    if not spec.any_width and number != standard:
        what = "the paper's solver" if spec.solver == "dsf" else "pruning"
        raise UnitsError(
            f"units={quoted(units)}: {what} is defined for {standard} units, one per coordinate that they start as; leave "
            'units=None, or take preset="best", which knows any number'
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
