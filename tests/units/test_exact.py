"""SVD and Random-B: exact, ordered or Haar, reproducible (method.md §4.1). Neurons: W's own coordinates."""

import pytest
import torch

from swd_lens.base.errors import GramError
from swd_lens.units.exact import neuron_factors, random_b_factors, svd_factors

SHAPES = [(24, 10), (10, 24), (16, 16)]


def weight_of(shape: tuple[int, int]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("make", [svd_factors, lambda weight: random_b_factors(weight, 3)], ids=["svd", "random_b"])
def test_exact_and_dense(shape, make):
    weight = weight_of(shape)
    factors = make(weight)
    assert factors.n_units == min(shape)
    torch.testing.assert_close(factors.product(), weight, rtol=1e-5, atol=1e-5)
    assert factors.relative_frobenius() < 1e-6
    assert factors.edges_per_unit.tolist() == [sum(shape)] * min(shape)
    assert factors.settings["edges"] == "dense"
    assert factors.read.dtype == factors.write.dtype == torch.float32


def test_svd_by_hand():
    # [[0, -3], [2, 0]] = 3 * e1 (0, -1)^T + 2 * e2 (1, 0)^T; the sign moves to the read vector.
    factors = svd_factors(torch.tensor([[0.0, -3.0], [2.0, 0.0]]))
    torch.testing.assert_close(factors.read, torch.tensor([[-3.0, 0.0], [0.0, 2.0]]))
    torch.testing.assert_close(factors.write, torch.tensor([[0.0, 1.0], [1.0, 0.0]]))


@pytest.mark.parametrize("shape", SHAPES)
def test_svd_is_ordered_orthogonal_and_sign_fixed(shape):
    weight = weight_of(shape)
    factors = svd_factors(weight)
    torch.testing.assert_close(factors.read.norm(dim=0), torch.linalg.svdvals(weight), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors.write @ factors.write.T, torch.eye(min(shape)), rtol=1e-5, atol=1e-5)
    largest = factors.write.gather(1, factors.write.abs().argmax(1, keepdim=True))
    assert bool((largest > 0).all())
    negated = svd_factors(-weight)
    torch.testing.assert_close(negated.write, factors.write, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(negated.read, -factors.read, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("shape", SHAPES)
def test_random_b_is_orthogonal_and_seeded(shape):
    weight = weight_of(shape)
    one, again, other = (random_b_factors(weight, seed) for seed in (0, 0, 1))
    assert torch.equal(one.write, again.write) and torch.equal(one.read, again.read)
    assert not torch.allclose(one.write, other.write)
    random = one.write if shape[0] >= shape[1] else one.read
    torch.testing.assert_close(random.T @ random, torch.eye(min(shape)), rtol=1e-5, atol=1e-5)
    of_ones = random_b_factors(torch.ones(shape), 0)  # the draw does not depend on the weight
    assert torch.equal(random, of_ones.write if shape[0] >= shape[1] else of_ones.read)


def test_random_b_is_haar():
    # QR without the sign fix has a fixed sign on the first entry of every column (Householder makes R's diagonal
    # negative); for a Haar matrix it is a coin flip. 100 flips: 50 +- 5, so 20..80 is six deviations.
    signs = sum(int((random_b_factors(torch.ones(4, 4), seed).write[0, 0] > 0).item()) for seed in range(100))
    assert 20 <= signs <= 80


@pytest.mark.parametrize("shape", SHAPES)
def test_neurons_are_inputs_with_what_they_write_or_outputs_with_what_they_read(shape):
    weight = weight_of(shape)
    weight[3] = 0.0  # an input that writes nothing
    inputs, outputs = neuron_factors(weight), neuron_factors(weight, "output")
    assert torch.equal(inputs.product(), weight) and torch.equal(outputs.product(), weight)
    assert torch.equal(inputs.read, torch.eye(shape[0])) and torch.equal(outputs.write, torch.eye(shape[1]))
    edges = [1 + shape[1]] * shape[0]
    edges[3] = 1
    assert inputs.edges_per_unit.tolist() == edges and not inputs.valid_units[3]
    assert outputs.edges_per_unit.tolist() == [shape[0] - 1 + 1] * shape[1]
    with pytest.raises(ValueError, match="side must be one of 'input', 'output', got 'both'"):
        neuron_factors(weight, "both")


@pytest.mark.parametrize(
    "make", [svd_factors, lambda weight: random_b_factors(weight, 0), neuron_factors], ids=["svd", "random_b", "neurons"]
)
def test_non_finite_weight(make):
    weight = weight_of((5, 6))
    weight[2, 4] = float("inf")
    with pytest.raises(ValueError, match=r"weight\[2, 4\] is inf: every entry must be finite"):
        make(weight)


def gram_of(size: int, rank: int, seed: int = 1) -> torch.Tensor:
    """E[h^T h] of `rank` vectors whose entries differ in scale."""
    h = torch.randn(rank, size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return (h * torch.logspace(0, -2, size, dtype=torch.float64)).T @ h.mul(torch.logspace(0, -2, size)) / rank


def lost_by(factors, weight, k, gram, output_gram) -> float:
    """tr((W - A_k B_k)^T G (W - A_k B_k) H)."""
    left_out = weight.double() - factors.read[:, :k].double() @ factors.write[:k].double()
    return float((left_out * (gram @ left_out @ output_gram)).sum())


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["whitened", "causal"])
def test_whitened_svd_is_exact_and_its_first_units_are_the_best_ones(shape, causal):
    weight, gram = weight_of(shape), gram_of(shape[0], 60)
    h = gram_of(shape[1], 60, seed=2)
    # What the outputs' Gram is with its least share of the identity.
    output_gram = (1 - 1e-4) * h / h.diagonal().mean() + 1e-4 * torch.eye(shape[1]) if causal else torch.eye(shape[1])
    output_gram = output_gram.double()
    factors = svd_factors(weight, gram, h if causal else None)
    assert factors.n_units == min(shape) and factors.settings["method"] == ("svd_causal" if causal else "svd_whitened")
    torch.testing.assert_close(factors.product(), weight, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(factors.write.norm(dim=1), torch.ones(min(shape)), rtol=1e-5, atol=1e-5)
    # Eckart and Young: the squares of the singular values of C W D that are left out.
    roots = [torch.linalg.cholesky(each) for each in (gram, output_gram)]
    squares = torch.linalg.svdvals(roots[0].T @ weight.double() @ roots[1]).square()
    for k in range(min(shape) + 1):
        expected = float(squares[k:].sum())
        assert lost_by(factors, weight, k, gram, output_gram) == pytest.approx(
            expected, rel=1e-4, abs=1e-9 * float(squares.sum())
        )
    plain = svd_factors(weight)
    ours, others = (lost_by(f, weight, 4, gram, output_gram) for f in (factors, plain))
    assert ours < 0.99 * others


@pytest.mark.parametrize("shape", SHAPES)
def test_without_a_metric_it_is_the_svd(shape):
    weight, plain = weight_of(shape), svd_factors(weight_of(shape))
    identities = torch.eye(shape[0]), torch.eye(shape[1])
    for factors in (svd_factors(weight, 3 * identities[0]), svd_factors(weight, *identities)):
        torch.testing.assert_close(factors.read, plain.read, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(factors.write, plain.write, rtol=1e-4, atol=1e-4)
    assert svd_factors(weight, None, identities[1]).settings["method"] == "svd_outputs"


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("causal", [False, True], ids=["whitened", "causal"])
def test_grams_of_low_rank_leave_it_exact(shape, causal):
    weight, gram = weight_of(shape), gram_of(shape[0], 3)
    gram[2] = gram[:, 2] = 0.0  # an input that is never on
    factors = svd_factors(weight, gram, gram_of(shape[1], 2, seed=2) if causal else None)
    assert factors.relative_frobenius() < (2e-6 if not causal else 2e-5)
    assert factors.read.isfinite().all() and factors.write.isfinite().all()
    if not causal:  # three directions are all that the inputs have
        assert lost_by(factors, weight, 3, gram, torch.eye(shape[1]).double()) < 1e-9 * float(gram.trace())


def test_few_tokens_shrink_the_metric():
    weight, gram = weight_of((24, 10)), gram_of(24, 60)
    shrunk, plain = svd_factors(weight, gram, tokens=60), svd_factors(weight, gram)
    many = svd_factors(weight, gram, tokens=10**9)
    assert not torch.allclose(shrunk.write, plain.write, atol=1e-3)
    torch.testing.assert_close(many.write, plain.write, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("gram", [torch.eye(7), -torch.eye(5), torch.full((5, 5), torch.nan)])
def test_a_gram_that_is_none_of_this_matrix_is_refused(gram):
    with pytest.raises(GramError):
        svd_factors(weight_of((5, 6)), gram)
    with pytest.raises(GramError):
        svd_factors(weight_of((6, 5)), None, gram)
