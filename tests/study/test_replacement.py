"""replace_model: budgets, factors, fine-tuning and samples in one resumable call."""

import dataclasses
import json
import re
from types import SimpleNamespace

import pytest
import torch

import swd_lens as swd
import swd_lens.study.replacement as replacement
from tests.micro import random_tokens, toy_model
from tests.refusals import refuses

TOKENS, HELDOUT = random_tokens(24, 12), random_tokens(24, 12, seed=1)
FEW = {"preset": "quick", "outer_iterations": 4, "refine_rounds": 0, "progress": False}
QUICK = {**FEW, "tokens": TOKENS, "heldout": HELDOUT}
TUNE = {"steps": 6, "batch_size": 4}


@pytest.fixture(scope="module")
def model():
    return toy_model()


def test_the_whole_road_and_its_folder(model, tmp_path):
    logits = model(TOKENS)
    how = {"sparsity": 0.6, "budgets": "kl", "out": tmp_path, "finetune_options": TUNE, "prompts": HELDOUT[:2, :4], **QUICK}
    made = swd.replace_model(model, **how)
    assert torch.equal(model(TOKENS), logits)
    # The same total, spent otherwise; the same supports, other values.
    uniform = swd.factorize(model, "all", sparsity=0.6, **FEW)
    assert made.factors.edges == made.finetuned.edges == uniform.edges == made.allocation.edges
    assert any(made.factors[site].edges != uniform[site].edges for site in uniform)
    for site in made.factors:
        for part in ("read", "write"):
            one, two = getattr(made.factors[site], part), getattr(made.finetuned[site], part)
            assert torch.equal(one != 0, two != 0) and not torch.equal(one, two)
    # The numbers are those of the parts.
    assert made.before == swd.fidelity(model, made.factors, HELDOUT)
    assert made.after == swd.fidelity(model, made.finetuned, HELDOUT)
    # The toy host's text is random, so its own CE may fall: known numbers in their place.
    costs = [dataclasses.replace(made.before, ce=made.before.ce_dense + delta) for delta in (0.4, 0.1, -0.1)]
    assert dataclasses.replace(made, before=costs[0], after=costs[1]).recovered == pytest.approx(0.75)
    assert dataclasses.replace(made, before=costs[2], after=costs[1]).recovered is None
    assert list(made.table()["replacement"]) == ["factorized", "fine-tuned"] and made.best is made.finetuned
    assert set(made.samples[0].by_host) == {"dense", "SWD", "SWD-FT"}
    numbers = json.loads((tmp_path / "replacement.json").read_text())
    assert numbers["before"]["kl"] == made.before.kl and numbers["edges"] == made.factors.edges
    assert "[0]" in (tmp_path / "samples.txt").read_text()
    # Of its own matrices, not of GPT-2's 48.
    assert re.findall(r"(\d+) matrices", repr(made)) == [str(len(made.factors))] and len(made.factors) != 48

    # Again: everything is taken over, nothing is computed anew.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replacement, "allocate", None)
        patch.setattr("swd_lens.solver.solve", None)
        assert swd.replace_model(model, **how).as_dict() == made.as_dict()


def _interrupt(*arguments, **named):
    raise KeyboardInterrupt


def test_what_none_means(model):
    """The paper's preset brings the paper's budgets, calibration and fine-tuning; ours ours."""
    few = {"outer_iterations": 4, "finetune_options": {"steps": 1}, "progress": False}
    tiny = {**few, "tokens": TOKENS, "heldout": HELDOUT}
    ours = swd.replace_model(model, "mlp_out", **tiny).settings
    assert (ours["budgets"], ours["calibration"], ours["finetune"]) == ("kl", "corrected", "best")
    theirs = swd.replace_model(model, "mlp_out", preset="paper", **tiny).settings
    assert (theirs["budgets"], theirs["calibration"], theirs["finetune"]) == ("uniform", "sequential", "paper")
    given = swd.replace_model(model, "mlp_out", sparsity={"blocks.0.*": 0.5, "blocks.1.*": 0.6}, finetune=None, **QUICK)
    assert given.settings["budgets"] == "uniform" and given.factors["blocks.1.mlp_out"].sparsity == pytest.approx(0.6, abs=0.01)
    assert given.finetuned is None and given.after is None and given.recovered is None and given.best is given.factors


def test_another_question_makes_another_allocation(model, tmp_path, monkeypatch):
    named = {**QUICK, "budgets": "error", "finetune": None}
    swd.replace_model(model, "mlp_out", sparsity=0.6, out=tmp_path, **named)
    with pytest.raises(swd.ResumeError, match=r"holds another run: sparsity 0\.6 then, 0\.7 now"):
        swd.replace_model(model, "mlp_out", sparsity=0.7, out=tmp_path, **named)
    made = swd.replace_model(model, "mlp_out", sparsity=0.7, out=tmp_path, overwrite=True, **named)
    assert made.allocation.edges == made.factors.edges and made.factors.sparsity == pytest.approx(0.7, abs=0.01)
    with monkeypatch.context() as patch:
        patch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(free=100))
        patch.setattr("swd_lens.study.replacement.allocate", lambda *_, **__: 1 / 0)
        refuses(OSError, "GB will be written", swd.replace_model, model, "mlp_out", sparsity=0.7, out=tmp_path / "new", **named)


def test_started_again_and_interrupted_it_goes_on(model, tmp_path, monkeypatch):
    """The fine-tuning in the folder is then one of other factors; it is made anew."""
    named = {**QUICK, "budgets": "uniform", "finetune_options": TUNE}
    swd.replace_model(model, "mlp_out", sparsity=0.5, out=tmp_path, **named)
    with monkeypatch.context() as patch:
        patch.setattr(replacement, "finetune_factors", _interrupt)
        with pytest.raises(KeyboardInterrupt):
            swd.replace_model(model, "mlp_out", sparsity=0.6, out=tmp_path, overwrite=True, **named)
    resumed = swd.replace_model(model, "mlp_out", sparsity=0.6, out=tmp_path, **named)
    assert resumed.as_dict() == swd.replace_model(model, "mlp_out", sparsity=0.6, **named).as_dict()
    # A fine-tuning of these very factors, made otherwise, is still refused.
    named["finetune_options"] = {**TUNE, "learning_rate": 0.1}
    refuses(swd.ResumeError, "learning_rate", swd.replace_model, model, "mlp_out", sparsity=0.6, out=tmp_path, **named)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"budgets": "fair"}, "budgets must be one of 'uniform', 'kl', 'error', got 'fair'"),
        ({"tokens": None}, r"fine-tuning needs finetune_tokens="),
        ({"sparsity": {"all": 0.5}, "budgets": "kl"}, "is a mapping already; budgets='kl' needs one number"),
        ({"finetune": "better"}, "better"),
        ({"heldout": None}, "heldout=None: give token rows"),
        ({"heldout": [[99]]}, "token id 99"),
        ({"prompts": ["text"]}, "no tokenizer"),
        ({"finetune_options": {"stepz": 3}}, "did you mean steps"),
        ({"finetune_options": {"out": "x"}}, "finetune_options holds out"),
    ],
)
def test_what_would_fail_at_the_end_fails_at_the_start(model, monkeypatch, changed, message):
    for step in ("factorize", "allocate"):
        monkeypatch.setattr(replacement, step, _interrupt)
    refuses(ValueError, message, swd.replace_model, model, "mlp_out", **{**QUICK, "budgets": "uniform", **changed})
