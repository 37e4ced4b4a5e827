"""Errors of other libraries that pass through: nothing in their text acts on a terminal, down to what they were raised from."""

import json
import traceback

import pytest

import swd_lens as swd
from swd_lens.base.errors import errors_seen, visible_lines

NAMES = ["a\x1b[31mred\x1b[0m", "a\u202eb", "a\udcffb"]


@errors_seen
def passes_on(raised, cause=None):
    raise raised from cause


@pytest.mark.parametrize("name", NAMES)
def test_the_text_of_an_error_and_of_its_causes_is_seen(name):
    earlier = KeyError(name)
    with pytest.raises(RuntimeError) as raised:
        passes_on(RuntimeError(f"no {name}\nhere", 3), ValueError(f"for {name}"))
    assert raised.value.args == (f"no {visible_lines(name)}\nhere", 3)
    assert str(raised.value.__cause__) == f"for {visible_lines(name)}"
    with pytest.raises(OSError) as of_a_file:
        try:
            raise earlier
        except KeyError:
            passes_on(FileNotFoundError(2, "nothing there", name))
    assert of_a_file.value.filename == name and earlier.args == (visible_lines(name),)
    told = "".join(traceback.format_exception(raised.value)) + "".join(traceback.format_exception(of_a_file.value))
    assert all(line.isprintable() for line in told.split("\n"))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("call", [swd.load_host, lambda name: swd.load_host(name, kind="bridge"), swd.FactorSet.from_pretrained])
def test_what_transformers_and_the_hub_say_of_a_name_is_seen(name, call):
    with pytest.raises((OSError, ValueError)) as raised:
        call(name)
    assert all(line.isprintable() for line in "".join(traceback.format_exception(raised.value)).split("\n"))


def test_half_a_character_in_a_name_or_label_is_its_number(tmp_path):
    model = swd.load_default_model()
    prompts, labelled = [[2, 3, 4 + i] for i in range(12)], "blocks.0.mlp_out/0"
    task = swd.Task.from_tokens("a\ud83d", model, prompts, [5] * 12, [6] * 12)
    assert task.name == task.test.task == "a⟨U+D83D⟩"
    (tmp_path / "labels.jsonl").write_text(json.dumps({"unit": labelled, "label": "joy\ud83d", "note": "two\nlines"}))
    labels = swd.UnitLabels.load(tmp_path / "labels.jsonl")
    assert labels[labelled].label == "joy⟨U+D83D⟩" and labels[labelled].note == "two\nlines"
    assert labels.table()["label"][0] == "joy⟨U+D83D⟩" and "joy⟨U+D83D⟩" in labels._repr_html_()
