"""Replay a QK pair on a prompt, take one of its units out, and look at the head's pattern (paper, app. attention units).

1. Run the prompt dense and with all given factors attached; rebuild the head's scores from z (scores.py).
2. Check the reconstruction: KL of the rebuilt pattern from the dense one.
3. The pair's contribution map: z_a(dest) * z_b(src) * gamma(dest - src) wherever attention may look.
4. Take the unit out of its slice: a Q unit leaves the head's queries, its parts in keys and values stay; compare patterns.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.qk.scores import LayerScores, LayerUnits, attended_row, layer_units, provenance, run_layers, units_of_head
from swd_lens.analysis.qk.screen import QKPair
from swd_lens.base.checks import one_of
from swd_lens.base.errors import QKError, visible_token
from swd_lens.base.figures import INK, heatmap, literal, new_figure
from swd_lens.base.panels import Panel, attention_heads
from swd_lens.base.record import Record, column
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.prompt import Prompt, token_strings
from swd_lens.units import UnitSet

REMOVE = ("q", "k", "pair")
_ROUNDING = 1e-6  # changes of a probability up to this are float32 rounding: a correlation of them says nothing
_MOST_LABELS = 40  # token labels that fit an axis


@dataclass(frozen=True, kw_only=True)
class Removal(Record):
    """The change of a head's pattern on a prompt when a unit is taken out.

    Attributes:
        dense_kl: KL(dense || with units in its place), nats, mean over destinations.
        removed_kl: KL(with units || without the unit), nats, mean over destinations.
        max_change: largest |probability| that changed on removal.
        signed_mean: mean of the pair's contribution to the scores over the mask.
        agreement: correlation over the mask between the change of the pattern that this map alone foretells (its contributions
            leave the scores, all others stay) and the change that came. 1: the removal does what the map says. NaN: nothing
            changed. Not a first-order estimate: removals are large (the paper's moves a probability by 0.775).
        share: how much of the removed score is this pair's: both maps less their mean over each row's sources, which no pattern
            feels, then <own, removed> / <removed, removed>. Over all partners of the unit and the bias shares sum to one, if no
            norm stands in between.
    """

    dense_kl: float
    removed_kl: float
    max_change: float
    signed_mean: float
    agreement: float
    share: float


NUMBERS = tuple(field.name for field in fields(Removal))


@dataclass(frozen=True, kw_only=True, repr=False)
class QKReplay(Removal):
    """One pair on one prompt; the numbers are those of `Removal`.

    Attributes:
        pair: with the gamma of distance 0.
        remove: what was taken out: "q" (the Q unit from the head's queries), "k" (the K unit from its keys) or "pair" (this
            pair's contribution from the scores; no unit does that by itself).
        tokens, token_ids: of the prompt.
        contribution: (dest, src) the pair's part of every score, before a cap; 0 where attention does not look.
        mask: (dest, src) where it may look.
        dense, reconstructed, removed: (dest, src) patterns of the host, with units in its place, and without the unit.
        settings: of what and how.
    """

    pair: QKPair
    remove: str
    tokens: tuple[str, ...]
    token_ids: tuple[int, ...]
    contribution: Float[Tensor, "dest src"]
    mask: Bool[Tensor, "dest src"]
    dense: Float[Tensor, "dest src"]
    reconstructed: Float[Tensor, "dest src"]
    removed: Float[Tensor, "dest src"]
    settings: dict[str, Any]

    @property
    def taken_out(self) -> str:
        """In words."""
        q, k = f"q{self.pair.q_unit}", f"k{self.pair.k_unit}"
        return {"q": q, "k": k, "pair": f"{q}×{k}"}[self.remove]

    def table(self) -> pd.DataFrame:
        """One row of numbers."""
        pair = self.pair
        columns = {"layer": pair.layer, "head": pair.head, "q unit": pair.q_unit, "k unit": pair.k_unit}
        columns |= {"gamma": pair.gamma, "removed": self.taken_out}
        return pd.DataFrame([columns | {column(name): getattr(self, name) for name in NUMBERS}])

    def plot(self) -> Figure:
        """Dense, reconstructed, difference; before, after the removal, difference (paper, Fig. attention-replay-ablation)."""
        size = map_size(self.tokens)
        figure, axes = new_figure(2, 3, width=size, height=size * 0.9)
        rows = (
            (("dense", self.dense), ("reconstructed", self.reconstructed), self.dense_kl),
            (("before", self.reconstructed), (f"without {self.taken_out}", self.removed), self.removed_kl),
        )
        for (left, middle, right), (before, after, kl) in zip(axes, rows, strict=True):
            label = "attention probability"
            draw_map(left, self.tokens, self.mask, *before, label=label, largest=1.0)
            change = (after[1] - before[1]).abs()
            title = f"|difference|: KL {kl:.3g} nats, largest {float(change.max()):.3f}"
            draw_map(right, self.tokens, self.mask, title, change, label="|change of attention|", bar=True)
            draw_map(middle, self.tokens, self.mask, *after, label=label, largest=1.0, bar=True)
        for ax in axes[0]:
            ax.set_xticklabels([])
            ax.set_xlabel("")
        for ax in axes[:, 1:].flat:
            ax.set_yticklabels([])
            ax.set_ylabel("")
        figure.suptitle(f"{self.pair}", fontsize=10, color=INK)
        return figure

    def plot_contribution(self) -> Figure:
        """The pair's contribution to every score (paper, Fig. qk-pair-contribution)."""
        size = map_size(self.tokens) * 1.25
        figure, axes = new_figure(width=size + 0.6, height=size * 0.95)
        title = f"{self.pair}: part of the score (mean {self.signed_mean:+.3g})"
        label = "contribution to the score, before softmax"
        draw_map(axes[0, 0], self.tokens, self.mask, title, self.contribution, label=label, signed=True, bar=True)
        return figure

    def panel(self) -> Panel:
        """CircuitsVis' attention heads: the dense pattern, and those before and after the removal."""
        maps = torch.stack([self.dense, self.reconstructed, self.removed])
        names = ["dense", "before", f"without {self.taken_out}"]
        return attention_heads(self.tokens, maps, names=names, title=f"{self.pair}", largest=1.0)

    def panel_contribution(self) -> Panel:
        """CircuitsVis' attention head: the pair's contribution to every score."""
        title = f"{self.pair}: part of the score"
        return attention_heads(self.tokens, self.contribution[None], names=["contribution"], title=title, signed=True)

    def __repr__(self) -> str:
        return (
            f"QKReplay({self.pair} on {len(self.tokens)} tokens, without {self.taken_out}: dense KL {self.dense_kl:.3g}, "
            f"removed KL {self.removed_kl:.3g}, max change {self.max_change:.3f}, agreement {self.agreement:.3f}, "
            f"share {self.share:.2f})"
        )

    def title(self) -> str:
        return f"{self.pair}: without {self.taken_out}"

    def parts(self) -> tuple[Any, ...]:
        words = f"KL in nats, mean over destinations. Positions enter {self.settings['positions']}."
        if self.settings["soft_cap"]:
            words += " The map is about scores before the cap."
        return self.plot(), self.plot_contribution(), self.table(), f"{words} panel() shows the maps to hover over."


@with_torch_defaults
def qk_replay(model: Any, factors: Any, pair: QKPair, prompt: Any, *, remove: str = "q") -> QKReplay:
    """Run a prompt, map a pair's contributions, take a unit out of its slice, and compare the head's patterns
    (paper, app. attention units).

    Taking the Q unit out removes z_a * bQ_a from this head's queries alone: all pairs (a, b) of it leave, its key and value parts
    stay, and so do other heads. Taking the K unit out does the same to the key head (grouped keys serve several heads; this one's
    pattern is compared). Where queries and keys are normed, the norm acts on what is left, while the map has the norm's scale of
    the intact run; with a cap (Gemma 2), maps are of scores before it, patterns of what comes after.

    Args:
        model: the host, with these sites not attached; left as it was, whatever happens.
        factors: attached all together; `dense_kl` is that of the whole replacement.
        pair: of `QKScreen.pairs()`, a scan, or made by hand: QKPair(layer, head, q_unit, k_unit).
        prompt: text, or a row of token ids; at least two tokens.
        remove: "q", "k" or "pair".

    Raises:
        QKError: a layer without units, a head or unit that is not there, a prompt of one token, an unknown `remove`.
        TokenError: the prompt is longer than the context, or has ids outside the vocabulary.
        UnsupportedHostError: see `swd_lens.hosts.attention.heads_of`, or scores that are not what queries and keys give.
        AttachError: see `swd_lens.attach`.
    """
    units = UnitSet.of(model, factors)
    one_of("remove", remove, REMOVE, QKError)
    row = attended_row(model, Prompt.of(model, prompt, "qk"))
    layers = layer_units(units)
    pair = with_gamma(layers, pair)
    layers = {pair.layer: layers[pair.layer]}
    run = run_layers(units, layers, row[None])[pair.layer]
    with torch.no_grad():
        maps, numbers = removals(run, [pair], remove)
    of_pair: dict[str, Any] = {name: values[0, 0].cpu() for name, values in maps.items()}
    of_pair |= {name: float(values[0, 0]) for name, values in numbers.items()}
    return QKReplay(
        pair=pair,
        remove=remove,
        tokens=token_strings(model, row.tolist()),
        token_ids=tuple(row.tolist()),
        mask=run.mask.cpu(),
        settings={**provenance(units, layers), "remove": remove},
        **of_pair,
    )


def with_gamma(layers: Mapping[int, LayerUnits], pair: QKPair) -> QKPair:
    """The pair with its coefficient at distance 0, where angles of queries and keys cancel. Raises QKError: its layer, its
    head or one of its units is not there."""
    units = units_of_head(layers, pair.layer, pair.head)
    for name, index, side in (("q_unit", pair.q_unit, units.q), ("k_unit", pair.k_unit, units.k)):
        if not 0 <= index < side.n_units:
            raise QKError(f"{pair}: {name} is {index}, but {side.site.name} has units 0 to {side.n_units - 1}")
    a, b = units.q.folded[pair.q_unit, pair.head], units.k.folded[pair.k_unit, units.heads.key_head(pair.head)]
    return QKPair(pair.layer, pair.head, pair.q_unit, pair.k_unit, float(a @ b * units.heads.scale))


# ---------------------------------------------------------------------------------------------- removals


def removals(
    run: LayerScores, pairs: Sequence[QKPair], remove: str
) -> tuple[dict[str, Float[Tensor, "batch case pos pos"]], dict[str, Float[Tensor, "batch case"]]]:
    """Take a unit out in every case of one layer, on every prompt, and compare patterns. Returns: The maps of `QKReplay` and
    the numbers of `Removal`, by name."""
    device, mask = run.mask.device, run.mask
    head, q_unit, k_unit = (
        torch.tensor([getattr(pair, name) for pair in pairs], device=device) for name in ("head", "q_unit", "k_unit")
    )
    contribution = run.contribution(head, q_unit, k_unit)
    intact = run.scores[:, head]
    if remove == "pair":
        without = intact - contribution
    else:
        # The heads' scores, before cap and mask, with a unit taken out of queries or keys; norms see what is left.
        unit = q_unit if remove == "q" else k_unit
        key_head = head // run.heads.group
        side, side_head = (run.q, head) if remove == "q" else (run.k, key_head)
        written = side.z[..., unit].mT[..., None] * side.side.write[unit, side_head][:, None]
        rest = side.ready(side.raw[:, side_head] - written)
        q, k = (rest, run.k.vectors[:, key_head]) if remove == "q" else (run.q.vectors[:, head], rest)
        scores = q @ k.mT * run.heads.scale
        without = scores if run.position_bias is None else scores + run.position_bias[head]
    log_before, log_after = run.log_intact[:, head], run.log_pattern(without)
    before, after, dense = log_before.exp() * mask, log_after.exp() * mask, run.dense[:, head]
    log_dense = dense.clamp(min=torch.finfo(torch.float32).tiny).log()
    # The change that the map alone foretells: its contributions leave, all other pairs stay.
    foretold = run.log_pattern(intact - contribution).exp() * mask - before
    change = after - before
    told = torch.minimum(foretold.abs().amax((-2, -1)), change.abs().amax((-2, -1))) > _ROUNDING
    removed, own = _row_centred(intact - without, mask), _row_centred(contribution, mask)
    maps = {"contribution": contribution, "dense": dense, "reconstructed": before, "removed": after}
    return maps, {
        "dense_kl": (dense * (log_dense - log_before)).sum(-1).mean(-1),
        "removed_kl": (before * (log_before - log_after)).sum(-1).mean(-1),
        "max_change": change.abs().amax((-2, -1)),
        "signed_mean": contribution.sum((-2, -1)) / mask.sum(),
        # Rows of changes sum to zero, so the cosine is the correlation.
        "agreement": _ratio(_dot(foretold, change), (_dot(foretold, foretold) * _dot(change, change)).sqrt()).where(
            told, torch.nan
        ),
        "share": _ratio(_dot(own, removed), _dot(removed, removed)),
    }


def _dot(x: Tensor, y: Tensor) -> Tensor:
    return (x.double() * y.double()).sum((-2, -1))


def _row_centred(x: Tensor, mask: Tensor) -> Tensor:
    """Less its mean over the sources that each destination sees: a constant in a row changes no pattern."""
    x = x * mask
    return (x - x.sum(-1, keepdim=True) / mask.sum(-1, keepdim=True)) * mask


def _ratio(over: Tensor, under: Tensor) -> Tensor:
    """over / under, NaN where there is nothing to divide by."""
    return torch.where(under > 0, over / under, torch.nan).float()


# ---------------------------------------------------------------------------------------------- figures


def draw_map(
    ax: Any,
    tokens: Sequence[str],
    mask: Bool[Tensor, "dest src"],
    title: str,
    values: Float[Tensor, "dest src"],
    *,
    label: str,
    largest: float | None = None,
    signed: bool = False,
    bar: bool = False,
) -> None:
    """A head's map on a prompt, with the tokens at both axes; grey where attention does not look."""
    heatmap(ax, values.masked_fill(~mask, float("nan")), label=label, signed=signed, largest=largest, bar=bar)
    positions = range(0, len(tokens), max(1, -(-len(tokens) // _MOST_LABELS)))
    names = [literal(visible_token(tokens[i])) for i in positions]
    size = 7 if len(names) <= 22 else 5.5
    ax.set_xticks(list(positions), names, rotation=90, fontsize=size)
    ax.set_yticks(list(positions), names, fontsize=size)
    ax.set(xlabel="source", ylabel="destination")
    ax.set_title(literal(title), fontsize=8.5)


def map_size(tokens: Sequence[str]) -> float:
    """Inches of a square map: room for every label, up to a page."""
    return float(np.clip(0.16 * len(tokens) + 1.0, 2.6, 5.0))
