"""Tiny checkpoints as bridges, and a projection simple enough to check by hand."""

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from transformer_lens.hook_points import HookPoint
from transformer_lens.model_bridge import TransformerBridge

from swd_lens.base.interrupts import Step
from swd_lens.hosts import Host, host_of
from swd_lens.hosts.sites import Site
from tests import families


class PlainUnits(nn.Module):
    """h @ read -> hook -> @ write + bias."""

    read: Tensor
    write: Tensor

    def __init__(self, read: Tensor, write: Tensor, hook: HookPoint):
        super().__init__()
        self.register_buffer("read", read, persistent=False)
        self.register_buffer("write", write, persistent=False)
        object.__setattr__(self, "hook", hook)

    def forward(self, h: Tensor, bias: Tensor | None, dense: Callable[[Tensor], Tensor]) -> Tensor:
        y = self.hook(h @ self.read) @ self.write
        return y if bias is None else y + bias


class DenseUnits(nn.Module):
    """Shows the dense output to the hook and hands it on."""

    def __init__(self, hook: HookPoint):
        super().__init__()
        object.__setattr__(self, "hook", hook)

    def forward(self, h: Tensor, bias: Tensor | None, dense: Callable[[Tensor], Tensor]) -> Tensor:
        return self.hook(dense(h))


def swap_in(host: Host, site: Site, make: Callable[[HookPoint], nn.Module], undos: list[Step]) -> None:
    hook = HookPoint()
    mode = host.model.training
    host.swap(site, make(hook).train(mode), hook.train(mode), undos.append)


def swap_dense(host: Host, sites: list[Site]) -> Step:
    """Units that compute each site's own matrix (read = W, write = 1), or hand on what the whole MLP computes."""
    undos: list[Step] = []

    def undo() -> None:
        for one in reversed(undos):
            one()

    try:
        for site in sites:
            if site.kind == "mlp":
                swap_in(host, site, DenseUnits, undos)
            else:
                weight = host.weight(site)
                swap_in(host, site, partial(PlainUnits, weight, torch.eye(site.d_out)), undos)
    except BaseException:
        undo()
        raise
    return undo


def sites_with(host: Host, packed: bool) -> list[Site]:
    """Every matrix once, with q, k, v packed or apart."""
    parts = {"attn_q", "attn_k", "attn_v"}
    sites, others = host.sites(), [site for site in host.alternatives() if site.kind != "mlp"]
    wanted = {site.layer: site.kind == "attn_qkv" for site in others}  # layer -> whether packing is the alternative
    chosen = [s for s in sites if s.layer not in wanted or s.kind not in parts | {"attn_qkv"}]
    chosen += [s for s in sites + others if s.layer in wanted and s.kind in ({"attn_qkv"} if packed else parts)]
    return chosen


@pytest.fixture(params=families.FAMILIES)
def host(request: pytest.FixtureRequest) -> Host:
    return host_of(families.bridge(request.param))


def fresh(name: str) -> Host:
    return host_of(families.bridge(name))


shared = cache(fresh)  # for tests that leave it as they found it


@pytest.fixture(params=families.FAMILIES)
def kept(request: pytest.FixtureRequest) -> Host:
    return shared(request.param)


@pytest.fixture(params=families.CAUSAL)
def causal(request: pytest.FixtureRequest) -> Host:
    return shared(request.param)


TOKENS = families.some_tokens(rows=3, pos=11)


def close(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal within rounding, relative to the scale of the numbers."""
    return bool((left - right).abs().max() <= 1e-5 * right.abs().max())


def snapshot(model: TransformerBridge) -> dict:
    """Everything that an undo must restore."""
    modules = dict(model.named_modules(remove_duplicate=False))
    return {
        "hooks": [(name, id(hook), hook.name) for name, hook in model.hook_dict.items()],
        "registry": [(name, id(hook)) for name, hook in model._hook_registry.items()],
        "blocks": [list(block._hook_registry) for block in model.blocks],
        "modules": [(name, id(module), type(module), sorted(vars(module))) for name, module in modules.items()],
        "parameters": [(name, id(p)) for name, p in model.named_parameters()],
        "methods": sorted(vars(model)),
    }
