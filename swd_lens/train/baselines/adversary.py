"""Adversaries of VPD-KL: sources s of masks g + (1 - g) s that make the KL large (method.md §1.5).

`OneShot`: in each step from a random start, `adversarial_steps` of s <- clamp(s + adversarial_rate sign(gradient), 0, 1).

`Persistent`: sources that live on from step to step, one set for the rows and positions of a batch, whatever its tokens are.
1. Start: uniform in [0, 1], drawn once from the seed.
2. In each step `persistent_steps` of Adam upwards on the KL; then the loss is computed with the sources where they are.
3. After the backward pass one more step of Adam, by the gradient of that KL.
Every step of Adam ends with a clamp to [0, 1]. Its rate rises along a line in the first `persistent_warmup` of the training's
steps, and stays. Sources and moments are part of a checkpoint.
"""

from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from swd_lens.train.baselines.masks import Draws, seed_of
from swd_lens.train.baselines.spec import VpdSpec

# The KL under these sources, of every matrix.
KlUnder = Callable[[list[Tensor]], Tensor]
_EPS = 1e-8


@runtime_checkable
class Adversary(Protocol):
    """What the fit needs."""

    def sources(self, kl: KlUnder, shape: tuple[int, ...], step: int) -> list[Tensor]:
        """The sources of step 1, 2, ... for a batch of this shape (rows, pos)."""
        ...

    def after_backward(self, step: int) -> None:
        """Called when the loss with those sources has its gradients."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint keeps."""
        ...

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        ...


def adversary_of(spec: VpdSpec, draws: Draws) -> Adversary:
    """The adversary that the settings name."""
    return {"oneshot": OneShot, "persistent": Persistent}[spec.adversary](spec, draws)


class OneShot:
    """See the module's docstring."""

    def __init__(self, spec: VpdSpec, draws: Draws):
        self.spec, self.draws = spec, draws

    def sources(self, kl: KlUnder, shape: tuple[int, ...], step: int) -> list[Tensor]:
        sources = self.draws.uniform(_scope(self.spec, shape))
        for _ in range(self.spec.adversarial_steps):
            found = zip(sources, _uphill(kl, sources), strict=True)
            sources = [(s.detach() + self.spec.adversarial_rate * g.sign()).clamp(0.0, 1.0) for s, g in found]
        return sources

    def after_backward(self, step: int) -> None:
        pass

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        pass


class Persistent:
    """See the module's docstring. Memory: three float32 per row, position and component, of every matrix."""

    def __init__(self, spec: VpdSpec, draws: Draws):
        self.spec, self.device = spec, draws.device
        self.widths = [width + int(spec.delta) for width in draws.widths]
        self.held: list[Tensor] = []
        self.first: list[Tensor] = []
        self.second: list[Tensor] = []
        self.taken = 0  # steps of Adam

    def sources(self, kl: KlUnder, shape: tuple[int, ...], step: int) -> list[Tensor]:
        if not self.held:
            self._start(_scope(self.spec, shape))
        self.taken = (step - 1) * (self.spec.persistent_steps + 1)
        for _ in range(self.spec.persistent_steps):
            self._ascend(_uphill(kl, self.held), step)
        for source in self.held:
            source.requires_grad_(True)
        return self.held

    def after_backward(self, step: int) -> None:
        # The loss has this KL times its weight; the moments are of the KL itself, whichever pass a gradient is from.
        gradients = [s.grad / self.spec.adversarial for s in self.held if s.grad is not None]
        self._ascend(gradients, step)

    def rate(self, step: int) -> float:
        """Of a training step, counted from 1."""
        warm = int(self.spec.persistent_warmup * self.spec.steps)
        return self.spec.persistent_rate * min(1.0, step / max(1, warm))

    def _start(self, shape: tuple[int, ...]) -> None:
        # The seed after the last step's, which no step draws from.
        generator = torch.Generator().manual_seed(seed_of(self.spec.seed, self.spec.steps + 1))
        self.held = [torch.rand(*shape, width, generator=generator).to(self.device) for width in self.widths]
        self.first = [torch.zeros_like(s) for s in self.held]
        self.second = [torch.zeros_like(s) for s in self.held]

    @torch.no_grad()
    def _ascend(self, gradients: list[Tensor], step: int) -> None:
        """One step of Adam."""
        self.taken += 1
        beta1, beta2 = self.spec.persistent_beta1, self.spec.persistent_beta2
        left1, left2 = 1 - beta1**self.taken, 1 - beta2**self.taken
        moved = []
        for s, g, first, second in zip(self.held, gradients, self.first, self.second, strict=True):
            first.lerp_(g, 1 - beta1)
            second.mul_(beta2).addcmul_(g, g, value=1 - beta2)
            change = (first / left1) / ((second / left2).sqrt() + _EPS)
            moved.append((s.detach() + self.rate(step) * change).clamp(0.0, 1.0))
        self.held = moved

    def state(self) -> dict[str, Tensor]:
        groups = {"source": self.held, "first": self.first, "second": self.second}
        return {f"{name}.{i}": t.detach() for name, group in groups.items() for i, t in enumerate(group)}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        def group(name: str) -> list[Tensor]:
            return [named[f"{name}.{i}"].to(self.device) for i in range(len(self.widths))]

        self.held, self.first, self.second = group("source"), group("first"), group("second")


def _scope(spec: VpdSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    return (1, 1) if spec.adversarial_scope == "batch" else shape


def _uphill(kl: KlUnder, sources: list[Tensor]) -> list[Tensor]:
    """The KL's gradients in the sources."""
    leaves = [s.detach().requires_grad_(True) for s in sources]
    return list(torch.autograd.grad(kl(leaves), leaves))
