"""The static QK screen: which Q and K units could make a head attend, from weights alone (paper, app. attention units).

For one head, with z_a of a destination and z_b of a source,

    score = sum over (a, b) of z_a * z_b * gamma_ab  (+ bias terms),     gamma_ab = <bQ_a, bK_b> * scale,

where bQ_a and bK_b are the head's slices of the write vectors. The screen

1. keeps, per head, the `top` units of largest write norm on either side,
2. computes gamma for every pair of them,
3. and sums a head up by its largest |gamma|.

gamma and write norms depend on how a unit is scaled: A S and S^-1 B are the same units for any diagonal S; where a write vector
is doubled and the read vector halved, gamma doubles and z halves. Factors of the solver have read and write vectors of equal
norms. With text (`tokens=`) the screen takes z in and depends on no scale: units by write norm x rms(z), pairs by
|gamma| x rms(z_a) x rms(z_b).

Where a pair acts on a prompt also depends on z: `qk_replay` and `qk_scan` look at that. `plot_attention_fidelity` draws the
figure that the paper has above its screen: how well the attention matrices are reconstructed, layer by layer.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.qk.scores import Side, layer_units, provenance, z_rms
from swd_lens.base.checks import bounded
from swd_lens.base.display import card
from swd_lens.base.errors import QKError
from swd_lens.base.figures import heatmap, new_figure, style
from swd_lens.base.record import Record, column
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts.attention import rotations
from swd_lens.hosts.sites import split_name
from swd_lens.tasks.streams import as_stream
from swd_lens.units import UnitSet

# Inches that the number of a layer takes.
TICK = 0.14

_MATRICES = {"attn_qkv": "QKV", "attn_q": "Q", "attn_k": "K", "attn_v": "V", "attn_o": "output"}


@dataclass(frozen=True)
class QKPair:
    """A Q unit and a K unit of one head.

    Attributes:
        q_unit, k_unit: indices among the units of the sites that write the layer's queries and keys (attn_qkv for both, or
            attn_q and attn_k).
        gamma: the static coefficient, score per unit of z_a * z_b; NaN where nobody computed it.
    """

    layer: int
    head: int
    q_unit: int
    k_unit: int
    gamma: float | int = float("nan")

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head} q{self.q_unit}×k{self.k_unit}"

    def _repr_html_(self) -> str:
        return card(f"QKPair {self}", {"gamma, score per unit of z·z": self.gamma})


@dataclass(frozen=True, repr=False)
class QKScreen(Record):
    """Static coefficients of every layer and head. They depend on the scale of units; `sizes` do not.

    Attributes:
        gamma: (layer, head, q, k) coefficients; NaN in layers without units on both sides, and beyond a layer's units.
        q_units, k_units: (layer, head, top) unit indices of the rows and columns of gamma, by falling write norm (with text:
            times rms(z)); -1 where none.
        settings: of what and how.
        q_rms, k_rms: (layer, head, top) rms of these units' z over the text's tokens; NaN where none. None without text.
    """

    gamma: Float[Tensor, "layer head top top"]
    q_units: Int[Tensor, "layer head top"]
    k_units: Int[Tensor, "layer head top"]
    settings: dict[str, Any]
    q_rms: Float[Tensor, "layer head top"] | None = None
    k_rms: Float[Tensor, "layer head top"] | None = None

    @property
    def sizes(self) -> Float[Tensor, "layer head top top"] | None:
        """|gamma| x rms(z_a) x rms(z_b), in units of the score, whatever the scale of units; None without text."""
        if self.q_rms is None or self.k_rms is None:
            return None
        return self.gamma.abs() * self.q_rms[..., :, None] * self.k_rms[..., None, :]

    @property
    def _rank(self) -> Float[Tensor, "layer head top top"]:
        """The size that pairs are ranked by."""
        return self.gamma.abs() if self.sizes is None else self.sizes

    @property
    def strongest(self) -> Float[Tensor, "layer head"]:
        """Largest |gamma| of each head, with text the largest of `sizes`; NaN without units."""
        size = self._rank.flatten(2)
        return size.nan_to_num(-1).amax(-1).where(~size.isnan().all(-1), torch.nan)

    def pairs(self, per_head: int = 5) -> list[QKPair]:
        """The `per_head` pairs of largest |gamma| of each head, all of them by falling |gamma|; zero coefficients are left out.

        With text `sizes` take the place of |gamma|.

        Raises:
            QKError: per_head is not positive.
        """
        bounded("per_head", per_head, 1, error=QKError)
        return [pair for pair, _ in self._ranked(per_head)]

    def _ranked(self, per_head: int) -> list[tuple[QKPair, float]]:
        """The pairs, and what they are ranked by."""
        pairs, width = [], self.gamma.shape[-1]
        for layer, of_layer in enumerate(self._rank):
            for head, rank in enumerate(of_layer):
                flat, gamma = rank.flatten().nan_to_num(0), self.gamma[layer, head].flatten()
                for entry in torch.sort(flat, descending=True, stable=True).indices[:per_head].tolist():
                    if flat[entry] != 0:
                        q, k = self.q_units[layer, head, entry // width], self.k_units[layer, head, entry % width]
                        pair = QKPair(layer, head, int(q), int(k), float(gamma[entry]))
                        pairs.append((pair, float(flat[entry])))
        return sorted(pairs, key=lambda ranked: -ranked[1])

    def table(self, per_head: int = 1) -> pd.DataFrame:
        """One row per pair of `pairs(per_head)`; with text its size, |gamma| x rms(z_a) x rms(z_b)."""
        columns, ranked = ("layer", "head", "q_unit", "k_unit", "gamma"), self._ranked(per_head)
        frame = pd.DataFrame([vars(pair) for pair, _ in ranked], columns=pd.Index(columns)).rename(columns=column)
        return frame if self.sizes is None else frame.assign(size=[size for _, size in ranked])

    def plot(self) -> Figure:
        """Heat map of each head's largest |gamma| (paper, Fig. attention-reconstruction-static-screen, bottom)."""
        n_layers, n_heads, top = self.gamma.shape[:3]
        figure, axes = new_figure(width=1.6 + 0.42 * max(n_heads, 6), height=1.1 + 0.3 * max(n_layers, 4))
        at = f", distance {self.settings['distance']}" if self.settings["rotary"] else ""
        title = f"Static QK screen: {top} × {top} units per head{at}"
        measure = "|γ|" if self.sizes is None else "|γ| × rms(z) × rms(z)"
        draw_heads(axes[0, 0], self.strongest, f"largest {measure} among the pairs kept", title)
        return figure

    def __repr__(self) -> str:
        n_layers, n_heads, top = self.gamma.shape[:3]
        known = int((~self.strongest.isnan()).sum())
        best = next(iter(self.pairs(1)), None)
        tail = "" if best is None else f", strongest {best} (gamma {best.gamma:.3g})"
        return f"QKScreen({n_layers} layers x {n_heads} heads, {known} with units, top {top} per side{tail})"

    def parts(self) -> tuple[Any, ...]:
        return self.plot(), self.table().head(10), f"Positions enter {self.settings['positions']}."


@with_torch_defaults
def qk_screen(
    model: Any, factors: Any, *, top: int = 16, distance: int = 0, tokens: Any = None, batch_size: int = 16
) -> QKScreen:
    """Static coefficients gamma between the Q and K units of every head (paper, app. attention units; method.md §4.3).

    How the position enters: learned positions are part of the residual stream, so z carries them and gamma is one number.
    Rotary positions turn query and key, so gamma depends on how far apart they stand: gamma(d) = <R(d) bQ_a, bK_b> * scale, here
    at d = `distance` (in models that rotate a part of each head, the rest does not depend on d). ALiBi adds a number to scores
    that no unit makes; gamma does not contain it. Where queries and keys are normed head by head (Qwen3), the norm's weight is
    in gamma and its scale, which depends on the prompt, is not. A cap on scores (Gemma 2) comes later: gamma is about scores
    before it. With grouped keys, head h reads key head h // group.

    The paper's ranking, the default, depends on how units are scaled: canonical factors have read and write vectors of equal
    norms, others rank otherwise though they are the same units. With `tokens` it does not.

    Args:
        model: the host; it is only read (a bridge with rotary positions runs `distance + 1` tokens once).
        factors: factors of attn_qkv, or of attn_q and attn_k, of some or all layers; see `swd_lens.attach`.
        top: units per side and head, those of largest write norm; with tokens, of largest write norm x rms(z).
        distance: destination minus source position, for rotary hosts.
        tokens: (rows, pos) ids or a `TokenStream` that z is measured on, units attached; None: the static screen of the paper.
        batch_size: rows per forward, of tokens.

    Raises:
        QKError: top or distance are out of range, or no layer has units on both sides.
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        UnsupportedHostError: see `swd_lens.hosts.attention.heads_of`; bidirectional hosts among others.
    """
    units = UnitSet.of(model, factors)
    bounded("top", top, 1, error=QKError)
    bounded("distance", distance, 0, int(model.cfg.n_ctx) - 1, error=QKError)  # two positions of one context
    with torch.no_grad():
        layers = layer_units(units)
        rms = None if tokens is None else z_rms(units, layers, as_stream(tokens, model), batch_size)
        angles = rotations(units.host, [of_layer.heads for of_layer in layers.values()], distance + 1)
        width = min(top, max(side.n_units for of_layer in layers.values() for side in (of_layer.q, of_layer.k)))
        n_heads = max(of_layer.heads.n_heads for of_layer in layers.values())
        shape = (len(model.blocks), n_heads, width)
        gamma = torch.full((*shape, width), torch.nan, dtype=torch.float32)
        q_units, k_units = torch.full(shape, -1), torch.full(shape, -1)
        q_rms, k_rms = (None if rms is None else torch.full(shape, torch.nan) for _ in range(2))
        for layer, of_layer in layers.items():
            # gamma (head, q, k) among the top units of each head; without rms they are ranked by write norm alone.
            heads, head = of_layer.heads, torch.arange(of_layer.heads.n_heads, device=of_layer.q.write.device)
            key_head = head // heads.group
            q, k = _top_units(of_layer.q, width, rms or {}), _top_units(of_layer.k, width, rms or {})[key_head]
            queries, keys = of_layer.q.folded[q, head[:, None]], of_layer.k.folded[k, key_head[:, None]]
            if (rotation := angles[layer]) is not None:
                queries, keys = rotation.at(distance, queries), rotation.at(0, keys)
            gamma[layer, : len(q), : q.shape[1], : k.shape[1]] = (queries @ keys.mT * heads.scale).cpu()
            q_units[layer, : len(q), : q.shape[1]] = q.cpu()
            k_units[layer, : len(k), : k.shape[1]] = k.cpu()
            if rms is not None and q_rms is not None and k_rms is not None:
                q_rms[layer, : len(q), : q.shape[1]] = rms[of_layer.q.site.name][q.cpu()]
                k_rms[layer, : len(k), : k.shape[1]] = rms[of_layer.k.site.name][k.cpu()]
    settings = {**provenance(units, layers), "top": top, "distance": distance}
    if tokens is not None:
        settings["tokens_sha256"] = as_stream(tokens, model).fingerprint()
    return QKScreen(gamma, q_units, k_units, settings, q_rms, k_rms)


def _top_units(side: Side, top: int, rms: Mapping[str, Tensor]) -> Int[Tensor, "head _top"]:
    """Unit indices of the largest head-specific write norm (times rms(z)), largest first; of equal ones the lower index first."""
    size = side.folded.norm(dim=-1).T
    size = size * rms[side.site.name].to(size) if rms else size
    return torch.sort(size, dim=1, descending=True, stable=True).indices[:, :top]


# ---------------------------------------------------------------------------------------------- figures


def draw_heads(ax: Any, values: Any, label: str, title: str) -> None:
    """A number of every head as a heat map, layers by heads."""
    n_layers, n_heads = values.shape
    high = ax.figure.get_figheight() * ax.get_position().height
    every = math.ceil(n_layers * TICK / high)  # of many layers in a low panel not all have room for their number
    layers = [str(i) if i % every == 0 else "" for i in range(n_layers)]
    heatmap(ax, values, label=label, rows=layers, columns=[str(i) for i in range(n_heads)])
    ax.set(xlabel="head", ylabel="layer")
    ax.set_title(title, fontsize=9)


@with_torch_defaults
def plot_attention_fidelity(fidelity: Fidelity) -> Figure:
    """Relative squared error of the attention matrices by layer (paper, Fig. attention-reconstruction-static-screen, top).

    Of `swd_lens.fidelity(..., local=True)` it is the local error, as in the paper's figure: on the dense model's inputs, without
    bias. Else it is the error in the replaced model, which has in it what upstream replacements do; the axis says which.

    Args:
        fidelity: of `swd_lens.fidelity` with factors of attn_qkv (or attn_q, attn_k, attn_v) and attn_o of some layers.

    Raises:
        QKError: none of its sites is an attention matrix.
    """
    kinds: dict[str, dict[int, float]] = {}
    for name, difference in (fidelity.local_relmse or fidelity.relmse).items():
        layer, kind = split_name(name)
        if kind in _MATRICES:
            kinds.setdefault(kind, {})[layer] = float(difference)
    if not kinds:
        raise QKError(
            f"this fidelity is of {', '.join(fidelity.relmse)}; factorize attn_qkv and attn_o to see how well attention is kept"
        )
    layers = sorted({layer for errors in kinds.values() for layer in errors})
    figure, axes = new_figure(width=1.6 + 0.34 * max(len(layers), 8), height=2.6)
    ax = axes[0, 0]
    for index, (kind, errors) in enumerate(kinds.items()):
        values = [100 * errors.get(layer, np.nan) for layer in layers]
        label = f"{_MATRICES[kind]} ({kind})"
        ax.plot(layers, values, marker="osD^v"[index], markersize=4, label=label, **style(index))
    ax.set_ylim(bottom=0)
    ax.set_xticks(layers)
    ax.set_xlabel("layer")
    where = "on dense inputs" if fidelity.local_relmse else "in the replaced model"
    ax.set_ylabel(f"relative squared error (%),\n{where}")
    ax.set_title("Attention matrices: reconstruction error of their outputs", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    return figure
