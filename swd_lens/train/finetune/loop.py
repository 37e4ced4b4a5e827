"""The steps of a run, from the first or from a checkpoint on.

1. Each step: the batch of its number; every process's loss and gradients on its rows, added over processes, divided by all
   predictions; one step of the optimizer; one line of log.
2. Every `eval_every` steps, before the first and after the last: CE and KL on held-out text.
3. Every `checkpoint_every` steps: values, moments and what the rest of the run depends on go to the folder.
"""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.train.finetune.folder import RunFolder
from swd_lens.train.finetune.mount import Mounted
from swd_lens.train.finetune.objective import Heldout, batch_loss, heldout_sums
from swd_lens.train.finetune.optimizer import Optimizer
from swd_lens.train.finetune.processes import Processes
from swd_lens.train.finetune.rows import Rows
from swd_lens.train.finetune.spec import FinetuneError, FinetuneSpec

# float16 gradients of a mean over thousands of predictions fall below what it can hold; a power of two changes no other bit.
_FLOAT16_SCALE = 2.0**12

# Held-out rows per forward: 2^26 logits are 268 MB in float32, a row of 1,024 under GPT-2's vocabulary; some four such
# tensors are alive at a time.
_LOGITS_AT_ONCE = 2**26
_MOST_ROWS = 64


@dataclass
class Run:
    """What a run is made of, and how far it is."""

    here: Mounted
    spec: FinetuneSpec
    rows: Rows
    heldout: Rows | None
    processes: Processes
    steps: int
    eval_every: int
    checkpoint_every: int
    folder: RunFolder | None
    progress: bool
    optimizer: Optimizer = field(init=False)
    step: int = 0
    before: Heldout | None = None
    after: Heldout | None = None
    best: Heldout | None = None
    best_values: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.optimizer = Optimizer(self.here.supports(), self.spec, self.steps)

    @property
    def tokens_per_step(self) -> int:
        return self.spec.batch_size * self.rows.row_length

    # ------------------------------------------------------------------ the whole

    def train(self, last: int) -> None:
        """From the checkpoint after step `last` (0: from the start) to the end; the values are then those to keep."""
        if last:
            self._resume()
        if self.folder is not None and self.processes.main:
            self.folder.start(last)
        if not last:
            self._begin()
        batches = self.rows.batches(self.spec.batch_size, self.spec.seed, self.step)
        hidden = not (self.progress and self.processes.main)
        with tqdm(
            total=self.steps, initial=self.step, desc="finetune", unit="step", disable=hidden, leave=False
        ) as bar:
            while self.step < self.steps:
                entry = self._one(next(batches))
                bar.set_postfix(
                    {key: f"{entry[key]:.4g}" for key in ("loss", "heldout_ce") if key in entry}, refresh=False
                )
                bar.update()
        if self.spec.keep == "best":
            self._put(self.best_values)
            self.after = self.best

    def _begin(self) -> None:
        entry: dict[str, Any] = {"step": 0, "tokens": 0}
        if self.heldout is not None:
            self.before = self._evaluate()
            self._note(self.before, entry)
        self._log(entry)

    def _one(self, rows: Tensor) -> dict[str, Any]:
        number = self.step + 1
        loss, gradients = self._gradients(rows)
        rate = self.spec.rate(number, self.steps)
        self._require_finite(loss, gradients, number, rate)
        rms = self.optimizer.step(number, gradients)
        self.step = number
        entry: dict[str, Any] = {"step": number, "tokens": number * self.tokens_per_step}
        entry |= {"loss": loss, "learning_rate": rate, "grad_rms": rms}
        if self.heldout is not None and (number % self.eval_every == 0 or number == self.steps):
            self.after = self._evaluate()
            self._note(self.after, entry)
        self._log(entry)
        if number % self.checkpoint_every == 0 or number == self.steps:
            self._checkpoint()
        return entry

    # ------------------------------------------------------------------ parts of a step

    def _gradients(self, rows: Tensor) -> tuple[float, list[Tensor]]:
        """The mean loss of the whole batch and its gradients."""
        predictions = rows.shape[0] * (rows.shape[1] - 1)
        loss = batch_loss(self.here, self.processes.share(rows), self.spec) / predictions
        scale = _FLOAT16_SCALE if self.spec.autocast == "float16" else 1.0
        found = torch.autograd.grad(loss * scale, self.optimizer.values)
        gradients = [g / scale if scale != 1.0 else g for g in self.processes.total(list(found))]
        return float(self.processes.total([loss.detach().double().cpu()])[0]), gradients

    def _require_finite(self, loss: float, gradients: list[Tensor], number: int, rate: float) -> None:
        if math.isfinite(loss) and all(bool(g.isfinite().all()) for g in gradients):
            return
        what = f"the loss is {loss}" if not math.isfinite(loss) else "a gradient is not finite"
        kept = ""
        if self.folder is not None:
            there = self.folder.last_step()
            kept = f" {self.folder.path} keeps " + (f"the values of step {there}." if there else "no checkpoint yet.")
        raise FinetuneError(
            f"step {number} of {self.steps}: {what}, at learning rate {rate:.3g}. The factors given are unchanged.{kept} "
            "Lower learning_rate, or train without autocast"
        )

    def _evaluate(self) -> Heldout:
        assert self.heldout is not None
        row = self.heldout.row_length * int(self.here.host.model.cfg.d_vocab)
        size = max(1, min(_MOST_ROWS, _LOGITS_AT_ONCE // row)) * self.processes.n
        shares = (self.processes.share(batch) for batch in self.heldout.all(size))
        sums = self.processes.total([heldout_sums(self.here, (rows for rows in shares if len(rows)))])[0]
        return Heldout(*(sums[:3] / sums[3]).tolist())

    def _note(self, found: Heldout, entry: dict[str, Any]) -> None:
        entry |= {"heldout_ce_dense": found.ce_dense, "heldout_ce": found.ce, "heldout_kl": found.kl}
        if self.spec.keep == "best" and (self.best is None or self._held_loss(found) < self._held_loss(self.best)):
            self.best = found
            self.best_values = {name: s.values.detach().clone() for name, s in self.optimizer.supports.items()}

    def _held_loss(self, found: Heldout) -> float:
        """The recipe's loss, on held-out text."""
        parts = {"ce": found.ce, "kl": found.kl, "ce+kl": found.ce + self.spec.kl_weight * found.kl}
        return parts[self.spec.loss]

    # ------------------------------------------------------------------ the folder

    def _log(self, entry: dict[str, Any]) -> None:
        if self.folder is not None and self.processes.main:
            self.folder.log(entry)

    def _checkpoint(self) -> None:
        if self.folder is not None and self.processes.main:
            tensors = {**self.optimizer.state(), **{f"best {name}": t for name, t in self.best_values.items()}}
            self.folder.save(tensors, {"step": self.step, "scales": self.optimizer.scales, **self._held()})

    def _held(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in ("before", "after", "best")}

    def _resume(self) -> None:
        assert self.folder is not None
        tensors, state = self.folder.resume()
        self.processes.wait()  # nobody may replace it before everybody has read it
        self.step = int(state["step"])
        self.optimizer.load(tensors, self.step, list(state["scales"]))
        for name in ("before", "after", "best"):
            setattr(self, name, None if state[name] is None else Heldout(*state[name]))
        device = {name: s.values.device for name, s in self.optimizer.supports.items()}
        self.best_values = {
            name: tensors[f"best {name}"].to(where) for name, where in device.items() if f"best {name}" in tensors
        }

    @torch.no_grad()
    def _put(self, values: dict[str, Tensor]) -> None:
        for name, support in self.optimizer.supports.items():
            support.values.copy_(values[name])
