"""Swaps (swaps.py): entries that are worth least go for those that lower the error most."""

import math

import pytest
import torch

from swd_lens.solver import pieces, solve
from swd_lens.solver.anneal import factorize
from swd_lens.solver.budget import plan_shares
from swd_lens.solver.metric import Metric
from swd_lens.solver.spec import PRESETS, AnnealSpec
from swd_lens.solver.swaps import filled, swapped
from tests.benchmarks.planted import Row, error, planted, support_f1

ROW = Row(128, 64, 64, 4, 4)
IDENTITY = Metric.of(None, torch.zeros(1, 1), 0.0)


def test_what_is_missing_is_filled_with_what_lowers_the_loss_most():
    """Of reads (1, 2) by writes (3, 1) without the read 2 and the write 1: at first 2 is worth (2*3)^2 and 1 is worth (1*1)^2."""
    target = torch.outer(torch.tensor([1.0, 2.0]), torch.tensor([3.0, 1.0]))
    read, write = torch.tensor([[1.0], [0.0]]), torch.tensor([[3.0, 0.0]])
    one = filled(read, write, target, IDENTITY, 3)
    assert one[0].flatten().tolist() == [1.0, 2.0] and torch.equal(one[1], write)
    two = filled(read, write, target, IDENTITY, 4)
    assert two[0].flatten().tolist() == [1.0, 2.0] and two[1].flatten().tolist() == [3.0, 1.0]
    assert all(torch.equal(*pair) for pair in zip(filled(*one, target, IDENTITY, 3), one, strict=True))
    eye, diagonal = torch.eye(8).double(), torch.diag(torch.arange(1.0, 9.0)).double()
    read, write = swapped(eye, diagonal, diagonal, IDENTITY, 16)  # nothing to spare: every unit keeps an entry on either side
    assert torch.equal(read, eye) and torch.equal(write, diagonal)


def test_gains_are_in_the_metric():
    """With inputs that correlate, a read's best value alone is the projection under C, and its gain what the loss falls by."""
    g = torch.Generator().manual_seed(0)
    samples = torch.randn(200, 6, generator=g, dtype=torch.float64) @ torch.randn(6, 6, generator=g, dtype=torch.float64)
    gram = samples.T @ samples / 200
    weight = torch.randn(6, 5, generator=g, dtype=torch.float64)
    metric = Metric.of(gram, weight, 0.0)
    target = weight * metric.scale
    read = torch.zeros(6, 2, dtype=torch.float64)
    read[0, 0] = read[3, 1] = 1.0
    write = torch.randn(2, 5, generator=g, dtype=torch.float64)
    before = metric.error(target, read, write)
    found = filled(read, write, target, metric, int(read.count_nonzero() + write.count_nonzero()) + 1)
    assert int(found[0].count_nonzero()) == 3 and torch.equal(found[1], write)
    reached = metric.error(target, *found)
    new = ((found[0] != 0) & (read == 0)).nonzero()[0]
    for i, j in (read == 0).nonzero().tolist():  # no other single read, at any value, is better
        trial = read.clone()
        trial[i, j] = 1.0
        change = trial - read
        weighed = metric.weigh(change @ write)
        step = float((weighed * (target - read @ write)).sum() / (weighed * (change @ write)).sum())
        assert metric.error(target, read + step * change, write) >= reached - 1e-12
        if [i, j] == new.tolist():
            assert step == pytest.approx(float(found[0][i, j]))
    assert reached < before


def test_swaps_repair_factors_with_wrong_entries():
    truth = planted(Row(64, 48, 24, 4, 4), 0)
    target = truth.weight.double()
    read, write = truth.read.double(), truth.write.double()
    g = torch.Generator().manual_seed(1)
    for unit in range(0, 24, 4):  # an entry of every fourth unit is lost, and another one put in its place
        lost = int(read[:, unit].abs().argmax())
        read[lost, unit] = 0.0
        free = (read[:, unit] == 0).nonzero().flatten()
        read[free[torch.randint(len(free), (1,), generator=g)], unit] = 0.01
    before = support_f1(truth, read, write), error(truth, read.float(), write.float())
    found = swapped(read, write, target, IDENTITY, truth.edges)
    assert int(found[0].count_nonzero() + found[1].count_nonzero()) <= truth.edges
    assert support_f1(truth, *found) > before[0] and error(truth, found[0].float(), found[1].float()) < 0.1 * before[1]


@pytest.mark.parametrize("preset", ["best", "quick", "thorough", "deep"])
def test_planted_factors_are_found_exactly(preset: str):
    truth = planted(ROW, 0)
    steps: list[tuple[int, int, float]] = []
    sparsity = 1 - truth.edges / truth.weight.numel()
    seen = {"on_iteration": lambda step: steps.append((step.iteration, step.total, step.relmse()))}
    found = solve(truth.weight, None, sparsity, preset=preset, **seen)
    total = found.settings["outer_iterations"]
    assert [step[:2] for step in steps] == [(total, total)] and steps[0][2] < 1e-10  # nothing is left to alternate for
    assert support_f1(truth, found.read, found.write) == 1.0 and error(truth, found.read, found.write) < 1e-5
    if preset == "best":
        plain = solve(truth.weight, None, sparsity, start="coordinates")
        assert support_f1(truth, plain.read, plain.write) < 0.75


def test_noise_is_told_from_entries():
    truth = planted(Row(128, 64, 64, 4, 4, "noise 0.05"), 3)
    sparsity = 1 - truth.edges / truth.weight.numel()
    steps: list[int] = []
    found = solve(truth.weight, None, sparsity, on_iteration=lambda step: steps.append(step.iteration))
    assert steps == list(range(40, 57))
    assert support_f1(truth, found.read, found.write) > 0.9
    assert error(truth, found.read, found.write) < 1.1 * error(truth, truth.read, truth.write)


def test_correlated_inputs_hide_no_piece():
    truth = planted(Row(128, 64, 64, 8, 8, "correlated"), 0)
    found = solve(truth.weight, truth.gram, 1 - truth.edges / truth.weight.numel())
    assert support_f1(truth, found.read, found.write) > 0.99 and error(truth, found.read, found.write) < 0.01


def test_of_several_starts_the_lowest_error_counts(monkeypatch):
    monkeypatch.setattr("swd_lens.solver.spec.PATIENCE", {"births": 2, "rotations": 3})
    truth = planted(Row(48, 24, 24, 4, 4, "noise 0.05"), 2)  # of which each dearer start is better
    weight, sparsity = truth.weight.double(), 1 - truth.edges / truth.weight.numel()
    changes = {"late": 0.0, "outer_iterations": 8, "refine_rounds": 1}
    spec = PRESETS["best"].changed(changes).for_matrix(48, 24, 24, calibrated=False)
    assert isinstance(spec, AnnealSpec)
    budget = plan_shares(48, 24, sparsity, 24, spec)
    dearer = [spec.changed({"rho_start": spec.rho_start * 2**n}) for n in range(3)]
    alone = [factorize(weight, None, 24, budget, each, 0.0) for each in dearer]
    errors = [float((weight - torch.matmul(*each)).norm()) for each in alone]
    assert errors == sorted(errors, reverse=True) and len(set(errors)) == 3
    for restarts in range(3):
        found = factorize(weight, None, 24, budget, spec.changed({"restarts": restarts}), 0.0)
        assert math.isclose(float((weight - torch.matmul(*found)).norm()), min(errors[: restarts + 1]), rel_tol=1e-9)


def test_the_search_can_be_left_out(monkeypatch):
    def fail(*_: object) -> None:
        raise AssertionError

    monkeypatch.setattr(pieces, "peeled", fail)
    truth = planted(Row(64, 32, 32, 4, 4), 0)
    solve(truth.weight, None, 0.6, start="coordinates", outer_iterations=4)
    solve(truth.weight, None, 0.6, basis="input", outer_iterations=4)
    with pytest.raises(AssertionError):
        solve(truth.weight, None, 0.6, outer_iterations=4)
