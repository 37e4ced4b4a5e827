"""swd-lens paper: its lists, plans, items and page, settings in place of a profile's, and what is refused."""

import json

import pytest

from swd_lens.study import paper
from tests.cli.commands import refused, run

SET = ['tasks={"gendered_pronoun": [8, 6]}', "heldout_tokens=256", "edit_tokens=512"]
SET += ["shifts=[-1, 1]", "other_tokens=32", "lora_rates=[0.08]", "outer_iterations=4"]
EDIT = ["paper", "edit", "--profile", "tiny", *(word for setting in SET for word in ("--set", setting))]


def test_without_an_item_they_are_listed():
    result = run("paper", "--profile", "tiny", "--json")
    assert result.exit_code == 0, result.output
    listed = json.loads(result.stdout)
    assert [row["item"] for row in listed["items"]] == list(paper.ITEMS)
    assert list(listed["profiles"]) == list(paper.PROFILES)


def test_a_dry_run_says_every_setting_and_touches_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("swd_lens.cli.paper._load", lambda *_: pytest.fail("a model was loaded"))
    result = run("paper", "single-matrix", "--profile", "paper", "--dry-run", "--out", tmp_path / "out", "--json")
    assert result.exit_code == 0, result.output
    planned = json.loads(result.stdout)["single-matrix"]
    settings = {each["name"]: each for each in planned["settings"]}
    assert settings["site"]["value"] == "blocks.8.mlp_out" and settings["site"]["source"] == "tab:replacement-surfaces"
    assert planned["cost"]["seconds"] > 0
    assert not (tmp_path / "out").exists()
    shown = run("paper", "all", "--profile", "tiny", "--dry-run").stdout
    assert "interaction_units" in shown and "good to a factor of three" in shown


def test_an_item_and_the_page_of_its_folder(tmp_path):
    result = run(*EDIT, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "Editing one unit" in result.stdout and "At a requested shift of 1" in result.stdout
    assert (tmp_path / "out" / "paper.html").is_file()
    (tmp_path / "out" / "paper.html").unlink()
    again = run("paper", "report", tmp_path / "out")
    assert again.exit_code == 0 and (tmp_path / "out" / "paper.html").is_file()
    finished = paper.results_in(tmp_path / "out")
    assert finished["edit"].settings["shifts"] == [-1, 1]


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["edits", "--profile", "tiny", "--out", "x"], "'edits' is no item of the paper; did you mean edit"),
        (["edit", "--profile", "tinny", "--out", "x"], "there is no profile 'tinny'; did you mean tiny"),
        (["edit", "--profile", "tiny"], "--out says where the items go"),
        (["report"], "report needs the folder of finished items"),
        (["report", "nowhere"], "nowhere holds no finished item of the paper"),
        (["edit", "--profile", "tiny", "--out", "x", "--set", "shifts"], "--set shifts: give NAME=VALUE"),
        (["edit", "--profile", "tiny", "--out", "x", "--set", "shifts=many"], "shifts='many' is of another type"),
    ],
)
def test_what_is_refused(tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    refused(message, "paper", *arguments)
    assert not list(tmp_path.iterdir())
