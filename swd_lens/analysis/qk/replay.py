"""Replay a QK pair on a prompt, take one of its units out, and look at the head's pattern (paper, app. attention units).

1. Run the prompt dense and with all given factors attached; rebuild the head's scores from z (scores.py).
2. Check the reconstruction: KL of the rebuilt pattern from the dense one.
3. The pair's contribution map: z_a(dest) * z_b(src) * gamma(dest - src) wherever attention may look.
4. Take the unit out of its slice: a Q unit leaves the head's queries, its parts in keys and values stay; compare patterns.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.qk import plots
from swd_lens.analysis.qk.prompts import prompt_row, strings_of
from swd_lens.analysis.qk.scores import REMOVE, Effects, effects, run_layers
from swd_lens.analysis.qk.screen import QKPair
from swd_lens.analysis.qk.vectors import LayerUnits, QKError, layer_units, provenance, units_of
from swd_lens.base.display import card
from swd_lens.base.panels import Panel, attention_heads
from swd_lens.hosts import host_of


@dataclass(frozen=True, repr=False)
class QKReplay:
    """One pair on one prompt.

    Attributes:
        pair: with the gamma of distance 0.
        remove: what was taken out: "q" (the Q unit from the head's queries), "k" (the K unit from its keys) or "pair" (this
            pair's contribution from the scores; no unit does that by itself).
        tokens, token_ids: of the prompt.
        contribution: (dest, src) the pair's part of every score, before a cap; 0 where attention does not look.
        mask: (dest, src) where it may look.
        dense, reconstructed, removed: (dest, src) patterns of the host, with units in its place, and without the unit.
        dense_kl: KL(dense || reconstructed), nats, mean over destinations.
        removed_kl: KL(reconstructed || removed), nats, mean over destinations.
        max_change: largest |probability| that changed on removal.
        signed_mean: mean of the contribution over the mask.
        agreement: correlation over the mask between the change of the pattern that this map alone foretells (its contributions
            leave the scores, all others stay) and the change that came. 1: the removal does what the map says. NaN: nothing
            changed. Not a first-order estimate: removals are large (the paper's moves a probability by 0.775).
        share: how much of the removed score is this pair's: both maps less their mean over each row's sources, which no pattern
            feels, then <own, removed> / <removed, removed>. Over all partners of the unit and the bias shares sum to one, if no
            norm stands in between.
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
    dense_kl: float
    removed_kl: float
    max_change: float
    signed_mean: float
    agreement: float
    share: float
    settings: dict[str, Any]

    @property
    def taken_out(self) -> str:
        """In words."""
        names = {
            "q": f"q{self.pair.q_unit}",
            "k": f"k{self.pair.k_unit}",
            "pair": f"q{self.pair.q_unit}×k{self.pair.k_unit}",
        }
        return names[self.remove]

    def table(self) -> pd.DataFrame:
        """One row of numbers."""
        numbers = {name.replace("_", " "): [getattr(self, name)] for name in Effects.NUMBERS}
        pair = self.pair
        where = {"layer": [pair.layer], "head": [pair.head], "q unit": [pair.q_unit], "k unit": [pair.k_unit]}
        return pd.DataFrame({**where, "gamma": [pair.gamma], "removed": [self.taken_out], **numbers})

    def plot(self) -> Figure:
        """Dense, reconstructed, difference; before, after the removal, difference (paper, Fig. attention-replay-ablation)."""
        return plots.replay(self)

    def plot_contribution(self) -> Figure:
        """The pair's contribution to every score (paper, Fig. qk-pair-contribution)."""
        return plots.contribution(self)

    def panel(self) -> Panel:
        """CircuitsVis' attention heads: dense pattern, before and after the removal, and the contribution map (scaled to 1)."""
        largest = float(self.contribution.abs().max()) or 1.0
        maps = torch.stack([self.dense, self.reconstructed, self.removed, self.contribution / largest])
        names = ["dense", "before", f"without {self.taken_out}", f"contribution / {largest:.3g}"]
        return attention_heads(self.tokens, maps, names=names, title=f"{self.pair}", largest=1.0)

    def __repr__(self) -> str:
        return (
            f"QKReplay({self.pair} on {len(self.tokens)} tokens, without {self.taken_out}: dense KL {self.dense_kl:.3g}, "
            f"removed KL {self.removed_kl:.3g}, max change {self.max_change:.3f}, agreement {self.agreement:.3f}, "
            f"share {self.share:.2f})"
        )

    def _repr_html_(self) -> str:
        words = (
            f"KL in nats, mean over destinations. Positions enter {self.settings['positions']}."
            " The map is about scores before the cap." * bool(self.settings["soft_cap"])
        )
        return card(
            f"{self.pair}: without {self.taken_out}",
            self.plot(),
            self.plot_contribution(),
            self.table(),
            words,
            self.panel(),
        )


def qk_replay(model: Any, factors: Any, pair: QKPair, prompt: Any, *, remove: str = "q") -> QKReplay:
    """Run a prompt, map a pair's contributions, take a unit out of its slice, and compare the head's patterns.

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
    host = host_of(model)
    check_remove(remove)
    row = prompt_row(model, prompt)
    found = layer_units(host, factors)
    units = check_pair(found, pair)
    run = run_layers(host, factors, found, row[None], [pair.layer])[pair.layer]
    with torch.no_grad():
        made = effects(run, *indices([pair], run.z_q.device), remove)
    numbers: dict[str, Any] = {name: float(getattr(made, name)[0, 0]) for name in Effects.NUMBERS}
    maps: dict[str, Any] = {name: getattr(made, at)[0, 0].cpu() for name, at in _MAPS.items()}
    return QKReplay(
        pair=with_gamma(pair, units),
        remove=remove,
        tokens=strings_of(model, row),
        token_ids=tuple(row.tolist()),
        mask=run.mask.cpu(),
        **maps,
        **numbers,
        settings={**provenance(host, factors, {pair.layer: units}), "remove": remove},
    )


_MAPS = {"contribution": "map", "dense": "dense", "reconstructed": "before", "removed": "after"}


def check_remove(remove: str) -> None:
    if remove not in REMOVE:
        raise QKError(f"remove={remove!r}: give one of {', '.join(REMOVE)}")


def check_pair(found: dict[int, LayerUnits], pair: QKPair) -> LayerUnits:
    """The pair's layer. Raises QKError where layer, head or a unit is not there."""
    units = units_of(found, pair.layer, pair.head)
    for what, index, side in (("q_unit", pair.q_unit, units.q), ("k_unit", pair.k_unit, units.k)):
        if not 0 <= index < side.n_units:
            raise QKError(f"{pair}: {what} is {index}, but {side.site.name} has units 0 to {side.n_units - 1}")
    return units


def with_gamma(pair: QKPair, units: LayerUnits) -> QKPair:
    """The pair with its coefficient at distance 0, where angles of queries and keys cancel."""
    a, b = units.q.folded[pair.q_unit, pair.head], units.k.folded[pair.k_unit, units.heads.key_head(pair.head)]
    return QKPair(pair.layer, pair.head, pair.q_unit, pair.k_unit, float(a @ b * units.heads.scale))


def indices(
    pairs: list[QKPair], device: torch.device
) -> tuple[Int[Tensor, " case"], Int[Tensor, " case"], Int[Tensor, " case"]]:
    """(head, q unit, k unit) of cases in one layer."""
    head, q, k = ([getattr(pair, name) for pair in pairs] for name in ("head", "q_unit", "k_unit"))
    return torch.tensor(head, device=device), torch.tensor(q, device=device), torch.tensor(k, device=device)
