"""Divergence: sums are those of the definitions, gradients too."""

import pytest
import torch

from swd_lens.base import divergence as div


def test_sums_are_those_of_the_definitions_whatever_the_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    dense, replaced = (torch.randn(3, 7, 11, generator=generator) for _ in range(2))
    tokens = torch.randint(11, (3, 7), generator=generator)
    p, q = dense[:, :-1].double().softmax(-1), replaced[:, :-1].double().softmax(-1)
    targets = tokens[:, 1:, None]
    expected = {
        "ce_dense": -p.gather(-1, targets).log().mean(),
        "ce": -q.gather(-1, targets).log().mean(),
        "kl": (p * (p / q).log()).sum(-1).mean(),
        "top1_agreement": (p.argmax(-1) == q.argmax(-1)).double().mean(),
    }
    for chunk_bytes in (1, 3 * 11 * 4 * 2, 2**28):
        monkeypatch.setattr(div, "_PART_BYTES", chunk_bytes)
        total = div.DensePredictions(dense, tokens).divergence(replaced)
        assert total.n_predictions == 18
        for name, value in total.means().items():
            assert value == pytest.approx(float(expected[name]), abs=1e-6), name
        # The dense side is computed once, and comparing one host leaves it as it was for the next.
        predictions, rows = div.DensePredictions(dense, tokens), torch.zeros(3, dtype=torch.float64)
        assert [predictions.divergence(other) for other in (replaced, dense, replaced)][::2] == [total, total]
        predictions.divergence(replaced, rows)
        ce = [-x[:, :-1].double().log_softmax(-1).gather(-1, targets).squeeze(-1).sum(1) for x in (replaced, dense)]
        torch.testing.assert_close(rows, ce[0] - ce[1], atol=1e-5, rtol=0)
    assert (total + total).means() == pytest.approx(total.means())


def test_kl_has_the_gradient_of_the_definition():
    log_p = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    div.kl(log_p, div.log_probabilities(logits)).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - log_p.exp())
