"""DenseCache: what is the same for further replacements of a host is run once."""

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.circuits import attribute, evaluate, fidelity
from swd_lens.circuits import fast_forward as fast_forward_module
from swd_lens.circuits.dense_cache import DenseCache
from swd_lens.train.baselines import channels_of, svd
from tests.circuits.slow import able_split
from tests.contract import swd_zero_data
from tests.forwards import block_runs
from tests.micro import random_tokens

FIRST, LAST = "blocks.0.mlp_out", "blocks.1.mlp_out"
SPLIT, TRAIN = able_split(), able_split(12, seed=3, name="train")


def test_what_enters_the_replaced_block_is_kept_from_one_replacement_to_the_next(model):
    tokens, dense = random_tokens(9, 8), DenseCache()
    for number, factors in enumerate((swd_zero_data(model, "blocks.1.*"), swd_zero_data(model, "blocks.1.mlp_out"))):
        with block_runs(model, 0) as runs:
            found = fidelity(model, factors, tokens, dense=dense)
        assert found == fidelity(model, factors, tokens)
        assert (runs.rows >= 9) == (number == 0)  # later only the rows that are compared with whole runs
    factors = baselines.svd(model, "mlp_out")
    with pytest.raises(swd.TokenError, match="at least two tokens"):
        fidelity(model, factors, [[1], [2]])
    with pytest.raises(swd.TokenError, match="outside the vocabulary"):
        fidelity(model, factors, [[1, 200]])


def test_replacements_of_the_same_sites_share_what_was_found(model, monkeypatch):
    """One search per split for SWD and SVD of one matrix; another matrix, and a coder, are searched for themselves."""
    searched = []
    search = fast_forward_module._agreeing
    monkeypatch.setattr(fast_forward_module, "_agreeing", lambda *a: searched.append(a[1][0].name) or search(*a))
    dense = DenseCache()
    methods = [
        swd_zero_data(model, LAST),
        svd(model, LAST),
        svd(model, FIRST),
        channels_of(model, LAST),
        channels_of(model, LAST),
    ]
    curves = []
    for units in methods:
        scores = attribute(model, units, TRAIN, dense=dense)
        curves.append(evaluate(model, units, SPLIT, scores, dense=dense, grid=[0, 9]))
    assert searched == [LAST] * 2 + [FIRST] * 2 + [LAST] * 4
    alone = evaluate(model, methods[1], SPLIT, attribute(model, methods[1], TRAIN), grid=[0, 9])
    torch.testing.assert_close(curves[1].margins["keep"], alone.margins["keep"], atol=1e-5, rtol=1e-5)
