"""Training a baseline: the same bits whatever interrupts it, folders, what is refused, the host as it was, reports."""

import copy
from functools import cache

import numpy as np
import pytest
import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.errors import TrainError
from swd_lens.train.baselines import LearnedUnits
from swd_lens.train.engine import Engine
from tests import families
from tests.micro import random_tokens, toy_model
from tests.train.conftest import bits_of_units as bits
from tests.train.conftest import everything, interrupt

SITE = "blocks.1.mlp_out"
TOKENS = random_tokens(24, 10)
# Seven steps of five rows, a checkpoint after every third.
SAME = {"n_tokens": 350, "tokens_per_step": 50, "checkpoint_every": 3, "progress": False}
EVERYTHING_ELSE = {"adversarial": 0.5, "adversary": "persistent", "routing": "subset", "masks": "binomial", "clip": 0.01}
METHODS = {
    "transcoder": (baselines.transcoder, SITE, {"dead_after": 60}),
    "transcoder of an MLP": (baselines.transcoder, "blocks.1.mlp", {"width": 24}),
    "vpd_recon": (baselines.vpd_recon, SITE, {"minimality": 1e-4}),
    "vpd_recon of an MLP": (baselines.vpd_recon, "blocks.0.mlp", {"minimality": 1e-4}),
    "vpd_kl": (baselines.vpd_kl, SITE, {"adversarial": 0.5, "importance": "shared_mlp"}),
    "vpd_kl of an MLP": (baselines.vpd_kl, "blocks.0.mlp", {"faithfulness": 1.0}),
    "transcoder with ghosts": (baselines.transcoder, SITE, {"dead_after": 60, "ghost": True, "start": "median"}),
    "vpd_kl, everything else": (baselines.vpd_kl, "blocks.0.mlp", EVERYTHING_ELSE),
}


def train(model, name, tokens=TOKENS, **more):
    function, site, settings = METHODS[name]
    return function(model, site, tokens, **{**SAME, **settings, **more})


@cache
def whole_of(model, name):
    """A run that nothing interrupts; not to be changed."""
    return train(model, name)


@pytest.mark.quick_cases(2)
@pytest.mark.parametrize("name", METHODS)
def test_resumed_is_uninterrupted_to_the_bit_and_the_host_as_it_was(model, name, tmp_path, monkeypatch):
    before, whole, out = everything(model), whole_of(model, name), tmp_path / "out"
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(model, name, out=out)
    assert everything(model) == before
    with open(out / "log.jsonl", "a") as file:
        file.write('{"step": 6, "lo')  # a kill in the middle of a line
    made, one = [], Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda self, rows: made.append(self.step) or one(self, rows))
    resumed = train(model, name, out=out)
    assert made == [3, 4, 5, 6]  # from the last checkpoint on
    assert bits(resumed) == bits(whole) and resumed.log.equals(whole.log)
    assert bits(LearnedUnits.load(out)) == bits(whole)
    assert sorted(path.name for path in out.iterdir()) == ["log.jsonl", "run.json", "units.json", "weights"]
    assert everything(model) == before
    assert list(whole.checkpoints) == [50, 100, 200, 350]
    assert whole.log["loss"].iloc[-1] < whole.log["loss"].iloc[0] or "kl" in name


def test_a_run_whose_persistent_adversary_has_no_weight_resumes(model, tmp_path, monkeypatch):
    """It keeps no sources; its checkpoint was once refused as damaged."""
    how = {"adversary": "persistent", "adversarial": 0.0}
    with monkeypatch.context() as patch:
        interrupt(patch, 5)
        with pytest.raises(KeyboardInterrupt):
            train(model, "vpd_kl", out=tmp_path, **how)
    assert bits(train(model, "vpd_kl", out=tmp_path, **how)) == bits(train(model, "vpd_kl", **how))


def test_overwriting_does_not_go_on_from_the_run_before(model, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        interrupt(patch, 4)
        with pytest.raises(KeyboardInterrupt):
            train(model, "transcoder", out=tmp_path, seed=1)
    assert bits(train(model, "transcoder", out=tmp_path, overwrite=True)) == bits(whole_of(model, "transcoder"))
    # Nor do its files stay beside the new ones, or pass for finished while those are made.
    with monkeypatch.context() as patch:
        interrupt(patch, 2)
        with pytest.raises(KeyboardInterrupt):
            train(model, "transcoder", out=tmp_path, seed=1, keep=(), overwrite=True)
    with pytest.raises(TrainError, match=r"holds no units\.json"):
        LearnedUnits.load(tmp_path)
    assert list(tmp_path.glob("weights/*")) == []


@pytest.mark.parametrize("name", ["transcoder", "vpd_kl of an MLP"])
def test_save_and_load(model, name, tmp_path):
    units = whole_of(model, name)
    units.save(tmp_path / "saved")
    loaded = LearnedUnits.load(tmp_path / "saved")
    assert bits(loaded) == bits(units) and loaded.provenance == units.provenance
    assert loaded.log.equals(units.log) and repr(loaded) == repr(units)
    for at in (units.at(100), loaded.at(100)):
        assert at.tokens == 100 and swd.fidelity(model, at, TOKENS) == swd.fidelity(model, units.at(100), TOKENS)
    with pytest.raises(TrainError, match="no weights were kept at 77 tokens; there are 50, 100, 200, 350"):
        units.at(77)


def test_units_of_another_host_or_weight_processing_are_refused(model):
    other, bf16, folded = toy_model(), toy_model().to(torch.bfloat16), toy_model()
    others = dict.fromkeys(("center_writing_weights", "center_unembed", "refactor_factored_attn_matrices"), False)
    folded.process_weights_(fold_ln=True, **others)
    with torch.no_grad():
        for block in other.blocks:
            block.mlp.W_out.mul_(1.5)
    for name in ("transcoder", "transcoder of an MLP", "vpd_recon of an MLP"):
        with pytest.raises(swd.AttachError, match="were made from another W than this host has now"):
            swd.attach(other, whole_of(model, name))
        with torch.no_grad(), swd.attach(bf16, whole_of(model, name)):  # the same weights, rounded: they belong
            assert torch.isfinite(bf16(TOKENS[:2])).all()
    # A whole MLP's units belong to its matrices as they are: mlp_in changes when LayerNorm is folded into it.
    with pytest.raises(swd.AttachError, match=r"with fold_ln=False.* has fold_ln=True.*\. Load the host as it was then"):
        swd.attach(folded, whole_of(model, "transcoder of an MLP"))


@pytest.mark.parametrize("name", ["transcoder", "vpd_kl of an MLP"])
def test_bfloat16_products_are_for_training_only(model, name):
    rounded, exact = train(model, name, autocast="bfloat16", n_tokens=100), whole_of(model, name)
    assert all(t.dtype in (torch.float32, torch.int64) for t in rounded.checkpoints[100].values())
    assert 0 < abs(rounded.log["loss"].iloc[0] - exact.log["loss"].iloc[0]) < 0.05 * exact.log["loss"].iloc[0]


def test_the_callers_random_numbers_stay_and_memory_maps_and_streams_are_text_too(model, tmp_path):
    before = torch.get_rng_state()
    with torch.no_grad():
        train(model, "vpd_kl", n_tokens=50)
        assert not torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), before)
    mapped = np.memmap(tmp_path / "tokens.bin", dtype=np.uint16, mode="w+", shape=(24, 10))
    mapped[:] = TOKENS.numpy()
    stream = swd.TokenStream(lambda: iter(TOKENS), n_rows=24)
    one, two, shuffled = (train(model, "transcoder", tokens=text, n_tokens=100) for text in (mapped, stream, TOKENS))
    assert bits(one) == bits(two) != bits(shuffled)  # in its own order, not shuffled


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_bridge_gives_the_same_units(kind):
    """The Llama's MLP is gated: a whole MLP there is three matrices."""
    hosts = [families.bridge(kind), families.hooked(kind)]
    text = families.some_tokens(16, 10)
    for function, site in ((baselines.transcoder, "blocks.1.mlp"), (baselines.vpd_recon, "blocks.1.mlp")):
        made = [function(host, site, text, **{**SAME, "n_tokens": 100}) for host in hosts]
        for name in made[0]:
            a, b = (units[name].coder for units in made)
            torch.testing.assert_close(a.W_dec, b.W_dec, rtol=1e-3, atol=1e-4)
        assert [len(units) for units in made] == [1 if function is baselines.transcoder else 2 + (kind == "llama")] * 2
        for host in hosts:  # whichever it was trained in
            assert swd.fidelity(host, made[0], text).kl >= 0


def test_what_is_kept_and_which_steps_long_runs_log(model, monkeypatch):
    monkeypatch.setattr("swd_lens.train.baselines.methods._LOG_LINES", 2)  # 7 steps: every third, the first, the last, kept ones
    for keep, kept, logged in (
        ((), [350], [1, 3, 6, 7]),
        ((60, 150), [100, 150, 350], [1, 2, 3, 6, 7]),  # the step that reaches it
        (100, [100, 350], [1, 2, 3, 6, 7]),
    ):
        units = train(model, "transcoder", keep=keep)
        assert (list(units.checkpoints), units.log["step"].tolist()) == (kept, logged)
    for keep, got in (((999,), "999"), (True, "True")):
        with pytest.raises(TrainError, match=rf"keep \(token counts\) must be a whole number from 1 to 350, got {got}"):
            train(model, "transcoder", keep=keep)


def test_what_cannot_be_trained_is_refused(model):
    with pytest.raises(TrainError, match=r"'mlp_out' names 2 sites .*; a baseline is trained on one"):
        baselines.transcoder(model, "mlp_out", TOKENS, **SAME)
    for size in (55, 500):
        with pytest.raises(TrainError, match=f"tokens_per_step={size} cannot be made of these 24 rows of 10 tokens"):
            train(model, "transcoder", tokens_per_step=size, n_tokens=500)
    with pytest.raises(TrainError, match="for fidelity='kl' call vpd_kl"):
        train(model, "vpd_recon", fidelity="kl")
    with pytest.raises(TrainError, match="checkpoint_every must be a whole number of at least 1, got 0"):
        train(model, "vpd_recon", checkpoint_every=0)
    with (
        swd.attach(model, baselines.svd(model, SITE)),
        pytest.raises(swd.AttachError, match=r"blocks\.1\.mlp_out is attached already"),
    ):
        train(model, "transcoder")
    with pytest.raises(TrainError, match=r"the loss is (inf|nan) or .* at learning rate .* Lower learning_rate"):
        train(model, "transcoder", learning_rate=1e30, loss="mse", unit_decoder=False)


def test_loaded_units_stay_what_they_were_when_others_are_saved_over_them(model, tmp_path):
    first, second = whole_of(model, "transcoder"), train(model, "transcoder", seed=1)
    first.save(tmp_path)
    loaded = LearnedUnits.load(tmp_path)
    second.save(tmp_path)
    for tokens, weights in first.checkpoints.items():
        assert all(torch.equal(loaded.checkpoints[tokens][name], value) for name, value in weights.items())
    copied = copy.deepcopy(LearnedUnits.load(tmp_path))
    for tokens, weights in second.checkpoints.items():
        assert all(torch.equal(copied.checkpoints[tokens][name], value) for name, value in weights.items())
