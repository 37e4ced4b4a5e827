"""Settings of fixed-support fine-tuning, checked, and the presets "best" and "paper".

`resolve(preset, overrides)` makes the settings of one call; what was not asked for stays with the preset.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from swd_lens.base.display import card
from swd_lens.base.errors import FinetuneError
from swd_lens.base.settings import Settings, preset, setting


@dataclass(frozen=True)
class FinetuneSpec(Settings):
    """The recipe. The defaults are the paper's (method.md §5.3), and so are the reasons where none is given.

    The paper's absolute learning rate, and eps beside gradients normalised over all factors, depend on how units are scaled: a
    read vector twice as long with a write vector half as long is the same unit, but takes half and double the relative steps, and
    has other gradients. Factors of the solver have read and write vectors of equal norms, which need not be the scale of the
    paper's runs. relative=True with a small eps and no weight decay (preset "best") depends on no scale that a whole factor has;
    that of one unit beside the others of its factor stays.
    """

    error: ClassVar[type[Exception]] = FinetuneError
    # What is minimised, per prediction: next-token cross-entropy, KL(dense || replaced), or their sum, the KL times
    # kl_weight. The KL tells much more per token; the cross-entropy alone pulls away from the dense host.
    loss: str = setting("ce", one_of=("ce", "kl", "ce+kl"))
    # Only used by "ce+kl".
    kl_weight: float | int = setting(1.0, above=0)
    # Rows per step, over all processes.
    batch_size: int = setting(8, at_least=1)
    # Optimizer steps; None = as many as `passes` over the rows need.
    steps: int | None = setting(2000, at_least=1)
    # Only used where steps is None.
    passes: float | int = setting(1, above=0)
    # AdamW's, at the end of the warm-up.
    learning_rate: float | int = setting(5e-7, above=0)
    # Multiply each factor's learning rate by the root mean square of its starting values, so that a rate means the same
    # change in proportion on every host and site.
    relative: bool = setting(False)
    beta1: float | int = setting(0.9, at_least=0, below=1)
    beta2: float | int = setting(0.95, at_least=0, below=1)
    # As large as the normalised gradients: between Adam and plain gradient descent.
    eps: float | int = setting(0.1, above=0)
    weight_decay: float | int = setting(1e-3, at_least=0)
    # Share of the steps in which the rate rises from zero.
    warmup: float | int = setting(0.01, at_least=0, at_most=1)
    # After the warm-up the rate falls to zero along this line, or stays.
    schedule: str = setting("linear", one_of=("linear", "cosine", "constant"))
    # Divide all gradients by their root mean square over the support, method.md §5.3.
    normalize_gradients: bool = setting(True)
    # What matrix products in training run in; values, moments and evaluation stay in full precision. None: the host's dtype.
    autocast: str | None = setting("bfloat16", one_of=("bfloat16", "float16", None))
    # Decides the order of the rows and nothing else.
    seed: int = setting(0, at_least=0)
    # "last", or "best": the values with the lowest held-out loss among those evaluated.
    keep: str = setting("last", one_of=("last", "best"))

    def _repr_html_(self) -> str:
        return card("FinetuneSpec", self.as_dict())

    def steps_for(self, n_rows: int) -> int:
        """Optimizer steps over this many rows."""
        if self.steps is not None:
            return self.steps
        return max(1, int(self.passes * n_rows / self.batch_size))

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of a step, counted from 1."""
        warm = max(1, round(self.warmup * steps)) if self.warmup else 0
        if step <= warm:
            return self.learning_rate * step / warm
        # 1 at the first step after the warm-up, never 0: no step is for nothing.
        left = (steps - step + 1) / (steps - warm)
        if self.schedule == "cosine":
            left = 0.5 * (1 - math.cos(math.pi * left))
        return self.learning_rate * (1.0 if self.schedule == "constant" else left)


# "best" was chosen on the embedded model's training and validation text (tests/benchmarks/finetune.py measures it again).
# Cross-entropy alone pulls away from the dense host, KL alone recovers half of the CE increase; their sum does both. A
# kl_weight of 1 recovers more of the CE (99 % where 2 recovers 86 %) and less of the KL (.0102 -> .0070 against .0061), 3 the
# other way round (79 %, .0058). It pays where there is something to repair: where a replacement is CE-matched already (s = .5)
# take loss="kl". Where much is lost (s = .75) learning_rate=1e-3 recovers more.
PRESETS: Mapping[str, FinetuneSpec] = {
    "paper": FinetuneSpec(),
    "best": FinetuneSpec(
        loss="ce+kl",
        kl_weight=2.0,
        batch_size=2,
        steps=None,
        passes=1,
        learning_rate=5e-4,
        relative=True,
        beta2=0.99,
        eps=1e-8,
        weight_decay=0.0,
        warmup=0.05,
        schedule="cosine",
        normalize_gradients=False,
        autocast=None,
    ),
}


def resolve(name: str, overrides: Mapping[str, Any]) -> FinetuneSpec:
    """The settings of one call: those of the preset of this name, but for what is given. Raises FinetuneError: an unknown
    preset or setting (the nearest are named), or a value out of range."""
    return preset(PRESETS, name, FinetuneError).changed(overrides)
