"""What a training step sees: the projection's inputs and outputs in the dense host, or the whole host with the units in it.

1. `Activations.at`: the tokens of a batch of rows run through the blocks up to the site's; (token, d_in) and (token, d_out).
2. `KlSteps`: KL of the host's logits under stochastic masks (VPD-KL), with the gradient of the components.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from swd_lens.baselines.learned.importance import lower_leaky
from swd_lens.baselines.learned.vpd import Vpd
from swd_lens.hosts import Host, Undo
from swd_lens.hosts.seen import require_seen
from swd_lens.inject.units import UnitHookPoint
from swd_lens.sites import Site


class Activations:
    """A site's inputs and outputs in the dense host, float32."""

    def __init__(self, host: Host, site: Site):
        self.host, self.site = host, site

    @torch.no_grad()
    def at(self, rows: Int[Tensor, "_rows pos"]) -> tuple[Float[Tensor, "token d_in"], Float[Tensor, "token d_out"]]:
        """All positions of the rows, row after row.

        Raises:
            UnsupportedHostError: the host's forward never shows the site.
        """
        seen: dict[str, Tensor] = {}

        def keep(side: str) -> Any:
            return lambda site, t: seen.update({side: t.detach().float().flatten(0, -2)})

        with self.host.inputs([self.site], keep("x")), self.host.outputs([self.site], keep("y")):
            self.host.run_blocks(rows, self.site.layer + 1)
        require_seen([self.site], {self.site.name: 0} if len(seen) == 2 else {}, "inputs and outputs")
        return seen["x"], seen["y"]


class _Masked(nn.Module):
    """Stands in the host's product while VPD-KL trains: dense, or the components under the masks of this step."""

    def __init__(self, vpd: Vpd):
        super().__init__()
        object.__setattr__(self, "vpd", vpd)  # no child of the host
        self.dense = self.ran = self.bypassed = False
        self.generator = torch.Generator()
        self.raw: Tensor | None = None

    def forward(self, h: Tensor, bias: Tensor | None, dense: Any) -> Tensor:
        self.ran = True
        if self.dense:
            return dense(h)
        vpd: Vpd = self.vpd  # type: ignore[assignment]
        x = h.float()
        self.raw = vpd.importance(x)
        g = lower_leaky(self.raw)
        m = g + (1 - g) * self._uniform(g.shape, x.device)
        y = (m * (x @ vpd.W_enc)) @ vpd.W_dec + vpd.bias
        if vpd.spec.delta:
            y = y + self._uniform((*x.shape[:-1], 1), x.device) * (x @ (vpd.weight - vpd.W_enc @ vpd.W_dec))
        return y.to(h.dtype)

    def _uniform(self, shape: Any, device: torch.device) -> Tensor:
        # Drawn on the CPU: the same masks on every device.
        return torch.rand(tuple(shape), generator=self.generator).to(device)


class KlSteps:
    """The host with the components of one site in it, for as long as `mounted` is open."""

    def __init__(self, host: Host, site: Site, vpd: Vpd):
        self.host, self.site, self.vpd = host, site, vpd
        self.masked = _Masked(vpd)

    @contextmanager
    def mounted(self) -> Iterator[None]:
        undo: list[Undo] = []
        model = self.host.model
        asked = [p for p in model.parameters() if p.requires_grad]
        try:
            self.host.guard(
                "while a baseline is trained on this host: it stands for the weights that it would rewrite", undo.append
            )
            undo.append(lambda: [p.requires_grad_(True) for p in asked] and None)
            for p in asked:
                p.requires_grad_(False)
            self.host.swap(self.site, self.masked, UnitHookPoint(f"{self.site.name}, in training"), undo.append)
            yield
        finally:
            while undo:
                undo[-1]()
                undo.pop()

    def loss(self, rows: Int[Tensor, "_rows pos"], step: int) -> tuple[Tensor, dict[str, float]]:
        """KL(dense || masked), mean over positions, plus the other terms; the masks are those of (seed, step)."""
        self.masked.generator.manual_seed(self.vpd.spec.seed * 1_000_003 + step)
        with torch.no_grad():
            self.masked.dense = True
            try:
                log_p = self.host.run(rows).float().log_softmax(-1)
            finally:
                self.masked.dense = False
        log_q = self.host.run(rows).float().log_softmax(-1)
        kl = (log_p.exp() * (log_p - log_q)).sum(-1).mean()
        assert self.masked.raw is not None
        raw = self.masked.raw.flatten(0, -2)
        return self.vpd.total(kl, raw, lower_leaky(raw), step)
