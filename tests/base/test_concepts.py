"""The concepts of swd_lens.base: undo, settings, divergence, record."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import pandas as pd
import pytest
import torch
from jaxtyping import Float
from torch import Tensor

from swd_lens.base import divergence as div
from swd_lens.base.record import Record, SavedRecord
from swd_lens.base.settings import Bounds, Settings, preset, setting
from swd_lens.base.undo import Undo

# ---------------------------------------------------------------------------------------------- undo


def test_steps_run_last_first_and_leave_the_stack():
    done: list[int] = []
    undo = Undo()
    for i in range(3):
        undo.push(lambda i=i: done.append(i))
    assert undo and len(undo) == 3
    undo.run()
    undo.run()
    assert done == [2, 1, 0] and not undo


def test_an_interrupted_run_goes_on_at_the_same_step():
    done: list[str] = []
    interruptions = [KeyboardInterrupt()]

    def step() -> None:
        if interruptions:
            raise interruptions.pop()
        done.append("b")

    undo = Undo()
    undo.push(lambda: done.append("a"))
    undo.push(step)
    with pytest.raises(KeyboardInterrupt):
        undo.run()
    assert done == [] and len(undo) == 2
    undo.run()
    assert done == ["b", "a"]


def test_a_block_that_is_interrupted_while_it_undoes_is_undone_all_the_same():
    done: list[str] = []
    interruptions = [KeyboardInterrupt()]

    def step() -> None:
        if interruptions:
            raise interruptions.pop()
        done.append("b")

    with pytest.raises(KeyboardInterrupt), Undo() as undo:
        undo.push(lambda: done.append("a"))
        undo.push(step)
    assert done == ["b", "a"] and not undo


# ---------------------------------------------------------------------------------------------- settings


class RecipeError(ValueError):
    pass


@dataclass(frozen=True)
class Recipe(Settings):
    error = RecipeError

    steps: int = setting(10, at_least=1)
    share: float | int = setting(0.5, above=0, below=1)
    rate: float | int | str = setting("auto", above=0)
    limit: float | int | None = setting(None, at_least=0, at_most=2)
    loss: str = setting("ce", one_of=("ce", "kl"))
    clean: bool = setting(False)


def test_defaults_and_values_within_bounds_are_taken():
    recipe = Recipe().changed({"steps": np.int64(3), "share": np.float32(0.25), "rate": 2, "limit": 0, "clean": True})
    assert recipe == Recipe(3, 0.25, 2, 0, "ce", True)
    assert type(recipe.steps) is int and type(recipe.share) is float
    assert recipe.as_dict()["loss"] == "ce"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("steps", 0, "steps=0: give a whole number of at least 1"),
        ("steps", 1.0, "steps=1.0: give a whole number of at least 1"),
        ("steps", True, "steps=True: give a whole number of at least 1"),
        ("share", 0, "share=0: give a finite number above 0 and below 1"),
        ("share", 1, "share=1: give a finite number above 0 and below 1"),
        ("share", math.nan, "share=nan: give a finite number above 0 and below 1"),
        ("rate", math.inf, "rate=inf: give a finite number above 0"),
        ("rate", "fast", "rate='fast': give a number, or \"auto\""),
        ("limit", 2.5, "limit=2.5: give a finite number from 0 to 2"),
        ("loss", "mse", "loss='mse': choose one of 'ce', 'kl'"),
        ("clean", 1, "clean=1: choose one of True, False"),
    ],
)
def test_a_value_out_of_bounds_is_named_with_its_bounds(name, value, message):
    recipe = Recipe()
    # Past the annotations, which the tests check, too: users' programs do not.
    with pytest.raises(RecipeError) as error:
        recipe._check(
            name,
            value,
            *next((f.metadata["bounds"], f.type) for f in Recipe.__dataclass_fields__.values() if f.name == name),
        )
    assert str(error.value) == message


def test_an_unknown_setting_or_preset_is_answered_with_the_nearest():
    with pytest.raises(
        RecipeError, match="Recipe has no setting 'step'; did you mean steps\\? valid: steps, share, rate"
    ):
        Recipe().changed({"step": 1})
    with pytest.raises(RecipeError, match="no preset 'bets'; did you mean best\\? valid: best, paper"):
        preset({"best": Recipe(), "paper": Recipe(steps=3)}, "bets", RecipeError)
    assert preset({"best": Recipe()}, "best", RecipeError) == Recipe()


def test_bounds_hold_at_their_edges():
    assert Bounds(at_least=1, at_most=2).hold(1) and Bounds(at_least=1, at_most=2).hold(2)
    assert not Bounds(above=1).hold(1) and not Bounds(below=2).hold(2) and not Bounds().hold(math.nan)


# ---------------------------------------------------------------------------------------------- divergence


def test_sums_are_those_of_the_definitions_whatever_the_chunks(monkeypatch):
    generator = torch.Generator().manual_seed(0)
    dense, replaced = (torch.randn(3, 7, 11, generator=generator) for _ in range(2))
    tokens = torch.randint(11, (3, 7), generator=generator)
    p, q = dense[:, :-1].double().softmax(-1), replaced[:, :-1].double().softmax(-1)
    targets = tokens[:, 1:, None]
    expected = {
        "ce_dense": -p.gather(-1, targets).log().mean(),
        "ce": -q.gather(-1, targets).log().mean(),
        "kl": (p * (p / q).log()).sum(-1).mean(),
        "top1_agreement": (p.argmax(-1) == q.argmax(-1)).double().mean(),
    }
    for chunk_bytes in (1, 3 * 11 * 4 * 2, 2**28):
        monkeypatch.setattr(div, "_PART_BYTES", chunk_bytes)
        total = div.DensePredictions(dense, tokens).divergence(replaced)
        assert total.n_predictions == 18
        for name, value in total.means().items():
            assert value == pytest.approx(float(expected[name]), abs=1e-6), name
        # The dense side is computed once, and comparing one host leaves it as it was for the next.
        predictions, rows = div.DensePredictions(dense, tokens), torch.zeros(3, dtype=torch.float64)
        assert [predictions.divergence(other) for other in (replaced, dense, replaced)][::2] == [total, total]
        predictions.divergence(replaced, rows)
        ce = [-x[:, :-1].double().log_softmax(-1).gather(-1, targets).squeeze(-1).sum(1) for x in (replaced, dense)]
        torch.testing.assert_close(rows, ce[0] - ce[1], atol=1e-5, rtol=0)
    assert (total + total).means() == pytest.approx(total.means())


def test_kl_has_the_gradient_of_the_definition():
    log_p = torch.randn(2, 5, dtype=torch.float64).log_softmax(-1)
    logits = torch.randn(2, 5, dtype=torch.float64, requires_grad=True)
    div.kl(log_p, div.log_probabilities(logits)).sum().backward()
    torch.testing.assert_close(logits.grad, logits.detach().softmax(-1) - log_p.exp())


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
