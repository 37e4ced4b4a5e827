"""What commands share: one line for a mistake, a full disk or Ctrl-C, text that fits and text that judges."""

import os
import resource
import warnings

import pytest
import torch

import swd_lens as swd
from swd_lens import cli
from swd_lens.cli.options import ModelOptions, TextOptions
from swd_lens.tasks import pack_text
from tests.cli.commands import SMALL, program, refused, run
from tests.forks import run_forked


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["factorize", "--sites", "blocks.9.mlp_out"], "no site matches 'blocks.9.mlp_out'. Nearest: blocks."),
        (["factorize", "--sites", "mlp_out", "-s", "1.5"], "sparsity"),
        (["factorize", "--sites", "mlp_out", "--preset", "bset"], "no preset 'bset'; did you mean best"),
        (["factorize", "--sites", "mlp_out", "--units", "many"], "units='many': give a number"),
        (["circuit", "--sites", "mlp_out", "--task", "iou"], "'iou' is neither a task family"),
        (["circuit", "--sites", "mlp_out", "--task", "ioi", "--ablation", "max"], "--ablation must be one of 'mean', 'zero',"),
        (["circuit", "--sites", "mlp_out", "--task", "ioi", "--controls", "svd,pca"], "--controls (or 'none') must be"),
        (["factorize", "--sites", "mlp_out", "--text", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_give_one_line_exit_code_1_and_no_files(tmp_path, arguments, message):
    refused(message, *arguments, out=tmp_path / "out")


def test_a_named_text_fits_and_judges(tmp_path, gpt2_folder, monkeypatch):
    asked = []

    def documents(name):
        asked.append(name)
        return iter(["the cat and the dog went home"] * 200)

    monkeypatch.setattr("swd_lens.tasks.text.named_documents", documents)
    small = ["--tokens", "128", "--heldout-tokens", "64", "--preset", "paper", "--outer-iterations", "4"]
    made = ["--model", gpt2_folder, "--sites", "blocks.0.mlp_out", "-s", "0.5", "--text", "sotu", "--json"]
    result = run("factorize", "--out", tmp_path / "f", *made, *small)
    assert result.exit_code == 0, result.output
    assert asked == ["sotu"]
    assert swd.FactorSet.load(tmp_path / "f").provenance["tokens"] == 128


def test_another_model_needs_text(tmp_path, gpt2_folder):
    refused("--text FILE is needed", "factorize", "--model", gpt2_folder, "--sites", "mlp_out", out=tmp_path / "out")


@pytest.mark.parametrize(
    "arguments", [["demo"], ["circuit", "--sites", "mlp_out", "--task", "ioi"], ["replace"], ["factorize", "--sites", "mlp_out"]]
)
def test_an_impossible_out_is_refused_before_any_work(tmp_path, monkeypatch, arguments):
    """It was noticed after the whole study."""

    for name in ("cli.circuits.run_study", "cli.matrices.fidelity", "cli.matrices.estimate_cost", "study.replacement.allocate"):
        monkeypatch.setattr(f"swd_lens.{name}", lambda *_, **__: pytest.fail("it worked"))
    (tmp_path / "file").write_text("mine")
    for out in (tmp_path / "file", tmp_path / "file" / "below"):
        refused("is no folder", *arguments, "--out", out)
    assert [path.name for path in tmp_path.iterdir()] == ["file"] and (tmp_path / "file").read_text() == "mine"


def test_a_full_disk_gives_one_line_with_the_path(tmp_path):
    """A traceback of safetensors without a path was once all that was said."""

    def small():
        resource.setrlimit(resource.RLIMIT_FSIZE, (8192, 8192))

    out, arguments = tmp_path / "f", ["--sites", "blocks.1.mlp_out", "--preset", "quick", *SMALL]
    code = program("factorize", "--out", out, *arguments)
    done = run_forked(code, before=small)
    assert done.returncode == 1 and "Traceback" not in done.stderr and not done.stdout, done.stderr
    assert "error:" in done.stderr and str(out) in "".join(done.stderr.split())
    assert not list(tmp_path.rglob("*.part")) and not list(tmp_path.rglob("*.safetensors"))


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="/dev/full is the disk that is always full")
def test_an_output_that_is_full_gives_one_line():
    with open("/dev/full", "w") as full:
        done = run_forked(program("estimate", "--shape", "64x64"), stdout=full.fileno())
    assert done.returncode != 0 and "error: " in done.stderr and "Traceback" not in done.stderr, done.stderr


def test_what_nobody_foresaw_is_one_line_too(tmp_path, monkeypatch):
    def broken(*_, **__):
        raise KeyError("odd\x1b\u202e")

    monkeypatch.setattr(cli.circuits.Run, "load", broken)
    result = run("report", tmp_path)
    assert result.exit_code == 1 and "error: KeyError: 'odd\\x1b\\u202e'" in result.stderr
    assert "SWD_LENS_TRACEBACK=1" in result.stderr and "Traceback" not in result.output
    monkeypatch.setenv("SWD_LENS_TRACEBACK", "1")
    assert isinstance(run("report", tmp_path).exception, KeyError)


def test_text_that_judges_is_none_that_fits_however_much_is_asked_for(tmp_path, capsys):
    model, file = swd.load_default_model(), tmp_path / "text.txt"
    file.write_text(" ".join(f"the {number} mill" for number in range(600)), encoding="utf-8")
    every = pack_text(model, file.read_text(encoding="utf-8"))
    calibration, heldout = TextOptions(text=file, tokens=10**6, heldout_tokens=200).rows(model, ModelOptions())
    assert f"text.txt: taken as 1 document of {every.numel():,} tokens" in " ".join(capsys.readouterr().err.split())
    assert torch.equal(torch.cat([calibration, heldout]), every) and len(heldout) == 2
    # Without calibration no half of the text is kept for it.
    nothing, heldout = TextOptions(text=file, tokens=0, heldout_tokens=10**6).rows(model, ModelOptions())
    assert nothing is None and torch.equal(heldout, every)


def test_a_warning_is_one_line_without_code():
    before = warnings.formatwarning
    with cli.options._told(False):
        line = warnings.formatwarning("odd\x1b", UserWarning, "swd_lens/x.py", 3)
    assert line == "warning: odd␛\n" and warnings.formatwarning is before
