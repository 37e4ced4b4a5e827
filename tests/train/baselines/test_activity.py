"""Activity: L0 and dead units by hand."""

import pytest
import torch

import swd_lens as swd
from tests.train.baselines.test_methods import SITE, TOKENS, train


def test_activity_by_hand(model):
    units = train(model, "transcoder")
    found = units.report(model, TOKENS)
    with torch.no_grad(), swd.attach(model, units):
        _, cache = model.run_with_cache(TOKENS)
    alive = cache["mlp_out_unit", 1] > 0
    assert found.tokens == 240 and torch.equal(found.counts[SITE], alive.sum((0, 1)))
    assert found.l0(SITE) == pytest.approx(float(alive.sum(-1).float().mean()))
    assert found.dead(SITE).tolist() == (~alive.any(0).any(0)).nonzero().flatten().tolist()
    row = found.table().iloc[0]
    assert row["units"] == 32 and row["dead"] == len(found.dead(SITE)) and row["L0"] == found.l0(SITE)
    title = f"{SITE}: L0 {found.l0(SITE):.1f}, {row['dead']} of 32 dead"
    (ax,) = found.plot().axes
    assert ax.get_title() == title and sum(bar.get_height() for bar in ax.patches) == 32 - row["dead"]
    assert "transcoder at blocks.1.mlp_out" in units._repr_html_() and title in found._repr_html_()
    assert units.table()["edges"].tolist() == [units.edges]
    # training logs the same two, of its batches
    assert {"l0", "dead", "error", "l1"} <= set(units.log.columns)
