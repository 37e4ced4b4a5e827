"""What the solver refuses, each with its own error that names the value and the way out.

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

from swd_lens.base.errors import GramError, WeightError, error
from swd_lens.solver.spec import SolveSpec

# A Gram summed in float32 may be asymmetric by rounding; more than this share of its largest entry is a mistake.
SYMMETRY_TOLERANCE = 1e-4


def check_weight(weight: Any) -> None:
    """Raise WeightError unless weight is a dense (d_in, d_out) matrix of finite floats with a non-zero entry."""
    _check_dense("weight", weight, WeightError)
    if weight.ndim != 2:
        raise error("weight-not-a-matrix", shape=tuple(weight.shape))
    if weight.numel() == 0:
        raise error("weight-empty", shape=tuple(weight.shape))
    if not weight.is_floating_point():
        raise error("weight-not-floating", dtype=weight.dtype)
    if (bad := _first_non_finite(weight)) is not None:
        raise error("weight-not-finite", entry=bad)
    if not bool(weight.any()):
        raise error("weight-all-zeros", shape=tuple(weight.shape))


def check_gram(gram: Any, size: int, name: str = "gram") -> None:
    """Raise GramError unless gram can be E[h^T h] of h with `size` entries: the inputs or (name "output_gram") the loss's
    gradients at the outputs. That it is positive semi-definite is checked where it is scaled (metric.py)."""
    of_inputs = name == "gram"
    _check_dense(name, gram, GramError)
    if gram.ndim != 2 or gram.shape[0] != gram.shape[1]:
        moment = "E[h^T h]" if of_inputs else "E[g^T g]"
        raise error("gram-not-square", name=name, shape=tuple(gram.shape), moment=moment, size=size)
    if gram.shape[0] != size:
        if of_inputs:
            raise error("gram-of-another-size", size=gram.shape[0], d_in=size)
        raise error("output-gram-of-another-size", size=gram.shape[0], d_out=size)
    if not gram.is_floating_point():
        raise error("gram-not-floating", name=name, dtype=gram.dtype)
    if (bad := _first_non_finite(gram)) is not None:
        raise error("gram-not-finite", name=name, entry=bad)
    _check_symmetric(gram, name)
    negative = (gram.diagonal() < 0).nonzero()
    if len(negative):
        j = int(negative[0])
        raise error("gram-diagonal-negative", name=name, j=j, value=float(gram[j, j]))
    if not bool(gram.diagonal().any()):
        raise error("gram-diagonal-zero") if of_inputs else error("output-gram-diagonal-zero")


def _check_symmetric(gram: Tensor, name: str) -> None:
    asymmetry = (gram - gram.T).abs()
    worst = int(asymmetry.argmax())
    i, j = divmod(worst, gram.shape[1])
    if float(asymmetry[i, j]) > SYMMETRY_TOLERANCE * float(gram.abs().max()):
        value, mirrored = float(gram[i, j]), float(gram[j, i])
        raise error("gram-not-symmetric", name=name, i=i, j=j, value=value, mirrored=mirrored)


def _check_dense(name: str, matrix: Any, raised_as: type[Exception]) -> None:
    if not isinstance(matrix, Tensor):
        raise error("matrix-not-a-tensor", raised_as=raised_as, name=name, kind=type(matrix).__name__)
    if matrix.layout != torch.strided or matrix.is_nested or matrix.is_meta:
        kind = "on the meta device" if matrix.is_meta else "nested" if matrix.is_nested else f"{matrix.layout}"
        raise error("matrix-not-dense", raised_as=raised_as, name=name, kind=kind)


def check_sparsity(sparsity: Any) -> None:
    """Raise SparsityError unless sparsity is a number with 0 < sparsity < 1."""
    if not is_number(sparsity) or not 0.0 < sparsity < 1.0:  # NaN fails this, too
        raise error("sparsity-outside", sparsity=sparsity)


def is_number(value: Any) -> bool:
    """Whether it is a real number, and no truth value."""
    return isinstance(value, Real) and not isinstance(value, bool)


def check_tokens(tokens: int | None) -> None:
    """Raise ValueError unless tokens is None or a positive whole number."""
    if tokens is not None and (isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 1):
        raise error("gram-tokens-not-a-number", tokens=tokens)


def resolve_units(units: int | float | str | None, d_in: int, d_out: int, spec: SolveSpec) -> int:
    """The number of units meant: None = one per coordinate that they start as, "2x" = twice that, or the number itself.

    Raises:
        UnitsError: not one of these, below 1, more than d_in * d_out, or not the standard number where the solver knows no
            other.
    """
    standard = spec.coordinates(d_in, d_out)
    number = standard if units is None else units
    if isinstance(units, str):
        match = re.fullmatch(r"([0-9]*\.?[0-9]+)x", units.strip())
        if match is None:
            raise error("units-not-a-number", units=units, standard=standard)
        number = round(float(match[1]) * standard)
    if isinstance(number, bool) or not isinstance(number, int) or not 1 <= number <= d_in * d_out:
        raise error("units-outside", units=units, most=d_in * d_out, standard=standard)
    if not spec.any_width and number != standard:
        what = "the paper's solver" if spec.solver == "dsf" else "pruning"
        raise error("units-other-than-the-papers", units=units, standard=standard, what=what)
    return number


def _first_non_finite(matrix: Tensor) -> str | None:
    bad = (~torch.isfinite(matrix.detach().to(torch.float32))).nonzero()
    if not len(bad):
        return None
    i, j = bad[0].tolist()
    value = float(matrix[i, j])
    more = f" (and {len(bad) - 1} more)" if len(bad) > 1 else ""
    return f"[{i}, {j}] is {'nan' if math.isnan(value) else value}{more}"
