"""factorize: from a host and a pattern to a FactorSet.

1. Find the sites, in execution order, and check the tokens.
2. For each site: its Gram (from the host with the earlier sites already replaced, "sequential", or from the dense host,
   "dense"; none without tokens), then its factors.
3. Each result carries its provenance: site, weight fingerprint, tokens, calibration, errors, version.
"""

import warnings
from dataclasses import replace
from typing import Any

from tqdm.auto import tqdm

from swd_lens._version import __version__
from swd_lens.calibration import Grams, collect_grams
from swd_lens.factors import Factors, FactorSet, fingerprint
from swd_lens.hosts import host_of
from swd_lens.inject import attach
from swd_lens.sites import Pattern, Site, select_sites
from swd_lens.solver import solve
from swd_lens.tasks.text import as_rows


def factorize(
    model: Any,
    sites: Pattern,
    *,
    sparsity: float = 0.5,
    tokens: Any = None,
    calibration: str = "sequential",
    preset: str = "paper",
    batch_size: int = 16,
    progress: bool = True,
    **options: Any,
) -> FactorSet:
    """Factorize the matrices that `sites` names into sparse read and write factors (paper §2.1).

    Args:
        model: a HookedTransformer.
        sites: a pattern or several, see `swd_lens.sites.select_sites`.
        sparsity: s in (0, 1) for every matrix; budget K = (1 - s) * d_in * d_out.
        tokens: (rows, pos) calibration ids; None = zero-data (G = I).
        calibration: "sequential" takes each site's inputs from the host with the earlier sites replaced (method.md §5.2);
            "dense" from the untouched host, in one pass. With one site they are the same.
        preset, options: the solver's, see `swd_lens.solver.solve` (units=, outer_iterations=, ...).
        batch_size: rows per calibration forward.
        progress: show progress bars.

    Raises:
        UnknownSiteError, UnsupportedHostError, TokenError: bad sites, host or tokens.
        ValueError: bad sparsity or solver options; the site is named.
    """
    host = host_of(model)
    chosen = select_sites(host.sites(), sites)
    if calibration not in ("sequential", "dense"):
        raise ValueError(f"calibration must be 'sequential' or 'dense', got {calibration!r}")
    rows = None if tokens is None else as_rows(tokens, model)
    _warn_of_few_tokens(chosen, rows)
    dense = None
    if rows is not None and calibration == "dense":
        dense = collect_grams(model, chosen, rows, batch_size=batch_size, progress=progress)
    done: dict[str, Factors] = {}
    bar = tqdm(chosen, desc=f"factorize s={sparsity:g}", unit="matrix", disable=not progress, leave=False)
    for site in bar:
        bar.set_postfix_str(site.name)
        grams = dense
        if rows is not None and grams is None:
            grams = _grams_behind(model, done, site, rows, batch_size)
        done[site.name] = _factorize_one(model, site, grams, sparsity, preset, options, calibration)
    provenance = {"swd_lens": __version__, "model": str(model.cfg.model_name), "sparsity": sparsity, "preset": preset}
    provenance |= {
        "calibration": calibration if rows is not None else "zero-data",
        "tokens": 0 if rows is None else rows.numel(),
    }
    return FactorSet(done, provenance)


def _grams_behind(model: Any, done: dict[str, Factors], site: Site, rows: Any, batch_size: int) -> Grams:
    """The site's Gram with everything in `done` replaced."""
    if not done:
        return collect_grams(model, [site], rows, batch_size=batch_size)
    with attach(model, done):
        return collect_grams(model, [site], rows, batch_size=batch_size)


def _factorize_one(
    model: Any, site: Site, grams: Grams | None, sparsity: float, preset: str, options: dict[str, Any], calibration: str
) -> Factors:
    weight = host_of(model).weight(site)
    gram = None if grams is None else grams[site.name]
    try:
        f = solve(weight, gram, sparsity, preset=preset, **options)
    except ValueError as error:
        # The same kind of error, with the site in front: a solver only ever sees a tensor.
        raise type(error)(f"{site}: {error}") from error
    made = {
        "calibration": "zero-data" if grams is None else calibration,
        "tokens": 0 if grams is None else grams.n_tokens,
    }
    made |= {"relmse": f.relmse(gram), "relative_frobenius": f.relative_frobenius()}
    return stamp(f, model, site, made)


def stamp(f: Factors, model: Any, site: Site, more: dict[str, Any]) -> Factors:
    """Factors that know where they belong: site, fingerprint of the host's W, model, version. Attaching checks these."""
    where = {
        "site": site.name,
        "weight_sha256": fingerprint(host_of(model).weight(site)),
        "model": str(model.cfg.model_name),
        "normalization": str(model.cfg.normalization_type),
        "swd_lens": __version__,
    }
    return replace(f, provenance={**f.provenance, **where, **more})


def _warn_of_few_tokens(sites: list[Site], rows: Any) -> None:
    widest = max(sites, key=lambda site: site.d_in)
    if rows is not None and rows.numel() < widest.d_in:
        warnings.warn(
            f"{rows.numel()} calibration tokens for {widest.name}, which reads {widest.d_in} inputs: its Gram is singular and "
            "the factors will fit these tokens only. Give more tokens, or none (zero-data).",
            stacklevel=3,
        )
