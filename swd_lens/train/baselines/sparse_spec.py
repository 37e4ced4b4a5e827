"""Settings of sparse pretraining: the schedule (sparse_schedule.py), the optimizer, and the presets."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from swd_lens.train.baselines.sparse_schedule import Schedule
from swd_lens.train.baselines.spec import TrainError, check_names, number, one_of, whole


@dataclass(frozen=True)
class SparseSpec(Schedule):
    """The defaults are the paper's (app. sparse-pretrain-setting; method.md §3)."""

    # Updates after which training ends, within the schedule; None: at its end. The paper's model is that of update 22,000.
    stop_after: int | None = None
    beta1: float | int = 0.9
    beta2: float | int = 0.95
    # As large as the normalised gradients: between Adam and plain gradient descent.
    eps: float | int = 0.1
    weight_decay: float | int = 1e-3
    # What matrix products run in; weights and moments stay in float32.
    autocast: str | None = "bfloat16"
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("updates", "tokens_per_update"):
            whole(name, getattr(self, name), 1)
        whole("seed", self.seed, 0)
        if self.stop_after is not None:
            whole("stop_after", self.stop_after, 1)
            if self.stop_after > self.updates:
                raise TrainError(f"stop_after={self.stop_after}: the schedule has {self.updates} updates")
        for name in ("learning_rate", "eps", "end_density"):
            number(name, getattr(self, name), 1.0 if name == "end_density" else math.inf, zero=False)
        number("weight_decay", self.weight_decay, math.inf)
        for name in ("beta1", "beta2"):
            number(name, getattr(self, name), 1.0, below=True)
        number("warmup", self.warmup, 1.0, below=True)
        number("falling_until", self.falling_until, 1.0)
        if self.warmup > self.falling_until:
            raise TrainError(
                f"warmup={self.warmup} ends after falling_until={self.falling_until}; density falls between"
            )
        one_of("autocast", self.autocast, ("bfloat16", None))

    @property
    def last(self) -> int:
        """The last update that is made."""
        return self.updates if self.stop_after is None else self.stop_after

    def changed(self, settings: Mapping[str, Any]) -> "SparseSpec":
        """With other values.

        Raises:
            TrainError: an unknown setting (the nearest is named), or a value out of range.
        """
        return check_names(self, settings)


# "small": ours, for networks of some hundred thousand weights and a CPU: a short run of many small updates. On the embedded
# model's shape and text, 409,600 tokens into a schedule of 1M, held-out CE was 2.17 with this rate, 2.39 with 3e-3.
PRESETS: Mapping[str, SparseSpec] = {
    "paper": SparseSpec(stop_after=22_000),
    "small": SparseSpec(updates=4000, tokens_per_update=2048, learning_rate=1e-2, warmup=0.04, autocast=None),
}


def named(preset: str) -> SparseSpec:
    """The settings of this name.

    Raises:
        TrainError: there are none.
    """
    one_of("preset", preset, tuple(PRESETS))
    return PRESETS[preset]
