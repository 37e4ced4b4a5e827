"""Exact controls for a host's sites: the same factorizations as exact.py, as a FactorSet that `attach` takes."""

from typing import Any

from swd_lens._version import __version__
from swd_lens.baselines.exact import random_b_factors, svd_factors
from swd_lens.factors import FactorSet
from swd_lens.hosts import find_sites, host_of
from swd_lens.plan import stamp
from swd_lens.sites import Pattern


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
