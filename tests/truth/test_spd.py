"""SPD of toy models: its loss where the answer is known, ties, resuming, and what a short training finds."""

import pytest
import torch

from swd_lens.base.step_cache import StepCache
from swd_lens.truth import spd
from swd_lens.truth.spd import decompose, recipe
from swd_lens.truth.toys import sparse_features

WEIGHT = torch.tensor([[1.0, 0.0], [0.0, 1.0], [-1.0, 0.5]])
BIAS = torch.tensor([0.0, -0.1, 0.0])


def run(raw, **changes):
    """A run whose first three components are the features and whose others are nothing; every importance is `raw`."""
    made = spd._Run(WEIGHT, BIAS, recipe(3, 2, faithfulness_steps=0, **changes))
    with torch.no_grad():
        first = made.parts[0]
        first.W_enc.zero_()
        first.W_dec.zero_()
        first.W_enc[:, :3] = torch.eye(3)
        first.W_dec[:3] = WEIGHT
        for part in made.parts:
            for parameter in part.importance.parameters():
                parameter.zero_()
            part.importance.b2.fill_(raw)
    return made


def test_the_features_have_no_error_where_all_are_important():
    x = sparse_features(64, 3, torch.Generator().manual_seed(0)) + 0.1
    error, raws = run(1.0).error(x, torch.Generator().manual_seed(1))
    assert float(error) == pytest.approx(0, abs=1e-12) and [raw.shape for raw in raws] == [(64, 15), (64, 15)]
    assert float(run(0.0).error(x, torch.Generator().manual_seed(1))[0]) > 1e-3


def test_the_error_by_hand(monkeypatch):
    """Importances 0 and u = 1/2 everywhere: every masked matrix is half of itself."""
    monkeypatch.setattr(torch, "rand", lambda shape, generator: torch.full(tuple(shape), 0.5))
    x = torch.tensor([[1.0, 0.0, 0.0]])
    # target relu(1, -.1, -1) = (1, 0, 0); both masked: (.25, ...); one of them: (.5, ...), twice, averaged; means of 3 outputs
    error, _ = run(0.0).error(x, torch.Generator())
    assert float(error) == pytest.approx(0.75**2 / 3 + 0.5**2 / 3)


def test_matrices_stay_tied_and_training_learns():
    spec = recipe(3, 2, steps=40, batch=64, faithfulness_steps=50)
    made = spd._Run(WEIGHT, BIAS, spec)
    before = made._row(0)
    made.load(*made.train(0, 40))
    first, second = made.parts
    assert torch.equal(second.W_enc, first.W_dec.T) and torch.equal(second.W_dec, first.W_enc.T)
    assert made._row(40)["stochastic error"] < 0.9 * before["stochastic error"]


def test_it_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    spec = recipe(3, 2, steps=20, batch=16, seed=3, faithfulness_steps=5)
    whole = decompose(WEIGHT, BIAS, spec)
    train, calls = spd._Run.train, []

    def stopped(self, begin, end):
        if len(calls) == 4:
            raise KeyboardInterrupt
        calls.append(end)
        return train(self, begin, end)

    monkeypatch.setattr(spd._Run, "train", stopped)
    with pytest.raises(KeyboardInterrupt):
        decompose(WEIGHT, BIAS, spec, cache=StepCache(tmp_path))
    monkeypatch.setattr(spd._Run, "train", lambda self, begin, end: calls.append(end) or train(self, begin, end))
    again = decompose(WEIGHT, BIAS, spec, cache=StepCache(tmp_path))
    assert calls == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    assert torch.equal(again.read, whole.read) and torch.equal(again.write, whole.write) and again.curve == whole.curve
    monkeypatch.setattr(spd._Run, "train", lambda *_: pytest.fail("made again"))
    assert torch.equal(decompose(WEIGHT, BIAS, spec, cache=StepCache(tmp_path)).read, whole.read)
    half = decompose(WEIGHT, BIAS, spec, cache=StepCache(tmp_path), tenths=5)
    assert half.curve == whole.curve[:5] and not torch.equal(half.read, whole.read)
    with pytest.raises(ValueError, match="tenths"):
        decompose(WEIGHT, BIAS, spec, tenths=11)


def test_recipes():
    assert (recipe(5, 2).width, recipe(5, 2).minimality, recipe(5, 2).p(1)) == (20, 3e-3, 1.0)
    assert (recipe(40, 10).width, recipe(40, 10).minimality, recipe(40, 10).p(100)) == (200, 1e-4, 2.0)
    spec = recipe(7, 3, steps=50, batch=10)
    assert spec.width == 35 and spec.steps == 50 and spec.rate(50) == 0.0
