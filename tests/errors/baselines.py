"""Triggers of the section "Learned baselines" of swd_lens/ERRORS.md.

The host is a small bridge, which every transformer_lens has.
"""

import json
from functools import cache
from types import SimpleNamespace

import torch

import swd_lens as swd
from swd_lens import baselines
from swd_lens.base.sealed import read_sealed, write_sealed, write_tensors
from swd_lens.hosts.embedded import WEIGHTS
from swd_lens.hosts.embedded.corpus import load_tokenizer
from swd_lens.train.baselines import LearnedUnits
from swd_lens.train.baselines.units import Trajectory
from tests import families
from tests.errors.triggers import TRIGGERS, trigger
from tests.units.test_sources import Coder

SITE, MLP = "blocks.0.mlp_out", "blocks.0.mlp"


@cache
def model():
    return families.bridge("gpt2")


def tokens(rows=8, pos=12):
    return families.some_tokens(rows, pos)


def trained(site: str | list[str] = SITE, text=None, train=baselines.transcoder, **settings):
    small = {"n_tokens": 96, "tokens_per_step": 48, "width": 4, "progress": False}
    return train(model(), site, tokens() if text is None else text, **{**small, **settings})


@cache
def units():
    return trained()


@trigger
def activations_not_kept(folder, monkeypatch):
    monkeypatch.setattr("swd_lens.train.activations.shutil.disk_usage", lambda place: SimpleNamespace(free=1000))
    trained(text=tokens(4))


# ---------------------------------------------------------------------------------------------- settings and text

TRIGGERS |= {
    "learned-unknown-setting": lambda *_: trained(widht=3),
    "learned-unknown-preset": lambda *_: trained(preset="papr"),
    "learned-unknown-choice": lambda *_: trained(loss="l2"),
    "learned-count-out-of-range": lambda *_: trained(n_tokens=0),
    "learned-setting-out-of-range": lambda *_: trained(learning_rate=-1.0),
    "learned-width": lambda *_: trained(width="wide"),
    "learned-several-sites": lambda *_: trained("mlp_out"),
    "learned-other-fidelity": lambda *_: trained(train=baselines.vpd_recon, fidelity="kl"),
    "learned-rows-do-not-divide": lambda *_: trained(tokens_per_step=50),
    "learned-text-too-short": lambda *_: trained(tokens_per_step=120, n_tokens=240),
    "learned-keep": lambda *_: trained(keep=[48, 200]),
}


@trigger
def learned_site_attached(*_):
    with swd.attach(model(), baselines.svd(model(), SITE)):
        trained()


@trigger
def learned_not_finite(*_):
    trained(learning_rate=1e30, n_tokens=480, train=baselines.vpd_recon)


@trigger
def learned_text_unreadable(*_):
    trained(text="The cat sat on the mat.")


# ---------------------------------------------------------------------------------------------- folders


@trigger
def learned_another_run(folder, _):
    trained(out=folder)
    trained(out=folder, l1=1.0)


@trigger
def training_overwrites_when_launched(folder, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    trained(out=folder, overwrite=True)


@trigger
def learned_not_kept_there(*_):
    units().at(50)


@trigger
def learned_no_units_there(folder, _):
    LearnedUnits.load(folder)


@trigger
def learned_saved_into_a_run(folder, _):
    trained(out=folder)
    units().save(folder)


@trigger
def learned_damaged_index(folder, _):
    units().save(folder)
    (folder / "units.json").write_text("{")
    LearnedUnits.load(folder)


def rewritten(folder, **changes):
    units().save(folder)
    write_sealed(folder / "units.json", {**read_sealed(folder / "units.json", "an index"), **changes})
    LearnedUnits.load(folder)


@trigger
def learned_newer_format(folder, _):
    rewritten(folder, format=99)


@trigger
def learned_settings_of_the_future(folder, _):
    provenance = dict(units().provenance)
    rewritten(folder, provenance={**provenance, "settings": {**provenance["settings"], "tied": True}})


@trigger
def learned_missing_weights(folder, _):
    units().save(folder)
    next((folder / "weights").iterdir()).unlink()
    LearnedUnits.load(folder)


@trigger
def learned_weights_changed(folder, _):
    units().save(folder)
    hashes = LearnedUnits.load(folder).checkpoints.hashes
    for path in (folder / "weights").iterdir():
        write_tensors(path, {}, {})
    # Not through LearnedUnits: the tests' type checker reads a mapping's items when it is handed on.
    points = Trajectory(folder)
    for tokens, digest in hashes.items():
        points.take_over(tokens, digest)
    dict(points)


# ---------------------------------------------------------------------------------------------- as units


@trigger
def learned_mlp_of_another_host(*_):
    whole, host = trained(MLP), families.bridge("gpt2")
    with torch.no_grad():
        for parameter in host.parameters():
            parameter.mul_(1.5)
    swd.attach(host, whole)


class Counted(Coder):
    edges_per_unit = torch.tensor([4, 5])


@trigger
def own_counts_do_not_fit(*_):
    swd.attach(model(), {SITE: Counted(torch.randn(64, 3), torch.randn(3, 16))})


@trigger
def channels_of_another_matrix(*_):
    baselines.channels_of(model(), "blocks.0.mlp_in")


# ---------------------------------------------------------------------------------------------- sparse pretraining

CONFIG = {"n_layer": 1, "n_embd": 16, "n_head": 2, "n_positions": 64, "vocab_size": families.D_VOCAB}


def pretrained(folder, config=None, **settings):
    quick = {"updates": 2, "tokens_per_update": 48, "progress": False, "tokenizer": load_tokenizer(WEIGHTS)}
    baselines.sparse_pretrain(CONFIG if config is None else config, tokens(), out=folder, **{**quick, **settings})


TRIGGERS |= {
    "sparse-config": lambda folder, _: pretrained(folder, "gpt2"),
    "sparse-unknown-size": lambda folder, _: pretrained(folder, {**CONFIG, "n_layers": 2}),
    "sparse-heads": lambda folder, _: pretrained(folder, {**CONFIG, "n_head": 3}),
    "sparse-without-tokenizer": lambda folder, _: pretrained(folder, tokenizer=None),
    "sparse-stops-after-the-end": lambda folder, _: pretrained(folder, stop_after=3),
    "sparse-warm-up-too-long": lambda folder, _: pretrained(folder, warmup=0.9),
    "sparse-rows-do-not-make-an-update": lambda folder, _: pretrained(folder, tokens_per_update=50),
    "sparse-rows-without-a-weight": lambda folder, _: pretrained(folder, updates=20, end_density=0.01),
    "sparse-not-finite": lambda folder, _: pretrained(folder, updates=9, learning_rate=1e30),
}


@trigger
def sparse_model_gone(folder, _):
    pretrained(folder)
    (folder / "model" / "config.json").unlink()
    pretrained(folder)


@trigger
def sparse_model_changed(folder, _):
    pretrained(folder)
    (folder / "model" / "config.json").write_text("{}")
    pretrained(folder)


# ---------------------------------------------------------------------------------------------- data efficiency


def efficiency(methods, site: str | list[str] = SITE, **settings):
    swd.data_efficiency(model(), site, methods, **{"heldout": tokens(), **settings})


TRIGGERS |= {
    "efficiency-of-nothing": lambda *_: efficiency({}),
    "efficiency-of-several-sites": lambda *_: efficiency({"SWD": {"sparsity": 0.5}}, "mlp_out", tokens=tokens()),
    "efficiency-of-another-kind": lambda *_: efficiency({"Transcoder": 3}),
    "efficiency-of-another-site": lambda *_: efficiency({"Transcoder": units()}, "blocks.1.mlp_out"),
    "efficiency-without-tokens": lambda *_: efficiency({"SWD": {"sparsity": 0.5}}),
    "efficiency-checkpoints": lambda *_: efficiency({"SWD": {"sparsity": 0.5}}, tokens=tokens(), checkpoints=[0]),
    "efficiency-token-counts": lambda *_: efficiency({"SWD": {"sparsity": 0.5}}, tokens=tokens(), token_counts=[0]),
}


@trigger
def efficiency_metric(*_):
    swd.data_efficiency(model(), SITE, {"Transcoder": units()}, heldout=tokens()).tokens_to_reach(0.1, "CE")


def of_swd(options=None, **settings):
    quick = {"sparsity": 0.5, "preset": "paper", "outer_iterations": 4}
    efficiency({"SWD": {**quick, **(options or {})}}, tokens=tokens(), token_counts=[24], **settings)


TRIGGERS |= {
    "learned-masks-of-the-kl": lambda *_: trained(train=baselines.vpd_recon, adversarial=0.5),
    "efficiency-units-without-tokens": lambda *_: efficiency({"SVD": baselines.svd(model(), SITE)}),
    "efficiency-tokens-of-units": lambda *_: efficiency({"SVD": (baselines.svd(model(), SITE), 0)}),
    "efficiency-options-that-are-set": lambda *_: of_swd({"tokens": tokens()}),
    "efficiency-on-single-tokens": lambda *_: swd.data_efficiency(model(), SITE, {}, heldout=tokens(4, 1)),
}


@trigger
def efficiency_of_no_metric(*_):
    swd.data_efficiency(model(), SITE, {"Transcoder": units()}, heldout=tokens()).plot([])


@trigger
def efficiency_another_measurement(folder, _):
    of_swd(out=folder / "points.json")
    efficiency({"Transcoder": units()}, out=folder / "points.json", heldout=tokens(4, 6))


@trigger
def efficiency_method_made_otherwise(folder, _):
    of_swd(out=folder / "points.json")
    of_swd({"sparsity": 0.6}, out=folder / "points.json")


@trigger
def efficiency_file_of_something_else(folder, _):
    (folder / "points.json").write_text("[]")
    swd.DataEfficiency.load(folder / "points.json")


@trigger
def efficiency_newer_format(folder, _):
    (folder / "points.json").write_text(json.dumps({"format": 99, "settings": {}}))
    swd.DataEfficiency.load(folder / "points.json")


@trigger
def study_beside_another_surface(*_):
    host = swd.load_default_model()
    task, text = swd.load_task("ioi", host, n_train=2, n_test=2), swd.text_tokens(256)
    swd.run_study(
        model(), {"one": "blocks.1.mlp_out"}, [task], sparsities=(0.5,), calibration_tokens=text, heldout_tokens=text,
        beside={"Transcoder": units()},
    )  # fmt: skip
