"""Units that need no training, for comparison with SWD: exact controls of a host's matrices, and the channels of its MLPs.

1. `svd`, `random_b`, `neurons`: the factorizations of units/exact.py for a host's sites, as a FactorSet that `attach` takes.
   `svd` also in the metric of a text: of what the sites read there, and of what the loss sees of what they write.
   `pruned`, `svd_pruned`: neurons and SVD with as few edges as a factorization has, which are not exact.
2. `channels_of`: an MLP's hidden channels, after the activation, the unit of sparse pretraining (method.md §3). They stand at
   mlp_out: z is what it reads, z W_out + b_out what it writes, so that the units compute what the host does, for every activation
   and also behind a gate. Their edges are the paper's: nonzeros that a channel reads (of mlp_in, and of mlp_gate where there is
   one), nonzeros that it writes, and one more for each bias of its that is not zero.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from swd_lens.base import __version__
from swd_lens.base.settings import AUTO
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.factorization.calibration_text import grams_of
from swd_lens.factorization.factorize import factorize, stamp
from swd_lens.factorization.gradients import collect_output_grams
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.sites import Ends, Pattern, Site, Span, side_of_units
from swd_lens.train.baselines.fits import bias_of
from swd_lens.units import CoderUnits, described, require_detached
from swd_lens.units.exact import neuron_factors, random_b_factors, svd_factors
from swd_lens.units.factors import Factors, FactorSet


@with_torch_defaults
def svd(
    model: Any,
    sites: Pattern,
    *,
    whitened: bool = False,
    weigh_outputs: bool = False,
    by_head: bool = False,
    tokens: Any = None,
    batch_size: int = 16,
    progress: bool = False,
) -> FactorSet:
    """Exact SVD factors of the matrices that `sites` names (paper app. exact-dense-controls): all units, no sparsity.

    Whitened, the singular vectors are those of C W, where G = C^T C is the Gram of what the site reads on these tokens in the
    dense host: the first k units leave the least error of the site's outputs that k units can. With `weigh_outputs` they are
    those of C W D ("causal"), where D D^T is the second moment of the loss's gradients at the site's outputs. Both are ours.

    Args:
        whitened: go by what the sites read.
        weigh_outputs: go by what the loss sees of what they write, too; it whitens the inputs in any case.
        by_head: the singular vectors of each head's part of an attention matrix (ours). A unit then reads, or writes, the d_head
            coordinates of one head, and its edges are its nonzeros; units stand head by head, in each by singular value. Of
            attn_v and attn_o as many units as the heads have dimensions together.
        tokens: (rows, pos) ids, or a `TokenStream`: the text of the Grams, which are shrunk as in `swd_lens.solve`. A
            `CalibrationText` remembers them for other calls.
        batch_size: rows per forward.
        progress: show a bar.

    Raises:
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`.
        ValueError: whitened without tokens, or tokens for nothing; by head with `weigh_outputs`, or of a matrix without heads.
        TokenError, AttachError: bad tokens, or units are attached: they would change what the sites read.
    """
    if (whitened or weigh_outputs) != (tokens is not None):
        raise ValueError(
            f"baselines.svd(whitened={whitened or weigh_outputs}): whitened and weigh_outputs take their metric from "
            "text, and nothing else does; give tokens= with one of them, or neither"
        )
    found = find_sites(model, sites)
    if by_head and (weigh_outputs or not have_heads(model, found)):
        raise ValueError(
            f"baselines.svd(by_head=True) of {', '.join(site.name for site in found)}: singular vectors of heads are "
            "those of attn_q, attn_k, attn_v, attn_qkv and attn_o, in the metric of their inputs at most; leave out "
            "weigh_outputs and other matrices"
        )
    if tokens is None:
        if by_head:
            return _factor_set(model, sites, lambda weight, i: _by_head(model, found[i], weight), method="svd_by_head")
        return _factor_set(model, sites, lambda weight, _: svd_factors(weight), method="svd")
    require_detached(model, "baselines.svd")
    grams = grams_of(model, found, tokens, batch_size=batch_size, progress=progress)
    output_grams = collect_output_grams(model, found, tokens, progress=progress) if weigh_outputs else {}

    def factorized(weight: Tensor, i: int) -> Factors:
        name = found[i].name
        n_tokens = grams.n_routed.get(name) or grams.n_tokens
        if by_head:
            return _by_head(model, found[i], weight, grams[name], n_tokens)
        return svd_factors(weight, grams[name], output_grams.get(name), tokens=n_tokens)

    method = "svd_causal" if weigh_outputs else "svd_whitened"
    method += "_by_head" if by_head else ""
    return _factor_set(model, sites, factorized, method=method, tokens=grams.n_tokens)


def have_heads(model: Any, sites: Iterable[Site]) -> bool:
    """Whether each of these matrices has an end that is divided into attention heads."""
    return all(_heads_of(model, site)[1] for site in sites)


def _heads_of(model: Any, site: Site) -> tuple[str, list[Span]]:
    """Which end of a matrix is divided into heads, "read" or "written", and the heads; none of other matrices."""
    ends = Ends.of(host_of(model))
    spans = {"read": ends.read(site.name, site.d_in), "written": ends.written(site.name, site.d_out)}
    end = next((end for end, of_end in spans.items() if any("head" in span.name for span in of_end)), "read")
    return end, [span for span in spans[end] if "head" in span.name]


def _by_head(model: Any, site: Site, weight: Tensor, gram: Tensor | None = None, n_tokens: int | None = None) -> Factors:
    """The singular vectors of each head's part as units, in the metric of that part of the Gram."""
    end, heads = _heads_of(model, site)
    reads, writes = [], []
    for head in heads:
        span = slice(head.start, head.start + head.size)
        rows, columns = (span, slice(None)) if end == "read" else (slice(None), span)
        of_rows = None if gram is None else gram[rows, rows]
        f = svd_factors(weight[rows, columns], of_rows, tokens=None if gram is None else n_tokens)
        read, write = weight.new_zeros(site.d_in, f.n_units), weight.new_zeros(f.n_units, site.d_out)
        read[rows], write[:, columns] = f.read.to(weight), f.write.to(weight)
        reads.append(read.float())
        writes.append(write.float())
    read, write = torch.cat(reads, 1), torch.cat(writes)
    method = "svd_by_head" if gram is None else "svd_whitened_by_head"
    settings = {"method": method, "units": read.shape[1]}
    return Factors(read, write, settings, {"solver": f"exact.{method}"}, weight.detach().float())


@with_torch_defaults
def random_b(model: Any, sites: Pattern, seed: int = 0) -> FactorSet:
    """Exact Random-B factors, write = a seeded random orthogonal matrix (paper app. exact-dense-controls).

    Every site draws from its own seed (seed plus its place in the list), so that equal shapes do not share a basis.
    """
    return _factor_set(model, sites, lambda weight, i: random_b_factors(weight, seed + 1000 * i), method="random_b", seed=seed)


@with_torch_defaults
def neurons(model: Any, sites: Pattern, side: str = AUTO) -> FactorSet:
    """The matrices' own coordinates as units, exact: inputs with all that they write, or outputs with all that they read.

    An input of mlp_out and an output of mlp_in or mlp_gate is a neuron; an input of attn_o is a dimension of a head, and one of
    any other matrix a coordinate of the residual stream. The paper has no such control.

    Args:
        side: "input" (read = I, write = W; 1 + d_out edges per unit), "output" (read = W, write = I; d_in + 1), or "auto":
            outputs of mlp_in and mlp_gate, inputs of every other matrix.

    Raises:
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`.
        ValueError: another side.
    """
    of_sites = find_sites(model, sites)
    sides = [side_of_units(site.kind) if side == AUTO else side for site in of_sites]
    return _factor_set(model, sites, lambda weight, i: neuron_factors(weight, sides[i]), method="neurons", side=side)


@with_torch_defaults
def pruned(model: Any, sites: Pattern, *, sparsity: float | int, tokens: Any = None, **how: Any) -> FactorSet:
    """Prune the weights of neurons to K = (1 - sparsity) numel(W) edges: by |W_ij| sqrt(G_ii), then refitted (ours).

    `swd_lens.factorize` with preset="pruned" and basis="neurons"; its arguments are taken, too (basis=, out=, calibration=).

    Raises:
        See `swd_lens.factorize`.
    """
    return factorize(model, sites, sparsity=sparsity, tokens=tokens, preset="pruned", **{"basis": "neurons", **how})


@with_torch_defaults
def svd_pruned(model: Any, sites: Pattern, *, sparsity: float | int, tokens: Any = None, **how: Any) -> FactorSet:
    """The SVD with both factors pruned to K = (1 - sparsity) numel(W) edges together, and refitted on what is left.

    A = U sqrt(S) and B = sqrt(S) V^T, so that both vectors of a unit have the same norm; what is kept does not depend on the
    split. An entry is worth the error that leaving it out alone would cause (solver/svd_prune.py): |A_ij| sqrt(G_ii) |B_j| of a
    read entry, |B_jk| rms(z_j) of a write entry; without tokens G = I. Unit i is of the i-th singular value. The paper has no
    such control.

    `swd_lens.factorize` with preset="svd_pruned"; its arguments are taken, too (out=, calibration=, refine_rounds=).

    Raises:
        See `swd_lens.factorize`.
    """
    return factorize(model, sites, sparsity=sparsity, tokens=tokens, preset="svd_pruned", **how)


def _factor_set(model: Any, sites: Pattern, factorized: Callable[[Tensor, int], Factors], **how: Any) -> FactorSet:
    """Factors of the matrices that `sites` names, each from its weight and its place in the list."""
    host = host_of(model)
    factors = {site.name: stamp(factorized(host.weight(site), i), model, site) for i, site in enumerate(find_sites(model, sites))}
    return FactorSet(factors, {"swd_lens": __version__, "model": str(model.cfg.model_name), **how})


@with_torch_defaults
def random_b_seeds(model: Any, sites: Pattern, seeds: Iterable[int] = range(10)) -> list[Callable[[], FactorSet]]:
    """One maker of Random-B factors per seed, for `compare`: dense sets are large, so each is made when its turn comes.

    Args:
        seeds: the paper's ten are 0 to 9 (app. exact-dense-controls; method.md §4.1).

    Raises:
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`; here, not when the first is made.
        ValueError: no seeds, or one of them twice.
    """
    different = list(seeds)
    if not different or len(set(different)) < len(different):
        raise ValueError(f"Random-B takes one or more different seeds, got {different}")
    find_sites(model, sites)
    return [partial(random_b, model, sites, seed) for seed in different]


@dataclass(frozen=True)
class ExactControl:
    """An exact factorization that stands beside SWD."""

    title: str  # the method's name in tables
    make: Callable[..., FactorSet]  # (model, sites) -> its factors; with `of_text`, also tokens=
    of_text: bool = False  # whether it goes by the calibration text


# Control, as `run_study(controls=)` takes it -> what it is. A new one needs its record here.
EXACT: Mapping[str, ExactControl] = {
    "neurons": ExactControl("neurons", neurons),
    "svd": ExactControl("SVD", svd),
    "svd_whitened": ExactControl("SVD whitened", partial(svd, whitened=True), of_text=True),
    "svd_causal": ExactControl("SVD causal", partial(svd, weigh_outputs=True), of_text=True),
}


# ---------------------------------------------------------------------------------------------- channels


class Channels(nn.Module):
    """encode is the identity; decode(z) = z W_dec + b_out. The edges are given, see the module."""

    W_dec: Tensor
    b_out: Tensor
    edges_per_unit: Tensor
    valid_units: Tensor
    possible_edges: int  # of each unit, in a host without zeros

    def __init__(
        self,
        w_out: Float[Tensor, "unit d_out"],
        b_out: Float[Tensor, " d_out"],
        edges: Int[Tensor, " unit"],
        valid: Bool[Tensor, " unit"],
        possible_edges: int,
    ):
        super().__init__()
        self.possible_edges = possible_edges
        for name, t in (("W_dec", w_out), ("b_out", b_out), ("edges_per_unit", edges), ("valid_units", valid)):
            self.register_buffer(name, t.detach().clone())

    def encode(self, x: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch unit"]:
        return x

    def decode(self, z: Float[Tensor, "*batch unit"]) -> Float[Tensor, "*batch d_out"]:
        return z @ self.W_dec + self.b_out


@with_torch_defaults
def channels_of(model: Any, sites: Pattern = "mlp_out") -> dict[str, CoderUnits]:
    """The MLP channels of a host as units, by default of every layer; for `attach`, `attribute`, `evaluate`,
    `compare` (method.md §4.1).

    Args:
        model: a HookedTransformer or TransformerBridge, sparse or not.
        sites: mlp_out sites.

    Returns:
        blocks.{L}.mlp_out -> units; d_mlp of them each.

    Raises:
        ValueError: a site that is no mlp_out.
        UnknownSiteError, UnsupportedHostError: see `swd_lens.find_sites`.
    """
    host, matrices = host_of(model), find_sites(model, sites)
    if other := [site.name for site in matrices if site.kind != "mlp_out"]:
        raise ValueError(f"channels are units of mlp_out, not of {', '.join(other)}; sites='mlp_out' names every layer's")
    units = {}
    for site in matrices:
        token = torch.zeros(1, 1, dtype=torch.int64)
        written = (host.weight(site) != 0).sum(1)
        read, biased = torch.zeros_like(written), torch.zeros_like(written)
        possible = site.d_out
        for reader in host.sites():
            if reader.layer == site.layer and reader.kind.startswith("mlp") and reader != site:
                read += (host.weight(reader) != 0).sum(0)
                biased += bias_of(host, reader, token) != 0
                possible += reader.d_in + 1
        edges, valid = read + written + biased, (read > 0) & (written > 0)
        coder = Channels(host.weight(site), bias_of(host, site, token), edges, valid, possible)
        provenance = {**described(host, site), "method": "channels", "site": site.name, "swd_lens": __version__}
        provenance["model"] = str(host.model.cfg.model_name)
        units[site.name] = CoderUnits(coder, site.d_in, site.d_out, site.d_in, name="channels", provenance=provenance)
    return units
