"""Trained baselines of an item."""

import swd_lens as swd
from swd_lens.study import paper
from swd_lens.study.paper import materials
from tests.study.paper.conftest import SMALL


def test_a_penalty_is_chosen_on_validation_text(model, tmp_path):
    spec = {"label": "TC", "method": "transcoder", "width": 8, "n_tokens": 512, "tokens_per_step": 128, "seed": 0}
    settings = paper.settings_of("single-matrix", "tiny").changed(**SMALL)
    bench = materials.Materials(model, settings, tmp_path)
    chosen = bench.trained("blocks.3.mlp_out", {**spec, "l1": [1e-5, 2e-5, 1e4]})
    deltas = {
        l1: swd.fidelity(model, bench.trained("blocks.3.mlp_out", {**spec, "l1": l1}), bench.validation).ce_delta
        for l1 in (1e-5, 2e-5, 1e4)
    }
    allowed = [l1 for l1, delta in deltas.items() if delta <= min(deltas.values()) + 0.001]
    assert chosen.provenance["settings"]["l1"] == max(allowed) < 1e4
    rows = {tuple(row) for row in bench.validation.tolist()}
    assert not rows & {tuple(row) for row in bench.heldout.tolist()}
    assert not rows & {tuple(row) for row in bench.fitted_on(512).tolist()}
