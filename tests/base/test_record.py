"""Records: to a file and back, what is missing or of another kind, files of others."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import pandas as pd
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base.record import Record, SavedRecord


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


def test_a_record_goes_to_a_file_and_back(tmp_path):
    inner = Inner("a", 1.5, (("x", 2.0),))
    record = Outer(3, {"k": inner}, (inner, inner), torch.tensor([1.0, 2.0]))
    record.save(tmp_path / "r.json")
    loaded = Outer.load(tmp_path / "r.json")
    assert loaded.as_dict() == record.as_dict()
    assert record.as_dict()["double"] == 6 and record.as_dict()["inner"]["k"]["pairs"] == [["x", 2.0]]
    assert isinstance(loaded.inner["k"], Inner) and loaded.sequence[1] == record.sequence[1]
    assert "an outer" not in loaded._repr_html_() and '<td class="w">k</td>' in loaded._repr_html_()
    # NaN in tensors survives; null is NaN where a number is due, and None where it may be.
    replace(record, z=torch.tensor([1.0, math.nan])).save(tmp_path / "nan.json")
    torch.testing.assert_close(Outer.load(tmp_path / "nan.json").z, torch.tensor([1.0, math.nan]), equal_nan=True)
    assert math.isnan(Inner.from_dict({"name": "a", "value": None}).value) and loaded.maybe is None


def test_files_of_others_later_formats_and_values_of_another_kind_are_refused(tmp_path):
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
    for values, message in (
        ({"value": 1.0}, "name"),
        ({"name": "a", "value": "1"}, "value"),
        ({"name": 1, "value": 1.0}, "name"),
        ({"name": "a", "value": 1.0, "pairs": [["x"]]}, "pairs"),
        ([], "list in place of named fields"),
    ):
        with pytest.raises(ValueError, match=f"not the values of a Inner: .*{message}"):
            Inner.from_dict(values)
