"""The shipped model: offline, small, TransformerLens-shaped, and as good as its README says."""

import json
import socket

import pytest
import torch
from safetensors.torch import load_file, save_file

from swd_lens.hosts.embedded import WEIGHTS, Shape, load_default_model, load_model_folder, text_tokens
from swd_lens.hosts.embedded.corpus import Packer
from swd_lens.tasks.generators import FAMILIES
from tests.embedded import score

# The bars of the embedded model (answer above every distractor; for years: probability right minus wrong).
BARS = {"ioi": 0.98, "docstring": 0.98, "gendered_pronoun": 0.99, "greater_than": 0.88}


@pytest.fixture(scope="module")
def model():
    return load_default_model()


@pytest.fixture(scope="module")
def packer(model):
    return Packer(model.tokenizer, "test")


@pytest.fixture(scope="module")
def reported():
    return json.loads((WEIGHTS / "scores.json").read_text())


def test_loads_with_sockets_disabled():
    # pyproject gives every test --disable-socket; this makes sure that it still does
    with pytest.raises(Exception, match="socket"):
        socket.socket()
    assert load_default_model().cfg.model_name == "swd-lens-default"


def test_shipped_files_are_small():
    sizes = {path.name: path.stat().st_size for path in WEIGHTS.iterdir()}
    assert sum(sizes.values()) <= 6_000_000
    names = {"model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "scores.json"}
    assert {*names, "train_log.jsonl"} == set(sizes)


def test_is_a_plain_gpt2_style_hooked_transformer(model):
    assert (model.cfg.n_layers, model.cfg.act_fn, model.cfg.normalization_type) == (4, "gelu_new", "LN")
    assert not model.training
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    assert torch.equal(model.W_U, model.W_E.T)
    assert float(model.b_U.detach().abs().max()) == 0.0
    assert model.cfg.d_vocab == len(model.tokenizer)
    assert load_default_model(dtype=torch.float64).W_E.dtype == torch.float64


def test_auto_is_a_hooked_transformer_where_there_is_one(model):
    assert type(model).__name__ == type(load_default_model(kind="hooked")).__name__ == "HookedTransformer"


def test_a_file_without_a_parameter_is_named(tmp_path):
    for file in WEIGHTS.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    state = load_file(tmp_path / "model.safetensors")
    save_file({name: value for name, value in state.items() if name != "blocks.2.mlp.b_in"}, tmp_path / "model.safetensors")
    for kind in ("hooked", "bridge"):
        with pytest.raises(ValueError, match=r"model\.safetensors lacks blocks\.2\.mlp\.b_in; train it again"):
            load_model_folder(tmp_path, kind=kind)


def test_the_file_holds_what_its_shape_says():
    shape = Shape(**json.loads((WEIGHTS / "config.json").read_text()))
    assert sorted(load_file(WEIGHTS / "model.safetensors")) == sorted(shape.stored_names())


@pytest.mark.parametrize("family", FAMILIES)
def test_held_out_bars(model, packer, reported, family):
    scores = score.family_scores(model, packer, family, "test", "seen", 200)
    value = scores["probability" if family == "greater_than" else "accuracy"]
    assert value >= BARS[family]
    stored = reported["scores"]["test"]["seen"][family]
    assert stored["probability"] == pytest.approx(scores["probability"], abs=0.03)
    if family != "greater_than":
        assert scores["margin"] > 3  # logits; accuracy alone saturates


@pytest.mark.parametrize("family", FAMILIES)
def test_unseen_templates(model, packer, family):
    # IOI: one of the four unseen actions ("said that the X belongs to") stays at chance, see the README; the rest is right.
    scores = score.family_scores(model, packer, family, "test", "unseen", 200)
    assert scores["accuracy"] >= (0.80 if family == "ioi" else 0.95)


@pytest.mark.slow
def test_ablation_table_has_every_layer_and_leaves_the_model_alone(model, packer):
    table = score.ablation_table(model, packer, "test", n=8)
    assert set(table) == set(FAMILIES)
    assert set(table["ioi"]) == {"none"} | {f"{kind}.{layer}" for kind in ("attn", "mlp") for layer in range(4)}
    plain = score.family_scores(model, packer, "ioi", "test", "seen", 8)
    assert table["ioi"]["none"] == plain
    assert not any(hook.fwd_hooks for hook in model.hook_dict.values())


def test_text_tokens_are_rows_of_held_out_documents(model, packer):
    rows = text_tokens(1000, split="test", seed=1)
    assert rows.shape == (8, 128)
    assert rows.dtype == torch.int64
    assert (rows[:, 0] == packer.bos).all()
    assert not (rows == packer.unk).any()
    assert not (rows == model.tokenizer.pad_token_id).any()
    ends = rows[:, :-1] == packer.eos
    assert torch.equal(ends, rows[:, 1:] == packer.bos)  # every document has both
    assert torch.equal(text_tokens(200, split="test", seed=1), rows[:2])
    seen = {tuple(row) for row in text_tokens(1000, split="train", seed=1).tolist()}
    assert not seen & {tuple(row) for row in rows.tolist()}


def test_bad_requests_say_what_to_do(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"has no config\.json; give a folder"):
        load_model_folder(tmp_path)
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((WEIGHTS / name).read_bytes())
    with pytest.raises(FileNotFoundError, match=r"has no tokenizer\.json"):
        load_model_folder(tmp_path)
