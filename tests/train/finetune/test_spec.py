"""Settings: the paper's numbers, the schedule by hand, and what is refused."""

import itertools

import pytest

from swd_lens.base.errors import FinetuneError
from swd_lens.train.finetune import PRESETS, FinetuneSpec
from swd_lens.train.finetune.spec import resolve


def test_the_papers_recipe_warms_up_for_20_steps_and_falls_to_zero():
    assert PRESETS["paper"].as_dict() == {
        "loss": "ce", "kl_weight": 1.0, "batch_size": 8, "steps": 2000, "passes": 1, "learning_rate": 5e-7, "relative": False,
        "beta1": 0.9, "beta2": 0.95, "eps": 0.1, "weight_decay": 1e-3, "warmup": 0.01, "schedule": "linear",
        "normalize_gradients": True, "autocast": "bfloat16", "seed": 0, "keep": "last",
    }  # fmt: skip
    spec = PRESETS["paper"]
    rates = [spec.rate(step, 2000) for step in range(1, 2001)]
    assert rates[0] == pytest.approx(5e-7 / 20) and rates[19] == 5e-7
    assert rates[20] == 5e-7 and rates[-1] == pytest.approx(5e-7 / 1980)  # the step after the last would have 0
    assert all(a >= b for a, b in itertools.pairwise(rates[19:]))
    # Its mean is half the peak: 2000 steps move a weight by 5e-4 at most (method.md §5.3).
    assert sum(rates) == pytest.approx(5e-4, rel=0.01)


def test_cosine_and_constant():
    cosine = FinetuneSpec(schedule="cosine", warmup=0, learning_rate=1.0)
    assert cosine.rate(1, 10) == 1.0 and cosine.rate(6, 10) == pytest.approx(0.5) and 0 < cosine.rate(10, 10) < 0.03
    assert {FinetuneSpec(schedule="constant", warmup=0, learning_rate=2).rate(s, 5) for s in range(1, 6)} == {2}
    for settings, steps in (({"passes": 3, "steps": None}, 7), ({"passes": 0.01, "steps": None}, 1), ({"steps": 5}, 5)):
        assert FinetuneSpec(batch_size=4, **settings).steps_for(10) == steps


def test_bad_settings_say_what_is_wrong():
    for settings, says in (
        ({"preset": "papers"}, "no preset 'papers'; did you mean paper\\? valid: paper, best"),
        ({"learning_rat": 1.0}, "did you mean learning_rate"),
        ({"loss": "mse"}, "loss='mse': choose one of 'ce', 'kl', 'ce\\+kl'"),
        ({"learning_rate": 0}, "learning_rate=0: give a finite number above 0"),
        ({"schedule": "steps"}, "schedule='steps'"),
        ({"autocast": "int8"}, "autocast='int8'"),
        ({"steps": 0}, "steps=0: give a whole number of at least 1"),
        ({"batch_size": -2}, "batch_size=-2"),
        ({"beta2": 1.0}, "beta2=1.0: give a finite number of at least 0 and below 1"),
        ({"warmup": 2.0}, "warmup=2.0"),
        ({"seed": -1}, "seed=-1"),
    ):
        settings = {"preset": "best", **settings}
        with pytest.raises(FinetuneError, match=says):
            resolve(settings.pop("preset"), settings)
