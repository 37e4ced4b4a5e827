"""R of every pair in tables and figures."""

import pytest

from swd_lens.analysis.interactions import unit_interactions
from tests.analysis.interaction_checks import TOKENS, sparse_factors
from tests.micro import toy_model

SITE = "blocks.1.mlp_in"


def test_pairs_table_and_figures_say_the_same():
    model = toy_model()
    found = unit_interactions(model, {SITE: sparse_factors(model, SITE)}, SITE, TOKENS, progress=False)
    pairs, row = found.pairs(3), found.table().iloc[0]
    best = pairs.iloc[0]
    assert best["R"] == row["max"] == found.values().max()
    scale = (best["marginal RMS"] * best["other's marginal RMS"]) ** 0.5
    assert best["R"] == pytest.approx(best["interaction RMS"] / scale)  # as the paper's 2.096 / sqrt(11.127 x 8.089) = .221
    assert list(pairs["R"]) == sorted(found.values(), reverse=True)[:3]
    assert row["R >= 0.10"] == sum(found.values() >= 0.1)
    bars = found.plot_pairs(3).axes[0]
    assert [bar.get_width() for bar in bars.patches] == list(pairs["R"])
    assert bars.get_yticklabels()[0].get_text() == " – ".join(best[name].split("/")[1] for name in ("unit", "other unit"))
    assert len(found.plot().axes) == 3 and "<svg" in found._repr_html_()
