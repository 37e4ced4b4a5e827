"""StepCache: finished steps are read back, other calls refused, interrupted ones resumed."""

import pytest
import torch

from swd_lens.base.errors import ResumeError
from swd_lens.base.step_cache import CALL, FOLDER, StepCache, differences


def never(*_):
    raise AssertionError("made again")


def test_a_step_is_made_once_and_read_back_whatever_interrupts(tmp_path):
    def interrupted():
        raise KeyboardInterrupt

    first = StepCache(tmp_path, {"host": "a"})
    assert first.values(("one", "x"), lambda: {"n": 1, "nan": float("nan")}, dict) == {"n": 1, "nan": None}
    made = first.tensors(("two",), lambda: ({"t": torch.arange(3)}, {"v": 2}), lambda t, v: (t["t"].tolist(), v))
    with pytest.raises(KeyboardInterrupt):
        first.values(("three",), interrupted, dict)
    again = StepCache(tmp_path, {"host": "a"})
    assert ("one", "x") in again and ("two",) in again and ("three",) not in again
    assert again.values(("one", "x"), never, dict) == {"n": 1, "nan": None}
    assert again.tensors(("two",), never, lambda t, v: (t["t"].tolist(), v)) == made == ([0, 1, 2], {"v": 2})
    kept_nothing = StepCache(None)
    assert kept_nothing.values(("one",), lambda: {"n": 2}, dict) == {"n": 2} and ("one",) not in kept_nothing


def test_another_call_is_refused_and_growing_settings_may_grow(tmp_path):
    StepCache(tmp_path, {"host": "a" * 64, "n": 1}, {"tasks": {"ioi": "x"}})
    StepCache(tmp_path, {"host": "a" * 64, "n": 1}, {"tasks": {"ioi": "x", "docstring": "y"}})
    with pytest.raises(ResumeError, match=r"holds another run: host aaaaaaaa then, bbbbbbbb now; .*original settings to resume"):
        StepCache(tmp_path, {"host": "b" * 64, "n": 1}, {"tasks": {}})
    for tasks, told in (({"ioi": "x"}, "docstring 'y' then, None now"), ({"ioi": "z", "docstring": "y"}, "'x' then, 'z' now")):
        with pytest.raises(ResumeError, match=f"tasks: .*{told}"):
            StepCache(tmp_path, {"host": "a" * 64, "n": 1}, {"tasks": tasks})
    StepCache(tmp_path, {"host": "b"}, overwrite=True)
    StepCache(tmp_path, {"host": "b"})
    assert differences({"a": 1}, {"a": 1, "b": None}) == ["b None then, None now"]
    assert differences({"tokens_sha256": 1}, {"tokens_sha256": 2}) == ["the tokens 1 then, 2 now"]
    assert differences({"a": 1}, {"a": 1, "b": 2}, may_grow=True) == []


def test_steps_of_another_key_or_call_are_refused_and_files_of_others_stay(tmp_path):
    steps = StepCache(tmp_path, {"host": "a"})
    for key in ("one", "two"):
        steps.values((key,), lambda key=key: {"value": key}, dict)
    one, two = (next((tmp_path / FOLDER).glob(f"{key}.*")) for key in ("one", "two"))
    two.write_bytes(one.read_bytes())
    with pytest.raises(ResumeError, match="a part of another call"):
        steps.values(("two",), never, dict)
    one.write_text("{}")
    with pytest.raises(ResumeError, match=r"one\..* is not a finished part, or damaged"), pytest.warns():
        steps.values(("one",), never, dict)
    (tmp_path / FOLDER / CALL).unlink()  # without the settings nobody knows whose steps they are
    (tmp_path / FOLDER / "notes.json").write_text("mine")
    assert ("one",) not in StepCache(tmp_path, {"host": "a"})
    assert sorted(path.name for path in (tmp_path / FOLDER).iterdir()) == [CALL, "notes.json"]
