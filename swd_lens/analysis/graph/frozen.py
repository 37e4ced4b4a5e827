"""A frozen run: what a unit graph holds fixed of a host, on one prompt or without any.

1. `freeze` runs the host and finds how each block reads the residual stream: h = (x - mean x) * weight / scale + shift, or the
   same without the mean, or x itself; and whether its MLP reads what its attention wrote. Where a norm stands behind a matrix
   (Gemma 2 and 3, OLMo 2), the output is written through that norm, by the same formula. The scale of every position is taken
   off the run, and that this formula gives what the host computed is checked.
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

from swd_lens.base.errors import UnsupportedHostError
from swd_lens.base.progress import tqdm
from swd_lens.hosts import Affine, Host, Start
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.held import HeldNorm, inverse_scale, norms_behind
from swd_lens.hosts.recording import Recording, record
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, RESIDUAL_MATRICES, Site
from swd_lens.tasks.text import as_rows
from swd_lens.units.match import dtype_of

PRE_ACTIVATION = ("mlp_gate", "mlp_in")
_PROBE_TOKENS = 8
_ROWS_AT_ONCE = 64


@dataclass(frozen=True)
class Reading(HeldNorm):
    """A norm through which a block reads the residual stream. behind_attention: of an MLP: whether what it reads has in it
    what the attention of the same block wrote."""

    behind_attention: bool = False


@dataclass(frozen=True)
class FrozenRun:
    """One run."""

    embedded: Float[Tensor, "_pos d_model"]  # what enters the first block
    leaving: Float[Tensor, "_pos d_model"]  # what leaves the last one
    # (layer, "attn" or "mlp") -> how the attention or the MLP of a block reads the residual stream
    readings: Mapping[tuple[int, str], Reading]
    logits: Float[Tensor, " vocab"]  # at the last position, before a soft cap
    logit_cap: float | None = None  # where the host has one
    # name of a site -> the norm between its output and the residual stream; of sites that have one
    writings: Mapping[str, HeldNorm] = field(default_factory=dict)
    z: Mapping[str, Float[Tensor, "_pos _unit"]] = field(default_factory=dict)  # name of an attached site -> its units
    patterns: Mapping[int, Float[Tensor, "head _dest _src"]] = field(default_factory=dict)  # layer -> attention pattern
    # name of a site before an activation function -> d post / d pre
    slopes: Mapping[str, Float[Tensor, "_pos d_mlp"]] = field(default_factory=dict)

    @property
    def probabilities(self) -> Float[Tensor, " vocab"]:
        """The probabilities of the next token."""
        cap = self.logit_cap
        return (self.logits if cap is None else cap * (self.logits / cap).tanh()).softmax(-1)

    def last(self) -> "FrozenRun":
        """The last position alone."""
        return replace(
            self,
            embedded=self.embedded[-1:],
            leaving=self.leaving[-1:],
            readings={key: replace(norm, inverse=norm.inverse[-1:]) for key, norm in self.readings.items()},
            writings={site: replace(norm, inverse=norm.inverse[-1:]) for site, norm in self.writings.items()},
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
    first, sums = None, torch.zeros((), dtype=torch.float64)
    for batch in tqdm(rows.split(_ROWS_AT_ONCE), desc="norms", disable=len(rows) <= _ROWS_AT_ONCE, leave=False):
        run = freeze(host, batch)
        first = first or run
        sums = sums + torch.stack([n.inverse.double().sum() for n in (*run.readings.values(), *run.writings.values())])
    assert first is not None
    means = iter((torch.ones_like(sums) if tokens is None else sums / rows.numel()).float().split(1))
    readings = {key: replace(norm, inverse=next(means)) for key, norm in first.readings.items()}
    writings = {site: replace(norm, inverse=next(means)) for site, norm in first.writings.items()}
    return replace(first, readings=readings, writings=writings)


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

    Raises UnsupportedHostError: the host reads its residual stream in another way (linear attention) or norms it itself (BERT),
    shows no pattern, or its activation function mixes neurons.
    """
    require_followable(host, slopes, patterns)
    readers = {(site.layer, norm): site for site in reversed(host.sites()) if (norm := norm_before(site.kind))}
    writers = [site for site in host.sites() if site.kind in RESIDUAL_MATRICES]
    before = [site for site in host.sites() if site.kind in PRE_ACTIVATION and site.layer in slopes]
    values = [site for site in (*host.sites(), *host.alternatives()) if site.kind == "attn_v" and site.layer in patterns]
    with torch.no_grad():
        embedded = host.residual(tokens, 0).detach().clone()
    with torch.set_grad_enabled(bool(slopes)), norms_behind(host, writers) as behind:
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
    readings, writings, leaving = _norms(host, stream, readers, writers, shown, behind)
    cap = facts_of(host.model).logit_cap
    return FrozenRun(
        stream.cpu(),
        leaving.cpu(),
        readings,
        before_cap(shown.logits[-1].detach().float().cpu(), cap),
        cap,
        writings,
        {site.name: _rows(shown.units[site.name]).cpu() for site in units},
        {layer: _checked_pattern(host, layer, shown).cpu() for layer in patterns},
        {name: _rows(of_site).cpu() for name, of_site in slope.items()},
    )


def before_cap(logits: Float[Tensor, "*n vocab"], cap: float | None) -> Float[Tensor, "*n vocab"]:
    """Logits as the unembedding gave them: cap * tanh(logit / cap) is what a host with a soft cap shows."""
    if cap is None:
        return logits
    # Short of 1, where float32 has nothing left of a logit that is far above the cap.
    return (cap * (logits.double() / cap).clamp(-1 + 1e-7, 1 - 1e-7).atanh()).float()


def require_drawable(host: Host) -> None:
    """Check that a graph of prompts, with attention and all layers, can be drawn of this host; for use before long work.
    Raises UnsupportedHostError: see `freeze`."""
    layers = sorted({site.layer for site in host.sites()})
    require_followable(host, layers, layers)
    read_norms(host)  # a run of a few tokens, in which every formula is checked


def require_followable(host: Host, slopes: Sequence[int], patterns: Sequence[int]) -> None:
    """Raises UnsupportedHostError where a frozen run does not explain what blocks read and write."""
    facts = facts_of(host.model)
    for site in host.sites():
        if not facts.causal and host.norm_behind(site) is not None:
            raise UnsupportedHostError(
                "a unit graph needs blocks that add what they write to the residual stream; in this host a norm behind "
                f"{site.name} takes the stream itself"
            )
        if "." in site.kind or (norm_before(site.kind) and host.norm_before(site) is None):
            raise UnsupportedHostError(
                f"a unit graph needs to know what {site.name} reads; it is an expert's matrix or a map of no known kind, "
                "or its block has no norm that we know"
            )
    if slopes and facts.mixes_neurons:
        raise UnsupportedHostError(
            f"the activation function {facts.activation} mixes neurons, so it has no slope per neuron; take units of "
            "attention, or a graph without a prompt"
        )
    for layer in patterns:
        name = _pattern_hook(layer)
        if name not in host.model.hook_dict:
            raise UnsupportedHostError(
                f"this host has no {name}: attention of layer {layer} cannot be frozen; take attention='none'"
            )


def _pattern_hook(layer: int) -> str:
    return f"blocks.{layer}.attn.hook_pattern"


def _rows(tensor: Float[Tensor, "batch pos *width"]) -> Float[Tensor, "_row *width"]:
    return tensor.detach().flatten(0, 1).float()


# ---------------------------------------------------------------------------------------------- norms


def _norms(
    host: Host,
    stream: Float[Tensor, "row d_model"],
    readers: Mapping[tuple[int, str], Site],
    writers: Sequence[Site],
    shown: Recording,
    behind: Mapping[str, tuple[Tensor, Tensor]],
) -> tuple[dict[tuple[int, str], Reading], dict[str, HeldNorm], Float[Tensor, "row d_model"]]:
    """How every block reads the residual stream, the norms behind the sites that have one, and what leaves the last block."""
    writings: dict[str, HeldNorm] = {}
    written: dict[str, Tensor] = {}  # by every site, to the residual stream
    for site in writers:
        y = written[site.name] = _rows(shown.outputs[site.name])
        norm = host.norm_behind(site)
        if norm is None:
            continue
        given, made = map(_rows, behind[site.name])
        if not torch.allclose(given, y, rtol=_tolerance(host), atol=_tolerance(host) * float(y.abs().max())):
            raise UnsupportedHostError(
                "a unit graph needs blocks that add what they write to the residual stream; in this host a norm behind "
                f"{site.name} takes the stream itself"
            )
        writings[site.name], written[site.name] = _fitted(host, site, host.norm_affine(norm), {False: y}, made), made
    readings: dict[tuple[int, str], Reading] = {}
    x = stream
    for layer in range(max(site.layer for site in (*host.sites(), *host.alternatives())) + 1):
        middle = x + written.get(f"blocks.{layer}.attn_o", torch.zeros_like(x))
        # An MLP beside its attention (a parallel block) reads what enters the block.
        for which, residuals in (("attn", {False: x}), ("mlp", {True: middle, False: x})):
            reader = readers.get((layer, which))
            if reader is not None:
                affine = host.norm_before(reader) or Affine()
                readings[layer, which] = _fitted(host, reader, affine, residuals, _rows(shown.inputs[reader.name]))
        x = middle + written.get(f"blocks.{layer}.mlp_out", torch.zeros_like(x))
    return readings, writings, x


def _tolerance(host: Host) -> float:
    return 1e-3 if dtype_of(host) in ("float32", "float64") else 3e-2


def _fitted(host: Host, site: Site, affine: Affine, inputs: Mapping[bool, Tensor], h: Tensor) -> Reading:
    """The norm that makes h of one of its possible inputs: streams that the block's attention has written to or not."""
    layer_norm, errors = facts_of(host.model).norm == "layer", []
    # What the host's settings say is tried first: on centred residuals both norms fit.
    y = h if affine.shift is None else h - affine.shift.to(h.device)
    for centred in (layer_norm, not layer_norm):
        fits: dict[bool, tuple[Tensor, float]] = {}
        for attended, x in inputs.items():
            # 1 / scale of every position by least squares, and how far the formula then is from h.
            u = x - x.mean(-1, keepdim=True) if centred else x
            u = u if affine.scale is None else u * affine.scale.to(u.device)
            inverse = (y * u).sum(-1) / (u * u).sum(-1).clamp(min=1e-30)
            fits[attended] = inverse, float((y - inverse[:, None] * u).norm() / y.norm().clamp(min=1e-30))
        attended, (inverse, difference) = min(fits.items(), key=lambda fit: fit[1][1])
        if difference < _tolerance(host):
            return Reading(centred, None if affine.scale is None else affine.scale.cpu(), inverse.cpu(), attended)
        errors.append(difference)
    raise UnsupportedHostError(
        f"what {site.name} reads is no LayerNorm or RMSNorm of this host's residual stream (off by {min(errors):.1%}), so "
        "a unit graph cannot follow it; if hooks change it, remove them with model.reset_hooks()"
    )


def final_reading(host: Host, x: Float[Tensor, "pos d_model"]) -> HeldNorm:
    """The norm before the unembedding; its scale by the formula, with the host's own epsilon."""
    facts, weight = facts_of(host.model), host.readout()[0]
    return HeldNorm(facts.norm == "layer", None if weight is None else weight.cpu(), inverse_scale(facts, x))


# ---------------------------------------------------------------------------------------------- patterns


def _checked_pattern(host: Host, layer: int, shown: Recording) -> Float[Tensor, "head dest src"]:
    """A pattern, once it is known to be all that lies between the values and attn_o."""
    if _pattern_hook(layer) not in shown.hooks or f"blocks.{layer}.attn_v" not in shown.outputs:
        raise UnsupportedHostError(
            f"this host's forward never showed the attention pattern of layer {layer}; take attention='none'"
        )
    pattern, z = _rows(shown.hooks[_pattern_hook(layer)]), _rows(shown.inputs[f"blocks.{layer}.attn_o"])
    v = by_head(_rows(shown.outputs[f"blocks.{layer}.attn_v"]), pattern.shape[0], z.shape[-1])
    mixed = torch.einsum("hds,she->dhe", pattern, v).flatten(1)
    if float((mixed - z).norm()) > 1e-3 * float(z.norm()) and dtype_of(host) in ("float32", "float64"):
        raise UnsupportedHostError(
            f"in layer {layer} more than an attention pattern lies between the values and attn_o (a gate, a sink, or a "
            "hook), so frozen attention does not describe it; take attention='none'"
        )
    return pattern


def by_head(v: Float[Tensor, "*n _width"], n_heads: int, width: int) -> Float[Tensor, "*n head d_head"]:
    """Values by attention head, each stored head repeated for the query heads that share it."""
    heads = v.unflatten(-1, (-1, width // n_heads))
    return heads.repeat_interleave(n_heads // heads.shape[-2], dim=-2)
