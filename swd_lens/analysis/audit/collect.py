"""audit: look at many units of a replacement in one pass over a text.

1. Name the units: all of the set, those of some sites, or single ones.
2. Attach the factors and run the text once (`watch`). Blocks up to the last site run, batch by batch; a site's observer gets z of
   the batch inside the forward, so that one site's activations are in memory at a time; and which positions count.
3. An observer updates the running top n (contexts.py) and the running sums (statistics.py), and forgets z. What they hold depends
   on the number of units, not of tokens.
4. The result (result.py) keeps these numbers; edges, logit effects and strings are made when a unit is looked at.

`top_contexts` gives the contexts of a few units alone, as a study needs them.
"""

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from swd_lens.analysis.audit.contexts import Context, TokenNames, TopPlaces
from swd_lens.analysis.audit.labels import UnitLabels
from swd_lens.analysis.audit.result import NEIGHBOURS, Audit
from swd_lens.analysis.audit.statistics import SiteAudit, Statistics
from swd_lens.analysis.audit.vectors import N_TOKENS, Readout
from swd_lens.base import __version__
from swd_lens.base.errors import legible
from swd_lens.base.progress import tqdm
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import Host, host_of, require_no_dropout
from swd_lens.hosts.beginnings import text_for, warn_without_bos
from swd_lens.hosts.families import facts_of
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.recording import require_seen, standing_hooks
from swd_lens.hosts.sites import Ends, Site, select_sites
from swd_lens.tasks.encoding import special_ids
from swd_lens.tasks.streams import TokenStream, as_stream
from swd_lens.units import attach
from swd_lens.units.match import weight_fingerprint
from swd_lens.units.unit_set import UnitSet

# (number of the batch's first row, its rows of token ids, z of all units there, which positions count or None for all)
Observer = Callable[[int, Int[Tensor, "rows pos"], Float[Tensor, "rows pos unit"], Tensor | None], None]

_TOKENS_AT_ONCE = 8192  # z of 768 units on as many tokens is 25 MB


@with_torch_defaults
def audit(
    model: Any,
    factors: Any,
    tokens: Any,
    *,
    units: Any = None,
    n: int = 20,
    scores: UnitScores | Mapping[str, UnitScores] | None = None,
    labels: UnitLabels | None = None,
    before: int = 14,
    after: int = 6,
    per_row: int | None = None,
    batch_size: int | None = None,
    coactivation: bool = True,
    exclude: Any = None,
    progress: bool = True,
) -> Audit:
    """Contexts, statistics and neighbours of units, from one pass over a text (paper app. E.1).

    Args:
        factors: what to attach, see `swd_lens.attach`.
        tokens: (rows, pos) ids of text that the factors were not fitted to, or a `TokenStream`, which is read once.
        units: names ("blocks.2.mlp_out/5"), pairs (site, index), a table or circuit of them, and patterns of sites ("blocks.2.*",
            "mlp_out"); None = every unit of the set.
        n: contexts per unit, by |z|; of different documents, as far as the text has so many. Documents are told by the
            end-of-text token between them, as `load_text` puts it (`settings["documents"]`: how many; None: there is none, so
            that contexts may be of one document, and only `per_row` keeps them apart).
        scores: task -> UnitScores, or one alone; of these very factors. They are shown, and say nothing about the contexts.
        labels: what the units are called, see `Audit.with_labels`.
        before, after: tokens shown on either side of a peak.
        per_row: at most this many contexts of one row; None = one, or as many as it takes where the text has fewer rows than n.
        batch_size: rows per forward; None = about 8,192 tokens.
        coactivation: correlate every unit with all others of its site: units² float64 per site.
        exclude: "special" (the tokenizer's special tokens, BOS among them) or token ids: a unit has no peak at such a token, and
            statistics are over the others; windows show them. `settings["left_out"]` counts the positions.

    Raises:
        ValueError: scores or labels of other factors, a unit that there is not, or an activation that is not finite.
        UnknownSiteError: a pattern that matches no site of the set.
        TokenError: see `swd_lens.tasks.streams.as_stream`.
        UnsupportedHostError: a site whose units the host's forward never shows.
        AttachError: see `swd_lens.attach`.
    """
    host, stream = host_of(model), text_for(model, tokens, exclude=exclude)
    require_no_dropout(model)
    if isinstance(scores, UnitScores):
        scores = {str(scores.settings.get("task") or "task"): scores}
    by_task, new_places = dict(scores or {}), top_places(model, stream, n, before, after, per_row)
    warn_without_bos(model, stream, "text of the audit")
    special = special_ids(model) if model.tokenizer is not None else ()
    with attach(model, factors) as attachment:
        unit_set = attachment.factors
        for task, of_task in by_task.items():
            unit_set.require_made_for(of_task.settings, f"scores of {task}")
        indices = select_units(unit_set, units)
        if labels is not None:
            labels.require(unit_set.identities, unit_set.sizes)
        observers = {site: SiteObserver(of_site, new_places(), coactivation, special) for site, of_site in indices.items()}
        first = _FirstRows(next(iter(observers.values())))
        tokens_sha256 = watch(host, stream, {**observers, next(iter(observers)): first}, batch_size, progress)
    settings = _made_of(host, stream, unit_set, indices) | {"tokens_sha256": tokens_sha256, "contexts": n}
    places = next(iter(observers.values())).places
    settings |= {"contexts_per_row": places.per_row, "before": before, "after": after, "documents": places.documents}
    names = TokenNames(model)
    return Audit(
        sites={site.name: observer.result() for site, observer in observers.items()},
        factors={site.name: unit_set[site.name] for site in indices},
        scores=by_task,
        labels=UnitLabels({}) if labels is None else labels,
        settings=settings,
        n_tokens=stream.n_counted,
        names=names,
        # An encoder has no next-token logits that a unit could have a direct effect on.
        readout=Readout(model, indices, torch.cat(first.rows), torch.cat(first.counted).cpu(), names)
        if facts_of(model).reads_out
        else None,
        ends=Ends.of(host),
    )


def _made_of(host: Host, stream: TokenStream, units: UnitSet, sites: Iterable[Site]) -> dict[str, Any]:
    """Settings of an audit: model, factors and text."""
    return {
        "model": str(getattr(host.model.cfg, "model_name", "")),
        "units": units.sizes,
        "factors": units.identities,
        "weight_sha256": {site.name: weight_fingerprint(host, site) for site in sites if site.kind != "mlp"},
        "tokens": stream.n_tokens,
        "row_length": stream.row_length,
        "version": __version__,
        **stream.about(host.model),
        **standing_hooks(host.model),
    }


class _FirstRows:
    """An observer that also keeps the text's first rows, over which norms' scales are averaged: the text is read once."""

    def __init__(self, observer: Observer):
        self.observer = observer
        self.rows: list[Tensor] = []  # (rows, pos) ids
        self.counted: list[Tensor] = []  # which of their positions count
        self.n_rows = 0

    def __call__(self, first_row: int, rows: Tensor, z: Tensor, counted: Tensor | None) -> None:
        if (missing := max(1, N_TOKENS // rows.shape[1]) - self.n_rows) > 0:
            self.rows.append(rows[:missing])
            self.counted.append(torch.ones_like(rows, dtype=torch.bool)[:missing] if counted is None else counted[:missing])
            self.n_rows += len(self.rows[-1])
        self.observer(first_row, rows, z, counted)


def top_contexts(
    model: Any,
    factors: Any,
    units: Sequence[tuple[str, int]],
    tokens: Any,
    *,
    n: int = 20,
    before: int = 14,
    after: int = 2,
    batch_size: int = 64,
    per_row: int | None = None,
    progress: bool = False,
) -> dict[tuple[str, int], list[Context]]:
    """The n positions of largest |z| per unit (paper app. E.1: 20), in one pass; of different documents as in `audit`.

    Args:
        factors: what to attach, see `swd_lens.attach`.
        units: (site, index) pairs.
        tokens: (rows, pos) ids of held-out text, or a `TokenStream`.
        before, after: tokens shown on either side of the position.
        batch_size: rows per forward, at most as many as have about 8,192 tokens.
        per_row: at most this many of one row; None = one, or as many as it takes where the text has fewer rows than n.

    Raises:
        ValueError: n or per_row below 1, before or after below 0.
        UnsupportedHostError: a site whose units the host's forward never shows.
    """
    stream, names = as_stream(tokens, model), TokenNames(model)
    new_places = top_places(model, stream, n, before, after, per_row)
    require_no_dropout(model)
    columns: dict[str, list[int]] = {}
    for site, index in dict.fromkeys(units):
        columns.setdefault(site, []).append(index)
    places = {site: new_places() for site in columns}

    def observer(site: str) -> Observer:
        return lambda first_row, rows, z, counted: places[site].add(first_row, rows, z[..., columns[site]], counted)

    with attach(model, factors) as attachment:
        observers = {site: observer(site.name) for site in attachment.sites if site.name in columns}
        if observers:
            watch(host_of(model), stream, observers, min(batch_size, rows_at_once(stream)), progress)
    return {
        (site.name, index): places[site.name].cpu().contexts(column, names)
        for site in observers
        for column, index in enumerate(columns[site.name])
    }


def top_places(model: Any, stream: TokenStream, n: int, before: int, after: int, per_row: int | None) -> Callable[[], TopPlaces]:
    """What makes the empty lists of n places. per_row: how many places of a row may stand in one; None: what fills it, at least
    one. Raises ValueError: fewer than one."""
    if per_row is not None and per_row < 1:
        raise ValueError(f"per_row must be 1 or more, got {per_row}")
    # The token that stands between documents of a text, as far as the host's tokenizer has one.
    end = getattr(getattr(model, "tokenizer", None), "eos_token_id", None)
    at_most = -(-n // stream.n_rows) if per_row is None else per_row
    return partial(TopPlaces, n, before, after, at_most, () if end is None else (int(end),))


def select_units(unit_set: UnitSet, units: Any) -> dict[Site, Int[Tensor, " unit"]]:
    """Site -> indices of the units that are named, ascending, each once; None = all. Raises ValueError: no names, or a unit
    that the set does not have; UnknownSiteError: a pattern that matches no site of the set."""
    indices: dict[str, set[int]] = {}
    named = unit_set.units_named("all" if units is None else units)
    if not named:
        raise ValueError("no unit was named: leave units out for all of them, or give names such as 'blocks.2.mlp_out/5'")
    for name, index in named:
        (site,) = select_sites(unit_set.sites, name)
        n_units = unit_set[site.name].n_units
        if not 0 <= index < n_units:
            its_name = f"{name}/{index}"
            raise ValueError(f"{legible(its_name)}: {name} has {n_units} units, counted from 0")
        indices.setdefault(name, set()).add(index)
    return {site: torch.tensor(sorted(indices[site.name])) for site in unit_set.sites if site.name in indices}


class SiteObserver:
    """Everything that is kept of one site while the text runs.

    Args:
        units: the units that are described.
        special: ids of special tokens.
    """

    def __init__(self, units: Int[Tensor, " column"], places: TopPlaces, coactivation: bool, special: Sequence[int] = ()):
        self.units, self.places, self.special = units, places, special
        self.statistics = Statistics(units, coactivation)

    def __call__(self, first_row: int, rows: Tensor, z: Tensor, counted: Tensor | None) -> None:
        own = z if len(self.units) == z.shape[-1] else z[..., self.units.to(z.device)]
        self.places.add(first_row, rows, own, counted)
        flat = z.flatten(0, 1)
        flat = flat if counted is None else flat[counted.flatten().to(z.device)]
        if len(flat):
            self.statistics.add(flat)

    def result(self) -> SiteAudit:
        s = self.statistics
        coactive, correlation = s.coactive(NEIGHBOURS)
        return SiteAudit(
            units=self.units,
            places=self.places.cpu(),
            special_peaks=self.places.share_on(self.special),
            mean=s.mean,
            sd=s.sd,
            smallest=s.smallest.cpu(),
            largest=s.largest.cpu(),
            density=s.density,
            histograms=tuple(s.histogram(column) for column in range(len(self.units))),
            coactive=coactive,
            correlation=correlation,
        )


def rows_at_once(stream: TokenStream) -> int:
    """Rows of about 8,192 tokens, one at least."""
    return max(1, _TOKENS_AT_ONCE // stream.row_length)


def watch(
    host: Host, stream: TokenStream, observers: Mapping[Site, Observer], batch_size: int | None = None, progress: bool = False
) -> str:
    """Run the stream once and hand every site's z to its observer, float32, on the device where it was computed.

    Args:
        batch_size: rows per forward; None = about 8,192 tokens.

    Returns: SHA-256 of the tokens, the one that `TokenStream.fingerprint` would take another pass for.

    Raises:
        UnsupportedHostError: a site whose units the host's forward never shows.
        ValueError: a z that is not finite; site and unit are named.
    """
    batch_size = batch_size or rows_at_once(stream)
    digest = hashlib.sha256(str((stream.n_rows, stream.row_length)).encode())
    n_blocks, first_row = max(site.layer for site in observers) + 1, 0
    rows: Tensor = torch.empty(0, 0, dtype=torch.int64)
    counted: Tensor | None = None
    seen: set[str] = set()

    def reader(site: Site, observe: Observer) -> Any:
        def read(z: Tensor, hook: Any) -> None:
            seen.add(site.name)
            z = z.detach().float()
            # The sum is cheap; it can overflow, so look again before complaining.
            if not bool(torch.isfinite(z.sum())) and bool((bad := ~torch.isfinite(z).flatten(0, 1).all(0)).any()):
                raise ValueError(
                    f"z of {site.name}/{int(bad.nonzero()[0])} is not finite on this text; run the host in float32, or look for "
                    "the tokens at which its activations overflow"
                )
            observe(first_row, rows, z, counted)

        return read

    n_batches = -(-stream.n_rows // batch_size)
    hooks = [(site.hook_name, reader(site, observe)) for site, observe in observers.items()]
    with torch.no_grad(), ExitStack() as stack:
        batches = stream.batches(batch_size)
        for rows in tqdm(batches, desc="audit", total=n_batches, unit="batch", disable=not progress, leave=False):
            if not first_row:
                # Fused before anything is observed: a row may be run to see whether it may be.
                stack.enter_context(fused_attention(host, rows))
                stack.enter_context(host.model.hooks(fwd_hooks=hooks))
            seen.clear()
            counted = stream.counted(rows, first_row)
            host.run_blocks(rows, n_blocks)
            require_seen(observers, seen, "units")
            digest.update(rows.contiguous().numpy().data)
            first_row += len(rows)
    return digest.hexdigest()
