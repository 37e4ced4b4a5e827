"""Audit: what one pass over a text showed of many units, and the tables, figures and files that are made of it.

1. A `SiteAudit` per site holds the numbers (statistics.py); strings are made only for the units that are looked at.
2. `Audit.unit` and `Audit.profiles` put together a unit's profile: contexts, histogram, edges, logit effect, tasks, neighbours.
3. `rank_table`, `excerpts` and `plot` are the paper's tables and figure; labels stand beside the units and change nothing.
4. `export` is for whoever finds labels, and `with_labels` puts them back.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor

from swd_lens.analysis.audit.contexts import Context, TokenNames
from swd_lens.analysis.audit.drawing import DrawnUnit, draw_paths, shortened
from swd_lens.analysis.audit.labels import UnitLabels, sealed_line
from swd_lens.analysis.audit.statistics import SiteAudit
from swd_lens.analysis.audit.unit import TaskRank, UnitProfile
from swd_lens.analysis.audit.vectors import LogitEffect, Readout, edges_of, nearest_writes, read_vectors, write_vectors
from swd_lens.base.display import card, folded_settings
from swd_lens.base.errors import brief, legible, quoted, seen, visible_token
from swd_lens.base.files import atomic
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing_file
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts.sites import WRITES_RESIDUAL, Ends, parse_unit, split_name
from swd_lens.units.coder import Units
from swd_lens.units.keys import read_unit, single_units

NEIGHBOURS = 6
_PROMOTED = 3  # tokens that stand for a unit without a label
_AT_ONCE = 256  # profiles whose logit effects are computed together


@with_torch_defaults
@dataclass(frozen=True, repr=False, eq=False)
class Audit:
    """The findings of `swd_lens.audit`; see there.

    Attributes:
        sites: site -> its audited units.
        factors: site -> the units that were attached.
        scores: task -> its UnitScores.
        labels: what the units are called.
        settings: model, factors, tokens and every choice.
        n_tokens: tokens of text that count.
        names, ends: how the host names tokens and the ends of edges.
        readout: what stands before its logits; None where it has no next-token logits.
    """

    sites: Mapping[str, SiteAudit]
    factors: Mapping[str, Units]
    scores: Mapping[str, UnitScores]
    labels: UnitLabels
    settings: Mapping[str, Any]
    n_tokens: int
    names: TokenNames
    ends: Ends
    readout: Readout | None

    # ------------------------------------------------------------------ units

    @property
    def units(self) -> list[str]:
        """Names of the audited units, in the order of sites."""
        return [f"{site}/{unit}" for site, of_site in self.sites.items() for unit in of_site.units.tolist()]

    @property
    def identities(self) -> dict[str, str]:
        """site -> what tells these factors from others; labels carry it."""
        return dict(self.settings["factors"])

    def __len__(self) -> int:
        return sum(len(of_site.units) for of_site in self.sites.values())

    def unit(self, unit: Any) -> UnitProfile:
        """Everything about one unit: "blocks.2.mlp_out/5", a pair, a row of a table; or 5 where one site was audited.

        Raises:
            KeyError: it was not audited.
            ValueError: no name of a unit.
        """
        return next(self.profiles([unit]))

    def profiles(self, units: Any = None) -> Iterator[UnitProfile]:
        """Profiles of these units (all of them where None), in their order, made as they are asked for.

        Raises:
            KeyError: one was not audited.
            ValueError: no name of a unit.
        """
        places = [self.place(unit) for unit in (self.units if units is None else single_units(units))]
        for start in range(0, len(places), _AT_ONCE):
            part = places[start : start + _AT_ONCE]
            effects = self._effects(part)
            for site, index in part:
                yield self._profile(site, index, effects.get((site, index)))

    def place(self, unit: Any) -> tuple[str, int]:
        """Site and index of an audited unit. Raises KeyError where it was not audited, ValueError where it is none."""
        site, index = read_unit(unit, self.sites)
        if site not in self.sites or index not in self.sites[site].column:
            its_unit = f"{site}/{index}"
            raise KeyError(
                f"{legible(its_unit)} was not audited; this audit holds {len(self):,} units of {', '.join(self.sites)}"
            )
        return site, index

    def contexts(self, site: str, index: int, n: int | None = None) -> list[Context]:
        """The n strongest places of an audited unit (all that were kept where None)."""
        of_site = self.sites[site]
        return of_site.places.contexts(of_site.column[index], self.names, n=n, firing=True)

    def with_labels(self, labels: UnitLabels | Mapping[Any, Any]) -> "Audit":
        """Put labels on the audit, beside those it has; nothing else changes, rankings least of all.

        Args:
            labels: UnitLabels, or unit -> text (or a mapping with "label", "note", "author").

        Raises:
            ValueError: labels of other factors, or of units that there are not; or see `UnitLabels.of`.
        """
        given = labels if isinstance(labels, UnitLabels) else UnitLabels.of(self.identities, labels)
        given.require(self.identities, dict(self.settings["units"]))
        known = {site: identity for site, identity in self.identities.items() if site not in given.factors}
        return replace(self, labels=self.labels | UnitLabels(given.labels, {**known, **given.factors}))

    def _profile(self, site: str, index: int, effect: LogitEffect | None) -> UnitProfile:
        of_site, unit = self.sites[site], f"{site}/{index}"
        column = of_site.column[index]
        read, write = self._vectors[site]
        if site not in self._nearest:  # computed once per site
            self._nearest[site] = None if write is None else nearest_writes(write, NEIGHBOURS)
        similar = self._nearest[site]
        return UnitProfile(
            unit=unit,
            contexts=tuple(self.contexts(site, index)),
            n_tokens=self.n_tokens,
            mean=float(of_site.mean[column]),
            sd=float(of_site.sd[column]),
            smallest=float(of_site.smallest[column]),
            largest=float(of_site.largest[column]),
            density=float(of_site.density[column]),
            special_peaks=float(of_site.special_peaks[column]),
            histogram=of_site.histograms[column],
            reads=None if read is None else edges_of(read[:, index], self.ends.read(site, len(read))),
            writes=None if write is None else edges_of(write[index], self.ends.written(site, write.shape[1])),
            logits=effect,
            tasks={
                task: TaskRank(float(scores.scores[site][index]), self.ranks[task][site][index], scores.n_units)
                for task, scores in self._scored(site).items()
            },
            similar=() if similar is None else _neighbours(site, similar[0][index], similar[1][index]),
            coactive=_neighbours(site, of_site.coactive[column], of_site.correlation[column]),
            label=self.labels.get(unit),
            settings=self.settings,
        )

    def _effects(self, units: list[tuple[str, int]]) -> dict[tuple[str, int], LogitEffect]:
        effects: dict[tuple[str, int], LogitEffect] = {}
        for site in dict.fromkeys(site for site, _ in units):
            write = self._vectors[site][1]
            if self.readout and write is not None and split_name(site)[1] in WRITES_RESIDUAL:
                of_site = [unit for unit in units if unit[0] == site]
                effects.update(zip(of_site, self.readout.effects(site, write[[index for _, index in of_site]]), strict=True))
        return effects

    def _scored(self, site: str) -> dict[str, UnitScores]:
        """Task -> scores, of the tasks that scored this site."""
        return {task: scores for task, scores in self.scores.items() if site in scores.scores}

    @cached_property
    def ranks(self) -> dict[str, dict[str, list[int]]]:
        """task -> site -> rank of each unit, 1 the best."""
        return {task: {site: ranks.tolist() for site, ranks in scores.ranks().items()} for task, scores in self.scores.items()}

    @cached_property
    def _vectors(self) -> dict[str, tuple[Tensor | None, Tensor | None]]:
        return {site: (read_vectors(self.factors[site]), write_vectors(self.factors[site])) for site in self.sites}

    @cached_property
    def _nearest(self) -> dict[str, tuple[Tensor, Tensor] | None]:
        """Site -> per unit the nearest by write vector, and the cosines."""
        return {}

    # ------------------------------------------------------------------ tables and files

    def task(self, task: str | None = None) -> str:
        """The name of one of the audit's tasks; None where there is only one.

        Raises:
            ValueError: no scores, or several and none named, or none of that name.
        """
        if not self.scores:
            raise ValueError("this audit knows no scores; give audit(..., scores=swd_lens.attribute(model, factors, task))")
        if task is None and len(self.scores) == 1:
            return next(iter(self.scores))
        if task is None or task not in self.scores:
            raise ValueError(f"name one of the audit's tasks, {legible(', '.join(self.scores))}; got {quoted(task)}")
        return task

    def table(self) -> pd.DataFrame:
        """One row per unit: statistics of z, the token at its highest peak, the share of its peaks on special tokens, rank per
        task, label."""
        rows = []
        for site, of_site in self.sites.items():
            for column, index in enumerate(of_site.units.tolist()):
                first = self.contexts(site, index, 1)
                rows.append(
                    {
                        "unit": f"{site}/{index}",
                        "largest |z|": float(max(of_site.largest[column], -of_site.smallest[column])),
                        "mean z": float(of_site.mean[column]),
                        "sd": float(of_site.sd[column]),
                        "density": float(of_site.density[column]),
                        "top token": first[0].tokens[first[0].peak] if first else "",
                        "special peaks": float(of_site.special_peaks[column]),
                        **{f"{task} rank": self.ranks[task][site][index] for task in self._scored(site)},
                        "label": self.labels.text(f"{site}/{index}"),
                    }
                )
        return pd.DataFrame(rows)

    def rank_table(self, task: str | None = None, per_layer: int = 3, layers: Iterable[int] | None = None) -> pd.DataFrame:
        """The best units of each layer for a task (the paper's table of app. E.1).

        Args:
            task: which of the audit's scores; may be left out where there is one.
            per_layer: units per layer.
            layers: None = all.

        Returns:
            layer, unit, layer order (from 1), global rank (from 1, over all scored units), score (logits), label.

        Raises:
            ValueError: no scores, or several and none named, or none of that name.
        """
        scores = self.scores[self.task(task)]
        of_layers = None if layers is None else set(layers)
        rows, counts = [], {}
        for rank, (site, index) in enumerate(scores.ranking(), 1):
            layer = split_name(site)[0]
            counts[layer] = counts.get(layer, 0) + 1
            if counts[layer] <= per_layer and (of_layers is None or layer in of_layers):
                rows.append(
                    {
                        "layer": layer,
                        "unit": f"{site}/{index}",
                        "layer order": counts[layer],
                        "global rank": rank,
                        "score": float(scores.scores[site][index]),
                        "label": self.labels.text(f"{site}/{index}"),
                    }
                )
        columns = ["layer", "unit", "layer order", "global rank", "score", "label"]
        return pd.DataFrame(rows, columns=columns).sort_values(["layer", "layer order"], ignore_index=True)

    def excerpts(
        self, units: Any = None, *, task: str | None = None, per_layer: int = 2, n: int = 3, around: int = 5
    ) -> pd.DataFrame:
        """Label and top excerpts per unit (the paper's table of contexts), the peak token between « and ».

        Args:
            units: None = the best `per_layer` of each layer for the task.
            n: excerpts per unit.
            around: tokens on either side of the peak.

        Raises:
            KeyError: a unit was not audited.
            ValueError: see `rank_table`.
        """
        rows = []
        for given in single_units(self.rank_table(task, per_layer)["unit"] if units is None else units):
            site, index = self.place(given)
            unit, contexts = f"{site}/{index}", [c.around_peak(around) for c in self.contexts(site, index, n)]
            excerpts = "; ".join(f"“{' '.join(context.text(('«', '»')).split())}”" for context in contexts)
            rows.append({"unit": unit, "label": self.labels.text(unit), "excerpts": excerpts})
        return pd.DataFrame(rows, columns=["unit", "label", "excerpts"])

    def plot(self, task: str | None = None, per_layer: int = 2, layers: Iterable[int] | None = None):
        """A task's best units by layer: read from the site's input, write to the residual stream (the paper's figure).

        Returns:
            A matplotlib Figure. Raises ValueError as `rank_table` does.
        """
        ranked = self.rank_table(task, per_layer, layers)
        audited = set(self.units)
        effects = self._effects([self.place(unit) for unit in ranked["unit"] if unit in audited])
        promoted = {
            f"{site}/{index}": " ".join(visible_token(token) for token, _ in effect.promoted[:_PROMOTED])
            for (site, index), effect in effects.items()
        }
        best = float(ranked["score"].max()) if len(ranked) else 0.0
        drawn: dict[int, tuple[str, list[DrawnUnit]]] = {}
        for row in ranked.to_dict("records"):
            kind, unit = split_name(parse_unit(row["unit"])[0])[1], row["unit"]
            share = max(0.0, min(1.0, row["score"] / best)) if best > 0 else 0.0
            box = DrawnUnit(
                name=shortened(row["label"] or promoted.get(unit) or "no label"),
                under=f"{kind}/{parse_unit(unit)[1]} · #{row['global rank']} · {row['score']:.3g}",
                fill=tuple(1 - share * (1 - part) for part in (0.96, 0.72, 0.50)),  # to a light orange: text stays readable
                looks={"style": "normal" if row["label"] else "italic"},
                into_stream=kind in WRITES_RESIDUAL,
            )
            drawn.setdefault(row["layer"], (f"layer {row['layer']}", []))[1].append(box)
        words = "Label, or in italics what it promotes; unit · # rank among all units · score in logits, the darker the higher."
        return draw_paths(drawn, f"Best units for {self.task(task).replace('_', ' ')}", words)

    def export(self, path: str | Path, units: Any = None) -> Path:
        """Write one line of JSON per unit for whoever finds labels; `UnitLabels.load` reads the file once "label" is filled in.

        Each line holds:
            unit, site, index: the name, "blocks.2.mlp_out/5", and its parts.
            label, note, author: texts, empty unless the unit has a label.
            factors: identity of the site's factors, by which labels are recognised when they come back; model: its name.
            sha256: of all the line's values; `UnitLabels.load` looks that they are what was exported, but for label, note and
                author, which may be filled in where they were empty.
            line, lines: its number in the export, and how many there are, so that a missing one is noticed.
            contexts: largest |z| first, each {"text": running text with the peak token between << and >>, "tokens": strings,
                "z": activation on each token, "peak": index of the ranked token}.
            promoted, suppressed: [[token, centred logit per unit of z], ...], or null where the site does not write to the
                residual stream.
            statistics: mean, sd, smallest, largest, density (share of tokens with |z| beyond a tenth of its largest),
                special_peaks (share of contexts whose peak is a special token), n_tokens.
            reads, writes: {"n": edges, "strongest": [[name of the end, weight], ...], "heads": {head: share of squared norm}},
                or null.

        Scores of tasks are left out on purpose: labels are to be found without knowing what the unit is good for.
        """
        path, chosen = Path(path), self.units if units is None else single_units(units)
        with (
            writing_file(path, "Audit.export"),
            atomic(path) as temporary,
            open(temporary, "w", encoding="utf-8", newline="\n") as file,
        ):
            for line, profile in enumerate(self.profiles(chosen), 1):
                origin = {
                    "line": line,
                    "lines": len(chosen),
                    "factors": self.identities.get(profile.site, ""),
                    "model": str(self.settings["model"]),
                }
                file.write(sealed_line(profile.as_dict() | origin))
        return path

    # ------------------------------------------------------------------ showing itself

    @seen
    def __str__(self) -> str:
        label = f", {len(self.labels)} labels" if self.labels else ""
        tasks = f", scores of {', '.join(self.scores)}" if self.scores else ""
        lines = [f"  {site}: {len(of_site.units)} units" for site, of_site in self.sites.items()]
        kept = [f"  {words}"] if (words := kept_apart(self.settings)) else []
        return "\n".join([f"Audit of {len(self):,} units on {self.n_tokens:,} tokens{tasks}{label}", *lines, *kept])

    def __repr__(self) -> str:
        return brief(str(self))

    def _repr_html_(self) -> str:
        title = f"Audit of {len(self):,} units on {self.n_tokens:,} tokens"
        hint = 'audit.unit("…/5") shows a unit; swd.dashboard(audit, "folder/") makes a page for each'
        settings, kept = folded_settings(self.settings), kept_apart(self.settings) or None
        if not self.scores:
            return card(title, self.table().head(12), hint, kept, settings)
        task = next(iter(self.scores))
        return card(f"{title}; best units for {task}", self.rank_table(task), hint, kept, settings)


def kept_apart(settings: Mapping[str, Any]) -> str:
    """How contexts of a unit are kept from being one passage, in words; empty where an audit's settings do not say."""
    if "documents" not in settings:
        return ""
    documents, n, per_row = settings["documents"], settings["contexts"], settings["contexts_per_row"]
    rows = "one context" if per_row == 1 else f"{per_row} contexts"
    if documents is None:
        return (
            "contexts: documents are not known (no end-of-text token in this text), so that several may be of one; at most "
            f"{rows} per row"
        )
    if documents < n:
        return f"contexts: each document's largest first (the text has {documents:,} documents, a unit {n} contexts)"
    return f"contexts: at most one per document ({documents:,} documents)"


def _neighbours(site: str, units: Tensor, values: Tensor) -> tuple[tuple[str, float], ...]:
    # A unit that never moves, or writes nothing, has no neighbours.
    return tuple((f"{site}/{u}", v) for u, v in zip(units.tolist(), values.tolist(), strict=True) if v)
