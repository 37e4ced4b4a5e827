"""SWD beside what is trained: tokens that each needs, and what its circuits cost, on the embedded model.

    python -m tests.benchmarks.learned --folder /tmp/learned                    trains, measures, prints the tables (about 40 min)
    python -m tests.benchmarks.learned --folder /tmp/learned --part sparse      sparse pretraining beside SWD-FT (about 30 min)
    python -m tests.benchmarks.learned --folder /tmp/learned --part layers      which layer's mlp_out the tasks need most
    python -m tests.benchmarks.learned --folder /tmp/tiny --tiny                the same road in a minute; numbers mean nothing

Part "matrix", at one matrix (default: mlp_out of layer 3, which the tasks need most, at s=.9, where CE tells methods apart):
1. Train a transcoder of two widths, VPD-Recon-CI and VPD-KL on text that SWD's calibration does not touch; and the first and the
   third once more with a stronger penalty ("sparser"), chosen on validation text so that they end near SWD's CE with few units
   at work. Each run lies in the folder; the same command goes on where it was stopped.
2. Replacement quality against tokens used: SWD fitted anew for every count, the others at their checkpoints. Tokens to reach
   the CE delta of SWD at 16,384 tokens, exactly and within .001, for the first time.
3. Circuits twice, edges at sufficiency .9 and at half the drop, per task:
   "matched" sets each baseline's last checkpoint within .001 of SWD s=.9 beside it (the nearest, where there is none);
   "trained out" sets their last checkpoints beside SWD s=.75, which is as near to the dense model as they get.

Part "sparse", on the whole model:
1. Sparse pretraining of the model's architecture on its text, along the paper's schedule up to the paper's density (.3152).
2. SWD of every matrix at the same nonzeros, fine-tuned on its supports (SWD-FT).
3. Held-out CE of both and of the dense model, tokens used, and circuits of each; beside them the dense model's MLP channels,
   units of the same kind as those of the sparsely pretrained model.

Everything is also written to the folder: matrix.json, sparse.json, efficiency.svg, circuits.svg, trained_out.svg.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.files import plain
from swd_lens.tasks.generators import FAMILIES
from swd_lens.train.baselines.sparse_training import SPARSE_PRETRAINS, SparseSpec

CALIBRATION = 16_384
TOLERANCE = 0.001
SWD = "SWD"
COUNTS = (1_024, 2_048, 4_096, 8_192, CALIBRATION, 32_768, 65_536)
POSITIONS = ("scoring", "all")
SPARSER_L1, SPARSER_MINIMALITY = 4e-4, 1e-1
# Of the blocks' matrices where the paper takes its model: after update 22,000.
DENSITY = SparseSpec().density(21_999 * 131_072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--part", choices=("matrix", "sparse", "layers"), default="matrix")
    parser.add_argument("--site", default="blocks.3.mlp_out")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--trained-out-sparsity", type=float, default=0.75, help="of the SWD beside the last checkpoints")
    parser.add_argument("--n-tokens", type=int, default=1_048_576, help="budget of every trained baseline, each token once")
    parser.add_argument("--test-tokens", type=int, default=65_536)
    parser.add_argument("--prompts", type=int, nargs=2, default=(300, 200), metavar=("TRAIN", "TEST"))
    parser.add_argument("--updates", type=int, default=9_000, help="of sparse pretraining's whole schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.n_tokens, args.test_tokens = 8_192, 2_048
        args.prompts, args.updates = (12, 8), 12
    warnings.simplefilter("ignore", swd.UndefinedSufficiencyWarning)
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = swd.load_default_model()
    {"matrix": _matrix, "sparse": _sparse, "layers": _layers}[args.part](model, args)


def _tasks(model: Any, args: argparse.Namespace) -> list[swd.Task]:
    return [swd.load_task(name, model, n_train=args.prompts[0], n_test=args.prompts[1]) for name in FAMILIES]


# ---------------------------------------------------------------------------------------------- which layer


def _layers(model: Any, args: argparse.Namespace) -> None:
    """Share of the margin that goes when every unit of one layer's mlp_out is set to its mean."""
    calibration, rows = swd.text_tokens(CALIBRATION, split="train"), []
    solver: dict[str, Any] = {"outer_iterations": 4} if args.tiny else {}
    for layer in range(model.cfg.n_layers):
        site = f"blocks.{layer}.mlp_out"
        factors = swd.factorize(model, site, sparsity=args.sparsity, tokens=calibration, progress=False, **solver)
        row: dict[str, Any] = {"site": site}
        for positions in POSITIONS:
            for task in _tasks(model, args):
                scores = swd.attribute(model, factors, task, positions=positions)
                curve = swd.evaluate(model, factors, task, scores, random_sets=0)
                row[f"{task.name}, {positions}"] = curve.table()["drop"].iloc[-1] / curve.q_full
        for positions in POSITIONS:
            row[f"mean, {positions}"] = sum(row[f"{name}, {positions}"] for name in FAMILIES) / len(FAMILIES)
        rows.append(row)
    print(pd.DataFrame(rows).set_index("site").T.to_string(float_format="{:+.2f}".format))


# ---------------------------------------------------------------------------------------------- one matrix


def _kept(n_tokens: int) -> list[int]:
    """Token counts of the curve, in whole steps: doubling up to 32,768, four to a doubling beyond, where CE meets SWD's."""
    doubling, finer = (1024 * 2**i for i in range(5)), (1024 * round(2 ** (i / 4)) for i in range(20, 128))
    return sorted({min(n_tokens, count) for count in (*doubling, *finer)})


def _baselines(model: Any, args: argparse.Namespace, text: Any) -> dict[str, Callable[..., Any]]:
    """Name -> what trains it, in its folder."""

    def made(function: Any, name: str, **settings: Any) -> Callable[[], Any]:
        how = {"n_tokens": args.n_tokens, "keep": _kept(args.n_tokens), "progress": False, **settings}
        return lambda: function(model, args.site, text, out=args.folder / name / args.site, **how)

    small = {"width": 32, "hidden": 4} if args.tiny else {}
    return {
        "Transcoder 1x": made(baselines.transcoder, "transcoder-1x", width="1x"),
        "Transcoder 4x": made(baselines.transcoder, "transcoder-4x", width="4x"),
        "Transcoder 1x, sparser": made(baselines.transcoder, "transcoder-1x-sparser", width="1x", l1=SPARSER_L1),
        "VPD-Recon-CI": made(baselines.vpd_recon, "vpd-recon", **small),
        "VPD-Recon-CI, sparser": made(baselines.vpd_recon, "vpd-recon-sparser", minimality=SPARSER_MINIMALITY, **small),
        "VPD-KL": made(baselines.vpd_kl, "vpd-kl", **small),
    }


def _matrix(model: Any, args: argparse.Namespace) -> None:
    text = swd.text_tokens(args.n_tokens, split="train", seed=1)
    calibration, test = swd.text_tokens(max(COUNTS), split="train"), swd.text_tokens(args.test_tokens, split="test")
    trained, seconds = {}, {}
    for name, train in _baselines(model, args, text).items():
        began = time.perf_counter()
        trained[name] = train()
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.0f} s, or since it was taken up again", flush=True)
    solver: dict[str, Any] = {"outer_iterations": 4} if args.tiny else {}
    counts = COUNTS[:2] if args.tiny else COUNTS
    efficiency = swd.data_efficiency(
        model,
        args.site,
        {SWD: {"sparsity": args.sparsity, **solver}, **trained},
        heldout=test,
        tokens=calibration,
        token_counts=counts,
        out=args.folder / "efficiency.json",
    )
    efficiency.plot().savefig(args.folder / "efficiency.svg")
    print(efficiency.table().to_string(index=False))
    judged = CALIBRATION if CALIBRATION in counts else counts[-1]
    target = next(p.fidelity.ce_delta for p in efficiency.points if p.method == SWD and p.tokens == judged)
    print(f"\n{args.site}, SWD s={args.sparsity:g}: CE delta {target:+.5f} after {judged:,} tokens\n")
    found: dict[str, Any] = {"efficiency": efficiency.as_dict(), "target": target, "seconds": seconds}
    print(_markdown(_tokens_table(efficiency, target)))
    matched = {name: _matched(efficiency, name, target) for name in trained}
    last = {name: units.tokens for name, units in trained.items()}
    for title, sparsity, at, figure in (
        ("matched", args.sparsity, matched, "circuits.svg"),
        ("trained out", args.trained_out_sparsity, last, "trained_out.svg"),
    ):
        factors = swd.factorize(
            model, args.site, sparsity=sparsity, tokens=calibration[: CALIBRATION // 128], progress=False, **solver
        )
        taken = {name: units.at(at[name]) for name, units in trained.items()}
        table = _circuits(model, args, {f"{SWD} s={sparsity:g}": factors, **taken}, test, args.folder / figure)
        table.insert(1, "circuits at tokens", [CALIBRATION, *at.values()])
        at_work = [units.report(model, test).l0(args.site) for units in taken.values()]
        table.insert(4, "units at work per token", [factors[args.site].n_units, *at_work])
        print(f"\n{title}\n\n{_markdown(table)}", flush=True)
        found[title] = table.to_dict("records")
    _write(args.folder / "matrix.json", args, found)


def _matched(efficiency: swd.DataEfficiency, method: str, target: float) -> int:
    """The last checkpoint within the tolerance of SWD's CE; where there is none, the nearest."""
    off = {p.tokens: abs(p.fidelity.ce_delta - target) for p in efficiency.points if p.method == method}
    near = [tokens for tokens, distance in off.items() if distance <= TOLERANCE]
    return max(near) if near else min(off, key=lambda tokens: off[tokens])


def _tokens_table(efficiency: swd.DataEfficiency, target: float) -> pd.DataFrame:
    exact, near = (efficiency.tokens_to_reach(target + more, lasting=False) for more in (1e-9, TOLERANCE))
    rows = []
    for method in efficiency.methods:
        points = [p for p in efficiency.points if p.method == method]
        best = min(points, key=lambda p: p.fidelity.ce_delta)
        row: dict[str, Any] = {"method": method, "edges": best.edges, "tokens to SWD's CE delta": exact[method]}
        row |= {f"tokens to within {TOLERANCE:g} of it": near[method], "tokens at its best": best.tokens}
        row |= {"CE delta at its best": best.fidelity.ce_delta, "KL at its best": best.fidelity.kl}
        rows.append({**row, "relMSE at its best": best.relmse})
    return pd.DataFrame(rows)


def _circuits(model: Any, args: argparse.Namespace, methods: Any, test: Any, figure: Path) -> pd.DataFrame:
    """One row per method: how alike it behaves, and the edges of its circuits; interventions at one position, and everywhere."""
    rows: dict[str, dict[str, Any]] = {name: {"method": name} for name in methods}
    fidelities = None
    for positions in POSITIONS:
        found = swd.compare(
            model, methods, _tasks(model, args), tokens=test, positions=positions, fidelities=fidelities,
            evaluation={"random_sets": 0},
        )  # fmt: skip
        fidelities = found.fidelities
        if positions == POSITIONS[0]:
            found.plot().savefig(figure)
        costs = found.table(sufficiency=0.9, necessity=0.5)
        for cost in costs.to_dict("records"):
            name = str(cost["method"])
            row = rows[name]
            row |= {"CE delta": fidelities[name].ce_delta, "KL": fidelities[name].kl}
            both = [_shown(cost[f"edges at {what}"], "{:,.0f}") for what in ("sufficiency 0.9", "necessity 0.5")]
            row[f"{cost['task']}, {positions}: suff. 0.9 / half drop"] = " / ".join(both)
    return pd.DataFrame(list(rows.values()))


# ---------------------------------------------------------------------------------------------- the whole model


def _updates_to(density: float, updates: int) -> int:
    """Updates of preset "small" after which weights have this density, nearly: the schedule goes by what is before an update."""
    schedule = replace(SPARSE_PRETRAINS["small"], updates=updates)
    return 1 + min(range(updates), key=lambda n: abs(schedule.density(n * schedule.tokens_per_update) - density))


def _sparse(model: Any, args: argparse.Namespace) -> None:
    stop = _updates_to(DENSITY, args.updates)
    text = swd.text_tokens(stop * 2048, split="train", seed=1)  # each token once
    calibration, test = swd.text_tokens(CALIBRATION, split="train"), swd.text_tokens(args.test_tokens, split="test")
    began = time.perf_counter()
    sparse = baselines.sparse_pretrain(
        model, text, out=args.folder / "sparse", updates=args.updates, stop_after=stop,
        heldout=swd.text_tokens(16_384, split="validation"), progress=False,
    )  # fmt: skip
    print(f"sparse pretraining: {time.perf_counter() - began:.0f} s, or since it was taken up again", flush=True)
    nonzeros = sparse.provenance
    s = 1 - nonzeros["blocks"] / nonzeros["blocks_entries"]
    solver: dict[str, Any] = {"preset": "quick", "outer_iterations": 4} if args.tiny else {}
    factors = swd.factorize(model, "all", sparsity=s, tokens=calibration, out=args.folder / "swd", progress=False, **solver)
    rows = swd.text_tokens(min(text.numel(), 117_760), split="train", seed=1)
    tuned = swd.finetune(model, factors, rows, out=args.folder / "swd-ft", progress=False)
    host = sparse.load("hooked")
    used = CALIBRATION + tuned.provenance["finetune"]["tokens"]
    found, dense = [], swd.fidelity(model, factors, test).ce_dense
    for name, where, units, tokens in (
        ("sparse pretraining", host, baselines.channels_of(host), nonzeros["tokens"]),
        ("SWD", model, factors, CALIBRATION),
        ("SWD-FT", model, tuned, used),
        ("dense model's channels", model, baselines.channels_of(model), 0),
    ):
        measured = swd.fidelity(where, units, test)
        row: dict[str, Any] = {"method": name, "tokens used": tokens, "CE": measured.ce, "dense CE": dense}
        row |= {"nonzeros": nonzeros["blocks"] if where is host else None if tokens == 0 else tuned.edges}
        row |= {"candidate units": sum(u.n_units for u in units.values())}
        for task in _tasks(where, args):
            for positions in POSITIONS:
                scores = swd.attribute(where, units, task, positions=positions)
                curve = swd.evaluate(where, units, task, scores, random_sets=0)
                if positions == POSITIONS[0]:
                    row |= {f"{task.name}: margin": curve.q_full, f"{task.name}: accuracy": curve.accuracy_full}
                both = [_shown(cost, "{:,.0f}") for cost in (curve.cost_at(sufficiency=0.9), curve.cost_at(necessity=0.5))]
                row[f"{task.name}, {positions}: suff. 0.9 / half drop"] = " / ".join(both)
        found.append(row)
    print(f"density of the blocks {1 - s:.4f} (the paper's {DENSITY:.4f})\n")
    print(_markdown(pd.DataFrame(found)))
    _write(args.folder / "sparse.json", args, {
        "rows": found, "provenance": sparse.provenance, "log": sparse.log.dropna().to_dict("records"),
    })  # fmt: skip


# ---------------------------------------------------------------------------------------------- out


def _markdown(table: pd.DataFrame) -> str:
    """Turned over: one column per method."""
    lines = ["| | " + " | ".join(map(str, table["method"])) + " |", "|---" * (len(table) + 1) + "|"]
    for column in table.columns[1:]:
        counts = not any(word in column for word in ("CE", "KL", "MSE", "margin", "accuracy"))
        counts = counts or column.startswith("tokens")
        shown = "{:,.0f}" if counts else "{:+.5f}" if "delta" in column else "{:.4f}"
        lines.append(f"| {column} | " + " | ".join(_shown(value, shown) for value in table[column]) + " |")
    return "\n".join(lines)


def _shown(value: Any, how: str) -> str:
    if isinstance(value, str):
        return value
    return "never" if value is None or pd.isna(value) else how.format(value)


def _write(path: Path, args: argparse.Namespace, values: dict[str, Any]) -> None:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    path.write_text(json.dumps(plain({"settings": settings, "torch": torch.__version__, **values}), indent=1, default=float))


if __name__ == "__main__":
    main()
