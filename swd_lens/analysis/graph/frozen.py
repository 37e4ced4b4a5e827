"""frozen: one run of a prompt, with all that a unit graph holds fixed in it.

1. `read_norms` runs the host and finds how each block reads the residual stream, h = (x - mean x) * weight / scale + shift or
   the same without the mean, and whether its MLP reads what the attention wrote. The scale of every position is taken off the
   run, and that this formula gives the h the host computed is checked.
2. `freeze` also keeps z of the attached units, the attention patterns, and the slopes of the MLPs' activation function.
   Slopes are gradients at this run, by autograd; patterns are checked to give attn_o's input from the values.

Everything here is float32 and without gradient once it is returned. Rows are positions of the one prompt (or, where only
norms are looked at, of all prompts one after the other).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.hosts import Affine, Host, Start, UnsupportedHostError, norms_output
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.recording import require_seen
from swd_lens.hosts.sites import READS_ATTENTION_INPUT, RESIDUAL_MATRICES, Site
from swd_lens.units.match import dtype_of

PRE_ACTIVATION = ("mlp_gate", "mlp_in")


@dataclass(frozen=True)
class Reading:
    """How a residual x becomes a site's input: h = (x - mean(x), if centred) * weight * inverse + shift.

    Attributes:
        centred: whether the mean over d_model is taken out (LayerNorm does, RMSNorm does not).
        weight: (d_model,) or None where there is none (or it is folded).
        inverse: (pos,) 1 / scale of the run's positions.
    """

    centred: bool
    weight: Float[Tensor, " d_model"] | None
    inverse: Float[Tensor, " _pos"]

    def pull(self, vectors: Float[Tensor, "*n d_model"]) -> Float[Tensor, "*n d_model"]:
        """Vectors that are multiplied with h, as vectors that are multiplied with x; without the scale."""
        if self.weight is not None:
            vectors = vectors * self.weight.to(vectors.device)
        return vectors - vectors.mean(-1, keepdim=True) if self.centred else vectors


@dataclass(frozen=True)
class Frozen:
    """One run. Layers index lists; sites are named."""

    embedded: Float[Tensor, "_pos d_model"]
    leaving: Float[Tensor, "_pos d_model"]
    attn: list[Reading | None]
    mlp: list[Reading | None]
    mlp_reads_attn: list[bool]
    logits: Float[Tensor, " vocab"]
    z: Mapping[str, Float[Tensor, "_pos _unit"]] = field(default_factory=dict)
    patterns: Mapping[int, Float[Tensor, "head _dest _src"]] = field(default_factory=dict)
    slopes: Mapping[str, Float[Tensor, "_pos d_mlp"]] = field(default_factory=dict)


def read_norms(host: Host, batches: Iterable[Int[Tensor, "rows pos"]], *, average: bool) -> Frozen:
    """The host's norms, as readings of one position: with the average of 1/scale over all tokens, or with scale 1.

    Memory does not grow with the number of batches.
    """
    first: Frozen | None = None
    totals: dict[tuple[str, int], float] = {}
    count = 0
    for tokens in batches:
        run = freeze(host, tokens)
        first = first or run
        count += tokens.numel()
        for part, readings in (("attn", run.attn), ("mlp", run.mlp)):
            for layer, reading in enumerate(readings):
                if reading is not None:
                    totals[part, layer] = totals.get((part, layer), 0.0) + float(reading.inverse.double().sum())
    assert first is not None

    def one(part: str, readings: list[Reading | None]) -> list[Reading | None]:
        mean = [totals.get((part, layer), 0.0) / count if average else 1.0 for layer in range(len(readings))]
        return [
            None if r is None else replace(r, inverse=torch.tensor([m])) for r, m in zip(readings, mean, strict=True)
        ]

    return replace(first, attn=one("attn", first.attn), mlp=one("mlp", first.mlp))


def freeze(
    host: Host,
    tokens: Int[Tensor, "_rows pos"],
    *,
    units: Sequence[Site] = (),
    patterns: Sequence[int] = (),
    slopes: Sequence[int] = (),
) -> Frozen:
    """Run one prompt (several where only norms are looked at).

    Args:
        units: attached sites whose z is kept.
        patterns: layers whose attention pattern is kept.
        slopes: layers whose activation function's slopes are kept.

    Raises:
        UnsupportedHostError: the host reads its residual stream in another way (norms behind the matrices, linear
            attention), shows no pattern, or its activation function mixes neurons.
    """
    _refuse(host, slopes)
    everywhere = [*host.sites(), *host.alternatives()]
    layers = range(max(site.layer for site in everywhere) + 1)
    readers = {(site.layer, norm): site for site in reversed(host.sites()) if (norm := _reader(site))}
    writers = [site for site in host.sites() if site.kind in RESIDUAL_MATRICES]
    pre = [site for site in host.sites() if site.kind in PRE_ACTIVATION and site.layer in slopes]
    values = [site for site in everywhere if site.kind == "attn_v" and site.layer in patterns]
    seen: dict[str, dict[str, Tensor]] = {"in": {}, "out": {}, "z": {}, "pattern": {}}
    with torch.no_grad():
        embedded = host.residual(tokens, 0).detach().clone()
    with torch.set_grad_enabled(bool(slopes)), ExitStack() as stack:
        stack.enter_context(_watching(host, [*readers.values(), *writers], [*writers, *pre, *values], seen))
        stack.enter_context(_hooked(host, units, patterns, seen))
        # A start with a gradient: slopes are found also in a host whose weights are frozen.
        start = Start(0, embedded.clone().requires_grad_(bool(slopes)))
        logits = host.last_logits(tokens, start=start)
    require_seen([*readers.values(), *writers], seen["in"], "input")
    require_seen(writers, seen["out"], "output")
    require_seen(units, seen["z"], "units")
    found = _slopes(seen, pre)
    rows = {part: {n: t.detach().flatten(0, 1).float() for n, t in those.items()} for part, those in seen.items()}
    stream = embedded.flatten(0, 1).float()
    attn, mlp, mlp_reads_attn, x = _readings(host, stream, layers, readers, writers, rows)
    kept = {layer: _checked(host, layer, values, rows) for layer in patterns}
    return Frozen(stream, x, attn, mlp, mlp_reads_attn, logits[-1].detach().float(), rows["z"], kept, found)


def _reader(site: Site) -> str | None:
    """Which of a block's two norms the site reads."""
    if site.kind in READS_ATTENTION_INPUT:
        return "attn"
    return "mlp" if site.kind in PRE_ACTIVATION else None


def _refuse(host: Host, slopes: Sequence[int]) -> None:
    for site in host.sites():
        if site.kind in RESIDUAL_MATRICES and norms_output(host, site):
            raise UnsupportedHostError(
                f"a unit graph needs blocks whose matrices write straight to the residual stream; in this host a norm stands "
                f"behind {site.name}"
            )
        if _reader(site) and host.affine(site) is None:
            raise UnsupportedHostError(
                f"a unit graph needs to know what {site.name} reads; this host's adapter does not say how its norm is applied "
                "(linear attention, or norms that follow the matrices)"
            )
    facts = facts_of(host.model)
    if slopes and facts.mixes_neurons:
        raise UnsupportedHostError(
            f"the activation function {facts.activation} mixes neurons, so it has no slope per neuron; take units of "
            "attention, or a graph without a prompt"
        )


@contextmanager
def _watching(
    host: Host, inputs: Sequence[Site], outputs: Sequence[Site], seen: dict[str, dict[str, Tensor]]
) -> Iterator[None]:
    def keep(part: str) -> Any:
        return lambda site, tensor: seen[part].update({site.name: tensor})

    with host.inputs(inputs, keep("in")), host.outputs(outputs, keep("out")):
        yield


def _hooked(host: Host, units: Sequence[Site], patterns: Sequence[int], seen: dict[str, dict[str, Tensor]]) -> Any:
    def keep(part: str, name: str) -> Any:
        return lambda tensor, hook: seen[part].update({name: tensor})

    hooks = [(site.hook_name, keep("z", site.name)) for site in units]
    for layer in patterns:
        name = f"blocks.{layer}.attn.hook_pattern"
        if name not in host.model.hook_dict:
            raise UnsupportedHostError(
                f"this host has no {name}: attention of layer {layer} cannot be frozen; take attention='none'"
            )
        hooks.append((name, keep("pattern", str(layer))))
    return host.model.hooks(fwd_hooks=hooks)


def _slopes(seen: dict[str, dict[str, Tensor]], pre: Sequence[Site]) -> dict[str, Tensor]:
    """d post / d pre, neuron by neuron: the activation function sees each by itself, so a sum's gradient shows all slopes."""
    found: dict[str, Tensor] = {}
    for site in pre:
        post = seen["in"][f"blocks.{site.layer}.mlp_out"]
        with torch.enable_grad():
            slope = torch.autograd.grad(post.sum(), seen["out"][site.name], retain_graph=True)[0]
        found[site.name] = slope.detach().flatten(0, 1).float()
    return found


# ---------------------------------------------------------------------------------------------- norms


def _readings(
    host: Host,
    x: Tensor,
    layers: range,
    readers: Mapping[tuple[int, str], Site],
    writers: Sequence[Site],
    rows: dict[str, dict[str, Tensor]],
) -> tuple[list[Reading | None], list[Reading | None], list[bool], Tensor]:
    attn: list[Reading | None] = []
    mlp: list[Reading | None] = []
    reads_attn: list[bool] = []
    for layer in layers:
        wrote = {site.kind: rows["out"][site.name] for site in writers if site.layer == layer}
        middle = x + wrote.get("attn_o", torch.zeros_like(x))
        site = readers.get((layer, "attn"))
        attn.append(None if site is None else _fitted(host, site, {True: x}, rows["in"])[1])
        site = readers.get((layer, "mlp"))
        behind, reading = (True, None) if site is None else _fitted(host, site, {True: middle, False: x}, rows["in"])
        mlp.append(reading)
        reads_attn.append(behind)
        x = middle + wrote.get("mlp_out", torch.zeros_like(x))
    return attn, mlp, reads_attn, x


def _fitted(host: Host, site: Site, inputs: Mapping[bool, Tensor], seen: Mapping[str, Tensor]) -> tuple[bool, Reading]:
    """The reading that explains h, and which of the inputs it reads."""
    affine, h = host.affine(site) or Affine(), seen[site.name]
    centres = facts_of(host.model).norm == "layer"
    tolerance = 1e-3 if dtype_of(host) in ("float32", "float64") else 3e-2
    errors = []
    # What the host's settings say is tried first: on centred residuals both norms fit.
    for centred in (centres, not centres):
        fits = {behind: _fit(x, h, affine, centred) for behind, x in inputs.items()}
        behind = min(fits, key=lambda behind: fits[behind][1])
        reading, error = fits[behind]
        if error < tolerance:
            return behind, reading
        errors.append(error)
    raise UnsupportedHostError(
        f"what {site.name} reads is no LayerNorm or RMSNorm of this host's residual stream (off by {min(errors):.1%}), so a "
        "unit graph cannot follow it; if hooks change it, remove them with model.reset_hooks()"
    )


def _fit(x: Tensor, h: Tensor, affine: Affine, centred: bool) -> tuple[Reading, float]:
    u = x - x.mean(-1, keepdim=True) if centred else x
    u = u if affine.scale is None else u * affine.scale.to(u.device)
    y = h if affine.shift is None else h - affine.shift.to(h.device)
    inverse = (y * u).sum(-1) / (u * u).sum(-1).clamp(min=1e-30)
    error = float((y - inverse[:, None] * u).norm() / y.norm().clamp(min=1e-30))
    return Reading(centred, affine.scale, inverse), error


def final_reading(host: Host, x: Float[Tensor, "_pos d_model"]) -> Reading:
    """The norm before the unembedding; its scale by the formula, with the host's own epsilon."""
    weight, _ = host.readout()
    facts = facts_of(host.model)
    if facts.norm is None:
        return Reading(False, None, torch.ones(len(x), device=x.device))
    centred = facts.norm == "layer"
    u = x - x.mean(-1, keepdim=True) if centred else x
    return Reading(centred, weight, (u.square().mean(-1) + facts.eps).rsqrt())


# ---------------------------------------------------------------------------------------------- patterns


def _checked(host: Host, layer: int, values: Sequence[Site], rows: dict[str, dict[str, Tensor]]) -> Tensor:
    """A pattern (head, dest, src), once it is known to be all that lies between the values and attn_o."""
    pattern, z = rows["pattern"].get(str(layer)), rows["in"][f"blocks.{layer}.attn_o"]
    site = next((site for site in values if site.layer == layer), None)
    if pattern is None or site is None or site.name not in rows["out"]:
        raise UnsupportedHostError(
            f"this host's forward never showed the attention pattern of layer {layer}; take attention='none'"
        )
    v = by_head(rows["out"][site.name], pattern.shape[0], z.shape[-1])
    mixed = torch.einsum("hds,she->dhe", pattern, v).flatten(1)
    if float((mixed - z).norm()) > 1e-3 * float(z.norm()) and dtype_of(host) in ("float32", "float64"):
        raise UnsupportedHostError(
            f"in layer {layer} more than an attention pattern lies between the values and attn_o (a gate, a sink, or a "
            "hook), so frozen attention does not describe it; take attention='none'"
        )
    return pattern


def by_head(v: Float[Tensor, "n _width"], n_heads: int, width: int) -> Float[Tensor, "n head d_head"]:
    """Values by attention head, each stored head repeated for the query heads that share it."""
    heads = v.unflatten(-1, (-1, width // n_heads))
    return heads.repeat_interleave(n_heads // heads.shape[-2], dim=-2)
