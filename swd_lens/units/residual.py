"""residual: units on the residual stream: what each adds to it on a prompt, and which of them write or read a direction.

1. `stack_unit_results` gives z_i(t) B_i for every unit, stacked as `ActivationCache.stack_head_results` stacks heads. Summed over
   the units of a site it is the site's output less its bias; behind a norm, that output through the norm with its scale held.
2. `writers` ranks units by how well their write vectors point along a direction d of the residual stream, `readers` by their read
   vectors (with the norm's weight, where it is not folded into W). Both are methods of Factors and FactorSet.
3. `direction_of` makes a direction of tokens: their unembedding as the final norm lets it through, or their embedding.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor
from transformer_lens.utilities import Slice

from swd_lens.base.errors import UnitSourceError, legible, quoted
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.hosts import host_of
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import HeldNorm
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, WRITES_RESIDUAL, hook_name, is_site_name, split_name
from swd_lens.tasks.split import Unusable
from swd_lens.tasks.tokenize import TaskTokenizer
from swd_lens.units.coder import CoderUnits
from swd_lens.units.factors import Factors
from swd_lens.units.keys import read_units
from swd_lens.units.unit_set import UnitSet

READS_RESIDUAL = (*READS_ATTENTION_INPUT, "mlp_in", "mlp_gate")
TOKENS_AS = ("unembedding", "embedding")
RANKED_BY = ("cosine", "dot product")


# ---------------------------------------------------------------------------------------------- on a prompt


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
) -> (
    Float[Tensor, "component *batch_and_pos d_model"]
    | tuple[Float[Tensor, "component *batch_and_pos d_model"], list[str]]
):
    """What every unit adds to the residual stream, z_i(t) B_i, as `ActivationCache.stack_head_results` gives heads.

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
    """Runs of units of one site, in the order that was asked for."""
    for site in of.sites:
        if site.kind not in WRITES_RESIDUAL:
            raise UnitSourceError(
                f"{site.name} does not write to the residual stream, so its units add nothing to it; give the sites that "
                'do, as factors["mlp_out"] or factors[["mlp_out", "attn_o"]]'
            )
        if not _writes_output(of, site.name):
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


def _writes_output(of: UnitSet, site: str) -> bool:
    units = of[site]
    return of.write_vectors(site) is not None and (not isinstance(units, CoderUnits) or units.writes == "output")


def _results(cache: Any, of: UnitSet, site: str, indices: list[int], positions: Any) -> Tensor:
    """(unit, batch, pos, d_model) of some units of one site."""
    name = hook_name(site)
    if name not in cache.cache_dict:
        raise ValueError(
            f"the cache holds no {legible(name)}: run with these factors attached, `with swd.attach(model, factors): "
            f"model.run_with_cache(...)`, and without a names_filter that leaves it out ({site})"
        )
    z = cache.cache_dict[name]
    if z.shape[-1] != of[site].n_units:
        raise ValueError(
            f"the cache has {z.shape[-1]} units at {site}, these factors {of[site].n_units}; give the factors that were "
            "attached"
        )
    write = of.write_vectors(site)
    assert write is not None
    z = positions.apply(z, dim=-2)
    norm = _held_in(cache, of, site, positions)
    write = write.detach()[indices].to(z)
    results = torch.einsum("...u,ux->u...x", z[..., indices], write if norm is None else norm.through(write))
    return results if norm is None else results * norm.inverse[..., None].to(z)


def _held_in(cache: Any, of: UnitSet, site: str, positions: Any) -> HeldNorm | None:
    """The norm behind a site, with its scales in the cached run."""
    of_site = next(each for each in of.sites if each.name == site)
    norm: Any = of.host.norm_behind(of_site)
    if norm is None:
        return None
    name = norm.hook_scale.name
    if name not in cache.cache_dict:
        raise UnitSourceError(
            f"{site} writes to the residual stream through a norm, and the cache has no {name}, the norm's scales in that "
            "run"
        )
    inverse = 1 / positions.apply(cache.cache_dict[name].float(), dim=-2)[..., 0]
    return HeldNorm(facts_of(of.host.model).norm == "layer", of.host.norm_affine(norm).scale, inverse)


# ---------------------------------------------------------------------------------------------- directions


@with_torch_defaults
def writers(
    factors: Mapping[str, Factors], direction: Any, model: Any, n: Any, by: str, tokens_as: str
) -> pd.DataFrame:
    """`FactorSet.writers` and `Factors.writers`: their docstrings say what comes in and out."""
    vectors = {site: f.write.detach().float().cpu() for site, f in _on_the_stream(factors, WRITES_RESIDUAL, "write")}
    return _ranked(factors, vectors, direction_of(direction, model, tokens_as), n, by)


@with_torch_defaults
def readers(
    factors: Mapping[str, Factors], direction: Any, model: Any, n: Any, by: str, tokens_as: str
) -> pd.DataFrame:
    """`FactorSet.readers` and `Factors.readers`: their docstrings say what comes in and out."""
    vectors = {}
    for site, f in _on_the_stream(factors, READS_RESIDUAL, "read"):
        read = f.read.detach().float().cpu()
        # A norm's weight that is not folded into W stands between the stream and the read vector.
        scale = None if f.origin is None or f.origin.scale is None else f.origin.scale.float().cpu()
        vectors[site] = (read if scale is None else read * scale[:, None]).T
    return _ranked(factors, vectors, direction_of(direction, model, tokens_as), n, by)


def direction_of(direction: Any, model: Any = None, tokens_as: str = "unembedding") -> Float[Tensor, " d_model"]:
    """A direction of the residual stream, float32 on the CPU.

    Args:
        direction: (d_model,) tensor; a token, as text or id; or a pair of tokens, the first less the second.
        model: whose tokens they are.
        tokens_as: "unembedding": what the token's logit reads of the stream, less the mean over the vocabulary, through the final
            norm (without its scale): a dot product with a write vector, times the norm's 1 / scale, is the change of that logit
            per unit of z. "embedding": the token's row of W_E.

    Raises:
        UnitSourceError: tokens without a model, a text that is not one token, or something else.
    """
    if tokens_as not in TOKENS_AS:
        raise UnitSourceError(f"tokens_as={quoted(tokens_as)}: give {' or '.join(TOKENS_AS)}")
    if isinstance(direction, Tensor) and direction.is_floating_point():
        if direction.ndim != 1 or not bool(direction.isfinite().all()) or not bool(direction.any()):
            raise UnitSourceError(
                "a direction is a finite (d_model,) vector that is not zero, or two different tokens; got shape "
                f"{tuple(direction.shape)}"
            )
        return direction.detach().float().cpu()
    tokens: list[Any] = list(direction) if isinstance(direction, tuple | list) else [direction]
    if len(tokens) not in (1, 2) or not all(isinstance(t, str | int) and not isinstance(t, bool) for t in tokens):
        raise UnitSourceError(
            f"{quoted(direction)} is no direction; give a (d_model,) tensor, a token as text or id, or a pair of tokens"
        )
    if model is None:
        raise UnitSourceError(
            f"the direction {quoted(direction)} is of tokens; say whose: factors.writers({quoted(direction)}, model)"
        )
    ids = [_token_id(model, token) for token in tokens]
    vectors = _unembedded(model) if tokens_as == "unembedding" else model.W_E.detach().float().cpu()
    first = vectors[ids[0]]
    difference = first if len(ids) == 1 else first - vectors[ids[1]]
    if not bool(difference.any()):
        raise UnitSourceError(
            "a direction is a finite (d_model,) vector that is not zero, or two different tokens; got shape "
            f"{tuple(difference.shape)}"
        )
    return difference


def _token_id(model: Any, token: str | int) -> int:
    if isinstance(token, int):
        if not 0 <= token < int(model.cfg.d_vocab):
            reason = f"id {token} is outside 0 to {int(model.cfg.d_vocab) - 1}"
            raise UnitSourceError(f"the direction cannot be made of this token: {reason}")
        return token
    if model.tokenizer is None:
        reason = f"{token!r}: this host has no tokenizer, give token ids"
        raise UnitSourceError(f"the direction cannot be made of this token: {reason}")
    try:
        return TaskTokenizer("direction", model, False).single(token, "a direction's token")
    except Unusable as why:
        raise UnitSourceError(f"the direction cannot be made of this token: {why}") from None


def _unembedded(model: Any) -> Float[Tensor, "vocab d_model"]:
    """What each token's logit, less the mean over the vocabulary, reads of the residual stream; the norm's scale held."""
    norm, unembedding = host_of(model).readout()
    read = unembedding.detach().float().cpu().T
    read = read - read.mean(0)
    if norm is not None:
        read = read * norm.detach().float().cpu()
    return read - read.mean(1, keepdim=True) if facts_of(model).norm == "layer" else read


def _on_the_stream(factors: Mapping[str, Factors], kinds: Iterable[str], does: str) -> Iterable[tuple[str, Factors]]:
    """The sites whose units write to, or read from, the residual stream."""
    named = {site: split_name(site)[1] for site in factors if is_site_name(site)}
    fitting = [site for site, kind in named.items() if kind in kinds]
    if not fitting:
        preposition = "to" if does == "write" else "from"
        raise UnitSourceError(
            f"none of these sites {does}s {preposition} the residual stream: {', '.join(factors)}; those that do are of "
            f"the kinds {', '.join(kinds)}"
        )
    return [(site, factors[site]) for site in fitting]


def _ranked(
    factors: Mapping[str, Factors],
    vectors: Mapping[str, Float[Tensor, "_unit _d_model"]],
    direction: Tensor,
    n: Any,
    by: str,
) -> pd.DataFrame:
    if by not in RANKED_BY:
        raise UnitSourceError(f"by={quoted(by)}: give {' or '.join(RANKED_BY)}")
    if n is not None and (isinstance(n, bool) or not isinstance(n, int) or n < 1):
        raise UnitSourceError(f"n={quoted(n)}: give a whole number of at least 1, or None for all")
    tables = []
    for site, of_site in vectors.items():
        if of_site.shape[1] != len(direction):
            raise UnitSourceError(
                f"the direction has {len(direction)} entries, the residual stream at {site} {of_site.shape[1]}"
            )
        dot, norm = of_site @ direction, of_site.norm(dim=1)
        cosine = dot / (norm * direction.norm()).clamp_min(1e-30)
        alive = factors[site].valid_units.cpu().nonzero()[:, 0].tolist()
        columns = {"cosine": cosine[alive].tolist(), "dot product": dot[alive].tolist()}
        tables.append(pd.DataFrame({"unit": [f"{site}/{index}" for index in alive], **columns}))
    table = pd.concat(tables, ignore_index=True)
    table = table.sort_values(by, key=lambda values: -values.abs(), kind="stable", ignore_index=True).head(
        n or len(table)
    )
    table.insert(0, "rank", range(1, len(table) + 1))
    return table
