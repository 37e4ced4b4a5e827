"""train: the loop that every learned baseline goes through.

1. Batches of whole rows, `tokens_per_step` tokens each, in the order that the seed decides (finetune/rows.py); a stream's own.
2. Each step: loss and gradients, AdamW at the step's rate; a line of log, at most some 1,000 to 2,000 of them a run.
3. Weights are kept at token counts that double, and at the end: the trajectory.
4. With a folder, weights, moments, what else the fit keeps, and log are written every `checkpoint_every` steps; the same call
   goes on from there with the same bits.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.tasks.text import as_rows
from swd_lens.train.baselines.checks import plain_number
from swd_lens.train.baselines.fits import Fit
from swd_lens.train.baselines.spec import TrainError, TrainSpec
from swd_lens.train.baselines.trajectory import Trajectory
from swd_lens.train.baselines.transcoders import Said
from swd_lens.train.finetune.folder import TrainingFolder
from swd_lens.train.finetune.rows import Rows, Shuffled, Streamed

_LOG_LINES = 1000


@dataclass
class Training:
    """One run, and how far it is.

    Attributes:
        fit: what is fitted to what.
        keep: steps after which weights are kept.
        trajectory: where they are kept.
        folder: for log and checkpoints, or None.
        lines: the log.
    """

    fit: Fit
    spec: TrainSpec
    rows: Rows
    keep: frozenset[int]
    trajectory: Trajectory
    folder: TrainingFolder | None = None
    checkpoint_every: int = 100
    title: str = "train"
    step: int = 0
    lines: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.rows_per_step = rows_per_step(self.spec, self.rows.row_length)
        self.parameters = [p for p in self.fit.coders.parameters() if p.requires_grad]
        self.log_every = max(1, self.spec.steps // _LOG_LINES)
        self.adam: Any = torch.optim.AdamW(
            self.parameters,
            lr=0.0,
            betas=(self.spec.beta1, self.spec.beta2),
            weight_decay=self.spec.weight_decay,
            foreach=False,  # one plain loop: batched versions add up in other orders on other machines
        )

    @property
    def tokens(self) -> int:
        """Gone through so far."""
        return self.step * self.spec.tokens_per_step

    def run(self, *, progress: bool) -> None:
        """From the checkpoint, or from the start, to the last step."""
        last = 0 if self.folder is None else self.folder.last_step()
        if last:
            self._resume()
        if self.folder is not None:
            self.folder.start(last)
        batches = self.rows.batches(self.rows_per_step, self.spec.seed, self.step)
        if not last:
            self.fit.begin(next(self.rows.batches(self.rows_per_step, self.spec.seed, 0)))
        total = self.spec.steps
        with (
            self.fit.running(),
            tqdm(
                total=total, initial=self.step, desc=self.title, unit="step", disable=not progress, leave=False
            ) as bar,
        ):
            while self.step < total:
                self._one(next(batches))
                if self.lines:
                    bar.set_postfix({"loss": f"{self.lines[-1]['loss']:.4g}"}, refresh=False)
                bar.update()

    def _one(self, rows: Tensor) -> None:
        number, rate = self.step + 1, self.spec.rate(self.step + 1)
        coders: Any = self.fit.coders.values()
        for coder in coders:
            coder.before_step()
        self.adam.zero_grad()
        with torch.enable_grad(), self._autocast():
            loss, said = self.fit.loss(rows, number)
        loss.backward()
        self._require_finite(float(loss.detach()), number, rate)
        self.fit.after_backward(number)
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.step = number
        self._log(float(loss.detach()), rate, said)
        if number in self.keep:
            for coder in coders:
                coder.before_step()  # what is kept is as the next step would find it
            self.trajectory.add(self.tokens, self.fit.coders.state_dict())
        if self.folder is not None and (number % self.checkpoint_every == 0 or number == self.spec.steps):
            self.folder.save(self._state(), {"step": number, "kept": list(self.trajectory)})

    def _autocast(self) -> Any:
        if self.spec.autocast is None:
            return nullcontext()
        return torch.autocast(self.parameters[0].device.type, dtype=getattr(torch, self.spec.autocast))

    def _require_finite(self, loss: float, number: int, rate: float) -> None:
        if math.isfinite(loss):
            return
        there = 0 if self.folder is None else self.folder.last_step()
        kept = (
            ""
            if self.folder is None
            else f" {self.folder.path} keeps {f'step {there}' if there else 'no checkpoint yet'}."
        )
        raise TrainError(
            f"step {number} of {self.spec.steps}: the loss is {loss}, at learning rate {rate:.3g}.{kept} Lower learning_rate"
        )

    def _log(self, loss: float, rate: float, said: Said) -> None:
        if self.step % self.log_every and self.step not in (1, self.spec.steps) and self.step not in self.keep:
            return
        values = {name: float(value) for name, value in said.items()}
        entry = {"step": self.step, "tokens": self.tokens, "loss": loss, "learning_rate": rate, **values}
        self.lines.append(entry)
        if self.folder is not None:
            self.folder.log(entry)

    # ------------------------------------------------------------------ resuming

    def _state(self) -> dict[str, Tensor]:
        named = {f"coder.{name}": t for name, t in self.fit.coders.state_dict().items()}
        for i, p in enumerate(self.parameters):
            moments = self.adam.state[p]
            named[f"first.{i}"], named[f"second.{i}"] = moments["exp_avg"], moments["exp_avg_sq"]
        return named | {f"fit.{name}": t for name, t in self.fit.state().items()}

    def _resume(self) -> None:
        assert self.folder is not None
        named, state = self.folder.resume()
        self.step = int(state["step"])
        self.lines = [line for line in self.folder.lines() if line["step"] <= self.step]
        for tokens in state["kept"]:
            self.trajectory.found(int(tokens))
        self.fit.coders.load_state_dict(_under("coder.", named))
        self.fit.load_state(_under("fit.", named))
        for i, p in enumerate(self.parameters):
            moments = {"exp_avg": named[f"first.{i}"].to(p.device), "exp_avg_sq": named[f"second.{i}"].to(p.device)}
            self.adam.state[p] = {"step": torch.tensor(float(self.step)), **moments}


def _under(prefix: str, named: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in named.items() if name.startswith(prefix)}


# ---------------------------------------------------------------------------------------------- what is asked for


def text_of(tokens: Any, model: Any) -> Rows:
    """Training text from whatever a user gave: rows in memory are shuffled by the seed, streams keep their order.

    Raises:
        TokenError: see `swd_lens.tasks.streams.as_stream`.
    """
    if isinstance(tokens, TokenStream | np.memmap | Iterator):
        return Streamed(as_stream(tokens, model))
    return Shuffled(as_rows(tokens, model))


def rows_per_step(spec: TrainSpec, row_length: int) -> int:
    """Whole rows that make a step's tokens.

    Raises:
        TrainError: they do not divide.
    """
    if spec.tokens_per_step % row_length:
        raise TrainError(
            f"tokens_per_step={spec.tokens_per_step} is no multiple of the rows' {row_length} tokens; "
            f"take {max(1, spec.tokens_per_step // row_length) * row_length}"
        )
    return spec.tokens_per_step // row_length


def require_enough(spec: TrainSpec, rows: Rows) -> None:
    """Raises TrainError where the text has fewer rows than one step takes."""
    wanted = rows_per_step(spec, rows.row_length)
    if rows.n_rows < wanted:
        raise TrainError(
            f"tokens has {rows.n_rows} rows of {rows.row_length} tokens, a step of tokens_per_step={spec.tokens_per_step} takes "
            f"{wanted}; give more text, or a smaller tokens_per_step"
        )


def kept_steps(spec: TrainSpec, keep: Iterable[int] | int | None) -> frozenset[int]:
    """Steps after which weights are kept: those that reach the token counts asked for, or 1, 2, 4, ...; and the last.

    Raises:
        TrainError: a count that is not positive, or beyond the budget.
    """
    if keep is None:
        return frozenset({2**i for i in range(spec.steps.bit_length()) if 2**i <= spec.steps} | {spec.steps})
    counts = [keep] if isinstance(keep, int) else [plain_number(tokens) for tokens in keep]
    for tokens in counts:
        if (
            not isinstance(tokens, int)
            or isinstance(tokens, bool)
            or not 0 < tokens <= spec.steps * spec.tokens_per_step
        ):
            raise TrainError(f"keep={counts!r}: give token counts from 1 to n_tokens={spec.n_tokens}, not {tokens!r}")
    return frozenset({-(-tokens // spec.tokens_per_step) for tokens in counts} | {spec.steps})
