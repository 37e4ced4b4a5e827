"""swd-lens finetune and train-baseline: folders that Python reads, the same command going on, settings, and what is refused."""

import json
import re

import pytest
import torch
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.cli.baselines import parsed_settings
from swd_lens.train.baselines import LearnedUnits
from swd_lens.train.engine import Engine
from tests.cli.commands import run as run_command

SMALL = ["--tokens", "2048", "--heldout-tokens", "1024", "--n-tokens", "3072"]


def run(*arguments):
    return run_command("train-baseline", *arguments)


@pytest.mark.parametrize(
    ("command", "site", "settings"),
    [
        ("transcoder", "blocks.1.mlp", ("width=64", "l1=1e-3")),
        ("vpd-recon", "blocks.1.mlp_out", ("width=64", "importance=shared_mlp")),
        ("vpd-kl", "blocks.1.mlp_out", ("width=64", "hidden=4")),
    ],
)
def test_units_are_trained_saved_and_measured(tmp_path, default_model, command, site, settings):
    arguments = [command, "--out", tmp_path / "b", "--site", site, "--json", *SMALL]
    result = run(*arguments, *(word for setting in settings for word in ("--set", setting)))
    assert result.exit_code == 0, result.output
    printed, units = json.loads(result.stdout), LearnedUnits.load(tmp_path / "b")
    assert printed["tokens"] == units.tokens == 3072 and units.provenance["settings"]["width"] == 64
    again = swd.fidelity(default_model, units, swd.text_tokens(1024, split="test"))
    assert printed["fidelity"]["kl"] == pytest.approx(again.kl, abs=1e-9)
    assert printed["activity"][0]["units"] == 64


def test_the_same_command_takes_over_and_another_is_refused(tmp_path, monkeypatch):
    arguments = ["transcoder", "--out", tmp_path / "b", "--site", "blocks.1.mlp_out", "--set", "width=16", *SMALL]
    first = run(*arguments)
    assert first.exit_code == 0 and "Units at work" in first.output and "LearnedUnits.load" in first.output
    monkeypatch.setattr(Engine, "advance", lambda *args: pytest.fail("trained again"))
    assert run(*arguments).exit_code == 0
    other = run(*arguments, "--set", "learning_rate=0.0004")
    assert other.exit_code == 1 and "learning_rate 0.01 then, 0.0004 now" in re.sub(r"\s+", " ", other.output)


def test_finished_factors_are_fine_tuned_on_their_supports(tmp_path, default_model):
    how = {"preset": "quick", "outer_iterations": 4, "calibration": "zero-data", "progress": False}
    given = swd.factorize(default_model, "blocks.1.mlp_out", sparsity=0.6, **how)
    given.save(tmp_path / "given")
    sizes = ["--tokens", "2048", "--heldout-tokens", "256", "--set", "steps=2", "--set", "batch_size=4"]
    arguments = ["finetune", "--factors", str(tmp_path / "given"), "--out", str(tmp_path / "tuned"), *sizes]
    result = run_command(*arguments, "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    before, tuned = given["blocks.1.mlp_out"], swd.FactorSet.load(printed["factors"])["blocks.1.mlp_out"]
    assert printed["tokens"] == 2 * 4 * 128 and not torch.equal(tuned.write, before.write)
    assert torch.equal(tuned.write != 0, before.write != 0) and torch.equal(tuned.read != 0, before.read != 0)
    again = run_command(*arguments)  # finished: nothing is trained, the table is shown
    assert again.exit_code == 0 and "Fine-tuned" in again.stdout and "swd.FactorSet.load reads it" in again.stdout


def test_a_sparse_model_is_pretrained_in_the_shape_of_a_host(tmp_path, default_model):
    sizes = ["--set", "updates=3", "--set", "tokens_per_update=1024"]
    result = run("sparse-pretrain", "--out", tmp_path / "s", "--json", *sizes, "--tokens", 2048, "--heldout-tokens", 1024)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    model = swd.load_host(printed["folder"])
    assert (model.cfg.n_layers, model.cfg.d_mlp) == (4, 512) and printed["units"] == 4 * 512
    assert printed["heldout_ce"] == pytest.approx(printed["provenance"]["heldout_ce"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "widht=3"], "did you mean width"),
        (["--set", "width"], "give NAME=VALUE"),
        (["--preset", "papr"], "no preset 'papr'; did you mean paper"),
        (["--site", "blocks.9.mlp_out"], "no site matches 'blocks.9.mlp_out'"),
        (["--site", "mlp_out"], "'mlp_out' names 4 sites"),
        (["--set", "width=many"], "width='many': give a number of units"),
        (["--set", "learning_rate=-1"], "learning_rate=-1: give a finite number above 0"),
        (["--set", "tokens_per_step=100"], "tokens_per_step=100 cannot be made of these 16 rows of 128 tokens"),
        (["--set", "tokens_per_step=8192"], "tokens_per_step=8192 cannot be made of these 16 rows of 128 tokens"),
        (["--text", "missing.txt"], "missing.txt"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, more, says):
    result = run("transcoder", "--out", tmp_path / "b", "--site", "blocks.1.mlp_out", *SMALL, *more)
    assert result.exit_code == 1 and says in re.sub(r"\s+", " ", result.stderr)
    assert "Traceback" not in result.output and not (tmp_path / "b").exists()


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--preset", "papr"], "no preset 'papr'; did you mean paper? valid: paper, small"),
        (["--set", "updats=3"], "did you mean updates"),
        (["--set", "tokens_per_update=100"], "cannot be made of these 16 rows of 128 tokens"),
        (["--set", "end_density=0.001"], "each row keeps one; give a larger end_density"),
    ],
)
def test_mistakes_of_sparse_pretraining(tmp_path, more, says):
    result = run("sparse-pretrain", "--out", tmp_path / "s", "--tokens", 2048, "--heldout-tokens", 1024, *more)
    assert result.exit_code == 1 and says in re.sub(r"\s+", " ", result.stderr)
    assert not (tmp_path / "s").exists()


def test_values_are_read_as_json_or_python_writes_them():
    given = ["a=.001", "b=1e-3", "c=None", "d=null", "e=True", "f=true", "g=4x", "h = bfloat16", "i="]
    read = {"a": 0.001, "b": 0.001, "c": None, "d": None, "e": True, "f": True, "g": "4x", "h": "bfloat16", "i": ""}
    assert parsed_settings(given) == read


@pytest.mark.parametrize("command", ["transcoder", "vpd-recon", "vpd-kl", "sparse-pretrain"])
def test_help_names_what_can_be_chosen(command):
    result = run(command, "--help")
    text = re.sub(r"[\s│]+", " ", re.sub(r"\x1b\[[0-9;]*m", "", result.output))
    assert result.exit_code == 0 and "goes on where it was stopped" in text
    assert "small" in text and "paper" in text and "NAME=VALUE" in text


def test_a_local_checkpoint_trained_on_a_text_file(tmp_path, default_model):
    """A folder and a file in, units and a sparse model of the same shape out; both are then used by other commands."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder, text = tmp_path / "gpt2", tmp_path / "text.txt"
    config = GPT2Config(vocab_size=default_model.cfg.d_vocab, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    torch.manual_seed(0)
    GPT2LMHeadModel(config).save_pretrained(folder)
    default_model.tokenizer.save_pretrained(folder)
    text.write_text(" ".join(f"Tom has {n} apples and Ann has {n + 1}." for n in range(300)))
    taken = ["--text", text, "--tokens", 1024, "--heldout-tokens", 512, "--threads", torch.get_num_threads(), "--json"]
    asked = ["--model", folder, "--site", "h.1.mlp.c_proj", "--out", tmp_path / "t", "--n-tokens", 1024]
    small = ["--set", "tokens_per_step=256", "--set", "width=0.5x"]
    result = run("transcoder", *asked, *small, *taken)
    assert result.exit_code == 0, result.output
    assert json.loads(result.stdout)["activity"][0]["units"] == 64  # half of 128
    units = LearnedUnits.load(tmp_path / "t")
    assert list(units) == ["blocks.1.mlp_out"] and units.provenance["settings"]["tokens_per_step"] == 256
    with swd.attach(swd.load_host(str(folder)), units):
        pass
    sizes = ["--set", "updates=3", "--set", "tokens_per_update=256"]
    result = run("sparse-pretrain", "--like", folder, "--out", tmp_path / "s", *sizes, *taken)
    assert result.exit_code == 0, result.output
    made = json.loads(result.stdout)["folder"]
    more = ["--sites", "blocks.0.mlp_out", "--out", tmp_path / "f", "--outer-iterations", 4, *taken]
    factorized = CliRunner().invoke(cli.app, ["factorize", "--model", made, *map(str, more)])
    assert factorized.exit_code == 0, factorized.output
    short = run("transcoder", *asked[:-4], "--out", tmp_path / "x", *small, *taken[2:])
    assert short.exit_code == 1 and "a baseline is trained on its first part" in re.sub(r"\s+", " ", short.stderr)
    text.write_text("Too short.")
    short = run("transcoder", *asked[:-4], "--out", tmp_path / "x", *small, *taken)
    assert short.exit_code == 1 and "too few for one row of 63" in re.sub(r"\s+", " ", short.stderr)


def test_a_trained_baseline_stands_beside_swd_in_circuits_and_report(tmp_path):
    trained = tmp_path / "tc"
    made = run("transcoder", "--out", trained, "--site", "blocks.1.mlp_out", "--set", "width=16", *SMALL)
    assert made.exit_code == 0, made.output
    small = ["--tokens", "2048", "--heldout-tokens", "1024", "--n-train", "12", "--n-test", "8", "--task", "ioi"]
    small += ["--outer-iterations", "4", "-s", "0.5", "--preset", "quick", "--controls", "none"]

    def circuit(site, *folders):
        beside = [word for folder in folders for word in ("--beside", folder)]
        words = ["circuit", "--sites", site, *small, *beside, "--out", tmp_path / "run"]
        return CliRunner().invoke(cli.app, list(map(str, words)))

    other = circuit("blocks.2.mlp_out", trained)
    assert other.exit_code == 1 and "transcoder (tc) replaces blocks.1.mlp_out" in re.sub(r"\s+", " ", other.stderr)
    twice = circuit("blocks.1.mlp_out", trained, trained)
    assert twice.exit_code == 1 and "rename one of them" in re.sub(r"\s+", " ", twice.stderr)
    assert not (tmp_path / "run").exists()
    assert (done := circuit("blocks.1.mlp_out", trained)).exit_code == 0, done.output
    read = swd.Run.load(tmp_path / "run")
    (comparison,) = read.comparisons.values()
    units = LearnedUnits.load(trained)
    whole = comparison["ioi"].curves["transcoder (tc)"].rows.iloc[-1]
    assert (whole["units"], whole["edges"]) == (16, units.edges) and read.settings["beside"] == ["transcoder (tc)"]
    ce = swd.fidelity(swd.load_default_model(), units, swd.text_tokens(1024, split="test")).ce
    assert comparison.fidelities["transcoder (tc)"].ce == pytest.approx(ce, abs=1e-9)
    assert "transcoder (tc)" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    (tmp_path / "run" / "report.html").unlink()
    again = CliRunner().invoke(cli.app, ["report", str(tmp_path / "run")])
    assert again.exit_code == 0 and "transcoder (tc)" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
