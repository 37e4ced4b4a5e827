"""Settings: bounds, presets, the nearest names."""

import math
from dataclasses import dataclass

import numpy as np
import pytest

from swd_lens.base.settings import Bounds, Settings, preset, setting


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
    assert Bounds(at_least=1, at_most=2).hold(1) and Bounds(at_least=1, at_most=2).hold(2)
    assert not Bounds(above=1).hold(1) and not Bounds(below=2).hold(2) and not Bounds().hold(math.nan)


def test_a_value_out_of_bounds_is_named_with_its_bounds():
    for name, value, message in (
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
    ):
        recipe = Recipe()
        # Past the annotations, which the tests check, too: users' programs do not.
        with pytest.raises(RecipeError) as error:
            recipe._check(
                name, value, *next((f.metadata["bounds"], f.type) for f in Recipe.__dataclass_fields__.values() if f.name == name)
            )
        assert str(error.value) == message


def test_an_unknown_setting_or_preset_is_answered_with_the_nearest():
    with pytest.raises(RecipeError, match="Recipe has no setting 'step'; did you mean steps\\? valid: steps, share, rate"):
        Recipe().changed({"step": 1})
    with pytest.raises(RecipeError, match="no preset 'bets'; did you mean best\\? valid: best, paper"):
        preset({"best": Recipe(), "paper": Recipe(steps=3)}, "bets", RecipeError)
    assert preset({"best": Recipe()}, "best", RecipeError) == Recipe()
