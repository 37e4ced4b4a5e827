"""swd-lens finetune and train-baseline: folders that Python reads, the same command going on, settings, and what is refused."""

import json

import pytest
import torch

import swd_lens as swd
from swd_lens.cli.baselines import parsed_settings
from swd_lens.train.baselines import LearnedUnits
from swd_lens.train.engine import Engine
from tests.cli.commands import refused, words
from tests.cli.commands import run as run_command

SMALL = ["--tokens", "1024", "--heldout-tokens", "256", "--n-tokens", "2048", "--set", "tokens_per_step=1024"]


def run(*arguments):
    return run_command("train-baseline", *arguments)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize(
    ("command", "site", "settings"),
    [
        ("transcoder", "blocks.1.mlp", ("width=64", "l1=1e-3")),
        ("vpd-recon", "blocks.1.mlp_out", ("width=64", "importance=shared_mlp")),
        ("vpd-kl", "blocks.1.mlp_out", ("width=64", "hidden=4")),
    ],
)
def test_units_are_trained_saved_measured_and_taken_over(tmp_path, default_model, monkeypatch, command, site, settings):
    arguments = [command, "--out", tmp_path / "b", "--site", site, *SMALL]
    arguments += [word for setting in settings for word in ("--set", setting)]
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.output
    printed, units = json.loads(result.stdout), LearnedUnits.load(tmp_path / "b")
    assert printed["tokens"] == units.tokens == 2048 and units.provenance["settings"]["width"] == 64
    again = swd.fidelity(default_model, units, swd.text_tokens(256, split="test"))
    assert printed["fidelity"]["kl"] == pytest.approx(again.kl, abs=1e-9)
    assert printed["activity"][0]["units"] == 64
    monkeypatch.setattr(Engine, "advance", lambda *args: pytest.fail("trained again"))
    same = run(*arguments)
    assert same.exit_code == 0 and "Units at work" in same.output and "LearnedUnits.load" in same.output
    refused("learning_rate ", "train-baseline", *arguments, "--set", "learning_rate=0.0004")


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
    result = run("sparse-pretrain", "--out", tmp_path / "s", "--json", *sizes, "--tokens", 1024, "--heldout-tokens", 256)
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    model = swd.load_host(printed["folder"])
    assert (model.cfg.n_layers, model.cfg.d_mlp) == (4, 512) and printed["units"] == 4 * 512
    assert printed["heldout_ce"] == pytest.approx(printed["provenance"]["heldout_ce"])


OF_TRANSCODER, OF_SPARSE = ["transcoder", "--site", "blocks.1.mlp_out"], ["sparse-pretrain"]


@pytest.mark.parametrize(
    ("command", "more", "says"),
    [
        (OF_TRANSCODER, ["--set", "widht=3"], "did you mean width"),
        (OF_TRANSCODER, ["--set", "width"], "give NAME=VALUE"),
        (OF_TRANSCODER, ["--site", "mlp_out"], "'mlp_out' names 4 sites"),
        (OF_TRANSCODER, ["--set", "width=many"], "width='many': give a number of units"),
        (OF_TRANSCODER, ["--set", "tokens_per_step=8192"], "tokens_per_step=8192 cannot be made of these 16 rows of 128 tokens"),
        (OF_SPARSE, ["--preset", "papr"], "no preset 'papr'; did you mean paper? valid: paper, small"),
        (OF_SPARSE, ["--set", "updats=3"], "did you mean updates"),
        (OF_SPARSE, ["--set", "end_density=0.001"], "each row keeps one; give a larger end_density"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, command, more, says):
    refused(says, "train-baseline", *command, "--tokens", 2048, "--heldout-tokens", 1024, *more, out=tmp_path / "b")


def test_values_are_read_as_json_or_python_writes_them():
    given = ["a=.001", "b=1e-3", "c=None", "d=null", "e=True", "f=true", "g=4x", "h = bfloat16", "i="]
    read = {"a": 0.001, "b": 0.001, "c": None, "d": None, "e": True, "f": True, "g": "4x", "h": "bfloat16", "i": ""}
    assert parsed_settings(given) == read


@pytest.mark.parametrize("command", ["transcoder", "sparse-pretrain"])
def test_help_names_what_can_be_chosen(command):
    result = run(command, "--help")
    text = words(result.output)
    assert result.exit_code == 0 and "goes on where it was stopped" in text
    assert "small" in text and "paper" in text and "NAME=VALUE" in text


def test_a_local_checkpoint_trained_on_a_text_file(tmp_path, gpt2_folder):
    """A folder and a file in, units and a sparse model of the same shape out; both are then used by other commands."""
    folder, text = gpt2_folder, tmp_path / "text.txt"
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
    factorized = run_command("factorize", "--model", made, *more)
    assert factorized.exit_code == 0, factorized.output
    again = ["train-baseline", "transcoder", *asked[:-4], *small]
    refused("a baseline is trained on its first part", *again, *taken[2:], out=tmp_path / "x")
    text.write_text("Too short.")
    refused("too few for one row of 63", *again, *taken, out=tmp_path / "x")


def test_a_trained_baseline_stands_beside_swd_in_circuits_and_report(tmp_path):
    trained = tmp_path / "tc"
    made = run("transcoder", "--out", trained, "--site", "blocks.1.mlp_out", "--set", "width=16", *SMALL)
    assert made.exit_code == 0, made.output
    small = ["--tokens", "256", "--heldout-tokens", "256", "--n-train", "4", "--n-validation", "4", "--n-test", "4"]
    small += ["--task", "gendered_pronoun", "--outer-iterations", "4", "-s", "0.5", "--preset", "quick", "--controls", "none"]

    def circuit(site):
        return ["circuit", "--sites", site, *small, "--beside", trained]

    refused("transcoder (tc) replaces blocks.1.mlp_out", *circuit("blocks.2.mlp_out"), out=tmp_path / "run")
    refused("rename one of them", *circuit("blocks.1.mlp_out"), "--beside", trained, out=tmp_path / "run")
    assert (done := run_command(*circuit("blocks.1.mlp_out"), "--out", tmp_path / "run")).exit_code == 0, done.output
    read = swd.Run.load(tmp_path / "run")
    (comparison,) = read.comparisons.values()
    units = LearnedUnits.load(trained)
    whole = comparison["gendered_pronoun"].curves["transcoder (tc)"].rows.iloc[-1]
    assert (whole["units"], whole["edges"]) == (16, units.edges) and read.settings["beside"] == ["transcoder (tc)"]
    ce = swd.fidelity(swd.load_default_model(), units, swd.text_tokens(256, split="test")).ce
    assert comparison.fidelities["transcoder (tc)"].ce == pytest.approx(ce, abs=1e-9)
    assert "transcoder (tc)" in (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
