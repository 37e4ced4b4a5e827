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


@pytest.mark.parametrize("local", [False, True])
def test_the_dense_host_runs_to_its_end_once(model, local):
    """Later only as far as the replaced matrices, whose inputs and outputs are looked at."""
    tokens, dense, rows = random_tokens(9, 8), DenseCache(), []
    for factors in (swd_zero_data(model, FIRST), svd(model, FIRST), swd_zero_data(model, "blocks.0.*")):
        with block_runs(model, 1) as runs:
            found = fidelity(model, factors, tokens, dense=dense, local=local, batch_size=4)
        rows.append(runs.rows)
        assert found == fidelity(model, factors, tokens, local=local, batch_size=4)
    # Of block 1 the replacement's own nine, and the one row that is compared with whole runs of it.
    assert rows[1] == rows[2] == 9 + 2 and rows[0] == 9 + 9 + 4
    both = fidelity(model, swd_zero_data(model, "mlp_out"), tokens, dense=dense, local=local, batch_size=4)
    assert both == fidelity(model, swd_zero_data(model, "mlp_out"), tokens, local=local, batch_size=4)


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
