"""Whether the statistics of circuits do what they say, simulated on the embedded model.

    python -m tests.benchmarks.calibration --part coverage --task greater_than --site blocks.2.mlp_out
    python -m tests.benchmarks.calibration --part contents
    python -m tests.benchmarks.calibration --part null
    python -m tests.benchmarks.calibration --part refine --seeds 50 --sizes 600 200 200
    python -m tests.benchmarks.calibration --part admissible

SWD s=.75 of one mlp_out, 16,384 calibration tokens.

1. coverage: the margins of thousands of prompts are a population. Draws of 50, 100 and 200 of them with replacement: how often
   each prefix's intervals hold the population's value, and `crossing_interval` the cost at which its curve crosses a threshold.
2. contents: draws of names or years, then of prompts about each: how often intervals over prompts, and over contents, hold the
   mean of all contents.
3. null: 200 random circuits beside 19 others each; their p-values, ties broken at random, against the uniform distribution
   (Kolmogorov and Smirnov), and the p of the prefix at recovered 0.9.
4. refine: over seeds of the task's generator (other prompts, all three splits) how often circuits reach .9 on test prompts.
5. admissible: rankings by noise: how often a prefix is above the 95th percentile of 50 random sets.

Tests use the functions with smaller numbers (tests/circuits/test_measure.py, test_calibration.py).
"""

import argparse
import time
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from scipy.stats import kstest
from torch import Tensor

import swd_lens as swd
from swd_lens.circuits.circuit import Circuit
from swd_lens.circuits.evaluate import evaluate_circuits
from swd_lens.circuits.measure import (
    Carried,
    Margins,
    Threshold,
    by_content,
    contents_of,
    crossing_interval,
    measured,
    ratio_interval,
)
from swd_lens.circuits.null import ROUNDING, CircuitNull, _Pool
from swd_lens.circuits.scores import UnitScores
from swd_lens.units.unit_set import active_edges

VALUES = ("recovered", "sufficiency", "drop")
THRESHOLDS = (*(Threshold("recovered", of) for of in (0.5, 0.7, 0.8, 0.9, 0.95)), Threshold("sufficiency", 0.9))


def swd_of(model: Any, site: str) -> Any:
    tokens = swd.text_tokens(16_384, split="train")
    return swd.factorize(model, site, sparsity=0.75, tokens=tokens, progress=False)


# ---------------------------------------------------------------------------------------------- coverage


def population(curve: Any) -> tuple[Margins, Tensor]:
    """Every prompt's margins, and the edges of each prefix."""
    m = {name: values.double() for name, values in curve.margins.items()}
    costs = torch.tensor(curve.rows["edges"].tolist(), dtype=torch.float64)
    return Margins(m["keep"], m["ablate"], m["full"], m["keep"][0], m["dense"]), costs


def coverage(whole: Margins, costs: Tensor, n: int, draws: int, seed: int = 0) -> pd.DataFrame:
    """Per value and prefix, and per threshold's cost: the share of draws whose interval holds the population's.

    The prefixes of no unit and of all are left out where their value is a constant. Draws that do not carry the task give no
    interval, of `defined` do.
    """
    empty, full = whole.empty.mean(), whole.full.mean()
    keep, ablate = whole.keep.mean(1), whole.ablate.mean(1)
    truth = {"recovered": (keep - empty) / (full - empty), "sufficiency": keep / full, "drop": full - ablate}
    crossings = {threshold: crossing(threshold.contrast(whole), costs) for threshold in THRESHOLDS}
    hits = {name: torch.zeros(len(costs)) for name in VALUES} | {t: torch.zeros(1) for t in THRESHOLDS}
    defined = dict.fromkeys(hits, 0)
    generator = torch.Generator().manual_seed(seed)
    for _ in range(draws):
        at = torch.randint(len(whole.full), (n,), generator=generator)
        drawn = Margins(*(values[..., at] for values in vars(whole).values()))
        carried = Carried.of(drawn.full, drawn.empty, float(drawn.dense.mean()))
        rows = measured(drawn, carried, "task", warn=False)
        for name in VALUES:
            low, high = (torch.tensor(rows[f"{name} {end}"].to_numpy()) for end in ("low", "high"))
            defined[name] += not bool(low.isnan().all())
            hits[name] += (low <= truth[name]) & (truth[name] <= high)
        for threshold, cost in crossings.items():
            if carried.enough and cost is not None:
                low, high = crossing_interval(threshold.contrast(drawn), costs)
                defined[threshold] += 1
                hits[threshold] += low is not None and low <= cost and (high is None or cost <= high)
    found = []
    for name in VALUES:
        # Nothing kept recovers 0 and everything 1, whatever the prompts.
        inner = range(1, len(costs) - 1) if name == "recovered" else range(1 if name == "drop" else 0, len(costs))
        for i in inner if name != "sufficiency" else range(len(costs) - 1):
            found.append(
                (name, float(costs[i]), float(truth[name][i]), float(hits[name][i]) / max(1, defined[name]), defined[name])
            )
    for threshold, cost in crossings.items():
        if cost is not None:
            found.append(
                (
                    f"cost at {threshold}",
                    cost,
                    threshold.value,
                    float(hits[threshold]) / max(1, defined[threshold]),
                    defined[threshold],
                )
            )
    return pd.DataFrame(found, columns=["of", "edges", "truth", "coverage", "defined"])


def crossing(contrast: Tensor, costs: Tensor) -> float | None:
    """The least cost at which the curve of all prompts reaches the threshold, linear in log(1 + cost) between prefixes."""
    mean, logs = contrast.mean(1), costs.log1p()
    reached = (mean >= 0).nonzero()[:, 0]
    if not len(reached) or not int(reached[0]):
        return None
    i = int(reached[0])
    share = -mean[i - 1] / (mean[i] - mean[i - 1])
    return float((logs[i - 1] + share * (logs[i] - logs[i - 1])).expm1())


def coverage_over_contents(
    whole: Margins, contents: Sequence[str], n_contents: int, per_content: int, draws: int, seed: int = 0
) -> pd.DataFrame:
    """Coverage of what all contents recover on average, by intervals over prompts and over contents.

    Args:
        n_contents, per_content: of a draw, with replacement.
    """
    of = {content: torch.tensor([i for i, c in enumerate(contents) if c == content]) for content in dict.fromkeys(contents)}
    places = list(of.values())

    def mean(values: Tensor) -> Tensor:
        return torch.stack([values[..., at].mean(-1) for at in places]).mean(0)

    truth = (mean(whole.keep) - mean(whole.empty)) / (mean(whole.full) - mean(whole.empty))
    generator, hits = (
        torch.Generator().manual_seed(seed),
        {"prompts": torch.zeros(len(truth)), "contents": torch.zeros(len(truth))},
    )
    for _ in range(draws):
        chosen = torch.randint(len(places), (n_contents,), generator=generator).tolist()
        at = torch.cat([places[c][torch.randint(len(places[c]), (per_content,), generator=generator)] for c in chosen])
        part, over = whole.keep[:, at] - whole.empty[at], whole.full[at] - whole.empty[at]
        drawn = [i for i in range(n_contents) for _ in range(per_content)]  # a content drawn twice is two
        for name, (p, w) in {"prompts": (part, over), "contents": (by_content(part, drawn), by_content(over, drawn))}.items():
            low, high = ratio_interval(p, w)
            hits[name] += (low <= truth) & (truth <= high)
    table = pd.DataFrame({"recovered": truth.tolist(), **{f"over {name}": (h / draws).tolist() for name, h in hits.items()}})
    return table.iloc[1:-1]


# ---------------------------------------------------------------------------------------------- null


def random_circuits(factors: Any, scores: UnitScores, n_units: int, n: int, best: float, seed: int = 0) -> list[Circuit]:
    """Circuits of so many units, of the best share of the ranking's valid units, all equally likely."""
    edges = active_edges(factors)
    valid = [(site, unit) for site, unit in scores.ranking() if int(edges[site][unit])]
    pool, generator = valid[: int(best * len(valid))], torch.Generator().manual_seed(seed)
    chosen = [torch.randperm(len(pool), generator=generator)[:n_units].tolist() for _ in range(n)]
    return [Circuit(tuple(pool[i] for i in sorted(of)), scores, edges, {"kind": "random"}) for of in chosen]


def p_values(
    model: Any, factors: Any, split: Any, circuits: Sequence[Circuit], match: str, n: int = 19, seed: int = 0
) -> pd.DataFrame:
    """p of each circuit beside n others, for both measures: as `CircuitNull` gives it, and with ties broken at random.

    All circuits are judged together; what is drawn and how p is taken are `circuit_null`'s own.
    """
    generator, named = torch.Generator().manual_seed(seed), {}
    for i, circuit in enumerate(circuits):
        pool = _Pool.of(circuit, match)
        named[f"{i}"] = circuit
        for j in range(n):
            named[f"{i} {j}"] = Circuit(pool.draw(generator), circuit.scores, circuit.edges, {"kind": "random"})
    rows = evaluate_circuits(model, factors, split, named)
    q_full = float(rows["drop"].iloc[0] + rows["q ablate"].iloc[0])
    found = []
    for i in range(len(circuits)):
        null = CircuitNull(rows.iloc[i * (n + 1) : (i + 1) * (n + 1)].reset_index(drop=True), split.task, q_full, {})
        row: dict[str, float] = {"recovered": null.recovered_p, "drop": null.drop_p}
        for of, column in (("recovered", "q keep"), ("drop", "drop")):
            values = null.rows[column].to_numpy()
            better = int((values[1:] > values[0] + ROUNDING * abs(q_full)).sum())
            as_good = round(row[of] * (n + 1)) - 1
            row[f"{of} u"] = (better + float(torch.rand(1, generator=generator)) * (1 + as_good - better)) / (n + 1)
        found.append(row)
    return pd.DataFrame(found)


def uniformity(p: pd.DataFrame) -> dict[str, float]:
    """Per measure the p-value of Kolmogorov and Smirnov's test, and how many are at most .05."""
    return {
        **{f"KS {of}": float(kstest(p[f"{of} u"], "uniform").pvalue) for of in ("recovered", "drop")},
        **{f"{of} <= .05": float((p[of] <= 0.05 + 1e-9).mean()) for of in ("recovered", "drop")},
    }


# ---------------------------------------------------------------------------------------------- refine, admissible


def refinements(model: Any, factors: Any, name: str, seeds: Sequence[int], sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Per seed of the task: edges and what is recovered on test prompts, of the refined circuit, of the prefix beside it, and
    of the one that `cost_at` prices."""
    for seed in seeds:
        n = dict(zip(("n_train", "n_validation", "n_test"), sizes, strict=True))
        task = swd.load_task(name, model, seed=seed, **n)
        scores = swd.attribute(model, factors, task)
        begun = time.process_time()
        found = swd.refine(model, factors, task, scores)
        seconds = time.process_time() - begun
        curve = swd.evaluate(model, factors, task, scores, random_sets=0)
        row = curve.row_at()
        edges = {
            "refined": found.refined.n_edges,
            "prefix": found.prefix.n_edges,
            "cost_at": row["edges"] if row is not None else None,
        }
        test = {"prefix": found.test["recovered"][0], "refined": found.test["recovered"][1]}
        test["cost_at"] = row["recovered"] if row is not None else None
        yield {"seed": seed, **edges, **{f"{k} test": v for k, v in test.items()}, "seconds": seconds}


def admissible(model: Any, factors: Any, task: Any, scores: UnitScores, rankings: int, grid: Sequence[int]) -> dict[str, float]:
    """Of rankings by noise: how often a single prefix, and how often any of the grid, is above the random sets' percentile."""
    single = anything = 0
    for seed in range(rankings):
        generator = torch.Generator().manual_seed(seed)
        noise = {site: torch.rand(len(s), generator=generator) for site, s in scores.scores.items()}
        ranking = UnitScores(noise, scores.means, scores.settings)
        curve = swd.evaluate(model, factors, task, ranking, grid=grid, seed=seed)
        first = curve.validation.loc[curve.validation["units"] == min(grid)].iloc[0]
        single += bool(first["drop"] > first["random drop"])
        anything += curve.smallest_admissible() is not None
    return {"shortest": single / rankings, "any": anything / rankings}


# ---------------------------------------------------------------------------------------------- by hand


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", choices=("coverage", "contents", "null", "refine", "admissible"), required=True)
    parser.add_argument("--task", default="greater_than")
    parser.add_argument("--site", default="blocks.3.mlp_out")
    parser.add_argument("--draws", type=int, default=2000)
    parser.add_argument("--seeds", type=int, default=50)
    parser.add_argument("--sizes", type=int, nargs=3, default=(600, 200, 200))
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    model = swd.load_default_model()
    factors = swd_of(model, args.site)
    for table in PARTS[args.part](model, factors, args):
        print(table if isinstance(table, dict) else table.round(3).to_string(index=False), flush=True)


def _population_of(model: Any, factors: Any, args: argparse.Namespace) -> tuple[Margins, Tensor, list[str]]:
    task = swd.load_task(args.task, model, n_train=600, n_validation=50, n_test=3000)
    curve = swd.evaluate(model, factors, task.test, swd.attribute(model, factors, task), random_sets=0)
    return *population(curve), contents_of(task.test)


def _coverage(model: Any, factors: Any, args: argparse.Namespace) -> Iterator[Any]:
    whole, costs, _ = _population_of(model, factors, args)
    for n in (50, 100, 200):
        yield coverage(whole, costs, n, args.draws).assign(prompts=n)


def _contents(model: Any, factors: Any, args: argparse.Namespace) -> Iterator[Any]:
    whole, _, contents = _population_of(model, factors, args)
    n = min(60, len(set(contents)))
    yield coverage_over_contents(whole, contents, n, 4, args.draws)


def _null(model: Any, factors: Any, args: argparse.Namespace) -> Iterator[Any]:
    task = swd.load_task(args.task, model, n_train=300, n_validation=100, n_test=40)
    for name, units in {"SWD": factors, "neurons": swd.baselines.neurons(model, args.site)}.items():
        scores = swd.attribute(model, units, task)
        for match in ("edges", "score"):
            for n_units in (4, 16, 64):
                # All of the top half would be one circuit.
                for best in (1.0, 0.5) if n_units * 4 <= scores.n_units else (1.0,):
                    circuits = random_circuits(units, scores, n_units, 200, best)
                    p = p_values(model, units, task.test, circuits, match)
                    yield {"units": name, "match": match, "size": n_units, "of the best": best, **uniformity(p)}
            null = swd.circuit_null(model, units, task, scores, n=99, match=match)
            yield {
                "units": name,
                "match": match,
                "prefix": null.circuits[0].n_units,
                "recovered p": null.recovered_p,
                "drop p": null.drop_p,
            }


def _refine(model: Any, factors: Any, args: argparse.Namespace) -> Iterator[Any]:
    rows = []
    for row in refinements(model, factors, args.task, range(args.seeds), args.sizes):
        rows.append(row)
        yield row
    table = pd.DataFrame(rows)
    yield {f"{name} reaches .9": float((table[f"{name} test"] >= 0.9).mean()) for name in ("refined", "prefix", "cost_at")}
    yield table.median(numeric_only=True).to_dict()


def _admissible(model: Any, factors: Any, args: argparse.Namespace) -> Iterator[Any]:
    task = swd.load_task(args.task, model, n_train=300, n_validation=100, n_test=40)
    scores = swd.attribute(model, factors, task)
    for k in (1, 4, 16):
        yield {"shortest prefix": k, **admissible(model, factors, task, scores, 100, [k])}
    yield {"shortest prefix": "grid", **admissible(model, factors, task, scores, 100, [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48])}


PARTS = {"coverage": _coverage, "contents": _contents, "null": _null, "refine": _refine, "admissible": _admissible}


if __name__ == "__main__":
    main()
