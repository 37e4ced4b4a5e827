"""A goal in place of a sparsity: factors that move the model by at most so much, and whose effects take the fewest edges.

1. The text is divided: factors are fitted on the first three quarters of the calibration rows and judged on the others, or on
   text of the caller's (`divided`).
2. A path is a way to make factors: neurons with pruned weights, pruned singular vectors, SWD from its own side and from the
   neurons' side; or what the caller's preset and options say, where they say one (`paths_of`).
3. On a path the logarithm of the KL rises with the sparsity nearly in a straight line. Where it meets the goal is interpolated
   between what was measured (`next_sparsity`), in at most STEPS factorizations; the next path begins where the last one ended.
   Budgets of several matrices are equal, or keep the proportions of given ones (`scaled`; `allocate` makes some).
4. Of the paths' ends the one is taken whose effects on next tokens of the calibration text take the fewest edges
   (circuits/concentration.py). KL has a long tail: on the judged rows alone its standard error is up to a quarter of it. So this
   end is measured on fitted rows, too, WIDE tokens in all; their KL counts times how much larger the units' error is on the
   judged rows. The path's other trials are then seen in that light; where the end keeps the goal no more, or has room, the
   search goes on, and if another path's end takes fewer edges now, it is its turn.
5. The set's provenance["goal"] says what was tried (`FactorSet.tried`). With a folder every trial lies in it with what was
   measured until the search is over, so that an interrupted one goes on.
"""

import math
import shutil
import statistics
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from swd_lens.base.errors import BudgetError, GoalError, ResumeError, TokenError, legible
from swd_lens.base.progress import tqdm
from swd_lens.base.step_cache import CALL, FOLDER, StepCache
from swd_lens.base.writer import writing
from swd_lens.circuits.concentration import concentration
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fidelity import fidelity
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.hosts.beginnings import text_for
from swd_lens.hosts.sites import Site, side_of_units
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks.streams import TokenStream, split_rows
from swd_lens.units.factors import FactorSet
from swd_lens.units.index import INDEX

HELD_OUT = 0.25  # of the rows, where no held-out text is given
STEPS = 7  # factorizations of a path at most
CLOSE, AIM = 0.9, 0.95  # shares of the goal: near enough to it, and what is aimed at
LOOK, LOOKS = 0.75, 3  # the share near enough to look at more text; looks that add a factorization to STEPS
SPARSEST, DENSEST, FINEST = 0.98, 0.02, 0.005  # sparsities, and the least step between two
_SLOPE = 9.0  # of the logarithm of the KL over the sparsity, until two are measured (SmolLM2 and the embedded model: 6 to 15)
_ROWS, _CONTEXT = 64, 24  # of the text whose next tokens are looked at
_FARTHEST = 0.25  # that a first guess goes on from what was measured
WIDE = 16_384  # tokens, judged and fitted ones together, that what is taken is measured on
_MOST = math.log(4.0)  # that more text shifts the logarithms of what the judged rows say, at most

# The paths; "as given" is the caller's.
PRUNED, SVD_PRUNED, SWD, FROM_NEURONS = "Neurons pruned", "SVD pruned", "SWD", "SWD from neurons"
GIVEN = "as given"
_TRIALS = "trials"


@dataclass(frozen=True)
class Goal:
    """How far a replacement may move the model on held-out text, in nats per prediction. Raises ValueError: neither is given, or
    one is not above 0."""

    kl: float | None = None  # KL(dense || replaced) at most
    ce: float | None = None  # CE(replaced) - CE(dense) at most

    def __post_init__(self) -> None:
        for name, value in (("kl", self.kl), ("ce", self.ce)):
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ValueError(f"{legible(name)}={value}: a goal is a number of nats per prediction above 0, say kl=1e-3")
        if self.kl is None and self.ce is None:
            raise ValueError(f"kl={None}: a goal is a number of nats per prediction above 0, say kl=1e-3")

    def excess(self, measured: Mapping[str, Any]) -> float:
        """The larger of KL and CE delta over what they may be: at most 1 keeps the goal."""
        shares = [0.0]
        shares += [measured["KL"] / self.kl] if self.kl is not None else []
        shares += [measured["CE delta"] / self.ce] if self.ce is not None else []
        return max(shares)

    def __str__(self) -> str:
        parts = {"KL": self.kl, "CE delta": self.ce}
        return " and ".join(f"{name} at most {value:g}" for name, value in parts.items() if value is not None)


def divided(
    model: Any, tokens: Any, heldout: Any, *, exclude: Any = None, attention_mask: Any = None
) -> tuple[CalibrationText, TokenStream]:
    """Text to fit on and text to be judged on: the last quarter of the rows, where no other is given. Raises TokenError: no
    tokens, or bad ones; or a single row, and no held-out text."""
    if tokens is None:
        raise TokenError("a goal (kl= or ce=) needs tokens: factors are fitted on a part of the text and judged on another one")
    stream = text_for(model, tokens, exclude=exclude, attention_mask=attention_mask)
    if heldout is not None:
        fitted = stream if isinstance(stream, CalibrationText) else CalibrationText(stream, model)
        return fitted, text_for(model, heldout, exclude=exclude)
    known = stream.divisions if isinstance(stream, CalibrationText) else {}
    if stream.counting.key in known:
        return known[stream.counting.key]
    n = math.ceil(HELD_OUT * stream.n_rows)
    if n == stream.n_rows:
        raise TokenError(
            "tokens has a single row, of which nothing is left to judge a goal on; give more rows, or heldout_tokens="
        )
    fitted, judged = split_rows(stream, stream.n_rows - n)
    known[stream.counting.key] = CalibrationText(fitted, model), judged
    return known[stream.counting.key]


def fitted_rows(fitted: CalibrationText, judged: TokenStream) -> TokenStream | None:
    """The first fitted rows, so many that they are WIDE tokens with the judged ones; None where those are enough."""
    n = math.ceil((WIDE - judged.n_tokens) / judged.row_length)
    if n >= fitted.n_rows:
        return fitted
    return split_rows(fitted, n)[0] if n > 0 else None


def paths_of(sites: Sequence[Site], preset: str, units: Any, options: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Path -> preset and options of `factorize`, cheap ones first; one path where the caller says how factors are made."""
    given = {"preset": preset, "units": units, **options}
    if preset != DEFAULT_PRESET or units is not None or options:
        return {GIVEN: given}
    # An exact unit of a matrix without neurons is one of its inputs.
    neurons = {site.name: side_of_units(site.kind) for site in sites}
    return {
        PRUNED: {"preset": "pruned", "basis": neurons},
        SVD_PRUNED: {"preset": "svd_pruned"},
        SWD: {"basis": "paper"},
        FROM_NEURONS: {"basis": neurons},
    }


def scaled(sites: Sequence[Site], given: Mapping[str, float], sparsity: float) -> dict[str, float]:
    """Scale given sparsities to the edges that one sparsity for all would leave; each matrix keeps its share of them, and none
    is denser than DENSEST."""
    numel = {site.name: site.numel for site in sites}
    edges = sum((1 - given[name]) * n for name, n in numel.items())
    factor = (1 - sparsity) * sum(numel.values()) / edges
    return {name: max(1 - factor * (1 - given[name]), DENSEST) for name in numel}


def next_sparsity(points: Sequence[tuple[float, float]], start: float, close: float = CLOSE) -> float | None:
    """Where to look next for the largest sparsity that keeps the goal; None where it was found, or nothing is left to look at.

    points: sparsities that were tried, and the logarithms of their excess over the goal (infinite: cannot be made); start: the
    first one to try; close: the share of the goal that is near enough to it.
    """
    if not points:
        return start
    aim = math.log(AIM)
    kept = max((point for point in points if point[1] <= 0), default=None)
    lost = min((point for point in points if point[1] > 0 and (kept is None or point[0] > kept[0])), default=None)
    if kept is not None and (kept[1] >= math.log(close) or kept[0] >= SPARSEST):
        return None
    if kept is None and lost is not None and lost[0] <= DENSEST:
        return None
    if kept is not None and lost is not None:
        width = lost[0] - kept[0]
        if width <= FINEST:
            return None
        share = (aim - kept[1]) / (lost[1] - kept[1]) if math.isfinite(lost[1]) and math.isfinite(kept[1]) else 0.5
        return kept[0] + min(max(share, 0.1), 0.9) * width
    s, log = kept or lost or (start, 0.0)
    others = [p for p in points if p[0] != s and math.isfinite(p[1]) and math.isfinite(log)]
    nearest = min(others, key=lambda point: abs(point[0] - s), default=None)
    slope = _SLOPE if nearest is None else max((log - nearest[1]) / (s - nearest[0]), _SLOPE / 4)
    step = min(max((aim - log) / slope, -_FARTHEST), _FARTHEST)
    return min(max(s + step, DENSEST), SPARSEST)


@dataclass
class GoalSearch:
    """Search for the sparsest factors of every path that keep a goal (steps 3 and 4)."""

    model: Any
    goal: Goal
    paths: Mapping[str, Mapping[str, Any]]
    text: CalibrationText
    heldout: TokenStream
    # factors of a path's options at a sparsity, and, with a folder, the folder that they are written into
    make: Callable[[float, Mapping[str, Any], Path | None], FactorSet]
    wide: TokenStream | None = None  # fitted rows that the end of a path is measured on, too
    folder: Path | None = None  # that trials lie in until the search is over
    asked: Mapping[str, Any] = field(default_factory=dict)  # what a search that goes on has to have been asked, as plain values
    trials: list[dict[str, Any]] = field(default_factory=list)  # a row for each factorization, in their order
    parts: StepCache = field(default_factory=lambda: StepCache(None))  # of the folder: what was measured of the trials
    dense: DenseCache = field(default_factory=DenseCache)  # what all trials share of the dense host's runs
    refused: BudgetError | None = None  # why the last sparsity that had too few edges could not be made

    def run(self, progress: bool) -> tuple[dict[str, Any], FactorSet | None]:
        """The row of the best end of a path, and its factors, if they were made now. Raises GoalError: nothing that was tried
        keeps the goal; BudgetError: or nothing could be made."""
        ends: dict[str, dict[str, Any]] = {}
        starts, looked, start = {}, set(), 0.5
        factors: FactorSet | None = None  # of the cheapest end
        title = f"factors of {self.goal}"
        with tqdm(total=len(self.paths) * STEPS, desc=title, unit="trial", disable=not progress, leave=False) as bar:
            for number, path in enumerate(self.paths, 1):
                starts[path] = start
                end, made = self._end_of(path, start, bar, looks=False)
                bar.update(number * STEPS - bar.n)
                if end is not None:
                    ends[path], start = end, end["s"]
                    self._count_text_edges(path, end, made)
                    factors = made if end is _cheapest(ends) else factors
            # The cheapest end is measured on more text, until the cheapest is one that was.
            while ends and self.wide is not None and (best := _cheapest(ends))["method"] not in looked:
                path = best["method"]
                looked.add(path)
                end, made = self._end_of(path, starts[path], bar, looks=True, held=factors)
                del ends[path]
                if end is not None:
                    ends[path] = end
                    self._count_text_edges(path, end, made)
                factors = made if end is not None and end is _cheapest(ends) else None
        if not ends and not self.trials:
            assert self.refused is not None
            raise self.refused
        if not ends:
            least = min(self.trials, key=lambda trial: (trial["excess"] <= 1, trial["excess"]))
            raise GoalError(
                f"nothing that was tried keeps the goal ({self.goal}): nearest came KL {least['KL']:.3g}, CE delta "
                f"{least['CE delta']:+.3g} at s={least['s']:g}; give a larger goal, fewer sites, or exact units "
                "(swd_lens.train.baselines.neurons, svd), which leave the model as it is"
            )
        return _cheapest(ends), factors

    def _count_text_edges(self, path: str, end: dict[str, Any], made: FactorSet | None) -> None:
        """Write into an end's row how many edges carry half of the effect on a next token of the calibration text, where paths
        are compared by it."""

        def count() -> dict[str, Any]:
            rows = next(self.text.batches(_ROWS))
            context, exclude = max(1, min(_CONTEXT, rows.shape[1] - 2)), self.text.counting.ids or None
            factors = made or self.made(path, end["s"])
            return {"text edges": concentration(self.model, factors, rows, context=context, exclude=exclude).edges}

        if len(self.paths) > 1:
            end |= self.parts.values(("text edges", path, f"{end['s']:g}"), count, dict)

    def _end_of(
        self, path: str, start: float, bar: Any, *, looks: bool, held: FactorSet | None = None
    ) -> tuple[dict[str, Any] | None, FactorSet | None]:
        """The sparsest trial of a path that keeps the goal, and its factors, if they were made now. looks: whether it is measured
        on more text, too; held: factors of the end without looking, where they are there."""
        rows: dict[float, dict[str, Any] | None] = {}
        end: dict[str, Any] | None = None
        made: FactorSet | None = None
        last: FactorSet | None = None
        s, n, n_looks, shift = None, 0, 0, 0.0  # shift: of the logarithms of what the judged rows say, by the wider text

        def log(row: dict[str, Any] | None) -> float:
            return math.inf if row is None else _log(row["excess"]) + (0.0 if "excess judged" in row else shift)

        while True:
            points = [(s, log(row)) for s, row in rows.items()]
            kept = max((point[0] for point in points if point[1] <= 0), default=None)
            if kept is None or rows[kept] is not end:
                end, made = (None, None) if kept is None else (rows[kept], last if kept == s else None)
            close = CLOSE if n_looks or self.wide is None else LOOK
            s = next_sparsity(points, start, close) if n < STEPS + min(n_looks, LOOKS) else None
            if s is not None:
                s, n = round(s, 4), n + 1
                bar.set_postfix_str(f"{path} s={s:g}")
                rows[s], last = self._trial(path, s)
                bar.update()
            elif end is None or not looks or "excess judged" in end:
                return end, made
            else:  # by the judged rows nothing is left to look at: see whether more text says so, too
                bar.set_postfix_str(f"{path} s={end['s']:g}, on more text")
                measure = partial(self._wide_row, path, end, made if n_looks else made or held)
                end |= self.parts.values(("more text", path, f"{end['s']:g}"), measure, dict)
                n_looks += 1
                shift = min(max(_log(end["excess"]) - _log(end["excess judged"]), -_MOST), _MOST)

    def _wide_row(self, path: str, row: Mapping[str, Any], factors: FactorSet | None) -> dict[str, Any]:
        """What fitted and judged rows together say of the end of a path, in place of what its row says."""
        assert self.wide is not None
        factors = factors or self.made(path, row["s"])
        how: dict[str, Any] = {"dense": self.dense, "local": True}
        judged, fitted = (fidelity(self.model, factors, text, **how) for text in (self.heldout, self.wide))
        # Fitted rows flatter: by as much as the units' error there is smaller.
        ratios = [judged.local_relmse[site] / error for site, error in fitted.local_relmse.items() if error > 0]
        flattered = sum(ratios) / len(ratios) if ratios else 1.0
        share = fitted.n_predictions / (judged.n_predictions + fitted.n_predictions)
        ses = [(1 - share) * (_se(judged.kl_rows) or 0.0), share * flattered * (_se(fitted.kl_rows) or 0.0)]
        ce_ses = [(1 - share) * (judged.ce_delta_se or 0.0), share * (fitted.ce_delta_se or 0.0)]
        measured = {"KL": (1 - share) * judged.kl + share * flattered * fitted.kl, "KL se": math.hypot(*ses)}
        measured |= {"CE delta": (1 - share) * judged.ce_delta + share * fitted.ce_delta, "CE delta se": math.hypot(*ce_ses)}
        measured["excess"] = self.goal.excess(measured)
        return measured | {f"{name} judged": row[name] for name in ("KL", "CE delta", "excess")}

    def _trial(self, path: str, s: float) -> tuple[dict[str, Any] | None, FactorSet | None]:
        """Make and measure factors of a path at a sparsity, now or earlier; None where they have too few edges to be made."""
        for row in self.trials:
            if (row["method"], row["s"]) == (path, s):
                return row, None
        factors: list[FactorSet] = []

        def measured() -> dict[str, Any]:
            began = time.monotonic()
            factors.append(self.made(path, s))
            found = fidelity(self.model, factors[0], self.heldout, dense=self.dense)
            row = {"method": path, "s": s, "edges": factors[0].edges, "KL": found.kl, "KL se": _se(found.kl_rows)}
            row |= {"CE delta": found.ce_delta, "CE delta se": found.ce_delta_se}
            return row | {"excess": self.goal.excess(row), "seconds": round(time.monotonic() - began, 2)}

        try:
            row = self.parts.values(("trial", path, f"{s:g}"), measured, dict)
        except BudgetError as too_few_edges:
            self.refused = too_few_edges
            return None, None
        self.trials.append(row)
        return row, factors[0] if factors else None

    def made(self, path: str, s: float) -> FactorSet:
        """Factors of a path at a sparsity; with a folder those that lie there, where they do."""
        folder = None if self.folder is None else self.folder / _TRIALS / f"{path.replace(' ', '-')}-{s:g}"
        with warnings.catch_warnings():
            if self.trials:  # the first one has said it
                warnings.simplefilter("ignore")
            return self.make(s, self.paths[path], folder)

    # ------------------------------------------------------------------ files

    @contextmanager
    def held(self, overwrite: bool) -> Iterator[None]:
        """Hold the folder for this search, and take over the trials of an interrupted call. Raises ResumeError: it holds the
        trials of another search (every difference is named), or factors that were made without a goal."""
        if self.folder is None:
            yield
            return
        with writing(self.folder, "factorize"):
            if overwrite:
                shutil.rmtree(self.folder / _TRIALS, ignore_errors=True)
            elif (self.folder / INDEX).is_file() and not (self.folder / FOLDER / CALL).is_file():
                raise ResumeError(
                    f"{self.folder} holds something else: its factors were made without a goal; give another folder, or "
                    "overwrite=True to start again"
                )
            self.parts = StepCache(self.folder, self.asked, overwrite=overwrite)
            yield

    def saved(self, chosen: Mapping[str, Any], factors: FactorSet | None) -> FactorSet:
        """Make the set that was found, with what was tried in its provenance. A folder then holds it, without the factors of
        the trials; their measurements stay, so that the same call finds its way at once."""
        if factors is None:
            path, s = chosen["method"], chosen["s"]
            # Where no trials lie, an earlier call has finished: what the folder holds is the answer.
            finished = self.folder is not None and not (self.folder / _TRIALS).exists()
            factors = self.make(s, self.paths[path], self.folder) if finished else self.made(path, s)
        goal = {"kl": self.goal.kl, "ce": self.goal.ce, "heldout_tokens": self.heldout.n_counted}
        goal |= {"chosen": dict(chosen), "trials": list(self.trials)}
        found = FactorSet(dict(factors.items()), {**factors.provenance, "goal": goal})
        if self.folder is not None:
            found.save(self.folder)
            shutil.rmtree(self.folder / _TRIALS, ignore_errors=True)
        return found


def _cheapest(ends: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """The end whose effects take the fewest edges; of a single path there is no other."""
    return min(ends.values(), key=lambda end: end.get("text edges", 0.0))


def _log(excess: float) -> float:
    """The logarithm of an excess over the goal."""
    return math.log(max(excess, 1e-12))


def _se(rows: Sequence[float]) -> float | None:
    """Standard error of a mean over rows; None of a single one."""
    return statistics.stdev(rows) / len(rows) ** 0.5 if len(rows) > 1 else None
