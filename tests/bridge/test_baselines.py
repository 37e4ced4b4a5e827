"""Learned baselines on bridges, also on transformer_lens 4.x: sparse pretraining, channels of any MLP, a transcoder, VPD."""

from importlib.metadata import version

import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.hosts import find_sites, host_of
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from tests import families
from tests.bridge.test_circuits import split_for

TEXT = families.some_tokens(16, 12)
SMALL = {"n_tokens": 192, "tokens_per_step": 48, "width": 6, "progress": False}


def test_a_sparse_model_is_trained_loaded_and_its_channels_judged_together(tmp_path):
    """Like a host that is there: its sizes and its tokenizer."""
    settings = {"updates": 12, "tokens_per_update": 48, "warmup": 0.2, "learning_rate": 0.03, "progress": False}
    made = baselines.sparse_pretrain(families.bridge("gpt2"), TEXT, out=tmp_path, heldout=TEXT, **settings)
    model = made.load("bridge")
    assert model.cfg.default_prepend_bos is False  # its training text had none, whatever the tokenizer's own model begins with
    channels = baselines.channels_of(model)
    # A fifth of (16, 64) and of (64, 16), twice; every bias has moved from 0.
    assert [units.edges for units in channels.values()] == [204 + 204 + 64] * 2
    measured = swd.fidelity(model, channels, TEXT)
    assert measured.ce == measured.ce_dense == pytest.approx(made.log["heldout_ce"].iloc[-1], rel=1e-5)
    one_ranking(model, channels)


@pytest.mark.parametrize("family", ["gpt2", "gemma2"])
def test_channels_of_a_dense_host_are_its_neurons(family):
    """The paper's dense neurons: every read, write and (where there is one) bias edge; behind a gate two read vectors each."""
    model = families.bridge(family)
    channels, host = baselines.channels_of(model), host_of(model)
    for site in find_sites(model, "mlp_out"):
        readers = [one for one in host.sites() if one.layer == site.layer and one.kind in ("mlp_in", "mlp_gate")]
        biased = 1 if family == "gpt2" else 0
        assert channels[site.name].edges == site.d_in * (16 * len(readers) + 16 + biased)
        assert bool(channels[site.name].valid_units.all())
    measured = swd.fidelity(model, channels, TEXT[:4])
    assert (measured.ce_delta, measured.kl) == (0.0, 0.0)
    one_ranking(model, channels)


def one_ranking(model, channels):
    """All layers' channels stand in one ranking, and a prefix costs what its channels cost, whatever their layers.

    A channel that writes nothing costs nothing: circuits count valid units.
    """
    train, test = split_for(model, 4, 1, "train"), split_for(model, 4, 2, "test")
    scores = swd.attribute(model, channels, train)
    n = sum(units.n_units for units in channels.values())
    curve = swd.evaluate(model, channels, test, scores, grid=[0, 3, 10, n])
    assert curve.q_full == pytest.approx(curve.q_dense, abs=1e-5)
    ranked = torch.cat([scores.scores[site] for site in channels]).argsort(descending=True, stable=True)
    edges = torch.cat([units.edges_per_unit * units.valid_units for units in channels.values()])
    assert curve.rows["edges"].tolist() == [int(edges[ranked[:k]].sum()) for k in (0, 3, 10, n)]
    assert curve.rows["sufficiency"].iloc[-1] == pytest.approx(1.0, abs=1e-5)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("train", [baselines.transcoder, baselines.vpd_recon, baselines.vpd_kl])
@pytest.mark.parametrize("site", ["blocks.1.mlp_out", "blocks.1.mlp"])
def test_the_trained_ones_stand_in_a_bridge(train, site, tmp_path):
    model = families.bridge("gpt2")
    before, hooks = model(TEXT[:2]), list(model.hook_dict)
    units = train(model, site, TEXT, out=tmp_path, **SMALL)
    assert torch.equal(model(TEXT[:2]), before) and list(model.hook_dict) == hooks
    with swd.attach(model, baselines.LearnedUnits.load(tmp_path)):
        assert not torch.equal(model(TEXT[:2]), before)
    assert torch.equal(model(TEXT[:2]), before)
    assert swd.fidelity(model, units, TEXT[:4]).kl > 0


def test_a_sparse_model_is_no_hooked_transformer_where_there_is_none(tmp_path):
    config = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": families.D_VOCAB}
    settings = {"updates": 1, "tokens_per_update": 48, "progress": False, "tokenizer": load_tokenizer(WEIGHTS)}
    made = baselines.sparse_pretrain(config, TEXT, out=tmp_path, **settings)
    assert type(made.load("bridge")).__name__ == "TransformerBridge"
    if int(version("transformer_lens").split(".")[0]) < 4:
        assert type(made.load("hooked")).__name__ == type(made.load()).__name__ == "HookedTransformer"
    else:
        assert type(made.load()).__name__ == "TransformerBridge"
        with pytest.raises(swd.UnsupportedHostError, match="has no HookedTransformer"):
            made.load("hooked")
