"""Fits of the trained baselines: one step's loss for a batch of token rows.

1. `LocalFit`: one coder to the inputs and outputs of its site in the dense host (transcoders, VPD-Recon-CI of one matrix), which
   are run once and kept where the training goes through its text several times (train/activations.py).
2. `HostFit`: components of one or several matrices, at work inside the host, to what comes out behind them: the whole MLP's
   output (VPD-Recon-CI of an MLP) or the logits (VPD-KL). Masks of a step are drawn from the seed and the step (masks.py).

Both keep weights at some token counts on the way (units.py, `Trajectory`).
"""

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.base.divergence import kl, log_probabilities
from swd_lens.hosts import Host, Start
from swd_lens.hosts.host import frozen
from swd_lens.hosts.predictions import Predictions
from swd_lens.hosts.recording import record, require_seen
from swd_lens.hosts.sites import Site
from swd_lens.train.activations import KeptActivations
from swd_lens.train.baselines.coders import Coder
from swd_lens.train.baselines.masks import Draws, Masking, Persistent, one_shot
from swd_lens.train.baselines.units import Trajectory
from swd_lens.train.baselines.vpd import Vpd, clip_components, reconstruct, total_loss
from swd_lens.train.engine import Fit, Logged, autocast
from swd_lens.units.projection import UnitHookPoint

_WHILE_TRAINING = "while a baseline is trained on this host: it stands for the weights that it would rewrite"


class CoderFit(Fit):
    """Coders in training (the kind of a site -> its coder), with the settings of the first; weights are kept in `trajectory`."""

    def __init__(self, coders: Mapping[str, Any], trajectory: Trajectory):
        self.coders, self.trajectory = nn.ModuleDict(coders), trajectory
        self.spec = next(iter(coders.values())).spec
        self.title, self.steps = str(trajectory.provenance.get("method")), self.spec.steps
        trained = [p for p in self.coders.parameters() if p.requires_grad]
        self.parameters = {str(i): p for i, p in enumerate(trained)}

    @abstractmethod
    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Logged]:
        """The loss of step 1, 2, ..., and what to log of it."""

    def schedule(self, step: int) -> dict[str, float]:
        return {"learning_rate": self.spec.rate(step)}

    def gradients(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[float, Logged]:
        self._before_step()
        with autocast(self.parameters["0"].device, self.spec.autocast):
            loss, logged = self.loss(rows, step)
        loss.backward()
        return float(loss.detach()), logged

    def keep(self, tokens: int) -> None:
        self._before_step()  # what is kept is as the next step would find it
        self.trajectory.add(tokens, self.coders.state_dict())

    def _before_step(self) -> None:
        coders: Any = self.coders.values()
        for coder in coders:
            coder.before_step()

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors = {f"coder.{name}": t for name, t in self.coders.state_dict().items()}
        return tensors, {"kept": self.trajectory.hashes}

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        for tokens, digest in values["kept"].items():
            self.trajectory.take_over(int(tokens), digest)
            self.trajectory[int(tokens)]  # checked: the result will vouch for it
        self.coders.load_state_dict(_under("coder.", tensors))


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


# ---------------------------------------------------------------------------------------------- beside the host


class LocalFit(CoderFit):
    """See the module's docstring, point 1. first: the rows of the first step, by which the coder begins; kept: activations that
    are run once, None: each batch is run."""

    def __init__(
        self,
        host: Host,
        site: Site,
        coder: Coder,
        trajectory: Trajectory,
        first: Int[Tensor, "_rows pos"],
        kept: KeptActivations | None = None,
    ):
        super().__init__({site.kind: coder}, trajectory)
        self.coder, self.first = coder, first
        self.activations = partial(activations, host, site) if kept is None else kept

    def start(self) -> None:
        self.coder.begin(*self.activations(self.first))

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Logged]:
        return self.coder.loss(*self.activations(rows), step)

    def adjust_gradients(self, step: int) -> dict[str, float]:
        self.coder.adjust_gradients()
        return {}


def activations(
    host: Host, site: Site, rows: Int[Tensor, "_rows pos"]
) -> tuple[Float[Tensor, "token d_in"], Float[Tensor, "token d_out"]]:
    """A site's inputs and outputs in the dense host, float32: all positions of the rows, row after row. Raises
    UnsupportedHostError: the host's forward never shows the site."""
    seen = record(host, rows, inputs=[site], outputs=[site], keep=lambda t: t.float().flatten(0, -2))
    return seen.inputs[site.name], seen.outputs[site.name]


@torch.no_grad()
def bias_of(host: Host, site: Site, rows: Int[Tensor, "_rows pos"]) -> Float[Tensor, " d_out"]:
    """A site's bias as the host adds it, zeros where it has none; seen by standing in its product for one forward."""
    watch = _Watch()
    with _standing_in(host, {site: watch}):
        host.run_blocks(rows[:1, :1], site.layer + 1)
    require_seen([site], {site.name: 0} if watch.seen else {}, "output")
    if (bias := watch.seen[0]) is not None:
        return bias.detach().float().clone()
    return torch.zeros(site.d_out, device=next(host.model.parameters()).device, dtype=torch.float32)


class _Watch(nn.Module):
    """Computes the dense product, and keeps the biases that it was given (in a list: they are no parameters of its own)."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Tensor | None] = []
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
        self.masking: Masking | None = None  # None: dense
        self.raw: Tensor | None = None

    def forward(self, h: Tensor, bias: Tensor | None, dense: Any) -> Tensor:
        self.ran = True
        if self.masking is None:
            return dense(h)
        vpd: Any = self.vpd
        y, self.raw = vpd.masked(h.float(), self.masking.sources, self.masking.noise)
        if self.masking.routed is None:
            return y.to(h.dtype)
        return torch.where(self.masking.routed[..., None], y.to(h.dtype), dense(h))


class HostFit(CoderFit):
    """See the module's docstring, point 2. site: what is replaced, a matrix or a whole MLP; parts: its matrices, in execution
    order, with their components."""

    def __init__(self, host: Host, site: Site, parts: dict[Site, Vpd], trajectory: Trajectory):
        super().__init__({part.kind: vpd for part, vpd in parts.items()}, trajectory)
        self.host, self.site = host, site
        self.vpds = list(parts.values())
        self.mounted = {part: _Masked(vpd) for part, vpd in parts.items()}
        self.predictions = Predictions(host)
        self.draws = Draws(self.vpds)
        self.persistent: Persistent | None = None
        if self.spec.adversarial and self.spec.adversary == "persistent":
            self.persistent = Persistent(self.spec, self.draws)

    def start(self) -> None:
        reconstruct(self.vpds)

    def running(self) -> AbstractContextManager[None]:
        return _standing_in(self.host, self.mounted)

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, Logged]:
        if self.spec.fidelity == "recon":  # squared error of the site's output under the importance masks
            with torch.no_grad():
                start = Start(self.site.layer, self.host.residual(rows, self.site.layer))
                how: dict[str, Any] = {"outputs": [self.site], "start": start, "keep": Tensor.float, "gradient": True}
                target = record(self.host, rows, **how).outputs[self.site.name]
            self._mask([Masking() for _ in self.mounted])
            error = (record(self.host, rows, **how).outputs[self.site.name] - target).square().mean()
            return total_loss(error, self._unmask(), self.vpds, step)
        self.draws.begin(step, tuple(rows.shape))
        with torch.no_grad():
            dense = self.predictions.run(rows)
        total, logged = total_loss(*self._stochastic(rows, dense), self.vpds, step)
        if self.spec.adversarial:

            def kl_under(sources: list[Tensor]) -> Tensor:
                return self._kl_under(rows, dense, sources)[0]

            shape, persistent = tuple(rows.shape), self.persistent
            sources = persistent.sources(kl_under, shape, step) if persistent else one_shot(kl_under, self.draws, shape)
            worst = kl_under(sources)
            total, logged = total + self.spec.adversarial * worst, {**logged, "adversarial": worst.detach()}
        return total, logged

    def adjust_gradients(self, step: int) -> dict[str, float]:
        clip_components(self.vpds)
        if self.persistent is not None:
            self.persistent.after_backward(step)
        return {}

    def state(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        tensors, values = super().state()
        kept = {} if self.persistent is None else self.persistent.state()
        return tensors | {f"fit.{name}": t for name, t in kept.items()}, values

    def load_state(self, tensors: Mapping[str, Tensor], values: Mapping[str, Any]) -> None:
        super().load_state(tensors, values)
        if self.persistent is not None:
            self.persistent.load_state(_under("fit.", tensors))

    def _stochastic(self, rows: Int[Tensor, "_rows pos"], dense: Tensor) -> tuple[Tensor, list[Tensor]]:
        """KL under drawn masks: of all matrices together, of one at a time, averaged, or of some at each position."""
        shape, routing, n = tuple(rows.shape), self.spec.routing, len(self.mounted)
        if routing == "layerwise" and n > 1:
            losses, raws = [], []
            for matrix in range(n):
                # All are drawn each time, so that matrices do not share masks.
                sources = [s if i == matrix else None for i, s in enumerate(self.draws.sources(shape))]
                loss, (raw,) = self._kl_under(rows, dense, sources)
                losses.append(loss)
                raws.append(raw)
            return torch.stack(losses).mean(), raws
        sources = self.draws.sources(shape)
        return self._kl_under(rows, dense, sources, self.draws.routes(shape) if routing == "subset" and n > 1 else None)

    def _kl_under(
        self, rows: Tensor, dense: Tensor, sources: Sequence[Tensor | None], routes: list[Tensor] | None = None
    ) -> tuple[Float[Tensor, ""], list[Tensor]]:
        """KL(dense || masked), mean over positions, matrices without sources dense; and the others' raw importances. dense:
        the dense host's run, see `Predictions.run`."""
        each = zip(sources, self.draws.noise, [None for _ in sources] if routes is None else routes, strict=True)
        self._mask([None if source is None else Masking(source, noise, route) for source, noise, route in each])
        try:
            masked = self.predictions.run(rows)
        finally:
            raws = self._unmask()

        def summed(_targets: Tensor, p: Tensor, q: Tensor) -> Float[Tensor, ""]:
            return kl(log_probabilities(p), log_probabilities(q)).sum()

        return self.predictions.total(summed, rows, dense, masked, behind_last=True) / rows.numel(), raws

    def _mask(self, maskings: Sequence[Masking | None]) -> None:
        for masked, masking in zip(self.mounted.values(), maskings, strict=True):
            masked.masking, masked.raw = masking, None

    def _unmask(self) -> list[Tensor]:
        """Make all matrices dense again; returns the raw importances of those that were not."""
        raws = [masked.raw for masked in self.mounted.values() if masked.raw is not None]
        self._mask([None for _ in self.mounted])
        return raws


@contextmanager
def _standing_in(host: Host, modules: Mapping[Site, Any]) -> Iterator[None]:
    """The modules in the host's products, its parameters without gradients; all as it was on the way out."""
    with frozen(host, _WHILE_TRAINING) as undo:
        for site, module in modules.items():
            host.swap(site, module, UnitHookPoint(f"{site.name}, in training"), undo.push)
        yield
