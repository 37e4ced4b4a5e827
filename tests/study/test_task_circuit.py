"""What a graph is drawn of: the sites that a screen names, and units of every site, half of them outputs."""

import pytest
import torch

import swd_lens as swd
from swd_lens.circuits import UnitScores
from swd_lens.circuits.screen import Screen, TaskScreen
from swd_lens.study.task_circuit import best_units, dense_margins, example_of, needed_sites, well_done
from swd_lens.tasks.aligned import aligned_prompts, groups_of
from tests.analysis.graph_checks import random_factors
from tests.micro import toy_model


def screened(margin, **margins) -> Screen:
    names = {name.replace("__", "."): value for name, value in margins.items()}
    task = TaskScreen("t", 8, margin, 1.0, names, dict.fromkeys(names, 0.1), dict.fromkeys(names, 1.0))
    return Screen({"t": task}, tuple(names), {}, {"positions": "each"})


def test_outputs_that_change_the_margin_and_what_attention_reads(default_model):
    sites, outputs = needed_sites(
        default_model, screened(2.0, blocks__0__attn_o=1.9, blocks__1__attn_o=2.6, blocks__1__mlp_out=1.0, blocks__3__attn_o=1.7)
    )
    # Half, three tenths against the task, 15 %; 5 % is too little.
    assert outputs == pytest.approx({"blocks.1.mlp_out": 0.5, "blocks.1.attn_o": -0.3, "blocks.3.attn_o": 0.15})
    parts = ("attn_q", "attn_k", "attn_v", "attn_o")
    assert set(sites) == {"blocks.1.mlp_out", *(f"blocks.{layer}.{part}" for layer in (1, 3) for part in parts)}
    few, _ = needed_sites(default_model, screened(2.0, blocks__2__mlp_out=1.95, blocks__3__mlp_out=1.99))
    assert few == ["blocks.2.mlp_out"]  # the most needed, where none reaches a tenth
    every = {f"blocks__{layer}__{kind}": 0.0 for layer in range(4) for kind in ("attn_o", "mlp_out")}
    assert len(needed_sites(default_model, screened(2.0, **every))[1]) == 6  # four and two at the most
    with pytest.raises(ValueError, match=r"the model does not do t: its mean margin .* -0.50; name sites"):
        needed_sites(default_model, screened(-0.5, blocks__2__mlp_out=0.0))


def test_half_of_the_units_are_outputs_and_every_site_has_some():
    factors = random_factors(toy_model(), "attn_k", "attn_o", "mlp_out", n_units=12)
    scores = {site: torch.linspace(0.01, 0.02, 12) for site in factors}
    scores["blocks.0.attn_k"] = -torch.linspace(5.0, 6.0, 12)
    circuit = best_units(factors, UnitScores(scores, scores, {}), 20)
    counts = {site: sum(unit[0] == site for unit in circuit.units) for site in factors}
    assert circuit.n_units == 20 and circuit.units[0] == ("blocks.0.attn_k", 11)  # large below 0, too
    # Half are 10: two of each of the four outputs; two of the other keys; the rest go by score.
    assert counts == {site: 10 if site == "blocks.0.attn_k" else 2 for site in factors}


def test_prompts_that_the_model_does_well(default_model):
    task = swd.load_task("gendered_pronoun", default_model, n_train=40, n_test=2)
    chosen = well_done(default_model, task, 6)
    margins = dense_margins(default_model, chosen.split)
    others = [aligned_prompts(default_model, task, 6, like=like) for like in groups_of(task.train)[:8]]
    means = [float(dense_margins(default_model, other.split).mean()) for other in others]
    assert float(margins.mean()) == pytest.approx(max(means))
    with torch.no_grad():
        logits = default_model(chosen.tokens)[:, -1]
    expected = [
        float(row[list(right)].mean() - row[list(wrong)].mean())
        for row, right, wrong in zip(logits, chosen.split.answer_ids, chosen.split.distractor_ids, strict=True)
    ]
    assert margins.tolist() == pytest.approx(expected, abs=1e-4)
    assert sorted(expected)[3] == pytest.approx(expected[example_of(default_model, chosen.split)])
