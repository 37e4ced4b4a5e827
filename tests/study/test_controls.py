"""What stands beside SWD: which controls a study has, how they are made, and what is left out."""

import pytest
import torch

import swd_lens as swd
from swd_lens.report.page import render_report
from swd_lens.report.recipe import run_code
from swd_lens.study.controls import control_options

pytestmark = pytest.mark.usefixtures("few_alternations")


def test_svd_in_the_metric_of_the_text_as_a_control(default_model, tasks):
    site, rows = "blocks.3.mlp_out", swd.text_tokens(1024, split="train")
    how = {"heldout_tokens": swd.text_tokens(512, split="test"), "controls": ("svd_whitened", "svd_causal")}
    how |= {"sparsities": (0.75,), "outer_iterations": 4}
    made = swd.run_study(default_model, {site: site}, tasks[1:], calibration_tokens=rows, **how)
    by_method = {r.method: r for r in made.replacements}
    assert list(by_method) == ["SWD s=0.75", "SVD whitened", "SVD causal"]
    for method, options in (("SVD whitened", {"whitened": True}), ("SVD causal", {"weigh_outputs": True})):
        alone = swd.baselines.svd(default_model, site, tokens=rows, **options)[site]
        assert by_method[method].exact and torch.equal(by_method[method].factors[site].write, alone.write)
        assert abs(by_method[method].fidelity.ce_delta) < 1e-4
    with pytest.raises(ValueError, match="controls svd_whitened, svd_causal go by what the matrices read on text"):
        swd.run_study(default_model, {site: site}, tasks[1:], **how)


def study(model, site, tasks, **how):
    texts = {"calibration_tokens": swd.text_tokens(512, split="train"), "heldout_tokens": swd.text_tokens(512, split="test")}
    return swd.run_study(model, {"it": site}, tasks[1:], outer_iterations=4, cards_per_task=0, **texts, **how)


@pytest.mark.parametrize("asked", [None, ("paper", "svd")])
def test_a_study_of_the_papers_solver_has_it_once(default_model, tasks, asked):
    with_paper = study(default_model, "blocks.3.mlp_out", tasks, sparsities=(0.5,), controls=asked, preset="paper")
    methods = [r.method for r in with_paper.replacements]
    assert methods == ["SWD s=0.5", *(["Neurons pruned s=0.5", "neurons"] if asked is None else []), "SVD"]
    assert not any(r.role == "paper" for r in with_paper.replacements) and "paper" not in with_paper.settings["controls"]


@pytest.mark.slow
def test_where_the_papers_solver_has_too_few_edges(default_model, tasks):
    """By default it is left out there, and the run says so; asked for, it is refused before any work."""
    steps = []
    how = {"sparsities": (0.5, 0.9), "on_step": steps.append}
    with pytest.raises(swd.BudgetError, match=r"SWD \(paper\) s=0\.9 of it: .*needs 2,750; leave control 'paper' out"):
        study(default_model, "blocks.3.attn_o", tasks, controls=("paper",), **how)
    assert steps == []
    left = study(default_model, "blocks.3.attn_o", tasks, controls=None, **how)
    solved = ["SWD s=0.5", "SWD s=0.9", "SWD (paper) s=0.5", "Neurons pruned s=0.5", "Neurons pruned s=0.9"]
    assert [r.method for r in left.replacements] == [*solved, "neurons", "SVD"]
    (said,) = left.settings["controls left out"]
    assert said.startswith("SWD (paper) s=0.9 of it: blocks.3.attn_o (128, 128) keeps 1,638 edges at s=0.9, and the paper")
    assert any(said in step for step in steps)
    assert "too few edges for the paper" in render_report(left) and "controls=" not in run_code(left)


def test_options_of_a_control_are_those_that_its_solver_has():
    others = {"batch_size": 8, "calibration": "dense"}
    of_swd = others | {"outer_iterations": 9, "basis": "auto", "units": "2x", "shrinkage": 0.1, "weigh_outputs": True}
    assert control_options("paper", of_swd) == {**others, "preset": "paper", "precision": "auto"}
    assert control_options("paper", {"precision": "float32"}) == {"preset": "paper", "precision": "float32"}
    pruned = {**others, "weigh_outputs": True, "preset": "pruned", "shrinkage": 0.1, "basis": "neurons"}
    assert control_options("pruned", of_swd) == pruned
