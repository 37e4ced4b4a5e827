"""Runs of a screen: shortened ones give what plain ones do, on every family of hosts."""

import pytest

import swd_lens as swd
from swd_lens.tasks.split import TaskExample
from tests import families


def words(model):
    names = ["Mary", "John", "Anna", "Paul", "Emma", "Mark"]
    examples = [
        TaskExample(f"{'Then ' * (i % 3)}{a} met {b} at the park and", (f" {a}",), (f" {b}",))
        for i, (a, b) in enumerate((a, b) for a in names for b in names if a != b)
    ]
    return swd.Task.from_examples("words", examples[:12], examples[12:16], model)


# Not qwen2, whose tokenizer class of transformers makes nothing of the embedded model's vocabulary.
@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("family", ["gpt2", "pythia", "llama", "qwen3", "gemma2", "qwen3_5", "bert"])
def test_shortcuts_change_nothing_on_other_hosts(family, monkeypatch):
    model = families.bridge(family)
    task = words(model)
    shortened = swd.screen(model, task, n_prompts=9)
    monkeypatch.setattr("swd_lens.circuits.screen_runs.verified", lambda *_, **__: False)
    plain = swd.screen(model, task, n_prompts=9)
    assert plain.settings["fast_forward"]["words"] == []
    assert ("prefix" in shortened.settings["fast_forward"]["words"]) is (family != "bert")
    for name, margin in plain.tasks["words"].margins.items():
        assert shortened.tasks["words"].margins[name] == pytest.approx(margin, abs=2e-3), name
