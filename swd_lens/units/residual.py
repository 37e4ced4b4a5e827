"""stack_unit_results: the vector z_i(t) B_i that each unit adds to the residual stream on a prompt.

Results are stacked as `ActivationCache.stack_head_results` stacks heads. Summed over the units of a site they are the site's
output less its bias; behind a norm, that output through the norm with its scale held.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities import Slice

from swd_lens.base.errors import UnitSourceError, legible
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import HeldNorm
from swd_lens.hosts.sites import WRITES_RESIDUAL, hook_name, split_name
from swd_lens.units.coder import CoderUnits
from swd_lens.units.keys import read_units
from swd_lens.units.unit_set import UnitSet


@with_torch_defaults
def stack_unit_results(
    cache: Any,
    factors: Any,
    *,
    units: Any = None,
    layer: int | None = -1,
    return_labels: bool = False,
    incl_remainder: bool = False,
    pos_slice: Any = None,
    apply_ln: bool = False,
) -> Float[Tensor, "component *batch_and_pos d_model"] | tuple[Float[Tensor, "component *batch_and_pos d_model"], list[str]]:
    """Stack the vectors z_i(t) B_i that units add to the residual stream, as `ActivationCache.stack_head_results` stacks heads.

        with swd.attach(model, factors):
            _, cache = model.run_with_cache(prompt)
        results, labels = swd.stack_unit_results(cache, factors, return_labels=True)

    Summed over the units of a site it is the site's output less the bias (and less `offsets.out` of transported factors). Where a
    norm stands behind the site (Gemma 2 and 3, OLMo 2), results went through it, its scale that of the cached run. Of all
    units it takes n_units x batch x pos x d_model numbers: name `units` or positions where that is much.

    Args:
        cache: of a run with these factors attached; with or without its batch dimension, on any device.
        factors: what was attached, see `swd_lens.attach`. Every site must write to the residual stream: of a larger set take
            `factors["mlp_out"]` or `factors[["mlp_out", "attn_o"]]`.
        units: which units, in this order ("blocks.8.mlp_out/205", ("blocks.8.mlp_out", 205), a table or circuit of them). None:
            all, in execution order.
        layer: units of the layers before this one; -1 or None: of all.
        return_labels: also give their names.
        incl_remainder: a last component, the rest of the residual stream that enters `layer`.
        pos_slice: of positions, as in TransformerLens: a number, a (start, stop[, step]) tuple, or None.
        apply_ln: with the scale of the norm that reads the stream at `layer`, see `ActivationCache.apply_ln_to_stack`.

    Returns:
        (component, batch, pos, d_model) in the cache's dtype; with return_labels a pair, with the names.

    Raises:
        UnitSourceError: a site that does not write to the residual stream, or whose units show no write vectors; a cache without
            the scales of a norm behind a site.
        ValueError: something else than a cache, one without these units, or of other ones; a unit that there is not.
    """
    model = getattr(cache, "model", None)
    if model is None or not hasattr(cache, "apply_ln_to_stack"):
        raise ValueError(
            "stack_unit_results takes the ActivationCache of model.run_with_cache(...), with units attached, not a "
            f"{type(cache).__name__}"
        )
    of = UnitSet.of(model, factors)
    layer = len(model.blocks) if layer is None or layer == -1 else layer
    chosen = _chosen_units(of, units, layer)
    positions = pos_slice if isinstance(pos_slice, Slice) else Slice(pos_slice)
    parts = [_results(cache, of, site, indices, positions) for site, indices in chosen]
    labels = [f"{site}/{index}" for site, indices in chosen for index in indices]
    stream = positions.apply(cache["resid_post", layer - 1] if layer else cache["resid_pre", 0], dim=-2)
    results = torch.cat(parts) if parts else stream.new_zeros(0, *stream.shape)
    if incl_remainder:
        results, labels = torch.cat([results, (stream - results.sum(0))[None]]), [*labels, "remainder"]
    if apply_ln:
        results = cache.apply_ln_to_stack(results, layer, pos_slice=positions)
    return (results, labels) if return_labels else results


def _chosen_units(of: UnitSet, units: Any, layer: int) -> list[tuple[str, list[int]]]:
    """Group the units into runs of one site each, in the order that was asked for."""
    for site in of.sites:
        if site.kind not in WRITES_RESIDUAL:
            raise UnitSourceError(
                f"{site.name} does not write to the residual stream, so its units add nothing to it; give the sites that "
                'do, as factors["mlp_out"] or factors[["mlp_out", "attn_o"]]'
            )
        f = of[site.name]
        if of.write_vectors(site.name) is None or (isinstance(f, CoderUnits) and f.writes != "output"):
            raise UnitSourceError(
                f"the units of {site.name} show no write vectors at the site's output, so that what each adds is not known"
            )
    before = [site for site in of.sites if site.layer < layer]
    if units is None:
        return [(site.name, list(range(of[site.name].n_units))) for site in before]
    chosen: list[tuple[str, list[int]]] = []
    for site, index in read_units(units, of.sizes):
        if site not in of or not 0 <= index < of[site].n_units:
            has = ", ".join(f"{name} (0 to {n - 1})" for name, n in of.sizes.items())
            unit = f"{site}/{index}"
            raise ValueError(f"unit {legible(unit)} is not among these factors' units: {has}")
        if split_name(site)[0] >= layer:
            continue
        if not chosen or chosen[-1][0] != site:
            chosen.append((site, []))
        chosen[-1][1].append(index)
    return chosen


def _results(cache: Any, of: UnitSet, site: str, indices: list[int], positions: Any) -> Tensor:
    """Results of some units of one site, (unit, batch, pos, d_model)."""
    name = hook_name(site)
    if name not in cache.cache_dict:
        raise ValueError(
            f"the cache holds no {legible(name)}: run with these factors attached, `with swd.attach(model, factors): "
            f"model.run_with_cache(...)`, and without a names_filter that leaves it out ({site})"
        )
    z = cache.cache_dict[name]
    if z.shape[-1] != of[site].n_units:
        raise ValueError(
            f"the cache has {z.shape[-1]} units at {site}, these factors {of[site].n_units}; give the factors that were attached"
        )
    write = of.write_vectors(site)
    assert write is not None
    z = positions.apply(z, dim=-2)
    write = write.detach()[indices].to(z)
    norm: Any = of.host.norm_behind(next(each for each in of.sites if each.name == site))
    if norm is None:
        return torch.einsum("...u,ux->u...x", z[..., indices], write)
    # Through the norm behind the site, with its scales in the cached run.
    name = norm.hook_scale.name
    if name not in cache.cache_dict:
        raise UnitSourceError(
            f"{site} writes to the residual stream through a norm, and the cache has no {name}, the norm's scales in that run"
        )
    inverse = 1 / positions.apply(cache.cache_dict[name].float(), dim=-2)[..., 0]
    held = HeldNorm(facts_of(of.host.model).norm == "layer", of.host.norm_affine(norm).scale, inverse)
    return torch.einsum("...u,ux->u...x", z[..., indices], held.through(write)) * inverse[..., None].to(z)
