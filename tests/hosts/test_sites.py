"""Site names and patterns."""

import pytest

from swd_lens.base.errors import UnknownSiteError
from swd_lens.hosts import sites
from swd_lens.hosts.sites import Site, hook_name, parse_unit, select_sites

SITES = [Site(layer, kind, 8, 8) for layer in range(12) for kind in ("attn_qkv", "attn_o", "mlp_in", "mlp_out")]


def names(pattern):
    return [site.name for site in select_sites(SITES, pattern)]


@pytest.mark.quick_cases(4)
@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("blocks.8.mlp_out", ["blocks.8.mlp_out"]),
        ("blocks.8.mlp.W_out", ["blocks.8.mlp_out"]),  # TransformerLens parameter
        ("blocks.3.attn.W_O", ["blocks.3.attn_o"]),
        ("h.8.mlp.c_proj", ["blocks.8.mlp_out"]),  # Hugging Face module, GPT-2
        ("transformer.h.8.attn.c_proj", ["blocks.8.attn_o"]),
        ("transformer.h.8.attn.c_attn", ["blocks.8.attn_qkv"]),
        ("model.layers.11.mlp.down_proj", ["blocks.11.mlp_out"]),
        ("gpt_neox.layers.2.mlp.dense_h_to_4h", ["blocks.2.mlp_in"]),
        ("blocks.[0-1].mlp_*", ["blocks.0.mlp_in", "blocks.0.mlp_out", "blocks.1.mlp_in", "blocks.1.mlp_out"]),
        (["blocks.1.mlp_out", "blocks.0.attn_o", "blocks.1.mlp_*"], ["blocks.0.attn_o", "blocks.1.mlp_in", "blocks.1.mlp_out"]),
    ],
)  # fmt: skip
def test_patterns(pattern, expected):
    assert names(pattern) == expected


def test_sites_themselves():
    assert names(SITES[7]) == [SITES[7].name]
    assert names([SITES[7], "blocks.0.attn_o"]) == ["blocks.0.attn_o", SITES[7].name]


def test_names_in_full_are_not_matched_with_every_site(monkeypatch):
    """All 210 of SmolLM2 were, 44,100 times in every `attach`: more than half of its time."""
    monkeypatch.setattr(sites, "matches", lambda site, pattern: pytest.fail(f"{pattern} was matched with {site.name}"))
    assert select_sites(SITES, [site.name for site in reversed(SITES)]) == select_sites(SITES, SITES) == SITES


def test_a_bare_kind_is_every_layer_in_order():
    assert names("mlp_out") == [f"blocks.{layer}.mlp_out" for layer in range(12)]
    assert names("all") == [site.name for site in SITES]


@pytest.mark.parametrize("pattern", ["blocks.12.mlp_out", "blocks.8.mlp_outt", "h.99.mlp.c_proj", "", "mlp"])
def test_nothing_matches_lists_the_nearest(pattern):
    with pytest.raises(UnknownSiteError, match=r"no site matches .* Nearest: blocks\.\d+\.\w+.*blocks\.0 to blocks\.11"):
        names(pattern)


def test_the_nearest_is_near():
    with pytest.raises(UnknownSiteError, match=r"Nearest: blocks\.8\.mlp_out"):
        names("blocks.8.mlp_outt")
    with pytest.raises(UnknownSiteError, match="no site was named"):
        names([])


def test_units_and_hooks():
    assert parse_unit("blocks.8.mlp_out/205") == ("blocks.8.mlp_out", 205)
    assert hook_name("blocks.8.mlp_out") == "blocks.8.hook_mlp_out_unit"
    for bad in ("blocks.8.mlp_out", "blocks.8.mlp_out/x", "8/205"):
        with pytest.raises(ValueError, match=r"not a (unit|site) name"):
            parse_unit(bad)
