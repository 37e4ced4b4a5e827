"""A frozen run: what a unit graph holds fixed of a host, on one prompt or without any.

1. `freeze` runs the host and finds how each block reads the residual stream: h = (x - mean x) * weight / scale + shift, or the
   same without the mean; and whether its MLP reads what its attention wrote. The scale of every position is taken off the run,
   and that this formula gives the h the host computed is checked.
2. On a prompt it also keeps z of the attached units, attention patterns, and the slopes of the MLPs' activation function. Slopes
   are gradients at this run, by autograd; patterns are checked to give attn_o's input from the values.
3. `read_norms` is for graphs without a prompt: readings of one position, with scale 1 or the average of 1/scale over tokens.

Everything returned is float32, on the CPU and without gradient. Rows are positions of the one prompt (or, where only norms are
looked at, of all prompts one after the other).
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.base.errors import error
from swd_lens.base.progress import tqdm
from swd_lens.hosts import Affine, Host, Start, norms_output
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import Recording, record
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, RESIDUAL_MATRICES, Site
from swd_lens.tasks.text import as_rows
from swd_lens.units.match import dtype_of

PRE_ACTIVATION = ("mlp_gate", "mlp_in")
_PROBE_TOKENS = 8
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Reading:
    """How a residual x becomes a site's input: h = (x - mean(x), if centred) * weight * inverse + shift.

    Attributes:
        centred: whether the mean over d_model is taken out (LayerNorm does, RMSNorm does not).
        weight: (d_model,) or None where there is none (or it is folded).
        inverse: (pos,) 1 / scale of the run's positions.
        behind_attention: of an MLP: whether x has in it what the attention of the same block wrote.
    """

    centred: bool
    weight: Float[Tensor, " d_model"] | None
    inverse: Float[Tensor, " _pos"]
    behind_attention: bool = False

    def pull(self, vectors: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Vectors that are multiplied with h, as vectors that are multiplied with x; without the scale."""
        vectors = vectors if self.weight is None else vectors * self.weight
        return vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors

    def push(self, changes: Float[Tensor, "*n _pos d_model"]) -> Float[Tensor, "*n _pos d_model"]:
        """Changes of x at every position of the run, as changes of h, the scale held."""
        changes = changes - changes.mean(-1, keepdim=True) if self.centred else changes
        return (changes if self.weight is None else changes * self.weight) * self.inverse[:, None]


@dataclass(frozen=True)
class FrozenRun:
    """One run.

    Attributes:
        embedded: what enters the first block.
        leaving: what leaves the last one.
        readings: (layer, "attn" or "mlp") -> how the attention or the MLP of a block reads the residual stream.
        logits: at the last position.
        z: name of an attached site -> its units.
        patterns: layer -> attention pattern.
        slopes: name of a site before an activation function -> d post / d pre.
    """

    embedded: Float[Tensor, "_pos d_model"]
    leaving: Float[Tensor, "_pos d_model"]
    readings: Mapping[tuple[int, str], Reading]
    logits: Float[Tensor, " vocab"]
    z: Mapping[str, Float[Tensor, "_pos _unit"]] = field(default_factory=dict)
    patterns: Mapping[int, Float[Tensor, "head _dest _src"]] = field(default_factory=dict)
    slopes: Mapping[str, Float[Tensor, "_pos d_mlp"]] = field(default_factory=dict)

    def last(self) -> "FrozenRun":
        """The last position alone."""
        return replace(
            self,
            embedded=self.embedded[-1:],
            leaving=self.leaving[-1:],
            readings={key: replace(reading, inverse=reading.inverse[-1:]) for key, reading in self.readings.items()},
            z={site: z[-1:] for site, z in self.z.items()},
            slopes={site: slope[-1:] for site, slope in self.slopes.items()},
        )


def norm_before(kind: str) -> str | None:
    """Which of a block's two norms a kind of site reads: "attn", "mlp" or None."""
    return "attn" if kind in READS_ATTENTION_INPUT else "mlp" if kind in PRE_ACTIVATION else None


def read_norms(host: Host, tokens: Any = None) -> FrozenRun:
    """The host's norms, as readings of one position: with scale 1, or with the average of 1/scale over tokens.

    Memory does not grow with the number of rows.
    """
    cfg = host.model.cfg
    probe = torch.arange(min(_PROBE_TOKENS, int(cfg.n_ctx), int(cfg.d_vocab)))[None]
    rows = probe if tokens is None else as_rows(tokens, host.model)
    runs = (
        freeze(host, batch)
        for batch in tqdm(rows.split(_ROWS_AT_ONCE), desc="norms", disable=len(rows) <= _ROWS_AT_ONCE, leave=False)
    )
    first = next(runs)
    inverse = {key: float(reading.inverse.double().sum()) for key, reading in first.readings.items()}
    for run in runs:
        for key, reading in run.readings.items():
            inverse[key] += float(reading.inverse.double().sum())
    means = {key: 1.0 if tokens is None else total / rows.numel() for key, total in inverse.items()}
    readings = {
        key: replace(reading, inverse=torch.tensor([means[key]], dtype=torch.float32))
        for key, reading in first.readings.items()
    }
    return replace(first, readings=readings)


def freeze(
    host: Host,
    tokens: Int[Tensor, "_rows pos"],
    *,
    units: Sequence[Site] = (),
    patterns: Sequence[int] = (),
    slopes: Sequence[int] = (),
) -> FrozenRun:
    """Run one prompt (several where only norms are looked at).

    Args:
        units: attached sites whose z is kept.
        patterns: layers whose attention pattern is kept.
        slopes: layers whose activation function's slopes are kept.

    Raises:
        UnsupportedHostError: the host reads its residual stream in another way (norms behind the matrices, linear
            attention), shows no pattern, or its activation function mixes neurons.
    """
    require_followable(host, slopes, patterns)
    readers = {(site.layer, norm): site for site in reversed(host.sites()) if (norm := norm_before(site.kind))}
    writers = [site for site in host.sites() if site.kind in RESIDUAL_MATRICES]
    before = [site for site in host.sites() if site.kind in PRE_ACTIVATION and site.layer in slopes]
    values = [
        site for site in (*host.sites(), *host.alternatives()) if site.kind == "attn_v" and site.layer in patterns
    ]
    with torch.no_grad():
        embedded = host.residual(tokens, 0).detach().clone()
    with torch.set_grad_enabled(bool(slopes)):
        shown = record(
            host,
            tokens,
            inputs=[*readers.values(), *writers],
            outputs=[*writers, *before, *values],
            units=units,
            hooks=[_pattern_hook(layer) for layer in patterns],
            run="last",
            # A start with a gradient: slopes are found also in a host whose weights are frozen.
            start=Start(0, embedded.clone().requires_grad_(bool(slopes))),
            gradient=True,
        )
        # The activation function sees each neuron by itself, so the gradient of a sum shows all slopes.
        slope = {
            site.name: torch.autograd.grad(
                shown.inputs[f"blocks.{site.layer}.mlp_out"].sum(), shown.outputs[site.name], retain_graph=True
            )[0]
            for site in before
        }
    assert shown.logits is not None
    stream = _rows(embedded)
    readings, leaving = _readings(host, stream, readers, writers, shown)
    return FrozenRun(
        stream.cpu(),
        leaving.cpu(),
        readings,
        shown.logits[-1].detach().float().cpu(),
        {site.name: _rows(shown.units[site.name]).cpu() for site in units},
        {layer: _checked_pattern(host, layer, shown).cpu() for layer in patterns},
        {name: _rows(of_site).cpu() for name, of_site in slope.items()},
    )


def require_drawable(host: Host) -> None:
    """Do nothing if a graph of prompts, with attention and all layers, could be drawn of this host: asked before long work.

    Raises:
        UnsupportedHostError: see `freeze`; the host caps its logits.
    """
    layers = sorted({site.layer for site in host.sites()})
    require_followable(host, layers, layers)
    require_uncapped(host)


def require_uncapped(host: Host) -> None:
    """Raises UnsupportedHostError where logits are no linear function of what leaves the final norm."""
    cap = facts_of(host.model).logit_cap
    if cap is not None:
        raise error("graph-to-capped-logits", cap=cap)


def require_followable(host: Host, slopes: Sequence[int], patterns: Sequence[int]) -> None:
    """Raises UnsupportedHostError where a frozen run does not explain what blocks read and write."""
    for site in host.sites():
        if site.kind in RESIDUAL_MATRICES and norms_output(host, site):
            raise error("graph-behind-a-norm", site=site.name)
        if "." in site.kind or (norm_before(site.kind) and host.affine(site) is None):
            raise error("graph-of-an-unknown-reader", site=site.name)
    facts = facts_of(host.model)
    if slopes and facts.mixes_neurons:
        raise error("graph-through-mixed-neurons", act=facts.activation)
    for layer in patterns:
        name = _pattern_hook(layer)
        if name not in host.model.hook_dict:
            raise error("graph-attention-not-frozen", name=name, layer=layer)


def _pattern_hook(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_pattern"


def _rows(tensor: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "_row *width"]:
    return tensor.detach().flatten(0, 1).float()


# ---------------------------------------------------------------------------------------------- norms


def _readings(
    host: Host,
    stream: Float[Tensor, "row d_model"],
    readers: Mapping[tuple[int, str], Site],
    writers: Sequence[Site],
    shown: Recording,
) -> tuple[dict[tuple[int, str], Reading], Float[Tensor, "row d_model"]]:
    """How every block reads the residual stream, and what leaves the last block."""
    readings: dict[tuple[int, str], Reading] = {}
    x = stream
    for layer in range(max(site.layer for site in (*host.sites(), *host.alternatives())) + 1):
        written = {site.kind: _rows(shown.outputs[site.name]) for site in writers if site.layer == layer}
        middle = x + written.get("attn_o", torch.zeros_like(x))
        # An MLP beside its attention (a parallel block) reads what enters the block.
        for norm, residuals in (("attn", {False: x}), ("mlp", {True: middle, False: x})):
            site = readers.get((layer, norm))
            if site is not None:
                readings[layer, norm] = _fitted(host, site, residuals, _rows(shown.inputs[site.name]))
        x = middle + written.get("mlp_out", torch.zeros_like(x))
    return readings, x


def _fitted(host: Host, site: Site, residuals: Mapping[bool, Tensor], h: Tensor) -> Reading:
    """The reading that explains h from one of the residuals: those that the block's attention has written to or not."""
    affine, layer_norm = host.affine(site) or Affine(), facts_of(host.model).norm == "layer"
    tolerance = 1e-3 if dtype_of(host) in ("float32", "float64") else 3e-2
    errors = []
    # What the host's settings say is tried first: on centred residuals both norms fit.
    for centred in (layer_norm, not layer_norm):
        fits = {attended: _fit(x, h, affine, centred) for attended, x in residuals.items()}
        attended, (inverse, difference) = min(fits.items(), key=lambda fit: fit[1][1])
        if difference < tolerance:
            return Reading(centred, None if affine.scale is None else affine.scale.cpu(), inverse.cpu(), attended)
        errors.append(difference)
    raise error("graph-of-a-changed-reading", site=site.name, difference=min(errors))


def _fit(x: Tensor, h: Tensor, affine: Affine, centred: bool) -> tuple[Float[Tensor, " row"], float]:
    """1 / scale of every position by least squares, and how far the formula then is from h."""
    u = x - x.mean(-1, keepdim=True) if centred else x
    u = u if affine.scale is None else u * affine.scale.to(u.device)
    y = h if affine.shift is None else h - affine.shift.to(h.device)
    inverse = (y * u).sum(-1) / (u * u).sum(-1).clamp(min=1e-30)
    return inverse, float((y - inverse[:, None] * u).norm() / y.norm().clamp(min=1e-30))


def final_reading(host: Host, x: Float[Tensor, "pos d_model"]) -> Reading:
    """The norm before the unembedding; its scale by the formula, with the host's own epsilon."""
    facts, weight = facts_of(host.model), host.readout()[0]
    if facts.norm is None:
        return Reading(False, None, torch.ones(len(x), dtype=torch.float32))
    centred = facts.norm == "layer"
    u = x - x.mean(-1, keepdim=True) if centred else x
    inverse = (u.square().mean(-1) + facts.eps).rsqrt()
    return Reading(centred, None if weight is None else weight.cpu(), inverse)


# ---------------------------------------------------------------------------------------------- patterns


def _checked_pattern(host: Host, layer: int, shown: Recording) -> Float[Tensor, "head dest src"]:
    """A pattern, once it is known to be all that lies between the values and attn_o."""
    if _pattern_hook(layer) not in shown.hooks or f"blocks.{layer}.attn_v" not in shown.outputs:
        raise error("graph-pattern-never-shown", layer=layer)
    pattern, z = _rows(shown.hooks[_pattern_hook(layer)]), _rows(shown.inputs[f"blocks.{layer}.attn_o"])
    v = by_head(_rows(shown.outputs[f"blocks.{layer}.attn_v"]), pattern.shape[0], z.shape[-1])
    mixed = torch.einsum("hds,she->dhe", pattern, v).flatten(1)
    if float((mixed - z).norm()) > 1e-3 * float(z.norm()) and dtype_of(host) in ("float32", "float64"):
        raise error("graph-of-changed-values", layer=layer)
    return pattern


def by_head(v: Float[Tensor, "*n _width"], n_heads: int, width: int) -> Float[Tensor, "*n head d_head"]:
    """Values by attention head, each stored head repeated for the query heads that share it."""
    heads = v.unflatten(-1, (-1, width // n_heads))
    return heads.repeat_interleave(n_heads // heads.shape[-2], dim=-2)
