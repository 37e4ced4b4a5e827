"""The unit sources that the contract tests run on: everything that gives Factors for a site of a host."""

from collections.abc import Callable
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


UNIT_SOURCES: dict[str, Callable[[Any, str], FactorSet]] = {
    "identity": identity,
    "svd": baselines.svd,
    "random_b": baselines.random_b,
    "swd": swd_calibrated,
    "swd_zero_data": swd_zero_data,
}
EXACT = ("identity", "svd", "random_b")
