"""The training engine: steps, log, checkpoints and resumption of every run in swd_lens.train.

A `Fit` says what is trained and what a batch's gradients are; `Engine` does the rest.
1. Each step: the batch of its number, its gradients, a check that the loss is finite, AdamW at the schedule's rate, a log line.
2. Every `eval_every` steps and after the last: what the fit measures on held-out text joins the line.
3. Every `checkpoint_every` steps and after the last: parameters, moments and what else the fit keeps go to the folder. The same
   call goes on from there and ends with the same bits.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.errors import ResumeError
from swd_lens.base.interrupted import reached
from swd_lens.base.progress import tqdm
from swd_lens.base.sealed import readable
from swd_lens.train.folder import WHAT, Checkpoint, TrainingFolder
from swd_lens.train.rows import Processes, Rows

# What a step logs beside its loss: numbers, still on the device.
Logged = dict[str, Tensor]
# What a progress bar shows of a line of log.
_SHOWN = ("loss", "density", "heldout_ce")
_SMALLEST_RMS = 1e-8


class Fit(ABC):
    """A model in training: its parameters, and one step's gradients.

    Attributes:
        title, unit: of the progress bar.
        spec: settings of the run; beta1, beta2 and weight_decay are AdamW's, seed decides the order of the rows.
        steps: how many there are.
        parameters: what AdamW trains, by the names that their moments have in a checkpoint.
        scales: factors of the learning rate, by the same names; 1 where a name is missing.
        eps: AdamW's.
        advice: the last words of the error where the loss is not finite.
    """

    title: str
    unit: ClassVar[str] = "step"
    spec: Any
    steps: int
    parameters: dict[str, Tensor]
    scales: Mapping[str, float] = {}
    eps: float = 1e-8
    advice: ClassVar[str] = "Lower learning_rate"

    @abstractmethod
    def schedule(self, step: int) -> dict[str, float]:
        """Values of the schedule in a step, counted from 1, as the log names them; "learning_rate" is one."""

    @abstractmethod
    def gradients(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[float, dict[str, Any]]:
        """The loss of a batch and what else to log of it (numbers or tensors of one). The parameters' `grad` is set."""

    @abstractmethod
    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        """Tensors and plain JSON values that a checkpoint needs besides the moments."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        """Restore what `state` gave; other names may stand beside its own."""

    def start(self) -> dict[str, float] | None:
        """Do the part of the start that a resumed run leaves out; returns the log of step 0, or None for no such line."""
        return None

    def running(self) -> AbstractContextManager[Any]:
        """Open while steps are taken."""
        return nullcontext()

    def is_finite(self, loss: float) -> bool:
        """Whether training may go on with this loss and these gradients."""
        return math.isfinite(loss)

    def adjust_gradients(self, step: int) -> dict[str, float]:
        """Change the gradients before AdamW's step; returns what to log of it."""
        return {}

    def after_update(self, step: int) -> None:
        """Change the parameters after AdamW's step."""
        return None

    def evaluate(self) -> dict[str, float]:
        """Measure on held-out text; returns values as the log names them."""
        return {}

    def keep(self, tokens: int) -> None:
        """Called after the steps of `Engine.keep`, with the tokens gone through."""
        return None


@dataclass
class Engine:
    """One run, and how far it is."""

    fit: Fit  # what is trained
    rows: Rows  # training text
    rows_per_step: int  # rows of a batch
    folder: TrainingFolder | None  # for log and checkpoints, or None
    checkpoint_every: int  # steps between checkpoints
    eval_every: int | None = None  # steps between evaluations; None = never
    log_every: int = 1  # steps between lines of log; the first, the last and those of `keep` always have one
    keep: frozenset[int] = frozenset()  # steps after which `fit.keep` is called
    processes: Processes | None = None  # where training is shared by several; None = one
    step: int = 0  # the last one done
    lines: list[dict[str, Any]] = field(default_factory=list)  # the log so far
    _adam: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        # One plain loop over tensors: the fused and batched versions add up in other orders on other machines.
        self._adam = torch.optim.AdamW(
            [{"params": [p]} for p in self.fit.parameters.values()],
            lr=0.0,
            betas=(self.fit.spec.beta1, self.fit.spec.beta2),
            eps=self.fit.eps,
            weight_decay=self.fit.spec.weight_decay,
            foreach=False,
        )

    @property
    def tokens(self) -> int:
        """Tokens gone through so far."""
        return self.step * self.rows_per_step * self.rows.row_length

    def run(self, *, progress: bool) -> None:
        """Train to the last step, from the folder's checkpoint or from the start."""
        checkpoint = None if self.folder is None else self.folder.checkpoint()
        if checkpoint is not None:
            self._resume(checkpoint)
        main = self.processes is None or self.processes.main
        if not main:
            self.folder = None  # written by the main process; this one has read its checkpoint
        if self.folder is not None:
            self.folder.begin(None if checkpoint is None else checkpoint.lines)
        if checkpoint is None and (entry := self.fit.start()) is not None:
            self._log({"step": 0, "tokens": 0, **entry})
        batches = self.rows.batches(self.rows_per_step, self.fit.spec.seed, self.step)
        shown = {"desc": self.fit.title, "unit": self.fit.unit, "disable": not (progress and main)}
        bar: Any = tqdm(total=self.fit.steps, initial=self.step, leave=False, **shown)
        with self.fit.running(), bar:
            while self.step < self.fit.steps:
                self.advance(next(batches))
                if self.lines:
                    line = self.lines[-1]
                    bar.set_postfix({name: f"{line[name]:.4g}" for name in _SHOWN if name in line}, refresh=False)
                bar.update()

    def advance(self, rows: Int[Tensor, "_rows pos"]) -> None:
        """Take one step; write its line of log and, where one is due, its checkpoint."""
        number = self.step + 1
        scheduled = self.fit.schedule(number)
        rate = scheduled["learning_rate"]
        loss, measured = self.fit.gradients(rows, number)
        if not self.fit.is_finite(loss):
            kept = "" if self.folder is None else f" {self.folder.path} keeps {self.folder.kept(self.fit.unit)}."
            raise self.fit.spec.error(
                f"{self.fit.unit} {number} of {self.fit.steps}: the loss is {loss} or its gradients are not finite, at learning "
                f"rate {rate:.3g}.{kept} {self.fit.advice}"
            )
        adjusted = self.fit.adjust_gradients(number)
        for group, name in zip(self._adam.param_groups, self.fit.parameters, strict=True):
            group["lr"] = rate * self.fit.scales.get(name, 1.0)
        self._adam.step()
        self._adam.zero_grad()
        self.fit.after_update(number)
        self.step = number
        last, kept = number == self.fit.steps, number in self.keep
        entry = {"step": number, "tokens": self.tokens, "loss": loss, **scheduled, **measured, **adjusted}
        if self.eval_every is not None and (number % self.eval_every == 0 or last):
            entry |= self.fit.evaluate()
        if number % self.log_every == 0 or number == 1 or last or kept:
            self._log(entry)
        if kept:
            self.fit.keep(self.tokens)
        if self.folder is not None and (number % self.checkpoint_every == 0 or last):
            tensors, values = self.fit.state()
            moments = {
                f"{moment}.{name}": self._adam.state[p][key]
                for name, p in self.fit.parameters.items()
                for moment, key in (("first", "exp_avg"), ("second", "exp_avg_sq"))
            }
            self.folder.save({**tensors, **moments}, {"step": number, **values})
            reached(f" behind step {number:,} of {self.fit.steps:,}")

    def _log(self, entry: Mapping[str, Any]) -> None:
        line = {name: value if isinstance(value, int) else float(value) for name, value in entry.items()}
        self.lines.append(line)
        if self.folder is not None:
            self.folder.log(line)

    def _resume(self, checkpoint: Checkpoint) -> None:
        if self.processes is not None:
            self.processes.wait()  # nobody may replace the checkpoint before everybody has read it
        tensors, self.step, self.lines = checkpoint.tensors, checkpoint.step, list(checkpoint.lines)
        with readable(checkpoint.path, WHAT, ResumeError):  # what the checkpoint names may have changed
            self.fit.load_state(tensors, checkpoint.values)
            for name, p in self.fit.parameters.items():
                first, second = (tensors[f"{moment}.{name}"].to(p).view_as(p) for moment in ("first", "second"))
                self._adam.state[p] = {
                    "step": torch.tensor(float(self.step), dtype=torch.float32),
                    "exp_avg": first,
                    "exp_avg_sq": second,
                }


def autocast(device: torch.device, dtype: str | None) -> AbstractContextManager[Any]:
    """torch.autocast to the dtype of this name, or nothing for None."""
    return nullcontext() if dtype is None else torch.autocast(device.type, dtype=getattr(torch, dtype))


def root_mean_square(tensors: Sequence[Tensor]) -> float:
    """Over all entries, summed in float64."""
    total = sum(float(t.double().square().sum()) for t in tensors)
    return math.sqrt(total / sum(t.numel() for t in tensors))


def normalized(gradients: Sequence[Tensor], rms: float, added: float = 0.0) -> list[Tensor]:
    """All divided by (rms + added), rms being their common root mean square, where that exceeds 1e-8; no clipping: always."""
    return [g / (rms + added) for g in gradients] if rms > _SMALLEST_RMS else list(gradients)
