"""Exact controls for a host's sites: the same factorizations as exact.py, as a FactorSet that `attach` takes."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from swd_lens.base._version import __version__
from swd_lens.factorization.factorize import stamp
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import Pattern
from swd_lens.units.exact import random_b_factors, svd_factors
from swd_lens.units.factors import FactorSet


def svd(model: Any, sites: Pattern) -> FactorSet:
    """Exact SVD factors of the matrices that `sites` names (paper app. exact-dense-controls): all units, no sparsity.

    Raises:
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`.
    """
    host = host_of(model)
    factors = {site.name: stamp(svd_factors(host.weight(site)), model, site, {}) for site in find_sites(model, sites)}
    return FactorSet(factors, {"swd_lens": __version__, "model": str(model.cfg.model_name), "method": "svd"})


def random_b(model: Any, sites: Pattern, seed: int = 0) -> FactorSet:
    """Exact Random-B factors, write = a seeded random orthogonal matrix (paper app. exact-dense-controls).

    Every site draws from its own seed (seed plus its place in the list), so that equal shapes do not share a basis.
    """
    host = host_of(model)
    factors = {
        site.name: stamp(random_b_factors(host.weight(site), seed + 1000 * place), model, site, {})
        for place, site in enumerate(find_sites(model, sites))
    }
    return FactorSet(
        factors, {"swd_lens": __version__, "model": str(model.cfg.model_name), "method": "random_b", "seed": seed}
    )


def random_b_seeds(model: Any, sites: Pattern, seeds: Iterable[int] = range(10)) -> list[Callable[[], FactorSet]]:
    """One maker of Random-B factors per seed, for `compare`: dense sets are large, so each is made when its turn comes.

    Args:
        seeds: the paper's ten are 0 to 9 (app. exact-dense-controls; method.md §4.1).

    Raises:
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`; here, not when the first is made.
        ValueError: no seeds, or one of them twice.
    """
    chosen = list(seeds)
    if not chosen or len(set(chosen)) < len(chosen):
        raise ValueError(f"Random-B takes one or more different seeds, got {chosen}")
    find_sites(model, sites)
    return [partial(random_b, model, sites, seed) for seed in chosen]
