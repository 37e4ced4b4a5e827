"""How far a replaced host's predictions are from the dense host's: cross-entropy, KL and top-1 agreement.

1. `log_probabilities` of logits, in float32 whatever the host's dtype.
2. `kl` and `cross_entropy` per prediction, with gradient where the logits have one.
3. `divergence` sums all of them over the predictions of a batch, without gradient, a chunk of positions at a time: beside the
   two tensors of logits it never holds more than `CHUNK_BYTES`, however large batch and vocabulary are.
   `kl_per_prediction` keeps each one's KL instead, in float64 throughout: of small changes it goes down to 1e-9.

All values are in nats. Sums are float64: a KL of 1e-6 is the sum of terms a thousand times larger.
"""

from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor

CHUNK_BYTES = 2**26  # of one tensor of logits or log-probabilities; a chunk has about six of them


@dataclass(frozen=True)
class Divergence:
    """Sums over predictions; two of them add up.

    Attributes:
        ce_dense, ce: cross-entropy of the dense and of the replaced host, in nats.
        kl: KL(dense || replaced), in nats.
        top1_agreement: predictions whose most likely token is the same.
        n_predictions: how many.
    """

    ce_dense: float = 0.0
    ce: float = 0.0
    kl: float = 0.0
    top1_agreement: float = 0.0
    n_predictions: int = 0

    def __add__(self, other: "Divergence") -> "Divergence":
        return Divergence(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def means(self) -> dict[str, float]:
        """Name -> mean per prediction."""
        return {
            each.name: getattr(self, each.name) / self.n_predictions
            for each in fields(self)
            if each.name != "n_predictions"
        }


def log_probabilities(logits: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape vocab"]:
    """Log-probabilities of the next token; float32, or float64 where the logits are."""
    return (logits if logits.dtype == torch.float64 else logits.float()).log_softmax(-1)


def kl(log_p: Float[Tensor, "*shape vocab"], log_q: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape"]:
    """KL(p || q) of every prediction, in nats, from log-probabilities."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def cross_entropy(log_q: Float[Tensor, "*shape vocab"], targets: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """-log q(target) of every prediction, in nats, from log-probabilities."""
    return -log_q.gather(-1, targets.to(log_q.device)[..., None]).squeeze(-1)


def divergence(
    dense: Float[Tensor, "batch pos vocab"],
    replaced: Float[Tensor, "batch pos vocab"],
    tokens: Int[Tensor, "batch pos"],
    ce_deltas: Float[Tensor, " batch"] | None = None,
) -> Divergence:
    """Sums over the next-token predictions of whole rows: position t predicts token t + 1.

    Args:
        dense, replaced: logits of the two hosts on the same rows.
        tokens: the rows.
        ce_deltas: float64, on the CPU; what each row adds to the cross-entropy is added to it.
    """
    rows, vocab = tokens.shape[0], dense.shape[-1]
    positions = max(1, CHUNK_BYTES // (4 * vocab * max(rows, 1)))
    total = Divergence()
    with torch.no_grad():
        for start in range(0, tokens.shape[1] - 1, positions):
            chunk = slice(start, min(start + positions, tokens.shape[1] - 1))
            targets = tokens[:, chunk.start + 1 : chunk.stop + 1].to(dense.device)
            log_p, log_q = log_probabilities(dense[:, chunk]), log_probabilities(replaced[:, chunk])
            ce_dense, ce = (cross_entropy(log, targets).double() for log in (log_p, log_q))
            if ce_deltas is not None:
                ce_deltas += (ce - ce_dense).sum(1).cpu()
            total += Divergence(
                float(ce_dense.sum()),
                float(ce.sum()),
                float(kl_sum(log_p, log_q)),
                float((log_p.argmax(-1) == log_q.argmax(-1)).sum()),
                targets.numel(),
            )
    return total


def kl_sum(log_p: Float[Tensor, "*shape vocab"], log_q: Float[Tensor, "*shape vocab"]) -> Float[Tensor, ""]:
    """KL(p || q) summed over predictions in float64."""
    return (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64)


def kl_per_prediction(
    before: Float[Tensor, "predictions vocab"], after: Float[Tensor, "predictions vocab"]
) -> Float[Tensor, " predictions"]:
    """KL(before || after) of every row of logits, in nats; float64, on the CPU, never below 0. A chunk of rows at a time."""
    rows = max(1, CHUNK_BYTES // (8 * before.shape[-1]))
    with torch.no_grad():
        chunks = zip(before.split(rows), after.split(rows), strict=True)
        values = [kl(log_probabilities(p.double()), log_probabilities(q.double())) for p, q in chunks]
    return torch.cat(values).clamp(min=0).cpu()
