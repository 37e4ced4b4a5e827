"""The unit sources that the contract tests run on: everything that gives units for a site of a host.

`read_of` and `write_of` are the matrices of a unit source, whatever it is; `CASES` says on which sites each one is tried.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.factors import Factors, FactorSet
from swd_lens.hosts import find_sites, host_of
from swd_lens.plan import stamp


def identity(model: Any, sites: str) -> FactorSet:
    """A = W, B = I: units are output coordinates."""
    host = host_of(model)
    made = {}
    for site in find_sites(model, sites):
        weight = host.weight(site)
        made[site.name] = stamp(Factors(weight, torch.eye(site.d_out), weight=weight), model, site, {})
    return FactorSet(made)


def swd_calibrated(model: Any, sites: str) -> FactorSet:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, model.cfg.d_vocab, (16, 12), generator=generator)
    return swd.factorize(model, sites, sparsity=0.4, tokens=tokens, outer_iterations=4, progress=False)


def swd_zero_data(model: Any, sites: str) -> FactorSet:
    return swd.factorize(model, sites, sparsity=0.4, outer_iterations=4, progress=False)


def _learned(train: Callable[..., baselines.LearnedUnits]) -> Callable[[Any, str], dict[str, Any]]:
    """A few steps of training at every site: what the contract asks holds for every weight."""

    def make(model: Any, sites: str) -> dict[str, Any]:
        tokens = torch.randint(0, model.cfg.d_vocab, (16, 12), generator=torch.Generator().manual_seed(2))
        how = {"n_tokens": 288, "tokens_per_step": 96, "keep": (), "progress": False}
        return {site.name: train(model, site, tokens, **how)[site.name] for site in find_sites(model, sites)}

    return make


UNIT_SOURCES: dict[str, Callable[[Any, str], Mapping[str, Any]]] = {
    "identity": identity,
    "svd": baselines.svd,
    "random_b": baselines.random_b,
    "swd": swd_calibrated,
    "swd_zero_data": swd_zero_data,
    "transcoder": _learned(baselines.transcoder),
    "vpd_recon": _learned(baselines.vpd_recon),
    "vpd_kl": _learned(baselines.vpd_kl),
    "channels": baselines.channels_of,
}
EXACT = ("identity", "svd", "random_b")
# What each source is asked of; the others of all sites.
_EVERYWHERE = ("blocks.1.attn_qkv", "blocks.0.attn_o", "blocks.0.mlp_in", "blocks.1.mlp_out", "all")
_SOME = {
    "transcoder": ("blocks.1.attn_qkv", "blocks.1.mlp_out", "all"),
    "vpd_recon": ("blocks.1.mlp_out", "all"),
    "vpd_kl": ("blocks.1.mlp_out",),
    "channels": ("blocks.1.mlp_out", "mlp_out"),
}
CASES = [(name, sites) for name in UNIT_SOURCES for sites in _SOME.get(name, _EVERYWHERE)]


def read_of(units: Any) -> torch.Tensor:
    """(d_in, unit)."""
    return units.read if isinstance(units, Factors) else units.coder.W_enc


def write_of(units: Any) -> torch.Tensor:
    """(unit, d_out)."""
    return units.write if isinstance(units, Factors) else units.coder.W_dec
