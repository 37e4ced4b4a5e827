"""How far a replaced host's predictions are from the dense host's: cross-entropy, KL and top-1 agreement.

1. `log_probabilities` of logits, in float32 whatever the host's dtype.
2. `kl` and `cross_entropy` per prediction, with gradient where the logits have one.
3. `DensePredictions` sums all of them over the predictions of a batch, without gradient, a few positions at a time, in memory
   that is kept from one to the next (`Buffers`): beside the two tensors of logits it holds one of log-probabilities and never
   more than four times `_PART_BYTES`, and does not have the system map it anew for every tensor. The dense host's side is
   computed once, however many hosts are compared with it.
   `kl_per_prediction` keeps each one's KL instead, in float64 throughout: of small changes it goes down to 1e-9.

All values are in nats. Sums are float64: a KL of 1e-6 is the sum of terms a thousand times larger.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, fields

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

CHUNK_BYTES = 2**26  # of one tensor of logits
_PART_BYTES = 2**24  # of one tensor of log-probabilities that are compared at once


@dataclass(frozen=True)
class Divergence:
    """Sums over predictions; two of them add up."""

    ce_dense: float = 0.0  # ce_dense, ce: cross-entropy of the dense and of the replaced host, in nats
    ce: float = 0.0
    kl: float = 0.0  # KL(dense || replaced), in nats
    top1_agreement: float = 0.0  # predictions whose most likely token is the same
    n_predictions: int = 0  # how many

    def __add__(self, other: "Divergence") -> "Divergence":
        return Divergence(*(getattr(self, each.name) + getattr(other, each.name) for each in fields(self)))

    def means(self) -> dict[str, float]:
        """Name -> mean per prediction."""
        return {each.name: getattr(self, each.name) / self.n_predictions for each in fields(self) if each.name != "n_predictions"}


class Buffers:
    """Tensors that are written over: the allocator gives back large ones at once, and the next is faulted in page by page."""

    def __init__(self) -> None:
        self._flat: dict[str, Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
        """A contiguous tensor with whatever is in it, until this name is taken again."""
        flat, size = self._flat.get(name), math.prod(shape)
        if flat is None or flat.numel() < size or (flat.dtype, flat.device) != (dtype, device):
            flat = self._flat[name] = torch.empty(size, dtype=dtype, device=device)
        return flat[:size].view(shape)


def log_probabilities(
    logits: Float[Tensor, "*shape vocab"], buffers: Buffers | None = None, name: str = ""
) -> Float[Tensor, "*shape vocab"]:
    """Log-probabilities of the next token; float32, or float64 where the logits are. buffers: they lie in its tensor of this
    name, until that is taken again; None: in a tensor of their own."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    out = None if buffers is None else buffers.take(name, tuple(logits.shape), logits.dtype, logits.device)
    return torch.log_softmax(logits, -1, out=out)


def kl(log_p: Float[Tensor, "*shape vocab"], log_q: Float[Tensor, "*shape vocab"]) -> Float[Tensor, "*shape"]:
    """KL(p || q) of every prediction, in nats, from log-probabilities."""
    return (log_p.exp() * (log_p - log_q)).sum(-1)


def cross_entropy(log_q: Float[Tensor, "*shape vocab"], targets: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """-log q(target) of every prediction, in nats, from log-probabilities."""
    return -log_q.gather(-1, targets.to(log_q.device)[..., None]).squeeze(-1)


class DensePredictions:
    """The dense host's next-token predictions of whole rows, to which any number of replaced hosts are compared.

    Its log-probabilities and its most likely tokens are computed once; position t predicts token t + 1.

    Args:
        logits: of the dense host; they are not written to and not kept.
        tokens: the rows.
        buffers: of several calls; None: of this one. The log-probabilities lie in them until the next dense predictions do.

    Raises ValueError: a cross-entropy is not finite.
    """

    def __init__(
        self, logits: Float[Tensor, "batch pos vocab"], tokens: Int[Tensor, "batch pos"], buffers: Buffers | None = None
    ):
        self.buffers = buffers or Buffers()
        with torch.no_grad():
            self.log_p = log_probabilities(logits[:, :-1], self.buffers, "dense")
            self.targets = tokens[:, 1:].to(logits.device)
            self.most_likely = self.log_p.argmax(-1)
            self.ce = cross_entropy(self.log_p, self.targets).double()
            _require_finite(self.ce, "cross-entropy", "dense")

    def divergence(
        self,
        replaced: Float[Tensor, "batch pos vocab"],
        ce_deltas: Float[Tensor, " batch"] | None = None,
        kls: Float[Tensor, " batch"] | None = None,
        counted: Bool[Tensor, "batch predictions"] | None = None,
        each: Float[Tensor, "batch predictions"] | None = None,
    ) -> Divergence:
        """Sums over the predictions of a replaced host on the same rows.

        Args:
            replaced: its logits.
            ce_deltas, kls: float64, on the CPU; what each row adds to the cross-entropy, and to KL, is added to them.
            counted: which predictions count; None: all.
            each: gets the KL of each prediction, also of those that do not count.

        Raises ValueError: a cross-entropy is not finite.
        """
        total = Divergence()
        with torch.no_grad():
            for rows, positions in self._parts():
                log_q = log_probabilities(replaced[rows, positions], self.buffers, "q")
                ce_dense, ce = self.ce[rows, positions], cross_entropy(log_q, self.targets[rows, positions]).double()
                _require_finite(ce, "cross-entropy", "replaced")
                agree, log_p = self.most_likely[rows, positions] == log_q.argmax(-1), self.log_p[rows, positions]
                that_count = None if counted is None else counted[rows, positions].to(ce.device)
                if ce_deltas is not None:
                    difference = ce - ce_dense
                    ce_deltas[rows] += (difference if that_count is None else difference * that_count).sum(1).cpu()
                if that_count is not None:
                    ce_dense, ce, agree = ce_dense[that_count], ce[that_count], agree[that_count]
                same = float(agree.sum())
                # KL of each prediction, in buffers and the memory of log_q.
                p = torch.exp(log_p, out=self.buffers.take("p", tuple(log_p.shape), log_p.dtype, log_p.device))
                products = p.mul_(torch.sub(log_p, log_q, out=log_q))
                in_float64 = self.buffers.take("sum", tuple(products.shape), torch.float64, products.device)
                of_predictions = in_float64.copy_(products).sum(-1)  # sum(dtype=torch.float64) takes memory of its own
                if each is not None:
                    each[rows, positions] = of_predictions.to(each)
                of_rows = (of_predictions if that_count is None else of_predictions * that_count).sum(1).cpu()
                if kls is not None:
                    kls[rows] += of_rows
                total += Divergence(float(ce_dense.sum()), float(ce.sum()), float(of_rows.sum()), same, ce.numel())
        return total

    def _parts(self) -> Iterator[tuple[slice, slice]]:
        """Rows and positions of `_PART_BYTES`: whole rows, or a piece of one, whose logits lie side by side."""
        n_rows, n_positions, vocab = self.log_p.shape
        most = max(1, _PART_BYTES // (4 * vocab))
        rows_at_once, at_once = max(1, most // n_positions), min(most, n_positions)
        for row in range(0, n_rows, rows_at_once):
            for start in range(0, n_positions, at_once):
                yield slice(row, row + rows_at_once), slice(start, min(start + at_once, n_positions))


def _require_finite(values: Float[Tensor, "*shape"], of: str, whose: str) -> None:
    bad = ~values.isfinite()
    if bool(bad.any()):
        raise ValueError(
            f"{int(bad.sum())} of {bad.numel()} predictions of the {whose} host have a {of} that is not finite (the first "
            f"{float(values[bad][0])}); run the host in float32, or look for the activations that overflow"
        )


def kl_sum(log_p: Float[Tensor, "*shape vocab"], log_q: Float[Tensor, "*shape vocab"]) -> Float[Tensor, ""]:
    """KL(p || q) summed over predictions in float64."""
    return (log_p.exp() * (log_p - log_q)).sum(dtype=torch.float64)


def kl_per_prediction(
    before: Float[Tensor, "predictions vocab"], after: Float[Tensor, "predictions vocab"]
) -> Float[Tensor, " predictions"]:
    """KL(before || after) of every row of logits, in nats; float64, on the CPU, never below 0. A chunk of rows at a time.
    Raises ValueError: one is not finite."""
    rows = max(1, CHUNK_BYTES // (8 * before.shape[-1]))
    with torch.no_grad():
        chunks = zip(before.split(rows), after.split(rows), strict=True)
        values = [kl(log_probabilities(p.double()), log_probabilities(q.double())) for p, q in chunks]
    each = torch.cat(values)
    _require_finite(each, "KL", "edited")
    return each.clamp(min=0).cpu()
