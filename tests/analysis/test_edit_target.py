"""What an edit is to move."""

import pytest
import torch

from swd_lens import baselines
from swd_lens.analysis.edit import edit_unit
from swd_lens.base.errors import EditError
from tests.analysis.edit_checks import PROMPT


def test_through_the_norm_d_has_the_norms_weight(model, exact):
    edit = edit_unit(model, exact, "blocks.1.mlp_out/1", PROMPT, 3, 5, 1, direction="through_norm")
    d = (model.W_U[:, 3] - model.W_U[:, 5]).detach()
    assert torch.equal(edit.target.direction, d * model.ln_final.w.detach())
    assert edit.local_shift == pytest.approx(1, rel=1e-6) and "final norm" in edit.settings["calibration"]


def test_answers_of_several_tokens(default_model):
    factors = baselines.svd(default_model, "blocks.3.mlp_out")
    with pytest.raises(EditError, match=r"an answer is not one token: ' Mary John' is 2 tokens .* single tokens"):
        edit_unit(default_model, factors, "blocks.3.mlp_out/0", "The doctor is", " Mary John", " Ann", 1)
    with pytest.raises(EditError, match="empty prompt: ''"):
        edit_unit(default_model, factors, "blocks.3.mlp_out/0", "", " John", " Mary", 1)
