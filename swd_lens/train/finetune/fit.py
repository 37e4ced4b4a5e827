"""FinetuneFit: the loss of fine-tuning, and the state of a run: values, held-out means, the best values.

1. Losses and held-out means are sums over next-token predictions, in float32 from the logits on, added over all processes and
   divided by the predictions of all of them.
2. The gradient of the mean loss, on the supports only, is one vector per factor. With `normalize_gradients`: where their root
   mean square r over all entries of all factors exceeds 1e-8, they are divided by r, so that it is 1 (paper, app.
   swd-optimization).
3. After AdamW's step no value is zero (mount.py). With keep="best" the values of the lowest held-out loss are put aside.
"""

from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.divergence import cross_entropy, log_probabilities
from swd_lens.hosts.predictions import TOKENS
from swd_lens.train.engine import Fit, autocast, normalized, root_mean_square
from swd_lens.train.finetune.mount import Mounted
from swd_lens.train.finetune.spec import FinetuneSpec
from swd_lens.train.rows import Processes, Rows

# float16 gradients of a mean over thousands of predictions fall below what it can hold; a power of two changes no other bit.
_FLOAT16_SCALE = 2.0**12

_MOST_ROWS = 64  # of held-out text per forward


class Heldout(NamedTuple):
    """Means over held-out predictions, in nats."""

    ce_dense: float
    ce: float
    kl: float

    def as_dict(self) -> dict[str, float]:
        """Plain values; "ce_delta" is how much the replacement adds to the cross-entropy."""
        return {**self._asdict(), "ce_delta": self.ce - self.ce_dense}


class FinetuneFit(Fit):
    """See the module's docstring. before, after, best: held-out means of the factors as given, at the last evaluation, and of
    `best_values`."""

    title = "finetune"
    advice: ClassVar[str] = "The factors given are unchanged. Lower learning_rate, or train without autocast"

    def __init__(self, mounted: Mounted, spec: FinetuneSpec, steps: int, heldout: Rows | None, processes: Processes):
        self.mounted, self.spec, self.steps = mounted, spec, steps
        self.heldout, self.processes = heldout, processes
        self.device = next(mounted.units.host.model.parameters()).device
        self.supports = mounted.supports()
        self.parameters = {name: support.values for name, support in self.supports.items()}
        self.scales = {
            name: root_mean_square([values.detach()]) if spec.relative else 1.0 for name, values in self.parameters.items()
        }
        self.eps = float(spec.eps)
        self.before: Heldout | None = None
        self.after: Heldout | None = None
        self.best: Heldout | None = None
        self.best_values: dict[str, Tensor] = {}

    def schedule(self, step: int) -> dict[str, float]:
        return {"learning_rate": self.spec.rate(step, self.steps)}

    def gradients(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[float, dict[str, Any]]:
        predictions = rows.shape[0] * (rows.shape[1] - 1)
        scale = _FLOAT16_SCALE if self.spec.autocast == "float16" else 1.0
        loss, gradients = torch.zeros((), dtype=torch.float64), []
        # As many rows at a time as make TOKENS: the graph of a forward has every position's activations.
        for part in self.processes.share(rows).split(max(1, TOKENS // rows.shape[1])):
            of_part = batch_loss(self.mounted, part, self.spec) / predictions
            further = torch.autograd.grad(of_part * scale, list(self.parameters.values()))
            summed = (g.add_(more) for g, more in zip(gradients, further, strict=True))
            gradients = list(summed) if gradients else list(further)
            loss += of_part.detach().double().cpu()
        summed = self.processes.total(gradients)
        for values, gradient in zip(self.parameters.values(), summed, strict=True):
            values.grad = gradient / scale if scale != 1.0 else gradient
        return float(self.processes.total([loss])[0]), {}

    def is_finite(self, loss: float) -> bool:
        return super().is_finite(loss) and all(bool(gradient.isfinite().all()) for gradient in self._gradients())

    def adjust_gradients(self, step: int) -> dict[str, float]:
        gradients = self._gradients()
        rms = root_mean_square(gradients)
        if self.spec.normalize_gradients:
            for values, gradient in zip(self.parameters.values(), normalized(gradients, rms), strict=True):
                values.grad = gradient
        return {"grad_rms": rms}

    def after_update(self, step: int) -> None:
        for support in self.supports.values():
            support.keep_nonzero()

    def _gradients(self) -> list[Tensor]:
        return [values.grad for values in self.parameters.values() if values.grad is not None]

    def start(self) -> dict[str, float]:
        if self.heldout is None:
            return {}
        logged = self.evaluate()
        self.before, self.after = self.after, None
        return logged

    def evaluate(self) -> dict[str, float]:
        assert self.heldout is not None
        size = max(1, min(_MOST_ROWS, TOKENS // self.heldout.row_length)) * self.processes.n
        sums = torch.zeros(4, dtype=torch.float64)
        with torch.no_grad():
            for batch in self.heldout.stream.batches(size):
                if len(rows := self.processes.share(batch)):
                    runs = [self.mounted.run(rows, dense=dense) for dense in (True, False)]
                    parts = self.mounted.predictions.total(_measured, rows, *runs)
                    sums += torch.tensor([*parts.tolist(), rows[:, 1:].numel()], dtype=torch.float64)
        sums = self.processes.total([sums])[0]
        self.after = Heldout(*(sums[:3] / sums[3]).tolist())
        if self.spec.keep == "best" and (self.best is None or self._loss(self.after) < self._loss(self.best)):
            self.best = self.after
            self.best_values = {name: values.detach().clone() for name, values in self.parameters.items()}
        return {f"heldout_{name}": value for name, value in self.after._asdict().items()}

    def _loss(self, heldout: Heldout) -> float:
        """The recipe's loss, on held-out text."""
        ce, kl = heldout.ce, heldout.kl
        return {"ce": ce, "kl": kl, "ce+kl": ce + self.spec.kl_weight * kl}[self.spec.loss]

    @torch.no_grad()
    def finish(self) -> None:
        """Bring the values to those that the recipe keeps."""
        if self.spec.keep == "best":
            for name, values in self.parameters.items():
                values.copy_(self.best_values[name])
            self.after = self.best

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"{name}.values": values.detach() for name, values in self.parameters.items()}
        tensors |= {f"best {name}": values for name, values in self.best_values.items()}
        heldout = {"before": self.before, "after": self.after, "best": self.best}
        return tensors, heldout  # scales are those of the values that training starts from, made anew

    @torch.no_grad()
    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(tensors[f"{name}.values"])
            if f"best {name}" in tensors:
                self.best_values[name] = tensors[f"best {name}"].to(parameter.device)
        self.before, self.after, self.best = (
            None if values[name] is None else Heldout(*map(float, values[name])) for name in ("before", "after", "best")
        )


def batch_loss(mounted: Mounted, rows: Int[Tensor, "_rows pos"], spec: FinetuneSpec) -> Float[Tensor, ""]:
    """Sum of the loss over the predictions of these rows; with gradient."""

    def loss(targets: Tensor, logits: Tensor, dense: Tensor | None = None) -> Float[Tensor, ""]:
        log_q = log_probabilities(logits)
        if dense is None:
            return cross_entropy(log_q, targets).sum()
        divergence = _kl(log_probabilities(dense), log_q)
        return divergence if spec.loss == "kl" else cross_entropy(log_q, targets).sum() + spec.kl_weight * divergence

    with torch.enable_grad(), autocast(next(mounted.units.host.model.parameters()).device, spec.autocast):
        dense = () if spec.loss == "ce" else (mounted.run(rows, dense=True),)
        return mounted.predictions.total(loss, rows, mounted.run(rows, dense=False), *dense)


def _measured(targets: Tensor, dense: Tensor, logits: Tensor) -> Float[Tensor, "ce_dense_ce_kl"]:
    log_p, log_q = log_probabilities(dense), log_probabilities(logits)
    return torch.stack([cross_entropy(log_p, targets).sum(), cross_entropy(log_q, targets).sum(), _kl(log_p, log_q)])


def _kl(log_p: Tensor, log_q: Tensor) -> Float[Tensor, ""]:
    """KL(dense || replaced), summed in float32 over everything at once."""
    return (log_p.exp() * (log_p - log_q)).sum()
