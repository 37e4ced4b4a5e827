"""The loss of a batch, and cross-entropy and KL on held-out text.

Both are sums over next-token predictions, in float32 from the logits on; whoever calls divides, by the predictions of all
processes together.
"""

from collections.abc import Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.machine import plain_float32
from swd_lens.train.finetune.mount import Mounted
from swd_lens.train.finetune.spec import FinetuneSpec


class Heldout(NamedTuple):
    """Means over held-out predictions, in nats."""

    ce_dense: float
    ce: float
    kl: float

    @property
    def ce_delta(self) -> float:
        return self.ce - self.ce_dense


def batch_loss(here: Mounted, rows: Int[Tensor, "_rows pos"], spec: FinetuneSpec) -> Float[Tensor, ""]:
    """Sum of the loss over the predictions of these rows; with gradient."""
    device = next(here.host.model.parameters()).device
    autocast: Any = nullcontext()
    if spec.autocast is not None:
        autocast = torch.autocast(device.type, dtype=getattr(torch, spec.autocast))
    with torch.enable_grad(), autocast:
        log_p = None if spec.loss == "ce" else _log_probabilities(here, rows, dense=True)
        log_q = _log_probabilities(here, rows, dense=False)
    kl = 0.0 if log_p is None else _kl(log_p, log_q)
    if spec.loss == "kl":
        return kl  # pyright: ignore[reportReturnType]
    return _cross_entropy(log_q, rows) + spec.kl_weight * kl


def heldout_sums(here: Mounted, batches: Iterable[Int[Tensor, "_rows pos"]]) -> Float[Tensor, "4"]:
    """Sums of CE(dense), CE and KL, and the number of predictions; float64. Full precision, no autocast."""
    sums = torch.zeros(4, dtype=torch.float64)
    with torch.no_grad(), plain_float32(next(here.host.model.parameters()).device):
        for rows in batches:
            log_p, log_q = (_log_probabilities(here, rows, dense=dense) for dense in (True, False))
            parts = [_cross_entropy(log_p, rows), _cross_entropy(log_q, rows), _kl(log_p, log_q)]
            sums += torch.tensor([*(float(part.double()) for part in parts), rows[:, 1:].numel()], dtype=torch.float64)
    return sums


def _log_probabilities(here: Mounted, rows: Tensor, *, dense: bool) -> Float[Tensor, "_rows pred vocab"]:
    if not dense:
        return here.host.run(rows)[:, :-1].float().log_softmax(-1)
    with torch.no_grad(), _switched(here):
        return here.host.run(rows)[:, :-1].float().log_softmax(-1)


@contextmanager
def _switched(here: Mounted) -> Any:
    here.switch.dense = True
    try:
        yield
    finally:
        here.switch.dense = False


def _cross_entropy(log_q: Tensor, rows: Tensor) -> Float[Tensor, ""]:
    return -log_q.gather(-1, rows[:, 1:, None].to(log_q.device)).sum()


def _kl(log_p: Tensor, log_q: Tensor) -> Float[Tensor, ""]:
    """KL(dense || replaced), summed."""
    return (log_p.exp() * (log_p - log_q)).sum()
