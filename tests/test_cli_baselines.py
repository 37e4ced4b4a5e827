"""swd-lens train-baseline: folders that Python reads, the same command going on, settings, and what is refused."""

import json
import re

import pytest
from typer.testing import CliRunner

import swd_lens as swd
from swd_lens import cli
from swd_lens.baselines import LearnedUnits
from swd_lens.baselines.learned.train import Training

SMALL = ["--tokens", "2048", "--heldout-tokens", "1024", "--n-tokens", "3072"]


def run(*arguments):
    return CliRunner().invoke(cli.app, ["train-baseline", *map(str, arguments)])


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
    monkeypatch.setattr(Training, "_one", lambda *args: pytest.fail("trained again"))
    assert run(*arguments).exit_code == 0
    other = run(*arguments, "--set", "learning_rate=0.0004")
    assert other.exit_code == 1 and "learning_rate 0.003 then, 0.0004 now" in re.sub(r"\s+", " ", other.output)


def test_a_sparse_model_is_pretrained_in_the_shape_of_a_host(tmp_path, default_model):
    sizes = ["--set", "updates=3", "--set", "tokens_per_update=1024"]
    result = run(
        "sparse-pretrain", "--out", tmp_path / "s", "--json", *sizes, "--tokens", 2048, "--heldout-tokens", 1024
    )
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    model = swd.load_host(printed["folder"])
    assert (model.cfg.n_layers, model.cfg.d_mlp) == (4, 512) and printed["units"] == 4 * 512
    assert printed["heldout_ce"] == pytest.approx(printed["provenance"]["heldout_ce"])


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--set", "widht=3"], "did you mean 'width'"),
        (["--set", "width"], "give NAME=VALUE"),
        (["--preset", "papr"], "preset='papr': choose one of 'small'"),
        (["--site", "blocks.9.mlp_out"], "no site matches 'blocks.9.mlp_out'"),
    ],
)
def test_mistakes_are_told_in_one_line(tmp_path, more, says):
    result = run("transcoder", "--out", tmp_path / "b", "--site", "blocks.1.mlp_out", *SMALL, *more)
    assert result.exit_code == 1 and says in re.sub(r"\s+", " ", result.output)
    assert not (tmp_path / "b").exists()
