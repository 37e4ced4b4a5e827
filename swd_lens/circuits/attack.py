"""attack: what a circuit still recovers where the units outside of it are ablated in part, at the worst.

1. A kept circuit has every outside unit at its reference activation. Partial ablation leaves outside unit i at
   reference + a_i (z - reference), 0 <= a_i <= 1, the same a_i on every prompt. The budget bounds the mean of a over the outside
   units that read and write; budget 0 is the circuit's own evaluation.
2. The adversary (`Adversary`) looks for the a of the lowest mean margin on validation prompts: projected gradient descent from
   several starts, all run together, the first of them a = 0, the circuit as it is evaluated. Of every point on the way the
   lowest is kept, those of smaller budgets among them.
3. On test prompts the circuit, the adversary's a, and random ones of the same budget are run together. A random one deals the
   adversary's own shares out among the outside units, so that budget and distribution are equal to the bit.
4. Recovered under attack is the lowest of what the circuit recovers by itself and under the adversary's a of this budget and of
   smaller ones: an adversary uses what it has found where it does harm, else it restores nothing. So it never is more than the
   circuit's own, it falls with the budget, and at budget 0 it is the circuit's own.
5. Rank p-value: (1 + how many of n random restorations leave a margin as low as the adversary's) / (n + 1), on test prompts and
   without the rule of 4. It is uniform where the adversary has learned nothing (tests/circuits/test_attack.py).

Every step of the descent, and the runs on test prompts, are parts of the call (base/step_cache.py): with `out`, the same call
after an interruption goes on behind the last finished one.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from swd_lens.base import __version__
from swd_lens.base.checks import bounded
from swd_lens.base.figures import new_figure, style
from swd_lens.base.fingerprints import host_fingerprint, splits_fingerprint
from swd_lens.base.interrupted import reached, says_when_interrupted
from swd_lens.base.progress import tqdm
from swd_lens.base.record import SavedRecord
from swd_lens.base.step_cache import StepCache
from swd_lens.base.surroundings import with_torch_defaults
from swd_lens.base.writer import writing
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.fast_forward import Masks
from swd_lens.circuits.interventions import InterventionRunner
from swd_lens.circuits.measure import Carried, Margins, does_not_carry, measured, surface_name
from swd_lens.circuits.null import ROUNDING
from swd_lens.circuits.scores import UnitScores
from swd_lens.hosts import host_of, require_gradients, require_no_dropout
from swd_lens.hosts.recording import standing_hooks
from swd_lens.tasks.task import Task, TaskSplit
from swd_lens.units import attach

BUDGET, STEPS, STARTS = 0.1, 20, 4
_FIRST_STEP = 0.5  # of a share; steps get shorter to the last
_SHOWN = 8  # units that a card names
_BISECTIONS = 50
FILE = "attack.json"


@dataclass(frozen=True, repr=False)
class Attack(SavedRecord):
    """A circuit under the worst partial ablation of its outside units, on one task.

    Attributes:
        rows: test prompts, one row per run: "run" ("circuit", "adversary", "random"), "budget", "restored" (the mean of a over
            the outside units), "recovered" and "sufficiency", each also "... low" and "... high" (measure.py), and "q keep" (mean
            margin, logits).
        shares: one row per budget and outside unit of which the adversary restores anything: "budget", "unit", "share" (a),
            largest first.
        task: the task's name.
        surface: the sites, as a sentence names them.
        q_dense, q_full, q_empty: mean test margin of the dense host, with all units, and with every unit at its reference
            activation, in logits.
        carried_se: standard error of q_full - q_empty, paired over prompts.
        units, edges: of the circuit; outside: how many units that read and write are not in it.
        settings: budgets, steps, starts, seed, n, ablation, splits and their sizes, the circuit's provenance.
        circuit: in memory alone.
    """

    WHAT: ClassVar[str] = "an attack"
    in_memory: ClassVar[tuple[str, ...]] = ("circuit",)
    derived: ClassVar[tuple[str, ...]] = ("recovered", "own", "p")

    rows: pd.DataFrame
    shares: pd.DataFrame
    task: str
    surface: str
    q_dense: float
    q_full: float
    q_empty: float
    carried_se: float
    units: int
    edges: int
    outside: int
    settings: Mapping[str, Any]
    circuit: Circuit | None = None

    @property
    def carried(self) -> Carried:
        """The units' part in the task: q_full - q_empty with its standard error."""
        return Carried(self.q_full - self.q_empty, self.carried_se, self.q_dense)

    @property
    def carries(self) -> bool:
        """Whether these units carry the task; where they do not, nothing is recovered of it, attacked or not."""
        return self.carried.enough

    @property
    def budgets(self) -> list[float]:
        """The budgets of the adversary, rising."""
        return sorted(self._run("adversary")["budget"].tolist())

    @property
    def own(self) -> float:
        """Recovered by the circuit itself; NaN where the surface does not carry the task."""
        return float(self._run("circuit")["recovered"].iloc[0])

    @property
    def recovered(self) -> float:
        """Recovered under attack, at the largest budget; NaN where the surface does not carry the task."""
        return self.recovered_at(self.budgets[-1])

    @property
    def p(self) -> float:
        """Rank p-value at the largest budget: whether the adversary does more harm than random restorations."""
        return self.p_at(self.budgets[-1])

    def recovered_at(self, budget: float | int) -> float:
        """Recovered under attack with one of the budgets; see point 4 of the module."""
        allowed = self.rows[(self.rows["run"] != "random") & (self.rows["budget"] <= budget)]
        return float(allowed["recovered"].min()) if self.carries else float("nan")

    def p_at(self, budget: float | int) -> float:
        """Rank p-value of the adversary with one of the budgets; NaN where the surface does not carry the task."""
        random = self._run("random", budget)
        return (1 + self._as_low(budget)) / (1 + len(random)) if self.carries else float("nan")

    def _run(self, run: str, budget: float | int | None = None) -> pd.DataFrame:
        rows = self.rows.loc[self.rows["run"] == run]
        return rows if budget is None else rows.loc[rows["budget"] == budget]

    def _as_low(self, budget: float | int) -> int:
        """How many random restorations leave as low a margin as the adversary's."""
        adversary = float(self._run("adversary", budget)["q keep"].iloc[0])
        return int((self._run("random", budget)["q keep"] <= adversary + ROUNDING * abs(self.q_full)).sum())

    def table(self) -> pd.DataFrame:
        """One row per budget: what is restored of it (mean share, and units by more than half), recovered by the circuit itself
        and under attack, the mean and the lowest of random restorations, how many of those are as low, and p."""
        rows = []
        for budget in self.budgets:
            random, shares = self._run("random", budget), self.shares
            by_half = int(((shares["budget"] == budget) & (shares["share"] > 0.5)).sum()) if len(shares) else 0
            row = {"budget": budget, "restored": float(self._run("adversary", budget)["restored"].iloc[0])}
            row |= {"restored units": by_half, "recovered": self.own, "under attack": self.recovered_at(budget)}
            row |= {"random mean": random["recovered"].mean(), "random lowest": random["recovered"].min()}
            rows.append(row | {"as low": self._as_low(budget), "p": self.p_at(budget)})
        return pd.DataFrame(rows)

    def plot(self):
        """Recovered against the budget: the circuit's own, under attack, and random restorations; a matplotlib Figure. Margins in
        logits where the surface does not carry the task."""
        figure, ((ax,),) = new_figure(width=4.6, height=2.8)
        of = "recovered" if self.carries else "q keep"
        budgets = [0.0, *self.budgets]
        own = float(self._run("circuit")[of].iloc[0])
        attacked = [own, *(float(self._run("adversary", budget)[of].iloc[0]) for budget in budgets[1:])]
        lowest = [min(attacked[: i + 1]) for i in range(len(attacked))]
        random = self._run("random")
        ax.axhline(own, linewidth=1.2, label="circuit", **style(0))
        ax.plot(budgets, lowest, marker="o", markersize=4, linewidth=1.4, label="under attack", **style(1))
        ax.plot(random["budget"], random[of], marker="o", markersize=3, label="random", **(style(2) | {"linestyle": ""}))
        ax.set(xlabel="budget: share of outside units restored", ylabel="recovered" if self.carries else "margin (logits)")
        ax.legend(fontsize=8, frameon=False)
        return figure

    def in_words(self) -> str:
        """One sentence: what is left of the circuit at the largest budget, or that the surface does not carry the task."""
        if not self.carries:
            carried, ablation = self.carried, self.settings.get("ablation")
            return does_not_carry(self.surface, self.task, carried, self.q_full, self.q_empty, ablation)
        return (
            f"{self.units:,} units with {self.edges:,} active edges recover {self.own:.0%} of {self.task}, and "
            f"{self.recovered:.0%} where up to {self.budgets[-1]:.3g} of the {self.outside:,} outside units are restored at the "
            f"worst (p = {self.p:.3g} beside random restorations)."
        )

    def __repr__(self) -> str:
        return f"Attack({self.in_words()})"

    def parts(self) -> tuple[Any, ...]:
        return self.plot(), self.table(), "Units that the adversary restores most:", self.shares.head(_SHOWN)


@says_when_interrupted
@with_torch_defaults
def attack(
    model: Any,
    factors: Any,
    task: Task | TaskSplit,
    circuit: Circuit,
    *,
    budget: float | int | Sequence[float] = BUDGET,
    steps: int = STEPS,
    starts: int = STARTS,
    n: int = 20,
    seed: int = 0,
    max_prompts: int = 128,
    ablation: str = "mean",
    batch_size: int = 256,
    tokens_per_forward: int = 16_384,
    dense: DenseCache | None = None,
    out: str | Path | None = None,
    overwrite: bool = False,
    progress: bool = False,
) -> Attack:
    """Restore outside units in part, such that a kept circuit recovers least (ours).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the circuit is of; any unit source that gradients pass.
        task: its validation split fits the adversary, its test split judges; a split alone does both, which favours the
            adversary.
        circuit: to be attacked.
        budget: how much of the outside units may be restored, as their mean share, from 0 to 1; or several.
        steps: of the adversary's descent, each one forward and one backward pass of all starts.
        starts: of it, the circuit as it is evaluated among them.
        n: random restorations at each budget; the smallest possible p is 1 / (n + 1).
        seed: of random starts and restorations.
        max_prompts: validation prompts used, the first of the split; what runs share is kept in memory for all of them.
        ablation, batch_size, tokens_per_forward, dense: see `swd_lens.evaluate`; passes with gradients have a quarter of the
            tokens at once.
        out: a folder for finished steps and attack.json; the same call goes on there after an interruption.
        overwrite: start again, in place of what `out` holds.
        progress: show a bar.

    Returns:
        Attack: recovered by itself and under attack at each budget; a sentence where the surface does not carry the task.

    Source: ours; partial ablation as in stochastic parameter decomposition (Bushnaq, Braun and Sharkey, arXiv:2506.20790), where
    masks of what is left out are drawn from 0 to 1.

    Raises:
        ValueError: a budget outside 0 .. 1, no step, start or random restoration; a circuit of other factors, or of every unit
            that reads and writes; a margin without gradient; and see `swd_lens.evaluate`.
        UnsupportedHostError: no gradient passes this host.
        ResumeError: `out` holds another attack; every difference is named.
        OSError: `out` cannot be written (a FolderInUseError: another call writes it).
    """
    budgets = _budgets(budget)
    for name, value in (("steps", steps), ("starts", starts), ("n", n), ("max_prompts", max_prompts)):
        bounded(name, value, 1)
    require_no_dropout(model)
    require_gradients(model)
    fitted_on, split = (task.validation, task.test) if isinstance(task, Task) else (task, task)
    fitted_on, scores, dense = fitted_on.first(max_prompts), circuit.scores, DenseCache() if dense is None else dense
    kept, valid = in_ranking(scores, circuit), valid_in_ranking(scores, circuit.edges)
    how: dict[str, Any] = {"batch_size": batch_size, "tokens_per_forward": tokens_per_forward, "dense": dense}
    settings = {"budgets": budgets, "steps": steps, "starts": starts, "n": n, "seed": seed, "ablation": ablation}
    settings |= {"fitted on": fitted_on.name, "n_fitted": len(fitted_on), "test_split": split.name, "n_test": len(split)}
    settings |= {"positions": scores.settings["positions"], "circuit": dict(circuit.provenance), **standing_hooks(model)}
    folder = None if out is None else Path(out)
    with nullcontext() if folder is None else writing(folder, "attack"), attach(model, factors) as attachment:
        if not bool((valid & ~kept).any()):
            raise ValueError(f"the circuit has all {int(valid.sum()):,} units that read and write: no other can be restored")
        parts = _parts(folder, model, attachment.factors.identities, circuit, (fitted_on, split), settings, overwrite)
        runner_on = partial(InterventionRunner, host_of(model), attachment, scores=scores, ablation=ablation, **how)
        # 1. Fit the adversary.
        descent: dict[str, Any] = {"steps": steps, "starts": starts, "seed": seed, "progress": progress, "parts": parts}
        found = Adversary(runner_on(split=fitted_on, keep=True), scores, valid, **descent).worst(kept, budgets)
        # 2. Judge it beside random restorations.
        result = _judged(runner_on, split, circuit, kept, valid & ~kept, found, settings, parts)
    if folder is not None:
        result.save(folder / FILE)
    return result


def _parts(
    folder: Path | None,
    model: Any,
    identities: Mapping[str, str],
    circuit: Circuit,
    splits: tuple[TaskSplit, TaskSplit],
    settings: Mapping[str, Any],
    overwrite: bool,
) -> StepCache:
    """The folder's finished steps: of these units, this circuit and these prompts."""
    if folder is None:
        return StepCache(None)
    question = {"swd_lens": __version__, "the units": identities, "the ranking": circuit.scores.ranking()}
    question |= {"the host": host_fingerprint(model), "prompts": splits_fingerprint(splits)}
    return StepCache(folder, question | {"units of the circuit": circuit.units, **settings}, overwrite=overwrite)


def _judged(
    runner_on: Callable[..., InterventionRunner],
    split: TaskSplit,
    circuit: Circuit,
    kept: Bool[Tensor, " unit"],
    may: Bool[Tensor, " unit"],
    found: Float[Tensor, "budget unit"],
    settings: Mapping[str, Any],
    parts: StepCache,
) -> Attack:
    """Run the empty circuit, the circuit, and by budget the adversary's shares (`found`) and n random restorations. may: the
    outside units."""
    scores, budgets, n = circuit.scores, settings["budgets"], settings["n"]
    dealt = torch.cat([torch.stack([of, *deal(of, may, n, settings["seed"] + i)]) for i, of in enumerate(found)])
    # Run 0 is the empty circuit, run 1 the circuit; then by budget the adversary and n random restorations.
    given = torch.cat([torch.zeros(2, len(kept)), dealt])
    sets = torch.cat([torch.zeros(1, len(kept), dtype=torch.bool), kept.expand(1 + len(dealt), -1)])

    def judged() -> tuple[dict[str, Tensor], dict[str, Any]]:
        runner = runner_on(split=split)
        outcome, whole = runner.run(len(given), lambda rows: partial_masks(scores, sets[rows], given[rows]))
        return {"runs": outcome.margins, "full": whole.margins[0], "dense": runner.dense().margins[0]}, {}

    margins = parts.tensors(("judged",), judged, lambda tensors, _: tensors)
    q_dense, full, empty, keep = margins["dense"], margins["full"], margins["runs"][0], margins["runs"][1:]
    carried = Carried.of(full, empty, float(q_dense.mean()))
    values = measured(Margins(keep, keep, full, empty, q_dense), carried, split.task)
    rows = pd.DataFrame({"run": ["circuit", *(["adversary", *["random"] * n] * len(budgets))]})
    rows["budget"] = [0.0, *(b for b in budgets for _ in range(1 + n))]
    rows["restored"] = (given[1:][:, may].double().mean(1)).tolist()
    columns = [f"{of}{end}" for of in ("recovered", "sufficiency") for end in ("", " low", " high")]
    rows = pd.concat([rows, values[[*columns, "q keep"]]], axis=1)
    shares, names = [], scores.ranking()
    for budget, of in zip(budgets, found, strict=True):
        order = torch.sort(of, descending=True, stable=True).indices.tolist()
        some = [i for i in order if float(of[i]) > 0]
        shares += [{"budget": budget, "unit": "/".join(map(str, names[i])), "share": float(of[i])} for i in some]
    return Attack(
        rows=rows,
        shares=pd.DataFrame(shares, columns=["budget", "unit", "share"]),
        task=split.task,
        surface=surface_name(scores.scores),
        q_dense=carried.q_dense,
        q_full=float(full.mean()),
        q_empty=float(empty.mean()),
        carried_se=carried.se,
        units=circuit.n_units,
        edges=circuit.n_edges,
        outside=int(may.sum()),
        settings=settings,
        circuit=circuit,
    )


def _budgets(budget: float | int | Sequence[float]) -> list[float]:
    """Budgets, each once, rising; a ValueError where one is none."""
    given = list(budget) if isinstance(budget, Sequence) else [budget]
    if not given:
        raise ValueError("budget= names nothing: pass a share such as 0.1, or several")
    for each in given:
        bounded("budget, a share of the outside units,", each, 0, 1, whole=False)
    return sorted({float(each) for each in given})


# ---------------------------------------------------------------------------------------------- the adversary

# Sets of units and shares are vectors over all units in the order of the ranking.


def in_ranking(scores: UnitScores, circuit: Circuit) -> Bool[Tensor, " unit"]:
    """Which units are in a circuit."""
    members = set(circuit.units)
    return torch.tensor([unit in members for unit in scores.ranking()])


def valid_in_ranking(scores: UnitScores, edges: Mapping[str, Int[Tensor, " _unit"]]) -> Bool[Tensor, " unit"]:
    """Which units read and write."""
    return torch.tensor([int(edges[site][unit]) > 0 for site, unit in scores.ranking()])


def partial_masks(scores: UnitScores, kept: Bool[Tensor, "run unit"], shares: Float[Tensor, "run unit"]) -> Masks:
    """site -> (run, unit), how far each unit is moved to its reference: not at all in the circuit, 1 - share outside of it."""
    moved = torch.where(kept, 0.0, 1.0 - shares.float())
    return {site: moved[:, ranks - 1] for site, ranks in scores.ranks().items()}


def deal(shares: Float[Tensor, " unit"], may: Bool[Tensor, " unit"], n: int, seed: int) -> list[Float[Tensor, " unit"]]:
    """These shares dealt out anew among the units that may be restored, n times: random restorations of the same budget."""
    generator, dealt = torch.Generator().manual_seed(seed), []
    values = shares[may]
    for _ in range(n):
        drawn = torch.zeros_like(shares)
        drawn[may] = values[torch.randperm(len(values), generator=generator)]
        dealt.append(drawn)
    return dealt


def project(shares: Float[Tensor, "run unit"], most: Float[Tensor, " run"]) -> Float[Tensor, "run _unit"]:
    """The nearest point with every share from 0 to 1 and a sum of at most `most`: all shares less one number, then cut."""
    inside = shares.clamp(0, 1)
    low, high = torch.zeros_like(most), shares.max(1).values.clamp(min=0)
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        fits = (shares - middle[:, None]).clamp(0, 1).sum(1) <= most
        low, high = torch.where(fits, low, middle), torch.where(fits, middle, high)
    return torch.where((inside.sum(1) <= most)[:, None], inside, (shares - high[:, None]).clamp(0, 1))


class Adversary:
    """Looks for the restoration of outside units that leaves a circuit the lowest mean margin on the runner's prompts. scores:
    whose ranking orders the units; valid: which units read and write, others are never restored; parts: what is finished of the
    descent; the others: see `attack`."""

    def __init__(
        self,
        runner: InterventionRunner,
        scores: UnitScores,
        valid: Bool[Tensor, " unit"],
        *,
        steps: int = STEPS,
        starts: int = STARTS,
        seed: int = 0,
        progress: bool = False,
        parts: StepCache | None = None,
    ):
        self.runner, self.scores, self.valid = runner, scores, valid
        self.steps, self.starts, self.progress = steps, starts, progress
        self.parts = StepCache(None) if parts is None else parts
        self.generator = torch.Generator().manual_seed(seed)

    def worst(self, kept: Bool[Tensor, " unit"], budgets: Sequence[float]) -> Float[Tensor, "budget unit"]:
        """The shares of the lowest margin found at each budget, rising; all zero where nothing is lower than the circuit."""
        may, best = self.valid & ~kept, torch.zeros(len(budgets), len(kept), dtype=torch.float64)
        if not bool(may.any()):
            return best
        most = torch.tensor(budgets, dtype=torch.float64).repeat_interleave(self.starts) * int(may.sum())
        drawn = torch.rand(len(most), len(kept), generator=self.generator, dtype=torch.float64)
        drawn[:: self.starts] = 0.0  # the circuit as it is
        lowest = torch.full((len(budgets),), torch.inf, dtype=torch.float64)
        at = {"shares": project(drawn * may, most), "lowest": lowest, "best": best}
        for step in tqdm(range(self.steps + 1), desc="attack", unit="step", disable=not self.progress, leave=False):
            taken = partial(self._step, step, kept, may, most, at)
            at = self.parts.tensors(("step", str(step)), lambda taken=taken: (taken(), {}), lambda tensors, _: dict(tensors))
            reached(f", {step + 1} of {self.steps + 1} steps of the adversary finished")
        lowest, best = at["lowest"], at["best"]
        for i in range(1, len(budgets)):  # a smaller budget's restoration is allowed here, too
            if lowest[i - 1] < lowest[i]:
                lowest[i], best[i] = lowest[i - 1], best[i - 1]
        return best

    def _step(
        self,
        step: int,
        kept: Bool[Tensor, " unit"],
        may: Bool[Tensor, " unit"],
        most: Float[Tensor, " run"],
        at: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """One step of the descent: the shares of every run, and of each budget the lowest margin and its shares so far."""
        shares, n_budgets = at["shares"], len(at["lowest"])
        sets = kept.expand(len(shares), -1)
        margins, by_site = self.runner.gradients(lambda rows: partial_masks(self.scores, sets[rows], shares[rows]), len(shares))
        gradient = torch.zeros_like(shares)
        for site, ranks in self.scores.ranks().items():
            gradient[:, ranks - 1] = -by_site[site]  # a share restores, a mask moves away
        of_budgets = margins.mean(1).view(n_budgets, self.starts)
        first = of_budgets.argmin(1)
        lower = of_budgets.min(1).values < at["lowest"]
        lowest = torch.where(lower, of_budgets.min(1).values, at["lowest"])
        there = shares.view(n_budgets, self.starts, -1)[torch.arange(n_budgets), first]
        best = torch.where(lower[:, None], there, at["best"])
        length = _FIRST_STEP * (1 - step / (self.steps + 1))
        # As many units as the budget restores whole move by a step or more, those of smaller gradients by less.
        harm = (-gradient * may).clamp(min=0).sort(descending=True).values
        scale = harm.gather(1, (most.ceil().long() - 1).clamp(min=0)[:, None]).clamp(min=1e-3 * harm[:, :1]).clamp(min=1e-30)
        shares = project((shares - (length * gradient / scale).clamp(-1, 1)) * may, most)
        return {"shares": shares, "lowest": lowest, "best": best}
