"""The commands for whole models: replace, estimate, and factorize in shards and on workers."""

import json

import pytest
import torch

import swd_lens as swd
from tests.cli.commands import SMALL, refused, run


@pytest.mark.slow
def test_replace_says_what_is_left_of_the_model(tmp_path, default_model):
    arguments = ["replace", "--out", tmp_path, "--sites", "blocks.0.attn_*", "-s", "0.7", "--budgets", "error", *SMALL]
    result = run(*arguments, "--finetune-tokens", "2048", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    tuned = swd.FactorSet.load(tmp_path / "finetune" / "factors")
    assert list(tuned) == [f"blocks.0.{kind}" for kind in ("attn_qkv", "attn_o")]
    again = swd.fidelity(default_model, tuned, swd.text_tokens(1024, split="test"))
    assert printed["after"]["kl"] == pytest.approx(again.kl, rel=1e-6)
    assert printed["edges"] == tuned.edges and printed["settings"]["calibration"] == "corrected"
    assert len(printed["samples"]["samples"]) == 3
    logged = [json.loads(line) for line in (tmp_path / "finetune" / "log.jsonl").read_text().splitlines()]
    assert logged[-1]["tokens"] == 2048
    # Again: nothing is made anew, and the tables are for people.
    again = run(*arguments, "--finetune-tokens", "2048")
    assert again.exit_code == 0 and "fine-tuned" in " ".join(again.output.split()) and "[0]" in again.output


def test_zero_data_leaves_nothing_to_fine_tune_on(tmp_path):
    refused("or --finetune none", "replace", "--out", tmp_path, "--sites", "mlp_out", "--tokens", "0")


@pytest.mark.slow
def test_shards_and_workers_give_the_factors_of_one_run(tmp_path):
    named = ["--sites", "mlp_out", *SMALL, "--calibration", "dense", "--threads", "1"]
    assert run("factorize", "--out", tmp_path / "whole", *named).exit_code == 0
    for shard in ("2/2", "1/2"):
        result = run("factorize", "--out", tmp_path / "shards", *named, "--shard", shard)
        assert result.exit_code == 0 and f"Shard {shard}: blocks." in result.output
    printed = json.loads(run("factorize", "--out", tmp_path / "shards", *named, "--shard", "1/2", "--json").stdout)
    assert printed["shard"] == "1/2" and [row["site"] for row in printed["sites"]]
    assert run("factorize", "--out", tmp_path / "shards", *named).exit_code == 0
    whole, shards = (swd.FactorSet.load(tmp_path / name) for name in ("whole", "shards"))
    assert all(torch.equal(whole[site].read, shards[site].read) for site in whole)
    refused("each matrix waits", "factorize", *named[:-4], "--shard", "1/2", out=tmp_path / "x")
    refused("workers='many'", "factorize", *named, "--workers", "many", out=tmp_path / "x")


def test_estimate_of_shapes_and_of_a_model():
    shapes = run("estimate", "--shape", "17408x5120", "--tokens", "0")
    assert shapes.exit_code == 0 and "17,408" in shapes.output and "zero-data" in shapes.output
    assert "memory:" in shapes.output and "time:" in shapes.output
    model = run("estimate", "--sites", "mlp_out", "--calibration", "corrected")
    assert model.exit_code == 0 and "4 matrices, calibration corrected" in model.output
    twice = run("estimate", "--shape", "100x50", "--shape", "100x50")
    assert "2 matrices" in twice.output and "100x50 #2" in twice.output
    refused("every shape given is estimated", "estimate", "--shape", "100x50", "--sites", "mlp_out")
    refused("as in 17408x5120", "estimate", "--shape", "17408")


def test_a_host_in_bfloat16(tmp_path, gpt2_folder):
    host, text = ["--model", gpt2_folder, "--dtype", "bfloat16"], ["--text", __file__, "--tokens", "0", "--heldout-tokens", "64"]
    result = run("factorize", *host, "--out", tmp_path / "f", "--sites", "mlp_out", *SMALL, *text, "--json")
    assert result.exit_code == 0, result.output
    assert swd.FactorSet.load(tmp_path / "f")["blocks.0.mlp_out"].provenance["dtype"] == "bfloat16"
    refused("the embedded one is small", "factorize", "--dtype", "bfloat16", "--sites", "mlp_out", out=tmp_path / "g")


def test_factorize_saves_factors_that_load_and_attach(tmp_path, default_model):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.mlp_out", "-s", "0.6", *SMALL]
    result = run(*arguments, "--weigh-outputs", "--json")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    factors = swd.FactorSet.load(tmp_path / "f")
    assert list(factors) == ["blocks.1.mlp_out"] == [row["site"] for row in printed["sites"]]
    assert printed["sites"][0]["edges"] == factors.edges
    again = swd.fidelity(default_model, factors, swd.text_tokens(1024, split="test"))
    assert printed["fidelity"]["ce_delta"] == pytest.approx(again.ce_delta, abs=1e-9)
    assert factors.provenance["weigh_outputs"] is True and factors["blocks.1.mlp_out"].settings["output_gram"] is True
    refused("weigh_outputs True then, None now", *arguments)


def test_factorize_to_a_goal(tmp_path):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.attn_o", "--heldout-tokens", "1024"]
    arguments += ["--tokens", "4096", "--kl", "0.002", "--preset", "pruned"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    factors = swd.FactorSet.load(tmp_path / "f")
    assert 0.9 * 0.002 <= factors.provenance["goal"]["chosen"]["KL"] <= 0.002
    assert "KL at most 0.002" in result.stderr and "Tried" in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80
    refused("beside a goal", *arguments, "--sparsity", "0.5", "--overwrite")


def test_factorize_takes_over_what_the_folder_holds_and_refuses_what_was_made_otherwise(tmp_path):
    arguments = ["factorize", "--out", tmp_path / "f", "--sites", "blocks.1.mlp_out", *SMALL, "--tokens", "0"]
    assert run(*arguments, "--preset", "quick", "--units", "2x").exit_code == 0
    made = {file.name: file.stat().st_mtime_ns for file in (tmp_path / "f").iterdir()}
    f = swd.FactorSet.load(tmp_path / "f")["blocks.1.mlp_out"]
    assert (f.n_units, f.settings["preset"], f.settings["outer_iterations"]) == (256, "quick", 4)

    assert run(*arguments, "--preset", "quick", "--units", "2x").exit_code == 0
    assert {file.name: file.stat().st_mtime_ns for file in (tmp_path / "f").iterdir()} == made
    refused("overwrite", *arguments, "--preset", "quick", "--units", "96")
    assert run(*arguments, "--preset", "quick", "--units", "96", "--overwrite").exit_code == 0
    assert swd.FactorSet.load(tmp_path / "f")["blocks.1.mlp_out"].n_units == 96
