"""What a training run fits, and to what: one step's loss for a batch of token rows.

1. `LocalFit`: one coder to the inputs and outputs of its site in the dense host (transcoders, VPD-Recon-CI of one matrix).
2. `HostFit`: components of one or several matrices, at work inside the host, to what comes out behind them: the whole MLP's
   output (VPD-Recon-CI of an MLP) or the logits (VPD-KL). Masks of a step are drawn from the seed and the step (masks.py).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.hosts import Host, Start, Undo
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import Site
from swd_lens.train.baselines.adversary import adversary_of
from swd_lens.train.baselines.masks import Draws, Shown
from swd_lens.train.baselines.transcoders import Said, Transcoder
from swd_lens.train.baselines.vpd import Vpd, clip_components, reconstruct, total_loss
from swd_lens.train.finetune.mount import undo_all
from swd_lens.units.projection import UnitHookPoint

_WHILE_TRAINING = "while a baseline is trained on this host: it stands for the weights that it would rewrite"


@runtime_checkable
class Fit(Protocol):
    """What the training loop needs. `coders` maps a site's kind to its coder; all of their parameters are trained."""

    coders: nn.ModuleDict

    def begin(self, rows: Int[Tensor, "_rows pos"]) -> None:
        """The part of the start that needs a first batch, or the matrices."""
        ...

    def running(self) -> AbstractContextManager[None]:
        """Open while steps are taken."""
        ...

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Said]:
        """The loss of step 1, 2, ..., and what to log of it."""
        ...

    def after_backward(self, step: int) -> None:
        """What is done to the gradients, or by them, before the optimizer's step."""
        ...

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint needs besides the coders."""
        ...

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        """Go on from what `state` gave."""
        ...


# ---------------------------------------------------------------------------------------------- beside the host


class LocalFit:
    """See the module's docstring, point 1."""

    def __init__(self, host: Host, site: Site, coder: Transcoder | Vpd):
        self.host, self.site, self.coder = host, site, coder
        self.coders = nn.ModuleDict({site.kind: coder})

    def begin(self, rows: Int[Tensor, "_rows pos"]) -> None:
        self.coder.begin(*activations(self.host, self.site, rows))

    def running(self) -> AbstractContextManager[None]:
        return nullcontext()

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Said]:
        return self.coder.loss(*activations(self.host, self.site, rows), step)

    def after_backward(self, step: int) -> None:
        self.coder.adjust_gradients()

    def state(self) -> dict[str, Tensor]:
        return {}

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        pass


@torch.no_grad()
def activations(
    host: Host, site: Site, rows: Int[Tensor, "_rows pos"]
) -> tuple[Float[Tensor, "token d_in"], Float[Tensor, "token d_out"]]:
    """A site's inputs and outputs in the dense host, float32: all positions of the rows, row after row.

    Raises:
        UnsupportedHostError: the host's forward never shows the site.
    """
    inputs: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}

    def into(found: dict[str, Tensor]) -> Callable[[Site, Tensor], None]:
        return lambda site, t: found.update({site.name: t.detach().float().flatten(0, -2)})

    with host.inputs([site], into(inputs)), host.outputs([site], into(outputs)):
        host.run_blocks(rows, site.layer + 1)
    require_seen([site], inputs, "input")
    require_seen([site], outputs, "output")
    return inputs[site.name], outputs[site.name]


@torch.no_grad()
def bias_of(host: Host, site: Site, rows: Int[Tensor, "_rows pos"]) -> Float[Tensor, " d_out"]:
    """A site's bias as the host adds it, zeros where it has none; seen by standing in its product for one forward."""
    seen: list[Tensor | None] = []
    watch = _Watch(seen)
    with _swapped(host, {site: watch}):
        host.run_blocks(rows[:1, :1], site.layer + 1)
    require_seen([site], {site.name: 0} if seen else {}, "output")
    device = next(host.model.parameters()).device
    return torch.zeros(site.d_out, device=device) if seen[0] is None else seen[0].detach().float().clone()


class _Watch(nn.Module):
    def __init__(self, seen: list[Tensor | None]):
        super().__init__()
        self.seen = seen
        self.ran = self.bypassed = False

    def forward(self, h: Tensor, bias: Tensor | None, dense: Any) -> Tensor:
        self.seen.append(bias)
        return dense(h)


# ---------------------------------------------------------------------------------------------- inside the host


class _Masked(nn.Module):
    """Stands in the host's product while components train: dense, or components under the masks of this forward."""

    def __init__(self, vpd: Vpd):
        super().__init__()
        object.__setattr__(self, "vpd", vpd)  # no child of the host
        self.ran = self.bypassed = False
        self.shown: Shown | None = None  # None: dense
        self.raw: Tensor | None = None

    def forward(self, h: Tensor, bias: Tensor | None, dense: Any) -> Tensor:
        self.ran = True
        if self.shown is None:
            return dense(h)
        vpd: Any = self.vpd
        y, self.raw = vpd.masked(h.float(), self.shown.sources, self.shown.noise)
        if self.shown.routed is None:
            return y.to(h.dtype)
        return torch.where(self.shown.routed[..., None], y.to(h.dtype), dense(h))


class HostFit:
    """See the module's docstring, point 2.

    Args:
        host: whose parameters are left as they are.
        site: what is replaced, a matrix or a whole MLP.
        parts: the matrices of it, in execution order, with their components.
    """

    def __init__(self, host: Host, site: Site, parts: dict[Site, Vpd]):
        self.host, self.site = host, site
        self.vpds = list(parts.values())
        self.spec = self.vpds[0].spec
        self.coders = nn.ModuleDict({part.kind: vpd for part, vpd in parts.items()})
        self.mounted = {part: _Masked(vpd) for part, vpd in parts.items()}
        self.draws = Draws(self.vpds)
        self.adversary = adversary_of(self.spec, self.draws)

    def begin(self, rows: Int[Tensor, "_rows pos"]) -> None:
        reconstruct(self.vpds)

    def running(self) -> AbstractContextManager[None]:
        return _swapped(self.host, self.mounted)

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Said]:
        if self.spec.fidelity == "recon":
            return total_loss(*self._recon(rows), self.vpds, step)
        self.draws.begin(step, tuple(rows.shape))
        with torch.no_grad():
            log_p = self._logits(rows)
        total, said = total_loss(*self._stochastic(rows, log_p), self.vpds, step)
        if self.spec.adversarial:
            worst = self._worst(rows, log_p, step)
            total, said = total + self.spec.adversarial * worst, {**said, "adversarial": worst.detach()}
        return total, said

    def after_backward(self, step: int) -> None:
        clip_components(self.vpds)
        if self.spec.adversarial:
            self.adversary.after_backward(step)

    def state(self) -> dict[str, Tensor]:
        return self.adversary.state()

    def load_state(self, named: Mapping[str, Tensor]) -> None:
        self.adversary.load_state(named)

    # ------------------------------------------------------------------ reconstruction

    def _recon(self, rows: Int[Tensor, "_rows pos"]) -> tuple[Tensor, list[Tensor]]:
        """Mean squared error of the site's output under the importance masks."""
        with torch.no_grad():
            start = Start(self.site.layer, self.host.residual(rows, self.site.layer))
            wanted = self._output(rows, start)
        self._show([Shown() for _ in self.mounted])
        got = self._output(rows, start)
        return (got - wanted).square().mean(), self._hide()

    def _output(self, rows: Tensor, start: Start) -> Float[Tensor, "_rows pos d_out"]:
        found: dict[str, Tensor] = {}
        with self.host.outputs([self.site], lambda site, y: found.update({site.name: y.float()})):
            self.host.run_blocks(rows, self.site.layer + 1, start)
        require_seen([self.site], found, "output")
        return found[self.site.name]

    # ------------------------------------------------------------------ KL

    def _stochastic(self, rows: Int[Tensor, "_rows pos"], log_p: Tensor) -> tuple[Tensor, list[Tensor]]:
        """KL under drawn masks: of all matrices together, of one at a time, averaged, or of some at each position."""
        shape, routing, n = tuple(rows.shape), self.spec.routing, len(self.mounted)
        if routing == "layerwise" and n > 1:
            # All are drawn each time, so that places do not share masks.
            turns = [[s if i == place else None for i, s in enumerate(self.draws.sources(shape))] for place in range(n)]
            found = [self._kl_under(rows, log_p, sources) for sources in turns]
            return torch.stack([kl for kl, _ in found]).mean(), [raws[0] for _, raws in found]
        sources = self.draws.sources(shape)
        return self._kl_under(rows, log_p, sources, self.draws.routes(shape) if routing == "subset" and n > 1 else None)

    def _worst(self, rows: Int[Tensor, "_rows pos"], log_p: Tensor, step: int) -> Float[Tensor, ""]:
        """KL under the adversary's masks, of all matrices together."""

        def kl(sources: list[Tensor]) -> Tensor:
            return self._kl_under(rows, log_p, sources)[0]

        return kl(self.adversary.sources(kl, tuple(rows.shape), step))

    def _kl_under(
        self, rows: Tensor, log_p: Tensor, sources: Sequence[Tensor | None], routes: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        """KL(dense || masked), mean over positions, matrices without sources dense; and the others' raw importances."""
        routed = [None for _ in sources] if routes is None else routes
        each = zip(sources, self.draws.noise, routed, strict=True)
        self._show([None if source is None else Shown(source, noise, where) for source, noise, where in each])
        try:
            log_q = self._logits(rows)
        finally:
            raws = self._hide()
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean(), raws

    def _logits(self, rows: Tensor) -> Float[Tensor, "_rows pos vocab"]:
        return self.host.run(rows).float().log_softmax(-1)

    # ------------------------------------------------------------------ switches

    def _show(self, shown: Sequence[Shown | None]) -> None:
        for masked, one in zip(self.mounted.values(), shown, strict=True):
            masked.shown, masked.raw = one, None

    def _hide(self) -> list[Tensor]:
        """Back to dense; the raw importances of those that were not."""
        raws = [masked.raw for masked in self.mounted.values() if masked.raw is not None]
        self._show([None for _ in self.mounted])
        return raws


@contextmanager
def _swapped(host: Host, modules: dict[Site, Any]) -> Iterator[None]:
    """The modules in the host's products, its parameters without gradients; all as it was on the way out."""
    undo: list[Undo] = []
    # Flags of inference tensors cannot be set back, and no gradient comes to them anyway.
    asked = [p for p in host.model.parameters() if p.requires_grad and not p.is_inference()]
    try:
        host.guard(_WHILE_TRAINING, undo.append)
        undo.append(lambda: _ask(asked, True))
        _ask(asked, False)
        for site, module in modules.items():
            host.swap(site, module, UnitHookPoint(f"{site.name}, in training"), undo.append)
        yield
    finally:
        try:
            undo_all(undo)
        finally:  # a Ctrl-C may hit the first
            undo_all(undo)


def _ask(parameters: list[Any], gradients: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(gradients)
