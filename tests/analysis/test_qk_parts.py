"""Contributions of all pairs and the bias terms sum to hook_attn_scores, in every kind of head."""

import pytest
import torch

from swd_lens.analysis.qk import score_parts
from swd_lens.base.errors import QKError
from tests import families
from tests.analysis.qk_checks import ROW, check_parts, random_factors
from tests.micro import toy_model

HOSTS = {
    "learned": lambda: toy_model(),
    "alibi": lambda: toy_model(positional_embedding_type="alibi"),
    "soft cap": lambda: toy_model(attn_scores_soft_cap=3.0),
    "scaled by layer": lambda: toy_model(scale_attn_by_inverse_layer_idx=True),
    "adjacent pairs": lambda: toy_model(positional_embedding_type="rotary", rotary_dim=8, rotary_adjacent_pairs=True),
    "ungrouped": lambda: toy_model(n_heads=4, d_head=4, n_key_value_heads=2, ungroup_grouped_query_attention=True),
}


@pytest.mark.quick_cases(3)
@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("host", [*HOSTS, "pythia", "llama", "qwen3"])
def test_parts_sum_to_the_scores_of_the_attached_host(host, packed):
    model = HOSTS[host]() if host in HOSTS else families.hooked(host)
    check_parts(model, random_factors(model, packed), ROW)


def test_the_parts_by_name():
    """Without biases only pairs are left; with them, the constant parts do not depend on what they should not depend on."""
    model = toy_model()
    factors = random_factors(model)
    parts = score_parts(model, factors, 1, 0, ROW)
    assert torch.allclose(parts.biases[-1], parts.biases[-1, :1].expand(len(ROW)))
    assert torch.allclose(parts.query_bias[-1, :-1], parts.query_bias[-2, :-1])
    assert torch.allclose(parts.key_bias[-1], parts.key_bias[-1, :1].expand(len(ROW)), atol=1e-6)
    for block in model.blocks:
        block.attn.b_Q.data.zero_()
        block.attn.b_K.data.zero_()
    bare = score_parts(model, factors, 1, 0, ROW)
    assert not any(getattr(bare, name).any() for name in ("query_bias", "key_bias", "biases", "position"))
    assert torch.equal(bare.total, bare.pairs)


def test_the_strongest_pairs_of_one_score():
    model = families.hooked("qwen3")  # norms, rotation and groups at once
    parts = score_parts(model, random_factors(model), 1, 3, ROW)
    table = parts.strongest(5, 2, n=81)
    assert float(table["contribution"].sum()) == pytest.approx(float(parts.pairs[5, 2]), abs=1e-5)
    assert table["contribution"].abs().is_monotonic_decreasing
    first = table.iloc[0]
    seen = parts.contribution(int(first["q unit"]), int(first["k unit"]))[5, 2]
    assert float(seen) == pytest.approx(first["contribution"], abs=1e-6)
    size = len(parts.tokens)
    assert parts.strongest(5 - size, 2 - size, n=81).equals(table)  # negative positions count from the end
    named = parts.contribution(f"blocks.1.attn_qkv/{int(first['q unit'])}", ("blocks.1.attn_qkv", int(first["k unit"])))
    assert float(named[5, 2]) == float(seen)
    with pytest.raises(QKError, match="destination 2 does not look at source 5"):
        parts.strongest(2, 5)
    with pytest.raises(QKError, match=r"destination -99 does not look"):
        parts.strongest(-99, 0)
    with pytest.raises(QKError, match=r"q_unit is blocks\.0\.attn_qkv/1, but blocks\.1\.attn_qkv has units"):
        parts.contribution("blocks.0.attn_qkv/1", 0)
    with pytest.raises(QKError, match=r"k_unit is 9, but blocks\.1\.attn_qkv has units 0 to 8"):
        parts.contribution(0, 9)


def test_the_spread_is_within_rows():
    """What is the same for all sources of a row changes no pattern: the query units with a constant key."""
    parts = score_parts(toy_model(), random_factors(toy_model()), 0, 1, ROW)
    table = parts.table().set_index("part")
    assert table.loc["Q units × key bias", "spread"] < 1e-6 < parts.key_bias[parts.mask].std()
    rows = [row[: i + 1] - row[: i + 1].mean() for i, row in enumerate(parts.pairs)]
    spread = float(torch.cat(rows).square().mean().sqrt())
    assert table.loc["all unit pairs", "spread"] == pytest.approx(spread, rel=1e-5) and table.index[0] == "all unit pairs"
    parts = score_parts(toy_model(positional_embedding_type="alibi"), random_factors(toy_model()), 0, 0, ROW)
    assert (
        "<svg" in parts._repr_html_() and len(parts.plot().axes) == 7 and "L0H0 on 7 tokens" in repr(parts)
    )  # five parts, their sum, one bar
