"""The items' settings: the paper's numbers as its appendix states them, one type over all profiles, and clear refusals."""

import re
from pathlib import Path

import pytest

from swd_lens.study import paper
from swd_lens.study.paper.settings import profiles_of

TEX = Path(__file__).resolve().parents[4] / "shared" / "paper" / "swd_paper.tex"
EVERY = [(item, profile) for item in paper.ITEMS for profile in profiles_of(item)]

# (item, profile, setting, what the appendix states, the section's label)
STATED = [
    ("single-matrix", "paper", "model", "gpt2", "tab:replacement-surfaces"),
    ("single-matrix", "paper", "site", "blocks.8.mlp_out", "tab:replacement-surfaces"),
    ("single-matrix", "qwen2.5-0.5b", "site", "blocks.12.mlp_out", "tab:replacement-surfaces"),
    ("single-matrix", "qwen2.5-1.5b", "site", "blocks.14.mlp_out", "tab:replacement-surfaces"),
    ("single-matrix", "qwen2.5-3b", "site", "blocks.18.mlp_out", "tab:replacement-surfaces"),
    ("single-matrix", "qwen3.5-27b", "site", "blocks.31.mlp_out", "tab:replacement-surfaces"),
    ("single-matrix", "paper", "sparsities", [0.5, 0.75], "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "paper", "calibration_tokens", 16_384, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "paper", "sparser_tokens", 16_384, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "qwen2.5-0.5b", "calibration_tokens", 1_024, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "qwen2.5-0.5b", "sparser_tokens", 1_048_576, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "qwen2.5-3b", "calibration_tokens", 2_048, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "qwen3.5-27b", "calibration_tokens", 2_048, "tab:swd-data-circuit-checkpoints"),
    ("single-matrix", "paper", "outer_iterations", 40, "app:swd-optimization"),
    ("single-matrix", "qwen2.5-1.5b", "outer_iterations", 8, "app:swd-optimization"),
    ("single-matrix", "paper", "ablations", ["mean", "zero"], "app:gpt2-zero-ablation"),
    ("single-matrix", "paper", "tolerance", 0.001, "app:baseline-settings"),
    ("single-matrix", "paper", "positions", "scoring", "app:scoring-protocol"),
    ("data-efficiency", "qwen2.5-3b", "token_counts", [2**i for i in range(10, 26)], "tab:swd-data-circuit-checkpoints"),
    ("data-efficiency", "qwen3.5-27b", "token_counts", [2**i for i in range(10, 25)], "tab:swd-data-circuit-checkpoints"),
    ("data-efficiency", "paper", "token_counts", [2**i for i in range(10, 23)], "tab:swd-data-circuit-checkpoints"),
    ("full-model", "paper", "factorization_tokens", 4_194_304, "tab:swd-data-circuit-checkpoints"),
    ("full-model", "paper", "finetune_tokens", 4_194_304, "app:swd-optimization"),
    ("full-model", "paper", "finetune_steps", 2_000, "app:swd-optimization"),
    ("full-model", "paper", "finetune_batch", 8, "app:swd-optimization"),
    ("full-model", "paper", "sparsity", 0.684806, "app:sparse-pretrain-setting"),
    ("controls", "paper", "random_b_seeds", 10, "app:exact-dense-controls"),
    ("zero-data", "paper", "grid", [0.125, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875], "app:zero-data-setting"),
    ("audit", "paper", "audit_tokens", 2_048, "app:qualitative-text-activations"),
    ("audit", "paper", "contexts", 20, "app:qualitative-text-activations"),
    ("audit", "paper", "layers", [6, 8, 10], "app:qualitative-text-activations"),
    ("audit", "paper", "per_layer", 3, "tab:greater-than-layer-ranks"),
    ("edit", "paper", "edit_tokens", 131_072, "app:component-editing"),
    ("edit", "paper", "shifts", [-2, -1, -0.5, 0, 0.5, 1, 2, 3], "app:component-editing"),
    ("edit", "paper", "random_seed", 17, "app:component-editing"),
    ("edit", "paper", "sparsity", 0.75, "app:component-editing"),
    ("qk", "paper", "top", 16, "app:attention-components"),
    ("qk", "paper", "per_head", 5, "app:attention-components"),
    ("interactions", "paper", "interaction_units", 1_536, "app:component-interactions"),
    ("interactions", "paper", "interaction_tokens", 8_192, "app:component-interactions"),
    ("interactions", "paper", "overlap_tokens", 2_048, "app:component-interactions"),
    ("interactions", "paper", "shown", 96, "app:component-interactions"),
    ("interactions", "paper", "top", 128, "app:component-interactions"),
]
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


@pytest.mark.parametrize("item, profile, name, value, section", STATED)
def test_the_papers_numbers_are_those_of_its_appendix(item, profile, name, value, section):
    setting = paper.settings_of(item, profile).entries[name]
    assert setting.value == value
    assert section in setting.source


@pytest.mark.parametrize("key", TRAINED, ids="-".join)
def test_trained_baselines_are_those_of_the_appendix(key):
    item, profile, label = key
    (spec,) = (spec for spec in paper.settings_of(item, profile)["trained"] if spec["label"] == label)
    assert {name: spec[name] for name in TRAINED[key]} == TRAINED[key]


def test_task_splits_are_those_of_the_appendix():
    gpt2, qwen = paper.settings_of("single-matrix", "paper")["tasks"], paper.settings_of("single-matrix", "qwen3.5-27b")
    assert gpt2 == {
        "greater_than": [80_000, 12_240],
        "ioi": [600, 200],
        "docstring": [600, 200],
        "gendered_pronoun": [3_024, 378],
    }
    assert qwen["tasks"]["gendered_pronoun"] == [2_887, 370]
    assert "greater_than" not in qwen["tasks"]


def test_every_source_is_a_label_of_the_paper():
    if not TEX.is_file():
        pytest.skip("no ../shared/paper here")
    labels = set(re.findall(r"\\label\{([^}]*)\}", TEX.read_text()))
    for item, profile in EVERY:
        settings = paper.settings_of(item, profile)
        named = [settings.section, *(each.source for each in settings.entries.values())]
        for source in named:
            for label in re.findall(r"(?:sec|app|tab|fig):[\w:.-]+", source):
                assert label in labels, (item, label)


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
    with pytest.raises(ValueError, match=r"single-matrx.*did you mean single-matrix"):
        paper.settings_of("single-matrx", "tiny")
    with pytest.raises(ValueError, match="no profile 'huge'"):
        paper.settings_of("audit", "huge")
    with pytest.raises(ValueError, match=r"audit has no profile 'qwen2\.5-3b'; it has paper, small, tiny"):
        paper.settings_of("audit", "qwen2.5-3b")
    settings = paper.settings_of("audit", "tiny")
    with pytest.raises(ValueError, match="audit has no setting 'contextes'; did you mean contexts"):
        settings.changed(contextes=3)
    with pytest.raises(ValueError, match="contexts='many' is of another type than 20"):
        settings.changed(contexts="many")
    with pytest.raises(ValueError, match="of another type"):
        settings.changed(contexts=True)
    assert settings.changed(contexts=3)["contexts"] == 3
