"""best_circuit: the cheapest faithful circuit of a task in one call, with the table of everything that was tried.

1. Where no site is named, a screen of the dense host takes the attention or MLP output that the task needs most.
2. Candidates, cheap ones first: exact units (neurons, singular vectors, those whitened by the text, of attention also head by
   head), then the paths of a goal (factorization/goal.py): pruned neurons and singular vectors, SWD from its own and from the
   neurons' side, each at the largest sparsity that was found to keep the goal on the first JUDGED tokens of the held-out text.
3. Rounds (successive halving): a candidate's units are scored on a part of the training prompts, and the prefix of the fewest
   edges that recovers enough is found on a part of the validation prompts, its grid refined around the threshold. The cheaper
   half goes on, to more prompts. An exact candidate stays.
4. The winner's circuit is refined by exchanges on training prompts until it holds on validation prompts (refine.py), and judged
   on test prompts, which nothing before has seen, beside random circuits of as many edges.
5. With a folder, each candidate and each measurement of a round is a finished step there (base/step_cache.py): the same call goes
   on behind the last one, its clock where it stood. With more `minutes` it looks further.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd

from swd_lens.base import __version__
from swd_lens.base.errors import legible, quoted
from swd_lens.base.fingerprints import splits_fingerprint
from swd_lens.base.interrupted import says_when_interrupted
from swd_lens.base.progress import duration, tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.step_cache import Key, StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits import Circuit, CostCurve, UnitScores, attribute, evaluate
from swd_lens.circuits.dense_cache import DenseCache, kept_scores
from swd_lens.circuits.evaluate import evaluate_circuits, prefix_grid
from swd_lens.circuits.fidelity import Fidelity, fidelity
from swd_lens.circuits.measure import RECOVERED, Threshold, surface_name
from swd_lens.circuits.null import CircuitNull, circuit_null, has_others
from swd_lens.circuits.refine import refine
from swd_lens.circuits.screen import screen
from swd_lens.factorization.calibration_text import CalibrationText
from swd_lens.factorization.checkpoint import host_fingerprint
from swd_lens.factorization.factorize import factorize
from swd_lens.factorization.goal import FROM_NEURONS, STEPS, SWD, divided, next_sparsity, paths_of
from swd_lens.hosts import find_sites
from swd_lens.solver import DEFAULT_PRESET
from swd_lens.tasks.split import TaskSplit
from swd_lens.tasks.streams import TokenStream, split_rows
from swd_lens.tasks.task import Task
from swd_lens.train.baselines.exact import EXACT, ExactControl, have_heads, svd
from swd_lens.units.factors import FactorSet
from swd_lens.units.unit_set import UnitSet

KL = 1e-3  # the goal, nats per prediction
FIRST = 0.5  # the first sparsity that is tried
OUTPUTS = ("attn_o", "mlp_out")
SHARES = (0.25, 0.5, 1.0)  # of prompts, round by round
FEWEST = 32  # prompts of a round, as far as there are so many
SMALL = 0.5  # of all edges: a larger circuit is none to speak of
BY_HEAD = ExactControl("SVD by head, whitened", partial(svd, whitened=True, by_head=True), of_text=True)
FILE, CANDIDATES, REFINED = "best.json", "candidates", "refined.safetensors"
_BEST = "the best"  # outcome of the winner
JUDGED = 4_096  # held-out tokens on which candidates are measured; the winner is on all
_BETWEEN = 8  # lengths tried between two of the grid's
# Of the time: until then candidates are made, rounds begun, and the winner is refined.
_MAKE, _CHOOSE, _REFINE = 0.4, 0.6, 0.8
_FROM_NEURONS = 4  # times SWD's own time, until one was made (1536 x 384)


@dataclass(frozen=True, repr=False, eq=False)
class BestCircuit(SavedRecord):
    """The cheapest circuit that was found, and what it was found among.

    Attributes:
        method: what its units are of, "Neurons pruned s=0.5".
        circuit: its units; factors: the replacement that they are of.
        curve: of the winner's ranking, prefixes chosen on validation prompts and measured on test prompts.
        test: one row of what the circuit recovers and drops on the test prompts, with intervals.
        null: the circuit beside random ones of as many edges, on the test prompts; None where it has all units.
        fidelity: of the replacement, on all of the held-out text.
        tried: a row per candidate, in the order in which they were made: method, seconds, the KL and CE delta (nats; 0 of exact
            ones), edges and units of the cheapest prefix on validation prompts, the share of prompts that these are of, what came
            of it.
        settings: everything else that was used; plain JSON values.
    """

    in_memory: ClassVar[tuple[str, ...]] = ("circuit", "factors")
    WHAT: ClassVar[str] = "a best circuit"

    method: str
    curve: CostCurve
    test: pd.DataFrame
    null: CircuitNull | None
    fidelity: Fidelity
    tried: pd.DataFrame
    settings: Mapping[str, Any]
    circuit: Circuit | None = None
    factors: FactorSet | None = None

    @property
    def n_edges(self) -> int:
        """Active edges of the circuit."""
        return int(self.test["edges"].iloc[0])

    @property
    def is_small(self) -> bool:
        """Say whether the circuit has at most half of all edges."""
        return self.n_edges <= SMALL * int(self.curve.rows["edges"].max())

    def table(self) -> pd.DataFrame:
        """A copy of `tried`."""
        return self.tried.copy()

    def in_words(self) -> str:
        """Say in sentences what was found."""
        row, all_edges = self.test.iloc[0], int(self.curve.rows["edges"].max())
        said = [
            f"{self.curve.task}: {self.n_edges:,} edges ({int(row['units']):,} units) of {self.method} at {self.curve.surface} "
            f"recover {row['recovered']:.0%} ({row['recovered low']:.0%} to {row['recovered high']:.0%}) of what it carries, on "
            f"test prompts; the replacement's KL is {self.fidelity.kl:.2g} (goal {self.settings['kl']:g})."
        ]
        prefix = self.tried.loc[self.tried["outcome"] == _BEST, "edges"].dropna()
        if len(prefix) and int(prefix.iloc[0]) < self.n_edges:
            said.append(
                f"A prefix of {int(prefix.iloc[0]):,} edges recovers as much as was asked on the validation prompts; the "
                "circuit is larger, so that other prompts do not fall short of it by chance."
            )
        if self.fidelity.kl > self.settings["kl"]:
            said.append(f"That is over the goal, which it kept on the first {JUDGED:,} tokens, where it was chosen.")
        if self.null is None:
            said.append("It has all units, so that no random circuits stand beside it.")
        else:
            said.append(f"Random circuits of as many edges do as well with p = {self.null.recovered_p:.2g}.")
        if not self.is_small:
            said.append(f"This is no small circuit: it has {self.n_edges / all_edges:.0%} of all edges.")
        if late := list(self.settings["not tried"]):
            said.append(f"Not tried for want of time (minutes={self.settings['minutes']:g}): {', '.join(late)}.")
        return " ".join(said)

    def save(self, folder: str | Path) -> Path:
        """Write best.json, the circuit and its factors into the folder; best.json last, so that where it is all is there.

        Raises:
            OSError: the folder cannot be written, or another call writes it.
        """
        assert self.circuit is not None and self.factors is not None
        folder = Path(folder)
        with writing(folder, "BestCircuit.save"):
            (folder / FILE).unlink(missing_ok=True)
            self.factors.save(folder / "factors")
            self.circuit.save(folder / "circuit.safetensors")
            super().save(folder / FILE)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> "BestCircuit":
        """Read what `save` wrote.

        Raises:
            FileNotFoundError: there is no best.json.
            ValueError: it, the circuit or the factors are damaged.
        """
        folder = Path(folder)
        found = super().load(folder / FILE)
        circuit, factors = Circuit.load(folder / "circuit.safetensors"), FactorSet.load(folder / "factors")
        return replace(found, circuit=circuit, factors=factors)

    def __repr__(self) -> str:
        return f"BestCircuit({self.curve.task}: {self.n_edges:,} edges of {self.method}, {len(self.tried)} candidates)"

    def title(self) -> str:
        return f"The best circuit of {self.curve.task} at {self.curve.surface}"

    def parts(self) -> tuple[Any, ...]:
        return self.in_words(), self.table(), self.curve.plot()


@says_when_interrupted
@with_torch_defaults
def best_circuit(
    model: Any,
    task: Task,
    sites: Any = "auto",
    *,
    tokens: Any,
    heldout_tokens: Any = None,
    kl: float = KL,
    recovered: float = RECOVERED,
    minutes: float = 10.0,
    seed: int = 0,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = True,
) -> BestCircuit:
    """Find the circuit of the fewest edges that does a task in a replacement which leaves the model what it is (ours).

        best = swd.best_circuit(model, swd.load_task("ioi", model), tokens=swd.text_tokens(16_384, split="train"))
        print(best.in_words())
        best.table()                                                   # everything that was tried

    Choice and judgement are apart: methods, sparsities and prefixes are chosen on training and validation prompts, and the
    result is measured on test prompts.

    Args:
        model: the host, with these sites not attached; left as it was.
        sites: a pattern, replaced together; "auto": the attention or MLP output that the task needs most.
        tokens: (rows, pos) text for calibration.
        heldout_tokens: (rows, pos) other text, on which the KL is measured, of candidates on its first 4,096 tokens, of the
            winner on all; None: the last quarter of `tokens`' rows, which are then no calibration.
        kl: the goal, nats per prediction: a replacement with a larger KL, or with a CE that is worse by more than as much beyond
            two standard errors, is out.
        recovered: how much of what the sites carry the circuit has to do.
        minutes: about what it may take, said in the bar before it begins. Two fifths are for making candidates (none is begun
            that would end later, by the time that the last one of its kind took; settings["not tried"] names them), rounds begin
            in the next fifth, the cheapest so far is refined in another, and judged. Where time is short, what is found depends
            on the machine.
        seed: of the random circuits beside it.
        out: a folder for what `BestCircuit.save` writes, and for candidates and measurements as they are finished. The same call
            goes on there after an interruption; time that it took before counts.
        overwrite: start again, in place of what `out` holds.
        progress: say what is tried, in a bar.

    Raises:
        ValueError: the host does not do the task, nothing that was tried carries it or recovers so much of it, a goal that is
            not above 0.
        UnknownSiteError, UnsupportedHostError, AttachError: see `swd_lens.factorize`.
        TokenError, TaskError: no text, text or prompts of another host, or a single row without held-out text.
        ResumeError: `out` holds the search of another host, task, text or goal; every difference is named.
        OSError: `out` cannot be written (a FolderInUseError: another call writes it).
    """
    for name, value in (("kl", kl), ("minutes", minutes)):
        if not value > 0:
            raise ValueError(f"{legible(name)}={quoted(value)}: give a number above 0")
    began = time.monotonic()
    calibration, heldout = divided(model, tokens, heldout_tokens)
    folder, how = None if out is None else Path(out), {"sites": sites, "kl": kl, "recovered": recovered, "seed": seed}
    with nullcontext() if folder is None else writing(folder, "best_circuit"):
        steps = StepCache(folder, {} if folder is None else _asked(model, task, calibration, heldout, how), overwrite=overwrite)
        end = ("finished", f"{minutes:g} minutes")  # best.json alone may be of a search that was overwritten since
        if folder is not None and end in steps and (earlier := _saved(folder, minutes)) is not None:
            return earlier
        n_few = max(1, JUDGED // heldout.row_length)
        few = split_rows(heldout, n_few)[0] if n_few < heldout.n_rows else heldout
        search = _Search(model, task, calibration, few, kl, Threshold("recovered", recovered), minutes, began, steps)
        # 1. Where: the sites that were named, or the output that the task needs most.
        names = search.sites = search.where(sites, progress)
        paths = paths_of(find_sites(model, names), DEFAULT_PRESET, None, {})
        said, total = f"best circuit at {surface_name(names)}, about {duration(60 * minutes)}", 1 + len(paths) + len(SHARES)
        with tqdm(total=total, desc=said, unit="step", disable=not progress, leave=False) as search.bar:
            # 2. Candidates: exact ones, and the sparsest of each path that keeps the goal.
            candidates = [*search.exact(), *search.ends(paths)]
            # 3. Rounds, in which the cheaper half goes on to more prompts.
            winner = search.cheapest(candidates)
        # 4. The winner's circuit on test prompts, and its replacement on all of the held-out text.
        best = search.judged(winner, heldout, {**how, "minutes": minutes, "sites": names}, seed, progress)
        if folder is not None:
            best.save(folder)
            steps.values(end, dict, dict)
        return best


def _saved(folder: Path, minutes: float) -> BestCircuit | None:
    """The result in a folder, where it is of a call with so many minutes."""
    held = BestCircuit.load(folder) if (folder / FILE).is_file() else None
    return held if held is not None and held.settings["minutes"] == minutes else None


def _asked(model: Any, task: Task, text: CalibrationText, heldout: TokenStream, how: Mapping[str, Any]) -> dict[str, Any]:
    """Everything but the minutes that decides a search."""
    asked = {"swd_lens": __version__, "host_sha256": host_fingerprint(model), "task": splits_fingerprint(task.splits)}
    asked |= {"tokens_sha256": text.fingerprint(), "heldout_sha256": heldout.fingerprint(), **how}
    return asked if isinstance(how["sites"], str) else asked | {"sites": [s.name for s in find_sites(model, how["sites"])]}


@dataclass
class _Candidate:
    """A replacement, and what the last round said of it."""

    method: str
    factors: FactorSet
    seconds: float
    fidelity: Fidelity | None  # on the held-out text; None of an exact one, until it has won
    path: str | None  # of a goal; None of an exact one
    of: float = SHARES[0]  # the share of prompts that its prefix is of
    scores: UnitScores | None = None
    row: Mapping[str, Any] | None = None  # the cheapest prefix on validation prompts; None where none recovers enough
    outcome: str = ""

    @property
    def edges(self) -> float:
        return math.inf if self.row is None else float(self.row["edges"])


@dataclass
class _Search:
    """The search, and what it has made so far."""

    model: Any
    task: Task
    text: CalibrationText
    heldout: TokenStream
    goal: float
    threshold: Threshold
    minutes: float
    began: float
    steps: StepCache
    sites: Sequence[str] = ()
    dense: DenseCache = field(default_factory=DenseCache)
    candidates: list[_Candidate] = field(default_factory=list)
    not_tried: list[str] = field(default_factory=list)
    bar: Any = None

    # ------------------------------------------------------------------ steps

    def _step(self, key: Key, make: Callable[[], Mapping[str, Any]]) -> Mapping[str, Any]:
        """Take a step's values; one that was finished by an earlier call puts the clock where it stood then."""

        def timed() -> dict[str, Any]:
            return {**make(), "elapsed": time.monotonic() - self.began}

        values = self.steps.values(key, timed, dict)
        self.began = min(self.began, time.monotonic() - values["elapsed"])
        return values

    def where(self, sites: Any, progress: bool) -> list[str]:
        """Names of the sites that were named, or of the output that the task needs most, by a screen of the dense host."""

        def names() -> dict[str, Any]:
            if not (isinstance(sites, str) and sites == "auto"):
                return {"sites": [s.name for s in find_sites(self.model, sites)]}
            how: dict[str, Any] = {"sites": list(OUTPUTS), "surfaces": {}, "n_prompts": FEWEST, "progress": progress}
            screened = screen(self.model, self.task, **how)
            if not (chosen := list(screened.choose().values())):
                raise ValueError(
                    f"the model does not do {legible(self.task.name)}: its mean margin on aligned prompts is "
                    f"{screened.tasks[self.task.name].margin:.2f}; name sites (--sites) to draw a graph all the same"
                )
            return {"sites": chosen[0]}

        return list(self._step(("sites",), names)["sites"])

    def _candidate(self, method: str, path: str | None, make: Callable[[], FactorSet]) -> _Candidate:
        """Make a candidate, or take it from the folder; of one that is not exact, its fidelity is measured."""
        folder = None if self.steps.folder is None else self.steps.folder.parent / CANDIDATES / method.replace(" ", "-")
        made: list[FactorSet] = []

        def work() -> dict[str, Any]:
            began = time.monotonic()
            made.append(make())
            measured = None if path is None else fidelity(self.model, made[0], self.heldout, dense=self.dense)
            if folder is not None:
                made[0].save(folder)
            return {"fidelity": None if measured is None else measured.as_dict(), "seconds": time.monotonic() - began}

        values = self._step(("candidate", method), work)
        factors = made[0] if folder is None else FactorSet.load(folder)
        measured = None if values["fidelity"] is None else Fidelity.from_dict(values["fidelity"])
        self.candidates.append(_Candidate(method, factors, values["seconds"], measured, path))
        return self.candidates[-1]

    # ------------------------------------------------------------------ candidates

    def exact(self) -> list[_Candidate]:
        """Make the exact candidates. They are W itself, so that text has nothing to say of them; it judges the winner."""
        controls = [EXACT[name] for name in ("neurons", "svd", "svd_whitened")]
        if have_heads(self.model, find_sites(self.model, list(self.sites))):
            controls.append(BY_HEAD)
        for control in controls:
            self.bar.set_postfix_str(f"{control.title}, exact units")  # some of them run the text through the host
            of_text = {"tokens": self.text} if control.of_text else {}
            self._candidate(control.title, None, partial(control.make, self.model, self.sites, **of_text))
        self.bar.update()
        return list(self.candidates)

    def ends(self, paths: Mapping[str, Mapping[str, Any]]) -> list[_Candidate]:
        """Make the sparsest candidate of each path that keeps the goal, each search beginning where the last one ended."""
        found, start = [], FIRST
        for path, options in paths.items():
            # Find the sparsest candidate of a path that keeps the goal, and its sparsity; None, and `start`, where there is
            # none.
            points: list[tuple[float, float]] = []
            made: dict[float, _Candidate] = {}
            while len(points) < STEPS and (s := next_sparsity(points, start)) is not None:
                s = round(s, 4)
                candidate = self._made(path, s, options)
                if candidate is None:
                    break
                made[s] = candidate
                f = candidate.fidelity
                assert f is not None
                # Over the goal: KL, or the CE delta less two standard errors. At most 1 keeps it.
                excess = max(f.kl, f.ce_delta - 2 * (f.ce_delta_se or 0.0)) / self.goal
                points.append((s, math.log(max(excess, 1e-12))))
            kept = [s for s, log in points if log <= 0]
            for s, candidate in made.items():
                if s not in kept:
                    candidate.outcome = "over the goal"
                elif s != max(kept):
                    candidate.outcome = "denser than the goal asks"
            end, start = (made[max(kept)], max(kept)) if kept else (None, start)
            found += [] if end is None else [end]
            self.bar.update()
        return found

    def _made(self, path: str, sparsity: float, options: Mapping[str, Any]) -> _Candidate | None:
        """Make a candidate, with its fidelity on the held-out text; None where there is no time for it."""
        method = f"{path} s={sparsity:g}"
        last = {each.path: each.seconds for each in self.candidates if each.path is not None}
        forecast = last.get(path, _FROM_NEURONS * last.get(SWD, 0.0) if path == FROM_NEURONS else 0.0)
        late = time.monotonic() + forecast > self.began + _MAKE * 60 * self.minutes
        if late and ("candidate", method) not in self.steps:
            self.not_tried.append(method)
            return None
        self.bar.set_postfix_str(method)
        how = {"sparsity": sparsity, "tokens": self.text, "progress": False, **options}
        return self._candidate(method, path, partial(factorize, self.model, self.sites, **how))

    # ------------------------------------------------------------------ rounds

    def cheapest(self, alive: list[_Candidate]) -> _Candidate:
        """Find the candidate whose circuit has the fewest edges on all validation prompts. Raises ValueError: none recovers
        enough."""
        for share in SHARES:
            if share > SHARES[0] and time.monotonic() > self.began + _CHOOSE * 60 * self.minutes:
                last = [*alive[:1], *(c for c in alive[1:] if c.path is None)][:2]
                for candidate in alive:
                    if candidate not in last:
                        candidate.outcome = f"more edges, {candidate.of:.0%} of prompts"
                share, alive = 1.0, last
            for candidate in alive:
                self.bar.set_postfix_str(f"{candidate.method}, one of {len(alive)}, on {share:.0%} of the prompts")
                if candidate.row is None or share > candidate.of:
                    self._measure(candidate, share)
            alive = self._better(alive, share)
            self.bar.update()
        if not alive:
            raise ValueError(
                f"nothing that was tried at {', '.join(self.sites)} recovers {self.threshold.value:g} of what it carries "
                f"of {legible(self.task.name)}: it does not carry the task, or no prefix reaches so much on validation "
                "prompts"
            )
        alive[0].outcome = _BEST
        return alive[0]

    def _measure(self, candidate: _Candidate, share: float) -> None:
        """Find the cheapest prefix on a share of the prompts."""
        candidate.of = share
        train, validation = (_part(split, share) for split in (self.task.train, self.task.validation))
        key = (candidate.method, f"{share:g}")
        score = partial(attribute, self.model, candidate.factors, train, dense=self.dense)
        candidate.scores = scores = kept_scores(self.steps, ("scores", *key), score, candidate.factors)

        def cheapest() -> dict[str, Any]:
            # The prefix of the fewest edges that reaches the threshold on these prompts, the grid refined once around it.
            look = partial(evaluate, self.model, candidate.factors, validation, scores, random_sets=0, dense=self.dense)
            row = look().row_of(self.threshold, "edges")
            lengths = [] if row is None else _between(int(row["units"]), scores.n_units)
            row = look(grid=lengths).row_of(self.threshold, "edges") if lengths else row
            return {"row": None if row is None else {name: int(row[name]) for name in ("units", "edges")}}

        candidate.row = self._step(("prefix", *key), cheapest)["row"]

    def _better(self, candidates: list[_Candidate], share: float) -> list[_Candidate]:
        """Take the cheaper half (in the end the cheapest), and an exact one."""
        kept = sorted((c for c in candidates if c.row is not None), key=lambda c: c.edges)
        n = 1 if share == 1.0 else math.ceil(len(kept) / 2)
        exact = [c for c in kept[n:] if c.path is None][:1] if share < 1.0 and all(c.path for c in kept[:n]) else []
        for candidate in candidates:
            if candidate.row is None:
                candidate.outcome = f"no prefix reaches {self.threshold}"
            elif not candidate.outcome and candidate not in (*kept[:n], *exact):
                candidate.outcome = f"more edges, {share:.0%} of prompts"
        return [*kept[:n], *exact]

    # ------------------------------------------------------------------ judgement

    def judged(
        self, winner: _Candidate, heldout: TokenStream, settings: Mapping[str, Any], seed: int, progress: bool
    ) -> BestCircuit:
        """Judge the winner's circuit on test prompts, and its replacement on all of the held-out text."""
        assert winner.scores is not None and winner.row is not None
        model, factors, scores = self.model, winner.factors, winner.scores
        length = int(winner.row["units"])
        grid = sorted({*prefix_grid(scores.n_units), *_between(length, scores.n_units), length})
        said = f"judge the circuit of {winner.method}"
        with tqdm(total=4, desc=said, unit="step", disable=not progress, leave=False) as bar:
            bar.set_postfix_str("prefixes on test prompts")
            # Without random sets beside each prefix: the circuit gets its own.
            how: dict[str, Any] = {"grid": grid, "seed": seed, "random_sets": 0, "dense": self.dense}
            curve = evaluate(model, factors, self.task, scores, **how)
            bar.update()
            circuit = self._refined(winner, length, progress)
            bar.update()
            bar.set_postfix_str("random circuits")
            beside: dict[str, Any] = {"circuit": circuit, "seed": seed, "dense": self.dense}
            null = circuit_null(model, factors, self.task, scores, **beside) if has_others(circuit) else None
            test = evaluate_circuits(model, factors, self.task.test, {"circuit": circuit}, dense=self.dense)
            bar.update()
            bar.set_postfix_str("held-out text")
            if winner.fidelity is None or heldout is not self.heldout:
                winner.fidelity = fidelity(model, factors, heldout)
            bar.update()
        tried = pd.DataFrame([self._row(each) for each in self.candidates])
        return BestCircuit(
            winner.method,
            curve,
            test,
            null,
            winner.fidelity,
            tried,
            {**settings, "seconds": time.monotonic() - self.began, "not tried": list(self.not_tried)},
            replace(circuit, provenance={**circuit.provenance, "chosen_by": "best_circuit", "method": winner.method}),
            factors,
        )

    def _refined(self, winner: _Candidate, length: int, progress: bool) -> Circuit:
        """Refine the winner's prefix of this length; where no time is left, it is the circuit."""
        scores = winner.scores
        assert scores is not None
        key = ("refined", winner.method, str(length), f"{self.minutes:g} minutes")
        file = None if self.steps.folder is None else self.steps.folder.parent / REFINED
        left = self.began + _REFINE * 60 * self.minutes - time.monotonic()
        if left <= 0 and key not in self.steps:
            self.not_tried.append("refining")
            units = UnitSet.of(self.model, winner.factors)
            return Circuit.of(units, scores, scores.ranking()[:length], kind="prefix")
        refined: list[Circuit] = []

        def work() -> dict[str, Any]:
            how = {"recovered": self.threshold.value, "seconds": left, "progress": progress}
            refined.append(refine(self.model, winner.factors, self.task, scores, **how).refined)
            if file is not None:
                refined[0].save(file)
            return {}

        self._step(key, work)
        return refined[0] if file is None else Circuit.load(file)

    def _row(self, candidate: _Candidate) -> dict[str, Any]:
        f, row = candidate.fidelity, candidate.row
        return {
            "method": candidate.method,
            "seconds": round(candidate.seconds, 1),
            "KL": 0.0 if f is None else f.kl,
            "CE delta": 0.0 if f is None else f.ce_delta,
            "edges": pd.NA if row is None else int(row["edges"]),
            "units": pd.NA if row is None else int(row["units"]),
            "of": candidate.of,
            "outcome": candidate.outcome,
        }


def _part(split: TaskSplit, share: float) -> TaskSplit:
    """The first share of the prompts, at least FEWEST."""
    return split.first(max(min(FEWEST, len(split)), math.ceil(share * len(split))))


def _between(length: int, n_units: int) -> list[int]:
    """Lengths between this one of the grid and the one before it, evenly; and itself."""
    before = max((k for k in prefix_grid(n_units) if k < length), default=0)
    steps = min(_BETWEEN, length - before)
    return sorted({before + round(i * (length - before) / steps) for i in range(1, steps + 1)}) if steps else []
