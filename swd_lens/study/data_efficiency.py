"""data_efficiency: how well a replacement does after how many tokens (paper §single-layer, app. original-vpd-kl-longtail).

1. SWD: an independent fit at every token count, on the first rows of the text.
2. A trained baseline: the checkpoints of one run; its tokens are those it went through, repeated ones counted again.
   Units that came from elsewhere: one point, at the tokens that they are said to have taken.
3. Of each: CE delta and KL against the dense host, and relMSE of the replaced output, on the same held-out text.
4. With out=: every point is written as soon as it is measured, and measured once.

Tokens are data used; they equate neither optimization steps nor FLOPs.
"""

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tqdm.auto import tqdm

from swd_lens.base._version import __version__
from swd_lens.base.files import plain, write_json
from swd_lens.circuits.fidelity import fidelity
from swd_lens.factorization.checkpoint import ResumeError, differences, host_fingerprint, tokens_fingerprint
from swd_lens.hosts import find_sites, host_of, require_no_dropout
from swd_lens.hosts.sites import Pattern, Site
from swd_lens.study.efficiency_methods import Candidate, Place, maker
from swd_lens.study.efficiency_result import DataEfficiency, Point
from swd_lens.tasks.text import TokenError, as_rows
from swd_lens.units import require_free

__all__ = ["TOKEN_COUNTS", "DataEfficiency", "Point", "data_efficiency"]

TOKEN_COUNTS = (1_024, 2_048, 4_096, 8_192, 16_384, 32_768, 65_536)
_WORDS = {"host_sha256": "the host", "heldout_sha256": "the held-out tokens"}


def data_efficiency(
    model: Any,
    site: Pattern,
    methods: Mapping[str, Any],
    *,
    heldout: Any,
    tokens: Any = None,
    token_counts: Iterable[int] = TOKEN_COUNTS,
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
        out: a JSON file that gets every point as soon as it is measured; `DataEfficiency.load` reads it at every moment. The
            same call again takes over what is there. Other methods and counts may be added: points that this call does
            not ask for stay in the file and are no part of its result. Single points are measured anew: nobody can say
            whether they are the same units.
        overwrite: start again, in place of what `out` holds.
        progress: show a bar over methods.

    Raises:
        TypeError: a method that is none of these.
        ValueError: no method, not one site, units of another site, no or bad token counts, or bad options for SWD; before any
            work, but for methods that are functions.
        TokenError, AttachError, UnknownSiteError, UnitSourceError, TrainError: bad text, host, site, units or folder.
            Also an `out` that is a folder, or a file of something else.
        ResumeError: `out` holds points of another host, site, held-out text or version, or of a method of the same name that
            was made otherwise.
    """
    place = Place(model, _one(model, site))
    held = _heldout(model, heldout)
    require_no_dropout(model)
    require_free(host_of(model), [place.site])
    if not methods:
        raise ValueError('nothing to measure: pass {"SWD": {"sparsity": 0.5}, "Transcoder": units, ...}')
    counts = list(token_counts)
    makers = {name: maker(name, given, place, tokens, counts) for name, given in methods.items()}
    made: dict[str, Any] = {}
    settings = {"model": str(model.cfg.model_name), "site": place.site.name, "swd_lens": __version__}
    settings = {**settings, "heldout_tokens": held.numel(), "methods": made}
    file = _File(None, {}, settings) if out is None else _File(Path(out), _recipe(place, held), settings, overwrite)
    points: list[Point] = []
    for name, candidates in tqdm(
        makers.items(), desc="data efficiency", unit="method", disable=not progress, leave=False
    ):
        for candidate in candidates():
            made[name] = dict(candidate.about)
            point = file.known(name, candidate)
            if point is None:
                point = _measured(name, candidate, place, held)
                file.add(point, candidate)
            points.append(point)
    return DataEfficiency(points, settings)


def _one(model: Any, pattern: Pattern) -> Site:
    found = find_sites(model, pattern)
    if len(found) != 1:
        raise ValueError(
            f"{pattern!r} names {len(found)} sites; data efficiency is measured at one matrix or one whole MLP"
        )
    return found[0]


def _heldout(model: Any, heldout: Any) -> Any:
    held = as_rows(heldout, model)
    if held.shape[1] < 2:
        raise TokenError("heldout needs rows of at least two tokens: each position predicts the next")
    return held


def _measured(name: str, candidate: Candidate, place: Place, held: Any) -> Point:
    units = candidate.make()
    found = fidelity(place.model, units, held)
    # Of a whole MLP what the MLP writes: its own output, or that of its last matrix.
    written = place.site if place.site.name in found.relmse else place.parts[-1]
    edges = sum(one.edges for one in units.values())
    return Point(name, candidate.tokens, candidate.kind, edges, found, found.relmse[written.name])


# ---------------------------------------------------------------------------------------------- the file


def _recipe(place: Place, held: Any) -> dict[str, Any]:
    """What decides every point, whatever the method."""
    return {
        "site": place.site.name,
        "host_sha256": host_fingerprint(place.model, place.model.cfg),
        "heldout_sha256": tokens_fingerprint(held),
        "swd_lens": __version__,
    }


class _File:
    """What `out` holds: points, and beside each what decides it."""

    def __init__(self, path: Path | None, recipe: Mapping[str, Any], settings: dict[str, Any], overwrite: bool = False):
        self.path, self.recipe, self.settings = path, dict(recipe), settings
        self.held: dict[tuple[str, int], tuple[Point, Any]] = {}
        self.methods: dict[str, Any] = {}
        if path is not None and path.is_dir():
            raise ValueError(f"out={str(path)!r} is a folder; give a file, such as {str(path / 'efficiency.json')!r}")
        if path is not None and path.exists() and not overwrite:
            self._read(path)

    def _read(self, path: Path) -> None:
        there = DataEfficiency.load(path)
        saved = json.loads(path.read_text(encoding="utf-8"))
        if changed := differences(saved.get("recipe", {}), self.recipe, _WORDS):
            raise self._refusal(f"holds another measurement: {'; '.join(changed)}")
        self.methods = dict(there.settings["methods"])
        for point, identity in zip(there.points, saved["identities"], strict=True):
            self.held[point.method, point.tokens] = point, identity

    def known(self, name: str, candidate: Candidate) -> Point | None:
        """The point, where it was measured before."""
        if (name, candidate.tokens) not in self.held or candidate.identity is None:
            return None
        point, identity = self.held[name, candidate.tokens]
        if changed := differences(identity or {}, _as_read(candidate.identity), {"tokens_sha256": "its tokens"}):
            raise self._refusal(f"holds {name!r} at {candidate.tokens:,} tokens, made otherwise: {'; '.join(changed)}")
        return point

    def add(self, point: Point, candidate: Candidate) -> None:
        """Write the point, and all before it."""
        self.held[point.method, point.tokens] = point, candidate.identity
        if self.path is None:
            return
        self.methods[point.method] = dict(candidate.about)
        found = DataEfficiency([one for one, _ in self.held.values()], {**self.settings, "methods": self.methods})
        identities = [identity for _, identity in self.held.values()]
        write_json(self.path, {"format": 1, **found.as_dict(), "recipe": self.recipe, "identities": identities})

    def _refusal(self, what: str) -> ResumeError:
        return ResumeError(
            f"{self.path} {what}. Measure as then to go on, give another file, or overwrite=True to start again"
        )


def _as_read(identity: Mapping[str, Any]) -> Any:
    """As JSON gives it back."""
    return json.loads(json.dumps(plain(identity)))
