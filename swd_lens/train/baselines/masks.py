"""The masks of a VPD-KL step: what they are drawn from, and adversaries that make them bad (method.md §§1.4, 1.5).

`Draws`, on the CPU from the seed and the step:
1. Sources u of the masks g + (1 - g) u, a number per position and component, and a last one per position for what V U lacks of W:
   uniform in [0, 1]; with masks="binomial" 0 or 1, each as likely, but the last one uniform as before.
2. Noise that jitters the importances before they become masks: only of binomial masks, once for all forwards of a step.
3. Routes: with routing="subset", at every position k of the run's M matrices, k uniform in 1..M, all sets of k as likely.

Adversaries choose the sources s of masks g + (1 - g) s so that the KL is large:
1. `one_shot`: in each step from a random start, `adversarial_steps` of s <- clamp(s + adversarial_rate sign(gradient), 0, 1).
2. `Persistent`: sources that live on from step to step, one set for the rows and positions of a batch, whatever its tokens are.
   They start uniform in [0, 1], drawn once from the seed. In each step `persistent_steps` of Adam upwards on the KL; then the
   loss is computed with the sources where they are; after the backward pass one more step of Adam, by the gradient of that KL.
   Every step of Adam ends with a clamp to [0, 1]. Its rate rises along a line in the first `persistent_warmup` of the training's
   steps, and stays. Sources and moments are part of a checkpoint.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from swd_lens.train.baselines.spec import VpdSpec
from swd_lens.train.baselines.vpd import Vpd

# The KL under these sources, of every matrix.
KlUnder = Callable[[list[Tensor]], Tensor]
_EPS = 1e-8


@dataclass(frozen=True)
class Masking:
    """The masks under which one matrix's components compute in a forward."""

    sources: Tensor | None = None  # None: masks are the importances themselves
    noise: Tensor | None = None  # None: importances are not jittered
    # (rows, pos), where the components are at work; elsewhere the dense matrix is. None: everywhere.
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
        rank = torch.rand(*shape, n, generator=self.generator, dtype=torch.float32).argsort(-1).argsort(-1)
        return [route.to(self.device) for route in (rank < count).unbind(-1)]

    def _uniform(self, *shape: int) -> Tensor:
        return torch.rand(*shape, generator=self.generator, dtype=torch.float32).to(self.device)


def seed_of(seed: int, step: int) -> int:
    """The seed of one step's random numbers."""
    return seed * 1_000_003 + step


def one_shot(kl: KlUnder, draws: Draws, shape: tuple[int, ...]) -> list[Tensor]:
    """The sources of a one-shot adversary for a batch of this shape (rows, pos), new at each step; see the module's head."""
    spec = draws.spec
    sources = draws.uniform(_scope(spec, shape))
    for _ in range(spec.adversarial_steps):
        uphill = zip(sources, _uphill(kl, sources), strict=True)
        sources = [(s.detach() + spec.adversarial_rate * g.sign()).clamp(0.0, 1.0) for s, g in uphill]
    return sources


class Persistent:
    """See the module's docstring. Memory: three float32 per row, position and component, of every matrix."""

    def __init__(self, spec: VpdSpec, draws: Draws):
        self.spec, self.device = spec, draws.device
        self.widths = [width + int(spec.delta) for width in draws.widths]
        self.current: list[Tensor] = []
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.adam_steps = 0

    def sources(self, kl: KlUnder, shape: tuple[int, ...], step: int) -> list[Tensor]:
        """The sources of step 1, 2, ... for a batch of this shape (rows, pos)."""
        if not self.current:
            # The seed after the last step's, which no step draws from.
            generator = torch.Generator().manual_seed(seed_of(self.spec.seed, self.spec.steps + 1))
            sizes = [(*_scope(self.spec, shape), width) for width in self.widths]
            self.current = [torch.rand(size, generator=generator, dtype=torch.float32).to(self.device) for size in sizes]
            self.first = [torch.zeros_like(s) for s in self.current]
            self.second = [torch.zeros_like(s) for s in self.current]
        self.adam_steps = (step - 1) * (self.spec.persistent_steps + 1)
        for _ in range(self.spec.persistent_steps):
            self._ascend(_uphill(kl, self.current), step)
        for source in self.current:
            source.requires_grad_(True)
        return self.current

    def after_backward(self, step: int) -> None:
        """Called when the loss with those sources has its gradients."""
        # The loss has this KL times its weight; the moments are of the KL itself, whichever pass a gradient is from.
        self._ascend([s.grad / self.spec.adversarial for s in self.current if s.grad is not None], step)

    def rate(self, step: int) -> float:
        """The learning rate of a training step, counted from 1."""
        warm = int(self.spec.persistent_warmup * self.spec.steps)
        return self.spec.persistent_rate * min(1.0, step / max(1, warm))

    @torch.no_grad()
    def _ascend(self, gradients: list[Tensor], step: int) -> None:
        """One step of Adam."""
        self.adam_steps += 1
        beta1, beta2 = self.spec.persistent_beta1, self.spec.persistent_beta2
        left1, left2 = 1 - beta1**self.adam_steps, 1 - beta2**self.adam_steps
        moved = []
        for s, g, first, second in zip(self.current, gradients, self.first, self.second, strict=True):
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            change = (first / left1) / ((second / left2).sqrt() + _EPS)
            moved.append((s.detach() + self.rate(step) * change).clamp(0.0, 1.0))
        self.current = moved

    def state(self) -> dict[str, Tensor]:
        """Tensors that a checkpoint keeps."""
        groups = {"source": self.current, "first": self.first, "second": self.second}
        return {f"{name}.{i}": t.detach() for name, group in groups.items() for i, t in enumerate(group)}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        def group(name: str) -> list[Tensor]:
            shapes = ((*named[f"source.{i}"].shape[:2], width) for i, width in enumerate(self.widths))
            return [named[f"{name}.{i}"].to(self.device, torch.float32).view(shape) for i, shape in enumerate(shapes)]

        self.current, self.first, self.second = group("source"), group("first"), group("second")


def _scope(spec: VpdSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1) if spec.adversarial_scope == "batch" else shape


def _uphill(kl: KlUnder, sources: list[Tensor]) -> list[Tensor]:
    """The KL's gradients in the sources."""
    leaves = [s.detach().requires_grad_(True) for s in sources]
    return list(torch.autograd.grad(kl(leaves), leaves))
