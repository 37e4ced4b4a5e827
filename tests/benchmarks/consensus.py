"""Whether a consensus of several factorizations is more stable than one, on other texts than it was made from.

    python -m tests.benchmarks.consensus --folder consensus/             every cell; goes on where it stopped
    python -m tests.benchmarks.consensus --folder consensus/ --record    also writes results/consensus.json

1. A cell is a task and a matrix of the embedded model (preset quick, s = .75, units that start as inputs). The text is dealt into
   TEXTS parts, 4,096 tokens each; what is made of one part has seen nothing of another.
2. Of each part: one factorization; one from a rotated start; the consensus of RUNS from rotated starts (`consensus`); and one
   factorization that is cut and refitted as a consensus is, which tells what the votes do from what the refit does.
3. Pairs of parts are compared as a stability card compares runs: units matched one to one, circuits of .9 recovered on validation
   prompts, edges that these share, claims that recur. Beside them the error on held-out text, KL, and recovered on test prompts.
"""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

import swd_lens as swd
from swd_lens.base.files import write_text
from swd_lens.circuits.evaluate import evaluate_circuits
from swd_lens.factorization.calibration_text import CalibrationText, grams_of
from swd_lens.factorization.solve import solve
from swd_lens.hosts import find_sites, host_of
from swd_lens.solver import canonical
from swd_lens.solver.metric import Metric
from swd_lens.solver.refine import refine
from swd_lens.tasks.text import as_rows
from swd_lens.units.factors import Factors
from swd_lens.units.similarity import edge_jaccard, match_units
from tests.benchmarks.results import Table, record

CELLS = (("gendered_pronoun", "blocks.2.attn_o"), ("docstring", "blocks.2.mlp_out"))
TEXTS, RUNS, ALIKE = 3, 5, 0.5
COLUMNS = ["task", "site", "factors", "similarity", "edges shared", "claims recurring", "error", "KL", "recovered"]


def consensus(runs: Sequence[Factors], gram: Tensor) -> Factors:
    """The run most like the others, its vectors averaged with their counterparts in all runs (by how alike they are), the largest
    entries kept, as many as it had, and refitted on the Gram."""
    alike = [sum(float(match_units(a, b, gram).similarity.mean()) for b in runs) for a in runs]
    base = runs[alike.index(max(alike))]
    own_read, own_write = canonical(base.read, base.write)
    read, write, weights = torch.zeros_like(own_read), torch.zeros_like(own_write), torch.zeros(base.n_units)
    for run in runs:
        match = match_units(base, run, gram)
        likeness = match.similarity.float()
        a, b = canonical(run.read, run.write)
        a, b = a[:, match.partner.clamp_min(0)], b[match.partner.clamp_min(0)]
        read += likeness * (a * own_read).sum(0).sign() * a
        write += (likeness * (b * own_write).sum(1).sign())[:, None] * b
        weights += likeness
    read, write = read / weights.clamp_min(1e-6), write / weights.clamp_min(1e-6)[:, None]
    worth = torch.cat([(read.abs() * write.norm(dim=1)).flatten(), (write.abs() * read.norm(dim=0)[:, None]).flatten()])
    kept = torch.zeros_like(worth)
    kept[worth.topk(int(base.edges_per_unit.sum())).indices] = 1.0
    read, write = read * kept[: read.numel()].view_as(read), write * kept[read.numel() :].view_as(write)
    metric, target, scale = Metric.scaled(base.weight.float(), gram.float(), 0.0)
    inputs = metric.undo(torch.ones_like(read))  # from W's coordinates to the metric's, and back
    read, write = refine(read / inputs, write / scale, target, metric, rounds=12, steps=8)
    return Factors(metric.undo(read).contiguous(), (write * scale).contiguous(), weight=base.weight)


def measure(folder: Path, task_name: str, site: str) -> list[list[str]]:
    """The rows of a cell, measured now or read."""
    file = folder / f"{task_name} {site}.json"
    if file.exists():
        return json.loads(file.read_text())
    model = swd.load_default_model()
    task = swd.load_task(task_name, model, n_train=100, n_validation=60, n_test=60)
    place, heldout = find_sites(model, site)[0], swd.text_tokens(4_096, split="test")
    weight, pool = host_of(model).weight(place).detach(), as_rows(swd.text_tokens(TEXTS * 4_096, split="train"), model)

    def gram_of(rows: Tensor) -> Tensor:
        return grams_of(model, [place], CalibrationText(rows, model))[site].cpu()

    texts = [pool[i::TEXTS] for i in range(TEXTS)]
    grams, unseen = [gram_of(rows) for rows in texts], gram_of(as_rows(heldout, model))
    made: dict[str, list[Factors]] = {name: [] for name in ("one", "one, rotated start", f"consensus of {RUNS}", "one, refitted")}
    for i, (rows, gram) in enumerate(zip(texts, grams, strict=True)):
        how = {"tokens": rows.numel(), "preset": "quick", "basis": "input"}
        turned = [solve(weight, gram, 0.75, **how, start="rotated", seed=100 * i + k) for k in range(RUNS)]
        one = solve(weight, gram, 0.75, **how)
        for name, factors in zip(made, (one, turned[0], consensus(turned, gram), consensus([one], gram)), strict=True):
            made[name].append(factors)
    rows = [
        [task_name, site, name, *_numbers(model, site, task, factors, grams[0], unseen, heldout)]
        for name, factors in made.items()
    ]
    write_text(file, json.dumps(rows, indent=1))
    return rows


def _numbers(model: Any, site: str, task: Any, made: list[Factors], gram: Tensor, unseen: Tensor, heldout: Tensor) -> list[str]:
    """Means over pairs of texts, then over texts."""
    weight = made[0].weight.double()
    circuits, recovered = [], []
    for factors in made:
        scores = swd.attribute(model, {site: factors}, task)
        circuit = swd.evaluate(model, {site: factors}, task.validation, scores, random_sets=0).circuit_at()
        found = evaluate_circuits(model, {site: factors}, task.test, circuit)
        recovered.append(float(found["recovered"].iloc[0]))
        circuits.append([unit for _, unit in circuit.units])
    similarity, shared, claims = [], [], []
    for i, j in itertools.combinations(range(len(made)), 2):
        match = match_units(made[i], made[j], gram)
        similarity.append(float(match.similarity.mean()))
        shared.append(edge_jaccard(made[i], circuits[i], made[j], circuits[j], match))
        recurring = [int(match.partner[u]) in circuits[j] and float(match.similarity[u]) >= ALIKE for u in circuits[i]]
        claims.append(mean(map(float, recurring)))
    lost = [weight - factors.product().double() for factors in made]
    errors = [float((each * (unseen.double() @ each)).sum() / (weight * (unseen.double() @ weight)).sum()) for each in lost]
    kls = [swd.fidelity(model, {site: factors}, heldout, progress=False).kl for factors in made]
    values = [
        (mean(similarity), 2),
        (mean(shared), 2),
        (mean(claims), 2),
        (mean(errors), 4),
        (mean(kls), 5),
        (mean(recovered), 2),
    ]
    return [f"{value:.{digits}f}" for value, digits in values]


def main() -> None:
    parser = argparse.ArgumentParser(description="Whether a consensus of factorizations is more stable than one.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for cell in CELLS:
        rows += measure(args.folder, *cell)
        print(*rows[-4:], sep="\n", flush=True)
    table = Table("Two texts that share nothing", COLUMNS, rows, ["left"] * 3 + ["right"] * 6)
    if args.record:
        about = [
            "Whether the mean of several factorizations, matched unit by unit, cut and refitted, is more stable than one. The "
            f"embedded model, preset quick, s = .75, from neurons (inputs); {TEXTS} parts of the text, 4,096 tokens each, are "
            f"compared in pairs as a stability card compares runs; a consensus is of {RUNS} rotated starts on one part."
        ]
        record(
            "consensus",
            [table],
            threads=[args.threads],
            title="A consensus of factorizations",
            section="Circuits",
            order=91,
            about=about,
        )


if __name__ == "__main__":
    main()
