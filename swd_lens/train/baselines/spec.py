"""Settings of the learned baselines: what is the same for all (TrainSpec), and each method's own; checked (checks.py).

Numbers stand with where they come from: the paper's appendix where it speaks, else the method's public recipe (method.md §§1, 2).
The named recipes are in presets.py.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from swd_lens.train.baselines.checks import TrainError, check_names, number, one_of, whole

SCHEDULES = ("constant", "linear", "cosine")
TRANSCODER_LOSSES = ("mse", "normed")
IMPORTANCES = ("vector_mlp", "shared_mlp")
FIDELITIES = ("recon", "kl")
ROUTINGS = ("all", "layerwise", "subset")
MASKS = ("continuous", "binomial")
REDUCTIONS = ("sum", "mean")
ADVERSARIES = ("oneshot", "persistent")
SCOPES = ("token", "batch")
STARTS = ("mean", "median")
AUTOCASTS = ("bfloat16", "float16", None)
_MULTIPLE = re.compile(r"^(\d+(?:\.\d+)?)x$")


@dataclass(frozen=True)
class TrainSpec:
    """What every learned baseline is trained by."""

    # The budget: tokens in all, text gone through again where it is shorter (the paper's "optimizer-replay tokens").
    # 2,048,000 are the 500 steps after which the paper's transcoders of GPT-2's c_proj are judged.
    n_tokens: int = 2_048_000
    # Every trained baseline of the paper takes 4,096 tokens per optimizer step (method.md §0.6: its budgets are multiples).
    tokens_per_step: int = 4096
    # Units of each site: a number, or "4x" for so many times the larger of d_in and d_out.
    width: int | str = 3072
    learning_rate: float | int = 4e-4
    beta1: float | int = 0.9
    beta2: float | int = 0.999
    weight_decay: float | int = 0.0
    # Steps in which the rate rises from zero; None: the method's share of all.
    warmup_steps: int | None = None
    # After the warm-up.
    schedule: str = "constant"
    # What is left of the rate at the end of "linear" or "cosine".
    final: float | int = 0.1
    # What matrix products in training run in; None: float32. Weights and moments stay in float32.
    autocast: str | None = None
    seed: int = 42

    def __post_init__(self) -> None:
        for name in ("n_tokens", "tokens_per_step"):
            whole(name, getattr(self, name), 1)
        whole("seed", self.seed, 0)
        if self.warmup_steps is not None:
            whole("warmup_steps", self.warmup_steps, 0)
        number("learning_rate", self.learning_rate, math.inf, zero=False)
        number("weight_decay", self.weight_decay, math.inf)
        number("final", self.final, 1.0)
        for name in ("beta1", "beta2"):
            number(name, getattr(self, name), 1.0, below=True)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("autocast", self.autocast, AUTOCASTS)
        self.units(1, 1)

    @property
    def steps(self) -> int:
        """Optimizer steps; the last may go beyond n_tokens."""
        return -(-self.n_tokens // self.tokens_per_step)

    def units(self, d_in: int, d_out: int) -> int:
        """Units of a site of this shape. The paper's 3,072 at GPT-2's c_proj and c_fc are "1x", its TC24k at the MLP "32x".

        Raises:
            TrainError: `width` is neither a number nor a multiple.
        """
        if isinstance(self.width, str) and (found := _MULTIPLE.match(self.width)) and float(found[1]) > 0:
            return max(1, round(float(found[1]) * max(d_in, d_out)))
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise TrainError(
                f'width={self.width!r}: give a number of units, or "4x" for four times the larger side of the matrix'
            )
        return self.width

    def warmup(self) -> int:
        """Steps of warm-up: as set, or the method's share of all."""
        return self._default_warmup() if self.warmup_steps is None else self.warmup_steps

    def _default_warmup(self) -> int:
        return 0

    def rate(self, step: int) -> float:
        """The learning rate of a step, counted from 1 (method.md §1.6)."""
        warm = self.warmup()
        if step <= warm:
            return self.learning_rate * step / warm
        if self.schedule == "constant":
            return float(self.learning_rate)
        progress = (step - warm - 1) / max(1, self.steps - warm - 1)
        left = 1 - progress if self.schedule == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
        return self.learning_rate * (self.final + (1 - self.final) * left)

    def as_dict(self) -> dict[str, Any]:
        """All settings as plain JSON values."""
        return asdict(self)


Spec = TypeVar("Spec", bound=TrainSpec)


@dataclass(frozen=True)
class TranscoderSpec(TrainSpec):
    """A ReLU transcoder with an L1 penalty (method.md §2.1; the paper's use §2.3). The defaults are the paper's TC3k."""

    # On the sum of activations, averaged over tokens. 5e-5 at c_proj, 1.4e-4 at the whole MLP.
    l1: float | int = 5e-5
    # "normed": the squared error over the target's norm, per token, as the public recipe divides; "mse": not divided.
    loss: str = "normed"
    # Decoder rows have norm 1 before every step, and their gradients no part along them.
    unit_decoder: bool = True
    # A feature counts as dead when so many tokens in a row left it at zero.
    dead_after: int = 100_000
    # Dead features get gradients by a term of their own (transcoders.py, `ghost_loss`). The public recipe has it on, with a slip.
    ghost: bool = False
    # Of the first batch, what b_dec and b_out are set to: "mean", or "median", its geometric median.
    start: str = "mean"

    def __post_init__(self) -> None:
        super().__post_init__()
        number("l1", self.l1, math.inf)
        one_of("loss", self.loss, TRANSCODER_LOSSES)
        one_of("unit_decoder", self.unit_decoder, (True, False))
        one_of("ghost", self.ghost, (True, False))
        one_of("start", self.start, STARTS)
        whole("dead_after", self.dead_after, 1)

    def _default_warmup(self) -> int:
        # 5,000 in the public recipe, which cannot be meant for 500 steps (method.md §2.4).
        return min(5000, max(1, self.steps // 20))


@dataclass(frozen=True)
class VpdSpec(TrainSpec):
    """Rank-one parameter components with learned causal importance (method.md §1). The defaults are the paper's VPD-Recon-CI."""

    n_tokens: int = 4_194_304
    learning_rate: float | int = 3e-4
    schedule: str = "cosine"
    seed: int = 0
    # "recon": squared error of the importance-masked output (VPD-Recon-CI); "kl": KL of the logits under stochastic masks.
    fidelity: str = "recon"
    # Of the fidelity term; 2.0 in the public GPT-2 recipe of the KL.
    fidelity_weight: float | int = 1.0
    # One small network per component on the whole input, or one for all.
    importance: str = "vector_mlp"
    hidden: int = 128
    # Of the minimality term sum_c mean_t (g_upper + eps)^p. reduction="mean": the mean over components, in place of the sum.
    minimality: float | int = 1e-4
    reduction: str = "sum"
    p_start: float | int = 2.0
    p_end: float | int = 0.3
    # Frequency term of the minimality: mean_c log2(1 + sum_c); 0 in the public GPT-2 recipe.
    beta: float | int = 0.0
    # Only "kl": all matrices masked at once; one at a time and averaged; or, at every position, a number of them drawn from 1 to
    # all, the others dense there. All the same for a single matrix.
    routing: str = "all"
    # Only "kl": u of the masks g + (1 - g) u is uniform, or 0 or 1; then importance is jittered, too (method.md §1.4).
    masks: str = "continuous"
    # Only "kl": what V U lacks of W, as a component with a mask of its own.
    delta: bool = True
    # Only "kl": weight of the KL under bad masks between g and 1, which an adversary finds (adversary.py; method.md §1.5): the
    # masks of every token, or of the batch. 0 leaves it out.
    adversarial: float | int = 0.0
    adversary: str = "oneshot"
    adversarial_scope: str = "token"
    # "oneshot": so many steps of this size along the gradient's sign, from a random start (one-shot PGD).
    adversarial_steps: int = 4
    adversarial_rate: float | int = 0.25
    # "persistent": sources that live on from step to step (persistent PGD). So many steps of Adam before each step's loss, one
    # more after it; the rate rises from zero in the first 2.5% of training.
    persistent_steps: int = 2
    persistent_rate: float | int = 0.01
    persistent_warmup: float | int = 0.025
    persistent_beta1: float | int = 0.5
    persistent_beta2: float | int = 0.99
    # Weight of ||W - VU||^2 in the main loss; the delta lets it be 0.
    faithfulness: float | int = 0.0
    # Largest norm of the gradients of V and U, all matrices taken together; None: as they are. Importance is not clipped.
    clip: float | int | None = None
    # Steps of AdamW on ||W - VU||^2 before the first token; V and U start random.
    faithfulness_steps: int = 200
    faithfulness_rate: float | int = 1e-2
    faithfulness_decay: float | int = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        whole("hidden", self.hidden, 1)
        whole("adversarial_steps", self.adversarial_steps, 1)
        whole("faithfulness_steps", self.faithfulness_steps, 0)
        for name in ("minimality", "beta", "faithfulness", "fidelity_weight", "faithfulness_decay", "adversarial"):
            number(name, getattr(self, name), math.inf)
        whole("persistent_steps", self.persistent_steps, 0)
        for name in ("p_start", "p_end", "faithfulness_rate", "adversarial_rate", "persistent_rate"):
            number(name, getattr(self, name), math.inf, zero=False)
        if self.clip is not None:
            number("clip", self.clip, math.inf, zero=False)
        number("persistent_warmup", self.persistent_warmup, 1.0)
        for name in ("persistent_beta1", "persistent_beta2"):
            number(name, getattr(self, name), 1.0, below=True)
        one_of("fidelity", self.fidelity, FIDELITIES)
        one_of("importance", self.importance, IMPORTANCES)
        one_of("reduction", self.reduction, REDUCTIONS)
        one_of("routing", self.routing, ROUTINGS)
        one_of("masks", self.masks, MASKS)
        one_of("adversary", self.adversary, ADVERSARIES)
        one_of("adversarial_scope", self.adversarial_scope, SCOPES)
        one_of("delta", self.delta, (True, False))
        if self.fidelity == "recon":
            for name, without in (("routing", "all"), ("masks", "continuous"), ("adversarial", 0)):
                if getattr(self, name) != without:
                    raise TrainError(
                        f"{name}={getattr(self, name)!r} is for fidelity='kl': by reconstruction the masks are the importances "
                        f"themselves; leave {name} out, or call vpd_kl"
                    )

    def _default_warmup(self) -> int:
        return int(0.01 * self.steps)

    def p(self, step: int) -> float:
        """The power of the minimality term at a step, counted from 1; falls along a line over the whole training."""
        return float(self.p_start + (self.p_end - self.p_start) * (step - 1) / max(1, self.steps - 1))


def resolve(spec: Spec, overrides: Mapping[str, Any]) -> Spec:
    """`check_names` of a TrainSpec, with its type."""
    return check_names(spec, overrides)
