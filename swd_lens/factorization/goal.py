"""A goal in place of a sparsity: factors that move the model by at most so much, and whose effects take the fewest edges.

1. The text is divided: factors are fitted on the first three quarters of the calibration rows and judged on the others, or on
   text of the caller's (`divided`).
2. A path is a way to make factors: neurons with pruned weights, pruned singular vectors, SWD from its own side and from the
   neurons' side; or what the caller's preset and options say, where they say one (`paths_of`).
3. On a path the logarithm of the KL rises with the sparsity nearly in a straight line. Where it meets the goal is interpolated
   between what was measured (`next_sparsity`), in at most STEPS factorizations; the next path begins where the last one ended.
   Budgets of several matrices are equal, or keep the proportions of given ones (`scaled`; `allocate` makes some).
4. Of the paths' ends the one is taken whose effects on next tokens of the calibration text take the fewest edges
   (circuits/concentration.py).
5. The set's provenance["goal"] says what was tried (`FactorSet.tried`). With a folder every trial lies in it with what was
   measured until the search is over, so that an interrupted one goes on.
"""

import json
import math
import shutil
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
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.hosts.beginnings import text_for
from swd_lens.hosts.sites import Site, side_of_units
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks.streams import TokenStream, split_rows
from swd_lens.units.factors import FactorSet
from swd_lens.units.index import INDEX

HELD_OUT = 0.25  # of the rows, where no held-out text is given
STEPS = 7  # factorizations of a path at most
CLOSE, AIM = 0.9, 0.95  # shares of the goal: near enough to it, and what is aimed at
SPARSEST, DENSEST, FINEST = 0.98, 0.02, 0.005  # sparsities, and the least step between two
_SLOPE = 9.0  # of the logarithm of the KL over the sparsity, until two are measured (SmolLM2 and the embedded model: 6 to 15)
_ROWS, _CONTEXT = 64, 24  # of the text whose next tokens are looked at
_FARTHEST = 0.25  # that a first guess goes on from what was measured

# The paths; "as given" is the caller's.
PRUNED, SVD_PRUNED, SWD, FROM_NEURONS = "Neurons pruned", "SVD pruned", "SWD", "SWD from neurons"
GIVEN = "as given"
_TRIALS = "trials"


@dataclass(frozen=True)
class Goal:
    """How far a replacement may move the model on held-out text, in nats per prediction.

    Raises:
        ValueError: neither is given, or one is not above 0.
    """

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
    n = math.ceil(HELD_OUT * stream.n_rows)
    if n == stream.n_rows:
        raise TokenError(
            "tokens has a single row, of which nothing is left to judge a goal on; give more rows, or heldout_tokens="
        )
    fitted, judged = split_rows(stream, stream.n_rows - n)
    return CalibrationText(fitted, model), judged


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


def next_sparsity(points: Sequence[tuple[float, float]], start: float) -> float | None:
    """Where to look next for the largest sparsity that keeps the goal; None where it was found, or nothing is left to look at.

    Args:
        points: sparsities that were tried, and the logarithms of their excess over the goal (infinite: cannot be made).
        start: the first one to try.
    """
    if not points:
        return start
    aim = math.log(AIM)
    kept = max((point for point in points if point[1] <= 0), default=None)
    lost = min((point for point in points if point[1] > 0 and (kept is None or point[0] > kept[0])), default=None)
    if kept is not None and (kept[1] >= math.log(CLOSE) or kept[0] >= SPARSEST):
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
    folder: Path | None = None  # that trials lie in until the search is over
    asked: Mapping[str, Any] = field(default_factory=dict)  # what a search that goes on has to have been asked, as plain values
    trials: list[dict[str, Any]] = field(default_factory=list)  # a row for each factorization, in their order
    parts: StepCache = field(default_factory=lambda: StepCache(None))  # of the folder: what was measured of the trials
    dense: DenseCache = field(default_factory=DenseCache)  # what all trials share of the dense host's runs
    refused: BudgetError | None = None  # why the last sparsity that had too few edges could not be made

    def run(self, progress: bool) -> tuple[dict[str, Any], FactorSet | None]:
        """The row of the best end of a path, and its factors, if they were made now. Raises GoalError: nothing that was tried
        keeps the goal; BudgetError: or nothing could be made."""
        start, best, factors = 0.5, None, None
        title = f"factors of {self.goal}"
        with tqdm(total=len(self.paths) * STEPS, desc=title, unit="trial", disable=not progress, leave=False) as bar:
            for number, path in enumerate(self.paths, 1):
                end, made = self._end_of(path, start, bar)
                bar.update(number * STEPS - bar.n)
                if end is None:
                    continue
                start = end["s"]
                if len(self.paths) > 1:
                    ask = partial(self._text_edges, path, end["s"], made)
                    end |= self.parts.values(("text edges", path, f"{start:g}"), ask, dict)
                if best is None or end.get("text edges", 0.0) < best["text edges"]:
                    best, factors = end, made
        if best is None and not self.trials:
            assert self.refused is not None
            raise self.refused
        if best is None:
            least = min(self.trials, key=lambda trial: trial["excess"])
            raise GoalError(
                f"nothing that was tried keeps the goal ({self.goal}): nearest came KL {least['KL']:.3g}, CE delta "
                f"{least['CE delta']:+.3g} at s={least['s']:g}; give a larger goal, fewer sites, or exact units "
                "(swd_lens.train.baselines.neurons, svd), which leave the model as it is"
            )
        return best, factors

    def _text_edges(self, path: str, s: float, made: FactorSet | None) -> dict[str, Any]:
        """Edges that carry half of the effect on a next token of the calibration text."""
        rows = next(self.text.batches(_ROWS))
        context, exclude = max(1, min(_CONTEXT, rows.shape[1] - 2)), self.text.counting.ids or None
        found = concentration(self.model, made or self.made(path, s), rows, context=context, exclude=exclude)
        return {"text edges": found.edges}

    def _end_of(self, path: str, start: float, bar: Any) -> tuple[dict[str, Any] | None, FactorSet | None]:
        """The sparsest trial of a path that keeps the goal, and its factors, if they were made now."""
        points: list[tuple[float, float]] = []
        end: dict[str, Any] | None = None
        made: FactorSet | None = None
        while len(points) < STEPS and (s := next_sparsity(points, start)) is not None:
            s = round(s, 4)
            bar.set_postfix_str(f"{path} s={s:g}")
            row, factors = self._trial(path, s)
            points.append((s, math.inf if row is None else math.log(max(row["excess"], 1e-12))))
            if row is not None and row["excess"] <= 1 and (end is None or s > end["s"]):
                end, made = row, factors
            bar.update()
        return end, made

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
            n, kl_se = len(found.kl_rows), None
            mean = sum(found.kl_rows) / max(n, 1)
            if n > 1:
                kl_se = (sum((each - mean) ** 2 for each in found.kl_rows) / (n - 1) / n) ** 0.5
            row = {"method": path, "s": s, "edges": factors[0].edges, "KL": found.kl, "KL se": kl_se}
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


def settings_of_search(
    model: Any,
    sites: Sequence[Site],
    goal: Goal,
    texts: tuple[TokenStream, TokenStream],
    paths: Mapping[str, Mapping[str, Any]],
    how: Mapping[str, Any],
) -> dict[str, Any]:
    """Everything that decides a search, as a file gives it back."""
    text, heldout = texts
    asked = {
        "goal": str(goal),
        "sites": [site.name for site in sites],
        "exclude": list(text.counting.ids),
        "paths": {path: dict(options) for path, options in paths.items()},
        **how,
        "host_sha256": host_fingerprint(model, model.cfg),
        "tokens_sha256": text.fingerprint(),
        "heldout_sha256": heldout.fingerprint(),
    }
    return json.loads(json.dumps(asked, default=str))
