"""data_efficiency: how well a replacement does after how many tokens (paper §single-layer, app. original-vpd-kl-longtail).

1. SWD: an independent fit at every token count, on the first rows of the text.
2. A trained baseline: the checkpoints of one run; its tokens are those it went through, repeated ones counted again.
   Units that came from elsewhere: one point, at the tokens that they are said to have taken.
   All of these are checked before any work, but for what functions give: that is checked when they were called.
3. Of each: CE delta and KL against the dense host, and relMSE of the replaced output, on the same held-out text.
   Points are measured a few at a time, so that the dense host runs once for them; fits on the same rows calibrate once.
4. With out=: every point is written as soon as it is measured, and measured once. Fits lie beside it until they are measured.

Tokens are data used; they equate neither optimization steps nor FLOPs.
"""

import hashlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from swd_lens.base import __version__
from swd_lens.base.errors import ResumeError, TokenError, legible, quoted
from swd_lens.base.files import plain
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.progress import tqdm
from swd_lens.base.sealed import readable
from swd_lens.base.step_cache import differences
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import require_writable_file, writing_file
from swd_lens.circuits.fidelity import fidelities
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.checkpoint import host_fingerprint, tokens_fingerprint
from swd_lens.factorization.estimate import estimate
from swd_lens.factorization.factorize import factorize
from swd_lens.hosts import find_sites, host_of, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.study.efficiency import CHECKPOINT, FIT, SINGLE, DataEfficiency, Point
from swd_lens.tasks.text import as_rows
from swd_lens.train.baselines.units import LearnedUnits
from swd_lens.units import Units, UnitSet, matrices_of, require_free
from swd_lens.units.coder import has_pair
from swd_lens.units.factors import Factors, FactorSet

TOKEN_COUNTS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
# Arguments of `factorize` that data_efficiency sets itself, or that would mix the fits of several counts.
_NOT_OPTIONS = ("model", "sites", "tokens", "out", "overwrite", "shard")
# Points of a method that are measured in one pass of the dense host.
_TOGETHER = 4
_FITS = ".fits"  # the ending of the folder beside `out`
_GO_ON = "Rerun with the original settings to resume, give another file, or overwrite=True to start again"
# Those that change where and how fast, not what: `estimate` does not know them.
_NOT_ESTIMATED = ("device", "workers", "threads", "progress")


@says_when_interrupted
@with_torch_defaults
def data_efficiency(
    model: Any,
    site: Pattern,
    methods: Mapping[str, Any],
    *,
    heldout: Any,
    tokens: Any = None,
    token_counts: Iterable[int] = TOKEN_COUNTS,
    checkpoints: Iterable[int] | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> DataEfficiency:
    """Replacement quality against tokens used, at one matrix or a whole MLP.

    Args:
        model: the host, with the site not attached.
        site: one matrix ("blocks.8.mlp_out") or a whole MLP ("blocks.8.mlp").
        methods: name -> one of
            a dict of options for `swd_lens.factorize` ({"sparsity": 0.5}): SWD, fitted anew for every count;
            a `LearnedUnits`, or the folder of one: its kept checkpoints;
            (units, tokens), whatever `swd_lens.attach` takes (a published SAELens transcoder, a FactorSet) and the tokens that
            it took: a single point;
            a function without arguments that gives one of the latter two when its turn comes.
        heldout: (rows, pos) ids that nothing was fitted on.
        tokens: (rows, pos) calibration ids for SWD; its fits take the first rows of them.
        token_counts: for SWD, rounded up to whole rows; counts beyond `tokens` become one fit on all of them.
        checkpoints: of a run of training, those that are measured where they were kept, and its last. None: all that were kept.
        out: a JSON file that gets every point as soon as it is measured; `DataEfficiency.load` reads it at every moment. The
            same call again takes over what is there. Other methods and counts may be added: points that this call does
            not ask for stay in the file and are no part of its result. Single points are measured anew: nobody can say
            whether they are the same units. Fits that are not measured yet lie beside it, in a folder that ends in .fits.
        overwrite: start again, in place of what `out` holds.
        progress: show a bar over methods.

    Raises:
        TypeError: a method that is none of these.
        ValueError: no method, not one site, units of another site, no or bad token counts, bad checkpoints, or bad options for
            SWD; before any work, but for methods that are functions.
        TokenError, AttachError, UnknownSiteError, UnitSourceError, TrainError: bad text, host, site, units or folder.
            Also an `out` that is a file of something else.
        ValueError: `out` ends in .fits.
        OSError: `out` is a folder or cannot be written (a FolderInUseError: another call writes it); before any work.
        ResumeError: `out` holds points of another host, site, held-out text or version, or of a method of the same name that
            was made otherwise.
    """
    measured_at, held = _checked(model, site, heldout, out)
    fits = None if out is None else Path(out).with_suffix(_FITS)
    if not methods:
        raise ValueError('nothing to measure: pass {"SWD": {"sparsity": 0.5}, "Transcoder": units, ...}')
    counts, of_runs = list(token_counts), None if checkpoints is None else list(checkpoints)
    if of_runs is not None and not _are_counts(of_runs):
        raise ValueError(f"checkpoints={quoted(of_runs)}: give whole numbers of tokens above 0, or None for all checkpoints")
    surface = Surface(model, measured_at, fits, of_runs)
    series = {name: _series(name, given, surface, tokens, counts) for name, given in methods.items()}
    settings = {
        "model": str(model.cfg.model_name),
        "site": surface.site.name,
        "swd_lens": __version__,
        "heldout_tokens": held.numel(),
        "host_sha256": host_fingerprint(model),
        "heldout_sha256": tokens_fingerprint(held),
        **standing_hooks(model),
    }
    points: list[Point] = []
    about: dict[str, Any] = {}
    with nullcontext() if out is None else writing_file(out, "data_efficiency"):
        if fits is not None and overwrite:
            shutil.rmtree(fits, ignore_errors=True)
        file = _File(None if out is None else Path(out), settings, overwrite)
        bar = tqdm(series.items(), desc="data efficiency", unit="method", disable=not progress, leave=False)
        for name, candidates in bar:
            waiting = candidates()
            while group := list(islice(waiting, _TOGETHER)):
                points += _measured(name, group, surface, held, file)
                about[name] = dict(group[-1].about)
                reached(f", {len(points)} points measured")
                if fits is not None:  # all of them are measured
                    shutil.rmtree(fits, ignore_errors=True)
    return DataEfficiency(points, {**settings, "methods": about})


def _checked(model: Any, site: Pattern, heldout: Any, out: str | Path | None) -> tuple[Site, Int[Tensor, "_rows _pos"]]:
    """The one site and the held-out rows, when `out` can be written and the host can be measured; see `data_efficiency`."""
    if out is not None:
        require_writable_file(out)
        if Path(out).suffix.lower() == _FITS:
            raise ValueError(
                f"out={legible(out)}: .fits is what the folder beside it ends in; name a file that ends otherwise, such as "
                "points.json"
            )
    sites = find_sites(model, site)
    if len(sites) != 1:
        raise ValueError(f"{quoted(site)} names {len(sites)} sites; data efficiency is measured at one matrix or one whole MLP")
    held = as_rows(heldout, model)
    if held.shape[1] < 2:
        raise TokenError("heldout needs rows of at least two tokens: each position predicts the next")
    require_no_dropout(model)
    require_free(host_of(model), sites)
    return sites[0], held


def _measured(name: str, group: Sequence["Candidate"], surface: "Surface", held: Any, file: "_File") -> list[Point]:
    """Measure candidates of a method in one pass of the dense host, but for those that were measured before."""
    known = {c.tokens: file.measured(name, c) for c in group}
    units = {c.tokens: c.make() for c in group if known[c.tokens] is None}
    measured = fidelities(surface.model, {str(tokens): each for tokens, each in units.items()}, held) if units else {}
    points = []
    for candidate in group:
        point = known[candidate.tokens]
        if point is None:
            found = measured[str(candidate.tokens)]
            # Of a whole MLP what the MLP writes: its own output, or that of its last matrix.
            written = surface.site.name if surface.site.name in found.relmse else surface.matrices[-1].name
            edges = sum(of_site.edges for of_site in units[candidate.tokens].values())
            point = Point(name, candidate.tokens, candidate.kind, edges, found, found.relmse[written], candidate.identity)
            file.add(point, candidate)
        points.append(point)
    return points


# ---------------------------------------------------------------------------------------------- methods


@dataclass(frozen=True)
class Candidate:
    """A point to be measured."""

    tokens: int
    kind: str
    about: Mapping[str, Any]  # how its method was made; plain values
    identity: Mapping[str, Any] | None  # what decides the replacement's weights, as JSON gives it back; None where nobody can say
    make: Callable[[], Mapping[str, Units]]  # gives the replacement, site name -> Units


# The points of one method, one after the other.
Series = Callable[[], Iterator[Candidate]]


@dataclass(frozen=True)
class Surface:
    """Where methods are measured: one matrix, or a whole MLP."""

    model: Any
    site: Site
    fits: Path | None = None  # the folder of fits that are not measured yet; None: they are not kept
    checkpoints: Sequence[int] | None = None  # tokens of a training's checkpoints that are measured, beside the last; None: all
    # how many rows -> those rows, with what was collected of them
    texts: dict[int, CalibrationText] = field(default_factory=dict)

    @property
    def matrices(self) -> list[Site]:
        """The matrix, or those of the MLP."""
        return matrices_of(host_of(self.model), self.site)


def _series(name: str, given: Any, surface: Surface, tokens: Any, counts: list[int]) -> Series:
    """The points of a method, in whatever form it was given."""
    if isinstance(given, Mapping) and not isinstance(given, LearnedUnits | FactorSet):
        units = (isinstance(each, Factors) or has_pair(each) or hasattr(each, "read") for each in given.values())
        if not any(units):
            return _fits(name, given, surface, tokens, counts)
    # A SAELens object is a module that can be called, too, and no function that makes units.
    if callable(given) and not isinstance(given, Mapping | nn.Module | Factors) and not has_pair(given):
        return lambda: _units_series(name, given(), surface, f"the function of {name!r} gave")()
    return _units_series(name, given, surface, f"{name!r} is")


def _units_series(name: str, given: Any, surface: Surface, whose: str) -> Series:
    """Learned units, a folder of them, or (units, tokens)."""
    if isinstance(given, str | Path):
        given = LearnedUnits.load(given, device=next(surface.model.parameters()).device)
    if isinstance(given, LearnedUnits):
        # One training run.
        if (replaced := given.provenance["replaces"]) != surface.site.name:
            raise ValueError(f"{quoted(name)} replaces {replaced}, not {surface.site.name}")
        about = {"method": given.provenance["method"], "settings": given.provenance["settings"]}
        # The same recipe on the same text gives the same bits; the file says which text.
        identity = json.loads(json.dumps(plain({**about, "tokens_sha256": given.provenance["tokens_sha256"]})))
        asked = set(given.checkpoints) if surface.checkpoints is None else {*surface.checkpoints, max(given.checkpoints)}
        counts = [n for n in given.checkpoints if n in asked]
        return lambda: (Candidate(n, CHECKPOINT, about, identity, lambda n=n: given.at(n)) for n in counts)
    if isinstance(given, tuple) and len(given) == 2:
        # Units as they are.
        source, tokens = given
        if not isinstance(tokens, int) or isinstance(tokens, bool) or tokens < 1:
            raise ValueError(
                f"{quoted(name)} says tokens={quoted(tokens)}: give the number of tokens that its units took, 1 or more"
            )
        units = UnitSet.of(surface.model, source)
        if set(units) not in ({surface.site.name}, {matrix.name for matrix in surface.matrices}):
            raise ValueError(f"{quoted(name)} replaces {', '.join(units)}, not {surface.site.name}")
        about = {"method": type(source).__name__, "units": {site: str(of_site) for site, of_site in units.items()}}
        return lambda: iter([Candidate(tokens, SINGLE, about, None, lambda: units)])
    if isinstance(given, Factors | Mapping | nn.Module) or has_pair(given):
        raise TypeError(
            f"{whose} a {type(given).__name__}, which does not say how many tokens it took; give both: (units, 60_000_000)"
        )
    raise TypeError(
        f"{whose} a {type(given).__name__}; give LearnedUnits (swd.baselines.transcoder(...)), their folder, a function "
        'that trains them, (units, tokens), or options for SWD, {"sparsity": 0.5}'
    )


def _fits(name: str, options: Mapping[str, Any], surface: Surface, tokens: Any, counts: list[int]) -> Series:
    """SWD, fitted to whole rows, at each count once."""
    if taken := [option for option in options if option in _NOT_OPTIONS]:
        raise ValueError(
            f"{quoted(name)} sets {legible(', '.join(map(repr, taken)))}: its fits take tokens= and token_counts= of "
            "data_efficiency, one fit for each count; leave it out"
        )
    if tokens is None:
        raise TokenError(f"{quoted(name)} is fitted by SWD, which needs tokens=")
    rows = as_rows(tokens, surface.model)
    if not counts or not _are_counts(counts):
        raise ValueError(f"token_counts={quoted(counts)}: give one or more whole numbers above 0")
    length = rows.shape[1]
    n_rows = sorted({min(-(-count // length), len(rows)) for count in counts})
    # A bad option is found before anything is fitted or trained.
    checked = {option: value for option, value in options.items() if option not in _NOT_ESTIMATED}
    estimate(surface.model, surface.matrices, tokens=n_rows[0] * length, **checked)
    about = {"method": "swd", **{option: _plain(value) for option, value in options.items()}}
    # Fits of several methods on the same rows calibrate once.
    calibration = {n: surface.texts.setdefault(n, CalibrationText(rows[:n], surface.model)) for n in n_rows}

    def fits() -> Iterator[Candidate]:
        for n in n_rows:
            text, named = rows[:n], {"progress": False, **options}
            identity = json.loads(json.dumps(plain({**about, "tokens_sha256": tokens_fingerprint(text)})))
            # A fit is kept until it is measured, in a folder named by what decides it.
            digest = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()
            kept = None if surface.fits is None else surface.fits / digest[:16]
            yield Candidate(
                text.numel(),
                FIT,
                about,
                identity,
                lambda n=n, kept=kept, named=named: factorize(
                    surface.model, surface.matrices, tokens=calibration[n], out=kept, **named
                ),
            )

    return fits


def _are_counts(counts: Iterable[Any]) -> bool:
    """Say whether all are whole numbers above 0."""
    return all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in counts)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(inner) for key, inner in value.items()}
    return value if isinstance(value, str | int | float | bool | None) else str(value)


# ---------------------------------------------------------------------------------------------- the file


class _File:
    """The points in `out`, which is written anew as soon as one is measured; without it, points are only collected."""

    def __init__(self, path: Path | None, settings: Mapping[str, Any], overwrite: bool):
        self.path, self.settings = path, settings
        self.points: dict[tuple[str, int], Point] = {}
        self.methods: dict[str, Any] = {}
        if path is None or overwrite or not path.exists():
            return
        held = DataEfficiency.load(path)
        with readable(path, DataEfficiency.WHAT):
            self.methods = dict(held.settings["methods"])
        then = {name: value for name, value in held.settings.items() if name != "methods"}
        now = json.loads(json.dumps(plain(settings)))  # as JSON gives it back
        if changed := differences(then, now):
            raise ResumeError(f"{path} holds another measurement: {'; '.join(changed)}. {_GO_ON}")
        self.points = {(point.method, point.tokens): point for point in held.points}

    def measured(self, name: str, candidate: Candidate) -> Point | None:
        """Give the point, where it was measured before."""
        point = self.points.get((name, candidate.tokens))
        if point is None or candidate.identity is None:
            return None
        if changed := differences(point.identity or {}, candidate.identity):
            raise ResumeError(
                f"{self.path} holds {quoted(name)} at {candidate.tokens:,} tokens, made otherwise: {'; '.join(changed)}. {_GO_ON}"
            )
        return point

    def add(self, point: Point, candidate: Candidate) -> None:
        """Write the point, and all before it."""
        self.points[point.method, point.tokens] = point
        self.methods[point.method] = dict(candidate.about)
        if self.path is not None:
            DataEfficiency([*self.points.values()], {**self.settings, "methods": self.methods}).save(self.path)
