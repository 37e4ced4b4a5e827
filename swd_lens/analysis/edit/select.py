"""select: choose the unit, and the prompt, that an edit should go through (after paper, app. component editing).

1. Candidate cases are (prompt, answer, foil) triples. For each, and each site that writes to the residual stream: z at the
   prompt's last position in the dense host, and the write alignment B_c . d with d = u_answer - u_foil.
2. Units with z > 0 and B_c . d > 0 stay; of each prompt the `top` (24) with the largest direct contribution z (B_c . d).
3. They are ranked by a selection score. The paper says what goes in (activation, alignment, stored importance and rank) and
   gives no formula; ours is a product, each factor in [0, 1]:
       strength    z (B_c . d), over the largest of the case: cases compare, whatever their logits
       importance  with UnitScores: the mean of score / largest score and 1 - rank / units
       specificity with text: z^2 over its mean square on the text, over the largest among the candidates. The side effects
                   of an edit grow with alpha^2 E[z^2] ~ E[z^2] / z*^2: this is what its locality hangs on
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.analysis.edit.make import factor_set
from swd_lens.analysis.edit.target import EDITABLE, Target, ending, find_target
from swd_lens.base import __version__
from swd_lens.base.errors import EditError, visible_token
from swd_lens.base.figures import INK, literal, new_figure, style
from swd_lens.base.record import Record
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Host, host_of, sites_of
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Site
from swd_lens.tasks.streams import as_stream
from swd_lens.units.attach import require_free
from swd_lens.units.factors import Factors, FactorSet
from swd_lens.units.match import check_weights
from swd_lens.units.unit_set import identities

TOP = 24  # paper


@dataclass(frozen=True, repr=False)
class EditSelection(Record):
    """Candidate units for an edit, the best first.

    Attributes:
        rows: one row per unit and prompt: unit, prompt, answer, foil, margin, z, alignment (B_c . d), contribution, strength,
            and with scores or text: score, rank, importance, rms z, specificity; selection, by which they are sorted.
        settings: every choice.
    """

    rows: pd.DataFrame
    settings: Mapping[str, Any]

    @property
    def best(self) -> dict[str, Any]:
        """unit, prompt, answer and foil of the first row: edit_unit(model, factors, **selection.best, shift=...)."""
        return self.rows.iloc[0][["unit", "prompt", "answer", "foil"]].to_dict()

    def table(self, n: int | None = None) -> pd.DataFrame:
        """A copy of the rows, or of the n best."""
        return self.rows.iloc[:n].copy()

    def plot(self):
        """Write alignment against activation, one marker per candidate, one colour per case; a matplotlib Figure."""
        figure, axes = new_figure(1, 1, width=5.4, height=3.6)
        ax = axes[0, 0]
        for index, (_, rows) in enumerate(self.rows.groupby(_case_names(self.rows), sort=False)):
            prompt, answer, foil = (str(rows.iloc[0][name]) for name in ("prompt", "answer", "foil"))
            label = f"{ending(prompt, 34)} ({visible_token(answer)} over {visible_token(foil)})"
            ax.scatter(
                rows["z"],
                rows["alignment"],
                s=12 + 90 * rows["selection"] / self.rows["selection"].max(),
                color=style(index)["color"],
                marker="osD^vPX"[index % 7],
                alpha=0.75,
                linewidths=0,
                label=literal(label),
            )
        best = self.rows.iloc[0]
        ax.scatter(best["z"], best["alignment"], s=190, facecolors="none", edgecolors=INK, linewidths=1.0)
        ax.annotate(
            literal(best["unit"]),
            (best["z"], best["alignment"]),
            xytext=(0, 11),
            textcoords="offset points",
            ha="right" if best["z"] > self.rows["z"].median() else "left",
            fontsize=8,
            color=INK,
        )
        ax.margins(0.12)
        ax.set(xlabel="activation z at the last position", ylabel="write alignment $B_c \\cdot d$ (logits per z)")
        ax.set_title("candidates for an edit; larger markers: higher selection score", fontsize=9, color=INK, loc="left")
        figure.legend(loc="outside lower center", ncols=1, fontsize=7, frameon=False)
        return figure

    def __repr__(self) -> str:
        best = self.best
        return f"EditSelection({len(self.rows)} candidates; best: {best['unit']} for {best['answer']!r} over {best['foil']!r})"

    def title(self) -> str:
        return "Candidates for an edit"

    def parts(self) -> tuple[Any, ...]:
        return self.table(10), self.plot()


@with_torch_defaults
def select_edit_unit(
    model: Any,
    factors: Any,
    cases: Sequence[Any],
    *,
    scores: UnitScores | None = None,
    tokens: Any = None,
    top: int = TOP,
    direction: str = "unembedding",
    prepend_bos: bool | None = None,
    batch_size: int = 16,
) -> EditSelection:
    """Rank units for an edit by a heuristic after the paper's; the module's docstring has the formula, which is ours.

    Args:
        model: the host, with nothing attached at these sites.
        factors: a set, dict or one Factors; sites that do not write to the residual stream are passed over.
        cases: (prompt, answer, foil) triples, each as for `edit_unit`.
        scores: a task's UnitScores of these factors; units that matter to the task come first.
        tokens: text, rows or a TokenStream; units that are silent on it come first.
        top: candidates per prompt.
        direction, prepend_bos: see `find_target`.
        batch_size: rows of text per forward.

    Raises:
        EditError: no cases, no site to edit, no unit that fires and aligns, scores of other units, or a case that `edit_unit`
            would refuse.
    """
    host, units = host_of(model), factor_set(factors)
    if isinstance(cases, str) or not cases or not all(isinstance(c, tuple | list) and len(c) == 3 for c in cases):
        raise EditError("cases must be a list of (prompt, answer, foil) triples, and not empty")
    sites = _editable_sites(host, units, scores)
    rows: list[dict[str, Any]] = []
    for prompt, answer, foil in cases:
        of_case: list[dict[str, Any]] = []
        for site in sites:
            target = find_target(model, site, prompt, answer, foil, direction=direction, prepend_bos=prepend_bos)
            case = {"site": site.name, "prompt": prompt, "answer": answer, "foil": foil, "margin": target.margin}
            of_case += [{**case, **candidate} for candidate in _candidates(units[site.name], target)]
        of_case.sort(key=lambda row: -row["contribution"])
        rows += of_case[:top]
    if not rows:
        raise EditError("no unit is active and writes towards the answer on any of these prompts; give other cases")
    table = pd.DataFrame(rows)
    places = list(zip(table.pop("site"), table.pop("index"), strict=True))
    table.insert(0, "unit", [f"{site}/{index}" for site, index in places])
    table["strength"] = table["contribution"] / table.groupby(_case_names(table))["contribution"].transform("max")
    table["selection"], n_tokens = table["strength"], None
    if scores is not None:
        ranks = scores.ranks()
        # No score below 0 counts for anything.
        best = max(0.0, *(float(s.max()) for s in scores.scores.values())) or 1.0
        table["score"] = [float(scores.scores[site][index]) for site, index in places]
        table["rank"] = [int(ranks[site][index]) for site, index in places]
        table["importance"] = ((table["score"] / best).clip(lower=0) + 1 - (table["rank"] - 1) / scores.n_units) / 2
        table["selection"] = table["selection"] * table["importance"]
    if tokens is not None:
        stream = as_stream(tokens, model)
        n_tokens, sizes = stream.n_tokens, _root_mean_squares(host, units, sites, stream, batch_size)
        table["rms z"] = [float(sizes[site][index]) for site, index in places]
        ratio = (table["z"] / table["rms z"].clip(lower=1e-12)) ** 2
        table["specificity"] = ratio / ratio.max()
        table["selection"] = table["selection"] * table["specificity"]
    table["selection"] = table.pop("selection")  # the last column
    table = table.sort_values("selection", ascending=False, kind="stable", ignore_index=True)
    settings = {
        "top": top,
        "direction": direction,
        "n_cases": len(cases),
        "sites": [site.name for site in sites],
        "scores": None if scores is None else dict(scores.settings),
        "text": n_tokens,
        "formula": "ours: strength x importance x specificity, as far as given",
        "swd_lens": __version__,
        **standing_hooks(model),
    }
    return EditSelection(table, settings)


def _candidates(f: Factors, target: Target) -> list[dict[str, Any]]:
    """The valid units that fire on the prompt and write towards its answer."""
    z = target.input.double() @ f.read.double().cpu()
    alignment = f.write.double().cpu() @ target.direction.double()
    fits = (z > 0) & (alignment > 0) & f.valid_units.cpu()
    return [
        {"index": i, "z": float(z[i]), "alignment": float(alignment[i]), "contribution": float(z[i] * alignment[i])}
        for i in fits.nonzero().flatten().tolist()
    ]


def _case_names(table: pd.DataFrame) -> list[str]:
    """Each row's case as text: prompts may be lists or tensors, and two cases may share one."""
    prompts = [p.tolist() if isinstance(p, Tensor) else p for p in table["prompt"]]
    return [repr(case) for case in zip(prompts, table["answer"], table["foil"], strict=True)]


def _editable_sites(host: Host, factors: FactorSet, scores: UnitScores | None) -> list[Site]:
    """The sites that edits can be made at. Raises EditError: there is none, or the scores are of other units; AttachError:
    units are attached at one, or the factors are not this host's."""
    sites = [site for site in sites_of(host, factors) if site.kind in EDITABLE]
    if not sites:
        raise EditError(
            f"these factors hold {', '.join(factors)}: no site writes to the residual stream; edits take mlp_out and attn_o"
        )
    require_free(host, sites)
    for site in sites:
        check_weights(host, site, factors[site.name])
    if scores is None:
        return sites
    for site in sites:
        n = len(scores.scores[site.name]) if site.name in scores.scores else 0
        if n != factors[site.name].n_units:
            raise EditError(
                f"the scores cover {n} units of {site.name}, these factors have {factors[site.name].n_units}; attribute "
                "these factors"
            )
    known = dict(scores.settings.get("factors", {}))
    own = identities({site.name: factors[site.name] for site in sites})
    others = [site for site, identity in own.items() if known.get(site, identity) != identity]
    if others:
        raise EditError(
            f"the scores were made with other factors of {', '.join(others)} (same number of units, other weights), where "
            "unit i is another unit; attribute these factors"
        )
    return sites


def _root_mean_squares(
    host: Host, factors: FactorSet, sites: Sequence[Site], stream: Any, batch_size: int
) -> dict[str, Float[Tensor, " _unit"]]:
    """Root mean square of z over the text, per site and unit, in the dense host; one batch in memory."""
    sums = {site.name: torch.zeros(factors[site.name].n_units, dtype=torch.float64) for site in sites}

    def add(site: Site, h: Tensor) -> None:
        z = h.float().flatten(0, -2) @ factors[site.name].read.to(h.device)
        sums[site.name] += z.double().square().sum(0).cpu()

    last = max(site.layer for site in sites) + 1
    with torch.no_grad(), host.inputs(sites, add):
        for rows in stream.batches(batch_size):
            host.run_blocks(rows, last)
    return {name: (total / stream.n_tokens).sqrt() for name, total in sums.items()}
