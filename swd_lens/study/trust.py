"""How far to trust a study's circuits: each beside its null, its worst case and the dense model, and one of them varied.

1. `trusted` asks three things of a circuit, on test prompts: do random circuits of as many edges recover as much (null.py), what
   is left of it where its outside units are partly restored at the worst (attack.py), and what does it recover in the dense
   model, whose error term stays (transfer.py).
2. `look_at_trust` does it for the cheapest circuit of SWD on every surface and task of a `Run`; measures each surface's tail of
   disagreement on text (disagreement.py), and has the units of one matrix varied (stability.py).
3. All of it is one section of the report: a verdict, and a table of each.

What a surface does not carry has no circuit, and its row says so.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
from jaxtyping import Int
from torch import Tensor

from swd_lens.base.checks import one_of
from swd_lens.base.progress import tqdm
from swd_lens.circuits.attack import attack
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.circuits.disagreement import QUANTILES, disagreement
from swd_lens.circuits.null import circuit_null
from swd_lens.circuits.transfer import dense_transfer
from swd_lens.study.run import Run
from swd_lens.study.section import ReportSection, SectionTable
from swd_lens.study.stability import stability
from swd_lens.study.stability_card import Stability
from swd_lens.tasks.task import Task, TaskSplit

DRAWS = 19  # random circuits, random restorations and noises: the smallest p is 1 / 20
STEPS, STARTS, PROMPTS = 8, 1, 48  # of an adversary that is weaker than the default of `attack`, in a twentieth of its time
BEYOND = 0.05  # a p below which a circuit is beyond its null
HALF = 0.5  # of what it recovers, that a circuit should keep at its worst
RUNS, NULLS = 6, 1  # of the card: each axis once

COLUMNS = ("recovered", "null p", "at the worst", "attack p", "error term kept", "gap p")
_WORDS = "blank: the surface does not carry the task, or no circuit of it recovers 0.9"


def trusted(
    model: Any,
    factors: Any,
    task: Task,
    circuit: Circuit,
    *,
    n: int = DRAWS,
    steps: int = STEPS,
    starts: int = STARTS,
    max_prompts: int = PROMPTS,
    seed: int = 0,
    dense: DenseCache | None = None,
) -> dict[str, float]:
    """Hold one circuit against its null, its worst case and the dense model, on the task's test prompts (ours).

    Args:
        model: the host, with these sites not attached.
        factors: the replacement that the circuit is of.
        circuit: of a surface that carries the task.
        n: random circuits, and random restorations; the smallest p is 1 / (n + 1).
        steps, starts, max_prompts: of the adversary, see `swd_lens.attack`; its prompts are of the commonest lengths.
        seed: of all draws.
        dense: see `swd_lens.evaluate`.

    Returns:
        A value for each of COLUMNS: "recovered" by the circuit; "null p", of random circuits of as many edges; "at the worst",
        recovered under attack at the budget `swd_lens.attack` has by default, and its "attack p"; recovered with the "error term
        kept", and the p of the gap.

    Raises:
        ValueError: see `swd_lens.circuit_null`, `swd_lens.attack` and `swd_lens.dense_transfer`.
    """
    null = circuit_null(model, factors, task, circuit.scores, circuit=circuit, n=n, seed=seed, dense=dense)
    how: dict[str, Any] = {"steps": steps, "starts": starts, "max_prompts": max_prompts}
    # A step of the adversary costs a pass for each length of prompts: of the commonest lengths they cost a third.
    fitted_on = replace(task, validation=_of_common_lengths(task.validation, max_prompts))
    worst = attack(model, factors, fitted_on, circuit, **how, n=n, seed=seed, dense=dense)
    transfer = dense_transfer(model, factors, task, circuit, seed=seed, dense=dense)
    kept = transfer.table().set_index("measure").loc["recovered"]
    values = (worst.own, null.recovered_p, worst.recovered, worst.p, float(kept["error kept"]), transfer.p)
    return dict(zip(COLUMNS, values, strict=True))


def _of_common_lengths(split: TaskSplit, n: int) -> TaskSplit:
    """At most n prompts, those whose length most prompts have."""
    lengths = [len(tokens) for tokens in split.tokens]
    common = Counter(lengths)
    order = sorted(range(len(split)), key=lambda i: (-common[lengths[i]], lengths[i], i))
    return split.at(sorted(order[:n]))


def look_at_trust(
    model: Any,
    run: Run,
    tasks: Sequence[Task],
    text: Int[Tensor, "_rows _pos"],
    *,
    vary: str | None = None,
    calibration_tokens: Int[Tensor, "_rows _pos"] | None = None,
    n: int = DRAWS,
    runs: int = RUNS,
    nulls: int = NULLS,
    out: str | Path | None = None,
    progress: bool = False,
) -> ReportSection:
    """Section "How far to trust this" for a run that has just been made: `replace(run, extras=[*run.extras, section])`.

    Args:
        model: the host of the run.
        run: with its curves' scores, as `swd_lens.run_study` returns it; a loaded one has none.
        tasks: of the run.
        text: held-out rows, for the tail of disagreement.
        vary: a surface of one matrix, named as its site; the units of its smallest circuit get a stability
            card, at their sparsity. None = no card.
        calibration_tokens: what those units are factorized on.
        n: random circuits, random restorations and noises beside each; the smallest p is 1 / (n + 1).
        runs, nulls: of the card.
        out: a folder that keeps the card's runs, see `swd_lens.stability`.
        progress: show bars.

    Raises:
        ValueError: a surface that the run does not have, or a card without text to factorize on; and see `trusted` and
            `swd_lens.stability`.
    """
    if vary is not None:
        one_of("vary", vary, run.comparisons)
        if calibration_tokens is None:
            raise ValueError("vary needs calibration_tokens: the text on which the units are factorized again")
    # 1. Every surface's and task's cheapest circuit of SWD; a row without numbers where there is none.
    by_name, dense = {task.name: task for task in tasks}, DenseCache()
    rows: list[dict[str, Any]] = []
    cells = [(surface, name) for surface, comparison in run.comparisons.items() for name in comparison]
    for surface, name in tqdm(cells, desc="trust", unit="circuit", disable=not progress, leave=False):
        rows.append({"surface": surface, "task": name})
        curves = run.comparisons[surface][name].curves
        ours = {r.method: r.factors for r in run.replacements if r.surface == surface and not r.control and r.method in curves}
        costs = {method: curves[method].cost_at() for method in ours if curves[method].carries}
        priced = {method: cost for method, cost in costs.items() if cost is not None}
        if priced:
            method = min(priced, key=lambda each: priced[each])
            circuit, factors = curves[method].circuit_at(), ours[method]
            rows[-1] |= {"method": method, "units": circuit.n_units, "edges": circuit.n_edges, "factors": factors}
            rows[-1] |= trusted(model, factors, by_name[name], circuit, n=n, dense=dense)
    # 2. The tail of each surface's sparsest replacement: quantiles of KL, beside that of noise, and its p.
    tails = []
    for surface in run.comparisons:
        replacement = run.sparsest(surface)
        tail = disagreement(model, replacement.factors, text, n=n, dense=dense)
        noise = float(tail.table().set_index(["slice", "of"]).loc[("all", "p99.9"), "noise mean"])
        tails.append((surface, replacement.method, *(tail.value(of) for of in QUANTILES), noise, tail.p()))
    # 3. One matrix varied.
    card = None
    smallest = min((row for row in rows if row["surface"] == vary and "edges" in row), key=lambda row: row["edges"], default=None)
    if smallest is not None:
        [factors] = smallest["factors"].values()
        how = {"sparsity": factors.settings["sparsity"], "n": runs, "nulls": nulls, "out": out, "progress": progress}
        card = stability(model, smallest["surface"], by_name[smallest["task"]], tokens=calibration_tokens, **how)
    return _section(rows, tails, card, n)


def _section(
    rows: Sequence[Mapping[str, Any]], tails: Sequence[tuple[Any, ...]], card: Stability | None, n: int
) -> ReportSection:
    names = ("surface", "task", "method", "units", "edges", *COLUMNS)
    circuits = pd.DataFrame(rows, columns=pd.Index(names)).astype({"units": "Int64", "edges": "Int64"})
    circuits["task"] = circuits["task"].str.replace("_", " ")
    noise = "KL of single predictions on held-out text, in nats: quantiles, and noise of equal relMSE and covariance"
    tables = [
        SectionTable.of(f"The cheapest circuit of SWD by surface and task, on test prompts; {_WORDS}", circuits, 3),
        SectionTable.of(noise, pd.DataFrame(tails, columns=pd.Index(("surface", "method", *QUANTILES, "noise p99.9", "p"))), 3),
    ]
    if card is not None:
        title = f"Stability card: {card.task.replace('_', ' ')} in {card.site}, {len(card.runs)} runs"
        lines = card.table().rename(columns={"null": "null runs"})
        tables.append(SectionTable.of(title, lines.assign(met=lines["met"].map({True: "yes", False: "no"})), 3))
    intro = (verdict_of(rows, card), *(paragraph.format(n=n, least=n + 1) for paragraph in _INTRO))
    return ReportSection("How far to trust this", intro, (), tuple(tables), "How far to trust this")


_INTRO = (
    "Null p: of random circuits of as many edges, how many recover as much (of {n}, the smallest p is 1/{least}). At the "
    "worst: what is left where an adversary, fitted on validation prompts, restores a tenth of the outside units in part; "
    "its p is beside random restorations. Error term kept: the same ablations in the dense model, whose error term stays; "
    "its p is of the gap, by sign flips over prompts.",
    "The tail says how far single predictions are from the dense model's, which a mean hides. Noise of the same size and "
    "covariance has the p99.9 beside it: below it the errors are kinder than chance, above it they fall on what matters.",
)


def verdict_of(rows: Sequence[Mapping[str, Any]], card: Stability | None) -> str:
    """Sum up in one or two sentences: circuits beyond their null, circuits that keep half at the worst, the card."""
    asked = [row for row in rows if "edges" in row]
    beyond = sum(row["null p"] <= BEYOND for row in asked)
    keep = sum(row["at the worst"] >= HALF * row["recovered"] for row in asked)
    said = (
        f"Of {len(asked)} circuits, {beyond} recover more than random circuits of their size (p ≤ {BEYOND:g}; no correction for "
        f"how many are asked), and {keep} keep half of what they recover under the worst partial ablation found."
        if asked
        else "No surface carries a task by a circuit that could be asked."
    )
    return said if card is None else f"{said} {card.verdict}"
