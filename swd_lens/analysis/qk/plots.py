"""Figures of QK studies."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from swd_lens.analysis.qk.vectors import QKError
from swd_lens.base.figures import INK, heatmap, literal, new_figure, style
from swd_lens.base.panels import visible
from swd_lens.circuits.fidelity import Fidelity
from swd_lens.hosts.sites import split_name

_MOST_LABELS = 40  # token labels that fit an axis
_SITES = {"attn_qkv": "QKV", "attn_q": "Q", "attn_k": "K", "attn_v": "V", "attn_o": "output"}


def replay(made: Any) -> Figure:
    """2 x 3: dense, reconstructed, |difference|; before, after, |difference|."""
    size = _side(len(made.tokens))
    figure, axes = new_figure(2, 3, width=size, height=size * 0.9)
    rows = (
        (("dense", made.dense), ("reconstructed", made.reconstructed), made.dense_kl),
        (("before", made.reconstructed), (f"without {made.taken_out}", made.removed), made.removed_kl),
    )
    for of_row, (first, second, kl) in zip(axes, rows, strict=True):
        images = [
            _pattern(ax, made, *shown, "attention", 1.0) for ax, shown in zip(of_row, (first, second), strict=False)
        ]
        difference = (second[1] - first[1]).abs()
        title = f"|difference|: KL {kl:.3g} nats, largest {float(difference.max()):.3f}"
        _pattern(of_row[2], made, title, difference, "|change of attention|", None, bar=True)
        _bar(figure, images[1], of_row[1], "attention probability")
    for ax in axes[0]:
        ax.set_xticklabels([])
        ax.set_xlabel("")
    for ax in axes[:, 1:].flat:
        ax.set_yticklabels([])
        ax.set_ylabel("")
    figure.suptitle(f"{made.pair}", fontsize=10, color=INK)
    return figure


def contribution(made: Any) -> Figure:
    """The pair's part of every score."""
    size = _side(len(made.tokens)) * 1.25
    figure, axes = new_figure(width=size + 0.6, height=size * 0.95)
    values = made.contribution.masked_fill(~made.mask, float("nan"))
    title = f"{made.pair}: part of the score (mean {made.signed_mean:+.3g})"
    _pattern(axes[0, 0], made, title, values, "contribution to the score, before softmax", None, signed=True, bar=True)
    return figure


def _pattern(
    ax: Any,
    made: Any,
    title: str,
    values: Any,
    label: str,
    largest: float | None,
    *,
    signed: bool = False,
    bar: bool = False,
) -> Any:
    labels = [visible(token) for token in made.tokens]
    shown = values.masked_fill(~made.mask, float("nan"))
    image = heatmap(ax, shown, label=label, signed=signed, largest=largest, bar=bar)
    step = max(1, -(-len(labels) // _MOST_LABELS))
    places = range(0, len(labels), step)
    names = [literal(labels[i]) for i in places]
    font = 7 if len(names) <= 22 else 5.5
    ax.set_xticks(list(places), names, rotation=90, fontsize=font)
    ax.set_yticks(list(places), names, fontsize=font)
    ax.set_xlabel("source", fontsize=8)
    ax.set_ylabel("destination", fontsize=8)
    ax.set_title(literal(title), fontsize=8.5)
    return image


def _bar(figure: Figure, image: Any, ax: Any, label: str) -> None:
    bar = figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
    bar.set_label(label, fontsize=8, color=INK)
    bar.ax.tick_params(labelsize=7, colors=INK)
    bar.outline.set_visible(False)  # pyright: ignore[reportCallIssue]


def _side(n_tokens: int) -> float:
    """Inches of a square map: room for every label, up to a page."""
    return float(np.clip(0.16 * n_tokens + 1.0, 2.6, 5.0))


def scan(frame: Any, n_layers: int, n_heads: int, remove: str) -> Figure:
    """Each head's largest removed KL; every case's removed KL against how well its map foretold the change."""
    figure, axes = new_figure(1, 2, width=4.4, height=3.3)
    grid = np.full((n_layers, n_heads), np.nan)
    for (layer, head), of_head in frame.groupby(["layer", "head"]):
        grid[layer, head] = of_head["removed_kl"].max()
    heatmap(axes[0, 0], grid, label="largest removed KL (nats)", rows=_numbers(n_layers), columns=_numbers(n_heads))
    axes[0, 0].set_xlabel("head", fontsize=9)
    axes[0, 0].set_ylabel("layer", fontsize=9)
    axes[0, 0].set_title(
        f"What removing a {remove.upper() if remove != 'pair' else 'pair'}{'' if remove == 'pair' else ' unit'} does",
        fontsize=9,
    )
    ax, layers = axes[0, 1], sorted(frame["layer"].unique())
    for index, layer in enumerate(layers):
        there = frame[frame["layer"] == layer]
        marker = "osD^vPX*"[index % 8]
        colour = style(index)["color"]
        ax.scatter(
            there["agreement"],
            there["removed_kl"].clip(lower=1e-7),
            s=11,
            marker=marker,
            color=colour,
            alpha=0.6,
            linewidths=0,
            label=f"layer {layer}",
        )
    ax.set_yscale("log")
    ax.set_xlim(-1.05, 1.05)
    ax.set_xlabel("agreement of the change with the pair's map", fontsize=9)
    ax.set_ylabel("removed KL (nats)", fontsize=9)
    ax.set_title(f"{len(frame):,} cases of head, pair and prompt", fontsize=9)
    if 0 < len(layers) <= 16:
        ax.legend(fontsize=7, frameon=False, ncols=1 + len(layers) // 9, loc="lower left")
    return figure


def _numbers(n: int) -> list[str]:
    return [str(i) for i in range(n)]


def plot_attention_fidelity(fidelity: Fidelity) -> Figure:
    """Relative squared error of the attention matrices by layer (paper, Fig. attention-reconstruction-static-screen, top).

    Args:
        fidelity: of `swd_lens.fidelity` with factors of attn_qkv (or attn_q, attn_k, attn_v) and attn_o of some layers.

    Raises:
        QKError: none of its sites is an attention matrix.
    """
    kinds: dict[str, dict[int, float]] = {}
    for name, error in fidelity.relmse.items():
        layer, kind = split_name(name)
        if kind in _SITES:
            kinds.setdefault(kind, {})[layer] = float(error)
    if not kinds:
        raise QKError(
            f"this fidelity is of {', '.join(fidelity.relmse)}; factorize attn_qkv and attn_o to see how well attention is kept"
        )
    layers = sorted({layer for of_kind in kinds.values() for layer in of_kind})
    figure, axes = new_figure(width=1.6 + 0.34 * max(len(layers), 8), height=2.6)
    ax = axes[0, 0]
    for index, (kind, errors) in enumerate(kinds.items()):
        values = [100 * errors.get(layer, np.nan) for layer in layers]
        ax.plot(layers, values, marker="osD^v"[index], markersize=4, label=f"{_SITES[kind]} ({kind})", **style(index))
    ax.set_ylim(bottom=0)
    ax.set_xticks(layers)
    ax.set_xlabel("layer", fontsize=9)
    ax.set_ylabel("relative squared error (%)", fontsize=9)
    ax.set_title("Attention matrices: reconstruction error of their outputs", fontsize=9)
    ax.legend(fontsize=8, frameon=False)
    return figure
