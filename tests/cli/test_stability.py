"""swd-lens stability: a card on the terminal and in its folder, and the same command again."""

import json

from swd_lens.study.stability_card import Stability
from tests.cli.commands import refused, run


def test_a_card_and_the_same_command_again(tmp_path):
    arguments = ["stability", "--task", "gendered_pronoun", "--site", "blocks.2.attn_o", "--out", tmp_path, "--preset", "quick"]
    arguments += ["--outer-iterations", "4", "--tokens", "1024", "--heldout-tokens", "512", "--n-train", "20", "--n-test", "12"]
    arguments += ["--runs", "2", "--nulls", "1", "--vary", "prompts", "--vary", "corpus"]
    result = run(*arguments)
    assert result.exit_code == 0, result.output
    card = Stability.load(tmp_path / "stability.json")
    assert card.runs["axis"].tolist() == ["prompts", "corpus"] and len(card.nulls) == 1
    printed = " ".join(result.stdout.split())
    assert card.verdict in printed and "edges shared" in printed
    assert max(map(len, result.stdout.splitlines())) <= 80
    again = run(*arguments, "--json")
    assert again.exit_code == 0 and json.loads(again.stdout)["verdict"] == card.verdict
    refused("give --tokens", *arguments, "--tokens", "0")
