"""audit: look at many units of a replacement in one pass over a text.

1. Name the units: all of the set, those of some sites, or single ones.
2. Attach the factors and run the text once (watching.py). At each site the running top n (contexts.py) and the running sums
   (statistics.py) see z of the batch and forget it. What they hold depends on the number of units, not of tokens.
3. The result (result.py) keeps these numbers; edges, logit effects and strings are made when a unit is looked at.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from swd_lens.analysis.audit.contexts import TopPlaces, places_per_row
from swd_lens.analysis.audit.labels import UnitLabels
from swd_lens.analysis.audit.logits import Readout
from swd_lens.analysis.audit.names import Ends, TokenNames
from swd_lens.analysis.audit.result import NEIGHBOURS, Audit
from swd_lens.analysis.audit.site import SiteAudit
from swd_lens.analysis.audit.statistics import Statistics
from swd_lens.analysis.audit.watching import watch
from swd_lens.base._version import __version__
from swd_lens.circuits.scores import UnitScores, identities, require_same_units
from swd_lens.hosts import UnsupportedHostError, host_of, require_no_dropout
from swd_lens.hosts.sites import Site, parse_unit, select_sites
from swd_lens.tasks.streams import as_stream
from swd_lens.units import attach
from swd_lens.units.passport import fingerprint


def audit(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    units: str | Iterable[str] | None = None,
    n: int = 20,
    scores: UnitScores | Mapping[str, UnitScores] | None = None,
    labels: UnitLabels | None = None,
    before: int = 14,
    after: int = 6,
    per_row: int | None = None,
    batch_size: int | None = None,
    coactivation: bool = True,
    progress: bool = True,
) -> Audit:
    """Contexts, statistics and neighbours of units, from one pass over a text (paper app. E.1).

    Args:
        factors: what to attach, see `swd_lens.attach`.
        tokens: (rows, pos) ids of text that the factors were not fitted to, or a `TokenStream`, which is read once.
        units: names ("blocks.2.mlp_out/5") and patterns of sites ("blocks.2.*", "mlp_out"); None = every unit of the set.
        n: contexts per unit, by |z|.
        scores: task -> UnitScores, or one alone; of these very factors. They are shown, and say nothing about the contexts.
        labels: what the units are called, see `Audit.with_labels`.
        before, after: tokens shown on either side of a peak.
        per_row: at most this many contexts of one row; None = one, or as many as it takes where the text has fewer rows than n.
        batch_size: rows per forward; None = about 8,192 tokens.
        coactivation: correlate every unit with all others of its site: units² float64 per site.

    Returns:
        Audit.

    Raises:
        ValueError: scores or labels of other factors, a unit that there is not, or an activation that is not finite.
        UnknownSiteError: a pattern that matches no site of the set.
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        UnsupportedHostError: a site whose units the host's forward never shows.
        AttachError: see `swd_lens.attach`.
    """
    host, stream = host_of(model), as_stream(tokens, model)
    require_no_dropout(model)
    by_task, at_most = _by_task(scores), places_per_row(per_row, n, stream)
    with attach(model, factors) as attachment:
        for task, one in by_task.items():
            require_same_units(one.settings, attachment.factors, f"scores of {task}")
        chosen = _chosen(attachment.sites, attachment.factors, units)
        known = identities(attachment.factors)
        counts = {site.name: attachment.factors[site.name].n_units for site in attachment.sites}
        if labels is not None:
            labels.require(known, counts)
        looking = {
            site: _Looking(indices, TopPlaces(n, before, after, at_most), coactivation)
            for site, indices in chosen.items()
        }
        text = watch(host, stream, looking, batch_size, progress)
    names = TokenNames(model)
    settings = {
        "model": str(getattr(model.cfg, "model_name", "")),
        "units": counts,
        "factors": known,
        "weight_sha256": {site.name: fingerprint(host.weight(site)) for site in chosen if site.kind != "mlp"},
        "tokens": stream.n_tokens,
        "row_length": stream.row_length,
        "tokens_sha256": text,
        "contexts": n,
        "contexts_per_row": at_most,
        "before": before,
        "after": after,
        "version": __version__,
    }
    return Audit(
        sites={site.name: one.found() for site, one in looking.items()},
        factors={site.name: attachment.factors[site.name] for site in chosen},
        scores=by_task,
        labels=UnitLabels({}) if labels is None else labels,
        settings=settings,
        n_tokens=stream.n_tokens,
        names=names,
        readout=_readout(model, names),
        ends=Ends.of(model),
    )


class _Looking:
    """The observers of one site."""

    def __init__(self, chosen: Int[Tensor, " chosen"], places: TopPlaces, coactivation: bool):
        self.chosen, self.places = chosen, places
        self.statistics = Statistics(chosen, coactivation)

    def __call__(self, first_row: int, rows: Tensor, z: Tensor) -> None:
        own = z if len(self.chosen) == z.shape[-1] else z[..., self.chosen.to(z.device)]
        self.places.add(first_row, rows, own)
        self.statistics.add(z.flatten(0, 1))

    def found(self) -> SiteAudit:
        s = self.statistics
        coactive, correlation = s.coactive(NEIGHBOURS)
        return SiteAudit(
            units=self.chosen,
            places=self.places.cpu(),
            mean=s.mean,
            sd=s.sd,
            smallest=s.smallest.cpu(),
            largest=s.largest.cpu(),
            density=s.density,
            histograms=tuple(s.histogram(column) for column in range(len(self.chosen))),
            coactive=coactive,
            correlation=correlation,
        )


def _readout(model: Any, names: TokenNames) -> Readout | None:
    try:
        return Readout(model, names)
    except UnsupportedHostError:  # BERT: it has no next-token logits that a unit could have a direct effect on
        return None


def _by_task(scores: UnitScores | Mapping[str, UnitScores] | None) -> dict[str, UnitScores]:
    if scores is None:
        return {}
    if isinstance(scores, UnitScores):
        return {str(scores.settings.get("task") or "task"): scores}
    return dict(scores)


def _chosen(
    sites: list[Site], factors: Mapping[str, Any], units: str | Iterable[str] | None
) -> dict[Site, Int[Tensor, " unit"]]:
    """Site -> indices, ascending, each once."""
    wanted: dict[str, set[int]] = {}
    names = ["all"] if units is None else [units] if isinstance(units, str) else list(units)
    if not names:
        raise ValueError(
            "no unit was named: leave units out for all of them, or give names such as 'blocks.2.mlp_out/5'"
        )
    for name in names:
        if "/" not in name:
            for site in select_sites(sites, name):
                wanted.setdefault(site.name, set()).update(range(factors[site.name].n_units))
            continue
        site_name, index = parse_unit(name)
        select_sites(sites, site_name)
        if index >= factors[site_name].n_units:
            raise ValueError(f"{name}: {site_name} has {factors[site_name].n_units} units, counted from 0")
        wanted.setdefault(site_name, set()).add(index)
    return {site: torch.tensor(sorted(wanted[site.name])) for site in sites if site.name in wanted}
