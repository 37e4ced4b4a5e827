"""circuit with finished and tuned factors, several interventions, hosts in half precision."""

import json

import pytest
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from tests.cli.test_cli import PROMPTS, SMALL, gpt2_folder  # noqa: F401 - a fixture

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


def test_finished_and_tuned_factors_are_compared_without_solving(tmp_path, whole, monkeypatch, default_model):
    def solved(*_, **__):
        raise AssertionError("something was factorized")

    monkeypatch.setattr("swd_lens.study.run.factorize", solved)
    given = ["--factors", whole, "--factors", whole / "factors"]
    refused = run("circuit", *given[2:], *given[2:], "--task", "ioi", "--out", tmp_path / "x")
    assert refused.exit_code == 1 and "rename one of them" in " ".join(refused.stderr.split())
    modes = ["--ablation", "mean", "--ablation", "zero", "--positions", "scoring", "--positions", "all"]
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


def test_factors_beside_new_ones_and_ten_random_b_seeds(tmp_path, whole):
    words = ["--factors", whole, "--sites", "blocks.[23].mlp_out", "-s", "0.5", "--controls", "random_b"]
    result = run(
        "circuit", *words, "--random-b-seeds", "4", "--task", "ioi", *SMALL, *PROMPTS, "--out", tmp_path, "--json"
    )
    assert result.exit_code == 0, result.output
    methods = [curve["method"] for curve in json.loads(result.stdout)["circuits"]]
    assert methods == ["SWD s=0.5", "SWD s=0.6, tuned (whole)", *(f"Random-B/{seed}" for seed in range(4))]


def test_factors_of_another_model_are_refused_before_any_text_is_read(tmp_path, whole, gpt2_folder):  # noqa: F811
    other = ["--model", gpt2_folder, "--text", tmp_path / "missing.txt", "--task", "ioi", "--out", tmp_path / "x"]
    result = run("circuit", "--factors", whole, *other)
    said = " ".join(result.stderr.split())
    assert result.exit_code == 1 and "blocks.2.mlp_out" in said and "missing.txt" not in said
    nothing = run("circuit", "--factors", tmp_path / "nothing", "--task", "ioi", "--out", tmp_path / "x")
    assert nothing.exit_code == 1 and "nothing" in " ".join(nothing.stderr.split())
    none = run("circuit", "--task", "ioi", "--out", tmp_path / "x")
    assert none.exit_code == 1 and "--sites, finished factors (--factors), or both" in " ".join(none.stderr.split())
    assert not (tmp_path / "x").exists()


def test_circuit_in_bfloat16(tmp_path, gpt2_folder):  # noqa: F811
    host = ["--model", gpt2_folder, "--sites", "blocks.1.mlp_out", "--task", "gendered_pronoun", "-s", "0.5"]
    small = ["--text", __file__, *SMALL, "--tokens", "64", "--heldout-tokens", "64", *PROMPTS]
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
