"""Settings of the learned baselines, what is the same for all (TrainSpec) and each method's own, and their named recipes.

Numbers stand with where they come from: the paper's appendix where it speaks, else the method's public recipe (method.md §§1, 2).

Recipes: "paper" is what the paper trained on GPT-2 Small, as far as it says, the rest being the method's public recipe
(method.md §§1.6, 2.1); "small" is ours, the default, for hosts of some hundred channels, trained on a CPU in minutes. A recipe
named "..._mlp" takes the place of "..." where a whole MLP is replaced.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from swd_lens.base.errors import TrainError, quoted
from swd_lens.base.settings import AnySettings, Settings, preset, setting

DEFAULT = "small"
SCHEDULES = ("constant", "linear", "cosine")
_MULTIPLE = re.compile(r"^(\d+(?:\.\d+)?)x$")


@dataclass(frozen=True)
class TrainSpec(Settings):
    """Settings by which every learned baseline is trained.

    Class attributes:
        per_matrix: whether a whole MLP has a coder for each of its matrices, which gets the matrix's weight and bias.
    """

    error: ClassVar[type[Exception]] = TrainError
    per_matrix: ClassVar[bool] = False

    # The budget: tokens in all, text gone through again where it is shorter (the paper's "optimizer-replay tokens").
    # 2,048,000 are the 500 steps after which the paper's transcoders of GPT-2's c_proj are judged.
    n_tokens: int = setting(2_048_000, at_least=1)
    # Every trained baseline of the paper takes 4,096 tokens per optimizer step (method.md §0.6: its budgets are multiples).
    tokens_per_step: int = setting(4096, at_least=1)
    # Units of each site: a number, or "4x" for so many times the larger of d_in and d_out.
    width: int | str = 3072
    learning_rate: float | int = setting(4e-4, above=0)
    beta1: float | int = setting(0.9, at_least=0, below=1)
    beta2: float | int = setting(0.999, at_least=0, below=1)
    weight_decay: float | int = setting(0.0, at_least=0)
    # Steps in which the rate rises from zero; None: the method's share of all.
    warmup_steps: int | None = setting(None, at_least=0)
    # After the warm-up.
    schedule: str = setting("constant", one_of=SCHEDULES)
    # What is left of the rate at the end of "linear" or "cosine".
    final: float | int = setting(0.1, at_least=0, at_most=1)
    # What matrix products in training run in; None: float32. Weights and moments stay in float32.
    autocast: str | None = setting(None, one_of=("bfloat16", "float16", None))
    seed: int = setting(42, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.units(1, 1)

    def inside(self, kind: str) -> bool:
        """Whether training goes through the host, not beside it, at a site of this kind."""
        return False

    @property
    def steps(self) -> int:
        """Optimizer steps; the last may go beyond n_tokens."""
        return -(-self.n_tokens // self.tokens_per_step)

    def units(self, d_in: int, d_out: int) -> int:
        """Units of a site of this shape. The paper's 3,072 at GPT-2's c_proj and c_fc are "1x", its TC24k at the MLP "32x".
        Raises TrainError: `width` is neither a number nor a multiple."""
        if isinstance(self.width, str) and (multiple := _MULTIPLE.match(self.width)) and float(multiple[1]) > 0:
            return max(1, round(float(multiple[1]) * max(d_in, d_out)))
        if not isinstance(self.width, int) or isinstance(self.width, bool) or self.width < 1:
            raise TrainError(
                f'width={quoted(self.width)}: give a number of units, or "4x" for four times the larger side of the matrix'
            )
        return self.width

    def warmup(self) -> int:
        """Steps of warm-up: as set, or the method's share of all."""
        return self.warmup_steps or 0

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


@dataclass(frozen=True)
class TranscoderSpec(TrainSpec):
    """A ReLU transcoder with an L1 penalty (method.md §2.1; the paper's use §2.3). The defaults are the paper's TC3k."""

    # On the sum of activations, averaged over tokens. 5e-5 at c_proj, 1.4e-4 at the whole MLP.
    l1: float | int = setting(5e-5, at_least=0)
    # "normed": the squared error over the target's norm, per token, as the public recipe divides; "mse": not divided.
    loss: str = setting("normed", one_of=("mse", "normed"))
    # Decoder rows have norm 1 before every step, and their gradients no part along them.
    unit_decoder: bool = setting(True)
    # A feature counts as dead when so many tokens in a row left it at zero.
    dead_after: int = setting(100_000, at_least=1)
    # Dead features get gradients by a term of their own (coders.py, `ghost_loss`). The public recipe has it on, with a slip.
    ghost: bool = setting(False)
    # Of the first batch, what b_dec and b_out are set to: "mean", or "median", its geometric median.
    start: str = setting("mean", one_of=("mean", "median"))

    def warmup(self) -> int:
        # 5,000 in the public recipe, which cannot be meant for 500 steps (method.md §2.4).
        return min(5000, max(1, self.steps // 20)) if self.warmup_steps is None else self.warmup_steps


@dataclass(frozen=True)
class VpdSpec(TrainSpec):
    """Rank-one parameter components with learned causal importance (method.md §1). The defaults are the paper's VPD-Recon-CI."""

    per_matrix: ClassVar[bool] = True

    n_tokens: int = setting(4_194_304, at_least=1)
    learning_rate: float | int = setting(3e-4, above=0)
    schedule: str = setting("cosine", one_of=SCHEDULES)
    seed: int = setting(0, at_least=0)
    # "recon": squared error of the importance-masked output (VPD-Recon-CI); "kl": KL of the logits under stochastic masks.
    fidelity: str = setting("recon", one_of=("recon", "kl"))
    # Of the fidelity term; 2.0 in the public GPT-2 recipe of the KL.
    fidelity_weight: float | int = setting(1.0, at_least=0)
    # One small network per component on the whole input; one for all; or one per component on its own inner activation (x V)_c.
    importance: str = setting("vector_mlp", one_of=("vector_mlp", "shared_mlp", "scalar_mlp"))
    hidden: int = setting(128, at_least=1)
    # Of the minimality term sum_c mean_t (g_upper + eps)^p. reduction="mean": the mean over components, in place of the sum.
    minimality: float | int = setting(1e-4, at_least=0)
    reduction: str = setting("sum", one_of=("sum", "mean"))
    p_start: float | int = setting(2.0, above=0)
    p_end: float | int = setting(0.3, above=0)
    # Frequency term of the minimality: mean_c log2(1 + sum_c); 0 in the public GPT-2 recipe.
    beta: float | int = setting(0.0, at_least=0)
    # Only "kl": all matrices masked at once; one at a time and averaged; or, at every position, a number of them drawn from 1 to
    # all, the others dense there. All the same for a single matrix.
    routing: str = setting("all", one_of=("all", "layerwise", "subset"))
    # Only "kl": u of the masks g + (1 - g) u is uniform, or 0 or 1; then importance is jittered, too (method.md §1.4).
    masks: str = setting("continuous", one_of=("continuous", "binomial"))
    # Only "kl": what V U lacks of W, as a component with a mask of its own.
    delta: bool = setting(True)
    # Only "kl": weight of the KL under bad masks between g and 1, which an adversary finds (masks.py; method.md §1.5): the
    # masks of every token, or of the batch. 0 leaves it out.
    adversarial: float | int = setting(0.0, at_least=0)
    adversary: str = setting("oneshot", one_of=("oneshot", "persistent"))
    adversarial_scope: str = setting("token", one_of=("token", "batch"))
    # "oneshot": so many steps of this size along the gradient's sign, from a random start (one-shot PGD).
    adversarial_steps: int = setting(4, at_least=1)
    adversarial_rate: float | int = setting(0.25, above=0)
    # "persistent": sources that live on from step to step (persistent PGD). So many steps of Adam before each step's loss, one
    # more after it; the rate rises from zero in the first 2.5% of training.
    persistent_steps: int = setting(2, at_least=0)
    persistent_rate: float | int = setting(0.01, above=0)
    persistent_warmup: float | int = setting(0.025, at_least=0, at_most=1)
    persistent_beta1: float | int = setting(0.5, at_least=0, below=1)
    persistent_beta2: float | int = setting(0.99, at_least=0, below=1)
    # Weight of ||W - VU||^2 in the main loss; the delta lets it be 0.
    faithfulness: float | int = setting(0.0, at_least=0)
    # Largest norm of the gradients of V and U, all matrices taken together; None: as they are. Importance is not clipped.
    clip: float | int | None = setting(None, above=0)
    # Steps of AdamW on ||W - VU||^2 before the first token; V and U start random.
    faithfulness_steps: int = setting(200, at_least=0)
    faithfulness_rate: float | int = setting(1e-2, above=0)
    faithfulness_decay: float | int = setting(0.1, at_least=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fidelity == "recon":
            for name, without in (("routing", "all"), ("masks", "continuous"), ("adversarial", 0)):
                if getattr(self, name) != without:
                    raise TrainError(
                        f"{name}={quoted(getattr(self, name))} is for fidelity='kl': by reconstruction the masks are the "
                        f"importances themselves; leave {name} out, or call vpd_kl"
                    )

    def inside(self, kind: str) -> bool:
        return self.fidelity == "kl" or kind == "mlp"

    def warmup(self) -> int:
        return int(0.01 * self.steps) if self.warmup_steps is None else self.warmup_steps

    def p(self, step: int) -> float:
        """The power of the minimality term at a step, counted from 1; falls along a line over the whole training."""
        return float(self.p_start + (self.p_end - self.p_start) * (step - 1) / max(1, self.steps - 1))


# ---------------------------------------------------------------------------------------------- recipes

# Steps are many and small, as the hosts' text is short. Settings were chosen on validation text of the embedded model, at
# blocks.3.mlp_out, one seed (CE delta after 1M tokens; the circuits of test prompts played no part).
# Transcoder 1x: rate 1e-3 .0015, 3e-3 .00055, 1e-2 .00047, with the paper's l1.
TRANSCODERS: Mapping[str, TranscoderSpec] = {
    "small": TranscoderSpec(n_tokens=1_048_576, width="1x", learning_rate=1e-2, tokens_per_step=1024, schedule="cosine"),
    # Its rate was not tried; at 4x, 3e-3 and 1e-2 were equally good.
    "small_mlp": TranscoderSpec(
        n_tokens=1_048_576, width="32x", learning_rate=3e-3, tokens_per_step=1024, schedule="cosine", l1=1.4e-4
    ),
    # TC3k: GPT-2's c_proj, judged after 500 steps. TC12k: width=12288, or the next.
    "paper": TranscoderSpec(),
    "paper_tc12k": TranscoderSpec(width=12_288),
    # TC24k: the whole MLP, 6.29M tokens.
    "paper_mlp": TranscoderSpec(width=24_576, l1=1.4e-4, n_tokens=6_291_456),
}

# One importance network for all components: those of one each take most of the time (method.md §1.3).
# With the paper's minimality of 1e-4 nearly everything stays at work here: 412 of 512 components (365 at rate 1e-2). Rate 1e-2:
# minimality 1e-3 CE delta .0002 with 209 at work, 1e-2 .0007 with 79, 3e-2 .0014 with 54; at rate 3e-3 more of both.
_SMALL_VPD = VpdSpec(
    n_tokens=1_048_576, width="1x", importance="shared_mlp", learning_rate=1e-2, minimality=1e-2, tokens_per_step=1024
)
VPD_RECONS: Mapping[str, VpdSpec] = {
    "small": _SMALL_VPD,
    # C = 3,072 (of each matrix, where a whole MLP is replaced: method.md §1.9), 4.19M tokens.
    "paper": VpdSpec(),
}

# The public GPT-2 recipe: 50,000 steps of 2 rows of 1,024; one matrix at a time; bfloat16.
_SPD_GPT2 = VpdSpec(
    fidelity="kl",
    n_tokens=102_400_000,
    tokens_per_step=2048,
    width=768,
    hidden=12,
    fidelity_weight=2.0,
    minimality=3e-4,
    routing="layerwise",
    autocast="bfloat16",
)
# What the later VPD trained a 4-layer model of the Pile by (method.md §1.6): 400,000 steps of 64 rows of 512; random subsets of
# the matrices, a persistent adversary, a strong pull of V U towards W, clipped gradients. Its importances are of one transformer
# for the whole model, which is not here: these are of one small MLP per component, `hidden` as in the recipe above. Widths were
# of each matrix; 3,072 is that of mlp_out.
_VPD_PILE4L = VpdSpec(
    fidelity="kl",
    n_tokens=400_000 * 32_768,
    tokens_per_step=32_768,
    width=3072,
    learning_rate=5e-5,
    warmup_steps=0,
    hidden=12,
    fidelity_weight=0.5,
    routing="subset",
    adversarial=0.5,
    adversary="persistent",
    minimality=2e-4,
    p_end=0.4,
    beta=0.5,
    faithfulness=1e7,
    clip=0.01,
    faithfulness_steps=400,
    faithfulness_rate=1e-3,
    faithfulness_decay=0.0,
)
VPD_KLS: Mapping[str, VpdSpec] = {
    # After 262,144 tokens at rate 1e-2: minimality 3e-4 (the public recipe's) .039 with 11 at work, 3e-5 .004 with 166.
    "small": replace(_SMALL_VPD, fidelity="kl", fidelity_weight=2.0, minimality=3e-5, routing="layerwise"),
    "spd_gpt2": _SPD_GPT2,
    # The same with the paper's C and its longest trajectory, 1.6384B tokens, 4,096 a step.
    "paper": replace(_SPD_GPT2, width=3072, n_tokens=1_638_400_000, tokens_per_step=4096),
    # 1B tokens at the whole MLP.
    "paper_mlp": replace(_SPD_GPT2, width=3072, n_tokens=1_000_001_536, tokens_per_step=4096),
    "vpd_pile4l": _VPD_PILE4L,
}


def recipe(presets: Mapping[str, AnySettings], name: str, kind: str = "") -> AnySettings:
    """The recipe of this name, for a site of this kind. Raises TrainError: there is none."""
    of_mlp = f"{name}_mlp"
    return preset(presets, of_mlp if kind == "mlp" and of_mlp in presets else name, TrainError)
