"""A host whose logits overflow gives no result: every call that measures it says so."""

import pytest
import torch

import swd_lens as swd
from swd_lens.base.divergence import DensePredictions
from swd_lens.tasks.task import Task
from tests.micro import identity_factors, micro_model, split_of

SITE = "blocks.0.mlp_out"
ROWS = torch.tensor([[0, 1, 2, 1], [2, 0, 1, 0]])
SPLITS = [split_of([[0, 2], [1, 2]], [[1], [1]], [[0], [0]], 3, name) for name in ("train", "validation", "test")]
TASK = Task("by hand", *SPLITS, "", False)
MARGIN, PREDICTIONS = "the margin of .* is (nan|-?inf)", "predictions of the {} host have a cross-entropy"


def overflowing():
    """Its activations are finite, its logits are not."""
    model = micro_model()
    with torch.no_grad():
        model.unembed.W_U.mul_(1e38)
    return model


CALLS = {
    "fidelity": lambda model, units: swd.fidelity(model, units, ROWS),
    "attribute": lambda model, units: swd.attribute(model, units, TASK),
    "evaluate": lambda model, units: swd.evaluate(model, units, TASK, swd.attribute(micro_model(), identity_factors(), TASK)),
    "edit_unit": lambda model, units: swd.edit_unit(model, units, f"{SITE}/0", torch.tensor([0, 2]), 1, 0, 2),
    "skill": lambda model, units: swd.skill(model, TASK),
    "screen": lambda model, units: swd.screen(model, TASK),
}


@pytest.mark.parametrize("name", CALLS)
def test_numbers_that_are_not_finite_never_become_a_result(name):
    model = overflowing()
    with pytest.raises(ValueError, match=PREDICTIONS.format("dense") if name == "fidelity" else MARGIN):
        CALLS[name](model, identity_factors())


def test_nor_where_only_the_replaced_host_overflows():
    units = {SITE: swd.Factors(torch.eye(2) * 1e20, torch.ones(2, 2) * 1e20)}
    with pytest.raises(ValueError, match=PREDICTIONS.format("replaced")):
        swd.fidelity(micro_model(), units, ROWS)


@pytest.mark.parametrize("sign", ["positive", "signed", "absolute"])
@pytest.mark.parametrize("score", ["first_order", "attribution_patching", "integrated_gradients", "direct_logit"])
def test_nor_scores_where_margins_are_finite(score, sign):
    """z * dg/dz: z tiny, the write vector huge."""
    model, units = micro_model(), {SITE: swd.Factors(torch.eye(2) * 1e-35, torch.eye(2) * 1e35)}
    with torch.no_grad():
        model.unembed.W_U.mul_(1e4)
    with pytest.raises(ValueError, match=rf"the score \({score}\) of {SITE}/0 is (nan|-?inf): an activation or a gradient"):
        swd.attribute(model, units, TASK, score=score, sign=sign)
    assert all(s.isfinite().all() for s in swd.attribute(model, units, TASK, score="ablation", sign=sign).scores.values())


def test_nor_effects_on_single_tokens():
    model, units = micro_model(), {SITE: swd.Factors(torch.eye(2) * 1e-35, torch.eye(2) * 1e35)}
    with torch.no_grad():
        model.unembed.W_U.mul_(1e4)
    with pytest.raises(ValueError, match=f"the effect of {SITE}/[01] is (nan|-?inf)"):
        swd.per_token_use(model, units, ROWS, by="loss")


def test_of_many_predictions_it_says_how_many():
    logits = torch.zeros(2, 4, 3)
    logits[1, 2, 0] = torch.nan
    with pytest.raises(ValueError, match="1 of 6 predictions of the dense host"):
        DensePredictions(logits, ROWS)
