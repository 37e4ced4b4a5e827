"""SWD beside what is trained: tokens that each needs, and what its circuits cost, on the embedded model.

    python -m tests.benchmarks.learned --folder /tmp/learned                    trains, measures, prints the tables (about 1 h)
    python -m tests.benchmarks.learned --folder /tmp/learned --part sparse      sparse pretraining beside SWD-FT
    python -m tests.benchmarks.learned --folder /tmp/tiny --tiny                the same road in a minute; numbers mean nothing

Part "matrix", at one matrix (default: mlp_out of layer 3, which the tasks need most, at s=.9, where CE tells methods apart):
1. Train a transcoder of two widths, VPD-Recon-CI and VPD-KL on text that SWD's calibration does not touch. Each run lies in the
   folder; the same command goes on where it was stopped.
2. Replacement quality against tokens used: SWD fitted anew for every count, the others at their checkpoints. Tokens to reach
   the CE delta of SWD at 16,384 tokens, exactly and within .001.
3. Circuits: each baseline at its first checkpoint that is matched within .001, else at its best; edges at sufficiency .9 and at
   half the necessity drop, per task.

Part "sparse", on the whole model:
1. Sparse pretraining of the model's architecture on its text, along the paper's schedule up to the paper's density (.3152).
2. SWD of every matrix at the same nonzeros, fine-tuned on its supports (SWD-FT).
3. Held-out CE of both and of the dense model, tokens used, and circuits.

Everything is also written to the folder: matrix.json, sparse.json, efficiency.png, circuits.png.
"""

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.baselines.learned.sparse_schedule import Schedule
from swd_lens.files import plain
from swd_lens.study.data_efficiency import DataEfficiency, data_efficiency
from swd_lens.tasks.generators import FAMILIES

CALIBRATION = 16_384
TOLERANCE = 0.001
SWD = "SWD"
COUNTS = (1_024, 2_048, 4_096, 8_192, CALIBRATION, 32_768, 65_536)
# Share of the paper's schedule after which its model is taken, and the density there.
STOP, DENSITY = 22_000 / 38_146, Schedule().density(21_999 * 131_072)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--part", choices=("matrix", "sparse"), default="matrix")
    parser.add_argument("--site", default="blocks.3.mlp_out")
    parser.add_argument("--sparsity", type=float, default=0.9)
    parser.add_argument("--n-tokens", type=int, default=1_048_576, help="budget of every trained baseline")
    parser.add_argument("--text-tokens", type=int, default=1_048_576, help="of training text")
    parser.add_argument("--test-tokens", type=int, default=65_536)
    parser.add_argument("--prompts", type=int, nargs=2, default=(300, 200), metavar=("TRAIN", "TEST"))
    parser.add_argument("--updates", type=int, default=8_000, help="of sparse pretraining's whole schedule")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    if args.tiny:
        args.n_tokens, args.text_tokens, args.test_tokens = 8_192, 8_192, 2_048
        args.prompts, args.updates = (12, 8), 12
    warnings.simplefilter("ignore", swd.UndefinedSufficiencyWarning)
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    model = swd.load_default_model()
    {"matrix": _matrix, "sparse": _sparse}[args.part](model, args)


# ---------------------------------------------------------------------------------------------- one matrix


def _baselines(model: Any, args: argparse.Namespace, text: Any) -> dict[str, Callable[..., Any]]:
    """Name -> what trains it, in its folder."""

    def made(function: Any, name: str, **settings: Any) -> Callable[[], Any]:
        where = args.folder / name / args.site
        return lambda: function(model, args.site, text, n_tokens=args.n_tokens, out=where, progress=False, **settings)

    small = {"width": 32, "hidden": 4} if args.tiny else {}
    return {
        "Transcoder 1x": made(baselines.transcoder, "transcoder-1x", width="1x"),
        "Transcoder 4x": made(baselines.transcoder, "transcoder-4x", width="4x"),
        "VPD-Recon-CI": made(baselines.vpd_recon, "vpd-recon", **small),
        "VPD-KL": made(baselines.vpd_kl, "vpd-kl", **small),
    }


def _matrix(model: Any, args: argparse.Namespace) -> None:
    text = swd.text_tokens(args.text_tokens, split="train", seed=1)
    calibration, test = swd.text_tokens(max(COUNTS), split="train"), swd.text_tokens(args.test_tokens, split="test")
    trained, seconds = {}, {}
    for name, train in _baselines(model, args, text).items():
        began = time.perf_counter()
        trained[name] = train()
        seconds[name] = time.perf_counter() - began
        print(f"{name}: {seconds[name]:.0f} s, or since it was taken up again", flush=True)
    swd_options = {"sparsity": args.sparsity, **({"outer_iterations": 4} if args.tiny else {})}
    counts = COUNTS[:2] if args.tiny else COUNTS
    efficiency = data_efficiency(
        model, args.site, {SWD: swd_options, **trained}, heldout=test, tokens=calibration, token_counts=counts
    )
    efficiency.plot().savefig(args.folder / "efficiency.png", dpi=160)
    print(efficiency.table().to_string(index=False))
    judged = CALIBRATION if CALIBRATION in counts else counts[-1]
    target = _swd_delta(efficiency, judged)
    chosen = {name: _chosen(efficiency, name, target) for name in trained}
    factors = swd.factorize(model, args.site, tokens=calibration[: CALIBRATION // 128], progress=False, **swd_options)
    methods = {SWD: factors, **{name: units.at(chosen[name]) for name, units in trained.items()}}
    tasks = [swd.load_task(name, model, n_train=args.prompts[0], n_test=args.prompts[1]) for name in FAMILIES]
    circuits = swd.compare(methods, model, tasks, tokens=test, evaluation={"bootstrap": 0})
    circuits.plot().savefig(args.folder / "circuits.png", dpi=160)
    table = _matrix_table(efficiency, circuits, target, chosen)
    print(f"\n{args.site}, SWD s={args.sparsity:g}: CE delta {target:+.5f} after {judged:,} tokens\n")
    print(_markdown(table))
    _write(args.folder / "matrix.json", args, {
        "efficiency": efficiency.as_dict(), "target": target, "chosen": chosen, "seconds": seconds,
        "table": table.to_dict("records"), "circuits": circuits.table().to_dict("records"),
        "activity": [units.at(chosen[name]).report(model, test).table().to_dict("records") for name, units in trained.items()],
    })  # fmt: skip


def _swd_delta(efficiency: DataEfficiency, tokens: int) -> float:
    (point,) = [p for p in efficiency.points if p.method == SWD and p.tokens == tokens]
    return point.fidelity.ce_delta


def _chosen(efficiency: DataEfficiency, method: str, target: float) -> int:
    """The first checkpoint matched within the tolerance, and from there on; else the one of the least CE delta."""
    matched = efficiency.tokens_to_reach(target + TOLERANCE)[method]
    points = [p for p in efficiency.points if p.method == method]
    return matched or min(points, key=lambda p: p.fidelity.ce_delta).tokens


def _matrix_table(efficiency: DataEfficiency, circuits: Any, target: float, chosen: dict[str, int]) -> pd.DataFrame:
    exact, near = (efficiency.tokens_to_reach(target + more) for more in (1e-9, TOLERANCE))
    costs = circuits.table(sufficiency=0.9, necessity=0.5)
    edge_columns = [column for column in costs.columns if str(column).startswith("edges")]
    rows = []
    for method in efficiency.methods:
        its = circuits.fidelities[method]
        row: dict[str, Any] = {"method": method, "tokens to SWD's CE delta": exact[method]}
        row |= {f"within {TOLERANCE:g}": near[method], "circuits at": chosen.get(method, CALIBRATION)}
        row |= {"CE delta there": its.ce_delta, "KL there": its.kl}
        for _, cost in costs[costs["method"] == method].iterrows():
            row |= {f"{cost['task']}: {column}": cost[column] for column in edge_columns}
        rows.append(row)
    return pd.DataFrame(rows)


# ---------------------------------------------------------------------------------------------- the whole model


def _sparse(model: Any, args: argparse.Namespace) -> None:
    text = swd.text_tokens(args.text_tokens, split="train", seed=1)
    calibration, test = swd.text_tokens(CALIBRATION, split="train"), swd.text_tokens(args.test_tokens, split="test")
    stop = max(2, round(args.updates * STOP))
    sparse = baselines.sparse_pretrain(
        model, text, out=args.folder / "sparse", updates=args.updates, stop_after=stop,
        heldout=swd.text_tokens(16_384, split="validation"), progress=False,
    )  # fmt: skip
    nonzeros = sparse.provenance
    s = 1 - nonzeros["blocks"] / nonzeros["blocks_entries"]
    solver = {"preset": "quick", "outer_iterations": 4} if args.tiny else {}
    factors = swd.factorize(
        model, "all", sparsity=s, tokens=calibration, out=args.folder / "swd", progress=False, **solver
    )
    rows = swd.text_tokens(min(args.text_tokens, 117_760), split="train", seed=1)
    tuned = swd.finetune(model, factors, rows, out=args.folder / "swd-ft", progress=False)
    host = sparse.load("hooked")
    channels = baselines.channels_of(host)
    used = {
        "sparse pretraining": nonzeros["tokens"],
        "SWD": calibration.numel(),
        "SWD-FT": calibration.numel() + tuned.provenance["finetune"]["tokens"],
    }
    found, dense = [], swd.fidelity(model, factors, test).ce_dense
    for name, where, units in (
        ("sparse pretraining", host, channels),
        ("SWD", model, factors),
        ("SWD-FT", model, tuned),
    ):
        measured = swd.fidelity(where, units, test)
        row: dict[str, Any] = {"method": name, "tokens used": used[name], "CE": measured.ce, "dense CE": dense}
        row["nonzeros"] = nonzeros["blocks"] if where is host else units.edges
        for family in FAMILIES:
            task = swd.load_task(family, where, n_train=args.prompts[0], n_test=args.prompts[1])
            curve = swd.evaluate(where, units, task, swd.attribute(where, units, task), bootstrap=0)
            row |= {f"{family}: margin": curve.q_unpruned, f"{family}: accuracy": curve.accuracy_unpruned}
            row |= {f"{family}: edges at sufficiency 0.9": curve.cost_at(sufficiency=0.9)}
            row |= {f"{family}: edges at half necessity": curve.cost_at(necessity=0.5)}
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
        counts = not any(word in column for word in ("CE", "KL", "margin", "accuracy"))
        counts = counts or column.startswith("tokens")
        shown = "{:,.0f}" if counts else "{:+.5f}" if "delta" in column else "{:.4f}"
        lines.append(f"| {column} | " + " | ".join(_shown(value, shown) for value in table[column]) + " |")
    return "\n".join(lines)


def _shown(value: Any, how: str) -> str:
    return "never" if value is None or pd.isna(value) else how.format(value)


def _write(path: Path, args: argparse.Namespace, values: dict[str, Any]) -> None:
    settings = {key: str(value) if isinstance(value, Path) else value for key, value in vars(args).items()}
    path.write_text(
        json.dumps(plain({"settings": settings, "torch": torch.__version__, **values}), indent=1, default=float)
    )


if __name__ == "__main__":
    main()
