"""Where units start (start.py)."""

import torch

from swd_lens.factorization.solve import solve
from swd_lens.solver import Budget, automatic
from swd_lens.solver.metric import Metric
from swd_lens.solver.spec import AnnealSpec
from swd_lens.solver.start import is_product, owners, share_out, start, turned
from swd_lens.truth.planted import Plant, planted
from tests.solver.matrices import assert_same_bits, gram_of, weight_of


def test_the_seed_deals_the_copies_and_budgets_are_shared_out():
    weight, gram = weight_of((20, 32)), gram_of(20)
    first, second = (solve(weight, gram, units="2x", seed=seed, outer_iterations=4) for seed in (0, 1))
    assert not torch.equal(first.read, second.read)
    one, other = (solve(weight, gram, seed=seed, outer_iterations=4) for seed in (0, 1))
    assert_same_bits(one, other)  # nothing to deal
    read, write = start(weight_of((4, 9)), 4, Budget(6, 20), AnnealSpec())
    for reads, shares in ((10, (10, 16)), (0, (4, 22)), (99, (16, 10))):
        share_out(read, write, reads)
        assert (read.budget, write.budget) == shares


def test_units_start_as_coordinates_of_the_short_side_and_none_is_empty():
    """Five units of three coordinates: one each, then the two of largest norm again."""
    target = torch.tensor([[1.0, 0.0, 0.0, 0.5], [3.0, 1.0, 0.0, 0.0], [0.0, 0.0, 2.0, 2.0]])
    owner, copy = owners(target, 5)
    assert owner.tolist() == [0, 1, 2, 1, 2] and copy.tolist() == [0, 0, 0, 1, 1]
    read, write = start(target, 5, Budget(5, 8), AnnealSpec())
    assert torch.equal(read.factor, torch.nn.functional.one_hot(owner, 3).T.float())
    assert bool(write.factor.any(1).all()) and bool(((write.factor == 0) | (write.factor == target[owner])).all())


def test_a_rotated_start_is_the_target_seen_from_turned_coordinates():
    """Orthogonal, two nonzeros a direction; with room for everything the start is the target, and no unit is a coordinate."""
    target = weight_of((6, 9))
    directions = turned(target, 3)
    torch.testing.assert_close(directions.T @ directions, torch.eye(6))
    assert (directions != 0).sum(0).tolist() == [2] * 6 and not torch.equal(directions, turned(target, 4))
    assert int((turned(weight_of((5, 9)), 0) != 0).sum()) == 9  # one of five stays as it is
    read, write = start(target, 6, Budget(36, 54), AnnealSpec(start="rotated", start_share=1.0, seed=3))
    assert torch.equal(read.factor, directions)
    torch.testing.assert_close(read.factor @ write.factor, target)
    tall = weight_of((9, 6))
    read, write = start(tall, 6, Budget(36, 54), AnnealSpec(start="rotated", start_share=1.0, seed=3))
    assert torch.equal(write.factor, turned(tall.T, 3).T)
    torch.testing.assert_close(read.factor @ write.factor, tall)


def test_a_rotated_start_ends_elsewhere_at_about_the_same_error():
    weight, gram = weight_of((20, 32)), gram_of(20)
    plain, one, again, other = (
        solve(weight, gram, 0.5, outer_iterations=24, start=name, seed=seed)
        for name, seed in (("coordinates", 0), ("rotated", 1), ("rotated", 1), ("rotated", 2))
    )
    assert_same_bits(one, again)
    assert not torch.equal(one.read, other.read) and not torch.equal(one.read, plain.read)
    errors = [f.relative_frobenius(weight) for f in (plain, one, other)]
    assert max(errors) < 1.25 * min(errors)


def test_products_of_sparse_factors_are_told_from_ordinary_matrices():
    """Also where inputs are of very unequal scale, which makes a matrix sparse, but not its rows."""
    auto, plant = AnnealSpec(), Plant(40, 24, 16, 3, 3, noise=0.1)
    product = planted(plant, 0).weight.double()
    assert is_product(product, auto)
    for other in (AnnealSpec(start="coordinates"), AnnealSpec(start="rotated"), AnnealSpec(basis="input")):
        assert not is_product(product, other)
    for shape in ((24, 10), (10, 24), (16, 16), (64, 32)):
        scaled = Metric.scaled(weight_of(shape).double(), gram_of(shape[0]).double(), 0.0)[1]
        assert not is_product(weight_of(shape).double(), auto) and not is_product(scaled, auto)


def test_a_product_is_solved_with_patience_and_comes_no_less_near(monkeypatch):
    monkeypatch.setitem(automatic.PATIENCE, "rotations", 10)
    drawn = planted(Plant(40, 24, 16, 3, 3, noise=0.01), 0)
    how = {"edges": drawn.edges, "units": 16}
    patient, plain = (solve(drawn.weight, **how, start=start) for start in ("auto", "coordinates"))
    assert patient.relative_frobenius(drawn.weight) < 0.9 * plain.relative_frobenius(drawn.weight)
    # A share that is given is kept.
    [given] = AnnealSpec(square_share=0.3).for_matrix(40, 24, 16, calibrated=False).patient()
    assert given.balance == 0.0 and given.rotations > 0 and AnnealSpec(rotations=1600, balance=0.0).patient()[0].rotations == 1600
