"""Settings of the learned baselines: what is the same for all (TrainSpec), and each method's own.

Numbers stand with where they come from: the paper's appendix where it speaks, else the method's public recipe (method.md §§1, 2).
"""

import difflib
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

SCHEDULES = ("constant", "linear", "cosine")
TRANSCODER_LOSSES = ("mse", "normed")
IMPORTANCES = ("vector_mlp", "shared_mlp")


class TrainError(ValueError):
    """A baseline cannot be trained like this, or its training failed; the message says why and what to do."""


@dataclass(frozen=True)
class TrainSpec:
    """What every learned baseline is trained by."""

    # Tokens in all. 2,048,000 are the 500 steps after which the paper's transcoders of GPT-2's c_proj are judged.
    n_tokens: int = 2_048_000
    # Every trained baseline of the paper takes 4,096 tokens per optimizer step (method.md §0.6: its budgets are multiples).
    tokens_per_step: int = 4096
    learning_rate: float = 4e-4
    beta1: float | int = 0.9
    beta2: float | int = 0.999
    weight_decay: float | int = 0.0
    # Steps in which the rate rises from zero; None: a share of all, see each method.
    warmup_steps: int | None = None
    # After the warm-up.
    schedule: str = "constant"
    # What is left of the rate at the end of "linear" or "cosine".
    final: float | int = 0.1
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("n_tokens", "tokens_per_step"):
            _whole(name, getattr(self, name), 1)
        _whole("seed", self.seed, 0)
        if self.warmup_steps is not None:
            _whole("warmup_steps", self.warmup_steps, 0)
        _number("learning_rate", self.learning_rate, math.inf, zero=False)
        _number("weight_decay", self.weight_decay, math.inf)
        _number("final", self.final, 1.0)
        for name in ("beta1", "beta2"):
            _number(name, getattr(self, name), 1.0)
        _one_of("schedule", self.schedule, SCHEDULES)

    @property
    def steps(self) -> int:
        return -(-self.n_tokens // self.tokens_per_step)

    def warmup(self) -> int:
        """Steps of warm-up: as set, or the method's share of all."""
        return self._default_warmup() if self.warmup_steps is None else self.warmup_steps

    def _default_warmup(self) -> int:
        return 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1."""
        warm = self.warmup()
        if step <= warm:
            return self.learning_rate * step / warm
        if self.schedule == "constant":
            return self.learning_rate
        progress = (step - warm - 1) / max(1, self.steps - warm - 1)
        left = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final + (1 - self.final) * left)

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values."""
        return asdict(self)


@dataclass(frozen=True)
class TranscoderSpec(TrainSpec):
    """A ReLU transcoder with an L1 penalty (method.md §2.1; the paper's use §2.3)."""

    # Features. 3,072 and 12,288 at GPT-2's c_proj, 24,576 at its whole MLP.
    width: int = 3072
    # On the sum of activations, averaged over tokens. 5e-5 at c_proj, 1.4e-4 at the whole MLP.
    l1: float | int = 5e-5
    # "normed": the squared error over the target's norm, per token, as the public recipe divides; "mse": not divided.
    loss: str = "normed"
    # Decoder rows have norm 1 before every step, and their gradients no part along them.
    unit_decoder: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _whole("width", self.width, 1)
        _number("l1", self.l1, math.inf)
        _one_of("loss", self.loss, TRANSCODER_LOSSES)
        _one_of("unit_decoder", self.unit_decoder, (True, False))

    def _default_warmup(self) -> int:
        # 5,000 in the public recipe, which cannot be meant for 500 steps (method.md §2.4).
        return min(5000, max(1, self.steps // 20))


@dataclass(frozen=True)
class VpdSpec(TrainSpec):
    """Rank-one parameter components with learned causal importance (method.md §1)."""

    learning_rate: float = 3e-4
    schedule: str = "cosine"
    seed: int = 0
    # Components; 3,072 at GPT-2's c_proj.
    width: int = 3072
    # "recon": squared error of the importance-masked output (VPD-Recon-CI); "kl": KL of the logits under stochastic masks.
    fidelity: str = "recon"
    # Of the fidelity term; 2.0 in the public GPT-2 recipe of the KL.
    fidelity_weight: float | int = 1.0
    # One small network per component on the whole input, or one for all.
    importance: str = "vector_mlp"
    hidden: int = 128
    # Of the minimality term sum_c mean_t (g_upper + eps)^p.
    minimality: float | int = 1e-4
    p_start: float | int = 2.0
    p_end: float | int = 0.3
    # Frequency term of the minimality: mean_c log2(1 + sum_c); 0 in the public GPT-2 recipe.
    beta: float | int = 0.0
    # What V U lacks of W, as a component with a mask of its own, in stochastic forwards only.
    delta: bool = True
    # In the main loss; the delta lets it be 0.
    faithfulness: float | int = 0.0
    # Steps of AdamW on ||W - VU||^2 before the first token; V and U start random.
    faithfulness_steps: int = 200
    faithfulness_rate: float = 1e-2
    faithfulness_decay: float | int = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("width", "hidden"):
            _whole(name, getattr(self, name), 1)
        _whole("faithfulness_steps", self.faithfulness_steps, 0)
        for name in ("minimality", "beta", "faithfulness", "fidelity_weight", "faithfulness_decay"):
            _number(name, getattr(self, name), math.inf)
        for name in ("p_start", "p_end", "faithfulness_rate"):
            _number(name, getattr(self, name), math.inf, zero=False)
        _one_of("fidelity", self.fidelity, ("recon", "kl"))
        _one_of("importance", self.importance, IMPORTANCES)
        _one_of("delta", self.delta, (True, False))

    def _default_warmup(self) -> int:
        return int(0.01 * self.steps)

    def p(self, step: int) -> float:
        """The power of the minimality term at a step, counted from 1; falls along a line over the whole training."""
        return self.p_start + (self.p_end - self.p_start) * (step - 1) / max(1, self.steps - 1)


def resolve(spec: TrainSpec, overrides: Mapping[str, Any]) -> Any:
    """The spec with some settings changed.

    Raises:
        TrainError: a setting that it does not have (the nearest is named), or a value out of range.
    """
    known = [field.name for field in fields(spec)]
    for name in overrides:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise TrainError(
                f"{type(spec).__name__} has no setting {name!r}; {f'did you mean {near[0]!r}? ' if near else ''}"
                f"Settings: {', '.join(known)}"
            )
    return replace(spec, **overrides)


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise TrainError(f"{name}={value!r}: give a whole number, {least} or more")


def _number(name: str, value: Any, most: float, *, zero: bool = True) -> None:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not (value >= 0 if zero else value > 0) or value > most or math.isinf(value):
        raise TrainError(f"{name}={value!r}: give a number {'of 0 or more' if zero else 'above 0'}")


def _one_of(name: str, value: Any, choices: tuple[Any, ...]) -> None:
    if value not in choices:
        raise TrainError(f"{name}={value!r}: choose one of {', '.join(map(repr, choices))}")
