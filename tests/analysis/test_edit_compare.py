"""Methods of editing against each other."""

import pandas as pd
import pytest
import torch

from swd_lens.analysis.edit import EditComparison, compare_edits, side_effects
from swd_lens.analysis.edit.compare import lora_edits
from swd_lens.analysis.edit.target import find_target
from swd_lens.base.errors import AttachError, EditError
from swd_lens.hosts import find_sites
from swd_lens.units import attach
from tests.analysis.edit_checks import OTHERS, PROMPT, TEXT
from tests.hosts.test_interrupts import everything
from tests.refusals import refuses


def test_lora_reaches_the_requested_margins_and_leaves_the_host_alone(model):
    site = find_sites(model, "blocks.1.attn_o")[0]
    target = find_target(model, site, PROMPT, 3, 5)
    before = everything(model)
    both = lora_edits(model, site, target, [-1.0, 1.5], progress=False)
    alone = lora_edits(model, site, target, [1.5], progress=False)[0]
    assert everything(model) == before and all(p.grad is None for p in model.parameters())
    for edit in both:
        with edit, torch.no_grad():
            logits = model(PROMPT[None])[0, -1]
        assert float(logits[3] - logits[5]) - target.margin == pytest.approx(edit.shift, abs=0.02)
        assert edit.delta.rank == 4 and edit.settings["learning_rate"] == 0.08
    # Side by side the rows do not mix: the same training but for rounding.
    assert torch.allclose(alone.delta.dense(), both[1].delta.dense(), atol=1e-3)
    again = lora_edits(model, site, target, [1.5], progress=False)[0]
    assert torch.equal(again.delta.read, alone.delta.read) and torch.equal(again.delta.write, alone.delta.write)


@pytest.fixture(scope="module")
def comparison(model, exact):
    how = {"other_prompts": OTHERS, "tokens": TEXT, "shifts": (-1, 0, 1), "progress": False}
    return compare_edits(model, exact, "blocks.1.mlp_out/1", PROMPT, 3, 5, **how)


def test_every_method_at_every_shift(model, comparison):
    rows = comparison.table()
    assert rows["method"].tolist() == [m for m in ("unit", "random", "oracle", "lora") for _ in range(3)]
    assert rows["requested shift"].tolist() == [-1, 0, 1] * 4 and next(iter(comparison.edits)) == ("unit", -1.0)
    calibrated = rows[rows["method"] != "lora"]
    assert calibrated["h* dW d"].tolist() == pytest.approx([-1, 0, 1] * 3, abs=1e-6)
    trained = rows[rows["method"] == "lora"]
    assert trained["margin change"].tolist() == pytest.approx([-1, 0, 1], abs=0.02)
    # Behind the last block only h* matters: equal calibration, equal change of the final margin.
    assert calibrated["margin change"].tolist() == pytest.approx(calibrated["margin change"].tolist()[:3] * 3, abs=1e-4)
    assert rows["unit"].nunique() == 3 and (rows[rows["requested shift"] == 0]["KL other prompts"] == 0).all()
    edit = comparison.edits["oracle", 1.0]
    alone = side_effects(model, edit, OTHERS, TEXT)
    row = rows[(rows["method"] == "oracle") & (rows["requested shift"] == 1)].iloc[0]
    assert row["KL other prompts"] == pytest.approx(alone.mean_kl, rel=1e-6)
    assert row["KL text"] == pytest.approx(alone.kl_text, rel=1e-6)
    assert comparison.settings["random_seed"] == 17 and comparison.settings["n_text_predictions"] == 56


def test_cost_at_interpolates_the_root_of_kl(comparison):
    """KL 0.04 at a change of 2 and 0.16 at 4: the root is 0.3 at 3, so KL 0.09; below 2 it goes to 0 as the square."""
    rows = pd.DataFrame({"method": ["a", "a", "b"], "unit": ""})
    rows = rows.assign(**{"margin change": [4.0, 2.0, -2.0], "KL other prompts": [0.16, 0.04, 0.01]})
    by_hand = EditComparison(rows, {}, comparison.target, (), {})
    for change, a, b in ((3, 0.09, None), (1, 0.01, None), (-1, None, 0.0025), (5, None, None)):
        costs = by_hand.cost_at(change).set_index("method")["KL other prompts"]
        for method, cost in (("a", a), ("b", b)):
            assert pd.isna(costs[method]) if cost is None else costs[method] == pytest.approx(cost)
    refuses(EditError, "a change other than 0", comparison.cost_at, 0)
    refuses(EditError, "'KL'", comparison.cost_at, 1, of="KL")


def test_the_pareto_figure(comparison):
    figure = comparison.plot()
    ax = figure.axes[0]
    lines = {line.get_label(): line for line in ax.get_lines() if line.get_marker() != "None"}
    names = ["unit blocks.1.mlp_out/1", f"random unit {comparison.rows['unit'][3]}", "oracle (dense, rank one)", "LoRA, rank 4"]
    assert list(lines) == names
    line = lines["unit blocks.1.mlp_out/1"]
    assert list(line.get_ydata()) == comparison.rows["margin change"].tolist()[:3]
    assert list(line.get_xdata()) == comparison.rows["KL other prompts"].tolist()[:3]
    assert ax.get_xscale() == "symlog" and ax.get_xticks()[0] == 0 and ax.get_xlim()[0] < 0
    assert {text.get_text() for text in ax.texts} == {"-1", "+1"}
    assert "<svg" in comparison._repr_html_() and comparison.plot("KL text").axes[0].get_xlabel().endswith("(nats)")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"other_prompts": []}, "at least one prompt"),
        ({"methods": ("unit", "magic")}, "methods must be some of"),
        ({"shifts": ()}, "shifts must be different numbers"),
        ({"shifts": (1, 1.0)}, "shifts must be different numbers"),
        ({"shifts": (1, float("inf"))}, "a shift must be a finite number"),
    ],
)
def test_comparison_errors(model, exact, changes, message):
    given = {"unit": "blocks.1.mlp_out/1", "other_prompts": OTHERS, "progress": False} | changes
    refuses(EditError, message, compare_edits, model, exact, given.pop("unit"), PROMPT, 3, 5, **given)


def test_one_sites_units_attached(model, exact):
    with attach(model, {"blocks.1.mlp_out": exact["blocks.1.mlp_out"]}), pytest.raises(AttachError, match="attached"):
        compare_edits(model, exact, "blocks.1.mlp_out/1", PROMPT, 3, 5, other_prompts=OTHERS)
