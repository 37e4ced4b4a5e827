"""circuit with finished and tuned factors, several interventions, hosts in half precision."""

import io
import json
import re
import shlex
import sys
import warnings

import pandas as pd
import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.base.step_cache import FOLDER
from swd_lens.report import terminal
from swd_lens.study.resume import memory_of
from tests.cli.test_cli import PROMPTS, SMALL

TEXT = ["--heldout-tokens", "1024"]


def run(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """What `replace` leaves of two matrices: factors, and tuned ones."""
    folder = tmp_path_factory.mktemp("made") / "whole"
    made = run(
        "replace", "--out", folder, "--sites", "blocks.[23].mlp_out", "-s", "0.6", *SMALL, "--budgets", "uniform"
    )
    assert made.exit_code == 0, made.output
    return folder


@pytest.mark.slow
def test_finished_and_tuned_factors_are_compared_without_solving(tmp_path, whole, monkeypatch, default_model):
    def solved(*_, **__):
        raise AssertionError("something was factorized")

    monkeypatch.setattr("swd_lens.study.run_study.factorize", solved)
    given = ["--factors", whole, "--factors", whole / "factors"]
    refused = run("circuit", *given[2:], *given[2:], "--task", "ioi", "--out", tmp_path / "x")
    assert refused.exit_code == 1 and "rename one of them" in " ".join(refused.stderr.split())
    modes = [
        "--controls",
        "svd",
        "--ablation",
        "mean",
        "--ablation",
        "zero",
        "--positions",
        "scoring",
        "--positions",
        "all",
    ]
    result = run("circuit", *given, "--task", "ioi", *TEXT, *PROMPTS, *modes, "--out", tmp_path / "run")
    assert result.exit_code == 0, result.output
    read = swd.Run.load(tmp_path / "run")
    assert [r.method for r in read.replacements] == ["SWD s=0.6, tuned (whole)", "SWD s=0.6 (whole)", "SVD"]
    assert read.settings["calibration tokens"] == 0 and read.settings["held-out tokens"] == 1024
    (surface,) = read.comparisons
    assert surface == "blocks.2.mlp_out, blocks.3.mlp_out" == ", ".join(read.settings["surfaces"][surface])
    tuned = swd.FactorSet.load(whole / "finetune" / "factors")
    assert (
        read.replacements[0].fidelity.kl == swd.fidelity(default_model, tuned, swd.text_tokens(1024, split="test")).kl
    )
    table = read.circuit_table()
    assert table[["positions", "ablation"]].drop_duplicates().values.tolist() == [
        [positions, ablation] for positions in ("scoring", "all") for ablation in ("mean", "zero")
    ]
    assert "Circuits in blocks.2.mlp_out" in result.stdout and max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_factors_beside_new_ones_and_random_b_seeds(tmp_path, whole):
    words = ["--factors", whole, "--sites", "blocks.[23].mlp_out", "-s", "0.5", "--controls", "random_b"]
    words += ["--preset", "quick", "--random-b-seeds", "2", "--task", "ioi", *SMALL, *PROMPTS]
    result = run("circuit", *words, "--out", tmp_path, "--json")
    assert result.exit_code == 0, result.output
    methods = [curve["method"] for curve in json.loads(result.stdout)["circuits"]]
    assert methods == ["SWD s=0.5", "SWD s=0.6, tuned (whole)", *(f"Random-B/{seed}" for seed in range(2))]


def test_factors_of_another_model_are_refused_before_any_text_is_read(tmp_path, whole, gpt2_folder):
    other = ["--model", gpt2_folder, "--text", tmp_path / "missing.txt", "--task", "ioi", "--out", tmp_path / "x"]
    result = run("circuit", "--factors", whole, *other)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "blocks.2.mlp_out" in said and "missing.txt" not in said
    nothing = run("circuit", "--factors", tmp_path / "nothing", "--task", "ioi", "--out", tmp_path / "x")
    assert nothing.exit_code == 1 and "nothing" in " ".join(nothing.stderr.split())
    none = run("circuit", "--task", "ioi", "--out", tmp_path / "x")
    assert none.exit_code == 1 and "--sites, finished factors (--factors), or both" in " ".join(none.stderr.split())
    assert not (tmp_path / "x").exists()


def test_circuit_in_bfloat16(tmp_path, gpt2_folder):
    host = ["--model", gpt2_folder, "--sites", "blocks.1.mlp_out", "--task", "gendered_pronoun", "-s", "0.5"]
    small = ["--text", __file__, *SMALL, "--tokens", "256", "--heldout-tokens", "64", *PROMPTS]
    result = run("circuit", *host, *small, "--dtype", "bfloat16", "--out", tmp_path / "run", "--json")
    assert result.exit_code == 0, result.output
    settings = json.loads(result.stdout)["settings"]
    assert settings["calibration dtype"] == "bfloat16" and settings["host"] == "HookedTransformer"
    for placed, message in (
        (
            ["--model", gpt2_folder, "--text", __file__, "--host", "hooked", "--device-map", "auto"],
            "it does not go with",
        ),
        (["--device-map", "auto"], "the embedded one is small"),
    ):
        refused = run("circuit", "--sites", "mlp_out", "--task", "ioi", "--out", tmp_path / "x", *placed)
        assert refused.exit_code == 1 and message in " ".join(refused.stderr.split()), refused.output


SMALLEST = ["--sites", "blocks.[23].mlp_out", "--task", "ioi", "-s", "0.5", "-s", "0.6", *SMALL, *PROMPTS]
SMALLEST += ["--preset", "quick", "--controls", "svd,pruned"]


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """A run that nothing interrupted: its folder, and what it said."""
    folder = tmp_path_factory.mktemp("alone")
    result = run("circuit", "--out", folder, *SMALLEST)
    assert result.exit_code == 0, result.output
    return folder, result


@pytest.mark.slow
def test_every_step_is_numbered_and_memory_told(alone):
    said = alone[1].stderr
    numbers = [(int(i), int(n)) for i, n in re.findall(r"^ *\S+ (?:s|min)  (\d+)/(\d+) ", said, re.MULTILINE)]
    assert numbers == [(i, 13) for i in range(1, 14)]
    assert "none of these sites costs ioi a tenth of the margin" in said  # of the MLPs: names are copied by attention
    (most, unit), (peak, peak_unit) = (
        re.search(rf"{words} ([\d.]+) (MB|GB)", said).groups() for words in ("memory: at most", "peak memory")
    )
    megabytes = {"MB": 1, "GB": 1000}
    assert float(most) * megabytes[unit] > 1 and float(peak) * megabytes[peak_unit] > 100


@pytest.mark.slow
def test_ctrl_c_says_what_is_finished_and_the_command_goes_on(tmp_path, alone, monkeypatch):
    def interrupted(*_, **__):
        raise KeyboardInterrupt

    words = ["circuit", "--out", str(tmp_path / "run"), *SMALLEST]
    monkeypatch.setattr(sys, "argv", ["swd-lens", *words, "--overwrite"])
    with monkeypatch.context() as patch:
        patch.setattr("swd_lens.circuits.protocol.evaluate", interrupted)
        stopped = run(*words, "--overwrite")
    assert stopped.exit_code == 130 and "Traceback" not in stopped.output
    (line,) = [line for line in stopped.stderr.splitlines() if line.startswith("interrupted")]
    assert line.startswith(
        "interrupted in step 9 of 13 (measure blocks.[23].mlp_out: fidelity, circuits of ioi), 8 finished"
    )
    command = line.rpartition("goes on from there: ")[2]
    assert shlex.split(command) == ["swd-lens", *words]
    with monkeypatch.context() as patch:
        # Nothing is solved or screened again.
        patch.setattr("swd_lens.solver.solve", interrupted)
        patch.setattr(cli.circuits, "screen", interrupted)
        gone_on = run(*shlex.split(command)[1:])
    assert gone_on.exit_code == 0, gone_on.output
    (kept,) = (tmp_path / "run" / "screen" / FOLDER).glob("screen*")
    assert swd.Run.load(tmp_path / "run").screen.as_dict() == json.loads(kept.read_text())["values"]
    with monkeypatch.context() as patch:
        patch.setattr(cli.circuits, "screen", interrupted)  # of other prompts it is made again
        assert run(*words, "--n-train", "21").exit_code == 130
    both = [swd.Run.load(folder) for folder in (tmp_path / "run", alone[0])]
    assert both[0].circuit_table().equals(both[1].circuit_table())


def test_ctrl_c_before_a_command_has_begun_is_one_line(monkeypatch, capsys):
    def interrupted():
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "_run", interrupted)
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 130


@pytest.mark.slow
def test_the_memory_of_a_study_is_bounded_by_its_estimate(default_model):
    """Tensors of each part, as torch's profiler counts them."""
    task = swd.load_task("ioi", default_model, n_train=64, n_test=64)
    sites, heldout = {"last two": "blocks.[23].mlp_out"}, swd.text_tokens(4096, split="test")
    needed = memory_of(default_model, sites, [task], sparsities=(0.5,), heldout_length=heldout.shape[1])
    assert list(needed) == ["factorize", "fidelity", "attribution of ioi", "curves of ioi"]
    factors = swd.factorize(
        default_model, sites["last two"], sparsity=0.5, preset="quick", outer_iterations=4, progress=False
    )
    scores = swd.attribute(default_model, factors, task)
    calls = {
        "fidelity": lambda: swd.fidelity(default_model, factors, heldout),
        "attribution of ioi": lambda: swd.attribute(default_model, factors, task),
        "curves of ioi": lambda: swd.evaluate(default_model, factors, task, scores),
    }
    for part, call in calls.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        held = most = 0
        for event in sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                most = max(most, held)
        assert 0 < most <= needed[part], part
    larger = memory_of(default_model, sites, [task], sparsities=(0.5, 0.6, 0.7), heldout_length=128)
    assert all(larger[part] > needed[part] - needed["fidelity"] for part in needed)

    def bytes_of(n_sparsities: int, *controls: str) -> int:
        how = {"sparsities": (0.5, 0.6)[:n_sparsities], "controls": controls}
        return memory_of(default_model, sites, [task], **how)["attribution of ioi"]

    # Every solved control is one more set of factors per sparsity; units of "pruned" are inputs, as those of neurons.
    d_in, d_out = 512, 128
    pairs = {units: 2 * 4 * (units * (d_in + d_out) + d_in * d_out) for units in (d_in, d_out)}  # two layers
    for n in (1, 2):
        plain = bytes_of(n, "neurons", "svd")
        assert bytes_of(n, "neurons", "svd", "svd_pruned") - plain == n * pairs[d_out]
        assert bytes_of(n, "neurons", "svd", "paper") - plain == n * pairs[d_out]
        assert bytes_of(n, "neurons", "svd", "pruned") - plain == n * pairs[d_in]


def test_long_names_leave_the_numbers_whole():
    name = "SWD s=0.685, tuned (" + "a-very-long-folder-" * 4 + ")"
    frame = pd.DataFrame({"method": [name, "SVD"], "edges": [1234567, 7654321], "half": ["1,234 / 5,678,901", ""]})
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(terminal.table("Factors", frame))
    shown = console.export_text()
    assert max(map(len, shown.splitlines())) <= 80 and "…" not in shown
    assert "1,234,567" in shown and "1,234 / 5,678,901" in shown
    words = "".join(line.split("│")[1].strip() for line in shown.splitlines() if line.startswith("│"))
    assert words.replace(" ", "") == f"{name}SVD".replace(" ", "")


def test_a_warning_is_one_line_without_code():
    before = warnings.formatwarning
    with cli.options._told(False):
        line = warnings.formatwarning("odd\x1b", UserWarning, "swd_lens/x.py", 3)
    assert line == "warning: odd␛\n" and warnings.formatwarning is before
