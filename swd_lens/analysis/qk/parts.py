"""A head's scores, taken apart: all pairs of units, and what biases add. The parts sum to what the host shows.

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

from swd_lens.analysis.qk import plots
from swd_lens.analysis.qk.prompts import prompt_row, strings_of
from swd_lens.analysis.qk.scores import LayerScores, contribution, run_layers
from swd_lens.analysis.qk.screen import QKPair
from swd_lens.analysis.qk.vectors import QKError, Side, layer_units, provenance, units_of
from swd_lens.base.display import card
from swd_lens.base.figures import new_figure
from swd_lens.hosts import host_of

PARTS = ("pairs", "query_bias", "key_bias", "biases", "position")
_WORDS = {
    "pairs": "all unit pairs",
    "query_bias": "query bias × K units",
    "key_bias": "Q units × key bias",
    "biases": "query bias × key bias",
    "position": "ALiBi",
}


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
        return self.total if self.soft_cap is None else self.soft_cap * (self.total / self.soft_cap).tanh()

    @property
    def error(self) -> float:
        """Largest |capped - host|, as a fraction of the largest |score|; 0 where all scores are 0."""
        off, largest = (float((x * self.mask).abs().max()) for x in (self.capped - self.host, self.host))
        return off / max(largest, 1e-30)

    def contribution(self, q_unit: int, k_unit: int) -> Float[Tensor, "dest src"]:
        """One pair's part. Raises QKError where a unit is not there."""
        for what, unit, side in (("q_unit", q_unit, self.run.units.q), ("k_unit", k_unit, self.run.units.k)):
            if not 0 <= unit < side.n_units:
                raise QKError(f"{what} is {unit}, but {side.site.name} has units 0 to {side.n_units - 1}")
        with torch.no_grad():
            at = [torch.tensor([i], device=self.run.z_q.device) for i in (self.head, q_unit, k_unit)]
            return contribution(self.run, *at)[0, 0].cpu()

    def strongest(self, dest: int, src: int, n: int = 10) -> pd.DataFrame:
        """The n pairs that add most, in size, to the score of one destination and source.

        Raises:
            QKError: a position that is not there or that attention does not look at.
        """
        size = len(self.tokens)
        if not (0 <= dest < size and 0 <= src < size and bool(self.mask[dest, src])):
            raise QKError(f"destination {dest} does not look at source {src} (positions 0 to {size - 1})")
        of_pairs = _at(self.run, self.head, dest, src)
        flat, width = of_pairs.flatten(), of_pairs.shape[1]
        places = torch.sort(flat.abs(), descending=True, stable=True).indices[:n].tolist()
        pairs = [QKPair(self.layer, self.head, place // width, place % width) for place in places]
        rows = [
            {"q unit": p.q_unit, "k unit": p.k_unit, "contribution": float(flat[i])}
            for p, i in zip(pairs, places, strict=True)
        ]
        return pd.DataFrame(rows)

    def table(self) -> pd.DataFrame:
        """Each part's mean over the mask, its spread within rows (what patterns feel), and its largest size."""
        rows = []
        for name in PARTS:
            part = getattr(self, name)
            values = part[self.mask]
            row_means = (part.sum(-1) / self.mask.sum(-1))[:, None].expand_as(part)[self.mask]
            spread = float((values - row_means).square().mean().sqrt())
            rows.append(
                {
                    "part": _WORDS[name],
                    "mean": float(values.mean()),
                    "spread": spread,
                    "largest": float(values.abs().max()),
                }
            )
        return pd.DataFrame(rows)

    def plot(self) -> Figure:
        """The parts and their sum, one map each, on one scale."""
        names = [name for name in PARTS if bool(getattr(self, name).any())]
        shown = [(_WORDS[name], getattr(self, name)) for name in names] + [("sum", self.total)]
        largest = max(float(part.abs().max()) for _, part in shown)
        size = plots._side(len(self.tokens))
        figure, axes = new_figure(1, len(shown), width=size, height=size * 0.95)
        for ax, (title, part) in zip(axes[0], shown, strict=True):
            plots._pattern(ax, self, title, part, "score", largest, signed=True, bar=ax is axes[0, -1])
        for ax in axes[0, 1:]:
            ax.set_yticklabels([])
            ax.set_ylabel("")
        return figure

    def __repr__(self) -> str:
        where = f"L{self.layer}H{self.head} on {len(self.tokens)} tokens"
        return f"ScoreParts({where}, parts sum to the host's scores within {self.error:.1e} of the largest)"

    def _repr_html_(self) -> str:
        return card(repr(self), self.plot(), self.table())


def score_parts(model: Any, factors: Any, layer: int, head: int, prompt: Any) -> ScoreParts:
    """Take one head's scores on a prompt apart, with the units attached.

    Args:
        model: the host, with these sites not attached; left as it was.
        prompt: text, or a row of token ids; at least two tokens.

    Raises:
        QKError, TokenError, UnsupportedHostError, AttachError: as `qk_replay`.
    """
    host = host_of(model)
    row = prompt_row(model, prompt)
    found = layer_units(host, factors)
    units = units_of(found, layer, head)
    run = run_layers(host, factors, found, row[None], [layer])[layer]
    with torch.no_grad():
        key_head = units.heads.key_head(head)
        scale = units.heads.scale
        q = _split(run, units.q, head, query=True)
        k = _split(run, units.k, key_head, query=False)
        maps = {"pairs": (0, 0), "query_bias": (1, 0), "key_bias": (0, 1), "biases": (1, 1)}
        parts = {name: (q[i] @ k[j].mT * scale * run.mask).cpu() for name, (i, j) in maps.items()}
        bias = torch.zeros_like(run.seen[0, 0]) if run.position_bias is None else run.position_bias[head]
        return ScoreParts(
            layer,
            head,
            strings_of(model, row),
            **parts,
            position=(bias * run.mask).cpu(),
            host=run.seen[0, head].masked_fill(~run.mask, 0.0).cpu(),
            soft_cap=units.heads.soft_cap,
            mask=run.mask.cpu(),
            settings=provenance(host, factors, {layer: units}),
            run=run,
        )


def _split(run: LayerScores, side: Side, head: int, query: bool) -> tuple[Float[Tensor, "pos d_head"], ...]:
    """A head's queries or keys in two: what units write, and the constant; both with the norm's scale, and rotated."""
    z = (run.z_q if query else run.z_k)[0]
    written, constant = z @ side.write[:, head], side.constant[head].expand(len(z), -1)
    scale = run.inverse_rms(query)
    made = []
    for x in (written, constant):
        if side.norm is not None and scale is not None:
            x = x * scale[0, head][:, None] * side.norm.weight
        made.append(x if run.turn is None else run.turn.apply(x))
    return tuple(made)


def _at(run: LayerScores, head: int, dest: int, src: int) -> Float[Tensor, "q_unit k_unit"]:
    """Every pair's part of one score."""
    heads, key_head = run.heads, run.heads.key_head(head)
    a, b = run.units.q.folded[:, head], run.units.k.folded[:, key_head]
    if run.turn is not None:
        a, b = run.turn.at(dest, a), run.turn.at(src, b)
    z_a, z_b = run.z_q[0, dest], run.z_k[0, src]
    scales = run.inverse_rms(query=True), run.inverse_rms(query=False)
    z_a = z_a if scales[0] is None else z_a * scales[0][0, head, dest]
    z_b = z_b if scales[1] is None else z_b * scales[1][0, key_head, src]
    return ((z_a[:, None] * a) @ (z_b[:, None] * b).mT * heads.scale).cpu()
