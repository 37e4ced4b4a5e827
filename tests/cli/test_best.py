"""circuit --best: it finds, saves and takes over, and names of tasks are folders."""

import json

import pytest

from swd_lens.study.best import BestCircuit
from tests.cli.commands import refused, run


@pytest.mark.slow
def test_circuit_best_finds_saves_and_takes_over(tmp_path, monkeypatch):
    arguments = ["circuit", "--best", "--task", "gendered_pronoun", "--sites", "blocks.2.attn_o", "--minutes", "1e-6"]
    arguments += ["--out", tmp_path, *["--tokens", "1024", "--heldout-tokens", "1024", "--n-train", "48", "--n-test", "40"]]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    best = BestCircuit.load(tmp_path / "gendered_pronoun")
    assert f"{best.n_edges:,} edges" in " ".join(result.stdout.split())
    assert max(map(len, result.stdout.splitlines())) <= 80

    def searched(*_, **__):
        raise AssertionError("it was there")

    monkeypatch.setattr("swd_lens.study.best._Search", searched)
    again = run(*arguments)
    assert again.exit_code == 0 and again.stdout == result.stdout
    for said, *more in (
        ("kl 0.001 then, 0.01 now", "--kl", "0.01"),
        ("leave out --controls", "--controls", "svd"),
        ("leave out --positions, options of the solver", "--positions", "all", "--preset", "quick"),
        ("needs tokens", "--tokens", "0"),
        ("leave out --ce", "--ce", "0.01"),
    ):
        refused(said, *arguments, *more)


@pytest.mark.parametrize("name", ["factors", "words"])
def test_folders_of_tasks_take_no_place_of_ours_or_of_each_other(name, tmp_path):
    """A task of a file has the file's name: two of one name took each other's folder."""
    rows = [{"prompt": f"She {verb}", "answers": [" to"], "distractors": [" of"]} for verb in ("went", "ran", "came")]
    tasks = []
    for folder in ("one", "two"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
        tasks += ["--task", tmp_path / folder / f"{name}.jsonl"]
    arguments = ["circuit", "--best", "--sites", "blocks.2.attn_o", "--minutes", "1e-6"]
    arguments += ["--tokens", "256", "--heldout-tokens", "256"]
    refused(f"task '{name}'", *arguments, *(tasks if name == "words" else tasks[:2]), out=tmp_path / "out")
