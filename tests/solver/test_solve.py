"""Invariants of every solver, and the canonical form of what they give. Numbers against the reference are in test_golden.py.

Equivariances are tested in float64: choosing a support amplifies rounding, and float32 would test luck.
"""

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor

from swd_lens.factorization.solve import solve
from swd_lens.solver import DsfSpec, Step, anneal, canonical, dsf, plan_budget, plan_shares, resolve
from tests.solver.matrices import SHAPES, assert_same_bits, gram_of, weight_of

# Ways to solve: ours, ours with twice the units, the paper's, and the paper's in clean arithmetic.
WAYS: list[dict[str, Any]] = [{}, {"units": "2x"}, {"preset": "paper"}, {"preset": "paper", "arithmetic": "clean"}]
TWO = [{}, {"preset": "paper"}]
every_way = pytest.mark.parametrize("how", WAYS, ids=["best", "2x", "paper", "clean"])
both_ways = pytest.mark.parametrize("how", TWO, ids=["best", "paper"])
every_shape = pytest.mark.parametrize("shape", SHAPES)


def product64(weight: Tensor, gram: Tensor | None, how: dict[str, Any]) -> Tensor:
    """read @ write of factors at s = .5 in float64, without canonical form."""
    weight, metric, shape = weight.double(), None if gram is None else gram.double(), tuple(weight.shape)
    if how.get("preset") == "paper":
        spec = DsfSpec(outer_iterations=12, arithmetic=how.get("arithmetic", "reference"))
        read, write = dsf.factorize(weight, metric, plan_budget(*shape, 0.5, spec), spec)
    else:
        units = 2 * min(shape) if how else min(shape)
        spec = resolve("best", {"outer_iterations": 24}).for_matrix(*shape, units, calibrated=gram is not None)
        read, write = anneal.factorize(weight, metric, units, plan_shares(*shape, 0.5, units, spec), spec, 0.0)
    return read @ write


@every_shape
@pytest.mark.parametrize("how", [WAYS[0], *WAYS[2:]], ids=["best", "paper", "clean"])
def test_permuted_inputs_and_outputs(shape: tuple[int, int], how: dict[str, Any]):
    weight, gram = weight_of(shape), gram_of(shape[0])
    g = torch.Generator().manual_seed(5)
    rows, columns = torch.randperm(shape[0], generator=g), torch.randperm(shape[1], generator=g)
    permuted = product64(weight[rows][:, columns], gram[rows][:, rows], how)
    torch.testing.assert_close(permuted, product64(weight, gram, how)[rows][:, columns], rtol=1e-6, atol=1e-6)


@pytest.mark.quick_cases(2)
@every_shape
@pytest.mark.parametrize(("how", "tolerance"), [({}, 1e-9), ({"preset": "paper"}, 1e-5)], ids=["best", "paper"])
def test_scale_of_the_gram_and_of_the_weight(shape: tuple[int, int], how: dict[str, Any], tolerance: float):
    """Powers of two change no bit of ours (test_anneal.py). Other factors round every entry anew, which nothing may amplify."""
    weight, gram = weight_of(shape), gram_of(shape[0])
    plain, close = product64(weight, gram, how), {"rtol": tolerance, "atol": tolerance}
    for c in (3.0, 1e-20, 1e20):
        torch.testing.assert_close(product64(weight, c * gram.double(), how), plain, **close)
        torch.testing.assert_close(product64(c * weight.double(), gram, how) / c, plain, **close)


@pytest.mark.quick_cases(4)
@every_shape
@every_way
def test_zero_data_is_the_identity_gram(shape: tuple[int, int], how: dict[str, Any]):
    weight, eye = weight_of(shape), torch.eye(shape[0])
    blind = solve(weight, **how)
    for c in (1.0,) if "preset" in how else (1.0, 4.0, 2.0**-30):
        assert_same_bits(blind, solve(weight, c * eye, **how))
    if not how:
        torch.testing.assert_close(product64(weight, 0.3 * eye, how), product64(weight, None, how), rtol=1e-6, atol=1e-6)


@pytest.mark.quick_cases(2)
@every_way
def test_same_inputs_same_bits_whatever_the_callers_settings(how: dict[str, Any]):
    weight, gram = weight_of((64, 96)), gram_of(64)
    asks, copies = weight.clone().requires_grad_(), (weight.clone(), gram.clone())
    plain = solve(asks, gram, **how)
    assert torch.equal(asks, copies[0]) and torch.equal(gram, copies[1])  # left alone
    assert not plain.read.requires_grad and not plain.write.requires_grad
    torch.manual_seed(1)  # copies of a unit are dealt by the spec's own seed
    assert_same_bits(plain, solve(*copies, **how, on_iteration=lambda step: step.relmse()))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(solve(weight, gram, **how), plain)
    torch.set_default_dtype(torch.float64)
    try:
        assert_same_bits(solve(weight, gram, **how), plain)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize(
    ("how", "shape"), [*zip(({}, {"units": "1.5x"}, {"preset": "paper"}), SHAPES, strict=True)], ids=["best", "1.5x", "paper"]
)
def test_more_edges_and_more_iterations_help(shape: tuple[int, int], how: dict[str, Any]):
    weight, gram = weight_of(shape), gram_of(shape[0])
    errors = [solve(weight, gram, sparsity, **how).relmse(gram) for sparsity in (0.75, 0.5, 0.25)]
    assert 1 > errors[0] > errors[1] > errors[2] > 0
    assert errors[1] < solve(weight, gram, **how, outer_iterations=4).relmse(gram)


@both_ways
def test_calibration_helps_under_its_own_gram_and_costs_under_the_identity(how: dict[str, Any]):
    weight, gram = weight_of((48, 64)), gram_of(48)
    calibrated, blind = solve(weight, gram, **how), solve(weight, **how)
    assert calibrated.relmse(gram) < (0.5 if how == {} else 1) * blind.relmse(gram)
    assert blind.relmse() < calibrated.relmse()


KINDS = ("dead inputs", "rows and columns of zeros", "the same, without a Gram")


@pytest.mark.parametrize("kind", KINDS)
@every_way
def test_what_is_dead_hurts_nothing(how: dict[str, Any], kind: str):
    shape = SHAPES[(WAYS.index(how) + KINDS.index(kind)) % 3]
    dead, weight = (0, 7), weight_of(shape)
    gram = None if "without" in kind else gram_of(shape[0], dead=dead if kind == "dead inputs" else ())
    if kind != "dead inputs":
        weight[3], weight[:, 5] = 0.0, 0.0
    factors = solve(weight, gram, 0.4, **how)
    assert bool(torch.isfinite(factors.read).all() and torch.isfinite(factors.write).all())
    assert kind != "dead inputs" or not bool(factors.read[list(dead)].any())
    assert "preset" in how or factors.edges == int(round(0.6 * weight.numel(), 6) + 1e-6)
    assert factors.relmse(gram) < (0.3 if "preset" in how else 0.1)


@pytest.mark.parametrize("shape", [(3, 4), (4, 3), (4, 4), (1, 5), (5, 1), (2, 5), (5, 2)])
@pytest.mark.parametrize("how", [{}, {"preset": "paper", "rounding": "exact"}], ids=["best", "paper"])
def test_tiny_matrices(shape: tuple[int, int], how: dict[str, Any]):
    weight = weight_of((8, 8))[: shape[0], : shape[1]].contiguous()
    factors = solve(weight, None, 0.2, **how)
    assert factors.edges == int(round(0.8 * weight.numel(), 6))
    assert factors.relative_frobenius() < 1


@both_ways
def test_diagonal_weight_is_found_exactly(how: dict[str, Any]):
    # One read and one write edge per unit represent a diagonal matrix, and K is larger than that.
    weight = torch.diag(torch.linspace(1, 2, 12))
    factors = solve(weight, gram_of(12), 0.5, **how)
    assert factors.relmse(gram_of(12)) < 1e-4
    if how:  # the paper's solver, in every entry
        torch.testing.assert_close(factors.product(), weight, rtol=1e-3, atol=1e-3)


@both_ways
def test_progress_is_told_and_an_interrupt_leaves_nothing_changed(how: dict[str, Any]):
    steps: list[tuple[int, int]] = []
    inside: list[str] = []

    def interrupt(step: Step) -> None:
        inside.append(torch.get_float32_matmul_precision())
        if step.iteration == 2:
            raise KeyboardInterrupt

    weight, gram = weight_of((20, 32)), gram_of(20)
    told = {**how, "outer_iterations": 6, "on_iteration": lambda step: steps.append((step.iteration, step.total))}
    plain, before = solve(weight, gram, **told), torch.get_float32_matmul_precision()
    assert steps == [(t, 6) for t in range(1, 7)]
    torch.set_float32_matmul_precision("medium")
    try:
        with pytest.raises(KeyboardInterrupt):
            solve(weight, gram, **how, on_iteration=interrupt)
        assert inside == ["highest", "highest"] and torch.get_float32_matmul_precision() == "medium"
    finally:
        torch.set_float32_matmul_precision(before)
    assert torch.is_grad_enabled() and torch.get_default_dtype() == torch.float32
    assert_same_bits(plain, solve(weight, gram, **how, outer_iterations=6))


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="this torch has one setting")
def test_the_newer_precision_setting_is_kept_by_both_solvers_after_an_interrupt():
    """torch refuses to mix its two settings in one process: a fresh one."""
    program = """
import torch
from swd_lens.solver import solve
matmul = torch.backends.cuda.matmul
matmul.fp32_precision = "tf32"
def look(step):
    seen.append(matmul.fp32_precision)
    if step.iteration == 2:
        raise KeyboardInterrupt
for preset in ("best", "paper"):
    seen = []
    try:
        solve(torch.randn(20, 32), preset=preset, on_iteration=look)
    except KeyboardInterrupt:
        seen.append("interrupted")
    assert seen == ["ieee", "ieee", "interrupted"] and matmul.fp32_precision == "tf32", (seen, matmul.fp32_precision)
"""
    subprocess.run([sys.executable, "-c", program], check=True)


def test_canonical_form_by_hand():
    # Unit 0: norms 3 and 12, so 6 each; the largest write entry is negative: both change sign.
    # Unit 1: norms 5 and 5; the largest write entry is 4, positive: nothing to do.
    read = torch.tensor([[3.0, 3.0], [0.0, 4.0]])
    write = torch.tensor([[0.0, -12.0], [-3.0, 4.0]])
    a, b = canonical(read, write)
    torch.testing.assert_close(a, torch.tensor([[-6.0, 3.0], [0.0, 4.0]]))
    torch.testing.assert_close(b, torch.tensor([[0.0, 6.0], [-3.0, 4.0]]))
    # Of equal magnitudes the first is positive.
    a, b = canonical(torch.ones(1, 2), torch.tensor([[-1.0, 1.0], [1.0, -1.0]]))
    assert b.sign().tolist() == [[1.0, -1.0], [1.0, -1.0]] and a.sign().tolist() == [[-1.0, 1.0]]


def test_units_empty_on_either_side_are_left_alone():
    read = torch.tensor([[0.0, 2.0, 0.0, 1.0], [0.0, 0.0, 0.0, 0.0]])
    write = torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 0.0], [0.0, 4.0]])
    a, b = canonical(read, write)
    assert a[:, :3].equal(read[:, :3]) and b[:3].equal(write[:3])
    assert a[0, 3] == b[3, 1] == 2.0


@pytest.mark.parametrize("scales", [(0, 0), (-12, 12), (20, 3), (-18, -18), (-30, 30), (18, 18)])
def test_product_and_supports_stay_at_any_scale(scales: tuple[int, int]):
    g = torch.Generator().manual_seed(0)
    read = torch.randn(6, 5, generator=g) * (torch.rand(6, 5, generator=g) < 0.6) * 10.0 ** scales[0]
    write = torch.randn(5, 7, generator=g) * (torch.rand(5, 7, generator=g) < 0.6) * 10.0 ** scales[1]
    a, b = canonical(read, write)
    assert torch.equal(a != 0, read != 0) and torch.equal(b != 0, write != 0)
    torch.testing.assert_close(a.double() @ b.double(), read.double() @ write.double(), rtol=1e-5, atol=0)
    # Norms in float64: the squares of 1e-30 are no float32.
    torch.testing.assert_close(a.double().norm(dim=0), b.double().norm(dim=1), rtol=1e-5, atol=0)
    assert bool((b.gather(1, b.abs().argmax(1, keepdim=True)) > 0).all())
