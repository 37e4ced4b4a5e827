"""One matrix to Factors, and one task (solve.py)."""

import pytest
import torch

from swd_lens.factorization.workers import solve_task
from swd_lens.units.factors import Factors
from tests.factorization.tasks import task, tasks_of_many_kinds


def test_bits_depend_on_values_not_on_where_they_lie_in_memory():
    plain, *_, transposed, shifted, _short = tasks_of_many_kinds()
    assert not transposed.weight.is_contiguous() and shifted.weight.data_ptr() % 64
    want = solve_task(plain)
    for other in (transposed, shifted):
        got = solve_task(other)
        assert torch.equal(got.read, want.read) and torch.equal(got.write, want.write)
        assert got.relmse == want.relmse


def test_a_result_is_measured_and_has_no_negative_zeros():
    one = task()
    solved = solve_task(one)
    f = Factors(solved.read, solved.write, weight=one.weight)
    assert solved.relmse == pytest.approx(f.relmse(one.gram), rel=1e-9)
    assert solved.relative_frobenius == pytest.approx(f.relative_frobenius(), rel=1e-9)
    for factor in (solved.read, solved.write):
        assert (factor == 0).any() and not (factor.signbit() & (factor == 0)).any()
