"""The two kernels of h @ factor: they agree, in value and gradient; the choice is the factor's alone; nothing is copied."""

import copy

import pytest
import torch
from torch import nn

from swd_lens.units.kernels import FactorProduct, choose

ROWS, COLUMNS = 24, 18
KERNELS = ("dense", "sparse")


def sparse_factor(density: float, rows: int = ROWS, columns: int = COLUMNS, dtype: torch.dtype = torch.float32):
    """Exactly round(density * rows * columns) nonzeros."""
    generator = torch.Generator().manual_seed(0)
    factor = torch.zeros(rows * columns, dtype=dtype)
    places = torch.randperm(len(factor), generator=generator)[: round(density * len(factor))]
    factor[places] = torch.randn(len(places), generator=generator, dtype=dtype)
    return factor.view(rows, columns)


@pytest.fixture
def factor():
    return sparse_factor(0.3)


def inputs(*shape: int, dtype: torch.dtype = torch.float32):
    return torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(1))


def relative(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((found - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("kernel", KERNELS)
def test_by_hand(kernel):
    # h = (1, 10), factor = [[2, 0], [0, 3]], bias = (100, 200): (2 + 100, 30 + 200)
    product = FactorProduct(torch.tensor([[2.0, 0.0], [0.0, 3.0]]), kernel)
    h = torch.tensor([[1.0, 10.0]])
    assert product(h).tolist() == [[2.0, 30.0]]
    assert product(h, torch.tensor([100.0, 200.0])).tolist() == [[102.0, 230.0]]


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("batch", [(), (1,), (5,), (2, 3), (0, 3), (127,), (128,), (129,), (2, 2, 100)])
def test_every_batch_shape(factor, kernel, batch):
    # 127 to 129 and 400 rows: below, at and above one piece of the sparse kernel, and several.
    h, bias = inputs(*batch, ROWS, dtype=torch.float64), inputs(COLUMNS, dtype=torch.float64)
    product = FactorProduct(factor.double(), kernel)
    wanted = torch.einsum("...i,io->...o", h, factor.double())
    torch.testing.assert_close(product(h), wanted)
    torch.testing.assert_close(product(h, bias), wanted + bias)
    assert product(h, bias).is_contiguous()
    torch.testing.assert_close(product(h.transpose(0, -1).contiguous().transpose(0, -1)), wanted)  # not contiguous
    empty = FactorProduct(torch.zeros_like(factor).double(), kernel)
    assert torch.equal(empty(h, bias), bias.expand(*batch, -1))


def test_float32_kernels_agree_at_full_size():
    factor, h, bias = sparse_factor(0.25, 768, 768), inputs(2, 150, 768), inputs(768)
    dense, sparse = (FactorProduct(factor, kernel)(h, bias) for kernel in KERNELS)
    assert relative(sparse, dense) < 1e-6
    exact = h.double() @ factor.double() + bias.double()
    assert relative(sparse.double(), exact) < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_same_bits_every_time(factor, kernel):
    h, bias = inputs(300, ROWS), inputs(COLUMNS)
    first = FactorProduct(factor, kernel)(h, bias)
    assert all(torch.equal(FactorProduct(factor.clone(), kernel)(h, bias), first) for _ in range(5))
    tracked = FactorProduct(factor, kernel)(h.clone().requires_grad_(True), bias)
    assert torch.equal(tracked, first), "with a gradient path the forward is the same"


@pytest.mark.parametrize("kernel", KERNELS)
def test_gradcheck(kernel):
    product = FactorProduct(sparse_factor(0.3, 5, 4, torch.float64), kernel)
    h = inputs(2, 3, 5, dtype=torch.float64).requires_grad_(True)
    bias = inputs(4, dtype=torch.float64).requires_grad_(True)
    assert torch.autograd.gradcheck(product, (h,), check_forward_ad=True)
    assert torch.autograd.gradcheck(product, (h, bias), check_forward_ad=True)
    assert torch.autograd.gradcheck(lambda b: product(h.detach(), b), (bias,), check_forward_ad=True)
    # Through a square: of a product alone every second derivative is zero.
    assert torch.autograd.gradgradcheck(lambda h, b: product(h, b).square(), (h, bias))


@pytest.mark.parametrize("kernel", KERNELS)
def test_torch_func(factor, kernel):
    product, h = FactorProduct(factor, kernel), inputs(ROWS)
    assert relative(torch.func.jacrev(product)(h), factor.T) < 1e-6
    assert relative(torch.func.jacfwd(product)(h), factor.T) < 1e-6
    h, bias = inputs(7, 3, ROWS), inputs(7, COLUMNS)
    assert relative(torch.func.vmap(product, (0, None))(h, bias[0]), h @ factor + bias[0]) < 1e-6
    assert relative(torch.func.vmap(product)(h, bias), h @ factor + bias[:, None]) < 1e-6
    assert relative(torch.func.vmap(product, (None, 0))(h[0], bias), h[0] @ factor + bias[:, None]) < 1e-6


@pytest.mark.parametrize("kernel", KERNELS)
def test_moves_copies_and_hides(factor, kernel):
    product = nn.Sequential(FactorProduct(factor, kernel))
    h = inputs(4, ROWS)
    wanted = product(h)
    assert product.state_dict() == {} and list(product.parameters()) == []
    assert torch.equal(product.eval()(h), wanted) and torch.equal(product.train()(h), wanted)
    twin = copy.deepcopy(product)
    assert torch.equal(twin(h), wanted)
    assert twin[0].factor.data_ptr() != product[0].factor.data_ptr()
    double = twin.to(torch.float64)(h.double())
    assert double.dtype == torch.float64 and relative(double, h.double() @ factor.double()) < 1e-12
    assert product[0].factor.dtype == torch.float32
    with torch.no_grad():
        assert torch.equal(product(h), wanted)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_dense(factor, kernel, dtype):
    product, h, bias = FactorProduct(factor, kernel).to(dtype), inputs(4, ROWS).to(dtype), inputs(COLUMNS).to(dtype)
    assert torch.equal(product(h, bias), torch.addmm(bias, h, factor.to(dtype)))
    few = sparse_factor(0.01, 200, 200)
    assert choose(few) == "sparse" and choose(few.to(dtype)) == "dense"


@pytest.mark.parametrize("kernel", KERNELS)
def test_autocast_rules(factor, kernel):
    h, bias = inputs(4, ROWS), inputs(COLUMNS)
    product = FactorProduct(factor, kernel)
    with torch.autocast("cpu", torch.bfloat16):
        assert product(h, bias).dtype == torch.bfloat16
    assert product(h, bias).dtype == torch.float32


@pytest.mark.parametrize("kernel", KERNELS)
def test_compiles_as_one_graph(factor, kernel):
    product, h, bias = FactorProduct(factor, kernel), inputs(4, ROWS), inputs(COLUMNS)
    # Without jaxtyping's check, which this test run puts around it and a user's does not.
    forward = getattr(FactorProduct.forward, "__wrapped__", FactorProduct.forward)
    compiled = torch.compile(lambda h: forward(product, h, bias), fullgraph=True, backend="eager")
    assert relative(compiled(h), product(h, bias)) < 1e-6


def test_choice_follows_the_bytes():
    # 100 x 100 float32: 40,000 bytes dense, so 4,000 may be added; 101 row pointers take 404, a nonzero 8: 449 fit.
    factor = torch.zeros(10_000)
    factor[:449] = 1.0
    assert choose(factor.view(100, 100)) == "sparse"
    factor[449] = 1.0
    assert choose(factor.view(100, 100)) == "dense"


def test_kernel_can_be_told(factor):
    assert FactorProduct(factor).kernel == "dense"
    assert FactorProduct(factor, "sparse").kernel == "sparse"
    assert FactorProduct(sparse_factor(0.01, 200, 200)).kernel == "sparse"
    assert FactorProduct(sparse_factor(0.01, 200, 200), "dense").kernel == "dense"
    with pytest.raises(ValueError, match="kernel must be one of 'auto', 'dense', 'sparse', got 'fast'"):
        FactorProduct(factor, "fast")
    assert repr(FactorProduct(factor, "sparse")) == "FactorProduct(24 x 18, sparse)"


@pytest.mark.parametrize("density", [0.01, 0.04, 0.05, 0.25])
def test_memory_stays_within_a_tenth_more(density):
    factor = sparse_factor(density, 300, 200)
    product = FactorProduct(factor)
    assert product.kernel == ("sparse" if density < 0.05 else "dense")
    storages = {b.untyped_storage().data_ptr(): b.untyped_storage().nbytes() for b in product.buffers()}
    assert factor.data_ptr() in storages, "the caller's tensor is shared, not copied"
    assert factor.nbytes <= sum(storages.values()) <= 1.1 * factor.nbytes
