"""Sparse pretraining end to end on a tiny GPT-2: the schedule at work, interruption, the folder as a host, channels as units."""

import pytest
from transformers import GPT2LMHeadModel

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import TrainError
from swd_lens.hosts import find_sites, host_of
from swd_lens.train.baselines import SparseSpec
from swd_lens.train.baselines.sparse_network import budget, config_of, matrices, new_network, nonzeros
from swd_lens.train.baselines.sparse_training import SPARSE_PRETRAINS
from tests import families
from tests.micro import random_split
from tests.train.baselines.test_sparse_recipe import CONFIG, tokenizer

TEXT = families.some_tokens(48, 12)
SAME = {"updates": 20, "tokens_per_update": 96, "warmup": 0.1, "learning_rate": 3e-3}
SAME |= {"checkpoint_every": 6, "eval_every": 10, "progress": False}


def train(out, **more):
    return baselines.sparse_pretrain(CONFIG, TEXT, out=out, **{**SAME, "tokenizer": tokenizer(), "heldout": TEXT[:9], **more})


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    return train(tmp_path_factory.mktemp("sparse"))


def test_the_log_follows_the_schedule(trained):
    log, spec = trained.log, SparseSpec(updates=20, tokens_per_update=96, warmup=0.1, learning_rate=3e-3)
    assert log["step"].tolist() == list(range(1, 21)) and log["tokens"].iloc[-1] == 1920
    before = [96 * update for update in range(20)]
    assert log["density"].tolist() == [spec.density(n) for n in before]
    assert log["learning_rate"].tolist() == [spec.rate(n) for n in before]
    assert log["learning_rate"][0] == 0.0 and log["density"][15] > 0.2 == log["density"][16]  # floor(.8 * 20) updates
    assert log["heldout_ce"].notna().tolist() == [step in (10, 20) for step in range(1, 21)]
    assert log["loss"].iloc[-1] < log["loss"].iloc[0]


def test_every_matrix_has_its_budget_and_every_row_a_weight(trained):
    network = GPT2LMHeadModel.from_pretrained(trained.folder)
    for matrix in matrices(network):
        assert int((matrix != 0).sum()) == budget(matrix.numel(), 0.2) and bool((matrix != 0).any(1).all())
    counts = nonzeros(network)
    assert {key: trained.provenance[key] for key in counts} == counts
    # 2 layers of (16, 48), (16, 16), (16, 64), (64, 16), a fifth of each; embeddings of 1,366 and 64 rows
    assert counts["blocks"] == 2 * (153 + 51 + 204 + 204)
    assert counts["all"] == counts["blocks"] + 4371 + 204
    assert network.config.activation_function == "gelu" and network.config.resid_pdrop == 0
    assert network.lm_head.weight is network.transformer.wte.weight


def test_rows_at_once_change_rounding_only(trained, tmp_path, monkeypatch):
    monkeypatch.setattr("swd_lens.train.baselines.sparse_training._LOGITS_AT_ONCE", 3 * 12 * families.D_VOCAB)
    parts = train(tmp_path, stop_after=4, heldout=None)
    assert parts.log["loss"].tolist() == pytest.approx(trained.log["loss"].tolist()[:4], rel=1e-5)
    assert "heldout_ce" not in parts.log


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_the_folder_is_a_host_and_its_channels_are_units(trained, kind):
    model = trained.load(kind)
    units = baselines.channels_of(model)
    assert list(units) == ["blocks.0.mlp_out", "blocks.1.mlp_out"]
    measured = swd.fidelity(model, units, TEXT[:9])
    assert measured.ce == measured.ce_dense == pytest.approx(trained.log["heldout_ce"].iloc[-1], rel=1e-5)
    split = random_split(8, d_vocab=families.D_VOCAB)
    scores = swd.attribute(model, units, split)
    curve = swd.evaluate(model, units, split, scores, grid=[0], random_sets=0)
    # 204 nonzeros read, 204 written, and a bias each, in either layer (none of them is zero after training)
    assert curve.rows["edges"].iloc[-1] == 2 * (204 + 204 + 64)
    assert curve.q_full == pytest.approx(curve.q_dense, abs=1e-6)
    read, written = (host_of(model).weight(find_sites(model, f"blocks.0.{kind}")[0]) for kind in ("mlp_in", "mlp_out"))
    for unit in (0, 5):
        by_hand = sum(v != 0 for v in [*read[:, unit].tolist(), *written[unit].tolist()]) + 1
        assert units["blocks.0.mlp_out"].edges_per_unit[unit] == by_hand
    with pytest.raises(ValueError, match=r"channels are units of mlp_out, not of blocks\.0\.mlp_in"):
        baselines.channels_of(model, "blocks.0.mlp_in")


def test_a_hosts_shape_can_be_taken(default_model):
    config = config_of(default_model)
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions) == (4, 128, 4, 128)
    assert config.vocab_size == default_model.cfg.d_vocab and config.activation_function == "gelu"
    drawn = new_network(config, 0)
    std = float(drawn.transformer.h[0].mlp.c_proj.weight.detach().std())
    assert std == pytest.approx(0.02 / 8**0.5, rel=0.02)  # over sqrt(2 * 4 layers)


def test_what_cannot_be_trained_is_refused(tmp_path):
    assert SPARSE_PRETRAINS["paper"].last == 22_000 and SPARSE_PRETRAINS["paper"].updates == 38_146
    for more, says in (
        ({"preset": "best"}, "no preset 'best'; valid: paper, small"),
        ({"updats": 3}, "did you mean updates"),
        ({"stop_after": 21}, "stop_after=21: the schedule has 20 updates"),
        ({"warmup": 0.9}, "density falls between"),
        ({"learning_rate": 1e30}, r"update \d+ of \d+: the loss is (nan|inf)"),
    ):
        with pytest.raises(TrainError, match=says):
            train(tmp_path / "refused", **more)
    with pytest.raises(TrainError, match="tokenizer= is needed"):
        train(tmp_path, tokenizer=None)
    with pytest.raises(TrainError, match="config is a str; give a GPT2Config"):
        baselines.sparse_pretrain("gpt2", TEXT, out=tmp_path, tokenizer=tokenizer())
