"""A head's scores, taken apart: all pairs of units, and the parts of biases. They sum to the scores that the host shows.

    score = <R_t norm(q), R_u norm(k)> * scale + alibi,     q = sum_a z_a bQ_a + cQ,     k = sum_b z_b bK_b + cK

is, with the scale of each norm taken from the run, the sum of five parts: pairs (a, b), cQ with the K units, the Q units with cK,
cQ with cK, and alibi. cQ and cK are biases, with the output offsets of transported factors; what those factors add to z is in z.
"""

from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Bool, Float
from matplotlib.figure import Figure
from torch import Tensor

from swd_lens.analysis.qk.replay import draw_map, map_size
from swd_lens.analysis.qk.scores import LayerScores, attended_row, layer_units, provenance, run_layers, units_of_head
from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import QKError
from swd_lens.base.figures import new_figure
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.tasks.prompt import Prompt, token_strings
from swd_lens.units import UnitSet
from swd_lens.units.keys import read_unit

PARTS = {
    "pairs": "all unit pairs",
    "query_bias": "query bias × K units",
    "key_bias": "Q units × key bias",
    "biases": "query bias × key bias",
    "position": "ALiBi",
}


@with_torch_defaults
@dataclass(frozen=True, repr=False)
class ScoreParts:
    """One head's scores on one prompt; every map is (dest, src), 0 where attention does not look.

    Attributes:
        pairs: contributions z_a z_b gamma_ab, summed over all pairs.
        query_bias, key_bias, biases: constant queries with K units, Q units with constant keys, constants with each other.
        position: ALiBi; zeros for other positions.
        host: hook_attn_scores of the host with units attached, after the cap where there is one.
        soft_cap: of the scores; None = none.
        mask: where attention may look.
        run: what the parts are made of.
    """

    layer: int
    head: int
    tokens: tuple[str, ...]
    pairs: Float[Tensor, "dest src"]
    query_bias: Float[Tensor, "dest src"]
    key_bias: Float[Tensor, "dest src"]
    biases: Float[Tensor, "dest src"]
    position: Float[Tensor, "dest src"]
    host: Float[Tensor, "dest src"]
    soft_cap: float | None
    mask: Bool[Tensor, "dest src"]
    settings: dict[str, Any]
    run: LayerScores

    @property
    def total(self) -> Float[Tensor, "dest src"]:
        """The sum of the parts: the score before the cap."""
        return sum((getattr(self, name) for name in PARTS), torch.zeros_like(self.pairs))

    @property
    def capped(self) -> Float[Tensor, "dest src"]:
        """The sum as the host shows it, after the cap."""
        return self.run.capped(self.total)

    @property
    def error(self) -> float:
        """Largest |capped - host|, as a fraction of the largest |score|; 0 where all scores are 0."""
        off, largest = (float((x * self.mask).abs().max()) for x in (self.capped - self.host, self.host))
        return off / max(largest, 1e-30)

    def contribution(self, q_unit: Any, k_unit: Any) -> Float[Tensor, "dest src"]:
        """The part of one pair of units, given by number, name ("blocks.3.attn_q/17") or (site, number).

        Raises:
            QKError: a unit is not there, or not of the site that writes this layer's queries or keys.
        """
        pair = []
        for name, given, side in (("q_unit", q_unit, self.run.units.q), ("k_unit", k_unit, self.run.units.k)):
            site, unit = read_unit(given, [side.site.name])
            if site != side.site.name or not 0 <= unit < side.n_units:
                shown = unit if site == side.site.name else f"{site}/{unit}"
                raise QKError(f"{name} is {shown}, but {side.site.name} has units 0 to {side.n_units - 1}")
            pair.append(unit)
        device = self.run.mask.device
        with torch.no_grad():
            case = (torch.tensor([i], device=device) for i in (self.head, *pair))
            return self.run.contribution(*case)[0, 0].cpu()

    def strongest(self, dest: int, src: int, n: int = 10) -> pd.DataFrame:
        """The n pairs that add most, in size, to the score of one destination and source.

        Args:
            dest, src: positions; negative ones count from the end, -1 is the last token.

        Raises:
            QKError: a position that is not there or that attention does not look at.
        """
        size, asked = len(self.tokens), (dest, src)
        dest, src = (position + size if position < 0 else position for position in asked)
        if not (0 <= dest < size and 0 <= src < size and bool(self.mask[dest, src])):
            raise QKError(f"destination {asked[0]} does not look at source {asked[1]} (positions 0 to {size - 1})")
        heads = self.run.heads
        queries, keys = self.run.q.at(self.head, dest), self.run.k.at(heads.key_head(self.head), src)
        contributions = (queries @ keys.mT * heads.scale).cpu()
        flat, width = contributions.flatten(), contributions.shape[1]
        # A stable order of the few that are as large as the nth: to sort all takes longer than all else here.
        size = flat.abs()
        large = (size >= size.topk(min(n, len(size))).values.min()).nonzero().flatten() if n > 0 else flat[:0].long()
        order = large[torch.sort(size[large], descending=True, stable=True).indices[:n]].tolist()
        rows = [{"q unit": i // width, "k unit": i % width, "contribution": float(flat[i])} for i in order]
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """Each part's mean over the mask, its spread within rows (what patterns feel), and its largest size."""
        rows = []
        for name, words in PARTS.items():
            part = getattr(self, name)
            values = part[self.mask]
            row_means = (part.sum(-1) / self.mask.sum(-1))[:, None].expand_as(part)[self.mask]
            spread = float((values - row_means).square().mean().sqrt())
            largest = float(values.abs().max())
            rows.append({"part": words, "mean": float(values.mean()), "spread": spread, "largest": largest})
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The parts and their sum, one map each, on one scale."""
        maps = {words: getattr(self, name) for name, words in PARTS.items()}
        maps = {words: part for words, part in maps.items() if bool(part.any())} | {"sum": self.total}
        largest = max(float(part.abs().max()) for part in maps.values())
        size = map_size(self.tokens)
        figure, axes = new_figure(1, len(maps), width=size, height=size * 0.95)
        for ax, (title, part) in zip(axes[0], maps.items(), strict=True):
            bar = ax is axes[0, -1]
            draw_map(ax, self.tokens, self.mask, title, part, label="score", largest=largest, signed=True, bar=bar)
        for ax in axes[0, 1:]:
            ax.set_yticklabels([])
            ax.set_ylabel("")
        return figure

    def __repr__(self) -> str:
        where = f"L{self.layer}H{self.head} on {len(self.tokens)} tokens"
        return f"ScoreParts({where}, parts sum to the host's scores within {self.error:.1e} of the largest)"

    def _repr_html_(self) -> str:
        return card(repr(self), self.plot(), self.table(), folded_settings(self.settings))


@with_torch_defaults
def score_parts(model: Any, factors: Any, layer: int, head: int, prompt: Any) -> ScoreParts:
    """Take one head's scores on a prompt apart, with the units attached (paper, app. attention units).

    Args:
        model: the host, with these sites not attached; left as it was.
        prompt: text, or a row of token ids; at least two tokens.

    Raises:
        QKError, TokenError, UnsupportedHostError, AttachError: as `qk_replay`.
    """
    units = UnitSet.of(model, factors)
    row = attended_row(model, Prompt.of(model, prompt, "qk"))
    layers = {layer: units_of_head(layer_units(units), layer, head)}
    run = run_layers(units, layers, row[None])[layer]
    return parts_of(run, head, token_strings(model, row.tolist()), provenance(units, layers))


def parts_of(run: LayerScores, head: int, tokens: tuple[str, ...], settings: dict[str, Any]) -> ScoreParts:
    """One head's scores of a run of one prompt, taken apart."""
    with torch.no_grad():
        q_units, q_constant = run.q.parts(head)
        k_units, k_constant = run.k.parts(run.heads.key_head(head))

        def part(queries: Tensor, keys: Tensor) -> Tensor:
            return (queries @ keys.mT * run.heads.scale * run.mask).cpu()

        alibi = torch.zeros_like(run.shown[0, 0]) if run.position_bias is None else run.position_bias[head]
        return ScoreParts(
            run.heads.layer,
            head,
            tokens,
            pairs=part(q_units, k_units),
            query_bias=part(q_constant, k_units),
            key_bias=part(q_units, k_constant),
            biases=part(q_constant, k_constant),
            position=(alibi * run.mask).cpu(),
            host=run.shown[0, head].masked_fill(~run.mask, 0.0).cpu(),
            soft_cap=run.heads.soft_cap,
            mask=run.mask.cpu(),
            settings=settings,
            run=run,
        )
