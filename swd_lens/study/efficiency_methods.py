"""What may stand among the methods of `data_efficiency`, each as the points that it will give.

1. Options for `factorize`: SWD, fitted anew for every token count.
2. `LearnedUnits`, or the folder of some: the checkpoints of one training run.
3. (units, tokens): anything that `attach` takes, and how many tokens it took: one point, a published dictionary for example.
4. A function that gives 2 or 3 when its turn comes.

1 to 3 are checked before any work, 4 when it was called.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from swd_lens.factorization.checkpoint import tokens_fingerprint
from swd_lens.factorization.estimate import estimate
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import host_of, sites_of
from swd_lens.hosts.sites import Site, select_sites
from swd_lens.tasks.text import TokenError, as_rows
from swd_lens.train.baselines.units import LearnedUnits
from swd_lens.units import Units, as_units, by_site, matrices_of
from swd_lens.units.coder import has_pair
from swd_lens.units.factors import Factors, FactorSet

FIT, CHECKPOINT, SINGLE = "independent fit", "checkpoint", "single point"
# Arguments of `factorize` that data_efficiency sets itself, or that would mix the fits of several counts.
_NOT_OPTIONS = ("model", "sites", "tokens", "out", "overwrite", "shard")
# Those that change where and how fast, not what: `estimate` does not know them.
_NOT_ESTIMATED = ("device", "workers", "threads", "progress")


@dataclass(frozen=True)
class Candidate:
    """A point to be measured.

    Attributes:
        about: how its method was made; plain values.
        identity: what decides the replacement's weights, as plain values; None where nobody can say.
        make: gives the replacement, site name -> Units.
    """

    tokens: int
    kind: str
    about: Mapping[str, Any]
    identity: Mapping[str, Any] | None
    make: Callable[[], Mapping[str, Units]]


# A function: what it gives is known when it is called only.
Made = Callable[[], Iterator[Candidate]]


@dataclass(frozen=True)
class Place:
    """Where methods are measured: one matrix, or a whole MLP, whose matrices are `parts`."""

    model: Any
    site: Site

    @property
    def parts(self) -> list[Site]:
        return matrices_of(host_of(self.model), self.site)

    def holds(self, names: Iterable[str]) -> bool:
        """Whether these sites are this matrix, this MLP, or all of its matrices."""
        return set(names) in ({self.site.name}, {part.name for part in self.parts})


def maker(name: str, given: Any, place: Place, tokens: Any, token_counts: Iterable[int]) -> Made:
    """What makes the points of a method, one after the other.

    Raises:
        TypeError, ValueError, TokenError: see `data_efficiency`.
        TrainError: a folder that holds no learned units.
        UnitSourceError: units that do not fit.
    """
    if _is_options(given):
        return _fits(name, given, place, tokens, token_counts)
    if _is_function(given):
        return lambda: _points(name, given(), place, f"the function of {name!r} gave")()
    return _points(name, given, place, f"{name!r} is")


def _is_options(given: Any) -> bool:
    return isinstance(given, Mapping) and not isinstance(given, LearnedUnits | FactorSet) and not _holds_units(given)


def _holds_units(given: Mapping[Any, Any]) -> bool:
    return any(isinstance(one, Factors) or has_pair(one) or hasattr(one, "read") for one in given.values())


def _is_function(given: Any) -> bool:
    # A SAELens object is a module that can be called, too, and no function that makes units.
    return callable(given) and not isinstance(given, Mapping | nn.Module | Factors) and not has_pair(given)


def _points(name: str, given: Any, place: Place, whose: str) -> Made:
    """Learned units, a folder of them, or (units, tokens)."""
    if isinstance(given, str | Path):
        given = LearnedUnits.load(given, device=next(place.model.parameters()).device)
    if isinstance(given, LearnedUnits):
        return _checkpoints(name, given, place)
    if isinstance(given, tuple) and len(given) == 2:
        return _single(name, *given, place)
    if isinstance(given, Factors | Mapping | nn.Module) or has_pair(given):
        raise TypeError(
            f"{whose} a {type(given).__name__}, which does not say how many tokens it took; give both: (units, 60_000_000)"
        )
    raise TypeError(
        f"{whose} a {type(given).__name__}; give LearnedUnits (swd.baselines.transcoder(...)), their folder, a function that "
        'trains them, (units, tokens), or options for SWD, {"sparsity": 0.5}'
    )


# ---------------------------------------------------------------------------------------------- one run's checkpoints


def _checkpoints(name: str, units: LearnedUnits, place: Place) -> Made:
    if (replaced := units.provenance["replaces"]) != place.site.name:
        raise ValueError(f"{name!r} replaces {replaced}, not {place.site.name}")
    about = {"method": units.provenance["method"], "settings": units.provenance["settings"]}
    # The same recipe on the same text gives the same bits; the file says which text.
    identity = {**about, "tokens_sha256": units.provenance["tokens_sha256"]}

    def points() -> Iterator[Candidate]:
        for tokens in units.checkpoints:
            yield Candidate(tokens, CHECKPOINT, about, identity, lambda tokens=tokens: units.at(tokens))

    return points


# ---------------------------------------------------------------------------------------------- units as they are


def _single(name: str, units: Any, tokens: Any, place: Place) -> Made:
    if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
        raise ValueError(f"{name!r} says tokens={tokens!r}: give the number of tokens that its units took, 1 or more")
    given, host = by_site(units), host_of(place.model)
    sites = sites_of(host, given)
    if not place.holds(site.name for site in sites):
        raise ValueError(f"{name!r} replaces {', '.join(site.name for site in sites)}, not {place.site.name}")
    whole = {site.name: as_units(source, site) for site, source in zip(sites, _in_order(given, sites), strict=True)}
    about = {"method": type(units).__name__, "units": {one: str(its) for one, its in whole.items()}}
    return lambda: iter([Candidate(tokens, SINGLE, about, None, lambda: whole)])


def _in_order(given: Mapping[str, Any], sites: list[Site]) -> Iterator[Any]:
    """The source of each site, also where it is given under another name of the site."""
    for site in sites:
        yield next(source for name, source in given.items() if select_sites([site], name))


# ---------------------------------------------------------------------------------------------- SWD


def _fits(name: str, options: Mapping[str, Any], place: Place, tokens: Any, token_counts: Iterable[int]) -> Made:
    if taken := [option for option in options if option in _NOT_OPTIONS]:
        raise ValueError(
            f"{name!r} sets {', '.join(map(repr, taken))}: its fits take tokens= and token_counts= of data_efficiency, one fit "
            "for each count; leave it out"
        )
    rows, counts = _text(name, tokens, token_counts, place.model)
    # A bad option is found before anything is fitted or trained.
    estimate(
        place.model,
        place.parts,
        tokens=counts[0],
        **{option: value for option, value in options.items() if option not in _NOT_ESTIMATED},
    )
    about = {"method": "swd", **{option: _plain(value) for option, value in options.items()}}

    def points() -> Iterator[Candidate]:
        for count in counts:
            text = rows[: count // rows.shape[1]]
            identity = {**about, "tokens_sha256": tokens_fingerprint(text)}
            yield Candidate(count, FIT, about, identity, lambda text=text: _fit(place, text, options))

    return points


def _fit(place: Place, text: Tensor, options: Mapping[str, Any]) -> Mapping[str, Units]:
    return factorize(place.model, place.parts, tokens=text, **{"progress": False, **options})


def _text(name: str, tokens: Any, token_counts: Iterable[int], model: Any) -> tuple[Tensor, list[int]]:
    """The rows, and the counts to fit at: whole rows, each count once."""
    if tokens is None:
        raise TokenError(f"{name!r} is fitted by SWD, which needs tokens=")
    rows, counts = as_rows(tokens, model), list(token_counts)
    if not counts or any(not isinstance(n, int) or isinstance(n, bool) or n < 1 for n in counts):
        raise ValueError(f"token_counts={counts!r}: give one or more whole numbers above 0")
    length = rows.shape[1]
    return rows, sorted({min(-(-count // length) * length, rows.numel()) for count in counts})


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)
