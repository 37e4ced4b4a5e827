"""What a training run fits, and to what: one step's loss for a batch of token rows.

1. `LocalFit`: one coder to the inputs and outputs of its site in the dense host (transcoders, VPD-Recon-CI of one matrix).
2. `HostFit`: components of one or several matrices, at work inside the host, to what comes out behind them: the whole MLP's
   output (VPD-Recon-CI of an MLP) or the logits (VPD-KL). Masks of a step are drawn from the seed and the step.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.baselines.learned.transcoders import Said, Transcoder
from swd_lens.baselines.learned.vpd import Vpd, reconstruct, total_loss
from swd_lens.hosts import Host, Start, Undo
from swd_lens.hosts.seen import require_seen
from swd_lens.inject.units import UnitHookPoint
from swd_lens.sites import Site

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
        self.dense = True
        self.sources: Tensor | None = None
        self.raw: Tensor | None = None

    def forward(self, h: Tensor, bias: Tensor | None, dense: Any) -> Tensor:
        self.ran = True
        if self.dense:
            return dense(h)
        vpd: Any = self.vpd
        y, self.raw = vpd.masked(h.float(), self.sources)
        return y.to(h.dtype)


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
        self.generator = torch.Generator()

    def begin(self, rows: Int[Tensor, "_rows pos"]) -> None:
        reconstruct(self.vpds)

    def running(self) -> AbstractContextManager[None]:
        return _swapped(self.host, self.mounted)

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Said]:
        if self.spec.fidelity == "recon":
            return total_loss(*self._recon(rows), self.vpds, step)
        self.generator.manual_seed(self.spec.seed * 1_000_003 + step)
        with torch.no_grad():
            log_p = self._logits(rows)
        total, said = total_loss(*self._stochastic(rows, log_p), self.vpds, step)
        if self.spec.adversarial:
            worst, _ = self._kl_under(rows, log_p, self._worst(rows, log_p))
            total, said = total + self.spec.adversarial * worst, {**said, "adversarial": worst.detach()}
        return total, said

    # ------------------------------------------------------------------ reconstruction

    def _recon(self, rows: Int[Tensor, "_rows pos"]) -> tuple[Tensor, list[Tensor]]:
        """Mean squared error of the site's output under the importance masks."""
        with torch.no_grad():
            start = Start(self.site.layer, self.host.residual(rows, self.site.layer))
            wanted = self._output(rows, start)
        self._show([None] * len(self.mounted))
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
        """KL under uniform masks: of all matrices together, or of one at a time, averaged."""
        if self.spec.routing == "all" or len(self.mounted) == 1:
            return self._kl_under(rows, log_p, self._draw(rows.shape))
        turns = [self._one_of(place, rows.shape) for place in range(len(self.mounted))]
        found = [self._kl_under(rows, log_p, sources) for sources in turns]
        return torch.stack([kl for kl, _ in found]).mean(), [raws[0] for _, raws in found]

    def _worst(self, rows: Tensor, log_p: Tensor) -> list[Tensor | None]:
        """Sources that steps along the sign of the KL's gradient reach from a random start."""
        whole = self.spec.adversarial_scope == "batch"
        sources = [s for s in self._draw((1, 1) if whole else rows.shape) if s is not None]
        for _ in range(self.spec.adversarial_steps):
            leaves = [s.requires_grad_(True) for s in sources]
            kl, _ = self._kl_under(rows, log_p, list(leaves))
            gradients = torch.autograd.grad(kl, leaves)
            stepped = (
                s.detach() + self.spec.adversarial_rate * g.sign() for s, g in zip(leaves, gradients, strict=True)
            )
            sources = [s.clamp(0.0, 1.0) for s in stepped]
        return list(sources)

    def _one_of(self, place: int, shape: tuple[int, ...]) -> list[Tensor | None]:
        """Sources for one matrix; None keeps the others dense. All are drawn, so that places do not share masks."""
        return [s if i == place else None for i, s in enumerate(self._draw(shape))]

    def _draw(self, shape: tuple[int, ...]) -> list[Tensor | None]:
        """Uniform sources of every matrix, drawn on the CPU: the same masks on every device."""
        device = self.vpds[0].W_enc.device
        return [torch.rand(*shape, vpd.W_dec.shape[0] + 1, generator=self.generator).to(device) for vpd in self.vpds]

    def _kl_under(
        self, rows: Tensor, log_p: Tensor, sources: list[Tensor | None]
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        """KL(dense || masked), mean over positions; matrices without sources stay dense."""
        self._show(sources, keep_dense=True)
        try:
            log_q = self._logits(rows)
        finally:
            raws = self._hide()
        return (log_p.exp() * (log_p - log_q)).sum(-1).mean(), raws

    def _logits(self, rows: Tensor) -> Float[Tensor, "_rows pos vocab"]:
        return self.host.run(rows).float().log_softmax(-1)

    # ------------------------------------------------------------------ switches

    def _show(self, sources: list[Tensor | None], keep_dense: bool = False) -> None:
        for masked, source in zip(self.mounted.values(), sources, strict=True):
            masked.dense, masked.sources, masked.raw = keep_dense and source is None, source, None

    def _hide(self) -> list[Tensor]:
        """Back to dense; the raw importances of those that were not."""
        raws = [masked.raw for masked in self.mounted.values() if masked.raw is not None]
        for masked in self.mounted.values():
            masked.dense, masked.sources, masked.raw = True, None, None
        return raws


@contextmanager
def _swapped(host: Host, modules: dict[Site, Any]) -> Iterator[None]:
    """The modules in the host's products, its parameters without gradients; all as it was on the way out."""
    undo: list[Undo] = []
    asked = [p for p in host.model.parameters() if p.requires_grad]
    try:
        host.guard(_WHILE_TRAINING, undo.append)
        undo.append(lambda: _ask(asked, True))
        _ask(asked, False)
        for site, module in modules.items():
            host.swap(site, module, UnitHookPoint(f"{site.name}, in training"), undo.append)
        yield
    finally:
        try:
            _undo_all(undo)
        finally:  # a Ctrl-C may hit the first
            _undo_all(undo)


def _undo_all(undo: list[Undo]) -> None:
    while undo:
        # Popped only when done: undoing twice is harmless.
        undo[-1]()
        undo.pop()


def _ask(parameters: list[Any], gradients: bool) -> None:
    for parameter in parameters:
        parameter.requires_grad_(gradients)
