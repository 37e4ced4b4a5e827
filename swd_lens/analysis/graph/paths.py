"""Paths: the counterpart of the paper's figure of high-attribution paths (greater-than case study).

1. Per displayed layer, the units of one kind of site that rank highest for the task.
2. Each is drawn as it computes: the site's input h is read, z_i = h . A[:, i], and z_i B[i] is written to the residual stream,
   where the writes of all units add up. An arrow stands for all read or write edges of the unit; their number is beside it.
3. Units with a label (a semantic hypothesis of the user's) are filled.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.patches import Circle, FancyArrowPatch, FancyBboxPatch

from swd_lens.base.checks import bounded
from swd_lens.base.errors import quoted
from swd_lens.base.figures import INK, INK_ON_FILL, literal, new_figure
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits import UnitScores
from swd_lens.hosts.sites import WRITES_RESIDUAL, split_name
from swd_lens.units import UnitSet
from swd_lens.units.factors import Factors

_Point = tuple[float | int, float | int]
_MOST_LAYERS = 3  # shown by default, as many as the paper's figure has
_LABELLED = "#fdebd3"
_INPUT_X, _UNIT_X, _STREAM_X = 0.6, 3.1, 6.55
_UNIT_WIDTH, _UNIT_HEIGHT, _UNIT_STEP = 2.5, 0.58, 0.78
_LONGEST = 24
_CENTRED = {"ha": "center", "va": "center"}


@with_torch_defaults
def plot_unit_paths(
    model: Any,
    factors: Any,
    scores: UnitScores,
    *,
    kind: str = "mlp_out",
    layers: Sequence[int] | None = None,
    per_layer: int = 2,
    labels: Mapping[str, str] | None = None,
) -> Figure:
    """Draw the best units of some layers and what they read and write, as the paper draws its greater-than case study.

    Args:
        factors: what the scores are of; see `swd_lens.attach`.
        scores: of `swd_lens.attribute`; ranks are among all units that were scored (1 is the best).
        kind: which sites are shown; they must write to the residual stream (mlp_out, attn_o).
        layers: which ones. None: the three whose best unit ranks highest.
        per_layer: units per layer.
        labels: unit name ("blocks.2.mlp_out/17") -> semantic label.

    Raises:
        ValueError: scores of other factors, no such layer, a kind that does not write to the residual stream, a label of a unit
            that is not there.
        TypeError: units of a coder, which have no read and write edges.
    """
    if kind not in WRITES_RESIDUAL:
        raise ValueError(f"kind={quoted(kind)}: these units do not write to the residual stream; take one of {WRITES_RESIDUAL}")
    bounded("per_layer", per_layer, 1)
    units = UnitSet.of(model, factors)
    units.require_made_for(scores.settings, "this ranking")
    sites = {split_name(site)[0]: site for site in scores.scores if split_name(site)[1] == kind}
    if not sites:
        raise ValueError(f"none of these scores is of a site {kind}; there are {', '.join(scores.scores)}")
    for name in labels or {}:
        site, _, index = name.rpartition("/")
        if site not in scores.scores or not index.isdigit() or int(index) >= len(scores.scores[site]):
            has = ", ".join(f"{site} (0 to {len(of_site) - 1})" for site, of_site in scores.scores.items())
            raise ValueError(f"label of {quoted(name)}: there is no such unit among the scored ones: {has}")
    ranks = scores.ranks()
    if layers is None:
        layers = sorted(sites, key=lambda layer: int(ranks[sites[layer]].min()))[:_MOST_LAYERS]
    if unknown := [layer for layer in layers if layer not in sites]:
        raise ValueError(f"no units of {kind} in layer {unknown[0]}; scored are layers {', '.join(map(str, sorted(sites)))}")
    if not layers:
        raise ValueError("layers is empty: name at least one")

    band = per_layer * _UNIT_STEP + 0.42
    height = band * len(layers) + 0.95
    figure, axes = new_figure(width=7.4, height=height + 1.0)
    ax = axes[0, 0]
    ax.set_axis_off()
    ax.set_aspect("equal")
    ax.set_xlim(0, 7.4)
    ax.set_ylim(-0.95, height - 0.4)
    ax.plot([_STREAM_X, _STREAM_X], [-0.35, height - 0.55], color=INK, linewidth=3.2, solid_capstyle="round", zorder=1)
    _arrow(ax, (_STREAM_X, height - 0.8), (_STREAM_X, height - 0.42), INK, 3.2, head=16)
    ax.text(_STREAM_X + 0.16, -0.3, "residual\nstream", fontsize=8, color=INK, va="bottom")
    words = (
        "An arrow into a unit stands for all its read edges, one out of it for its write edges; + adds the writes.\n"
        "Filled: units with a label."
    )
    ax.text(0.17, -0.62, words, fontsize=7, color=INK, va="top")
    for row, layer in enumerate(sorted(layers)):
        site = sites[layer]
        best = ranks[site].argsort()[:per_layer].tolist()
        under = {
            unit: f"rank {int(ranks[site][unit])} of {scores.n_units} · score {float(scores.scores[site][unit]):.3g}"
            for unit in best
        }
        _draw_layer(ax, site, units[site], under, labels or {}, row * band + band / 2)
    task = scores.settings.get("task")
    title = f"Highest-ranked {kind} units" + (f" of {task}" if task else "")
    ax.set_title(literal(title), fontsize=10, color=INK, loc="left")
    return figure


def _draw_layer(ax: Any, site: str, factors: Any, units: Mapping[int, str], labels: Mapping[str, str], middle: float) -> None:
    """One layer's input, the units with a line below each, and the sum of what they write, around a height."""
    if not isinstance(factors, Factors):
        raise TypeError(f"the units of {site} are a {type(factors).__name__}, which has no read and write edges to draw")
    layer, _ = split_name(site)
    reads, writes = (factors.read != 0).sum(0), (factors.write != 0).sum(1)
    _box(ax, (_INPUT_X, middle), 0.86, 0.62, "#eef4fa")
    ax.text(_INPUT_X, middle, f"$h_{{{layer}}}$", fontsize=12, color=INK_ON_FILL, zorder=5, **_CENTRED)
    inputs = f"layer {layer}\n{factors.d_in} inputs"
    ax.text(_INPUT_X, middle - 0.42, inputs, fontsize=7, ha="center", va="top", color=INK)
    ax.add_patch(Circle((_STREAM_X, middle), 0.17, facecolor="white", edgecolor=INK, linewidth=1.3, zorder=4))
    ax.text(_STREAM_X, middle, "+", fontsize=12, color=INK_ON_FILL, zorder=5, **_CENTRED)
    left, right = _UNIT_X - _UNIT_WIDTH / 2, _UNIT_X + _UNIT_WIDTH / 2
    for i, (unit, under) in enumerate(units.items()):
        y = middle + _UNIT_STEP * ((len(units) - 1) / 2 - i)
        above = y >= middle
        label = labels.get(f"{site}/{unit}", "")
        shown = literal(label if len(label) <= _LONGEST else label[: _LONGEST - 1] + "…")
        _arrow(ax, (_INPUT_X + 0.45, middle), (left, y), INK, 1.6)
        _arrow(ax, (right, y), (_STREAM_X - 0.19, middle), INK, 1.6)
        _box(ax, (_UNIT_X, y), _UNIT_WIDTH, _UNIT_HEIGHT, _LABELLED if label else "white")
        name, weight = f"$z_{{{unit}}}$" + (f"  {shown}" if label else ""), "bold" if label else "normal"
        ax.text(_UNIT_X, y + 0.11, name, fontsize=9, color=INK_ON_FILL, zorder=5, fontweight=weight, **_CENTRED)
        ax.text(_UNIT_X, y - 0.15, under, fontsize=6.5, color=INK_ON_FILL, zorder=5, **_CENTRED)
        written = f"writes {int(writes[unit])} of {factors.d_out}"
        ax.text(right + 0.14, y + (0.13 if above else -0.15), written, fontsize=7, color=INK, va="center")
        read = f"reads {int(reads[unit])}"
        ax.text(left - 0.1, y + (0.2 if above else -0.2), read, fontsize=7, color=INK, va="center", ha="right")


def _box(ax: Any, middle: _Point, width: float, height: float, fill: str) -> None:
    corner, style = (middle[0] - width / 2, middle[1] - height / 2), "round,pad=0,rounding_size=0.1"
    box = FancyBboxPatch(corner, width, height, boxstyle=style, facecolor=fill, edgecolor=INK, linewidth=1.0, zorder=3)
    ax.add_patch(box)


def _arrow(ax: Any, start: _Point, end: _Point, colour: str, width: float, head: int = 10) -> None:
    looks: dict[str, Any] = {"arrowstyle": "-|>", "mutation_scale": head, "shrinkA": 0, "shrinkB": 0}
    ax.add_patch(FancyArrowPatch(start, end, color=colour, linewidth=width, zorder=2, **looks))
