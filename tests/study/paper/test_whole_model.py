"""Circuits in a replaced host (whole_model.py): every matrix is replaced in a copy, and candidates stand for its own."""

import pytest
import torch

import swd_lens as swd
from swd_lens.base.errors import UnsupportedHostError
from swd_lens.study.paper.settings import settings_of
from swd_lens.study.paper.whole_model import tuned_host, tuning_steps, units_of
from tests.study.paper.conftest import table


@pytest.fixture(scope="module")
def replaced():
    """The embedded model, and factors of all its mlp_out and some other matrices."""
    model = swd.load_default_model()
    sites = ["blocks.2.attn_o", "mlp_in", "mlp_out"]
    return model, swd.factorize(model, sites, sparsity=0.6, preset="quick", outer_iterations=4)


def test_the_host_is_the_replaced_model_and_the_candidates_change_nothing(replaced):
    model, tuned = replaced
    tokens = torch.randint(0, model.cfg.d_vocab, (2, 12), generator=torch.Generator().manual_seed(0))
    dense = model(tokens)
    with swd.attach(model, tuned):
        expected = model(tokens)
    host = tuned_host(model, tuned, "mlp_out")
    assert torch.allclose(host(tokens), expected, atol=2e-4)
    assert not torch.allclose(expected, dense, atol=1e-2)
    units = units_of(host, tuned, "mlp_out")
    assert list(units) == [f"blocks.{layer}.mlp_out" for layer in range(model.cfg.n_layers)]
    with swd.attach(host, units):
        assert torch.allclose(host(tokens), expected, atol=2e-4)
    assert torch.equal(model(tokens), dense)  # the other host is as it was


def test_candidates_must_write_to_the_residual_stream(replaced):
    model, tuned = replaced
    with pytest.raises(UnsupportedHostError, match=r"blocks\.0\.mlp_in"):
        tuned_host(model, tuned, "mlp_in")


def test_a_short_tuning_is_checkpointed_on_the_way():
    """32,768 tokens in steps of 4 x 256: 32 steps, and two evaluations; the paper's 2,000 steps and ten."""
    assert tuning_steps(settings_of("full-model", "small")) == {"batch_size": 4, "eval_every": 16, "checkpoint_every": 16}
    paper = {"batch_size": 8, "steps": 2_000, "eval_every": 200, "checkpoint_every": 100}
    assert tuning_steps(settings_of("full-model", "paper")) == paper


@pytest.mark.filterwarnings("ignore:the mean margin of")
@pytest.mark.slow
def test_a_tuned_model_stands_beside_one_that_was_trained_sparse(every):
    assert set(table(every[1]["full-model"], 0)["model"]) == {"dense", "SWD", "SWD-FT", "trained sparse"}
