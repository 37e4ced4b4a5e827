"""Units matched one to one: known answers, by hand and by construction."""

import pytest
import torch

from swd_lens.base.errors import AttachError
from swd_lens.units.factors import Factors
from swd_lens.units.similarity import edge_jaccard, match_units, unit_similarity
from tests.solver.matrices import gram_of


@pytest.fixture(scope="module")
def solved():
    """Sparse units, no two alike (the solver may make two of one single entry)."""
    generator = torch.Generator().manual_seed(3)
    read, write = (torch.randn(shape, generator=generator) for shape in ((20, 20), (20, 32)))
    kept = [torch.rand(of.shape, generator=generator) < 0.3 for of in (read, write)]
    return Factors(read * (kept[0] | torch.eye(20).bool()), write * (kept[1] | torch.eye(20, 32).bool()))


def permuted(f: Factors, order: torch.Tensor) -> Factors:
    return Factors(f.read[:, order].contiguous(), f.write[order].contiguous())


def test_similarity_by_hand():
    """Unit 0: reads (1, 1) and writes (1, 0); beside (1, 0), (0, 2): cos read 1/sqrt 2, cos write 0."""
    f = Factors(torch.tensor([[1.0, 0.0], [1.0, 1.0]]), torch.tensor([[1.0, 0.0], [3.0, 3.0]]))
    g = Factors(torch.tensor([[-1.0, 0.0], [0.0, 0.0]]), torch.tensor([[0.0, 2.0], [1.0, 0.0]]))
    half = 0.5**0.5
    torch.testing.assert_close(unit_similarity(f, f), torch.tensor([[1, 0.5], [0.5, 1]], dtype=torch.float64))
    # g's second unit reads nothing.
    torch.testing.assert_close(unit_similarity(f, g), torch.tensor([[0, 0], [0, 0]], dtype=torch.float64))
    g = Factors(torch.tensor([[-1.0], [0.0]]), torch.tensor([[2.0, 0.0]]))
    torch.testing.assert_close(unit_similarity(f, g), torch.tensor([[half], [0]], dtype=torch.float64))


def test_reads_are_compared_under_the_gram():
    """Directions that no input has do not count: with G = diag(1, 0) reads (1, 5) and (1, -7) are the same."""
    f, g = (Factors(torch.tensor([[1.0], [x]]), torch.tensor([[1.0, 2.0]])) for x in (5.0, -7.0))
    assert float(unit_similarity(f, g)) < 1
    assert float(unit_similarity(f, g, torch.diag(torch.tensor([1.0, 0.0])))) == pytest.approx(1)


def test_nothing_changed_is_similarity_one(solved):
    match = match_units(solved, solved, gram_of(20))
    assert float(match.similarity.min()) == pytest.approx(1) and float(match.by_number.min()) == pytest.approx(1)
    assert match.partner.tolist() == list(range(solved.n_units))
    assert edge_jaccard(solved, [0, 3], solved, [0, 3], match) == 1


def test_permuted_scaled_and_flipped_units_are_found_again(solved):
    order = torch.randperm(solved.n_units, generator=torch.Generator().manual_seed(1))
    other = permuted(solved, order)
    other = Factors(other.read * -2, other.write * -0.5)
    match = match_units(solved, other, gram_of(20))
    assert order[match.partner].tolist() == list(range(solved.n_units))
    assert float(match.similarity.min()) == pytest.approx(1) and float(match.by_number.mean()) < 0.5
    chosen = [2, 5, 7]
    assert match.partners(chosen) == [order.tolist().index(unit) for unit in chosen]
    assert edge_jaccard(solved, chosen, other, match.partners(chosen), match) == 1


def test_without_counterpart_where_there_are_fewer_units(solved):
    fewer = permuted(solved, torch.arange(5))
    match = match_units(solved, fewer)
    assert (match.partner >= 0).sum() == 5 and match.partner[:5].tolist() == [0, 1, 2, 3, 4]
    assert match.similarity[5:].tolist() == [0] * (solved.n_units - 5) and match.partners([1, 9]) == [1]
    # Unit 9 has no counterpart: its edges are the base's alone.
    edges = solved.edges_per_unit
    expected = int(edges[1]) / int(edges[1] + edges[9])
    assert edge_jaccard(solved, [1, 9], fewer, [1], match) == pytest.approx(expected)


def test_edges_in_common_by_hand():
    """Unit 0 shares one of its two reads and both writes: 3 in common of 4 and 4, so 3 / 5."""
    f = Factors(torch.tensor([[1.0], [1.0], [0.0]]), torch.tensor([[1.0, 1.0]]))
    g = Factors(torch.tensor([[1.0], [0.0], [1.0]]), torch.tensor([[1.0, 1.0]]))
    match = match_units(f, g)
    assert edge_jaccard(f, [0], g, [0], match) == pytest.approx(3 / 5)
    assert edge_jaccard(f, [0], g, [], match) == 0 and edge_jaccard(f, [], g, [], match) == 1


def test_matrices_of_two_shapes_are_refused(solved):
    with pytest.raises(AttachError, match=r"\(20, 32\).*\(2, 2\)"):
        match_units(solved, Factors(torch.eye(2), torch.eye(2)))
