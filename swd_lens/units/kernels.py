"""h @ factor (+ bias): the product that an attached site runs twice, dense or sparse.

1. `FactorProduct` holds one factor (rows, columns) as a non-persistent buffer: the caller's tensor, not a copy.
2. The dense kernel is one `torch.addmm` of the flattened h.
3. The sparse kernel walks the nonzeros (CSR of the factor's transpose), `_PIECE` rows of h at a time; its gradient with
   respect to h goes through the dense factor.
4. `choose` says which: sparse where the nonzeros add at most `_MOST_ADDED` of the factor's bytes, dense otherwise. It
   looks at the factor only, never at a clock, so that the same inputs always give the same bits.

The sparse kernel takes .2 to .4 of the dense one's time at a density of .02, .3 to .5 at .05, .5 to 1 at .1, and 1.1 to 1.5 at .2
(matrices of GPT-2, 512 and 2,048 rows, 1 and 2 threads of an AMD EPYC with AVX-512, torch 2.13 with MKL, float32; `python -m
tests.benchmarks.attach --kernels` measures it anew). Memory decides before time does: a nonzero in CSR takes 8 bytes besides the
dense entry's 4. At sparsity .5 and .75 the factors have densities from .1 to .42, and dense is right for them.
"""

import warnings
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from swd_lens.base.checks import one_of
from swd_lens.base.snapshots import count_nonzeros

KERNELS = ("auto", "dense", "sparse")

_PRECISIONS = (torch.float32, torch.float64)

# What the nonzeros may add to a factor's dense bytes: attached factors stay within 1.1 of their dense size. In float32 that
# is a density of just under .05, where the sparse kernel takes .3 to .5 of the dense one's time.
_MOST_ADDED = 0.1

# Rows of h per sparse product. Transposed they fit the second-level cache (768 x 128 floats are 393 kB): with all 512 or
# 2,048 rows at once (768, 3072) takes 1.3 to 2.5 times as long; 64 and 256 rows differ from 128 by up to a quarter.
_PIECE = 128

_INDEX_BYTES = 4  # MKL's own index type is int32; torch converts int64 in every call


class FactorProduct(nn.Module):
    """h @ factor + bias for one fixed factor.

    Attributes:
        factor: (rows, columns); the very tensor that was given. It follows `.to()`, and state_dict does not list it.
        kernel: "dense" or "sparse", what was chosen. A sparse one still multiplies densely where CSR is no option: off
            the CPU, in half precision, under autocast and inside torch.compile.
    """

    factor: Tensor
    _values: Tensor
    _indices: Tensor
    _pointers: Tensor

    def __init__(self, factor: Float[Tensor, "rows columns"], kernel: str = "auto", n_nonzeros: int | None = None):
        """
        Args:
            n_nonzeros: of the factor, where they are counted already.
            factor: held as it is. Its values must not change afterwards: the sparse kernel has its own copy of the nonzeros. Who
                attaches units has that watched (projection.py).
            kernel: "auto" (see `choose`), "dense" or "sparse".

        Raises ValueError: another kernel.
        """
        super().__init__()
        one_of("kernel", kernel, KERNELS)
        self.kernel = choose(factor, n_nonzeros) if kernel == "auto" else kernel
        self.register_buffer("factor", factor.detach(), persistent=False)
        if self.kernel == "sparse":
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Sparse CS[RC] tensor support is in beta")
                csc = self.factor.to_sparse_csc()  # which is the transpose in CSR
            self.register_buffer("_pointers", csc.ccol_indices().int(), persistent=False)
            self.register_buffer("_indices", csc.row_indices().int(), persistent=False)
            self.register_buffer("_values", csc.values(), persistent=False)

    def forward(
        self, h: Float[Tensor, "*batch rows"], bias: Float[Tensor, " columns"] | None = None
    ) -> Float[Tensor, "*batch columns"]:
        # torch multiplies CSR on the CPU only, and in single and double precision only.
        fits = h.device.type == "cpu" and h.dtype in _PRECISIONS and not torch.is_autocast_enabled("cpu")
        if fits and self.kernel == "sparse" and not torch.compiler.is_compiling():
            pointers, indices, values = self._pointers, self._indices, self._values
            if h.device == values.device and h.dtype == values.dtype:
                return _SparseProduct.apply(h, bias, self.factor, pointers, indices, values)  # pyright: ignore[reportReturnType]
        return _dense(h, self.factor, bias)

    def extra_repr(self) -> str:
        return f"{self.factor.shape[0]} x {self.factor.shape[1]}, {self.kernel}"


def choose(factor: Float[Tensor, "rows columns"], n_nonzeros: int | None = None) -> str:
    """The kernel of a factor: "sparse" on a CPU with MKL, in single or double precision, if its nonzeros are few enough."""
    if factor.device.type != "cpu" or factor.dtype not in _PRECISIONS or not torch.backends.mkl.is_available():
        return "dense"
    n_nonzeros = count_nonzeros(factor) if n_nonzeros is None else n_nonzeros
    added = n_nonzeros * (factor.element_size() + _INDEX_BYTES) + (factor.shape[1] + 1) * _INDEX_BYTES
    return "sparse" if added <= _MOST_ADDED * factor.nbytes else "dense"


def _dense(h: Tensor, factor: Tensor, bias: Tensor | None) -> Tensor:
    """One BLAS call, bias included: `h @ factor + bias` passes over y once more (5 to 17 % longer)."""
    flat = h.reshape(-1, h.shape[-1])
    y = flat @ factor if bias is None else torch.addmm(bias, flat, factor)
    return y.view(*h.shape[:-1], factor.shape[1])


class _SparseProduct(torch.autograd.Function):
    """h @ factor + bias by the nonzeros; differentiable in h and bias, as often as one likes, in both modes."""

    @staticmethod
    def forward(h: Tensor, bias: Tensor | None, factor: Tensor, pointers: Tensor, indices: Tensor, values: Tensor) -> Tensor:
        rows, columns = factor.shape
        transpose = torch.sparse_csr_tensor(pointers, indices, values, (columns, rows), check_invariants=False)
        flat = h.reshape(-1, rows)
        y = flat.new_empty(len(flat), columns)
        for piece, out in zip(flat.split(_PIECE), y.split(_PIECE), strict=True):
            # MKL reads and writes rows of the transposed piece; the copy into y turns it back and adds the bias.
            product = (transpose @ piece.T.contiguous()).T
            out.copy_(product) if bias is None else torch.add(product, bias, out=out)
        return y.view(*h.shape[:-1], columns)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        factor = inputs[2]
        ctx.save_for_backward(factor)
        ctx.save_for_forward(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple:  # pyright: ignore[reportIncompatibleMethodOverride]
        (factor,) = ctx.saved_tensors
        of_h, of_bias = ctx.needs_input_grad[:2]
        flat = grad.reshape(-1, grad.shape[-1])
        return (_dense(grad, factor.T, None) if of_h else None, flat.sum(0) if of_bias else None, *(None,) * 4)

    @staticmethod
    def jvp(ctx: Any, of_h: Tensor | None, of_bias: Tensor | None, *_: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (factor,) = ctx.saved_tensors
        assert of_h is not None  # torch makes missing tangents zeros
        return _dense(of_h, factor, of_bias)

    @staticmethod
    def vmap(info: Any, in_dims: tuple, h: Tensor, bias: Tensor | None, *factor: Tensor) -> tuple:
        """One more batch dimension of h, in front; a bias that differs along it is added afterwards."""
        dim_h, dim_bias, *_ = in_dims
        h = h.expand(info.batch_size, *h.shape) if dim_h is None else h.movedim(dim_h, 0)
        if bias is None or dim_bias is None:
            return _SparseProduct.apply(h, bias, *factor), 0
        y: Any = _SparseProduct.apply(h, None, *factor)
        return y + bias.movedim(dim_bias, 0).view(info.batch_size, *(1,) * (y.ndim - 2), -1), 0
