"""What the masks of a VPD-KL step are made of, drawn on the CPU from the seed and the step (method.md §§1.4, 1.5).

1. Sources u of the masks g + (1 - g) u, a number per position and component, and a last one per position for what V U lacks of W:
   uniform in [0, 1]; with masks="binomial" 0 or 1, each as likely, but the last one uniform as before.
2. Noise that jitters the importances before they become masks: only of binomial masks, once for all forwards of a step.
3. Routes: with routing="subset", at every position k of the run's M matrices, k uniform in 1..M, all sets of k as likely.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.train.baselines.vpd import Vpd


@dataclass(frozen=True)
class Shown:
    """What one matrix's components compute with in a forward.

    Attributes:
        sources: None: masks are the importances themselves.
        noise: None: importances are not jittered.
        routed: (rows, pos), where the components are at work; elsewhere the dense matrix is. None: everywhere.
    """

    sources: Tensor | None = None
    noise: Tensor | None = None
    routed: Tensor | None = None


class Draws:
    """See the module's docstring. `begin` comes first in each step; `noise` is then what it drew."""

    def __init__(self, vpds: list[Vpd]):
        self.spec = vpds[0].spec
        self.widths = [vpd.W_enc.shape[1] for vpd in vpds]
        self.device = vpds[0].W_enc.device
        self.generator = torch.Generator()
        self.noise: list[Tensor | None] = [None for _ in vpds]

    def begin(self, step: int, shape: tuple[int, ...]) -> None:
        """Start over from the seed and the step."""
        self.generator.manual_seed(seed_of(self.spec.seed, step))
        if self.spec.masks == "binomial":
            self.noise = [self._uniform(*shape, width) for width in self.widths]

    def uniform(self, shape: tuple[int, ...]) -> list[Float[Tensor, "..."]]:
        """Uniform sources (*shape, unit + 1) of every matrix."""
        return [self._uniform(*shape, width + 1) for width in self.widths]

    def sources(self, shape: tuple[int, ...]) -> list[Float[Tensor, "..."]]:
        """Sources (*shape, unit + 1) of every matrix, as `masks` says."""
        drawn = self.uniform(shape)
        if self.spec.masks == "continuous":
            return drawn
        return [torch.cat([u[..., :-1].round(), u[..., -1:]], -1) for u in drawn]

    def routes(self, shape: tuple[int, ...]) -> list[Bool[Tensor, "..."]]:
        """Where each matrix runs on its components, (*shape)."""
        n = len(self.widths)
        count = torch.randint(1, n + 1, (*shape, 1), generator=self.generator)
        places = torch.rand(*shape, n, generator=self.generator).argsort(-1).argsort(-1)
        return [taken.to(self.device) for taken in (places < count).unbind(-1)]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator).to(self.device)


def seed_of(seed: int, step: int) -> int:
    """Of the random numbers of one step."""
    return seed * 1_000_003 + step
