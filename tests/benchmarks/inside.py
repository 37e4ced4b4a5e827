"""What the studies find on the embedded model: edits against their controls, and how units of a layer interact.

    python -m tests.benchmarks.inside --part edits          # who beats whom, in how many cases
    python -m tests.benchmarks.inside --part interactions   # overlap and interaction percentiles, beside the paper's

1. edits: each site of mlp_out (s = .75) and attn_o (s = .5), each task: the unit that `select_edit_unit` picks from four test
   prompts, and its controls. Methods are compared by the KL on twelve prompts of the other tasks at an equal realised change of
   the margin: 0.8 of the smallest that unit, random unit and oracle realise at a requested shift of 1. LoRA is trained twice, at
   the paper's learning rate and at .005. Selection runs without text (as in the paper) and with it.
2. interactions: blocks.2 and blocks.3, s = .75, 8,192 test tokens.
"""

import argparse
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens.tasks.generators import FAMILIES

SPARSITIES = {"mlp_out": 0.75, "attn_o": 0.5}
SHIFTS, NEAR, SMALL_RATE = (-1, 0.25, 1), 0.8, 0.005


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--part", choices=("edits", "interactions"), required=True)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--kind", choices=("mlp_out", "attn_o"), help="edits: of these sites only")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.part == "edits":
        edits({kind: s for kind, s in SPARSITIES.items() if options.kind in (None, kind)})
    else:
        interactions()


# ---------------------------------------------------------------------------------------------- edits


def edits(sparsities: dict[str, float]) -> None:
    model, text = swd.load_default_model(), swd.text_tokens(16_384, split="train")
    other_text = swd.text_tokens(8_192, split="validation")
    tasks = {name: swd.load_task(name, model, n_train=64, n_test=64) for name in FAMILIES}
    rows = []
    for kind, sparsity in sparsities.items():
        factors = swd.factorize(model, kind, sparsity=sparsity, tokens=text, progress=False)
        for site in factors:
            one = swd.FactorSet({site: factors[site]}, factors.provenance)
            for task in tasks:
                for chosen_by in ("prompts", "prompts and text"):
                    found = one_case(model, one, task, tasks, other_text if chosen_by == "prompts and text" else None)
                    rows.append({"site": site, "task": task, "chosen by": chosen_by, **found})
                    print(rows[-1], flush=True)
    table = pd.DataFrame(rows)
    for chosen_by, some in table.groupby("chosen by"):
        print(f"\nchosen by {chosen_by}: fewer KL at an equal change, in how many of the cases where both reach it")
        for first, second in (("oracle", "unit"), ("unit", "random"), ("unit", "lora"), ("unit", "lora .005")):
            both = some.dropna(subset=[first, second]) if {first, second} <= set(some) else some.iloc[:0]
            print(f"  {first} beats {second}: {int((both[first] < both[second]).sum())} of {len(both)}")


def one_case(model: Any, one: Any, task: str, tasks: dict[str, Any], text: Any) -> dict[str, float]:
    """KL on the other tasks' prompts of every method, at an equal change; a method that does not reach it is missing."""
    cases = [(e.prompt, e.answers[0], e.distractors[0]) for e in tasks[task].test.examples[:4]]
    others = [e.prompt for name in tasks if name != task for e in tasks[name].test.examples[10:14]]
    best = swd.select_edit_unit(model, one, cases, tokens=text).best
    how: dict[str, Any] = {**best, "other_prompts": others, "shifts": SHIFTS, "progress": False}
    compared = swd.compare_edits(model, one, **how)
    at_one = compared.rows[compared.rows["requested shift"] == 1].set_index("method")["margin change"]
    smallest = min(abs(at_one[name]) for name in ("unit", "random", "oracle"))
    change = NEAR * smallest * (1 if at_one["unit"] > 0 else -1)
    slow = swd.compare_edits(model, one, **how, methods=("lora",), lora_learning_rate=SMALL_RATE)
    found = compared.cost_at(change).set_index("method")["KL other prompts"].to_dict()
    found["lora .005"] = slow.cost_at(change)["KL other prompts"].iloc[0]
    return {name: float(value) for name, value in found.items()}


# ---------------------------------------------------------------------------------------------- interactions


def interactions() -> None:
    model = swd.load_default_model()
    text, heldout = swd.text_tokens(16_384, split="train"), swd.text_tokens(8_192, split="test")
    factors = swd.factorize(model, "mlp_*", sparsity=0.75, tokens=text, progress=False)
    pd.set_option("display.width", 160, "display.max_columns", 20)
    for layer in (2, 3):
        site = f"blocks.{layer}.mlp_out"
        print(swd.unit_overlap(model, {site: factors[site]}, site, heldout).table().to_string(), flush=True)
        into = {f"blocks.{i}.mlp_in": factors[f"blocks.{i}.mlp_in"] for i in range(layer + 1)}
        print(swd.unit_interactions(model, into, f"blocks.{layer}.mlp_in", heldout).table().to_string(), flush=True)


if __name__ == "__main__":
    main()
