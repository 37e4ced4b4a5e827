"""The facts of method.md §0.2 that need no data, and the projection on matrices worked by hand."""

import pytest
import torch

from swd_lens.train.baselines.sparse_network import budget, project_
from swd_lens.train.baselines.sparse_training import SPARSE_PRETRAINS, SparseSpec
from swd_lens.train.engine import normalized, root_mean_square

PAPER = SparseSpec()
BLOCKS = [(768, 2304), (768, 768), (768, 3072), (3072, 768)] * 12
EMBEDDINGS = [(50257, 768), (1024, 768)]


def test_the_papers_schedule():
    assert (PAPER.n0 // 131_072, PAPER.n1 // 131_072, PAPER.updates) == (381, 30_516, 38_146)
    before_22000 = 21_999 * 131_072  # tokens before the 22,000th update
    assert before_22000 == 2_883_452_928
    assert PAPER.density(before_22000) == pytest.approx(0.3151944858, abs=5e-11)
    assert PAPER.density(0) == 1.0 and PAPER.density(PAPER.n1) == 0.2 == PAPER.density(PAPER.tokens)


def test_the_papers_preset():
    """Appendix, "Optimization and sparsification", number by number; stopped at 2,883,584,000 tokens."""
    paper = SPARSE_PRETRAINS["paper"].as_dict()
    assert paper == {
        "updates": 38_146,
        "tokens_per_update": 131_072,
        "end_density": 0.2,
        "learning_rate": 3e-4,
        "warmup": 0.01,
        "falling_until": 0.8,
        "stop_after": 22_000,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 0.1,
        "weight_decay": 1e-3,
        "autocast": "bfloat16",
        "seed": 0,
    }
    assert (PAPER.n0, PAPER.n1, PAPER.tokens) == (49_938_432, 3_999_793_152, 4_999_872_512)
    assert paper["stop_after"] * paper["tokens_per_update"] == 2_883_584_000


def test_the_papers_nonzeros():
    density = PAPER.density(21_999 * 131_072)
    blocks = sum(budget(a * b, density) for a, b in BLOCKS)
    assert blocks == 26_770_920
    assert blocks + sum(budget(a * b, density) for a, b in EMBEDDINGS) == 39_184_479


def test_learning_rate():
    assert PAPER.rate(0) == 0.0
    assert PAPER.rate(PAPER.n0) == pytest.approx(3e-4)
    halfway = (PAPER.n0 + PAPER.tokens) // 2
    assert PAPER.rate(halfway) == pytest.approx(0.5 * 3e-4 / PAPER.density(halfway) ** 0.5, rel=1e-6)
    assert PAPER.rate(PAPER.tokens) == 0.0


def test_projection_by_hand():
    matrix = torch.tensor([[4.0, -5.0, 3.0], [0.1, 0.2, -0.3]])
    project_(matrix, 0.5)  # 3 of 6: the rows' largest, -5 and -0.3, then 4
    assert matrix.tolist() == [[4.0, -5.0, 0.0], [0.0, 0.0, pytest.approx(-0.3)]]
    with pytest.raises(ValueError, match="keeps 1 entries"):
        project_(matrix, 0.2)
    ties = torch.ones(4, 5)
    project_(ties, 0.63)
    assert int((ties != 0).sum()) == 12 and bool((ties != 0).any(1).all())


def test_gradients_are_divided_by_their_common_rms():
    # rms of (3, 4) and (0, 0): sqrt(25 / 4) = 2.5
    gradients = [torch.tensor([3.0, 4.0]), torch.zeros(2)]
    got = normalized(gradients, root_mean_square(gradients))
    torch.testing.assert_close(got[0], torch.tensor([3.0, 4.0]) / 2.50001)
    tiny = [torch.full((3,), 1e-9)]
    assert torch.equal(normalized(tiny, root_mean_square(tiny))[0], tiny[0])
