"""Selection against a full sort, including ties."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swd_lens.solver import support
from swd_lens.solver.support import first_largest, keep_above, keep_exactly, kth_largest, kth_largest_estimate, tie_floor


def sorted_descending(magnitude: torch.Tensor) -> torch.Tensor:
    return magnitude.flatten().sort(descending=True).values


def test_by_hand():
    magnitude = torch.tensor([[3.0, 1.0, 2.0], [2.0, 0.0, 2.0]])
    assert float(kth_largest(magnitude, 1)) == 3.0
    assert float(kth_largest(magnitude, 4)) == 2.0
    # Three 2s tie at the threshold; one place is left after the 3, then two.
    assert keep_exactly(magnitude, 2).tolist() == [[True, False, True], [False, False, False]]
    assert keep_exactly(magnitude, 3).tolist() == [[True, False, True], [True, False, False]]
    assert keep_above(magnitude, 3).tolist() == [[True, False, False], [False, False, False]]
    assert keep_above(magnitude, 5).tolist() == [[True, False, True], [True, False, True]]
    assert bool(keep_above(magnitude, 7).all())  # more than there are
    assert keep_above(magnitude, 5, out=magnitude) is magnitude
    assert magnitude.tolist() == [[1.0, 0.0, 1.0], [1.0, 0.0, 1.0]]


@pytest.mark.parametrize("shape", [(512, 1024), (300, 701), (1, 200_000), (200_000, 1)])
@pytest.mark.parametrize("fraction", [0.0, 0.001, 0.25, 0.5, 0.999, 1.0])
def test_the_search_is_exact(shape: tuple[int, int], fraction: float):
    magnitude = torch.randn(shape, generator=torch.Generator().manual_seed(0)).abs()
    k = max(1, round(fraction * magnitude.numel()))
    assert kth_largest(magnitude, k) == sorted_descending(magnitude)[k - 1]
    assert int(keep_exactly(magnitude, k).sum()) == k


def test_columns_of_different_scale_many_zeros_and_few_levels():
    magnitude = torch.rand(512, 1024, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, 1024)
    for k in (1, 1000, 262_144, 524_000):
        assert kth_largest(magnitude, k) == sorted_descending(magnitude)[k - 1]
    values = torch.randn(400, 400, generator=torch.Generator().manual_seed(3)).abs().half().float()
    values[values < 0.7] = 0.0
    for k in (10, 50_000, 120_000, 159_999):  # the last two lie inside the zeros
        kept = keep_exactly(values, k)
        assert int(kept.sum()) == k
        assert values[kept].min() >= values[~kept].max()
        assert int(keep_above(values, k).sum()) == int((values > sorted_descending(values)[k - 1]).sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_rounding_could_have_parted_ties(dtype: torch.dtype):
    slack = support.TIED[dtype] / 4
    for parted in ([0, 1, -1, 0], [1, 0, 0, -1], [-1, 1, 0, 1]):
        magnitude = torch.tensor([[3.0, *(2 * (1 + slack * p) for p in parted), 1.0]], dtype=dtype)
        assert keep_exactly(magnitude, 3).tolist() == [[True, True, True, False, False, False]]
        assert int(first_largest(magnitude[:, 1:], 1)) == 0
        assert bool((magnitude[0, 1:5] >= tie_floor(magnitude[0, 1:5].max())).all())
    apart = torch.tensor([[2.0, 2 * (1 + 4 * support.TIED[dtype])]], dtype=dtype)
    assert keep_exactly(apart, 1).tolist() == [[False, True]] and int(first_largest(apart, 1)) == 1


def test_where_the_estimate_is_exact():
    values = torch.randn(100, 200, generator=torch.Generator().manual_seed(4))
    for k in (1, 77, 20_000):
        assert kth_largest_estimate(values, k) == float(sorted_descending(values.abs())[k - 1])
    large = torch.rand(400, 400, generator=torch.Generator().manual_seed(6)) + 1  # and within the values at both ends of others
    assert all(1 <= kth_largest_estimate(large, k) <= 2 for k in (1, 400 * 400))
    # A square factor of units that start as neurons: the diagonal, and little beside it.
    values = torch.randn(512, 512, generator=torch.Generator().manual_seed(7)) + 9 * torch.eye(512)
    for k in (1, 512, 2_000):
        assert kth_largest_estimate(values, k) == float(sorted_descending(values.abs())[k - 1])


@pytest.mark.parametrize("shape", [(512, 1024), (1024, 512), (700, 300)])
@pytest.mark.parametrize("share", [0.01, 0.25, 0.5, 0.9])
def test_the_estimate_keeps_about_k(shape: tuple[int, int], share: float):
    g = torch.Generator().manual_seed(5)
    values = torch.randn(shape, generator=g) * torch.logspace(-2, 2, shape[1])  # columns of different scale
    k = round(share * values.numel())
    kept = int((values.abs() >= kth_largest_estimate(values, k)).sum())
    # A quantile of 32,768 samples: one sigma is sqrt(share (1 - share) / 32,768) of the entries, .3 % at most; five.
    assert abs(kept - k) / values.numel() < 5 * math.sqrt(share * (1 - share) / 32_768)
    assert kept != k  # the sample's, not the matrix's: else the exact search was taken


@pytest.mark.parametrize("k", [0, 7])
def test_rank_out_of_range(k: int):
    with pytest.raises(ValueError, match=f"k={k}: give a rank from 1 to 6"):
        kth_largest(torch.zeros(2, 3), k)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_any_small_matrix(data: st.DataObject, rows: int, columns: int):
    n = rows * columns
    entries = data.draw(st.lists(st.integers(0, 5), min_size=n, max_size=n))
    k = data.draw(st.integers(1, n))
    magnitude = torch.tensor(entries, dtype=torch.float32).view(rows, columns)
    assert float(kth_largest(magnitude, k)) == sorted(entries, reverse=True)[k - 1]
    assert int(keep_exactly(magnitude, k).sum()) == k


@pytest.mark.parametrize("n", [384, 576])  # 385 = 5 x 7 x 11: of every fifth entry the diagonal's are five times too many
def test_a_square_factors_diagonal_is_sampled_as_often_as_the_rest(n: int):
    values = torch.rand(n, n, generator=torch.Generator().manual_seed(0)) + 2 * torch.eye(n)
    sample = support.magnitude_sample(values)
    assert float((sample >= 2).float().mean()) == pytest.approx(1 / n, rel=0.25)
    k = n + n * n // 7
    assert int((values >= support.kth_largest_estimate(values, k)).sum()) == pytest.approx(k, abs=0.014 * n * n)
