"""How many runs a stability card needs until its verdict stands still, and whether null runs are ever taken for stable ones.

    python -m tests.benchmarks.stability --folder stability/             every cell; goes on where it stopped
    python -m tests.benchmarks.stability --folder stability/ --record    also writes results/stability.json

1. A cell is a task and a matrix of the embedded model, factorized with preset "quick" from halves of 8,192 tokens; 100 training,
   60 validation and 60 test prompts. `swd.stability` makes the runs, round its nine axes: 200 and 200 null runs of the first
   cell, 90 and 40 of the others.
2. Cards of n runs: the runs of each axis in random order, taken round the axes as a card takes them. A card agrees where every
   criterion is met or not as it is with all runs. Its verdict stands still from the smallest n on from which 95 % of the cards of
   every larger n agree, and for `RUNS` of swd_lens/study/stability.py the largest of the cells' counts.
3. Null cards: the same of null runs. How often is one of them stable, and how often is each criterion met?
"""

import argparse
from pathlib import Path

import pandas as pd
import torch

import swd_lens as swd
from swd_lens.study.stability import stability
from swd_lens.study.stability_card import CRITERIA, Stability, judged
from tests.benchmarks.results import Table, record

# Task, matrix, runs, null runs.
CELLS = (
    ("gendered_pronoun", "blocks.2.attn_o", 200, 200),
    ("docstring", "blocks.2.attn_o", 90, 40),
    ("gendered_pronoun", "blocks.3.mlp_out", 90, 40),
)
CARDS, AGREE = 400, 0.95
COUNTS = (6, 9, 12, 15, 18, 24, 30, 36, 48, 60, 80, 100, 140)


def measured(task: str, site: str, n: int, nulls: int, folder: Path) -> Stability:
    """All runs of a cell, made now or taken over from the folder."""
    model = swd.load_default_model()
    prompts = swd.load_task(task, model, n_train=100, n_validation=60, n_test=60)
    corpora = {name: swd.text_tokens(4_096, split=name) for name in ("validation", "test")}
    tokens, out = swd.text_tokens(8_192, split="train"), folder / f"{task}-{site}"
    return stability(model, site, prompts, tokens=tokens, preset="quick", n=n, nulls=nulls, corpora=corpora, out=out)


def met(runs: pd.DataFrame) -> tuple[bool, ...]:
    """Which criteria are met."""
    values = judged(runs)
    return tuple(each.met(values[each.name]) for each in CRITERIA)


def cards(runs: pd.DataFrame, n: int, seed: int = 0) -> list[tuple[bool, ...]]:
    """What cards of n runs say: each axis in random order, taken round the axes."""
    generator = torch.Generator().manual_seed(seed)
    groups = [of_axis.index.to_numpy() for _, of_axis in runs.groupby("axis", sort=False)]
    found = []
    for _ in range(CARDS):
        shuffled = [group[torch.randperm(len(group), generator=generator).numpy()] for group in groups]
        places = [group[turn] for turn in range(n) for group in shuffled if turn < len(group)][:n]
        found.append(met(runs.loc[places]))
    return found


def stands_still(runs: pd.DataFrame) -> tuple[int | None, dict[int, float]]:
    """The number of runs from which on cards agree with all runs, and the share that agree by number."""
    final, shares = met(runs), {}
    for n in (count for count in COUNTS if count < len(runs)):
        found = cards(runs, n)
        shares[n] = sum(each == final for each in found) / len(found)
    still = None
    for n in reversed(shares):
        if shares[n] < AGREE:
            break
        still = n
    return still, shares


def main() -> None:
    parser = argparse.ArgumentParser(description="Runs until a stability card's verdict stands still.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    found = {cell: measured(*cell, args.folder) for cell in CELLS}
    criteria, still, axes = [], [], []
    for (task, site, *_), card in found.items():
        table, name = card.table(), f"{task}, {site}"
        null_met = pd.DataFrame(cards(card.nulls, 24), columns=[each.name for each in CRITERIA]).mean()
        for row in table.to_dict("records"):
            cells = [name, row["criterion"], f"{row['value']:.2f}", row["threshold"], "yes" if row["met"] else "no"]
            criteria.append([*cells, f"{row['null']:.2f}", f"{null_met[row['criterion']]:.3f}"])
        n, shares = stands_still(card.runs)
        false = sum(all(each) for each in cards(card.nulls, 24)) / CARDS
        shown = [f"{shares[count]:.3f}" if count in shares else "" for count in (6, 12, 18, 24, 36, 60, 100)]
        still.append([name, "yes" if card.stable else "no", *shown, "more" if n is None else str(n), f"{false:.3f}"])
        for row in card.by_axis().to_dict("records"):
            values = [f"{value:.2f}" for key, value in row.items() if key not in ("axis", "runs")]
            axes.append([name, row["axis"], str(row["runs"]), *values])
        print(card.verdict, *card.notes(), sep="\n", flush=True)
    columns = ["cell", "criterion", "all runs", "threshold", "met", "null runs", "null cards that meet it"]
    tables = [Table("Criteria over all runs", columns, criteria, ["left"] * 2 + ["right", "left", "left"] + ["right"] * 2)]
    columns = ["cell", "stable", *(f"{n} runs" for n in (6, 12, 18, 24, 36, 60, 100)), "stands still from", "null cards stable"]
    tables.append(
        Table("Cards that say what all runs say, by their number of runs", columns, still, ["left"] * 2 + ["right"] * 9)
    )
    columns = [
        "cell",
        "axis",
        "runs",
        "similarity",
        "of claimed",
        "contribution",
        "edges shared",
        "claims recurring",
        "recovered",
    ]
    tables.append(Table("By axis", columns, axes, ["left"] * 2 + ["right"] * 7))
    for table in tables:
        print(f"\n{table.title}\n\n{table.markdown()}")
    if args.record:
        record("stability", "Stability of units", "Circuits", tables, threads=args.threads)


if __name__ == "__main__":
    main()
