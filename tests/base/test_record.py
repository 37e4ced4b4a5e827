"""The concepts of swd_lens.base: undo, settings, divergence, record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import pandas as pd
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.record import Record, SavedRecord

# ---------------------------------------------------------------------------------------------- undo


# ---------------------------------------------------------------------------------------------- settings


# ---------------------------------------------------------------------------------------------- divergence


# ---------------------------------------------------------------------------------------------- record


@dataclass(frozen=True)
class Inner(Record):
    name: str
    value: float
    pairs: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True)
class Outer(SavedRecord):
    FORMAT = 2
    WHAT = "an outer record"
    derived = ("double",)

    n: int
    inner: Mapping[str, Inner]
    sequence: Sequence[Inner]
    z: Float[Tensor, " unit"]
    maybe: float | int | None = None
    settings: Mapping[str, object] | None = None

    @property
    def double(self) -> int:
        return 2 * self.n

    def table(self) -> pd.DataFrame:
        return pd.DataFrame({"name": list(self.inner)})


def outer() -> Outer:
    inner = Inner("a", 1.5, (("x", 2.0),))
    return Outer(3, {"k": inner}, (inner, inner), torch.tensor([1.0, 2.0]))


def test_a_record_goes_to_a_file_and_back(tmp_path):
    record = outer()
    record.save(tmp_path / "r.json")
    loaded = Outer.load(tmp_path / "r.json")
    assert loaded.as_dict() == record.as_dict()
    assert record.as_dict()["double"] == 6 and record.as_dict()["inner"]["k"]["pairs"] == [["x", 2.0]]
    assert isinstance(loaded.inner["k"], Inner) and loaded.sequence[1] == record.sequence[1]
    assert "an outer" not in loaded._repr_html_() and '<td class="w">k</td>' in loaded._repr_html_()


def test_null_is_nan_where_a_number_is_due_and_none_where_it_may_be():
    assert math.isnan(Inner.from_dict({"name": "a", "value": None}).value)
    assert Outer.from_dict({"n": 1, "inner": {}, "sequence": [], "z": [], "maybe": None}).maybe is None


def test_nan_in_tensors_survives_a_file(tmp_path):
    record = Outer(3, {}, (), torch.tensor([1.0, math.nan]))
    record.save(tmp_path / "r.json")
    torch.testing.assert_close(Outer.load(tmp_path / "r.json").z, record.z, equal_nan=True)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"value": 1.0}, "name"),
        ({"name": "a", "value": "1"}, "value"),
        ({"name": 1, "value": 1.0}, "name"),
        ({"name": "a", "value": 1.0, "pairs": [["x"]]}, "pairs"),
        ([], "list in place of named fields"),
    ],
)
def test_what_is_missing_or_of_another_kind_is_named(values, message):
    with pytest.raises(ValueError, match=f"not the values of a Inner: .*{message}"):
        Inner.from_dict(values)


def test_files_of_others_and_later_formats_are_refused(tmp_path):
    path = tmp_path / "r.json"
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ValueError, match="is not an outer record, or damaged"):
        Outer.load(path)
    path.write_text('{"format": 3}', encoding="utf-8")
    with pytest.raises(ValueError, match="format 3, newer than this swd_lens"):
        Outer.load(path)
    path.write_text('{"format": 2, "n": 1}', encoding="utf-8")
    with pytest.raises(ValueError, match=r"is not an outer record, or damaged .*inner"):
        Outer.load(path)
    with pytest.raises(FileNotFoundError):
        Outer.load(tmp_path / "none.json")
