"""The items' settings: the paper's numbers as its appendix states them, one type over all profiles, and clear refusals."""

import re
from pathlib import Path

import pytest

from swd_lens.study import paper
from swd_lens.study.paper.settings import profiles_of
from tests.refusals import refuses

TEX = Path(__file__).resolve().parents[4] / "shared" / "paper" / "swd_paper.tex"
EVERY = [(item, profile) for item in paper.ITEMS for profile in profiles_of(item)]

DATA = "tab:swd-data-circuit-checkpoints"
# (item, profile, the section's label) -> settings as that section states them
STATED = {
    ("single-matrix", "paper", "tab:replacement-surfaces"): {"model": "gpt2", "site": "blocks.8.mlp_out"},
    ("single-matrix", "qwen2.5-0.5b", "tab:replacement-surfaces"): {"site": "blocks.12.mlp_out"},
    ("single-matrix", "qwen2.5-1.5b", "tab:replacement-surfaces"): {"site": "blocks.14.mlp_out"},
    ("single-matrix", "qwen2.5-3b", "tab:replacement-surfaces"): {"site": "blocks.18.mlp_out"},
    ("single-matrix", "qwen3.5-27b", "tab:replacement-surfaces"): {"site": "blocks.31.mlp_out"},
    ("single-matrix", "paper", DATA): {"sparsities": [0.5, 0.75], "calibration_tokens": 16_384, "sparser_tokens": 16_384},
    ("single-matrix", "qwen2.5-0.5b", DATA): {"calibration_tokens": 1_024, "sparser_tokens": 1_048_576},
    ("single-matrix", "qwen2.5-3b", DATA): {"calibration_tokens": 2_048},
    ("single-matrix", "qwen3.5-27b", DATA): {"calibration_tokens": 2_048},
    ("single-matrix", "paper", "app:swd-optimization"): {"outer_iterations": 40},
    ("single-matrix", "qwen2.5-1.5b", "app:swd-optimization"): {"outer_iterations": 8},
    ("single-matrix", "paper", "app:gpt2-zero-ablation"): {"ablations": ["mean", "zero"]},
    ("single-matrix", "paper", "app:baseline-settings"): {"tolerance": 0.001},
    ("single-matrix", "paper", "app:scoring-protocol"): {"positions": "scoring"},
    ("data-efficiency", "qwen2.5-3b", DATA): {"token_counts": [2**i for i in range(10, 26)]},
    ("data-efficiency", "qwen3.5-27b", DATA): {"token_counts": [2**i for i in range(10, 25)]},
    ("data-efficiency", "paper", DATA): {"token_counts": [2**i for i in range(10, 23)]},
    ("full-model", "paper", DATA): {"factorization_tokens": 4_194_304},
    ("full-model", "paper", "app:swd-optimization"): {"finetune_tokens": 4_194_304, "finetune_steps": 2_000, "finetune_batch": 8},
    ("full-model", "paper", "app:sparse-pretrain-setting"): {"sparsity": 0.684806},
    ("controls", "paper", "app:exact-dense-controls"): {"random_b_seeds": 10},
    ("zero-data", "paper", "app:zero-data-setting"): {"grid": [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875]},
    ("audit", "paper", "app:qualitative-text-activations"): {"audit_tokens": 2_048, "contexts": 20, "layers": [6, 8, 10]},
    ("audit", "paper", "tab:greater-than-layer-ranks"): {"per_layer": 3},
    ("edit", "paper", "app:component-editing"): {
        "edit_tokens": 131_072,
        "shifts": [-2, -1, -0.5, 0, 0.5, 1, 2, 3],
        "random_seed": 17,
        "sparsity": 0.75,
    },
    ("qk", "paper", "app:attention-components"): {"top": 16, "per_head": 5},
    ("interactions", "paper", "app:component-interactions"): {
        "interaction_units": 1_536,
        "interaction_tokens": 8_192,
        "overlap_tokens": 2_048,
        "shown": 96,
        "top": 128,
    },
}
# (item, profile, label) -> what the appendix states of a trained baseline (app:transcoder-settings, app:vpd-recon-ci-setting).
TRAINED = {
    ("single-matrix", "paper", "TC3k"): {"width": 3_072, "l1": 5e-5, "seed": 42, "n_tokens": 2_048_000},
    ("single-matrix", "paper", "TC12k"): {"width": 12_288, "l1": 5e-5, "seed": 42, "n_tokens": 2_048_000},
    ("single-matrix", "paper", "VPD-Recon-CI"): {"width": 3_072, "hidden": 128, "minimality": 1e-4, "n_tokens": 4_194_304},
    ("single-matrix", "qwen2.5-1.5b", "TC3k"): {"width": 3_072, "n_tokens": 33_554_432},
    ("single-matrix", "qwen2.5-1.5b", "TC12k"): {"width": 12_288, "n_tokens": 25_165_824},
    ("single-matrix", "qwen2.5-1.5b", "VPD-Recon-CI"): {"width": 12_288, "n_tokens": 4_194_304},
    ("single-matrix", "qwen3.5-27b", "TC48k"): {"width": 49_152, "n_tokens": 67_108_864},
    ("single-matrix", "qwen3.5-27b", "VPD-Recon-CI"): {"hidden": 12, "minimality": 3e-4, "n_tokens": 200_000_000},
    ("data-efficiency", "paper", "VPD-KL"): {"width": 3_072, "seed": 0, "n_tokens": 1_638_400_000},
    ("mlp", "paper", "TC24k"): {"width": 24_576, "l1": 1.4e-4, "seed": 42, "n_tokens": 6_291_456},
    ("mlp", "paper", "VPD-Recon-CI"): {"width": 3_072, "n_tokens": 4_194_304},
}


@pytest.mark.parametrize("key", STATED, ids="-".join)
def test_the_papers_numbers_are_those_of_its_appendix(key):
    item, profile, section = key
    entries = paper.settings_of(item, profile).entries
    assert {name: entries[name].value for name in STATED[key]} == STATED[key]
    assert all(section in entries[name].source for name in STATED[key])


@pytest.mark.parametrize("key", TRAINED, ids="-".join)
def test_trained_baselines_are_those_of_the_appendix(key):
    item, profile, label = key
    (spec,) = (spec for spec in paper.settings_of(item, profile)["trained"] if spec["label"] == label)
    assert {name: spec[name] for name in TRAINED[key]} == TRAINED[key]


def test_task_splits_are_those_of_the_appendix():
    gpt2, qwen = paper.settings_of("single-matrix", "paper")["tasks"], paper.settings_of("single-matrix", "qwen3.5-27b")
    sizes = {"greater_than": [80_000, 12_240], "ioi": [600, 200], "docstring": [600, 200], "gendered_pronoun": [3_024, 378]}
    assert gpt2 == sizes
    assert qwen["tasks"]["gendered_pronoun"] == [2_887, 370]
    assert "greater_than" not in qwen["tasks"]


def test_every_source_is_a_label_of_the_paper():
    if not TEX.is_file():
        pytest.skip("no ../shared/paper here")
    labels = set(re.findall(r"\\label\{([^}]*)\}", TEX.read_text()))
    for item, profile in EVERY:
        settings = paper.settings_of(item, profile)
        named = " ".join([settings.section, *(each.source for each in settings.entries.values())])
        assert set(re.findall(r"(?:sec|app|tab|fig):[\w:.-]+", named)) <= labels, item


@pytest.mark.parametrize("item, profile", EVERY)
def test_a_setting_has_one_type_in_all_profiles(item, profile):
    settings, of_paper = paper.settings_of(item, profile), paper.settings_of(item, "paper")
    assert list(settings) == list(of_paper)
    for name in settings:
        types = {type(settings[name]), type(of_paper[name])}
        assert len(types) == 1 or types == {int, float}, name
        assert settings.entries[name].about


def test_the_table_says_where_a_number_comes_from():
    table = paper.settings_of("single-matrix", "tiny").table().set_index("setting")
    assert table.loc["site", "value"] == "blocks.3.mlp_out"
    assert table.loc["site", "paper"] == "blocks.8.mlp_out"
    assert table.loc["heldout_tokens", "source"] == ""  # ours


def test_what_is_refused():
    refuses(ValueError, r"single-matrx.*did you mean single-matrix", paper.settings_of, "single-matrx", "tiny")
    refuses(ValueError, "no profile 'huge'", paper.settings_of, "audit", "huge")
    with pytest.raises(ValueError, match=r"audit has no profile 'qwen2\.5-3b'; it has paper, small, tiny"):
        paper.settings_of("audit", "qwen2.5-3b")
    settings = paper.settings_of("audit", "tiny")
    refuses(ValueError, "audit has no setting 'contextes'; did you mean contexts", settings.changed, contextes=3)
    for value in ("many", True):
        refuses(ValueError, f"contexts={value!r} is of another type than 20", settings.changed, contexts=value)
    assert settings.changed(contexts=3)["contexts"] == 3
