"""train: the loop that every learned baseline goes through.

1. Batches of whole rows, `tokens_per_step` tokens each, in the order that the seed decides (finetune/rows.py).
2. Each step: loss and gradients, Adam or AdamW at the step's rate, one line of log.
3. Weights are kept at token counts that double, and at the end: the trajectory.
4. With a folder, weights, moments and log are written every `checkpoint_every` steps; the same call goes on from there with the
   same bits.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from tqdm.auto import tqdm

from swd_lens.baselines.learned.spec import TrainError, TrainSpec
from swd_lens.finetune.rows import Rows

Loss = Callable[[Tensor, int], tuple[Tensor, dict[str, float]]]


class Training:
    """Args: coder: what is trained, with before_step() and adjust_gradients(); loss: (rows, step) -> loss and what to log."""

    def __init__(self, coder: Any, spec: TrainSpec, rows: Rows, loss: Loss, keep: tuple[int, ...] | None = None):
        self.coder, self.spec, self.rows, self.loss = coder, spec, rows, loss
        self.rows_per_step = rows_per_step(spec, rows.row_length)
        self.tokens_per_step = self.rows_per_step * rows.row_length
        self.step = 0
        self.lines: list[dict[str, Any]] = []
        self.checkpoints: dict[int, dict[str, Tensor]] = {}
        self.keep = doubling(spec.steps) if keep is None else {-(-tokens // self.tokens_per_step) for tokens in keep}
        self.parameters = [p for p in coder.parameters() if p.requires_grad]
        self.adam: Any = torch.optim.AdamW(
            self.parameters,
            lr=0.0,
            betas=(spec.beta1, spec.beta2),
            weight_decay=spec.weight_decay,
            foreach=False,  # one plain loop: batched versions add up in other orders on other machines
        )

    def run(self, *, progress: bool, on_step: Callable[["Training"], None] = lambda training: None) -> None:
        """From the present step to the last."""
        batches = self.rows.batches(self.rows_per_step, self.spec.seed, self.step)
        with tqdm(total=self.spec.steps, initial=self.step, unit="step", disable=not progress, leave=False) as bar:
            while self.step < self.spec.steps:
                self._one(next(batches))
                bar.set_postfix({"loss": f"{self.lines[-1]['loss']:.4g}"}, refresh=False)
                bar.update()
                on_step(self)

    def _one(self, rows: Tensor) -> None:
        number = self.step + 1
        self.coder.before_step()
        self.adam.zero_grad()
        with torch.enable_grad():
            loss, said = self.loss(rows, number)
            loss.backward()
        rate = self.spec.rate(number)
        if not math.isfinite(float(loss)):
            raise TrainError(
                f"step {number} of {self.spec.steps}: the loss is {float(loss)}, at learning rate {rate:.3g}; lower learning_rate"
            )
        self.coder.adjust_gradients()
        for group in self.adam.param_groups:
            group["lr"] = rate
        self.adam.step()
        self.step = number
        tokens = number * self.tokens_per_step
        self.lines.append({"step": number, "tokens": tokens, "loss": float(loss), "learning_rate": rate, **said})
        if number in self.keep or number == self.spec.steps:
            self.coder.before_step()  # what is kept is as the next step would find it
            self.checkpoints[tokens] = {name: t.detach().cpu().clone() for name, t in self.coder.state_dict().items()}

    def log(self) -> pd.DataFrame:
        return pd.DataFrame(self.lines)

    # ------------------------------------------------------------------ resuming

    def state(self) -> dict[str, Tensor]:
        named = {f"coder.{name}": t for name, t in self.coder.state_dict().items()}
        for i, p in enumerate(self.parameters):
            moments = self.adam.state[p]
            named[f"first.{i}"], named[f"second.{i}"] = moments["exp_avg"], moments["exp_avg_sq"]
        for tokens, weights in self.checkpoints.items():
            named |= {f"kept.{tokens}.{name}": t for name, t in weights.items()}
        return named

    def load(self, named: Mapping[str, Tensor], step: int, lines: list[dict[str, Any]]) -> None:
        """Go on from a `state()` after this many steps."""
        self.step, self.lines = step, lines
        self.coder.load_state_dict({name[6:]: t for name, t in named.items() if name.startswith("coder.")})
        for i, p in enumerate(self.parameters):
            moments = {"exp_avg": named[f"first.{i}"].to(p.device), "exp_avg_sq": named[f"second.{i}"].to(p.device)}
            self.adam.state[p] = {"step": torch.tensor(float(step)), **moments}
        for name, t in named.items():
            if name.startswith("kept."):
                _, tokens, of = name.split(".", 2)
                self.checkpoints.setdefault(int(tokens), {})[of] = t


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


def doubling(steps: int) -> set[int]:
    """1, 2, 4, ... and the last."""
    return {2**i for i in range(steps.bit_length()) if 2**i <= steps} | {steps}


def trained(module: nn.Module) -> list[Tensor]:
    return [p for p in module.parameters() if p.requires_grad]
